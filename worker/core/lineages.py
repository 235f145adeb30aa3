"""The brain's lineages: which epoch a run's saves carry. The same run gets the same answer, another one a larger."""

from __future__ import annotations

import os
from collections.abc import Callable

from asyncckpt.errors import AsyncCkptError, SaveFailedError, from_wire, to_wire
from asyncckpt.protocol.messages import Lineage, LineageFound
from asyncckpt.storage.catalog import check_epoch
from asyncckpt_worker.core.actions import ScanLineage
from asyncckpt_worker.core.events import LineageScanned, Peer, Wire
from asyncckpt_worker.core.failures import other_world
from asyncckpt_worker.core.model import MAX_JOBS, Run, Session
from asyncckpt_worker.core.runs import RunBook
from asyncckpt_worker.core.slots import Lending, busy
from asyncckpt_worker.core.tables import Tables

Question = tuple[Peer, int]
"""Who asks, by which request; b"": the ranks of followers."""


class LineageBook:
    """Changes `Run.epochs`. A directory is scanned once at a time for a run, however often and by whom it is asked.

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
        self._waiting: dict[tuple[str, str], dict[Question, None]] = {}

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
        key = m.run, os.path.dirname(m.path)
        waiting = self._waiting.get(key)
        if (self._t.jobs if waiting is None else len(waiting)) >= MAX_JOBS:
            return self._refuse(session.peer, m.id, m.run, m.path, busy())
        if waiting is None:
            waiting = self._waiting[key] = {}
            self._t.lineage_scans += 1
            self._t.actions.append(ScanLineage(run=m.run, path=m.path))
        waiting[session.peer, m.id] = None
        return None

    def scanned(self, event: LineageScanned) -> None:
        """Reserve the epoch, and answer everybody who has asked meanwhile."""
        parent = os.path.dirname(event.path)
        waiting = self._waiting.pop((event.run, parent), None)
        if waiting is None:
            return
        self._t.lineage_scans -= 1
        run = self._t.runs.get(event.run)
        epoch = 0
        error: AsyncCkptError = busy()  # so many runs came that it is forgotten: nobody has joined it
        if event.error is not None:
            error = from_wire(event.error)
        elif run is not None:
            try:
                epoch = run.epochs.get(parent) or self._next(run, parent, event)
                run.remember_epoch(parent, epoch)
            except SaveFailedError as refusal:
                error = refusal
        for peer, id in waiting:
            if epoch:
                self._answer(peer, id, event.run, event.path, epoch)
            else:
                self._refuse(peer, id, event.run, event.path, error)

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
        beside = [s.save_id for s in self._t.ended if parent in s.directories]
        beside += [s.save_id for s in self._t.saves.values() if parent in map(os.path.dirname, s.paths)]
        own = [save_id.epoch for save_id in beside if save_id.run_id == run.run_id]
        if own:
            return max(own)
        promised = [r.epochs[parent] for r in self._t.runs.values() if parent in r.epochs]
        return check_epoch(max([event.epoch, *(e + 1 for e in promised), *(s.epoch + 1 for s in beside)]), event.path)
