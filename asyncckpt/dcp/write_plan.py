"""The items of one rank's save plan, and their layout as files. No tensor is resolved for this."""

from __future__ import annotations

import base64
import io
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.dcp.tensor_stream import Resolve
from asyncckpt.dtypes import SUB_BYTE
from asyncckpt.errors import AsyncCkptError, DuplicateNameError, OverlappingShardsError, UnsupportedLeafError
from asyncckpt.format.layout import BoxSpec, Layout, build_layout
from asyncckpt.format.names import SaveId, is_reserved, shard_name
from asyncckpt.format.objects import UnknownTypeError, encode_value, pickled
from asyncckpt.format.state_tree import DICT
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.sharding.dtensor import describe_dtensor
from asyncckpt.sharding.registry import describer_of, is_torch_shard_type, local_tensors, notify_filled
from asyncckpt.sharding.shard_types import LocalShard, Sharded, describe_parts, unsupported_shard, with_fqn, with_leaf
from asyncckpt.state_dict.flatten import PLAIN_TENSORS, SCALARS
from asyncckpt.state_dict.leaf_codecs import encode_torch
from asyncckpt.state_dict.numpy_values import encode_scalar
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.torch_tensors import dtype_name, flat_bytes, is_wrapper, why_unreadable

Paths = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """Where a box of a tensor is stored: file name, offset and length in bytes."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLeaf:
    """The JSON form of a leaf that is no tensor; the coordinator writes it."""

    raw: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRank:
    """The files of a rank; None for the coordinator, which writes its last two after it has all results."""

    rank: int
    result: RankResult | None


def chunks_in(results: Sequence[Sequence[WriteResult]]) -> dict[Any, Any]:
    """Return where boxes are stored, by their index, from the results of all ranks."""
    return {r.index: r.storage_data for part in results for r in part if isinstance(r.storage_data, StoredChunk)}


def rank_result(rank: int, result: RankResult | None) -> WriteResult:
    """Return the result for a rank as a whole. Every rank has one, even if it writes nothing."""
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=StoredRank(rank=rank, result=result))


class ShardsOf:
    """The local shards of one sharded value, with the methods that stock planners call on sharded tensors.

    Args:
        value: The value.
        found: Its description.
        given: What `to_shards` of a registered type returned, if that differs from the shards of `found`.
    """

    def __init__(self, value: Any, found: Sharded, given: Sequence[LocalShard] | None = None) -> None:
        self.value, self.found = value, found
        self._given = found.shards if given is None else given
        self.shards = [shard for shard in found.shards if shard.tensor.numel()]
        if 0 in found.global_shape:  # a tensor without elements is stored too: as the same box on every rank
            whole = torch.empty(found.global_shape, dtype=found.dtype, device="cpu")
            self.shards = [LocalShard(whole, (0,) * len(found.global_shape))]
        self._by_offsets = {shard.offsets: shard for shard in self.shards}

    def commit(self) -> None:
        """Notify a registered type that all its parts are filled."""
        notify_filled(self.value, self._given)

    def size(self) -> torch.Size:
        """Return the global shape."""
        return torch.Size(self.found.global_shape)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, shard.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=self.size(),
                ),
            )
            for shard, chunk in zip(self.shards, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.tensor.shape) for shard in self.shards
        ]

    def tensor_at(self, index: MetadataIndex) -> torch.Tensor:
        """Return the shard that begins at the offsets of `index`."""
        return self._by_offsets[tuple(index.offset or ())].tensor


def flattened(state_dict: Mapping[str, Any], *, as_torch_2_3: bool = False) -> tuple[dict[str, Any], Paths]:
    """Return the leaves and their paths by torch's FQNs. Lists that hold sharded values are flattened.

    Raises:
        DuplicateNameError: Two leaves would have the same FQN.
    """
    leaves: dict[str, Any] = {}
    paths: Paths = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        fqn = ".".join(map(str, path))
        if fqn in leaves:
            raise DuplicateNameError(
                f"two leaves of the state dict have the same FQN {fqn!r}, the keys joined with dots; rename one",
                fqn=fqn,
            )
        leaves[fqn], paths[fqn] = value, path

    traverse = traverse_state_dict_v_2_3 if as_torch_2_3 else traverse_state_dict
    traverse(dict(state_dict), visit, _is_looked_for)
    return leaves, paths


def _is_looked_for(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or describer_of(type(value)) is not None


def described(leaves: Mapping[str, Any], *, is_target: bool = False) -> dict[str, Any]:
    """Return `leaves` with a `ShardsOf` for each value of a type that has shards, even if this process holds all of it.

    In a target, checkpointable tensors are replaced too. In a save they stay: stock planners call their methods for
    items and for the elements of one chunk at a time, which some compute only then.

    Raises:
        UnsupportedLeafError: Shards are invalid, or are inside a value that torch stores as one object; `leaf` is the
            FQN.
        OverlappingShardsError: Two shards of one value have elements in common.
    """
    return {fqn: _described(fqn, value, is_target) for fqn, value in leaves.items()}


def _described(fqn: str, value: Any, is_target: bool) -> Any:
    try:
        if is_checkpointable(value):
            return _chunks_of(fqn, value) if is_target else value
        if describer_of(type(value)) is not None:
            return _shards_of(value)
        for member in _members(value):
            if describer_of(type(member)) is not None:
                kind = type(value).__name__
                text = f"it is in a {kind}, which torch.distributed.checkpoint stores as one object, like every tuple"
                text += "; put it only into dicts and lists, and use flatten_state_dict=True"
                raise unsupported_shard(type(member).__name__, text)
    except OverlappingShardsError as error:
        raise with_fqn(error, fqn) from None
    except UnsupportedLeafError as error:
        text = f"state dict leaf {fqn!r}: {error}"
        raise with_leaf(error, fqn, text) from error.__cause__
    return value


def _shards_of(value: Any) -> ShardsOf:
    found, given = _found_in(value), None
    if isinstance(found, torch.Tensor):  # a registered type that this process holds completely
        given = [LocalShard(found, (0,) * found.dim())]
        if describer_of(type(found)) is not None:
            found = _found_in(found)
    if isinstance(found, torch.Tensor):
        if describer_of(type(found)) is not None:
            kind = type(found).__name__
            text = f"its to_shards returned a registered type, whose to_shards returned another, {kind}; return shards"
            raise unsupported_shard(type(value).__name__, text)
        shards = tuple(given or ())
        found = Sharded(found.dtype, tuple(found.shape), shards, None, type(value).__name__)
    return ShardsOf(value, found, given)


def _found_in(value: Any) -> Sharded | torch.Tensor:
    describe = describer_of(type(value))
    assert describe is not None
    return describe(value)


def is_checkpointable(value: Any) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, implements torch's protocol for chunks of checkpoints.

    The protocol is `torch.distributed._checkpointable`: stock planners take write items, chunks and their elements from
    the methods of such a tensor. A DTensor always has these methods, so its local tensor is checked.
    """
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN_TENSORS:
        return False
    describe = describer_of(type(value))
    if describe not in (None, describe_dtensor):
        return False
    local = value if describe is None else getattr(value, "_local_tensor", None)
    return hasattr(local, "__get_tensor_shard__")


