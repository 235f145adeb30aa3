"""Reports of the core: rows for trainers, phase changes of each event, and its part of the status report.

No decision depends on what these functions change in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.fields import MAX_MISSING
from asyncckpt.protocol.messages import Heartbeat, Saves
from asyncckpt.protocol.save_phases import COMMITTED, DURABLE, ENDED, OPEN, PHASES, RECOVERING, SEALED, WRITING
from asyncckpt_worker.core.events import SaveKey
from asyncckpt_worker.core.model import Newest, RankSave, Save, Session
from asyncckpt_worker.core.tables import EndedSave, Tables

ALMOST = 0.99
"""Maximum share that is shown as staged before the seal: only the seal completes the snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseChange:
    """One rank has changed its phase.

    Attributes:
        save_id, step, path, rank, world_size: The save and its rank.
        phase: One of `asyncckpt.protocol.save_phases`.
        was: The phase before; "" for a new part.
        was_s: Seconds in that phase.
        nbytes: Size of its files: as reported by its jobs, else as announced by its trainer.
        umask: Umask of the trainer.
        report: Figures of its jobs.
        error: Text of its error, or "".
        ends: The first phase change after the end of the save, once for each save.
        begun_s: With `ends`: seconds from the first rank's begin to the end; else 0.
        local: The files of this rank are written by this worker.
        followed: Another worker leads the run.
    """

    save_id: str
    step: int | None
    path: str
    rank: int
    world_size: int
    phase: str
    was: str = ""
    was_s: float = 0.0
    nbytes: int = 0
    umask: int = 0o077
    report: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    ends: bool = False
    begun_s: float = 0.0
    local: bool = True
    followed: bool = False


def note_phase_change(t: Tables, save: Save, part: RankSave, found: list[PhaseChange]) -> None:
    """Add the phase change of a rank's part to `found`, and record in the part that it was reported, and when."""
    was, was_s = part.seen, t.now - part.since if part.seen else 0.0
    part.seen, part.since = part.phase, t.now
    ends = save.outcome is not None and not save.end_reported
    if ends:
        save.end_reported = True
    session, run = t.sessions.get(part.session), t.runs.get(save.save_id.run_id)
    if part.phase in (DURABLE, COMMITTED) and was not in (DURABLE, COMMITTED) and session is not None:
        session.durable = (part.step, t.now)
    if ends and save.outcome == COMMITTED and run is not None:
        run.newest = Newest(step=part.step, path=part.path, at=t.now)
    nbytes = part.report.get("nbytes", part.nbytes)
    found.append(
        PhaseChange(
            save_id=save.save_id,
            step=part.step,
            path=part.path,
            rank=part.rank,
            world_size=save.world_size,
            phase=part.phase,
            was=was,
            was_s=was_s,
            nbytes=nbytes if type(nbytes) is int else 0,
            umask=part.umask,
            report=dict(part.report),
            error=str((part.error or {}).get("text", "")),
            ends=ends,
            begun_s=t.now - min(e.begun_at for e in save.ranks.values()) if ends else 0.0,
            local=not part.follower,
            followed=run is not None and run.followed,
        )
    )


def rank_rows(t: Tables, limit: int) -> list[dict[str, Any]]:
    """Return a row for each rank that has a session here, ordered by run and rank."""
    wanted = sorted(t.sessions.values(), key=lambda s: (s.run, s.rank, s.name))[:limit]
    return [_rank_row(t, session) for session in wanted]


def _rank_row(t: Tables, session: Session) -> dict[str, Any]:
    slots = [t.slots[number] for number in session.slots if number in t.slots]
    row: dict[str, Any] = {
        "run": session.run,
        "rank": session.rank,
        "world_size": session.world_size,
        "pid": session.pid,
        "node": "here" if not session.follower else session.follower[:8],
        "slots": len(slots),
        "slots_nbytes": sum(slot.nbytes for slot in slots),
        "durable_step": session.durable[0] if session.durable else None,
        "durable_age_s": t.now - session.durable[1] if session.durable else None,
        "save_id": None,
        "step": None,
        "phase": "idle",
        "phase_s": None,
        "nbytes": None,
        "staged": None,
    }
    if session.last is not None and session.last[0].save_id.run_id == session.run:
        save, part = session.last
        row |= {
            "save_id": save.save_id,
            "step": part.step,
            "phase": part.phase,
            "phase_s": t.now - part.since if part.seen else 0.0,
            "nbytes": part.nbytes,
            "staged": _staged(part.phase),
            "slot": None if part.follower else part.slot,
            "generation": part.generation,
        }
    return row


def with_progress(
    rows: Iterable[Mapping[str, Any]],
    written: Mapping[SaveKey, int],
    staged: Callable[[int, int], int],
) -> list[dict[str, Any]]:
    """Add the progress of staging and writing to rows of ranks; None where it is not known.

    Args:
        rows: Rows of `rank_rows`.
        written: Save and rank -> bytes of the rank's shards that have been written.
        staged: Returns how many bytes of a slot's generation its trainer has copied.
    """
    found = []
    for row in rows:
        row = dict(row)
        slot, generation = row.pop("slot", None), row.pop("generation", -1)
        if row["phase"] == OPEN and row["nbytes"]:
            row["staged"] = None if slot is None else min(staged(slot, generation) / row["nbytes"], ALMOST)
        nbytes = written.get((str(row["save_id"]), row["rank"]))
        if nbytes is None and row["phase"] in (DURABLE, COMMITTED):
            nbytes = row["nbytes"]
        found.append({**row, "written_nbytes": nbytes})
    return found


