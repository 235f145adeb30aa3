"""What a rank tells the coordinator about what it wrote. Values; they travel as torch.distributed sends objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.storage.rank_writer import RankResult


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
