"""Messages about boards: where the ranks of a run lay down bytes for each other, piece by piece. Part of `messages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Share(Message):
    """Put a piece of this rank's bytes on a board: `data` at `offset` of `total`. Pieces come in order."""

    id: int
    board: str
    offset: int
    total: int
    data: bytes
    name: ClassVar[str] = "share"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "board": check.text,
        "offset": check.uint,
        "total": check.uint,
        "data": check.piece,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch(Message):
    """Ask for the piece at `offset` of what `rank` has put on a board."""

    id: int
    board: str
    rank: int
    offset: int
    name: ClassVar[str] = "fetch"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "board": check.text,
        "rank": check.uint,
        "offset": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched(Message):
    """The answer to Fetch. `missing`: ranks that have not shared all of theirs; while there are any, no data come."""

    id: int
    missing: tuple[int, ...]
    total: int
    data: bytes
    name: ClassVar[str] = "fetched"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "missing": check.ranks,
        "total": check.uint,
        "data": check.piece,
    }
