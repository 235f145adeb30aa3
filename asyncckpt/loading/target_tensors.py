"""A tensor leaf of a target, whatever its type: its global shape, and the plain tensors in it that are filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import AsyncCkptError, ConfigError, OverlappingShardsError, StateLoadError, UnsupportedLeafError
from asyncckpt.format.names import split_per_rank_name
from asyncckpt.libc import read_only
from asyncckpt.loading.placements import Placement
from asyncckpt.sharding.registry import committed, sharded
from asyncckpt.sharding.shard_types import LocalShard, Sharded, named, refused_by_name
from asyncckpt.state_dict.flatten import PLAIN_TENSORS
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.torch_tensors import plain_parameter, torch_dtype, why_no_memory


class TargetTensor(NamedTuple):
    """See the module.

    Attributes:
        value: The leaf.
        fqn: Its name in the target; "" where nobody has named it.
        dtype, global_shape: Of the whole tensor.
        shards: What this process holds of it; may be empty.
    """

    value: Any
    fqn: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    shards: tuple[LocalShard, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the value itself is what is filled."""
        return len(self.shards) == 1 and self.shards[0].tensor is self.value

    def takes(self, saved: SavedTensor) -> bool:
        """Whether `saved` can be filled in as it is: shape and dtype are the same."""
        return (self.dtype, self.global_shape) == (getattr(torch, saved.dtype, None), saved.global_shape)

    def holds_values_of(self, saved: SavedTensor) -> bool:
        """Whether the dtype is of a kind that can hold the values of `saved`, if with fewer digits."""
        return torch.can_cast(torch_dtype(saved.dtype), self.dtype)


def target_tensor(value: Any, fqn: str) -> TargetTensor:
    """Return what is filled of `value`.

    Args:
        value: A tensor, or a value of a type that has shards.
        fqn: Its name, for messages; "" if it has none.

    Raises:
        UnsupportedLeafError: Its shards cannot be what they say.
        OverlappingShardsError: They share elements.
    """
    if type(value) in PLAIN_TENSORS:
        shape = tuple(value.shape)
        return TargetTensor(value, fqn, value.dtype, shape, (LocalShard(value, (0,) * len(shape)),))
    try:
        found = sharded(value)
    except UnsupportedLeafError as error:
        raise refused_by_name(error, fqn, f"target {fqn!r} cannot be filled: {error.message}") from error
    except OverlappingShardsError as error:
        raise named(error, fqn) from None
    if isinstance(found, Sharded):
        return TargetTensor(value, fqn, found.dtype, tuple(found.global_shape), tuple(found.shards))
    if found is None:
        plain = plain_parameter(value)
        return _whole(value, fqn, value) if plain is None else _whole(plain, fqn, plain)
    return _whole(value, fqn, found)


def _whole(value: Any, fqn: str, tensor: torch.Tensor) -> TargetTensor:
    shape = tuple(tensor.shape)
    return TargetTensor(value, fqn, tensor.dtype, shape, (LocalShard(tensor, (0,) * len(shape)),))


def refuse_without_memory(tensors: Iterable[tuple[str, torch.Tensor]], path: str) -> None:
    """Refuse to load into tensors that have no memory.

    Args:
        tensors: FQN, and what is filled.
        path: The checkpoint's, for messages.

    Raises:
        UnsupportedLeafError: One is a meta or fake tensor, or belongs to a torch.func transform; names the first.
    """
    for fqn, tensor in tensors:
        why = why_no_memory(tensor)
        if why is not None:
            kind = type(tensor).__name__
            raise UnsupportedLeafError(
                f"{path}: nothing can be loaded into target tensor {fqn!r}: {why}; nothing was changed. Give the "
                "target memory first (module.to_empty(device=...)), or load without a target and take the new tensors "
                "(module.load_state_dict(asyncckpt.load(path)[...], assign=True)). plan_load takes such targets",
                leaf=fqn,
                type_name=kind,
            )


