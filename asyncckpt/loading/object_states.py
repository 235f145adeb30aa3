"""Calls of `load_state_dict` of objects in the target, and the conversions that are undone afterwards.

`torch.optim.Optimizer.load_state_dict` converts the state of a parameter to the parameter's dtype: a float32 moment of
a bfloat16 parameter would be rounded, an integer would change its type. It also turns all mappings into dicts, and
strings into lists. All of that is replaced by what was saved, if the conversion is the only thing that was done to it.
What an object itself makes of its state stays; where a tensor has another dtype afterwards, that is logged.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.distributed.process_group import has_other_ranks
from asyncckpt.errors import StateLoadError
from asyncckpt.format.state_tree import Path, fqn_of
from asyncckpt.loading.target_tensors import memory_of
from asyncckpt.state_dict.stateful import unwrapped

_log = logging.getLogger("asyncckpt.loading")

Filled = Mapping[int, bool]
"""By storage address, for each tensor that the same load fills: whether its values were converted to its dtype."""


def load_state(value: Any, state: Any, fqn: str, path: str, filled: Filled | None = None) -> None:
    """Call `load_state_dict` of `value`.

    Args:
        value: A module, an optimizer, or anything else.
        state: As it was saved.
        fqn: Its name, for messages.
        path: The checkpoint's, for messages.
        filled: The state of parameters that were converted stays converted: this run resumes in another precision.

    Raises:
        StateLoadError: `load_state_dict` raised.
    """
    value = unwrapped(value) if isinstance(value, torch.nn.Module) else value
    dtypes = {} if isinstance(value, torch.nn.Module) else _dtypes(state)
    entries = _entries(state) if isinstance(value, torch.optim.Optimizer) else []
    try:
        if isinstance(value, torch.nn.Module) and takes_strict(value):
            value.load_state_dict(state, strict=False)  # what is missing has been reported, by the rules of `load`
        else:
            value.load_state_dict(state)
    except Exception as error:
        raise state_load_error(error, value, fqn, path) from error
    if entries:
        _put_back(value, entries, filled or {})
    if dtypes:
        _report_dtypes(value, dtypes, fqn, path)


def state_load_error(error: Exception, value: Any, fqn: str, path: str) -> StateLoadError:
    """Return the error for an object whose `load_state_dict()` raised."""
    kind, detail = type(value).__name__, f"{type(error).__name__}: {error}"
    return StateLoadError(
        f"{path}: load_state_dict() of {fqn!r}, a {kind}, refused what was saved: {detail}",
        path=path,
        fqn=fqn,
        type_name=kind,
        detail=detail,
    )


def may_ask(value: Any) -> bool:
    """Whether `state_dict()` of an object surely waits for no other rank: a load on one rank alone would never end."""
    return not has_other_ranks() or getattr(type(value), "state_dict", None) is torch.optim.Optimizer.state_dict


def takes_strict(module: torch.nn.Module) -> bool:
    """Whether a module's `load_state_dict` has the argument `strict`."""
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    return any(p.name == "strict" or p.kind is p.VAR_KEYWORD for p in parameters)


def _entries(state: Any) -> list[dict[Any, Any]]:
    """Return each parameter's saved state, in the order of the groups; [] if it is not an optimizer's state."""
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return [dict(state["state"].get(number) or {}) for number in numbers]
    except (TypeError, KeyError, ValueError, AttributeError):
        return []


def _put_back(optimizer: torch.optim.Optimizer, entries: list[dict[Any, Any]], filled: Filled) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(parameters) != len(entries):
        return
    for parameter, saved in zip(parameters, entries, strict=True):
        state = optimizer.state.get(parameter)
        if not isinstance(state, dict) or any(filled.get(address) for address in memory_of(parameter)):
            continue
        for key in saved.keys() & state.keys():
            if key != "step" or not isinstance(
                saved[key], torch.Tensor
            ):  # kernels need `step` in the form that the optimizer has made
                state[key] = _as_saved(saved[key], state[key], parameter)


def _as_saved(saved: Any, loaded: Any, parameter: torch.Tensor) -> Any:
    """Return what was saved where `loaded` is that after the conversions of torch's optimizers; else `loaded`."""
    if isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if _is_converted(saved, loaded, parameter.dtype) else loaded
    if isinstance(saved, (str, bytes)):
        return saved if type(loaded) is type(saved) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        made = copy.copy(saved)
        for key in saved:
            dict.__setitem__(made, key, _as_saved(saved[key], loaded[key], parameter))
        return made
    if isinstance(saved, (list, tuple, deque)) and type(loaded) is type(saved) and len(saved) == len(loaded):
        members = [_as_saved(*pair, parameter) for pair in zip(saved, loaded, strict=True)]
        return deque(members, saved.maxlen) if isinstance(saved, deque) else type(saved)(members)
    return loaded


def _is_converted(saved: torch.Tensor, loaded: Any, dtype: torch.dtype) -> bool:
    """Whether `loaded` has the values of `saved`, and that dtype in place of its own."""
    if not isinstance(loaded, torch.Tensor) or saved.shape != loaded.shape:
        return False
    if loaded.dtype != dtype or saved.dtype == dtype:
        return False
    there, made = _local(loaded).detach(), _local(saved).detach().to(device=loaded.device, dtype=dtype)
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (there, made)))


def _local(tensor: Any) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _dtypes(state: Any, path: Path = ()) -> dict[Path, torch.dtype]:
    """Return the dtypes of the tensors of a state, by their path in it."""
    if isinstance(state, torch.Tensor):
        return {path: state.dtype}
    if isinstance(state, dict):
        pairs: Any = state.items()
    else:
        pairs = enumerate(state) if isinstance(state, (list, tuple, deque)) else ()
    return {at: dtype for key, value in pairs for at, dtype in _dtypes(value, (*path, key)).items()}


def _report_dtypes(value: Any, saved: Mapping[Path, torch.dtype], fqn: str, path: str) -> None:
    """Log which tensors of an object have another dtype than was saved, as far as its `state_dict()` shows."""
    if not may_ask(value):
        return
    try:
        now = _dtypes(value.state_dict())
    except Exception:  # raised by the object's own code; the load itself has succeeded
        return
    changed = [(at, dtype) for at, dtype in saved.items() if now.get(at, dtype) != dtype]
    if changed:
        at, dtype = changed[0]
        _log.warning(
            "%s: load_state_dict() of %r, a %s, has converted %d of its tensors: %r was saved as %s and is %s now",
            path,
            fqn,
            type(value).__name__,
            len(changed),
            fqn_of((fqn, *at)),
            str(dtype).removeprefix("torch."),
            str(now[at]).removeprefix("torch."),
        )
