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
    """Puts leaves that are no tensors into the user's dict, also with `flatten_state_dict=False`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a leaf that is no tensor into the target, under the key that it has there: torch makes texts of keys."""
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
    """Put `value` in the place that has a path; in paths the keys of mappings are texts, as torch makes them."""
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
    """Saves what this process holds of sharded values; equal boxes of several ranks are written once.

    Arguments are DefaultSavePlanner's; `flatten_sharded_tensors` changes nothing.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save.

        Raises:
            UnsupportedLeafError, OverlappingShardsError: Shards that cannot be.
            DuplicateNameError: Two leaves get one name.
        """
        leaves: dict[str, Any] = dict(state_dict)
        if self.flatten_state_dict:
            leaves, self.mappings = flattened(state_dict)
        self.state_dict = described(leaves)
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of a shard, or what the default planner finds."""
        leaf = self.state_dict.get(index.fqn)
        return leaf.tensor_at(index) if isinstance(leaf, ShardsOf) else super().lookup_object(index)


def _empty_places(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of dicts and lists of a state dict that are empty."""
    if isinstance(value, (dict, list)):
        if not value and name:
            yield name
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _empty_places(member, f"{name}.{key}" if name else str(key))


class ShardedLoadPlanner(UnflattenedLoadPlanner):
    """Loads into what this process holds of sharded values, from chunks of any other arrangement, in the user's dict.

    A value of a registered type is handed over once, when all its parts are in, also where all of it is here. Tensors
    that share memory hold what was saved under each of their names, or that is an error; what is read into them takes
    as much memory again until the last of it is in. Arguments are DefaultLoadPlanner's; `flatten_sharded_tensors`
    changes nothing.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load.

        Raises:
            UnsupportedLeafError, OverlappingShardsError: Shards that cannot be.
            DuplicateNameError: Two leaves get one name.
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
        """Return the reads for what this process holds.

        Raises:
            RuntimeError: A key is not in the checkpoint, and `allow_partial_load` is False.
            ValueError: A tensor has another global shape there.
        """
        metadata = self.metadata
        assert metadata is not None, "set_up_planner was given no metadata"
        missing = set(metadata.state_dict_metadata) - set(self.state_dict)
        if self.flatten_state_dict and missing:
            older, paths = flattened(self.original_state_dict, as_torch_2_3=True)
            if missing & set(older):  # saved by torch 2.3 or earlier, which named leaves otherwise
                self.state_dict, self.mappings = _fillable(older), paths
        for name in _empty_places(self.original_state_dict):
            below = sum(fqn.startswith(f"{name}.") for fqn in missing)
            if below:
                _logger.warning(
                    "%r is empty in the target and stays so: %d saved name(s) below it are not loaded; give it what is "
                    "to be filled (an optimizer's state: `get_state_dict`), or use `asyncckpt.load`, which fills it",
                    name,
                    below,
                )
        return create_default_local_load_plan(self.state_dict, metadata, not self.allow_partial_load)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Take the plan that will be carried out.

        Raises:
            LeafTypeMismatchError: A sharded value is no tensor in the checkpoint.
            CorruptCheckpointError: The checkpoint's chunks do not hold every element of a shard exactly once.
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
                    f"{fqn!r} was saved as an object, and a {leaf.found.type_name} is to be filled",
                    fqn=fqn,
                    saved="object",
                    wanted="tensor",
                )
        self._find_shared([item for item in new_plan.items if item.type is LoadItemType.TENSOR])
        return super().finish_plan(new_plan)

    def _find_shared(self, items: list[ReadItem]) -> None:
        """Take note of the reads into memory that others read into, too."""
        self._read: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        places = [(item, self._place_of(item)) for item in items]
        real = [(item, place) for item, place in places if type(place) in PLAIN_TENSORS and not why_no_memory(place)]
        self._shared = {_named_key(real[n][0]) for n in find_aliased([place for _, place in real])}

    def _place_of(self, item: ReadItem) -> torch.Tensor:
        place: torch.Tensor = self.transform_tensor(item, self.lookup_tensor(item.dest_index)).detach()
        return place

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return where a read goes; new memory where others go there, too."""
        if _named_key(read_item) not in self._shared:
            found: torch.Tensor = super().resolve_tensor(read_item)
            return found
        place = self._place_of(read_item)
        return torch.empty(place.shape, dtype=place.dtype, device=place.device)

    def _take_shared(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Put what was read to its place; after the last, check that each place holds it.

        Raises:
            AliasMismatchError: One does not.
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
                    f"{read[other][0]!r} and {fqn!r} share memory in the target, and the values that were saved under "
                    "them differ; they hold values of both, and other tensors of the target are filled. Give each "
                    "memory of its own in the target, or leave one of them out",
                    fqn=read[other][0],
                    other_fqn=fqn,
                )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of a shard, or what the default planner finds."""
        leaf = self.state_dict.get(index.fqn)
        return leaf.tensor_at(index) if isinstance(leaf, ShardsOf) else super().lookup_tensor(index)

    def _expect(self, fqn: str, leaf: ShardsOf, reads: list[ReadItem]) -> None:
        wanted = sum(shard.tensor.numel() for shard in leaf.shards)
        keys = {_key(item) for item in reads}
        found = sum(math.prod(item.lengths) for item in reads)
        if found != wanted or len(keys) != len(reads):
            detail = f"the checkpoint's chunks hold {found} elements of what this process wants, which has {wanted}"
            raise CorruptCheckpointError(f"tensor {fqn!r}: {detail}", fqn=fqn, detail=detail)
        if keys:
            self._pending[fqn] = keys
        else:
            leaf.commit()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take note of a read; after a value's last, hand it over.

        Raises:
            OverlappingShardsError: The read was committed before, or never planned.
            AliasMismatchError: It was the last one into memory that the target shares, and the values differ there.
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
    """Whether torch makes memory for a tensor. Types with shards are not asked: of some, torch refuses to say it."""
    if describer_of(type(value)) not in (None, describe_dtensor) or is_checkpointable(value):
        return False
    return value.is_meta


def _fillable(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return `leaves` as `described` does for a target.

    Raises:
        UnsupportedLeafError, OverlappingShardsError: As `described`; or a shard has no memory.
    """
    found = described(leaves, is_target=True)
    for fqn, leaf in found.items():
        for shard in leaf.shards if isinstance(leaf, ShardsOf) else ():
            if shard.tensor.is_meta:
                kind = leaf.found.type_name
                raise UnsupportedLeafError(
                    f"target {fqn!r}, a {kind}, cannot be filled: its parts are on the meta device; give it memory "
                    "first, as to_empty() does",
                    leaf=fqn,
                    type_name=kind,
                )
    return found


_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _key(item: ReadItem) -> _Key:
    return tuple(item.dest_index.offset or ()), tuple(item.dest_offsets), tuple(item.lengths)


class DynamicMetaLoadPlanner(UnflattenedLoadPlanner):
    """As torch's planner of this name, with leaves that are no tensors, and for sharded targets.

    Every tensor of the target is taken for stored whole, so that each rank asks for the boxes of its own shards. Made
    for `BroadcastingTorchSaveReader`, which finds out whether the file holds what the target wants.

    Args:
        flatten_state_dict, flatten_sharded_tensors: As `DefaultLoadPlanner`'s.
        allow_partial_load: Leaves of the target that the file lacks stay as they are.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load into `state_dict`; `metadata` is not looked at."""
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