def chunks_to_save(fqn: str, value: torch.Tensor) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Yield the write items that torch's planner creates for a checkpointable tensor, each with its elements.

    Raises:
        UnsupportedLeafError: A chunk cannot be stored, or a method of the tensor failed.
        DuplicateNameError: The FQN is reserved for tensors of one rank.
    """
    try:
        for item in create_default_local_save_plan({fqn: value}, True).items:
            spec = _spec(item)
            yield item, _elements_in(find_state_dict_object({fqn: value}, item.index), spec)
    except AsyncCkptError:
        raise
    except Exception as error:  # whatever the methods of the tensor raise
        kind = type(value).__name__
        raise UnsupportedLeafError(
            f"state dict leaf {fqn!r} of type {kind} cannot be stored: it does not give its chunks: "
            f"{type(error).__name__}: {error}",
            leaf=fqn,
            type_name=kind,
        ) from error


def _chunks_of(fqn: str, value: Any) -> ShardsOf:
    """Return the parts of a checkpointable tensor that a load fills."""
    kind, shape = type(value).__name__, tuple(value.shape)
    parts = []
    if describer_of(type(value)) is None or value.device_mesh.get_coordinate() is not None:
        try:
            for chunk in _create_chunk_list(value):
                if 0 not in chunk.sizes:  # a rank without elements may give such a chunk, with any number of dimensions
                    tensor = value.__get_tensor_shard__(MetadataIndex(fqn, chunk.offsets))
                    parts.append((next(iter(local_tensors(tensor)), tensor), chunk.offsets, chunk.sizes))
        except Exception as error:  # whatever the methods of the tensor raise
            text = f"it does not give its chunks: {type(error).__name__}: {error}"
            raise unsupported_shard(kind, text) from error
    for tensor, _, _ in parts:
        if is_wrapper(tensor):
            raise unsupported_shard(kind, f"a chunk of it is a {type(tensor).__name__}, {_STANDS_FOR}")
    none = Sharded(value.dtype, shape, (), None, kind)
    return ShardsOf(value, describe_parts(kind, shape, parts) if parts else none)


def _members(value: Any) -> Iterable[Any]:
    """Yield all members of a container, recursively; nothing for other values."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, Set, deque)):
        return
    for member in value:
        if type(member) not in SCALARS:
            yield member
            yield from _members(member)


