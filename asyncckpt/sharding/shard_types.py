"""What this process holds of a global tensor: the types that say so, and what they are taken for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import ConfigError, OverlappingShardsError, ShardOutOfRangeError, UnsupportedLeafError
from asyncckpt.format.structure import MAX_DIMS, MAX_INT
from asyncckpt.sharding.mesh_layout import Box, Grid, boxes_of_range, overlapping
from asyncckpt.torch_tensors import NO_MEMORY, SHRUNK, address_of, dtype_name, is_whole


class LocalShard(NamedTuple):
    """A box of a global tensor that this process holds.

    Attributes:
        tensor: Plain, its shape the box's sizes; a view of the user's memory.
        offsets: Of the box, in elements of the global tensor.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Sharded(NamedTuple):
    """A tensor of which this process holds parts.

    Attributes:
        dtype: Of all parts.
        global_shape: In elements.
        shards: May be empty; they never overlap.
        grid: How it lies on a mesh; None where boxes are given one by one.
        type_name: Of what it was described by, for messages.
        anchor: Empty, where there are no shards and yet a local tensor: two values with the same one are one tensor.
        is_first: False: another process is said to hold the same, and to come before this one.
    """

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    shards: tuple[LocalShard, ...]
    grid: Grid | None
    type_name: str
    is_first: bool = True
    anchor: torch.Tensor | None = None


class ShardedSlice:
    """A box of a global tensor, for tensor parallelism and pipeline stages without DTensor.

    Args:
        tensor: What this process holds; its shape is the box's sizes.
        global_shape: Of the whole tensor, in elements.
        offsets: Where the box begins in it, in elements.
        replica_id: Of equal boxes on several ranks, which one this is. A box that comes after the first save is
            written by those with 0 until the ranks have met again, a few saves later, so give others to
            copies. Without, it is taken to lie as an equal box of an equal shape does that is known, as an optimizer's
            state does; else the saves until then fail (`coverage`). From then on equal boxes are written once,
            whatever it is.

    A box that reaches beyond the shape is refused by whoever saves or loads it, by its name: `ShardOutOfRangeError`.

    Raises:
        UnsupportedLeafError: No box of any tensor: other numbers of dimensions, a negative offset, no tensor.
    """

    __slots__ = ("global_shape", "offsets", "replica_id", "tensor")

    def __init__(
        self, tensor: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int], replica_id: int = 0
    ) -> None:
        self.tensor, self.replica_id = tensor, replica_id
        self.global_shape, self.offsets = tuple(global_shape), tuple(offsets)
        if not isinstance(tensor, torch.Tensor):
            raise refused("ShardedSlice", f"its tensor is a {type(tensor).__name__}")
        if type(replica_id) is not int or replica_id < 0:
            raise refused("ShardedSlice", f"its replica_id is {replica_id!r}, expected an integer from 0 on")
        check_form("ShardedSlice", self.global_shape, self.offsets, tuple(tensor.shape))

    def __repr__(self) -> str:
        return f"ShardedSlice({list(self.tensor.shape)} at {list(self.offsets)} of {list(self.global_shape)})"


class FlatShard:
    """A range of the elements of a tensor in row-major order: ZeRO, Megatron's distributed optimizer.

    Args:
        tensor: One-dimensional; what this process holds. May be empty.
        global_shape: Of the whole tensor, in elements.
        start: Which element of the whole the range begins at.

    A range that reaches beyond the shape is refused by whoever saves or loads it, by its name: `ShardOutOfRangeError`.

    Raises:
        UnsupportedLeafError: No range of any tensor: a negative start, or the tensor has not one dimension.
    """

    __slots__ = ("global_shape", "start", "tensor")

    def __init__(self, tensor: torch.Tensor, global_shape: Sequence[int], start: int) -> None:
        self.tensor, self.global_shape, self.start = tensor, tuple(global_shape), start
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            raise refused("FlatShard", "expected a tensor of one dimension")
        check_shape("FlatShard", self.global_shape)
        if type(start) is not int or start < 0:
            raise refused("FlatShard", f"its elements begin at {start!r}, expected an integer from 0 on")

    def __repr__(self) -> str:
        return f"FlatShard([{self.start}, {self.start + self.tensor.numel()}) of {list(self.global_shape)})"


