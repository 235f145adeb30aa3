"""The messages between trainer and worker: frozen, keyword-only, and checked in the constructor.

`SPEC.md` in this directory is normative; a test compares both. Messages of the trainer are requests with an ID that is
unique in the session. The worker answers every arrival; requests are idempotent and may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check

PROTOCOL_VERSION = 16
"""Version of messages, records between workers and the request in a slot. SPEC.md section 2 says when to raise it."""

MAX_TABLE = check.MAX_TABLE


class Message:
    """Base of all messages. `name`: name on the wire; `checks`: check of each field."""

    name: ClassVar[str]
    checks: ClassVar[dict[str, Check]]

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if not self.checks[one.name](value):
                shown = repr(value)[:80] if one.repr else "..."  # it may be a secret
                raise ProtocolError(f"{self.name}: field {one.name} has the invalid value {shown}", detail=one.name)


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """Open a session. `pid_start`: start time of the trainer in clock ticks since boot (proc(5), field 22).

    `replaces`: the client's session before this one, which ends as by Goodbye; "" if there is none. `storage`: options
    of object stores for the saves of this session; they may have secrets.
    """

    id: int
    session: str
    replaces: str
    package: str
    pid: int
    pid_start: int
    rank: int
    world_size: int
    storage: Mapping[str, str] = field(repr=False)
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
        "storage": check.storage_options,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate(Message):
    """Allocate a slot of `nbytes`, including control pages. `populate`: fault in its pages in advance."""

    id: int
    nbytes: int
    populate: bool
    name: ClassVar[str] = "allocate"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "nbytes": check.uint, "populate": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Message):
    """Release a slot. The worker frees it once no save needs it."""

    id: int
    slot: int
    name: ClassVar[str] = "release"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "slot": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage(Message):
    """Ask for the epoch of the saves of `run` in the parent directory of `path`. The session joins the run.

    `least_epoch`: the smallest epoch that is newer than what the trainer has found where it looked for a checkpoint to
    restore; 0: any.
    """

    id: int
    run: str
    path: str
    least_epoch: int
    name: ClassVar[str] = "lineage"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "run": check.hex12,
        "path": check.path,
        "least_epoch": check.uint,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Message):
    """Begin a save, before staging: the worker creates the directory, and checks what would make the save fail."""

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
    """Notify the worker that the slot is sealed. The worker reads the request from the slot."""

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
    """Withdraw from a save, which ends on all ranks. Epoch 0 in `save_id`: not known. `skipped`: on purpose."""

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
    """Answer of this rank's `pre_commit` hook; `reason`: why it was not granted."""

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
    """Ask for the states of these saves; the answer also shows that the control loop is running."""

    id: int
    saves: tuple[str, ...]
    name: ClassVar[str] = "heartbeat"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "saves": check.save_ids}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirror(Message):
    """Ask how far the copy of a committed save is. If this worker does not know of the copy, it begins it.

    Only the worker of rank 0 copies; another one looks whether the copy is recorded beside the local manifest.
    """

    id: int
    save_id: str
    path: str
    mirror: str
    name: ClassVar[str] = "mirror"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "save_id": check.save_id,
        "path": check.path,
        "mirror": check.path,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye(Message):
    """End the session: submitted saves continue, and their slots are freed when they end."""

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
    """Finish the submitted saves, refuse new sessions, then exit. `now`: exit without waiting for saves."""

    id: int
    now: bool
    name: ClassVar[str] = "drain"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "now": check.flag}


