"""The training step of a save: which values are accepted as one, as an argument and as the state's leaf `step`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import ConfigError

MAX_STEP = (1 << 63) - 1


def checked_step(value: Any, field: str = "step") -> int:
    """Return a step as an int.

    Args:
        value: An int from 0 to 2**63 - 1: of Python, of numpy, or a 0-d integer tensor in host memory.
        field: What it was given as, for the message.

    Raises:
        ConfigError: Anything else: a bool, float or text, a negative number, a tensor of another device (reading it
            would wait for the device) or with dimensions.
    """
    found = _step_of(value)
    if found is None:
        shown = repr(value)[:80]
        raise ConfigError(
            f"{field}={shown} of type {type(value).__name__}: expected an int from 0 to 2**63 - 1, "
            "of Python or numpy, or a 0-d integer tensor on the CPU",
            field=field,
            value=shown,
        )
    return found


def step_in(state_dict: Any) -> int | None:
    """Return the step in the top-level leaf `step` of a state; None where there is no such leaf or no valid step."""
    return _step_of(state_dict.get("step")) if isinstance(state_dict, Mapping) else None


def _step_of(value: Any) -> int | None:
    if type(value) is not int:
        # Whether bools of numpy and torch have `__index__` depends on the version. The device of an array of numpy is a
        # str, "cpu".
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        is_near = str(getattr(value, "device", "cpu")).partition(":")[0] == "cpu"
        if is_bool or not is_near or tuple(getattr(value, "shape", ())):
            return None
        try:
            value = operator.index(value)
        except Exception:  # of a foreign type's own code
            return None
    return value if 0 <= value <= MAX_STEP else None
