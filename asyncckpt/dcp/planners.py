"""Planners for stock `dcp.save` and `dcp.load`, with any storage: sharded values by the boxes that they hold.

DTensor on any mesh (also where a local tensor is several boxes), `ShardedSlice`, `FlatShard`, `ShardedTensor`,
registered types, and tensors that give their chunks by torch's protocol for checkpoints, as `LocalShardsWrapper` in a
DTensor does; all other leaves are the default planners' business.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import get_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from asyncckpt.dcp.write_plan import ShardsOf, described, flattened, is_checkpointable
from asyncckpt.errors import (
    AliasMismatchError,
    CorruptCheckpointError,
    LeafTypeMismatchError,
    OverlappingShardsError,
    UnsupportedLeafError,
)
from asyncckpt.loading.target_tensors import find_aliased, find_overwriter
from asyncckpt.sharding.dtensor import describe_dtensor
from asyncckpt.sharding.registry import describer_of
from asyncckpt.state_dict.flatten import PLAIN_TENSORS
from asyncckpt.torch_tensors import why_no_memory


class UnflattenedLoadPlanner(DefaultLoadPlanner):
    """Base of the load planners: puts leaves that are no tensors into the user's dict.

    The default planner does not do this with `flatten_state_dict=False`.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a leaf that is no tensor into the target, under the target's own key: torch converts keys to texts."""
        fqn = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            super().load_bytes(read_item, value)
            self.original_state_dict[fqn] = self.state_dict[fqn]
            return
        path, found = self.mappings[fqn], dict[str, Any]()
        target, self.original_state_dict = self.original_state_dict, found
        try:
            super().load_bytes(read_item, value)
        finally:
            self.original_state_dict = target
        put(target, path, get_element(found, path))


