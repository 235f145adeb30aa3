"""`Sharded`: which parts of a global tensor this process holds; and `ShardedSlice`, `FlatShard`, described as such."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.errors import ConfigError, OverlappingShardsError, ShardOutOfRangeError, UnsupportedLeafError
from asyncckpt.format.structure import MAX_DIMS, MAX_INT, Box, find_overlap
from asyncckpt.sharding.mesh_layout import Grid, boxes_of_range
from asyncckpt.torch_tensors import NO_MEMORY, SHRUNK, address_of, dtype_name, fits_in_storage


class LocalShard(NamedTuple):
    """A box of a global tensor that this process holds.

    Attributes:
        tensor: A plain tensor whose shape is the sizes of the box; a view of the user's memory.
        offsets: Where the box begins in the global tensor, in elements.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]


class Sharded(NamedTuple):
    """A tensor of which this process holds parts.

    Attributes:
        dtype: Dtype of all parts.
        global_shape: Shape of the whole tensor, in elements.
        shards: The parts, which never overlap; may be empty.
        grid: How the tensor is sharded over a mesh; None: boxes are given one by one.
        type_name: Name of the value's type, for messages.
        is_first: False: another process holds the same parts with `replica_id` 0, so that this copy is not written
            unless the ranks agree on it.
        anchor: The empty local tensor, if there are no shards. Two values with the same anchor are one tensor.
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
        tensor: The part that this process holds; its shape is the sizes of the box.
        global_shape: Shape of the whole tensor, in elements.
        offsets: Offsets of the box in the whole tensor, in elements.
        replica_id: Number of this copy, if several ranks hold the same box. It matters only for a box that is new after
            the first save, until the ranks have met again a few saves later. In these saves the copies with number 0
            are written, so give the other copies other numbers. If all copies have number 0, the writer is that of the
            same box of another tensor of this shape, if there is one (an optimizer's state, for example); else these
            saves fail (`coverage`). After the meeting each box is written once, whatever the numbers.

    Saving or loading a box that reaches beyond the shape raises `ShardOutOfRangeError` with its FQN.

    Raises:
        UnsupportedLeafError: It is not a box of a tensor: the numbers of dimensions differ, an offset is negative, or
            `tensor` is not a tensor.
    """

    __slots__ = ("global_shape", "offsets", "replica_id", "tensor")

    def __init__(
        self, tensor: torch.Tensor, global_shape: Sequence[int], offsets: Sequence[int], replica_id: int = 0
    ) -> None:
        self.tensor, self.replica_id = tensor, replica_id
        self.global_shape, self.offsets = tuple(global_shape), tuple(offsets)
        if not isinstance(tensor, torch.Tensor):
            raise unsupported_shard("ShardedSlice", f"its tensor is a {type(tensor).__name__}")
        if type(replica_id) is not int or replica_id < 0:
            raise unsupported_shard("ShardedSlice", f"its replica_id is {replica_id!r}, expected an integer from 0 on")
        check_form("ShardedSlice", self.global_shape, self.offsets, tuple(tensor.shape))

    def __repr__(self) -> str:
        return f"ShardedSlice({list(self.tensor.shape)} at {list(self.offsets)} of {list(self.global_shape)})"


class ShardedComponent:
    """A component of a sharded composite tensor, such as the scales of the local tensor of a DTensor.

    Args:
        found: What this process holds of the component.
        dims: For each sharded dimension of the whole tensor, the dimension of the component that is cut with it.
    """

    __slots__ = ("dims", "found")

    def __init__(self, found: Sharded, dims: Mapping[int, int]) -> None:
        self.found, self.dims = found, dims


