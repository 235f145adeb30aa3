"""What a plan gives to one rank, laid out as files before a tensor is resolved."""

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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
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
    """Where the bytes of a tensor's box lie: file name, offset and length in bytes."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLeaf:
    """The JSON form of a leaf that is no tensor; the coordinator writes it."""

    raw: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRank:
    """A rank's files; None for the coordinator, whose last two are written when all else is known."""

    rank: int
    result: RankResult | None


def chunks_in(results: Sequence[Sequence[WriteResult]]) -> dict[Any, Any]:
    """Return where boxes lie, by their index, out of what all ranks have said."""
    return {r.index: r.storage_data for part in results for r in part if isinstance(r.storage_data, StoredChunk)}


def rank_result(rank: int, result: RankResult | None) -> WriteResult:
    """Return the entry that stands for a whole rank. Every rank has one, with nothing to write too."""
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=StoredRank(rank=rank, result=result))


class ShardsOf:
    """What this process holds of one sharded value, with the methods by which stock planners ask a tensor for it."""

    def __init__(self, value: Any, found: Sharded, given: Sequence[LocalShard] | None = None) -> None:
        """`given`: what a registered type's `to_shards` gave, where that is something else than the boxes."""
        self.value, self.found = value, found
        self._given = found.shards if given is None else given
        self.shards = [shard for shard in found.shards if shard.tensor.numel()]
        if 0 in found.global_shape:  # stored all the same: as one box, on every rank alike
            whole = torch.empty(found.global_shape, dtype=found.dtype, device="cpu")
            self.shards = [LocalShard(whole, (0,) * len(found.global_shape))]
        self._by_offsets = {shard.offsets: shard for shard in self.shards}

    def commit(self) -> None:
        """Tell a registered type that all its parts are filled."""
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
        """Return the box that begins where `index` says."""
        return self._by_offsets[tuple(index.offset or ())].tensor


def flattened(state_dict: Mapping[str, Any], *, as_torch_2_3: bool = False) -> tuple[dict[str, Any], Paths]:
    """Return the leaves by name, and their paths, as torch names them; lists that hold sharded values are looked into.

    Raises:
        DuplicateNameError: Two leaves get one name.
    """
    leaves: dict[str, Any] = {}
    paths: Paths = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        fqn = ".".join(map(str, path))
        if fqn in leaves:
            raise DuplicateNameError(
                f"two leaves of the state dict are both called {fqn!r} once their keys are joined by dots; rename one",
                fqn=fqn,
            )
        leaves[fqn], paths[fqn] = value, path

    traverse = traverse_state_dict_v_2_3 if as_torch_2_3 else traverse_state_dict
    traverse(dict(state_dict), visit, _is_looked_for)
    return leaves, paths


