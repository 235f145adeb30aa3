"""Every message between trainer and worker: frozen, keyword-only, checked when built. An invalid one cannot exist.

`SPEC.md` beside this file is normative; a test compares the two. The trainer's messages are requests with an id, which
the worker answers once per arrival; ids are unique per session, and every request may be repeated without harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol.lifecycle import PHASES

PROTOCOL_VERSION = 1
MAX_PATH_BYTES = 4000
MAX_TABLE = 1024
"""Rows of one Saves or Heartbeat message; a trainer never has more than a few saves pending."""

_SAVE_ID = re.compile(r"[0-9]{6}-[0-9]{8}-[0-9a-f]{12}\Z")
_HEX16 = re.compile(r"[0-9a-f]{16}\Z")
_TOP = (1 << 63) - 1

Check = Callable[[Any], bool]


def _uint(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _TOP


def _int(value: Any) -> bool:
    return type(value) is int and -_TOP <= value <= _TOP


def _save_id(value: Any) -> bool:
    return type(value) is str and _SAVE_ID.match(value) is not None


def _session(value: Any) -> bool:
    return type(value) is str and _HEX16.match(value) is not None


def _path(value: Any) -> bool:
    return type(value) is str and value.startswith("/") and "\0" not in value and len(value) <= MAX_PATH_BYTES


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= 200


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def _token(value: Any) -> bool:
    return type(value) is bytes and len(value) == 16


def _flag(value: Any) -> bool:
    return type(value) is bool


def _map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(type(k) is str for k in value)


def _save_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= MAX_TABLE and all(map(_save_id, value))


def _save_rows(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= MAX_TABLE
        and all(_map(r) and _save_id(r.get("save_id")) and r.get("phase") in PHASES for r in value)
    )


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
    """A trainer opens a session. `pid_start`: the process's start time in clock ticks since boot (proc(5), field 22)."""

    id: int
    session: str
    package: str
    pid: int
    pid_start: int
    rank: int
    world_size: int
    name: ClassVar[str] = "hello"
    checks: ClassVar[dict[str, Check]] = {
        "id": _uint,
        "session": _session,
        "package": _text,
        "pid": _uint,
        "pid_start": _uint,
        "rank": _uint,
        "world_size": _uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate(Message):
    """Ask for a slot of `nbytes`, control pages included; `populate`: fault its pages in ahead."""

    id: int
    nbytes: int
    populate: bool
    name: ClassVar[str] = "allocate"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "nbytes": _uint, "populate": _flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Message):
    """Give a slot back. The worker frees it once no save of it is in flight."""

    id: int
    slot: int
    name: ClassVar[str] = "release"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "slot": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage(Message):
    """Ask which epoch a run gets that saves its first checkpoint at `path`."""

    id: int
    path: str
    name: ClassVar[str] = "lineage"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "path": _path}


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
    name: ClassVar[str] = "begin"
    checks: ClassVar[dict[str, Check]] = {
        "id": _uint,
        "save_id": _save_id,
        "step": _int,
        "path": _path,
        "slot": _uint,
        "generation": _uint,
        "nbytes": _uint,
        "umask": _uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit(Message):
    """A doorbell: the slot is sealed. All that matters lies in the slot."""

    id: int
    save_id: str
    slot: int
    generation: int
    name: ClassVar[str] = "submit"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "save_id": _save_id, "slot": _uint, "generation": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw(Message):
    """A save that was begun will not be sealed: staging failed."""

    id: int
    save_id: str
    reason: str
    name: ClassVar[str] = "withdraw"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "save_id": _save_id, "reason": _text}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat(Message):
    """Ask for the state of these saves; the answer's time proves that the control loop turns."""

    id: int
    saves: tuple[str, ...]
    name: ClassVar[str] = "heartbeat"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "saves": _save_ids}


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye(Message):
    """The session ends in order: submitted saves go on, slots are freed as they end."""

    id: int
    name: ClassVar[str] = "goodbye"
    checks: ClassVar[dict[str, Check]] = {"id": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Status(Message):
    """Ask for the worker's status report. Needs no session."""

    id: int
    name: ClassVar[str] = "status"
    checks: ClassVar[dict[str, Check]] = {"id": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain(Message):
    """Finish what was submitted, take no new sessions, then exit. `now`: exit without waiting for saves."""

    id: int
    now: bool
    name: ClassVar[str] = "drain"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "now": _flag}


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
        "id": _uint,
        "package": _text,
        "pid": _uint,
        "pid_start": _uint,
        "instance": _session,
        "heartbeat_s": _seconds,
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
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "slot": _uint, "fd": _uint, "nbytes": _uint, "token": _token}


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageFound(Message):
    """The answer to Lineage."""

    id: int
    epoch: int
    name: ClassVar[str] = "lineage_found"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "epoch": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ok(Message):
    """The request arrived and was taken up."""

    id: int
    name: ClassVar[str] = "ok"
    checks: ClassVar[dict[str, Check]] = {"id": _uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message):
    """The request was not taken up: an error of `asyncckpt.errors` as code, text and fields."""

    id: int
    error: Mapping[str, Any]
    name: ClassVar[str] = "refused"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "error": _map}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves(Message):
    """States of saves: the answer to Heartbeat (same id), or sent unasked (id 0) when one changes.

    A row is a map with `save_id`, `phase`, and where they apply `error` (as in Refused) and `report` (numbers).
    """

    id: int
    saves: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "saves"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "saves": _save_rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport(Message):
    """The answer to Status: a JSON-like map, described in SPEC.md."""

    id: int
    report: Mapping[str, Any]
    name: ClassVar[str] = "status_report"
    checks: ClassVar[dict[str, Check]] = {"id": _uint, "report": _map}


Request = Hello | Allocate | Release | Lineage | Begin | Submit | Withdraw | Heartbeat | Goodbye | Status | Drain
Reply = Welcome | Granted | LineageFound | Ok | Refused | Saves | StatusReport

REQUESTS: dict[str, type[Message]] = {
    c.name: c for c in (Hello, Allocate, Release, Lineage, Begin, Submit, Withdraw, Heartbeat, Goodbye, Status, Drain)
}
REPLIES: dict[str, type[Message]] = {
    c.name: c for c in (Welcome, Granted, LineageFound, Ok, Refused, Saves, StatusReport)
}
