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

PROTOCOL_VERSION = 11
"""Version of messages, records between workers and the request in a slot. SPEC.md section 2 says when to raise it."""

MAX_TABLE = check.MAX_TABLE


class Message:
    """Base of all messages. `name`: on the wire; `checks`: what each field may hold."""

    name: ClassVar[str]
    checks: ClassVar[dict[str, Check]]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not self.checks[field.name](value):
                shown = repr(value)[:80]
                raise ProtocolError(f"{self.name}: field {field.name} cannot be {shown}", detail=field.name)


# ---- requests -------------------------------------------------------------------------------------------------------


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


# ---- takeover: the memory that a dead worker had lent goes to the next one ------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt(Message):
    """Hold this slot as if it had been lent by this worker. Answered by `granted`, with its number here.

    `fd`: of the trainer's process, which is that of the session. `generation`: of the snapshot that the slot holds or
    receives; the saves of all generations up to `ended` have ended, as far as the trainer knows. `committed`: the save
    of generation `ended`, if a worker has said that it is committed, else "".
    """

    id: int
    fd: int
    nbytes: int
    token: bytes
    generation: int
    ended: int
    committed: str
    name: ClassVar[str] = "adopt"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "fd": check.uint,
        "nbytes": check.uint,
        "token": check.token,
        "generation": check.uint,
        "ended": check.uint,
        "committed": check.save_id_or_none,
    }


# ---- several nodes: one worker leads a run, the others follow -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lead(Message):
    """Lead `run`: listen for the workers that follow. The session joins the run.

    `client_public`: the key that they prove. `port`, `server_secret`: of the worker that has led this run before, so
    that its followers find this one; 0 and "" leave both to the worker.
    """

    id: int
    run: str
    port: int
    server_secret: str
    client_public: str
    name: ClassVar[str] = "lead"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "run": check.hex12,
        "port": check.port,
        "server_secret": check.curve_key_or_none,
        "client_public": check.curve_key,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Leading(Message):
    """The answer to Lead: where this worker listens, and the key pair that it proves."""

    id: int
    address: str
    server_public: str
    server_secret: str
    name: ClassVar[str] = "leading"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "address": check.address,
        "server_public": check.curve_key,
        "server_secret": check.curve_key,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Follow(Message):
    """Follow the worker that leads `run`. The session joins the run. Answered when that worker has answered.

    `attempt`: goes up with every Follow of this rank, whatever worker it is for, so that the latest counts.
    `timeout_s`: refused with `worker_unavailable` if it has not answered until then; the worker goes on trying.
    """

    id: int
    run: str
    address: str
    server_public: str
    client_public: str
    client_secret: str
    attempt: int
    timeout_s: float
    name: ClassVar[str] = "follow"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "run": check.hex12,
        "address": check.address,
        "server_public": check.curve_key,
        "client_public": check.curve_key,
        "client_secret": check.curve_key,
        "attempt": check.uint,
        "timeout_s": check.timeout,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Following(Message):
    """The answer to Follow: the leader's instance."""

    id: int
    leader: str
    name: ClassVar[str] = "following"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "leader": check.hex16}


# ---- snapshots in the worker's memory: a load asks where they are ---------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Message):
    """Ask for the snapshots at `path` and below it. `hold`: they stay where they are until this session ends."""

    id: int
    path: str
    hold: bool
    name: ClassVar[str] = "recall"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "path": check.path, "hold": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(Message):
    """The answer to Recall: a row for each rank's part of a snapshot, newest save first.

    A row is a map with `save_id`, `step`, `path`, `rank`, `world_size`, where the part lies (`slot`, `fd`, `nbytes`,
    `token` as in Granted; `generation`), and two flags: `whole`: all ranks have staged it, and nobody has objected;
    `committed`. `inode` and `birth_ns` (nanoseconds since 1970; 0: the file system does not tell) are of the save's
    directory once that was made, else of the one that was to hold it; `inode` 0: neither was seen.
    """

    id: int
    parts: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "recalled"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "parts": check.recall_rows}


# ---- boards: the ranks of a run put bytes for each other, piece by piece --------------------------------------------


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


# ---- replies --------------------------------------------------------------------------------------------------------


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

    A row is a map with `save_id`, `phase`, and where they apply `error` (as in Refused), `report` (numbers) and
    `missing` (ranks that have not sealed). `outcomes`: of the latest saves of `run`, the session's, that have ended on
    all ranks, [sequence, whether all ranks meet again after it].
    """

    id: int
    saves: tuple[Mapping[str, Any], ...]
    run: str
    outcomes: tuple[tuple[int, bool], ...]
    name: ClassVar[str] = "saves"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "saves": check.save_rows,
        "run": check.hex12_or_none,
        "outcomes": check.outcomes,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport(Message):
    """The answer to Status: a JSON-like map, described in SPEC.md."""

    id: int
    report: Mapping[str, Any]
    name: ClassVar[str] = "status_report"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "report": check.mapping}


_REQUESTS = (
    *(Hello, Allocate, Adopt, Release, Lead, Follow, Lineage, Begin, Submit, Withdraw, Consent, Share, Fetch, Recall),
    *(Heartbeat, Goodbye, Status, Drain),
)
_REPLIES = (Welcome, Granted, Leading, Following, LineageFound, Fetched, Recalled, Ok, Refused, Saves, StatusReport)

REQUESTS: dict[str, type[Message]] = {c.name: c for c in _REQUESTS}
REPLIES: dict[str, type[Message]] = {c.name: c for c in _REPLIES}
