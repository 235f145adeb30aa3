"""Checks the training step of a save: the argument `step`, or the leaf `step` of the state."""

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
        field: Name of the argument, for the message.

    Raises:
        ConfigError: It is something else: a bool, float or text, a negative number, a tensor with dimensions, or one on
            a device (reading it would wait for the device).
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
    """Return the step in the top-level leaf `step` of a state; None: there is no such leaf, or it is no valid step."""
    return _step_of(state_dict.get("step")) if isinstance(state_dict, Mapping) else None


def _step_of(value: Any) -> int | None:
    if type(value) is not int:
        try:  # whatever a user's type raises
            # In some versions bools of numpy and torch have `__index__`. The device of a numpy array is the str "cpu".
            is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
            is_near = str(getattr(value, "device", "cpu")).partition(":")[0] == "cpu"
            if is_bool or not is_near or tuple(getattr(value, "shape", ())):
                return None
            value = operator.index(value)
        except Exception:
            return None
    return value if 0 <= value <= MAX_STEP else None
