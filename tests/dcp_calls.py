"""Stock torch.distributed.checkpoint as the tests call it: one process, its warning about that, targets to fill."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

ERASED = "erased"


def save(state: dict[str, Any], writer: Any, **options: Any) -> Any:
    """Save in this process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], reader: Any, **options: Any) -> dict[str, Any]:
    """Load in this process alone; return the state, which was filled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state


def load_new(reader: Any, planner: Any) -> dict[str, Any]:
    """Return what `planner` puts into an empty state, as torch's converters call it."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def erased(value: Any) -> Any:
    """Return `value` with other elements in its tensors, and other objects."""
    if isinstance(value, torch.Tensor):
        data = torch.full((max(1, value.numel()) * value.itemsize,), 1, dtype=torch.uint8)
        return data.view(value.dtype)[: value.numel()].view(value.shape)
    if isinstance(value, dict):
        return {key: erased(member) for key, member in value.items()}
    if isinstance(value, list) and any(isinstance(member, (dict, torch.Tensor)) for member in value):
        return [erased(member) for member in value]
    return ERASED


def reason(error: CheckpointException) -> BaseException:
    """Return what went wrong on the first rank that failed."""
    return error.failures[min(error.failures)][0]


def failed_save(state: dict[str, Any], writer: Any, **options: Any) -> Any:
    """Save, and return what it fails with."""
    return _failure(lambda: save(state, writer, **options))


def failed_load(state: dict[str, Any], reader: Any, **options: Any) -> Any:
    """Load, and return what it fails with."""
    return _failure(lambda: load(state, reader, **options))


def _failure(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except CheckpointException as error:
        return reason(error)
    raise AssertionError("it did not fail")
