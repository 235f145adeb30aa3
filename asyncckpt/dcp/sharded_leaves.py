"""Sharded values as stock planners take them: boxes with offsets, whatever type describes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from asyncckpt.errors import DuplicateNameError, OverlappingShardsError, UnsupportedLeafError
from asyncckpt.planning.sharding.recognising import committed, describer
from asyncckpt.planning.sharding.shards import LocalShard, Sharded, named, refused, refused_by_name
from asyncckpt.planning.state_dict import SCALARS

Paths = dict[str, tuple[Any, ...]]


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
        committed(self.value, self._given)

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
    return isinstance(value, torch.Tensor) or describer(type(value)) is not None


def described(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return `leaves` with a `ShardsOf` for each value of a type that has shards, also where all of it is here.

    Raises:
        UnsupportedLeafError: Invalid shards, or shards in what torch stores as one object; `leaf` is the FQN.
        OverlappingShardsError: Two shards of one value share elements.
    """
    return {fqn: _described(fqn, value) for fqn, value in leaves.items()}


def _described(fqn: str, value: Any) -> Any:
    try:
        if describer(type(value)) is not None:
            return _shards_of(value)
        for member in _members(value):
            if describer(type(member)) is not None:
                kind = type(value).__name__
                text = f"it lies in a {kind}, which torch.distributed.checkpoint stores as one object, like every tuple"
                text += "; put it into dicts and lists only, and leave flatten_state_dict on"
                raise refused(type(member).__name__, text)
    except OverlappingShardsError as error:
        raise named(error, fqn) from None
    except UnsupportedLeafError as error:
        text = f"state dict leaf {fqn!r}: {error}"
        raise refused_by_name(error, fqn, text) from error.__cause__
    return value


def _shards_of(value: Any) -> ShardsOf:
    found, given = _found_in(value), None
    if isinstance(found, torch.Tensor):  # of a registered type, all of which is here
        given = [LocalShard(found, (0,) * found.dim())]
        if describer(type(found)) is not None:
            found = _found_in(found)
    if isinstance(found, torch.Tensor):
        if describer(type(found)) is not None:
            kind = type(found).__name__
            text = f"its to_shards gave a registered type, and that one's gave another, {kind}; one must give shards"
            raise refused(type(value).__name__, text)
        shards = tuple(given or ())
        found = Sharded(found.dtype, tuple(found.shape), shards, None, type(value).__name__)
    return ShardsOf(value, found, given)


def _found_in(value: Any) -> Sharded | torch.Tensor:
    describe = describer(type(value))
    assert describe is not None
    return describe(value)


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
