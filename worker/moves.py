"""What has just become of which rank's part in which save: for the status report, metrics and `events.jsonl`.

Read off the brain's tables at the end of each event; it changes nothing that a decision depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, COMMITTED, DURABLE, ENDED
from asyncckpt_worker.events import SaveKey
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.run_record import Newest
from asyncckpt_worker.tables import Tables

ALMOST = 0.99
"""What is shown as staged before the seal was seen: only that makes a snapshot of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """One rank has reached a phase.

    Attributes:
        save_id, step, path, rank, world_size: Of what.
        phase: One of `asyncckpt.protocol.lifecycle`.
        was: The phase before; "" for a rank that has just come.
        was_s: How long it was in that.
        nbytes: Of its files, as far as they are known.
        umask: Of the trainer.
        report: What its jobs have reported.
        error: Why it has failed; empty else.
        ends: This rank ends the save: `begun_s` is how long that took from the first rank's begin.
        begun_s: See there.
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


def look(t: Tables) -> list[Moved]:
    """Return what this event has moved, in order, and note since when each rank is where it is.

    IMPORTANT: before `FollowBook.flush`, which forgets what was touched.
    """
    found = []
    for key in t.touched:
        save, entry = t.saves.get(key[0]), t.entry(key)
        if save is not None and entry is not None and entry.seen != entry.phase:
            found.append(_moved(t, save, entry))
    return found


def _moved(t: Tables, save: Save, entry: RankSave) -> Moved:
    was, was_s = entry.seen, t.now - entry.since if entry.seen else 0.0
    entry.seen, entry.since = entry.phase, t.now
    ends = save.outcome is not None and not save.told_end
    if ends:
        save.told_end = True
    session, run = t.sessions.get(entry.session), t.runs.get(save.save_id[-12:])
    if entry.phase in (DURABLE, COMMITTED) and was not in (DURABLE, COMMITTED) and session is not None:
        session.durable = (entry.step, t.now)
    if ends and save.outcome == COMMITTED and run is not None:
        run.newest = Newest(step=entry.step, path=entry.path, at=t.now)
    nbytes = entry.report.get("nbytes", entry.nbytes)
    return Moved(
        save_id=save.save_id,
        step=entry.step,
        path=entry.path,
        rank=entry.rank,
        world_size=save.world_size,
        phase=entry.phase,
        was=was,
        was_s=was_s,
        nbytes=nbytes if type(nbytes) is int else 0,
        umask=entry.umask,
        report=dict(entry.report),
        error=str((entry.error or {}).get("text", "")),
        ends=ends,
        begun_s=t.now - min(e.begun_at for e in save.ranks.values()) if ends else 0.0,
        local=not entry.link,
        followed=run is not None and run.followed,
    )


def rank_rows(t: Tables, limit: int) -> list[dict[str, Any]]:
    """Return one row for each rank that has a session here, in the order of runs and ranks."""
    latest: dict[str, tuple[Save, RankSave]] = {}
    wanted = sorted(t.sessions.values(), key=lambda s: (s.run, s.rank, s.name))[:limit]
    missing = {session.name for session in wanted}
    for save in reversed(t.saves.values()):
        if not missing:
            break
        for session in [s for s in wanted if s.name in missing and s.run == save.save_id[-12:]]:
            entry = save.ranks.get(session.rank)
            if entry is not None and entry.session == session.name:
                latest[session.name] = (save, entry)
                missing.discard(session.name)
    return [_rank_row(t, session.name, latest.get(session.name)) for session in wanted]


def _rank_row(t: Tables, name: str, latest: tuple[Save, RankSave] | None) -> dict[str, Any]:
    session = t.sessions[name]
    slots = [t.slots[number] for number in session.slots if number in t.slots]
    row: dict[str, Any] = {
        "run": session.run,
        "rank": session.rank,
        "world_size": session.world_size,
        "pid": session.pid,
        "node": "here" if not session.link else session.link[:8],
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
    if latest is not None:
        save, entry = latest
        row |= {
            "save_id": save.save_id,
            "step": entry.step,
            "phase": entry.phase,
            "phase_s": t.now - entry.since if entry.seen else 0.0,
            "nbytes": entry.nbytes,
            "staged": _staged(entry.phase),
            "slot": None if entry.link else entry.slot,
            "generation": entry.generation,
        }
    return row


def with_progress(
    rows: Iterable[Mapping[str, Any]],
    written: Mapping[SaveKey, int],
    staged: Callable[[int, int], int],
) -> list[dict[str, Any]]:
    """Return the rows of ranks with how far they are; None where that is not known here.

    Args:
        rows: Of `rank_rows`.
        written: How many bytes of a rank's shards have been written.
        staged: Returns how many bytes of a slot's generation its trainer has copied.
    """
    found = []
    for row in rows:
        row = dict(row)
        slot, generation = row.pop("slot", None), row.pop("generation", -1)
        if row["phase"] == BEGUN and row["nbytes"]:
            row["staged"] = None if slot is None else min(staged(slot, generation) / row["nbytes"], ALMOST)
        nbytes = written.get((str(row["save_id"]), row["rank"]))
        if nbytes is None and row["phase"] in (DURABLE, COMMITTED):
            nbytes = row["nbytes"]
        found.append({**row, "written_nbytes": nbytes})
    return found


def _staged(phase: str) -> float | None:
    """Of what a rank saves, how much is safe from its end: all once the seal was seen; None: not known."""
    return 0.0 if phase == BEGUN else None if phase in ENDED and phase != COMMITTED else 1.0


def run_rows(t: Tables, limit: int) -> list[dict[str, Any]]:
    """Return one row for each run that has a rank here or has committed something; the newest last."""
    rows = []
    for run in [run for run in t.runs.values() if run.members or run.newest][-limit:]:
        newest = run.newest
        open_saves = [s for s in t.saves.values() if s.outcome is None and s.save_id[-12:] == run.run_id]
        rows.append(
            {
                "run": run.run_id,
                "world_size": run.world_size,
                "ranks": len(run.members),
                "gone": len(run.gone),
                "in_flight": len(open_saves),
                "committed_step": newest.step if newest else None,
                "committed_path": newest.path[:1000] if newest else None,
                "committed_age_s": t.now - newest.at if newest else None,
            }
        )
    return rows