class FlatShard:
    """A range of the elements of a tensor in row-major order: ZeRO, Megatron's distributed optimizer.

    Args:
        tensor: The part that this process holds: a tensor of one dimension, which may be empty.
        global_shape: Shape of the whole tensor, in elements.
        start: Index of the first element of the range in the whole tensor.

    Saving or loading a range that reaches beyond the shape raises `ShardOutOfRangeError` with its FQN.

    Raises:
        UnsupportedLeafError: It is not a range of a tensor: `start` is negative, or `tensor` has not one dimension.
    """

    __slots__ = ("global_shape", "start", "tensor")

    def __init__(self, tensor: torch.Tensor, global_shape: Sequence[int], start: int) -> None:
        self.tensor, self.global_shape, self.start = tensor, tuple(global_shape), start
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            raise unsupported_shard("FlatShard", "expected a tensor of one dimension")
        check_shape("FlatShard", self.global_shape)
        if type(start) is not int or start < 0:
            raise unsupported_shard("FlatShard", f"its start is {start!r}, expected an integer from 0 on")

    def __repr__(self) -> str:
        return f"FlatShard([{self.start}, {self.start + self.tensor.numel()}) of {list(self.global_shape)})"


def describe_slice(value: ShardedSlice) -> Sharded:
    """Return what a `ShardedSlice` describes.

    Raises:
        ShardOutOfRangeError: Its box is not inside its global shape.
    """
    check_box("ShardedSlice", value.global_shape, value.offsets, tuple(value.tensor.shape))
    shard = LocalShard(value.tensor, value.offsets)
    return Sharded(value.tensor.dtype, value.global_shape, (shard,), None, "ShardedSlice", value.replica_id == 0)


def describe_flat(value: FlatShard) -> Sharded:
    """Return what a `FlatShard` describes: boxes that are views of its tensor.

    Raises:
        ShardOutOfRangeError: Its range is not inside its global shape.
    """
    stop, n_elements = value.start + value.tensor.numel(), math.prod(value.global_shape)
    if stop > n_elements:
        one, whole = f"elements [{value.start}, {stop})", f"elements [0, {n_elements})"
        shape = f"{whole} of shape {list(value.global_shape)}; correct start or global shape"
        raise _out_of_range("FlatShard", f"its {one} are not inside {shape}", [one, whole])
    boxes = boxes_of_range(value.global_shape, value.start, value.tensor.numel())
    shards = tuple(
        LocalShard(value.tensor.narrow(0, at, math.prod(sizes)).view(sizes), offsets) for (offsets, sizes), at in boxes
    )
    return Sharded(value.tensor.dtype, value.global_shape, shards, None, "FlatShard")


def describe_parts(type_name: str, global_shape: Sequence[int], parts: Iterable[Sequence[Any]]) -> Sharded:
    """Return the description of parts (tensor, offsets), or (tensor, offsets, sizes) if the tensor is padded.

    Raises:
        ShardOutOfRangeError: A box is not inside the global shape.
        UnsupportedLeafError: A tensor is smaller than its box, or dtypes differ.
        OverlappingShardsError: Two boxes share elements.
    """
    shape = tuple(global_shape)
    shards = []
    for part in parts:
        tensor, offsets = part[0], tuple(part[1])
        if not isinstance(tensor, torch.Tensor):
            raise unsupported_shard(type_name, f"a part of type {type(tensor).__name__}")
        if len(part) > 2:
            tensor = _without_padding(type_name, tensor, tuple(part[2]))
        check_box(type_name, shape, offsets, tuple(tensor.shape))
        shards.append(LocalShard(tensor, offsets))
    if not shards:
        raise unsupported_shard(
            type_name, "it has no part in this process, so its dtype is not known; return an empty part"
        )
    if len({shard.tensor.dtype for shard in shards}) > 1:
        raise unsupported_shard(type_name, "its parts have several dtypes")
    check_disjoint(shards)
    return Sharded(shards[0].tensor.dtype, shape, tuple(shards), None, type_name)


def check_disjoint(shards: Sequence[LocalShard], fqn: str = "") -> None:
    """Check that no element is in two of `shards`.

    Raises:
        OverlappingShardsError: Two of them share elements.
    """
    boxes = [(shard.offsets, tuple(shard.tensor.shape)) for shard in shards]
    overlap = find_overlap(boxes)
    if overlap is not None:
        raise overlap_error(fqn, [boxes[n] for n in overlap])


