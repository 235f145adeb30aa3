"""The brain's part of the status report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt_worker.records import Tables

MAX_ROWS = 100
"""Newest saves, sessions and slots in a status report: it must fit into one frame."""


def report(t: Tables, instance: str) -> Mapping[str, Any]:
    """Return what the tables hold, as plain values."""
    saves = sorted(t.entries(), key=lambda pair: pair[1].begun_at)[-MAX_ROWS:]
    return {
        "draining": t.draining,
        "instance": instance,
        "sessions": [
            {"session": s.name, "pid": s.pid, "rank": s.rank, "world_size": s.world_size, "slots": sorted(s.slots)}
            for s in list(t.sessions.values())[:MAX_ROWS]
        ],
        "slots": [
            {"slot": s.number, "nbytes": s.nbytes, "state": s.state, "save_id": s.key[0] if s.key else None}
            for s in list(t.slots.values())[:MAX_ROWS]
        ],
        "saves": [
            {"save_id": save.save_id, "rank": e.rank, "phase": e.phase, "step": e.step, "path": e.path[:1000]}
            for save, e in saves
        ],
        "jobs": t.jobs,
    }
