"""Every message between trainer and worker: frozen, keyword-only, checked when built. An invalid one cannot exist.

`SPEC.md` beside this file is normative; a test compares the two. The trainer's messages are requests with an id, which
the worker answers once per arrival; ids are unique per session, and every request may be repeated without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check

PROTOCOL_VERSION = 1
MAX_PATH_BYTES = check.MAX_PATH_BYTES
MAX_TABLE = check.MAX_TABLE


class Message:
    """What all messages share: `name` on the wire, and a check per field."""

    name: ClassVar[str]
    checks: ClassVar[dict[str, Check]]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not self.checks[field.name](value):
                shown = repr(value)[:80]
                raise ProtocolError(f"{self.name}: field {field.name} cannot be {shown}", detail=field.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """A trainer opens a session. `pid_start`: its start time in clock ticks since boot (proc(5), field 22).

    `replaces`: its session before this one, which ends as by a Goodbye; "" when there was none.
    """

    id: int
    session: str
    replaces: str
    package: str
    pid: int
    pid_start: int
    rank: int
    world_size: int
    name: ClassVar[str] = "hello"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "session": check.hex16,
        "replaces": check.hex16_or_none,
        "package": check.text,
        "pid": check.uint,
        "pid_start": check.uint,
        "rank": check.uint,
        "world_size": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate(Message):
    """Ask for a slot of `nbytes`, control pages included; `populate`: fault its pages in ahead."""

    id: int
    nbytes: int
    populate: bool
    name: ClassVar[str] = "allocate"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "nbytes": check.uint, "populate": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Message):
    """Give a slot back. The worker frees it once no save of it is in flight."""

    id: int
    slot: int
    name: ClassVar[str] = "release"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "slot": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage(Message):
    """Ask which epoch a run gets that saves its first checkpoint at `path`."""

    id: int
    path: str
    name: ClassVar[str] = "lineage"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "path": check.path}


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Message):
    """Staging of a save begins: the worker makes the directory and looks for what would make the save fail."""

    id: int
    save_id: str
    step: int
    path: str
    slot: int
    generation: int
    nbytes: int
    umask: int
    fsync: bool
    name: ClassVar[str] = "begin"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "step": check.sint,
        "path": check.path,
        "slot": check.uint,
        "generation": check.uint,
        "nbytes": check.uint,
        "umask": check.umask,
        "fsync": check.flag,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit(Message):
    """A doorbell: the slot is sealed. All that matters lies in the slot."""

    id: int
    save_id: str
    slot: int
    generation: int
    name: ClassVar[str] = "submit"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "slot": check.uint,
        "generation": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw(Message):
    """A save that was begun will not be sealed: staging failed."""

    id: int
    save_id: str
    reason: str
    name: ClassVar[str] = "withdraw"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "save_id": check.save_id, "reason": check.text}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat(Message):
    """Ask for the state of these saves; the answer's time proves that the control loop turns."""

    id: int
    saves: tuple[str, ...]
    name: ClassVar[str] = "heartbeat"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "saves": check.save_ids}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye(Message):
    """The session ends in order: submitted saves go on, slots are freed as they end."""

    id: int
    name: ClassVar[str] = "goodbye"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Status(Message):
    """Ask for the worker's status report. Needs no session."""

    id: int
    name: ClassVar[str] = "status"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain(Message):
    """Finish what was submitted, take no new sessions, then exit. `now`: exit without waiting for saves."""

    id: int
    now: bool
    name: ClassVar[str] = "drain"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "now": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(Message):
    """The session is open. `instance`: 16 hex digits, random per worker process."""

    id: int
    package: str
    pid: int
    pid_start: int
    instance: str
    heartbeat_s: float
    name: ClassVar[str] = "welcome"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "package": check.text,
        "pid": check.uint,
        "pid_start": check.uint,
        "instance": check.hex16,
        "heartbeat_s": check.seconds,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted(Message):
    """A slot: its number, the memfd's number in the worker, its size, and the token that it must carry."""

    id: int
    slot: int
    fd: int
    nbytes: int
    token: bytes
    name: ClassVar[str] = "granted"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "slot": check.uint,
        "fd": check.uint,
        "nbytes": check.uint,
        "token": check.token,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageFound(Message):
    """The answer to Lineage."""

    id: int
    epoch: int
    name: ClassVar[str] = "lineage_found"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "epoch": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ok(Message):
    """The request arrived and was taken up."""

    id: int
    name: ClassVar[str] = "ok"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message):
    """The request was not taken up: an error of `asyncckpt.errors` as code, text and fields."""

    id: int
    error: Mapping[str, Any]
    name: ClassVar[str] = "refused"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "error": check.mapping}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves(Message):
    """States of saves: the answer to Heartbeat (same id), or sent unasked (id 0) when one changes.

    A row is a map with `save_id`, `phase`, and where they apply `error` (as in Refused) and `report` (numbers).
    """

    id: int
    saves: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "saves"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "saves": check.save_rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport(Message):
    """The answer to Status: a JSON-like map, described in SPEC.md."""

    id: int
    report: Mapping[str, Any]
    name: ClassVar[str] = "status_report"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "report": check.mapping}


Request = Hello | Allocate | Release | Lineage | Begin | Submit | Withdraw | Heartbeat | Goodbye | Status | Drain
Reply = Welcome | Granted | LineageFound | Ok | Refused | Saves | StatusReport

REQUESTS: dict[str, type[Message]] = {
    c.name: c for c in (Hello, Allocate, Release, Lineage, Begin, Submit, Withdraw, Heartbeat, Goodbye, Status, Drain)
}
REPLIES: dict[str, type[Message]] = {
    c.name: c for c in (Welcome, Granted, LineageFound, Ok, Refused, Saves, StatusReport)
}
