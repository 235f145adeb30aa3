"""The brain's part of the status report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, DURABLE, SUBMITTED, WRITING
from asyncckpt_worker.moves import rank_rows, run_rows
from asyncckpt_worker.records import Save
from asyncckpt_worker.tables import Tables

MAX_ROWS = 100
"""Newest saves, sessions and slots in a status report: it must fit into one frame."""

MAX_RANKS_SHOWN = 64
"""Ranks of one save that are named there."""

MAX_ERROR_CHARS = 300
"""Of why a save has failed: it names the rank."""

_ORDER = (BEGUN, SUBMITTED, WRITING, DURABLE)


def report(t: Tables, instance: str) -> Mapping[str, Any]:
    """Return what the tables hold, as plain values."""
    saves = sorted(t.saves.values(), key=lambda s: min(e.begun_at for e in s.ranks.values()))[-MAX_ROWS:]
    return {
        "draining": t.draining,
        "instance": instance,
        "sessions": [
            {"session": s.name, "pid": s.pid, "rank": s.rank, "world_size": s.world_size, "slots": sorted(s.slots)}
            for s in list(t.sessions.values())[:MAX_ROWS]
        ],
        "slots": [
            {"slot": s.number, "nbytes": s.nbytes, "state": s.state, "save_id": s.key[0] if s.key else None}
            for s in [s for s in t.slots.values() if not s.kept][:MAX_ROWS]
        ],
        "kept": [
            {"slot": s.number, "nbytes": s.nbytes, "rank": s.rank, "save_id": s.key[0], "readers": len(s.held_by)}
            for s in t.slots.values()
            if s.kept and s.key is not None
        ][:MAX_ROWS],
        "saves": [_row(save) for save in saves],
        "failures": dict(t.failures),
        "jobs": t.jobs,
        "ranks": rank_rows(t, MAX_ROWS),
        "runs": run_rows(t, MAX_ROWS),
    }


def _row(save: Save) -> Mapping[str, Any]:
    first = save.ranks[min(save.ranks)]
    return {
        "save_id": save.save_id,
        "step": first.step,
        "path": first.path[:1000],
        "phase": save.outcome or _phase(save),
        "ranks": {str(rank): save.ranks[rank].phase for rank in sorted(save.ranks)[:MAX_RANKS_SHOWN]},
        "missing": save.missing[:MAX_RANKS_SHOWN],
        **({} if save.error is None else {"error": str(save.error.get("text", ""))[:MAX_ERROR_CHARS]}),
    }


def _phase(save: Save) -> str:
    """The least that a rank has reached; one that was not heard of has begun at the most."""
    phases = [e.phase for e in save.ranks.values()]
    return BEGUN if len(phases) < save.world_size else min(phases, key=_ORDER.index)
