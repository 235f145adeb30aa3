"""What the worker puts into `events.jsonl` (docs/observability.md) of what the brain has moved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, DURABLE, SUBMITTED, WRITING
from asyncckpt.storage.event_log import EventLog
from asyncckpt_worker.moves import Moved
from asyncckpt_worker.preflight import check_root

MAX_ERROR_CHARS = 1000


class Teller:
    """Writes events of the runs that this worker decides on; followers leave it to their leader.

    Args:
        roots: Directories below which it may write; empty allows every path.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.log = EventLog(check=partial(check_root, roots=tuple(roots)))

    def tell(self, moves: Sequence[Moved]) -> None:
        """Put down what has moved. Does not wait."""
        for moved in moves:
            if moved.followed:
                continue
            name = _name(moved)
            if name:
                self._add(moved, name, _of_a_rank(moved))
            if moved.ends:
                self._add(moved, moved.phase, _of_a_save(moved))

    def _add(self, moved: Moved, name: str, facts: dict[str, Any]) -> None:
        known: dict[str, Any] = {"save_id": moved.save_id, "name": os.path.basename(moved.path)}
        if moved.step is not None:  # else rank 0 has not said it yet
            known["step"] = moved.step
        self.log.add(os.path.dirname(moved.path), name, {**known, **facts}, umask=moved.umask)

    def close(self) -> None:
        """Write what is left; at most a second."""
        self.log.close()


def is_seal(moved: Moved) -> bool:
    """Whether the snapshot of a rank has been taken up."""
    return moved.phase in (SUBMITTED, WRITING) and moved.was in ("", BEGUN)


def _name(moved: Moved) -> str:
    """`begun`, `sealed`, `durable`; "" for what no line is about."""
    if is_seal(moved):
        return "sealed"
    return moved.phase if moved.phase in (BEGUN, DURABLE) else ""


def _of_a_rank(moved: Moved) -> dict[str, Any]:
    seconds = {k.removeprefix("seconds_"): round(v, 6) for k, v in moved.report.items() if k.startswith("seconds_")}
    facts: dict[str, Any] = {"rank": moved.rank, "nbytes": moved.nbytes}
    if moved.was:
        facts["seconds_before"] = round(moved.was_s, 6)
    if seconds:
        facts["seconds"] = seconds
    if "direct" in moved.report:
        facts["direct"] = bool(moved.report["direct"])
    return facts


def _of_a_save(moved: Moved) -> dict[str, Any]:
    facts: dict[str, Any] = {"ranks": moved.world_size, "seconds_total": round(moved.begun_s, 6)}
    commit = moved.report.get("seconds_commit")
    if commit is not None:
        facts["seconds"] = {"commit": round(commit, 6)}
    if moved.error:
        facts["error"] = moved.error[:MAX_ERROR_CHARS]
    return facts
