"""Says how often saves would best be made, from what they cost and how often the job fails."""

from __future__ import annotations

import logging
import statistics

from asyncckpt.managing.interval import optimal_interval
from asyncckpt.managing.save_policy import check_seconds

AFTER_SAVES = 4
"""The first one prepares memory and agrees with other ranks, and does not count. Chosen."""

_log = logging.getLogger("asyncckpt")


class Advice:
    """See the module.

    Args:
        mtbf_s: Mean seconds between failures; None: it says nothing.

    Raises:
        ConfigError: No time.
    """

    def __init__(self, mtbf_s: float | None) -> None:
        check_seconds("mtbf_s", mtbf_s)
        self._mtbf_s = mtbf_s
        self._costs: list[float] = []

    def took(self, seconds: float) -> None:
        """A call of `save()` took so long."""
        if self._mtbf_s is None or len(self._costs) >= AFTER_SAVES:
            return
        self._costs.append(seconds)
        if len(self._costs) == AFTER_SAVES:
            cost_s = statistics.median(self._costs[1:])
            _log.info(
                "save() takes %.3f s of the training; with a failure every %.0f s on average, saving every %.0f s "
                "loses least in all (Young, Daly)",
                cost_s,
                self._mtbf_s,
                optimal_interval(cost_s, self._mtbf_s),
            )
