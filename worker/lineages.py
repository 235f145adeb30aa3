"""The brain's lineages: which epoch a run's saves carry. The same run gets the same answer, another one a larger."""

from __future__ import annotations

import os
from collections.abc import Callable

from asyncckpt.errors import AsyncCkptError, SaveFailedError, from_wire, to_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Lineage, LineageFound
from asyncckpt.storage.catalog import check_epoch
from asyncckpt_worker.actions import ScanLineage
from asyncckpt_worker.events import LineageScanned, Peer, Wire
from asyncckpt_worker.lending import Lending, busy
from asyncckpt_worker.records import MAX_JOBS, Session
from asyncckpt_worker.run_record import Run
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import other_world


class LineageBook:
    """Changes `Run.epochs`.

    Args:
        tables: The brain's.
        runs, lending: The brain's books.
        ask_leader: Asks the worker that leads a run for a session's Lineage.

    Attributes:
        tell_followers: Takes run, path, epoch and error, the answer to a rank of a follower, whose session has no peer.
    """

    tell_followers: Callable[[str, str, int, Wire | None], None]

    def __init__(
        self, tables: Tables, runs: RunBook, lending: Lending, ask_leader: Callable[[Session, Run, Lineage], None]
    ) -> None:
        self._t, self._runs, self._lending, self._ask_leader = tables, runs, lending, ask_leader

    def ask(self, session: Session, m: Lineage) -> None:
        """Answer at once what the run was told before; else look at the disk."""
        run = self._runs.join(session, m.run)
        if run is None:
            world_size = self._t.runs[m.run].world_size
            error = from_wire(other_world(m.run, world_size, session.rank, session.world_size))
            return self._refuse(session.peer, m.id, m.run, m.path, error)
        if os.path.dirname(m.path) in run.epochs:
            return self._answer(session.peer, m.id, m.run, m.path, run.epochs[os.path.dirname(m.path)])
        if run.followed:
            return self._ask_leader(session, run, m)
        if self._t.jobs >= MAX_JOBS:
            return self._refuse(session.peer, m.id, m.run, m.path, busy())
        self._t.lineage_scans += 1
        self._t.actions.append(ScanLineage(peer=session.peer, id=m.id, run=m.run, path=m.path))
        return None

    def scanned(self, event: LineageScanned) -> None:
        """Reserve the epoch, and answer."""
        self._t.lineage_scans -= 1
        run = self._t.runs.get(event.run)
        if event.error is not None:
            return self._refuse(event.peer, event.id, event.run, event.path, from_wire(event.error))
        if run is None:  # so many runs came that it is forgotten: nobody has joined it
            return self._refuse(event.peer, event.id, event.run, event.path, busy())
        parent = os.path.dirname(event.path)
        try:
            epoch = run.epochs.get(parent) or self._next(run, parent, event)
        except SaveFailedError as error:
            return self._refuse(event.peer, event.id, event.run, event.path, error)
        run.remember_epoch(parent, epoch)
        return self._answer(event.peer, event.id, event.run, event.path, epoch)

    def _answer(self, peer: Peer, id: int, run_id: str, path: str, epoch: int) -> None:
        if not peer:
            return self.tell_followers(run_id, path, epoch, None)
        return self._lending.send(peer, LineageFound(id=id, epoch=epoch))

    def _refuse(self, peer: Peer, id: int, run_id: str, path: str, error: AsyncCkptError) -> None:
        if not peer:
            return self.tell_followers(run_id, path, 0, to_wire(error))
        return self._lending.refuse(peer, id, error)

    def _next(self, run: Run, parent: str, event: LineageScanned) -> int:
        """Return an epoch above that of every save beside the path: on disk, not yet, or promised to another run.

        Raises:
            SaveFailedError: There is none left.
        """
        beside = [
            SaveId.parse(s.save_id)
            for s in self._t.saves.values()
            if any(os.path.dirname(e.path) == parent for e in s.ranks.values())
        ]
        own = [save_id.epoch for save_id in beside if save_id.run_id == run.run_id]
        if own:
            return max(own)
        promised = [r.epochs[parent] for r in self._t.runs.values() if parent in r.epochs]
        return check_epoch(max([event.epoch, *(e + 1 for e in promised), *(s.epoch + 1 for s in beside)]), event.path)
