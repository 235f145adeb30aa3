"""Runs: which session saves as which rank, which ranks have departed, and which epoch a run's saves have.

States of a rank in a run:

none       lineage, begin, or a sealed slot of a session that is in no run      -> member
member     its session is replaced by another of its client                     -> member
member     its session ends (death, goodbye)                                    -> leaving
leaving    its slots have been read once more                                   -> departed, or member if it is back
departed   lineage, begin, or a sealed slot of a new session                    -> member

The same run gets the same epoch for a directory, another run a larger one. It becomes larger only if a rank asks that
has found a newer run where it looked for a checkpoint to restore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncckpt.basics.storage_options import NO_OPTIONS
from asyncckpt.errors import AsyncCkptError, SaveFailedError, from_wire, to_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol.messages import Lineage, LineageFound
from asyncckpt.protocol.save_phases import ABANDONED, FAILED
from asyncckpt.storage.catalog import check_epoch
from asyncckpt_worker.core.actions import ScanLineage
from asyncckpt_worker.core.events import LineageScanned, Peer, Wire
from asyncckpt_worker.core.failures import busy, failed, not_sealed, other_world, requires_meeting
from asyncckpt_worker.core.model import MAX_JOBS, Run, Save, Session, Slot
from asyncckpt_worker.core.tables import Tables

MAX_RUNS = 1024
"""Runs that are remembered; runs with a session or an open save are never forgotten. Chosen, not measured."""

MAX_WITHDRAWN = 1024
"""Withdrawn sequences of a run that are remembered; as many as ended saves."""


@dataclass(slots=True)
class _Leaving:
    """A session that has ended, and whose slots are read once more."""

    run: str
    rank: int
    world_size: int
    why: str


class RunRegistry:
    """Changes `tables.runs`."""

    def __init__(self, tables: Tables) -> None:
        self._t = tables
        self.leaving: dict[str, _Leaving] = {}

    # ---- members ----------------------------------------------------------------------------------------------------

    def join(self, session: Session, run_id: str) -> Run | None:
        """Make the session a member of the run, and create the run if needed; return None if the world sizes differ."""
        run = self._open(run_id, session.world_size)
        if run.world_size != session.world_size:
            return None
        holder = run.members.get(session.rank, session.name)
        if holder != session.name and holder in self._t.sessions:
            text = f"two sessions, {holder} and this one, save as rank {session.rank} of run {run_id}"
            self._t.log("error", text, session=session.name, count="protocol_errors")
            return run
        if session.run != run_id:
            self.remove_member(session)
        session.run = run_id
        run.members[session.rank] = session.name
        run.departed.pop(session.rank, None)
        return run

    def join_by_slot(self, slot: Slot, run_id: str, world_size: int) -> Run:
        """Add the session of a sealed slot to the run that the request in it names, unless the session is in a run."""
        session, leaving = self._t.sessions.get(slot.session), self.leaving.get(slot.session)
        if session is not None and not session.run and session.world_size == world_size:
            self.join(session, run_id)
        elif leaving is not None and not leaving.run:
            leaving.run = run_id
        return self._open(run_id, world_size)

    def remove_member(self, session: Session) -> None:
        """Remove a session from its run. Its rank has not departed: another session of it follows."""
        run = self._t.runs.get(session.run)
        if run is not None and run.members.get(session.rank) == session.name:
            del run.members[session.rank]

    def leave(self, session: Session, why: str) -> None:
        """Begin the departure of an ended session, which is complete when its slots have been read."""
        self.leaving[session.name] = _Leaving(session.run, session.rank, session.world_size, why)

    def hand_over(self, old: Session, new: Session) -> None:
        """Let the new session of a client take the old one's place in the run."""
        if (old.rank, old.world_size) != (new.rank, new.world_size):
            return self.leave(old, "its client took another rank")
        run = self._t.runs.get(old.run)
        if run is not None and run.members.get(old.rank) == old.name:
            run.members[old.rank] = new.name
            new.run = new.run or old.run
        return None

    def complete_departures(self) -> list[tuple[Run, int]]:
        """Complete the departures of sessions whose slots have been read; return their runs and ranks."""
        read = {slot.session for slot in self._t.closing.values() if slot.reading}
        found = []
        for name in [n for n in self.leaving if n not in read]:
            leaving = self.leaving.pop(name)
            run = self._t.runs.get(leaving.run)
            if run is None or run.world_size != leaving.world_size or run.members.get(leaving.rank, name) != name:
                continue  # it was in no run, or another session has the rank now
            run.members.pop(leaving.rank, None)
            run.departed[leaving.rank] = leaving.why
            found.append((run, leaving.rank))
        return found

    def is_other_sessions(self, run: Run, session: Session) -> bool:
        """Whether another open session has this one's rank in the run."""
        holder = run.members.get(session.rank, session.name)
        return holder != session.name and holder in self._t.sessions

    # ---- saves that can never commit, and outcomes ------------------------------------------------------------------

    def withdraw(self, run: Run, sequence: int, error: Wire) -> None:
        """Record that a save can never be committed; the first reason is kept."""
        run.withdrawn.setdefault(sequence, error)
        save_id = SaveId(0, sequence, run.run_id)
        if not self._t.of_call(save_id.call):  # else that save records its outcome
            self.record_outcome(save_id, meet=requires_meeting(error))
        for old in list(run.withdrawn)[:-MAX_WITHDRAWN]:
            del run.withdrawn[old]

    def record_outcome(self, save_id: SaveId, *, meet: bool) -> None:
        """Record and announce the outcome of a save: whether the ranks meet again after it. The first one counts."""
        run = self._t.runs.get(save_id.run_id)
        if run is not None and not run.followed and run.world_size > 1 and run.add_outcome(save_id.sequence, meet):
            self._t.announced[run.run_id] = None

    def why_impossible(self, save: Save) -> tuple[str, Wire] | None:
        """Return outcome and error of a save that can never be committed, or None.

        A rank has withdrawn it, has departed without sealing it, or has departed before its hook has answered.
        """
        run = self._t.runs.get(save.save_id.run_id)
        if run is None:
            return None
        if run.world_size == save.world_size:
            if save.save_id.sequence in run.withdrawn:
                return ABANDONED, run.withdrawn[save.save_id.sequence]
            for rank in sorted(run.departed):
                if not save.has_sealed(rank):
                    return ABANDONED, not_sealed(save, rank, run.departed[rank])
        for rank in sorted(run.departed):
            part = save.ranks.get(rank)
            if part is not None and part.needs_consent:
                detail = f"its pre_commit hook has not consented: {run.departed[rank]}"
                return FAILED, failed(save, part, "vetoed", detail)
        return None

    # ---- the table --------------------------------------------------------------------------------------------------

    def _open(self, run_id: str, world_size: int) -> Run:
        run = self._t.runs.get(run_id)
        if run is None:
            self._forget_old()
            run = self._t.runs[run_id] = Run(run_id, world_size)
        return run

    def _forget_old(self) -> None:
        excess = len(self._t.runs) - MAX_RUNS + 1
        if excess <= 0:
            return
        under_way = {save.save_id.run_id for save in self._t.open_saves()}
        under_way |= {leaving.run for leaving in self.leaving.values()}
        for run_id in [r for r, run in self._t.runs.items() if not run.members and r not in under_way][:excess]:
            del self._t.runs[run_id]