def put(state_dict: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put `value` into a nested state dict at `path`, in which torch has converted the keys of mappings to texts."""
    container = state_dict
    for part in path[:-1]:
        container = container[_key_in(container, part)]
    container[_key_in(container, path[-1])] = value


def _key_in(container: Any, part: Any) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


_logger = logging.getLogger("asyncckpt")


class ShardedSavePlanner(DefaultSavePlanner):
    """Save the local shards of sharded values; a box that several ranks hold is written once.

    Takes the arguments of DefaultSavePlanner; `flatten_sharded_tensors` has no effect.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save.

        Raises:
            UnsupportedLeafError, OverlappingShardsError: Shards of a value are invalid.
            DuplicateNameError: Two leaves would have the same FQN.
        """
        leaves: dict[str, Any] = dict(state_dict)
        if self.flatten_state_dict:
            leaves, self.mappings = flattened(state_dict)
        self.state_dict = described(leaves)
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of a shard, or the result of the default planner."""
        leaf = self.state_dict.get(index.fqn)
        return leaf.tensor_at(index) if isinstance(leaf, ShardsOf) else super().lookup_object(index)


def _empty_places(value: Any, name: str = "") -> Iterator[str]:
    """Yield the FQNs of the empty dicts and lists of a state dict."""
    if isinstance(value, (dict, list)):
        if not value and name:
            yield name
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _empty_places(member, f"{name}.{key}" if name else str(key))


class ShardedLoadPlanner(UnflattenedLoadPlanner):
    """Load the local shards of sharded values, from any other sharding, into the user's dict.

    A value of a registered type is notified once, when all its shards are filled. If tensors share memory, equal values
    must have been saved under all their names; until the last of them is read, they take their memory twice. Takes the
    arguments of DefaultLoadPlanner; `flatten_sharded_tensors` has no effect.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load.

        Raises:
            UnsupportedLeafError, OverlappingShardsError: Shards of a value are invalid.
            DuplicateNameError: Two leaves would have the same FQN.
        """
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._pending: dict[str, set[_Key]] = {}
        self._shared: set[tuple[str, _Key]] = set()
        leaves: dict[str, Any] = dict(state_dict)
        paths: dict[str, Any] = {fqn: (fqn,) for fqn in leaves}
        if self.flatten_state_dict:
            leaves, paths = flattened(state_dict)
        for fqn, value in leaves.items():
            if isinstance(value, torch.Tensor) and _is_meta(value):
                made = {fqn: value}
                _init_state_dict(made)
                leaves[fqn] = made[fqn]
                put(state_dict, paths[fqn], made[fqn])
        self.state_dict = _fillable(leaves)
        self.mappings = paths if self.flatten_state_dict else {}

    def create_local_plan(self) -> LoadPlan:
        """Return the reads for the local shards.

        Raises:
            RuntimeError: A key is not in the checkpoint, and `allow_partial_load` is False.
            ValueError: A tensor has another global shape in the checkpoint.
        """
        metadata = self.metadata
        assert metadata is not None, "set_up_planner was given no metadata"
        missing = set(metadata.state_dict_metadata) - set(self.state_dict)
        if self.flatten_state_dict and missing:
            older, paths = flattened(self.original_state_dict, as_torch_2_3=True)
            if missing & set(older):  # saved by torch 2.3 or earlier, which flattened state dicts differently
                self.state_dict, self.mappings = _fillable(older), paths
        for name in _empty_places(self.original_state_dict):
            below = sum(fqn.startswith(f"{name}.") for fqn in missing)
            if below:
                _logger.warning(
                    "load: %r is empty in the target and stays empty: %d of the saved leaves are not loaded. Put the "
                    "tensors to fill into it (for an optimizer: `get_state_dict`), or use `asyncckpt.load`, which "
                    "fills it",
                    name,
                    below,
                )
        return create_default_local_load_plan(self.state_dict, metadata, not self.allow_partial_load)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Accept the final plan.

        Raises:
            LeafTypeMismatchError: A sharded value is no tensor in the checkpoint.
            CorruptCheckpointError: The chunks of the checkpoint do not have every element of a shard exactly once.
        """
        self._pending = {}
        reads: dict[str, list[ReadItem]] = {}
        for item in new_plan.items:
            if item.type is LoadItemType.TENSOR and isinstance(self.state_dict.get(item.dest_index.fqn), ShardsOf):
                reads.setdefault(item.dest_index.fqn, []).append(item)
        for fqn, leaf in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(fqn) if self.metadata else None
            if isinstance(leaf, ShardsOf) and isinstance(saved, TensorStorageMetadata):
                self._expect(fqn, leaf, reads.get(fqn, []))
            elif isinstance(leaf, ShardsOf) and saved is not None:
                raise LeafTypeMismatchError(
                    f"{fqn!r} was saved as an object, but the target is a {leaf.found.type_name}",
                    fqn=fqn,
                    saved="object",
                    wanted="tensor",
                )
        self._find_shared([item for item in new_plan.items if item.type is LoadItemType.TENSOR])
        return super().finish_plan(new_plan)

    def _find_shared(self, items: list[ReadItem]) -> None:
        """Record the reads whose memory overlaps with that of other reads."""
        self._read: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        places = [(item, self._place_of(item)) for item in items]
        real = [(item, place) for item, place in places if type(place) in PLAIN_TENSORS and not why_no_memory(place)]
        self._shared = {_named_key(real[n][0]) for n in find_aliased([place for _, place in real])}

    def _place_of(self, item: ReadItem) -> torch.Tensor:
        place: torch.Tensor = self.transform_tensor(item, self.lookup_tensor(item.dest_index)).detach()
        return place

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory for a read; new memory if other reads share the target's memory."""
        if _named_key(read_item) not in self._shared:
            found: torch.Tensor = super().resolve_tensor(read_item)
            return found
        place = self._place_of(read_item)
        return torch.empty(place.shape, dtype=place.dtype, device=place.device)

    def _take_shared(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a read into the target's shared memory; after the last one, check that all values are there.

        Raises:
            AliasMismatchError: A value was overwritten by another one.
        """
        place = self._place_of(read_item)
        place.copy_(tensor)
        self._read.append((read_item.dest_index.fqn, place, tensor.detach()))
        if len(self._read) < len(self._shared):
            return
        read, self._read, self._shared = self._read, [], set()
        for number, (fqn, place, value) in enumerate(read):
            other = find_overwriter(number, place, value, [place for _, place, _ in read])
            if other is not None:
                raise AliasMismatchError(
                    f"{read[other][0]!r} and {fqn!r} share memory in the target, but different values were saved under "
                    "these names; the memory holds values of both, and other tensors of the target are filled. Use "
                    "separate memory in the target, or leave one of them out",
                    fqn=read[other][0],
                    other_fqn=fqn,
                )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of a shard, or the result of the default planner."""
        leaf = self.state_dict.get(index.fqn)
        return leaf.tensor_at(index) if isinstance(leaf, ShardsOf) else super().lookup_tensor(index)

    def _expect(self, fqn: str, leaf: ShardsOf, reads: list[ReadItem]) -> None:
        wanted = sum(shard.tensor.numel() for shard in leaf.shards)
        keys = {_key(item) for item in reads}
        found = sum(math.prod(item.lengths) for item in reads)
        if found != wanted or len(keys) != len(reads):
            detail = f"the checkpoint's chunks have {found} elements of the local shards, which have {wanted}"
            raise CorruptCheckpointError(f"tensor {fqn!r}: {detail}", fqn=fqn, detail=detail)
        if keys:
            self._pending[fqn] = keys
        else:
            leaf.commit()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Record that a read is complete; after the last read of a registered type, notify it.

        Raises:
            OverlappingShardsError: The read was committed before, or is not in the plan.
            AliasMismatchError: All reads into shared memory are complete, and their values differ.
        """
        fqn = read_item.dest_index.fqn
        if _named_key(read_item) in self._shared:
            self._take_shared(read_item, tensor)
        leaf = self.state_dict.get(fqn)
        if not isinstance(leaf, ShardsOf):
            return super().commit_tensor(read_item, tensor)
        pending = self._pending.get(fqn, set())
        if _key(read_item) not in pending:
            boxes = [f"offsets {list(read_item.dest_offsets)} sizes {list(read_item.lengths)}"]
            start = list(read_item.dest_index.offset or ())
            raise OverlappingShardsError(
                f"tensor {fqn!r}: a second write to {boxes[0]} of the shard at {start}",
                fqn=fqn,
                boxes=boxes,
            )
        pending.remove(_key(read_item))
        if not pending:
            del self._pending[fqn]
            leaf.commit()
        return None


def _named_key(item: ReadItem) -> tuple[str, _Key]:
    return item.dest_index.fqn, _key(item)


def _is_meta(value: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device. False for types with shards: some raise an error for `is_meta`."""
    if describer_of(type(value)) not in (None, describe_dtensor) or is_checkpointable(value):
        return False
    return value.is_meta


def _fillable(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return `leaves` with a `ShardsOf` for each sharded value, for a load.

    Raises:
        UnsupportedLeafError, OverlappingShardsError: See `described`; or a shard has no memory.
    """
    found = described(leaves, is_target=True)
    for fqn, leaf in found.items():
        for shard in leaf.shards if isinstance(leaf, ShardsOf) else ():
            if shard.tensor.is_meta:
                kind = leaf.found.type_name
                raise UnsupportedLeafError(
                    f"target {fqn!r}, a {kind}, cannot be filled: its shards are on the meta device; allocate memory "
                    "first, for example with to_empty()",
                    leaf=fqn,
                    type_name=kind,
                )
    return found


_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _key(item: ReadItem) -> _Key:
    return tuple(item.dest_index.offset or ()), tuple(item.dest_offsets), tuple(item.lengths)


class DynamicMetaLoadPlanner(UnflattenedLoadPlanner):
    """Plan a load without metadata of the file; replaces torch's planner of the same name.

    Unlike torch's it also loads sharded targets and leaves that are no tensors. It assumes that every tensor of the
    target is stored whole, so that each rank reads the boxes of its own shards. Use it with
    `BroadcastingTorchSaveReader`, which checks whether the file matches the target.

    Args:
        flatten_state_dict, flatten_sharded_tensors: See `DefaultLoadPlanner`.
        allow_partial_load: Leaves of the target that the file lacks stay unchanged. False: they are an error.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load into `state_dict`; `metadata` is ignored."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, STORAGE_TYPES] = {}
        for fqn, value in self.state_dict.items():
            if torch.is_tensor(value):
                size = value.size()
                whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [whole])
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)
