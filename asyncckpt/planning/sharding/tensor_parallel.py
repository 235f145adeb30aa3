"""Slices of hand-written tensor parallelism, found by comparing local with global shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncckpt.errors import ConfigError, UnsupportedLeafError
from asyncckpt.planning.sharding.shards import ShardedSlice


def describe_tp(
    state_dict: Mapping[str, Any], global_shapes: Mapping[str, Sequence[int]], *, tp_rank: int, tp_size: int
) -> dict[str, Any]:
    """Return `state_dict` with a `ShardedSlice` for each tensor that is split over a tensor parallel group.

    A tensor whose local shape is its global one is left as it is: a replica. All others must be split along one
    dimension, evenly; along which is found by the shapes. Tensors that `global_shapes` does not name, and what is no
    tensor, are left too.

    Args:
        state_dict: FQN -> local tensor.
        global_shapes: FQN -> shape of the whole tensor, in elements.
        tp_rank, tp_size: Which part of how many this process holds.

    Raises:
        UnsupportedLeafError: No dimension fits, or several do; `leaf` is the FQN.
        ConfigError: `global_shapes` names no tensor of `state_dict`; or the rank makes no sense.
    """
    if type(tp_size) is not int or type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise ConfigError(
            f"tp_rank={tp_rank!r} of tp_size={tp_size!r} is no rank", field="tp_rank", value=repr(tp_rank)
        )
    # It may name more than this rank holds, as with pipeline stages; naming nothing is a mistake in the names.
    if not any(isinstance(state_dict.get(fqn), torch.Tensor) for fqn in global_shapes):
        raise ConfigError(
            f"global_shapes names no tensor of the state dict, which must be flat: it names "
            f"{', '.join(map(repr, list(global_shapes)[:3])) or 'nothing'}; the state dict has "
            f"{', '.join(map(repr, list(state_dict)[:3])) or 'nothing'}",
            field="global_shapes",
            value=", ".join(list(global_shapes)[:3]),
        )
    found: dict[str, Any] = {}
    for fqn, value in state_dict.items():
        wanted = global_shapes.get(fqn)
        is_split = wanted is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(wanted)
        found[fqn] = _slice(fqn, value, tuple(wanted), tp_rank, tp_size) if is_split and wanted is not None else value
    return found


def _slice(fqn: str, tensor: torch.Tensor, wanted: tuple[int, ...], tp_rank: int, tp_size: int) -> ShardedSlice:
    local = tuple(tensor.shape)
    dimensions = []
    if len(local) == len(wanted):
        others = [d for d in range(len(local)) if local[d] != wanted[d]]
        dimensions = [d for d in others if len(others) == 1 and local[d] * tp_size == wanted[d]]
    if len(dimensions) != 1:
        raise UnsupportedLeafError(
            f"{fqn!r} has local shape {list(local)} and global shape {list(wanted)}: no single dimension is split "
            f"evenly over {tp_size} ranks; describe it with a ShardedSlice of your own",
            leaf=fqn,
            type_name=type(tensor).__name__,
        )
    offsets = [0] * len(local)
    offsets[dimensions[0]] = tp_rank * local[dimensions[0]]
    return ShardedSlice(tensor, wanted, offsets)