def of_slice(value: ShardedSlice) -> Sharded:
    """Return what a `ShardedSlice` describes.

    Raises:
        ShardOutOfRangeError: Its box does not lie in its shape.
    """
    check_box("ShardedSlice", value.global_shape, value.offsets, tuple(value.tensor.shape))
    shard = LocalShard(value.tensor, value.offsets)
    return Sharded(value.tensor.dtype, value.global_shape, (shard,), None, "ShardedSlice", value.replica_id == 0)


def of_flat(value: FlatShard) -> Sharded:
    """Return what a `FlatShard` describes: boxes that are views of its tensor.

    Raises:
        ShardOutOfRangeError: Its range does not lie in its shape.
    """
    stop, n_elements = value.start + value.tensor.numel(), math.prod(value.global_shape)
    if stop > n_elements:
        one, whole = f"elements [{value.start}, {stop})", f"elements [0, {n_elements})"
        shape = f"{whole} of shape {list(value.global_shape)}; correct start or global shape"
        raise _out_of_range("FlatShard", f"{one} do not lie in the tensor's, {shape}", [one, whole])
    boxes = boxes_of_range(value.global_shape, value.start, value.tensor.numel())
    shards = tuple(
        LocalShard(value.tensor.narrow(0, at, math.prod(sizes)).view(sizes), offsets) for (offsets, sizes), at in boxes
    )
    return Sharded(value.tensor.dtype, value.global_shape, shards, None, "FlatShard")


def of_parts(type_name: str, global_shape: Sequence[int], parts: Iterable[Sequence[Any]]) -> Sharded:
    """Return what is described by (tensor, offsets), or (tensor, offsets, sizes) where the tensor is padded.

    Raises:
        ShardOutOfRangeError: A box lies outside.
        UnsupportedLeafError: A tensor is smaller than its box, or dtypes differ.
        OverlappingShardsError: Two boxes share elements.
    """
    shape = tuple(global_shape)
    shards = []
    for part in parts:
        tensor, offsets = part[0], tuple(part[1])
        if not isinstance(tensor, torch.Tensor):
            raise refused(type_name, f"a part of type {type(tensor).__name__}")
        if len(part) > 2:
            tensor = _without_padding(type_name, tensor, tuple(part[2]))
        check_box(type_name, shape, offsets, tuple(tensor.shape))
        shards.append(LocalShard(tensor, offsets))
    if not shards:
        raise refused(type_name, "it has no part in this process, so its dtype is not known; return an empty one")
    if len({shard.tensor.dtype for shard in shards}) > 1:
        raise refused(type_name, "its parts have several dtypes")
    check_apart(shards)
    return Sharded(shards[0].tensor.dtype, shape, tuple(shards), None, type_name)


def check_apart(shards: Sequence[LocalShard], fqn: str = "") -> None:
    """Check that no element is in two of `shards`.

    Raises:
        OverlappingShardsError: One is.
    """
    twice = overlapping([(shard.offsets, tuple(shard.tensor.shape)) for shard in shards])
    if twice is not None:
        raise overlap_error(fqn, twice)


def overlap_error(fqn: str, boxes: Sequence[Any], where: str = "in this process") -> OverlappingShardsError:
    """Return the error for two boxes of one tensor that share elements."""
    one, other = (f"offsets {list(offsets)} sizes {list(sizes)}" for offsets, sizes in boxes)
    return OverlappingShardsError(
        f"tensor {fqn!r}: two shards {where} hold the same elements and are not the same box: {one}; {other}; "
        "correct offsets and global shape",
        fqn=fqn,
        boxes=[one, other],
    )


def named(error: OverlappingShardsError, fqn: str) -> OverlappingShardsError:
    """Return an error of `check_apart` that was raised where the FQN was not known, with it."""
    return OverlappingShardsError(str(error).replace("tensor ''", f"tensor {fqn!r}", 1), fqn=fqn, boxes=error.boxes)


def _without_padding(type_name: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    if len(sizes) != tensor.dim() or any(n > size for n, size in zip(sizes, tensor.shape, strict=True)):
        raise refused(type_name, f"a part of shape {list(tensor.shape)} is to hold a box of sizes {list(sizes)}")
    for dimension, size in enumerate(sizes):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, size)
    return tensor


def check_shape(type_name: str, global_shape: tuple[int, ...]) -> None:
    """Check that `global_shape` is one.

    Raises:
        UnsupportedLeafError: It is not.
    """
    lengths = all(type(n) is int and n >= 0 for n in global_shape) and len(global_shape) <= MAX_DIMS
    if not lengths or math.prod(n or 1 for n in global_shape) > MAX_INT:
        raise refused(type_name, f"its global shape is {global_shape!r}")