Requester = tuple[Peer, int]
"""Peer and ID of a Lineage request; peer b"": a rank of a follower."""


class LineageRegistry:
    """Reserves epochs in `Run.epochs`. Requests of a run for one directory share one scan.

    Args:
        tables: Tables of the core.
        runs: Its runs.
        ask_leader: Forwards a session's Lineage to the worker that leads the run.

    Attributes:
        notify_followers: Takes run, path, epoch and error: the answer for a follower's rank, whose session has no peer.
    """

    notify_followers: Callable[[str, str, int, Wire | None], None]

    def __init__(self, tables: Tables, runs: RunRegistry, ask_leader: Callable[[Session, Run, Lineage], None]) -> None:
        self._t, self._runs, self._ask_leader = tables, runs, ask_leader
        self._waiting: dict[tuple[str, str], dict[Requester, int]] = {}
        """Run and directory -> who waits, and which epoch is the least for each."""

    def ask(self, session: Session, m: Lineage) -> None:
        """Answer with the epoch that the run has already; else ask the leader or scan the disk."""
        run = self._runs.join(session, m.run)
        if run is None:
            world_size = self._t.runs[m.run].world_size
            error = from_wire(other_world(m.run, world_size, session.rank, session.world_size))
            return self._refuse(session.peer, m.id, m.run, m.path, error)
        parent = os.path.dirname(m.path)
        if run.epochs.get(parent, -1) >= m.least_epoch:
            return self._answer(session.peer, m.id, m.run, m.path, run.epochs[parent])
        if run.followed:
            return self._ask_leader(session, run, m)
        key = m.run, parent
        waiting = self._waiting.get(key)
        if (self._t.jobs if waiting is None else len(waiting)) >= MAX_JOBS:
            return self._refuse(session.peer, m.id, m.run, m.path, busy())
        if waiting is None:
            waiting = self._waiting[key] = {}
            self._t.lineage_scans += 1
            self._t.actions.append(ScanLineage(run=m.run, path=m.path, storage=self._storage_for(session)))
        requester = session.peer, m.id
        waiting[requester] = max(m.least_epoch, waiting.get(requester, 0))
        return None

    def is_asked_for(self, run_id: str, parent: str) -> bool:
        """Whether a request for the epoch of a directory has no answer yet."""
        return (run_id, parent) in self._waiting

    def _storage_for(self, session: Session) -> Mapping[str, str]:
        """Return the options of the session, or of a rank of this node where another worker asks for its own."""
        ours = (one.storage for one in self._t.sessions.values() if one.run == session.run and not one.follower)
        return next(ours, NO_OPTIONS) if session.follower else session.storage

    def scanned(self, event: LineageScanned) -> None:
        """Reserve the epoch, and answer all requests that wait for this scan."""
        parent = os.path.dirname(event.path)
        waiting = self._waiting.pop((event.run, parent), None)
        if waiting is None:
            return
        self._t.lineage_scans -= 1
        run = self._t.runs.get(event.run)
        epoch = 0
        error: AsyncCkptError = busy()  # too many runs: this one has no members and was forgotten
        if event.error is not None:
            error = from_wire(event.error)
        elif run is not None:
            try:
                epoch = self._next(run, parent, event, max(waiting.values()))
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
            return self.notify_followers(run_id, path, epoch, None)
        return self._t.send(peer, LineageFound(id=id, epoch=epoch))

    def _refuse(self, peer: Peer, id: int, run_id: str, path: str, error: AsyncCkptError) -> None:
        if not peer:
            return self.notify_followers(run_id, path, 0, to_wire(error))
        return self._t.refuse(peer, id, error)

    def _next(self, run: Run, parent: str, event: LineageScanned, least: int) -> int:
        """Return the run's epoch, if that is `least` at least.

        Else return one above those of all saves in the directory, open ones and other runs' reservations included.

        Raises:
            SaveFailedError: No larger epoch exists.
        """
        beside = [s.save_id for s in self._t.ended if parent in s.directories]
        beside += [s.save_id for s in self._t.saves.values() if parent in map(os.path.dirname, s.paths)]
        own = [save_id.epoch for save_id in beside if save_id.run_id == run.run_id]
        known = run.epochs.get(parent) or max(own, default=0)
        if known and known >= least:
            return known
        promised = [r.epochs[parent] for r in self._t.runs.values() if r is not run and parent in r.epochs]
        others = [*promised, *(save_id.epoch for save_id in beside if save_id.run_id != run.run_id)]
        return check_epoch(max(least, event.epoch, *(epoch + 1 for epoch in others), 1), event.path)
