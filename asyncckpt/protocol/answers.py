"""What a worker says. Part of `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.message import Message


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
