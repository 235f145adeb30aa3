"""Every message between trainer and worker: frozen, keyword-only, checked when built. An invalid one cannot exist.

`SPEC.md` beside this file is normative; a test compares the two. The trainer's messages are requests with an id, which
the worker answers once per arrival; ids are unique per session, and every request may be repeated without harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.adopting import Adopt
from asyncckpt.protocol.answers import Granted, LineageFound, Ok, Refused, Saves, StatusReport, Welcome
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.linking import Follow, Following, Lead, Leading
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.recall import Recall, Recalled
from asyncckpt.protocol.sharing import Fetch, Fetched, Share

__all__ = [
    "MAX_PATH_BYTES",
    "MAX_TABLE",
    "PROTOCOL_VERSION",
    "REPLIES",
    "REQUESTS",
    "Adopt",
    "Allocate",
    "Begin",
    "Consent",
    "Drain",
    "Fetch",
    "Fetched",
    "Follow",
    "Following",
    "Goodbye",
    "Granted",
    "Heartbeat",
    "Hello",
    "Lead",
    "Leading",
    "Lineage",
    "LineageFound",
    "Message",
    "Ok",
    "Recall",
    "Recalled",
    "Refused",
    "Release",
    "Saves",
    "Share",
    "Status",
    "StatusReport",
    "Submit",
    "Welcome",
    "Withdraw",
]

PROTOCOL_VERSION = 11
"""Of messages, records between workers and the request in a slot; SPEC.md section 2 says when it is to be raised."""

MAX_PATH_BYTES = check.MAX_PATH_BYTES
MAX_TABLE = check.MAX_TABLE


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
    """Ask which epoch the saves of `run` carry beside `path`. The session joins the run."""

    id: int
    run: str
    path: str
    name: ClassVar[str] = "lineage"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "run": check.hex12, "path": check.path}


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Message):
    """Staging of a save begins: the worker makes the directory and looks for what would make the save fail."""

    id: int
    save_id: str
    step: int | None
    path: str
    slot: int
    generation: int
    nbytes: int
    umask: int
    fsync: bool
    overwrite: bool
    commit_timeout_s: float
    name: ClassVar[str] = "begin"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "step": check.sint_or_none,
        "path": check.path,
        "slot": check.uint,
        "generation": check.uint,
        "nbytes": check.uint,
        "umask": check.umask,
        "fsync": check.flag,
        "overwrite": check.flag,
        "commit_timeout_s": check.timeout,
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
    """This rank will not seal a save: it ends on all ranks. Epoch 0 in `save_id`: not known. `skipped`: on purpose."""

    id: int
    save_id: str
    reason: str
    skipped: bool
    name: ClassVar[str] = "withdraw"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "reason": check.text,
        "skipped": check.flag,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Consent(Message):
    """What this rank's `pre_commit` hook says to the commit of a save; `reason`: why not."""

    id: int
    save_id: str
    granted: bool
    reason: str
    name: ClassVar[str] = "consent"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "granted": check.flag,
        "reason": check.text,
    }


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


_REQUESTS = (
    *(Hello, Allocate, Adopt, Release, Lead, Follow, Lineage, Begin, Submit, Withdraw, Consent, Share, Fetch, Recall),
    *(Heartbeat, Goodbye, Status, Drain),
)
_REPLIES = (Welcome, Granted, Leading, Following, LineageFound, Fetched, Recalled, Ok, Refused, Saves, StatusReport)

REQUESTS: dict[str, type[Message]] = {c.name: c for c in _REQUESTS}
REPLIES: dict[str, type[Message]] = {c.name: c for c in _REPLIES}
