"""Sharded values as stock planners take them: boxes with offsets, whatever type describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict, traverse_state_dict_v_2_3
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from asyncckpt.errors import DuplicateNameError, OverlappingShardsError, UnsupportedLeafError
from asyncckpt.planning.sharding.recognising import describer
from asyncckpt.planning.sharding.shards import LocalShard, Sharded, named, refused_by_name

Paths = dict[str, tuple[Any, ...]]


class ShardsOf:
    """What this process holds of one sharded value, with the methods by which stock planners ask a tensor for it."""

    def __init__(self, value: Any, found: Sharded) -> None:
        self.value, self.found = value, found
        self._by_offsets = {shard.offsets: shard for shard in self.shards}

    @property
    def shards(self) -> list[LocalShard]:
        """The boxes that hold elements."""
        return [shard for shard in self.found.shards if shard.tensor.numel()]

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
    """Return `leaves` with a `ShardsOf` for each sharded value; a value that is whole here becomes its plain tensor.

    Raises:
        UnsupportedLeafError: Shards that cannot be; `leaf` is the FQN.
        OverlappingShardsError: Two shards of one value share elements.
    """
    return {fqn: _described(fqn, value) for fqn, value in leaves.items()}


def _described(fqn: str, value: Any) -> Any:
    describe = describer(type(value))
    if describe is None:
        return value
    try:
        found = describe(value)
    except OverlappingShardsError as error:
        raise named(error, fqn) from None
    except UnsupportedLeafError as error:
        text = f"state dict leaf {fqn!r}: {error}"
        raise refused_by_name(error, fqn, text) from error.__cause__
    return found if isinstance(found, torch.Tensor) else ShardsOf(value, found)