TAG = "dcp"
_SCALARS = SCALARS | {bytes}


def encode_leaf(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the JSON form of a leaf.

    Raises:
        UnsupportedLeafError: The planner resolves the item to something other than bytes.
        Exception: An error of the planner.
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
            f"the planner resolves {item.index.fqn!r} to a {type(found).__name__}, but its plan has bytes",
            leaf=item.index.fqn,
            type_name=type(found).__name__,
        )
    data = found.getvalue()
    kept = {"$": TAG, "v": [name, base64.b64encode(data).decode()]}
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        raw = encode_exactly(value)  # with `add_safe_globals`, torch loads types that the codec does not preserve
        return kept if raw is None and value is not None else raw
    except Exception:  # torch does not document the errors for bytes that it cannot load with weights_only=True
        return kept


def encode_exactly(value: Any) -> Any:
    """Return the JSON form of a value if it preserves all types; else None."""
    try:
        return encode_value(value, _extend) if _keeps_types(value) else None
    except (UnknownTypeError, RecursionError):  # RecursionError: a container contains itself
        return None


def _makes_bytes_by_default(kind: type[DefaultSavePlanner]) -> bool:
    stock = DefaultSavePlanner
    return kind.resolve_data is stock.resolve_data and kind.transform_object is stock.transform_object


def _extend(value: Any) -> tuple[str, Any] | None:
    return encode_torch(value) or encode_scalar(value)


def _keeps_types(value: Any) -> bool:
    """Whether the codec preserves the types in a value: a namedtuple, for example, would become a tuple."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if isinstance(value, (tuple, deque)) and kind not in (tuple, torch.Size, deque):
        return False
    if kind in (list, tuple, set, frozenset, deque):
        return all(map(_keeps_types, value))
    return not isinstance(value, Mapping) or all(map(_keeps_types, (*value.keys(), *value.values())))


def planner_bytes(raw: Any) -> io.BytesIO | None:
    """Return the bytes of a leaf that was stored as the planner's bytes; None for other leaves.

    Raises:
        ValueError: The JSON form is malformed.
    """
    if isinstance(raw, dict) and raw.get("$") == TAG:
        return io.BytesIO(pickled(raw.get("v"))[1])
    return None


def saved_bytes(value: Any) -> io.BytesIO:
    """Return a value in the form of `torch.save`, which planners read."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


