"""How often to save. Pure."""

from __future__ import annotations

import math

from asyncckpt.errors import ConfigError


def optimal_interval(save_cost_s: float, mtbf_s: float) -> float:
    """Return after how many seconds of training to save again, so that saving and repeating cost least in all.

    Young's first-order answer, sqrt(2 * cost * mtbf) (J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17(9), 1974), with the terms of higher order of J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37:
    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d while d < 2M, else M.

    Args:
        save_cost_s: Seconds that the training loses by one save: of an asynchronous one only what `save()` takes and
            slows down, not what the worker takes to write.
        mtbf_s: Mean seconds between failures of the whole job: of one node, divided by the number of nodes.

    Returns:
        Seconds from the end of one save to the begin of the next. While a save takes longer to be written than that,
        saves follow one another as fast as storage lets them.

    Raises:
        ConfigError: A value that is not positive and finite; `save_cost_s` may be 0.
    """
    _check("save_cost_s", save_cost_s, save_cost_s >= 0)
    _check("mtbf_s", mtbf_s, mtbf_s > 0)
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_cost_s / (2 * mtbf_s)
    return math.sqrt(2 * save_cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - save_cost_s


def _check(name: str, value: float, fits: bool) -> None:
    if not (fits and math.isfinite(value)):
        raise ConfigError(f"{name}={value!r}: expected seconds, finite and positive", field=name, value=repr(value))
