"""Leaves that are no tensors: what a planner makes of them as typed JSON, where nothing is lost, else as its bytes.

A planner gives bytes: by default those of `torch.save`. They are looked into with `weights_only=True`, which runs
nothing; what that refuses, or what the objects codec has no form for, is kept as it is (tag `dcp`), and only a planner,
or a load with `allow_pickle=True`, will unpickle it.
"""

from __future__ import annotations

import base64
import io
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.objects import UnknownTypeError, encode_value, pickled
from asyncckpt.planning.numpy_values import encode_scalar
from asyncckpt.planning.torch_types import encode_torch

TAG = "dcp"
_SCALARS = frozenset({int, float, bool, str, type(None), complex, bytes})


def encode_leaf(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the JSON form of a leaf.

    Raises:
        UnsupportedLeafError: The planner gives something else than bytes.
        Exception: Whatever the planner raises.
    """
    name = "torch.distributed.checkpoint"
    if isinstance(planner, DefaultSavePlanner) and _makes_bytes_by_default(type(planner)):
        value = planner.lookup_object(item.index)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raw = encode_exactly(value)
        if raw is not None or value is None:
            return raw
    found = planner.resolve_data(item)
    if not isinstance(found, io.BytesIO):
        raise UnsupportedLeafError(
            f"the planner resolves {item.index.fqn!r}, which its plan calls bytes, to a {type(found).__name__}",
            leaf=item.index.fqn,
            type_name=type(found).__name__,
        )
    data = found.getvalue()
    try:
        return encode_value(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), _extend)
    except Exception:  # torch names no set of errors for bytes that are not its own, or hold more than it takes
        return {"$": TAG, "v": [name, base64.b64encode(data).decode()]}


def encode_exactly(value: Any) -> Any:
    """Return the JSON form of a value that keeps all its types; None where there is none."""
    if not _keeps_types(value):
        return None
    try:
        return encode_value(value, _extend)
    except UnknownTypeError:
        return None


def _makes_bytes_by_default(kind: type[DefaultSavePlanner]) -> bool:
    stock = DefaultSavePlanner
    return kind.resolve_data is stock.resolve_data and kind.transform_object is stock.transform_object


def _extend(value: Any) -> tuple[str, Any] | None:
    return encode_torch(value) or encode_scalar(value)


def _keeps_types(value: Any) -> bool:
    """Whether no namedtuple is in it, of which the codec would make a tuple, nor another subclass like that."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if isinstance(value, (tuple, deque)) and kind not in (tuple, torch.Size, deque):
        return False
    if kind in (list, tuple, set, frozenset, deque):
        return all(map(_keeps_types, value))
    return not isinstance(value, Mapping) or all(map(_keeps_types, (*value.keys(), *value.values())))


def planner_bytes(raw: Any) -> io.BytesIO | None:
    """Return the bytes of a leaf that was kept as a planner made it; None for others.

    Raises:
        ValueError: Malformed.
    """
    if isinstance(raw, dict) and raw.get("$") == TAG:
        return io.BytesIO(pickled(raw.get("v"))[1])
    return None


def saved_bytes(value: Any) -> io.BytesIO:
    """Return a value in the form that planners read: `torch.save`'s."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