class Items(NamedTuple):
    """The items of a plan.

    Attributes:
        tensors: Tensors with their boxes.
        leaves: Leaves that are no tensors.
        empty: Boxes without elements, of tensors that have elements; they are not stored.
    """

    tensors: list[tuple[WriteItem, BoxSpec]]
    leaves: list[WriteItem]
    empty: list[WriteItem]


def sorted_out(items: Iterable[WriteItem]) -> Items:
    """Return items sorted by kind.

    Raises:
        UnsupportedLeafError: A tensor has a dtype or layout that cannot be stored; `leaf` is its FQN.
        DuplicateNameError: A tensor has an FQN that is reserved for tensors of one rank.
    """
    found = Items([], [], [])
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            found.leaves.append(item)
            continue
        spec = _spec(item)
        if 0 in spec.sizes and 0 not in spec.global_shape:
            found.empty.append(item)
        else:
            found.tensors.append((item, spec))
    return found


def _spec(item: WriteItem) -> BoxSpec:
    fqn, data = item.index.fqn, item.tensor_data
    if data is None:
        raise UnsupportedLeafError(f"the planner's item for tensor {fqn!r} has no tensor_data", leaf=fqn)
    dtype = dtype_name(data.properties.dtype)
    if dtype is None or data.properties.layout is not torch.strided:
        raise _unstorable(fqn, data.properties.dtype, data.properties.layout)
    if is_reserved(fqn):
        raise DuplicateNameError(
            f"the tensor {fqn!r} ends in '@rank' and a number: such names are reserved for tensors that belong to one "
            "rank; rename the key",
            fqn=fqn,
        )
    return BoxSpec(
        fqn=fqn,
        dtype=dtype,
        global_shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def leaves_of(planner: Any) -> Mapping[str, Any]:
    """Return what a default planner holds by FQN. A subclass may hold it elsewhere, or plan other FQNs."""
    return getattr(planner, "state_dict", {}) if isinstance(planner, (DefaultSavePlanner, DefaultLoadPlanner)) else {}


def refuse_unstorable(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raise for the first tensor that cannot be stored, before a planner or a stager comes to it.

    These are subclasses whose elements are not in their memory and that give no chunks that are, and sparse, quantized
    and nested tensors, and dtypes that torch's planners do not know the size of, such as int4.

    Args:
        leaves: FQNs and values of a planner; of a sharded value the local shards are checked.

    Raises:
        UnsupportedLeafError: There is one; names it.
        DuplicateNameError: A checkpointable tensor has an FQN that is reserved for tensors of one rank.
    """
    for fqn, value in leaves:
        if type(value) in PLAIN_TENSORS:
            parts = [value]
        elif is_checkpointable(value):
            for _ in chunks_to_save(fqn, value):
                pass
            continue
        else:
            parts = _parts_of(value)
        for tensor in parts:
            if is_wrapper(tensor):
                raise _wrapper(fqn, tensor)
            strange = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
            if strange or dtype_name(tensor.dtype) in (None, *SUB_BYTE):  # of these torch does not know the size
                raise _unstorable(fqn, tensor.dtype, tensor.layout)


def tensor_leaves(state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the FQNs and values of a nested state as stock planners flatten it, without values of registered types."""
    found: list[tuple[str, Any]] = []
    traverse_state_dict(state_dict, lambda path, value: found.append((".".join(map(str, path)), value)))
    for fqn, value in found:
        if is_torch_shard_type(type(value)) or describer_of(type(value)) is None:
            yield fqn, value


def _parts_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardsOf):
        return [shard.tensor for shard in value.shards]
    return local_tensors(value) if isinstance(value, torch.Tensor) else []


def _unstorable(fqn: str, dtype: torch.dtype, layout: torch.layout) -> UnsupportedLeafError:
    text = f"state dict leaf {fqn!r} cannot be stored: a tensor of layout {layout}, dtype {dtype}"
    return UnsupportedLeafError(
        f"{text}; AsyncCheckpointer stores some of these, asyncckpt.dcp none", leaf=fqn, type_name=str(dtype)
    )


def _wrapper(fqn: str, tensor: torch.Tensor) -> UnsupportedLeafError:
    kind = type(tensor).__name__
    advice = "save a plain tensor instead"
    if hasattr(tensor, "__tensor_flatten__"):
        advice = "save it with AsyncCheckpointer, which stores its components, or save a plain tensor instead"
    text = f"state dict leaf {fqn!r} of type {kind} cannot be stored: it is {_STANDS_FOR}; {advice}"
    return UnsupportedLeafError(text, leaf=fqn, type_name=kind)


_STANDS_FOR = "a tensor subclass with a __torch_dispatch__, which computes its elements; they are not in its memory"


def check_target(path: str, item: ReadItem, target: torch.Tensor) -> None:
    """Check that the elements of a tensor that a planner wants to be filled are in its memory.

    Raises:
        UnsupportedLeafError: It is a tensor subclass that computes its elements.
    """
    if is_wrapper(target):
        fqn, kind = item.dest_index.fqn, type(target).__name__
        advice = "; asyncckpt.load fills it" if hasattr(target, "__tensor_flatten__") else ""
        text = f"{path}: target {fqn!r} of type {kind} cannot be filled: it is {_STANDS_FOR}{advice}"
        raise UnsupportedLeafError(text, leaf=fqn, type_name=kind)


def check_object_target(path: str, item: ReadItem, target: Any) -> None:
    """Check that a target for which the checkpoint has no tensor is no tensor subclass with components.

    Such a subclass is saved as a dict of its components. A planner would put that dict in its place, or nothing.

    Raises:
        UnsupportedLeafError: It is one.
    """
    if isinstance(target, torch.Tensor) and not is_torch_shard_type(type(target)):
        check_target(path, item, target)


def resolved_bytes(planner: SavePlanner, item: WriteItem, spec: BoxSpec) -> torch.Tensor:
    """Return the elements that a planner has for an item, as a flat uint8 tensor on their device.

    They are copied only if they must be.

    Raises:
        UnsupportedLeafError: The tensor does not match its plan, or its elements cannot be copied.
        Exception: An error of the planner.
    """
    tensor = _elements_in(planner.resolve_data(item), spec)
    with torch.no_grad():
        found = flat_bytes(tensor)
        assert found.numel() == spec.nbytes == math.prod(spec.sizes) * tensor.itemsize
        return found


def _elements_in(tensor: Any, spec: BoxSpec) -> torch.Tensor:
    """Return the tensor whose memory holds the elements of a resolved tensor.

    Raises:
        UnsupportedLeafError: The tensor does not match its plan, or its elements cannot be copied.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise UnsupportedLeafError(
            f"the planner resolves the tensor {spec.fqn!r} to a {kind}", leaf=spec.fqn, type_name=kind
        )
    tensor = next(iter(local_tensors(tensor)), tensor)
    if is_wrapper(tensor):
        raise _wrapper(spec.fqn, tensor)
    why = why_unreadable(tensor)
    if why is not None:
        kind = type(tensor).__name__
        raise UnsupportedLeafError(f"cannot store {spec.fqn!r}: {why}", leaf=spec.fqn, type_name=kind)
    if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.sizes:
        raise UnsupportedLeafError(
            f"the planner resolves {spec.fqn!r} to {tensor.dtype}{list(tensor.shape)}, but its plan has {spec.dtype}"
            f"{list(spec.sizes)}",
            leaf=spec.fqn,
            type_name=str(tensor.dtype),
        )
    return tensor  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """Settings of a save.

    Attributes:
        path: Directory of the checkpoint.
        threads: Threads that call the planner.
        one_file: One shard file per rank; False: one per tensor.
        copy_ahead_nbytes: Bytes that are copied from devices before they are written.
    """

    path: str
    threads: int
    one_file: bool
    copy_ahead_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """The layout of one rank's files, and the tensors that go into them.

    Attributes:
        items: The items of the plan.
        results: Results of leaves and of boxes without elements, which are not in the files.
        specs: The boxes, in the order of `layout.chunks`.
        layout: The layout of the files.
        tensors: The entries of the tensors for the index.
        resolves: For each box, a function that returns its elements, from the planner.
    """

    items: Items
    results: Sequence[WriteResult]
    specs: Sequence[BoxSpec]
    layout: Layout
    tensors: tuple[TensorEntry, ...]
    resolves: Sequence[Resolve]

    @property
    def n_tensors(self) -> int:
        """Number of tensors that this rank reports: those of which it has the first element."""
        return sum(not any(spec.offsets) for spec in self.specs)

    @property
    def structure(self) -> bytes:
        """The structure of a rank other than the coordinator: only chunks, as the coordinator has the whole tree."""
        part_nbytes = tuple(part.nbytes for part in self.layout.parts)
        return encode_structure(Structure(tree=(DICT, ()), tensors=self.tensors, n_objects=0, part_nbytes=part_nbytes))

    def results_of(self, save_id: SaveId, rank: int) -> list[WriteResult]:
        """Return a result for each item of the save with this ID."""
        names = [shard_name(save_id, rank, part) for part in range(len(self.layout.parts))]
        found = list(self.results)
        for (item, _), chunk in zip(self.items.tensors, self.layout.chunks, strict=True):
            stored = StoredChunk(relative_path=names[chunk.part], offset=chunk.offset_bytes, length=chunk.nbytes)
            found.append(_result(item, chunk.nbytes, stored))
        return found


def lay_out(plan: SavePlan, planner: SavePlanner, *, one_file: bool) -> LaidOut:
    """Lay out the items of this rank's plan as files. Leaves that are no tensors are resolved, tensors are not.

    Raises:
        UnsupportedLeafError, DuplicateNameError: A leaf cannot be stored.
        Exception: An error of the planner.
    """
    items = sorted_out(plan.items)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # IMPORTANT: kernels that compute the state may still run in this thread's stream; writing threads use others.
        torch.cuda.current_stream().synchronize()
    results = [_result(item, 0, StoredLeaf(raw=encode_leaf(planner, item))) for item in items.leaves]
    results += [_result(item, 0, None) for item in items.empty]
    specs = [spec for _, spec in items.tensors]
    layout = build_layout(specs, n_parts=1 if one_file else max(1, min(len(specs), MAX_PARTS)))
    if len(layout.parts) > MAX_PARTS:
        raise UnsupportedLeafError(f"a rank holds more than {MAX_PARTS} boxes of one tensor; use fewer, larger shards")
    return LaidOut(
        items=items,
        results=results,
        specs=specs,
        layout=layout,
        tensors=_entries(specs, layout),
        resolves=[partial(resolved_bytes, planner, item, spec) for item, spec in items.tensors],
    )


def _result(item: WriteItem, nbytes: int, stored: object) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=stored)


def _entries(specs: list[BoxSpec], layout: Layout) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    for spec, chunk in zip(specs, layout.chunks, strict=True):
        known = entries.get(spec.fqn)
        if known is None:
            entries[spec.fqn] = TensorEntry(
                fqn=spec.fqn, dtype=spec.dtype, global_shape=spec.global_shape, chunks=(chunk,)
            )
        else:
            entries[spec.fqn] = known._replace(chunks=(*known.chunks, chunk))
    return tuple(entries.values())