def _staged(phase: str) -> float | None:
    """Return the share of a rank's snapshot that is staged: 1 from the seal on, None if it is not known."""
    if phase == RECOVERING or (phase in ENDED and phase != COMMITTED):
        return None
    return 0.0 if phase == OPEN else 1.0


def run_rows(t: Tables, limit: int) -> list[dict[str, Any]]:
    """Return a row for each run that has a rank here or has committed a save; the newest last."""
    rows = []
    for run in [run for run in t.runs.values() if run.members or run.newest][-limit:]:
        newest = run.newest
        open_saves = t.open_saves(run.run_id)
        rows.append(
            {
                "run": run.run_id,
                "world_size": run.world_size,
                "ranks": len(run.members),
                "gone": len(run.departed),
                "in_flight": len(open_saves),
                "committed_step": newest.step if newest else None,
                "committed_path": newest.path[:MAX_PATH_CHARS] if newest else None,
                "committed_age_s": t.now - newest.at if newest else None,
            }
        )
    return rows


MAX_ROWS = 100
"""Maximum rows of a table in the status report, which must fit into one frame."""

MAX_RANKS_SHOWN = 64
"""Maximum ranks of one save in the status report."""

MAX_ERROR_CHARS = 300
"""Maximum length of an error's text in the status report."""

MAX_PATH_CHARS = 1000
"""Maximum length of a path in the status report."""

OPEN_PHASES = (OPEN, RECOVERING, SEALED, WRITING, DURABLE)
"""Phases of a part of an open save, the earliest first."""


def report(t: Tables, instance: str) -> Mapping[str, Any]:
    """Return the core's part of the status report, as plain values."""
    known = {save.save_id: _ended_row(save) for save in reversed(t.ended.latest(MAX_ROWS))}
    known |= {save.save_id: _row(save) for save in t.saves.values() if save.save_id not in known}
    rows = list(known.values())[-MAX_ROWS:]
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
        "saves": rows,
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
        "path": first.path[:MAX_PATH_CHARS],
        "phase": save.outcome or _phase(save),
        "ranks": {str(rank): save.ranks[rank].phase for rank in sorted(save.ranks)[:MAX_RANKS_SHOWN]},
        "missing": save.missing[:MAX_RANKS_SHOWN],
        **_error_of(save),
    }


def _ended_row(save: EndedSave) -> Mapping[str, Any]:
    return {
        "save_id": save.save_id,
        "step": save.step,
        "path": save.path[:MAX_PATH_CHARS],
        "phase": save.outcome,
        "ranks": {str(rank): phase for rank, phase in save.phases(MAX_RANKS_SHOWN)},
        "missing": [],
        **_error_of(save),
    }


def _error_of(save: Save | EndedSave) -> Mapping[str, Any]:
    return {} if save.error is None else {"error": str(save.error.get("text", ""))[:MAX_ERROR_CHARS]}


def _phase(save: Save) -> str:
    """Return the earliest phase of its ranks; `open` while a rank has no part."""
    phases = [e.phase for e in save.ranks.values()]
    return OPEN if len(phases) < save.world_size else min(phases, key=OPEN_PHASES.index)


def row_of(save: Save | EndedSave, part: RankSave) -> Mapping[str, Any]:
    """Return the row of a Saves message (protocol/SPEC.md) for one rank of a save."""
    assert part.phase in PHASES
    row: dict[str, Any] = {"save_id": save.save_id, "phase": part.phase, "report": dict(part.report)}
    if part.error is not None:
        row["error"] = dict(part.error)
    missing = missing_of(save) if isinstance(save, Save) else []
    if missing and save.outcome is None:
        row["missing"] = missing[:MAX_MISSING]
    return row


def missing_of(save: Save) -> list[int]:
    """Return the ranks that an open save waits for: those that have not sealed it, then those that are not durable.

    Empty before the first seal.
    """
    if save.leader_missing is not None:
        return save.leader_missing
    if save.sealed_since is None or save.outcome is not None:
        return []
    return save.missing or sorted(e.rank for e in save.ranks.values() if e.phase != DURABLE and e.in_flight)


def heartbeat_answer(t: Tables, session: Session, m: Heartbeat) -> Saves:
    """Return the answer to a Heartbeat; saves that the worker does not know are omitted."""
    known = [(t.find(i), t.part((i, session.rank))) for i in dict.fromkeys(m.saves)]
    rows = tuple(row_of(s, e) for s, e in known if s is not None and e is not None)
    return _saves(t, session, rows, m.id)


def notify(t: Tables) -> None:
    """Send trainers the phase changes and outcomes of the current event, and clear both."""
    changed, t.changed = t.changed, {}
    announced, t.announced = t.announced, {}
    notified: set[str] = set()
    for save_id, rank in changed:
        t.run_guarded("", _notify_of_part, t, save_id, rank, notified)
    for run_id in announced:
        run = t.runs.get(run_id)
        for name in [name for name in run.members.values() if name not in notified] if run is not None else ():
            session = t.sessions.get(name)
            if session is not None and not session.follower:
                t.send(session.peer, _saves(t, session, ()))


def _notify_of_part(t: Tables, save_id: str, rank: int, notified: set[str]) -> None:
    save = t.saves[save_id]
    session = t.sessions.get(save.ranks[rank].session)
    if session is not None and not session.follower:
        row = row_of(save, save.ranks[rank])
        notified.add(session.name)
        t.send(session.peer, _saves(t, session, (row,)))


def _saves(t: Tables, session: Session, rows: tuple[Mapping[str, Any], ...], id: int = 0) -> Saves:
    run = t.runs.get(session.run)
    if run is None:
        return Saves(id=id, saves=rows, run="", outcomes=())
    return Saves(id=id, saves=rows, run=run.run_id, outcomes=tuple(run.outcomes.items()))