def _is_looked_for(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or describer_of(type(value)) is not None


def described(leaves: Mapping[str, Any], *, is_target: bool = False) -> dict[str, Any]:
    """Return `leaves` with a `ShardsOf` for each value of a type that has shards, also where all of it is here.

    Checkpointable tensors get one in a target. To be saved, they stay as they are: stock planners ask them for their
    items, and for the elements of one chunk at a time, which some make only then.

    Raises:
        UnsupportedLeafError: Invalid shards, or shards in what torch stores as one object; `leaf` is the FQN.
        OverlappingShardsError: Two shards of one value share elements.
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
                text = f"it lies in a {kind}, which torch.distributed.checkpoint stores as one object, like every tuple"
                text += "; put it into dicts and lists only, and leave flatten_state_dict on"
                raise unsupported_shard(type(member).__name__, text)
    except OverlappingShardsError as error:
        raise with_fqn(error, fqn) from None
    except UnsupportedLeafError as error:
        text = f"state dict leaf {fqn!r}: {error}"
        raise with_leaf(error, fqn, text) from error.__cause__
    return value


def _shards_of(value: Any) -> ShardsOf:
    found, given = _found_in(value), None
    if isinstance(found, torch.Tensor):  # of a registered type, all of which is here
        given = [LocalShard(found, (0,) * found.dim())]
        if describer_of(type(found)) is not None:
            found = _found_in(found)
    if isinstance(found, torch.Tensor):
        if describer_of(type(found)) is not None:
            kind = type(found).__name__
            text = f"its to_shards gave a registered type, and that one's gave another, {kind}; one must give shards"
            raise unsupported_shard(type(value).__name__, text)
        shards = tuple(given or ())
        found = Sharded(found.dtype, tuple(found.shape), shards, None, type(value).__name__)
    return ShardsOf(value, found, given)


def _found_in(value: Any) -> Sharded | torch.Tensor:
    describe = describer_of(type(value))
    assert describe is not None
    return describe(value)


def is_checkpointable(value: Any) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, gives its chunks by torch's protocol for checkpoints.

    The protocol is `torch.distributed._checkpointable`: stock planners take write items, chunks and their elements from
    the methods of such a tensor. A DTensor has these methods itself; what counts is whether its local tensor has them.
    """
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN_TENSORS:
        return False
    describe = describer_of(type(value))
    if describe not in (None, describe_dtensor):
        return False
    local = value if describe is None else getattr(value, "_local_tensor", None)
    return hasattr(local, "__get_tensor_shard__")


def chunks_to_save(fqn: str, value: torch.Tensor) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Yield the write items of a checkpointable tensor as torch's planner makes them, each with its elements.

    Raises:
        UnsupportedLeafError: A chunk cannot be stored, or a method of the tensor failed.
        DuplicateNameError: A name that is reserved for tensors of one rank.
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
    """Return what a load fills of a checkpointable tensor."""
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
    """Yield what is in a container, and in those in it; nothing for other values."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, Set, deque)):
        return
    for member in value:
        if type(member) not in SCALARS:
            yield member
            yield from _members(member)


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


class Items(NamedTuple):
    """A plan's items: tensors with their boxes, and leaves that are bytes.

    `empty` are boxes without elements of tensors that have some: nothing of them is stored.
    """

    tensors: list[tuple[WriteItem, BoxSpec]]
    leaves: list[WriteItem]
    empty: list[WriteItem]


def sorted_out(items: Iterable[WriteItem]) -> Items:
    """Tell tensors from leaves.

    Raises:
        UnsupportedLeafError: A tensor of a dtype or layout that cannot be stored; `leaf` is its FQN.
        DuplicateNameError: A name that is reserved for tensors of one rank.
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
        raise UnsupportedLeafError(f"the planner's item for tensor {fqn!r} says nothing of its shape", leaf=fqn)
    dtype = dtype_name(data.properties.dtype)
    if dtype is None or data.properties.layout is not torch.strided:
        raise UnsupportedLeafError(
            f"state dict leaf {fqn!r} cannot be stored: a tensor of layout {data.properties.layout}, dtype "
            f"{data.properties.dtype}",
            leaf=fqn,
            type_name=str(data.properties.dtype),
        )
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


def refuse_wrappers(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuse tensors of subclasses whose elements are not their memory's, unless they give chunks that are.

    Args:
        leaves: Names and values, as a planner has them: of a sharded one, what this process holds counts.

    Raises:
        UnsupportedLeafError: Naming the first.
        DuplicateNameError: A checkpointable tensor has a name that is reserved for tensors of one rank.
    """
    for fqn, value in leaves:
        if is_checkpointable(value):
            for _ in chunks_to_save(fqn, value):
                pass
            continue
        for tensor in _parts_of(value):
            if is_wrapper(tensor):
                raise _wrapper(fqn, tensor)


def tensor_leaves(state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a nested state, as stock planners name them, but for registered types."""
    found: list[tuple[str, Any]] = []
    traverse_state_dict(state_dict, lambda path, value: found.append((".".join(map(str, path)), value)))
    for fqn, value in found:
        if is_torch_shard_type(type(value)) or describer_of(type(value)) is None:
            yield fqn, value


def _parts_of(value: Any) -> list[torch.Tensor]:
    if type(value) in PLAIN_TENSORS:
        return []
    if isinstance(value, ShardsOf):
        return [shard.tensor for shard in value.shards]
    return local_tensors(value) if isinstance(value, torch.Tensor) else []


def _wrapper(fqn: str, tensor: torch.Tensor) -> UnsupportedLeafError:
    kind = type(tensor).__name__
    text = f"state dict leaf {fqn!r} of type {kind} cannot be stored: it is {_STANDS_FOR}; save a plain tensor instead"
    return UnsupportedLeafError(text, leaf=fqn, type_name=kind)


_STANDS_FOR = "a tensor subclass with a __torch_dispatch__, which computes its elements; they do not lie in its memory"


def check_target(path: str, item: ReadItem, target: torch.Tensor) -> None:
    """Check that the elements of what a planner would have filled lie where its address says.

    Raises:
        UnsupportedLeafError: It is a tensor subclass that stands for others.
    """
    if is_wrapper(target):
        fqn, kind = item.dest_index.fqn, type(target).__name__
        text = f"{path}: target {fqn!r} of type {kind} cannot be filled: it is {_STANDS_FOR}"
        raise UnsupportedLeafError(text, leaf=fqn, type_name=kind)


def bytes_of(tensor: Any, spec: BoxSpec) -> torch.Tensor:
    """Return the elements of what a planner resolved as a flat uint8 tensor on its device: a copy only if need be.

    Raises:
        UnsupportedLeafError: It is not what the plan says, or has no elements that can be copied.
    """
    tensor = _elements_in(tensor, spec)
    with torch.no_grad():
        found = flat_bytes(tensor)
        assert found.numel() == spec.nbytes == math.prod(spec.sizes) * tensor.itemsize
        return found


def _elements_in(tensor: Any, spec: BoxSpec) -> torch.Tensor:
    """Return the tensor whose memory holds the elements of what a planner resolved.

    Raises:
        UnsupportedLeafError: It is not what the plan says, or has no elements that can be copied.
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
            f"the planner resolves {spec.fqn!r} to {tensor.dtype}{list(tensor.shape)}, its plan says {spec.dtype}"
            f"{list(spec.sizes)}",
            leaf=spec.fqn,
            type_name=str(tensor.dtype),
        )
    return tensor  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How to write; `one_file`: a single one per rank, else one per tensor. `threads`: that call the planner."""

    path: str
    threads: int
    one_file: bool
    copy_ahead_nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """The layout of one rank's files, and the tensors that go into them.

    Attributes:
        items: Of the plan.
        results: Of leaves, and of boxes without elements: they are not in the files.
        specs: Of the boxes, aligned with `layout.chunks` and `resolves`.
        layout: Of the files.
        tensors: What the index says of them.
        resolves: Each makes a box's elements, by the planner.
    """

    items: Items
    results: Sequence[WriteResult]
    specs: Sequence[BoxSpec]
    layout: Layout
    tensors: tuple[TensorEntry, ...]
    resolves: Sequence[Resolve]

    @property
    def n_tensors(self) -> int:
        """For reports."""
        return sum(not any(spec.offsets) for spec in self.specs)

    @property
    def structure(self) -> bytes:
        """The structure of a rank that is not the coordinator: its chunks. All names are in the coordinator's."""
        part_nbytes = tuple(part.nbytes for part in self.layout.parts)
        return encode_structure(Structure(tree=(DICT, ()), tensors=self.tensors, n_objects=0, part_nbytes=part_nbytes))

    def results_of(self, save_id: SaveId, rank: int) -> list[WriteResult]:
        """Return a result for each item, once the save has its id."""
        found = list(self.results)
        for (item, spec), chunk in zip(self.items.tensors, self.layout.chunks, strict=True):
            name = shard_name(save_id, rank, chunk.part)
            stored = StoredChunk(relative_path=name, offset=chunk.offset_bytes, length=chunk.nbytes)
            found.append(_result(item, spec.nbytes, stored))
        return found


def lay_out(plan: SavePlan, planner: SavePlanner, *, one_file: bool) -> LaidOut:
    """Lay out what `plan` gives to this rank; leaves that are no tensors are made, tensors are not.

    Raises:
        UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
        Exception: Whatever the planner raises.
    """
    items = sorted_out(plan.items)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # IMPORTANT: what the state was made by may still run in this thread's stream; writing threads have others.
        torch.cuda.current_stream().synchronize()
    results = [_result(item, 0, StoredLeaf(raw=encode_leaf(planner, item))) for item in items.leaves]
    results += [_result(item, 0, None) for item in items.empty]
    specs = [spec for _, spec in items.tensors]
    layout = build_layout(specs, n_parts=1 if one_file else max(1, min(len(specs), MAX_PARTS)))
    if len(layout.parts) > MAX_PARTS:
        raise UnsupportedLeafError(
            f"a rank holds more than {MAX_PARTS} boxes of one tensor; give it fewer, larger ones"
        )
    return LaidOut(
        items=items,
        results=results,
        specs=specs,
        layout=layout,
        tensors=_entries(specs, layout),
        resolves=[partial(_elements, planner, item, spec) for item, spec in items.tensors],
    )


def _result(item: WriteItem, nbytes: int, stored: object) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=stored)


def _elements(planner: SavePlanner, item: WriteItem, spec: BoxSpec) -> torch.Tensor:
    return bytes_of(planner.resolve_data(item), spec)


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
