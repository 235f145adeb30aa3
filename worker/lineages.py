"""The brain's lineages: which epoch a run's saves carry. The same run gets the same answer, another one a larger."""

from __future__ import annotations

import os

from asyncckpt.errors import SaveFailedError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Lineage, LineageFound, Refused
from asyncckpt.storage.catalog import check_epoch
from asyncckpt_worker.actions import ScanLineage
from asyncckpt_worker.events import LineageScanned
from asyncckpt_worker.lending import Lending, busy
from asyncckpt_worker.records import MAX_JOBS, Run, Session, Tables
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.verdicts import other_world

MAX_DIRECTORIES = 64
"""Directories of a run whose epochs are remembered: until all of its ranks have asked. Chosen, not measured."""


class LineageBook:
    """Changes `Run.epochs`."""

    def __init__(self, tables: Tables, runs: RunBook, lending: Lending) -> None:
        self._t, self._runs, self._lending = tables, runs, lending

    def ask(self, session: Session, m: Lineage) -> None:
        """Answer at once what the run was told before; else look at the disk."""
        run = self._runs.join(session, m.run)
        if run is None:
            world_size = self._t.runs[m.run].world_size
            error = from_wire(other_world(m.run, world_size, session.rank, session.world_size))
            return self._lending.refuse(session.peer, m.id, error)
        if os.path.dirname(m.path) in run.epochs:
            return self._lending.send(session.peer, LineageFound(id=m.id, epoch=run.epochs[os.path.dirname(m.path)]))
        if self._t.jobs >= MAX_JOBS:
            return self._lending.refuse(session.peer, m.id, busy())
        self._t.lineage_scans += 1
        self._t.actions.append(ScanLineage(peer=session.peer, id=m.id, run=m.run, path=m.path))
        return None

    def scanned(self, event: LineageScanned) -> None:
        """Reserve the epoch, and answer."""
        self._t.lineage_scans -= 1
        run = self._t.runs.get(event.run)
        if event.error is not None:
            return self._lending.send(event.peer, Refused(id=event.id, error=event.error))
        if run is None:  # so many runs came that it is forgotten: nobody has joined it
            return self._lending.refuse(event.peer, event.id, busy())
        parent = os.path.dirname(event.path)
        try:
            epoch = run.epochs.get(parent) or self._next(run, parent, event)
        except SaveFailedError as error:
            return self._lending.refuse(event.peer, event.id, error)
        run.epochs[parent] = epoch
        for old in list(run.epochs)[:-MAX_DIRECTORIES]:
            del run.epochs[old]
        return self._lending.send(event.peer, LineageFound(id=event.id, epoch=epoch))

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