# ---- failover: slots of a dead worker are handed to another one -----------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt(Message):
    """Adopt a slot of a dead worker. The answer is `granted`, with the slot's number in this worker.

    `fd`: descriptor in the session's process. `generation`: generation of the snapshot that the slot holds or receives.
    `ended`: saves up to this generation have ended, as far as the trainer knows. `committed`: the save of generation
    `ended`, if the trainer was told that it is committed, else "".
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
    """Lead `run`: listen for followers. The session joins the run.

    `client_public`: public key of the followers. `port`, `server_secret`: those of the former leader of this run, so
    that its followers find this one; 0 and "": the worker chooses.
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
    """The answer to Lead: address and key pair of this worker."""

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
    """Follow the worker that leads `run`. The session joins the run. The answer comes after the leader's first message.

    `attempt`: increases with every Follow of this rank, to any worker; the latest one counts. `timeout_s`: without a
    message of the leader by then, refused with `worker_unavailable`; the worker continues to retry.
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
    """The answer to Follow: instance of the leader."""

    id: int
    leader: str
    name: ClassVar[str] = "following"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "leader": check.hex16}


# ---- snapshots in the worker's memory, for loads --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall(Message):
    """Ask for the snapshots at `path` and below it. `hold`: their slots are held until this session ends."""

    id: int
    path: str
    hold: bool
    name: ClassVar[str] = "recall"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "path": check.path, "hold": check.flag}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(Message):
    """The answer to Recall: a row for each rank's part of a snapshot, newest save first.

    A row is a map with `save_id`, `step`, `path`, `rank`, `world_size`, its memory (`slot`, `fd`, `nbytes`,
    `token` as in Granted; `generation`), and two flags: `whole`: all ranks have sealed it, and no check or hook has
    rejected it; `committed`. `inode` and `birth_ns` (nanoseconds since 1970; 0: not known) identify the save's
    directory, or its parent before the directory was created; `inode` 0: neither was found.
    """

    id: int
    parts: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "recalled"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "parts": check.recall_rows}


# ---- boards: the ranks of a run exchange bytes, piece by piece ------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Share(Message):
    """Share a piece of this rank's bytes on a board: `data` at `offset` of `total`. Pieces must come in order."""

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
    """Fetch the piece at `offset` of the bytes that `rank` has shared on a board."""

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
    """The answer to Fetch. `missing`: ranks that have not shared everything; `data` is empty while there are any."""

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
    """The answer to Hello. `instance`: random ID of the worker process."""

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
    """The answer to Allocate and Adopt: the slot's number, its memfd in the worker, its size, and its token."""

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
    """The request was accepted."""

    id: int
    name: ClassVar[str] = "ok"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint}


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message):
    """The request was refused: an error of `asyncckpt.errors` as code, text and fields."""

    id: int
    error: Mapping[str, Any]
    name: ClassVar[str] = "refused"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "error": check.mapping}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves(Message):
    """States of saves: the answer to Heartbeat, or a notification (ID 0) after a change.

    A row is a map with `save_id`, `phase`, and optionally `error` (as in Refused), `report` (figures) and `missing`
    (ranks that the save waits for). `outcomes`: [sequence, whether the ranks meet again after it] of the latest saves
    of `run`, the session's run, that have ended on all ranks.
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
class Mirrored(Message):
    """The answer to Mirror. `phase`: `waiting`, `copying`, `done` or `failed`; `error`: why, when `failed`, else empty.

    `report`: numbers, when `done`.
    """

    id: int
    phase: str
    error: Mapping[str, Any]
    report: Mapping[str, Any]
    name: ClassVar[str] = "mirrored"
    checks: ClassVar[dict[str, Check]] = {
        "id": check.uint,
        "phase": check.copy_phase,
        "error": check.error_or_none,
        "report": check.figures,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport(Message):
    """The answer to Status: a map of plain values, described in SPEC.md."""

    id: int
    report: Mapping[str, Any]
    name: ClassVar[str] = "status_report"
    checks: ClassVar[dict[str, Check]] = {"id": check.uint, "report": check.mapping}


_REQUESTS = (
    *(Hello, Allocate, Adopt, Release, Lead, Follow, Lineage, Begin, Submit, Withdraw, Consent, Share, Fetch, Recall),
    *(Heartbeat, Mirror, Goodbye, Status, Drain),
)
_REPLIES = (
    *(Welcome, Granted, Leading, Following, LineageFound, Fetched, Recalled, Ok, Refused, Saves, Mirrored),
    StatusReport,
)

REQUESTS: dict[str, type[Message]] = {c.name: c for c in _REQUESTS}
REPLIES: dict[str, type[Message]] = {c.name: c for c in _REPLIES}
