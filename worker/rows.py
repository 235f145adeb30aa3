"""What the brain tells trainers about their saves: asked for, and unasked when something has changed."""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.protocol.messages import Heartbeat, Saves
from asyncckpt_worker.actions import Send
from asyncckpt_worker.records import Session, Tables, row_of


def states(t: Tables, session: Session, m: Heartbeat) -> Saves:
    """Return the answer to a Heartbeat; saves that the worker does not know are left out."""
    known = [(t.saves.get(i), t.entry((i, session.rank))) for i in dict.fromkeys(m.saves)]
    rows = tuple(row_of(s, e) for s, e in known if s is not None and e is not None)
    return Saves(id=m.id, saves=rows, changes=_changes(t, session))


def news(t: Tables) -> Iterator[Send]:
    """Yield what the event that was just handled has changed, for the sessions that it concerns, and forget it."""
    changed, t.changed = t.changed, {}
    announced, t.announced = t.announced, {}
    for save_id, rank in changed:
        save = t.saves[save_id]
        session = t.sessions.get(save.ranks[rank].session)
        if session is not None and session.hello is None:
            row = row_of(save, save.ranks[rank])
            yield Send(peer=session.peer, message=Saves(id=0, saves=(row,), changes=_changes(t, session)))
    for run_id in announced:
        run = t.runs.get(run_id)
        for name in run.members.values() if run is not None else ():
            session = t.sessions.get(name)
            if session is not None and session.hello is None:
                yield Send(peer=session.peer, message=Saves(id=0, saves=(), changes=_changes(t, session)))


def _changes(t: Tables, session: Session) -> int:
    run = t.runs.get(session.run)
    return len(run.changes) if run is not None else 0