def overlap_error(fqn: str, boxes: Sequence[Any], where: str = "in this process") -> OverlappingShardsError:
    """Return the error for two boxes of one tensor that share elements."""
    one, other = (f"offsets {list(offsets)} sizes {list(sizes)}" for offsets, sizes in boxes)
    return OverlappingShardsError(
        f"tensor {fqn!r}: two shards {where} share elements but are not the same box: {one}; {other}; correct offsets "
        "and global shape",
        fqn=fqn,
        boxes=[one, other],
    )


def with_fqn(error: OverlappingShardsError, fqn: str) -> OverlappingShardsError:
    """Return an error of `check_disjoint` with its FQN, which was unknown where it was raised."""
    return OverlappingShardsError(str(error).replace("tensor ''", f"tensor {fqn!r}", 1), fqn=fqn, boxes=error.boxes)


def _without_padding(type_name: str, tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    if len(sizes) != tensor.dim() or any(n > size for n, size in zip(sizes, tensor.shape, strict=True)):
        raise unsupported_shard(
            type_name, f"a part of shape {list(tensor.shape)} cannot hold a box of sizes {list(sizes)}"
        )
    for dimension, size in enumerate(sizes):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, size)
    return tensor


def check_shape(type_name: str, global_shape: tuple[int, ...]) -> None:
    """Check that `global_shape` is the shape of a tensor that can be stored.

    Raises:
        UnsupportedLeafError: It is not.
    """
    lengths = all(type(n) is int and n >= 0 for n in global_shape) and len(global_shape) <= MAX_DIMS
    if not lengths or math.prod(n or 1 for n in global_shape) > MAX_INT:
        raise unsupported_shard(type_name, f"its global shape is {global_shape!r}")


