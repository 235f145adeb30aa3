"""What the workers of several nodes say to each other: messages over TCP, and the records that their pieces make up.

A follower opens a stream to the leader of its run; each side posts records, which travel as numbered pieces, are sent
again until they are acknowledged, and are taken in order, each once. A stream that one side has forgotten is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message

# ---- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece(Message):
    """One piece of the sender's records, number 1 and up; number 0 carries none and says that the sender lives.

    `more`: its record goes on in the next piece. `taken`: all pieces of the other side up to this number have come.
    `first`: the lowest number that the sender still has.
    """

    stream: str
    sender: str
    number: int
    first: int
    more: bool
    data: bytes
    taken: int
    name: ClassVar[str] = "piece"
    checks: ClassVar[dict[str, Check]] = {
        "stream": check.hex16,
        "sender": check.hex16,
        "number": check.uint,
        "first": check.uint,
        "more": check.flag,
        "data": check.piece,
        "taken": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits(Message):
    """From leader to follower, again and again: open saves of the run and the ranks that they wait for."""

    stream: str
    saves: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "waits"
    checks: ClassVar[dict[str, Check]] = {"stream": check.hex16, "saves": check.save_rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlinked(Message):
    """The sender does not know that stream (any more): it is over."""

    stream: str
    sender: str
    name: ClassVar[str] = "unlinked"
    checks: ClassVar[dict[str, Check]] = {"stream": check.hex16, "sender": check.hex16}


# ---- records of a follower ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(Message):
    """A rank has the follower for its worker. `attempt`: of `follow`; `opened`: which of its streams this is."""

    rank: int
    world_size: int
    attempt: int
    opened: int
    name: ClassVar[str] = "joined"
    checks: ClassVar[dict[str, Check]] = {
        "rank": check.uint,
        "world_size": check.uint,
        "attempt": check.uint,
        "opened": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Message):
    """A rank is gone: its session has ended, and its slots have been read."""

    rank: int
    why: str
    name: ClassVar[str] = "left"
    checks: ClassVar[dict[str, Check]] = {"rank": check.uint, "why": check.text}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Message):
    """A rank asks for the run's epoch beside `path`."""

    rank: int
    path: str
    name: ClassVar[str] = "asked"
    checks: ClassVar[dict[str, Check]] = {"rank": check.uint, "path": check.path}


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Message):
    """A rank stages a save. `resumed`: another worker, dead by now, may have heard of it, or begun to write it."""

    save_id: str
    rank: int
    step: int | None
    path: str
    nbytes: int
    umask: int
    overwrite: bool
    commit_timeout_s: float
    resumed: bool
    name: ClassVar[str] = "begun"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "rank": check.uint,
        "step": check.sint_or_none,
        "path": check.path,
        "nbytes": check.uint,
        "umask": check.umask,
        "overwrite": check.flag,
        "commit_timeout_s": check.timeout,
        "resumed": check.flag,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Ringed(Message):
    """A rank's ring is written at the follower while it is filled (`writing`), or was, and is not sealed yet."""

    save_id: str
    rank: int
    writing: bool
    name: ClassVar[str] = "ringed"
    checks: ClassVar[dict[str, Check]] = {"save_id": check.save_id, "rank": check.uint, "writing": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed(Message):
    """A rank's snapshot was taken up. `request`: as it lies in the slot, without its objects."""

    save_id: str
    rank: int
    request: bytes
    name: ClassVar[str] = "sealed"
    checks: ClassVar[dict[str, Check]] = {"save_id": check.save_id, "rank": check.uint, "request": check.record_bytes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered(Message):
    """A rank's files are durable. `result`: its line of the manifest, and figures."""

    save_id: str
    rank: int
    result: Mapping[str, Any]
    report: Mapping[str, Any]
    name: ClassVar[str] = "delivered"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "rank": check.uint,
        "result": check.mapping,
        "report": check.figures,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class GaveUp(Message):
    """A save cannot go on at the follower: the leader ends it on all ranks. `outcome`: `failed` or `abandoned`."""

    save_id: str
    outcome: str
    error: Mapping[str, Any]
    name: ClassVar[str] = "gave_up"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "outcome": check.end_phase,
        "error": check.error_or_none,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined(Message):
    """A rank's `withdraw`, passed on."""

    save_id: str
    rank: int
    reason: str
    skipped: bool
    name: ClassVar[str] = "declined"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "rank": check.uint,
        "reason": check.text,
        "skipped": check.flag,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Consented(Message):
    """A rank's `consent`, passed on."""

    save_id: str
    rank: int
    granted: bool
    reason: str
    name: ClassVar[str] = "consented"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "rank": check.uint,
        "granted": check.flag,
        "reason": check.text,
    }


# ---- records of a leader --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochFound(Message):
    """The answer to Asked; `error`: empty, or why there is no epoch."""

    path: str
    epoch: int
    error: Mapping[str, Any]
    name: ClassVar[str] = "epoch_found"
    checks: ClassVar[dict[str, Check]] = {"path": check.path, "epoch": check.uint, "error": check.error_or_none}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Message):
    """A save has ended; `error` is empty if it is committed."""

    save_id: str
    outcome: str
    error: Mapping[str, Any]
    report: Mapping[str, Any]
    name: ClassVar[str] = "ended"
    checks: ClassVar[dict[str, Check]] = {
        "save_id": check.save_id,
        "outcome": check.end_phase,
        "error": check.error_or_none,
        "report": check.figures,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed(Message):
    """The run's next change, as it lies on its board."""

    data: bytes
    name: ClassVar[str] = "changed"
    checks: ClassVar[dict[str, Check]] = {"data": check.record_bytes}


_OF_FOLLOWERS = (Joined, Left, Asked, Begun, Ringed, Sealed, Delivered, GaveUp, Declined, Consented)
_OF_LEADERS = (EpochFound, Ended, Changed)

PEER_MESSAGES: dict[str, type[Message]] = {c.name: c for c in (Piece, Waits, Unlinked)}
FOLLOWER_RECORDS: dict[str, type[Message]] = {c.name: c for c in _OF_FOLLOWERS}
LEADER_RECORDS: dict[str, type[Message]] = {c.name: c for c in _OF_LEADERS}