def check_form(type_name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Check that offsets and sizes may be a box of a tensor of such a shape, wherever it ends.

    Raises:
        UnsupportedLeafError: They may not.
    """
    check_shape(type_name, global_shape)
    is_one = len(offsets) == len(sizes) == len(global_shape) and all(type(o) is int and o >= 0 for o in offsets)
    if not is_one:
        text = f"the box with offsets {list(offsets)} and sizes {list(sizes)} does not lie in {list(global_shape)}"
        raise refused(type_name, text)


def check_box(type_name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Check that a box lies in a shape.

    Raises:
        ShardOutOfRangeError: It does not.
        UnsupportedLeafError: As `check_form`.
    """
    check_form(type_name, global_shape, offsets, sizes)
    if any(o + s > n for o, s, n in zip(offsets, sizes, global_shape, strict=True)):
        box, whole = (list(offsets), list(sizes)), ([0] * len(global_shape), list(global_shape))
        one, other = (f"offsets {o} and sizes {s}" for o, s in (box, whole))
        text = f"the box with {one} does not lie in the tensor's, with {other}; correct offsets or global shape"
        raise _out_of_range(type_name, text, [f"offsets {o} sizes {s}" for o, s in (box, whole)])


def _out_of_range(type_name: str, why: str, boxes: list[str]) -> ShardOutOfRangeError:
    text = f"a {type_name} cannot be stored: {why}"
    return ShardOutOfRangeError(text, leaf="", type_name=type_name, boxes=boxes)


def refused(type_name: str, why: str) -> UnsupportedLeafError:
    """Return the error for a shard that cannot be; whoever knows its name adds it."""
    return UnsupportedLeafError(f"a {type_name} cannot be stored: {why}", leaf="", type_name=type_name)


def refused_by_name(error: UnsupportedLeafError, fqn: str, text: str) -> UnsupportedLeafError:
    """Return an error that was raised where the FQN was not known, with it, and with `text` for its message."""
    facts = {**error.facts(), "leaf": fqn, "fqn": fqn}
    return type(error)(text, **{name: fact for name, fact in facts.items() if name in error.fields})


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


def boxes_of(found: Sharded) -> tuple[Box, ...]:
    """Return the boxes of what a process holds."""
    return tuple((shard.offsets, tuple(shard.tensor.shape)) for shard in found.shards)


def sources_of(found: Sharded, *, is_target: bool = False) -> list[torch.Tensor]:
    """Return the tensors to be copied, aligned with the boxes; an empty one where there are no boxes.

    `is_target`: they are filled, and those on the meta device are taken too.

    Raises:
        UnsupportedLeafError: One of them cannot be stored.
    """
    if dtype_name(found.dtype) is None:
        raise refused(found.type_name, f"dtype {found.dtype}")
    sources = []
    for tensor, _ in found.shards:
        if is_target and tensor.is_meta and tensor.layout is torch.strided:
            sources.append(tensor)
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            raise refused(found.type_name, f"a part of layout {tensor.layout} on {tensor.device}")
        if tensor.numel() and not address_of(tensor):
            raise refused(found.type_name, NO_MEMORY)
        if not is_whole(tensor):
            raise refused(found.type_name, SHRUNK)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        sources.append(tensor)
    return sources or [torch.empty(0, dtype=found.dtype, device="cpu")]


def identity_of(found: Sharded, value: object) -> object:
    """Return what is equal for two values that are one tensor: the same elements of the same boxes.

    IMPORTANT: also where this rank holds none of the elements. Were two names one tensor on some ranks and two on
    others, the second would be written by a few of them only.
    """
    places = tuple((place_of(t), t.shape, t.stride(), offsets) for t, offsets in found.shards)
    if not places and found.anchor is None:
        return id(value)
    return (found.dtype, found.global_shape, found.grid, places or place_of(found.anchor))


def place_of(tensor: torch.Tensor | None) -> object:
    """Return where a tensor lies, its address, or of an empty one its storage and where in it; and what it makes of it.

    A conjugated or negated view lies where the tensor does, and has other values.
    """
    if tensor is None:
        return None
    place = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return place, tensor.is_conj(), tensor.is_neg()
