"""What the brain tells trainers about their saves: asked for, and unasked when something has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncckpt.protocol.fields import MAX_MISSING
from asyncckpt.protocol.lifecycle import SUBMITTED, TRANSITIONS, WRITING
from asyncckpt.protocol.messages import Heartbeat, Saves
from asyncckpt_worker.actions import Send
from asyncckpt_worker.records import RankSave, Save, Session
from asyncckpt_worker.tables import Tables


def row_of(save: Save, entry: RankSave) -> Mapping[str, Any]:
    """Return the row of a Saves message (protocol/SPEC.md) for one rank of a save."""
    assert entry.phase in TRANSITIONS
    row: dict[str, Any] = {"save_id": save.save_id, "phase": entry.phase, "report": dict(entry.report)}
    if entry.error is not None:
        row["error"] = dict(entry.error)
    missing = missing_of(save)
    if missing and save.outcome is None:
        row["missing"] = missing[:MAX_MISSING]
    return row


def missing_of(save: Save) -> list[int]:
    """Return the ranks that an open save waits for: that have not sealed it, then those whose files are not durable.

    None before one has sealed it.
    """
    if save.told_missing is not None:
        return save.told_missing
    if save.sealed_since is None or save.outcome is not None:
        return []
    return save.missing or sorted(e.rank for e in save.ranks.values() if e.phase in (SUBMITTED, WRITING))


def states(t: Tables, session: Session, m: Heartbeat) -> Saves:
    """Return the answer to a Heartbeat; saves that the worker does not know are left out."""
    known = [(t.saves.get(i), t.entry((i, session.rank))) for i in dict.fromkeys(m.saves)]
    rows = tuple(row_of(s, e) for s, e in known if s is not None and e is not None)
    return _saves(t, session, rows, m.id)


def news(t: Tables) -> Iterator[Send]:
    """Yield what the event that was just handled has changed, for the sessions that it concerns, and forget it."""
    changed, t.changed = t.changed, {}
    announced, t.announced = t.announced, {}
    for save_id, rank in changed:
        save = t.saves[save_id]
        session = t.sessions.get(save.ranks[rank].session)
        if session is not None and session.hello is None and not session.link:
            row = row_of(save, save.ranks[rank])
            yield Send(peer=session.peer, message=_saves(t, session, (row,)))
    for run_id in announced:
        run = t.runs.get(run_id)
        for name in run.members.values() if run is not None else ():
            session = t.sessions.get(name)
            if session is not None and session.hello is None and not session.link:
                yield Send(peer=session.peer, message=_saves(t, session, ()))


def _saves(t: Tables, session: Session, rows: tuple[Mapping[str, Any], ...], id: int = 0) -> Saves:
    run = t.runs.get(session.run)
    if run is None:
        return Saves(id=id, saves=rows, changes=0, leader="")
    return Saves(id=id, saves=rows, changes=len(run.changes), leader=run.leader if run.followed else t.instance)
