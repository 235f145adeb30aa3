"""What a rank tells the coordinator about what it wrote. Values; they travel as torch.distributed sends objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.storage.rank_job import RankResult


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


def rank_result(rank: int, result: RankResult | None) -> WriteResult:
    """Return the entry that stands for a whole rank. Every rank has one, with nothing to write too."""
    return WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=StoredRank(rank=rank, result=result))