def refuse_read_only(placements: Sequence[Placement], names: Sequence[str], path: str) -> None:
    """Refuse to load into tensors over memory that is mapped read-only, where a write ends the process.

    Args:
        placements: What is read into which plain tensor.
        names: Their FQNs.
        path: The checkpoint's, for messages.

    Raises:
        UnsupportedLeafError: One is; names it.
    """
    addresses = [tensor.data_ptr() if tensor.is_cpu and tensor.numel() else 0 for _, tensor, _, _ in placements]
    closed = read_only(address for address in addresses if address)
    for address, fqn in zip(addresses, names, strict=True):
        if address in closed:
            raise UnsupportedLeafError(
                f"{path}: nothing can be loaded into target tensor {fqn!r}: its memory is mapped read-only, such as a "
                "file by numpy.memmap(mode='r'); nothing was changed. Map it with mode 'c' or 'r+', or pass a clone()",
                leaf=fqn,
                type_name="Tensor",
            )


def check_fillable(target: TargetTensor, fqn: str) -> None:
    """Refuse a tensor whose elements share memory.

    Raises:
        ConfigError: It is expanded, or is a view in which elements lie upon each other (`unfold`, `as_strided`).
    """
    for tensor, _ in target.shards:
        if shares_own_memory(tensor):
            raise ConfigError(
                f"target tensor {fqn!r} is expanded: its elements share memory, so it cannot be filled; pass a clone()",
                field="state_dict",
                value=fqn,
            )


def shares_own_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie upon each other, so that it cannot hold one value for each."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach, overlaps = 0, False  # in elements: how far the dimensions of smaller strides reach
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride == 0:
            return True
        overlaps |= stride <= reach
        reach += stride * (size - 1)
    return overlaps and _has_doubles(tensor)


def _has_doubles(tensor: torch.Tensor) -> bool:
    """Whether two elements have one place; in a view whose dimensions are interleaved they need not."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    ordered = places.flatten().sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


Filling = tuple[SavedTensor, TargetTensor]
"""A saved tensor, and what it fills."""


def placements_of(fillings: Iterable[Filling]) -> list[Placement]:
    """Return what is read into which plain tensor; parts without elements are left out."""
    return [
        Placement(saved, tensor, offsets)
        for saved, target in fillings
        for tensor, offsets in target.shards
        if tensor.numel()
    ]


def names_of(plain: Iterable[Placement], fillings: Iterable[Filling]) -> list[str]:
    """Return the target's names of `plain`, which have those that were saved, and of what `placements_of` returns."""
    parts = [target.fqn or saved.fqn for saved, target in fillings for tensor, _ in target.shards if tensor.numel()]
    owned = ((saved.fqn, split_per_rank_name(saved.fqn)) for saved, _, _, _ in plain)
    return [*(fqn if own is None else own[0] for fqn, own in owned), *parts]


def conversions(fillings: Iterable[Filling]) -> dict[int, bool]:
    """Return by address of its storage, for each value that is filled, whether what was saved has another dtype."""
    return {
        at: target.dtype != torch_dtype(saved.dtype) for saved, target in fillings for at in memory_of(target.value)
    }


def tell_types(fillings: Iterable[Filling], path: str) -> None:
    """Tell the values of registered types, once each, that all their shards are filled.

    Args:
        fillings: What was filled.
        path: The checkpoint's, for messages.

    Raises:
        StateLoadError: A type's `from_shards` raised.
    """
    for saved, target in fillings:
        if target.is_whole:
            continue
        try:
            committed(target.value, target.shards)
        except Exception as error:
            kind, detail = type(target.value).__name__, f"{type(error).__name__}: {error}"
            raise StateLoadError(
                f"{path}: from_shards() of {saved.fqn!r}, a {kind}, refused what was saved: {detail}",
                path=path,
                fqn=saved.fqn,
                type_name=kind,
                detail=detail,
            ) from error


def memory_of(value: Any) -> set[int]:
    """Return the addresses of the storages that a tensor of any type lies in; none for what has no elements here."""
    try:
        tensors = [tensor for tensor, _ in target_tensor(value, "").shards]
    except AsyncCkptError:
        return set()
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
