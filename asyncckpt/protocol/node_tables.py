"""The messages between workers of several nodes: the report of a follower, and the outcomes of the leader.

Each message is a page of a table, which is level-triggered: changed rows are sent at once, the whole table every
`BEAT_S`. Pages may be lost, repeated or reordered, since rows are sent until the other side has acknowledged them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncckpt.protocol import fields as check
from asyncckpt.protocol.fields import Check
from asyncckpt.protocol.messages import Message
from asyncckpt.protocol.save_phases import ABANDONED, DURABLE, ENDED, FAILED, OPEN, SEALED

MAX_NODE_FRAME_NBYTES = 8 << 20
"""Maximum size of a message between workers. One row fits: samples (1 MiB), sums (1 MiB), texts. Chosen."""

PAGE_NBYTES = 512 << 10
"""No further row is added to a page beyond this size. Chosen, not measured."""

MAX_REQUEST_NBYTES = 2 << 20
"""Maximum size of a request without structure, objects and metadata: samples have 1 MiB, parts 20 KiB."""

BEAT_S = 2.0
"""Interval at which the whole table is sent. Chosen, not measured."""

_PHASES = (OPEN, SEALED, DURABLE)

CONSENTED = "consented"
"""In `known`: the leader knows that the part is durable, and that its hook has consented."""


def part_phase(value: Any) -> bool:
    """`open`, `sealed` or `durable`."""
    return type(value) is str and value in _PHASES


def known_phase(value: Any) -> bool:
    """A `part_phase`, or `consented`."""
    return part_phase(value) or (type(value) is str and value == CONSENTED)


def failure(value: Any) -> bool:
    """`failed` or `abandoned`."""
    return type(value) is str and value in (FAILED, ABANDONED)


def end_or_open(value: Any) -> bool:
    """A phase that ends a save, or the empty text."""
    return type(value) is str and (value == "" or value in ENDED)


def request_bytes(value: Any) -> bool:
    """At most `MAX_REQUEST_NBYTES` bytes."""
    return type(value) is bytes and len(value) <= MAX_REQUEST_NBYTES


def error(value: Any) -> bool:
    """An error, not empty."""
    return check.error_or_none(value) and bool(value)


def missing(value: Any) -> bool:
    """At most `MAX_MISSING` ranks."""
    return check.ranks(value) and len(value) <= check.MAX_MISSING


def known(value: Any) -> bool:
    """A list of [rank, `known_phase`]."""
    return (
        isinstance(value, (list, tuple))
        and len(value) <= check.MAX_TABLE
        and all(isinstance(p, (list, tuple)) and len(p) == 2 and check.rank(p[0]) and known_phase(p[1]) for p in value)
    )


ROWS: dict[str, dict[str, Check]] = {
    "rank_rows": {"rank": check.rank, "attempt": check.uint, "gone": check.text},
    "part_rows": {
        "save_id": check.save_id,
        "rank": check.rank,
        "phase": part_phase,
        "step": check.sint_or_none,
        "path": check.path,
        "nbytes": check.uint,
        "umask": check.umask,
        "overwrite": check.flag,
        "commit_timeout_s": check.timeout,
        "recovering": check.flag,
        "streamed": check.flag,
        "writing": check.flag,
    },
    "failure_rows": {"save_id": check.save_id, "outcome": failure, "error": error},
    "withdrawal_rows": {"save_id": check.save_id, "rank": check.rank, "reason": check.text, "skipped": check.flag},
    "question_rows": {
        "rank": check.rank,
        "path": check.path,
        "least_epoch": check.uint,
        "number": check.uint,
    },
    "outcome_rows": {
        "save_id": check.save_id,
        "outcome": end_or_open,
        "error": check.error_or_none,
        "report": check.figures,
        "missing": missing,
        "known": known,
    },
    "epoch_rows": {"path": check.path, "number": check.uint, "epoch": check.uint, "error": check.error_or_none},
}
"""Keys of the rows of each table; SPEC.md section 7 describes them."""

PART_DETAILS: dict[str, Check] = {
    "request": request_bytes,
    "result": check.mapping,
    "report": check.figures,
    "consent": check.flag,
    "reason": check.text,
}
"""Optional keys of `part_rows`."""


def _is_table(value: Any, name: str, optional: Mapping[str, Check] | None = None) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) > check.MAX_TABLE:
        return False
    return all(
        check.mapping(row)
        and all(key in row and fits(row[key]) for key, fits in ROWS[name].items())
        and all(key not in row or fits(row[key]) for key, fits in (optional or {}).items())
        for row in value
    )


def rank_rows(value: Any) -> bool:
    """Rows of the follower's ranks."""
    return _is_table(value, "rank_rows")


def part_rows(value: Any) -> bool:
    """Rows of parts in open saves."""
    return _is_table(value, "part_rows", PART_DETAILS)


def failure_rows(value: Any) -> bool:
    """Rows of saves that have failed at the follower."""
    return _is_table(value, "failure_rows")


def withdrawal_rows(value: Any) -> bool:
    """Rows of saves from which a rank has withdrawn."""
    return _is_table(value, "withdrawal_rows")


def question_rows(value: Any) -> bool:
    """Rows of lineage questions: requests for the run's epoch in a directory."""
    return _is_table(value, "question_rows")


def outcome_rows(value: Any) -> bool:
    """Rows of saves: their outcome, or the phases that the leader acknowledges."""
    return _is_table(value, "outcome_rows")


def epoch_rows(value: Any) -> bool:
    """Rows of answers to lineage questions."""
    return _is_table(value, "epoch_rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Message):
    """A page of a follower's table of one run.

    `counter` increases with every page. `to`: instance of the leader; "" before its first message, then without
    parts. `saves`: all saves whose outcomes the follower asks for, in every page.
    """

    sender: str
    counter: int
    to: str
    world_size: int
    ranks: tuple[Mapping[str, Any], ...]
    saves: tuple[str, ...]
    parts: tuple[Mapping[str, Any], ...]
    failures: tuple[Mapping[str, Any], ...]
    withdrawals: tuple[Mapping[str, Any], ...]
    questions: tuple[Mapping[str, Any], ...]
    name: ClassVar[str] = "report"
    checks: ClassVar[dict[str, Check]] = {
        "sender": check.hex16,
        "counter": check.uint,
        "to": check.hex16_or_none,
        "world_size": check.uint,
        "ranks": rank_rows,
        "saves": check.save_ids,
        "parts": part_rows,
        "failures": failure_rows,
        "withdrawals": withdrawal_rows,
        "questions": question_rows,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes(Message):
    """A page of the leader's table of one run, for the follower `to`.

    `decided`: sequences of saves of the run that have ended on all ranks, each with whether the ranks meet again after
    it. `gone`: departed ranks of the follower that the leader has acknowledged. `error`: why the leader rejects the
    reports of this follower; empty if it accepts them.
    """

    sender: str
    counter: int
    to: str
    saves: tuple[Mapping[str, Any], ...]
    epochs: tuple[Mapping[str, Any], ...]
    decided: tuple[tuple[int, bool], ...]
    gone: tuple[int, ...]
    error: Mapping[str, Any]
    name: ClassVar[str] = "outcomes"
    checks: ClassVar[dict[str, Check]] = {
        "sender": check.hex16,
        "counter": check.uint,
        "to": check.hex16,
        "saves": outcome_rows,
        "epochs": epoch_rows,
        "decided": check.outcomes,
        "gone": check.ranks,
        "error": check.error_or_none,
    }


NODE_MESSAGES: dict[str, type[Message]] = {c.name: c for c in (Report, Outcomes)}