def check_form(type_name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Check that offsets and sizes are a box of a tensor of `global_shape`, except that its end is not checked.

    Raises:
        UnsupportedLeafError: They are not.
    """
    check_shape(type_name, global_shape)
    is_box = len(offsets) == len(sizes) == len(global_shape) and all(type(o) is int and o >= 0 for o in offsets)
    if not is_box:
        text = f"offsets {list(offsets)} and sizes {list(sizes)} are not a box of shape {list(global_shape)}"
        raise unsupported_shard(type_name, text)


def check_box(type_name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Check that a box is inside a shape.

    Raises:
        ShardOutOfRangeError: It is not.
        UnsupportedLeafError: The same as from `check_form`.
    """
    check_form(type_name, global_shape, offsets, sizes)
    if any(o + s > n for o, s, n in zip(offsets, sizes, global_shape, strict=True)):
        box, whole = (list(offsets), list(sizes)), ([0] * len(global_shape), list(global_shape))
        one, other = (f"offsets {o} and sizes {s}" for o, s in (box, whole))
        text = f"the box with {one} is not inside the tensor's, with {other}; correct offsets or global shape"
        raise _out_of_range(type_name, text, [f"offsets {o} sizes {s}" for o, s in (box, whole)])


def _out_of_range(type_name: str, why: str, boxes: list[str]) -> ShardOutOfRangeError:
    text = f"a {type_name} cannot be stored: {why}"
    return ShardOutOfRangeError(text, leaf="", type_name=type_name, boxes=boxes)


def unsupported_shard(type_name: str, why: str) -> UnsupportedLeafError:
    """Return the error for a shard that cannot be stored; the caller adds the FQN with `with_leaf`."""
    return UnsupportedLeafError(f"a {type_name} cannot be stored: {why}", leaf="", type_name=type_name)


def with_leaf(error: UnsupportedLeafError, fqn: str, text: str) -> UnsupportedLeafError:
    """Return an error with its FQN, which was unknown where it was raised, and with `text` as its message."""
    facts = {**error.facts(), "leaf": fqn, "fqn": fqn}
    return type(error)(text, **{name: fact for name, fact in facts.items() if name in error.fields})


def describe_tp(
    state_dict: Mapping[str, Any], global_shapes: Mapping[str, Sequence[int]], *, tp_rank: int, tp_size: int
) -> dict[str, Any]:
    """Return `state_dict` with a `ShardedSlice` for each tensor that is split over a tensor parallel group.

    A tensor whose local shape is its global shape is a replica and is not changed. All others must be split evenly
    along one dimension, which is determined from the shapes. Tensors that `global_shapes` does not name, and values
    that are not tensors, are not changed.

    Args:
        state_dict: Local tensors by FQN; a flat dict.
        global_shapes: Shapes of the whole tensors by FQN, in elements.
        tp_rank: Rank of this process in the tensor parallel group.
        tp_size: Number of ranks in that group.

    Raises:
        UnsupportedLeafError: The shapes do not differ in exactly one, evenly split dimension; `leaf` is the FQN.
        ConfigError: `global_shapes` names no tensor of `state_dict`; or `tp_rank` is not below `tp_size`.
    """
    if type(tp_size) is not int or type(tp_rank) is not int or not 0 <= tp_rank < tp_size:
        raise ConfigError(
            f"tp_rank={tp_rank!r} is not a rank below tp_size={tp_size!r}", field="tp_rank", value=repr(tp_rank)
        )
    # It may name more than this rank holds, as with pipeline stages. If it names nothing, its names are wrong.
    if not any(isinstance(state_dict.get(fqn), torch.Tensor) for fqn in global_shapes):
        raise ConfigError(
            f"global_shapes names no tensor of the state dict, which must be flat: global_shapes names "
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
    """Return the boxes of the parts that this process holds."""
    return tuple((shard.offsets, tuple(shard.tensor.shape)) for shard in found.shards)


def sources_of(found: Sharded, *, is_target: bool = False) -> list[torch.Tensor]:
    """Return the tensors of the parts, aligned with `boxes_of`; one empty tensor if there are no parts.

    Args:
        found: What this process holds.
        is_target: Whether the tensors are to be filled; parts on the meta device are accepted then.

    Raises:
        UnsupportedLeafError: A part cannot be stored.
    """
    if dtype_name(found.dtype) is None:
        raise unsupported_shard(found.type_name, f"dtype {found.dtype}")
    sources = []
    for tensor, _ in found.shards:
        if is_target and tensor.is_meta and tensor.layout is torch.strided:
            sources.append(tensor)
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            raise unsupported_shard(found.type_name, f"a part of layout {tensor.layout} on {tensor.device}")
        if tensor.numel() and not address_of(tensor):
            raise unsupported_shard(found.type_name, NO_MEMORY)
        if not fits_in_storage(tensor):
            raise unsupported_shard(found.type_name, SHRUNK)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        sources.append(tensor)
    return sources or [torch.empty(0, dtype=found.dtype, device="cpu")]


def identity_of(found: Sharded, value: object) -> object:
    """Return a key that is equal for two values that are one tensor: the same elements of the same boxes.

    IMPORTANT: this must hold also if this rank holds none of the elements. If two names were one tensor on some ranks
    and two tensors on others, only some of the ranks would write the second.
    """
    places = tuple((memory_identity(t), t.shape, t.stride(), offsets) for t, offsets in found.shards)
    if not places and found.anchor is None:
        return id(value)
    return (found.dtype, found.global_shape, found.grid, places or memory_identity(found.anchor))


def memory_identity(tensor: torch.Tensor | None) -> object:
    """Return a key that is equal for tensors that begin at the same address and are conjugated and negated equally.

    An empty tensor has no address; its storage and the offset in it are used. A conjugated or negated view has the
    address of its base tensor, but other values.
    """
    if tensor is None:
        return None
    place = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return place, tensor.is_conj(), tensor.is_neg()
