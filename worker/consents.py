"""The brain's consents: what the ranks' `pre_commit` hooks say."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import FAILED
from asyncckpt.protocol.messages import Consent
from asyncckpt.protocol.relay import Consented
from asyncckpt_worker.records import Session
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import failed


class ConsentBook:
    """Changes `RankSave.consented`, and ends or commits by it."""

    def __init__(self, tables: Tables, saves: SaveBook) -> None:
        self._t, self._saves = tables, saves

    def consent(self, session: Session, m: Consent) -> None:
        """A rank's hook has spoken. Its first word counts; one for no such save, or too late, changes nothing."""
        run = self._t.runs.get(m.save_id[-12:])
        if run is not None and run.members.get(session.rank) == session.name:
            run.spoke[session.rank] = self._t.now
            if run.followed:
                record = Consented(save_id=m.save_id, rank=session.rank, granted=m.granted, reason=m.reason)
                if (mine := self._t.entry((m.save_id, session.rank))) is not None:
                    mine.consented, mine.spoke = m.granted, mine.spoke or record
                return self._t.told.append((run.run_id, record))
        save, entry = self._t.saves.get(m.save_id), self._t.entry((m.save_id, session.rank))
        if save is None or entry is None or save.outcome is not None or save.world_size != session.world_size:
            return
        if entry.session != session.name and entry.session in self._t.sessions:
            return
        if not m.granted and entry.needs_consent:
            self._saves.end(save, FAILED, failed(save, entry, "vetoed", f"its pre_commit hook refused: {m.reason}"))
        elif m.granted and entry.needs_consent:
            entry.consented = True
            self._saves.commit_when_complete(save)
