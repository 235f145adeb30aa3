"""The worker's brain: events in, actions out. No clock, no randomness, no I/O of its own.

A save's phases are the table of `asyncckpt.protocol.lifecycle`. What leads from one to the next, per rank:

    none       Begin                                        -> begun        Prepare (make the directory, preflight)
    none       a sealed slot is read                        -> begun, then as below
    begun      its slot is read and sealed                  -> submitted    Prepare, unless that is done
    begun      Prepared with an error                       -> failed
    begun      Withdraw, slot closing and not sealed        -> abandoned
    submitted  Prepared                                     -> writing      Write
    writing    Written                                      -> durable      Commit, once all ranks are durable and agree
                                                                   and no earlier save of the run is in flight
    durable    Published                                    -> committed
    durable    Published, unknown                           -> unknown
    any of them, on an error of its own or of another rank  -> failed       Remove, once no job writes any more

A slot's states:

    creating   Allocate came; CreateSlot is under way
    lent       the session stages into it; only the session decides when it is used again
    closing    Release, Goodbye, or proof of death: it is read once more (a sealed snapshot is taken up, one that was
               begun and not sealed is abandoned), then freed when no save and no job needs it any more

A slot is read when its doorbell (Submit) comes, when it is closing, and when a drain begins. `taken` holds the highest
generation that was taken up: together with the save id it makes every message repeatable. Messages may be lost,
repeated, or overtake each other; a message that makes no sense is refused and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import SaveFailedError, UnknownSaveError
from asyncckpt.protocol.lifecycle import BEGUN
from asyncckpt.protocol.messages import (
    Allocate,
    Begin,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    Lineage,
    LineageFound,
    Ok,
    Refused,
    Release,
    Saves,
    Status,
    Submit,
    Welcome,
    Withdraw,
)
from asyncckpt_worker.actions import Action, Exit, ScanLineage, SendStatus
from asyncckpt_worker.events import (
    Broken,
    Died,
    Event,
    LineageScanned,
    Prepared,
    Published,
    Received,
    Removed,
    SlotCreated,
    SlotFreed,
    SlotRead,
    StopRequested,
    Tick,
    Watched,
    Written,
)
from asyncckpt_worker.lending import Lending, busy
from asyncckpt_worker.order import next_epoch
from asyncckpt_worker.records import MAX_JOBS, Session, Tables, row_of
from asyncckpt_worker.report import report
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.sessions import SessionBook


@dataclass(frozen=True, kw_only=True, slots=True)
class BrainConfig:
    """Identity and times (seconds; see `WorkerConfig`). `instance`: random, per process."""

    package: str
    pid: int
    pid_start: int
    instance: str
    heartbeat_s: float
    idle_exit_s: float
    drain_timeout_s: float
    staging_grace_s: float
    commit_timeout_s: float


class Brain:
    """See the module. Used from one thread."""

    def __init__(self, config: BrainConfig, now: float) -> None:
        self._config = config
        self.tables = Tables(now=now)
        self._saves = SaveBook(self.tables, config.commit_timeout_s)
        self._lending = Lending(self.tables, self._saves)
        self._sessions = SessionBook(self.tables, self._lending, self._welcome)
        self._idle_since: float | None = now
        self._kept = False
        self._drain_deadline: float | None = None
        self._grace_deadline = now
        self._looked_again = False
        self._exiting = False

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done about `event`, in this order."""
        t = self.tables
        t.now = max(t.now, event.now)
        self._dispatch(event)
        self._lending.free_what_is_over()
        self._lending.create_what_was_postponed()
        self._push_changes()
        t.forget_old_saves()
        self._consider_exit()
        actions, t.actions = t.actions, []
        return actions

    @property
    def wakes_at(self) -> float | None:
        """When the next Tick is due at the latest, by the events' clock; None: whenever."""
        times = [self._drain_deadline, self._grace_deadline if self.tables.draining else None]
        if self._idle_since is not None and self._config.idle_exit_s > 0:
            times.append(self._idle_since + self._config.idle_exit_s)
        return min((t for t in times if t is not None and t >= self.tables.now), default=None)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        match event:
            case Received():
                self._received(event)
            case Watched():
                self._sessions.watched(event)
            case Died():
                self._sessions.died(event)
            case SlotCreated():
                self._lending.created(event)
            case SlotFreed():
                self.tables.freeing.discard(event.slot)
            case SlotRead():
                self._lending.slot_read(event)
            case Prepared():
                self._saves.prepared(event)
            case Written():
                self._saves.written(event)
            case Published():
                self._saves.published(event)
            case Removed():
                self._saves.removed(event)
            case LineageScanned():
                self._lineage_scanned(event)
            case StopRequested():
                self._drain(event.immediately, "asked to stop")
            case Broken():
                self._saves.broken(event)
            case Tick():
                self._kept = event.kept
                self._saves.tick()

    def _received(self, event: Received) -> None:
        peer, m = event.peer, event.message
        match m:
            case Hello():
                return self._sessions.hello(peer, m)
            case Status():
                return self.tables.actions.append(
                    SendStatus(peer=peer, id=m.id, report=report(self.tables, self._config.instance))
                )
            case Drain():
                self._lending.send(peer, Ok(id=m.id))
                return self._drain(m.now, "asked to drain")
        session = self.tables.sessions.get(self.tables.peers.get(peer, ""))
        id = getattr(m, "id", 0)
        if session is None or session.hello is not None:
            error = UnknownSaveError("this worker knows no such session: it was restarted, or saw the process die")
            return self._lending.refuse(peer, id, error)
        return self._requested(session, m)

    def _requested(self, session: Session, m: Any) -> None:
        match m:
            case Heartbeat():
                self._lending.send(session.peer, self._states(session, m))
            case Allocate():
                self._lending.allocate(session, m)
            case Release():
                self._lending.release(session, m)
            case Begin():
                self._lending.begin(session, m)
            case Submit():
                self._lending.submit(session, m)
            case Withdraw():
                self._saves.withdraw(session, m.save_id, m.reason)
                self._lending.send(session.peer, Ok(id=m.id))
            case Goodbye():
                self._lending.send(session.peer, Ok(id=m.id))
                self._sessions.goodbye(session)
            case Lineage():
                if self.tables.jobs >= MAX_JOBS:
                    return self._lending.refuse(session.peer, m.id, busy())
                self.tables.lineage_scans += 1
                self.tables.actions.append(ScanLineage(peer=session.peer, id=m.id, path=m.path))
        return None

    def _lineage_scanned(self, event: LineageScanned) -> None:
        self.tables.lineage_scans -= 1
        if event.error is not None:
            return self._lending.send(event.peer, Refused(id=event.id, error=event.error))
        try:
            epoch = next_epoch(event.path, event.epoch, self.tables.saves)
        except SaveFailedError as error:
            return self._lending.refuse(event.peer, event.id, error)
        return self._lending.send(event.peer, LineageFound(id=event.id, epoch=epoch))

    def _welcome(self, id: int) -> Welcome:
        c = self._config
        return Welcome(
            id=id,
            package=c.package,
            pid=c.pid,
            pid_start=c.pid_start,
            instance=c.instance,
            heartbeat_s=c.heartbeat_s,
        )

    def _states(self, session: Session, m: Heartbeat) -> Saves:
        known = [(self.tables.saves.get(i), self.tables.entry((i, session.rank))) for i in dict.fromkeys(m.saves)]
        return Saves(id=m.id, changes=0, saves=tuple(row_of(s, e) for s, e in known if s is not None and e is not None))

    def _push_changes(self) -> None:
        t = self.tables
        changed, t.changed = t.changed, {}
        for key in changed:
            save, entry = t.saves[key[0]], t.saves[key[0]].ranks[key[1]]
            session = t.sessions.get(entry.session)
            if session is not None and session.hello is None:
                self._lending.send(session.peer, Saves(id=0, changes=0, saves=(row_of(save, entry),)))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _drain(self, immediately: bool, why: str) -> None:
        t = self.tables
        if self._drain_deadline is None:
            t.draining = True
            self._drain_deadline = t.now + self._config.drain_timeout_s
            t.begins_until = self._grace_deadline = min(self._drain_deadline, t.now + self._config.staging_grace_s)
            t.log(
                "info", f"draining: {why}", sessions=len(t.sessions), saves=sum(s.unfinished for s in t.saves.values())
            )
            self._lending.read_all_lent()
        if immediately:
            self._drain_deadline = t.now

    def _consider_exit(self) -> None:
        t = self.tables
        if self._exiting:
            return
        unfinished = [s for s in t.saves.values() if s.unfinished]
        reading = any(s.reading for s in t.slots.values())
        idle = not self._kept and not t.sessions and not unfinished and not reading and not t.lineage_scans
        self._idle_since = (t.now if self._idle_since is None else self._idle_since) if idle else None
        if self._drain_deadline is not None:
            working = bool(unfinished) or self._staging(self._drain_deadline)
            at_rest = not working and not reading
            self._looked_again = self._looked_again and not working
            if at_rest and not self._looked_again and t.now < self._drain_deadline and self._lending.read_all_lent():
                # IMPORTANT: what was sealed since the first look, its doorbell still under way, must not be lost.
                self._looked_again = True
            elif at_rest:
                self._exit(True, "drained")
            elif t.now >= self._drain_deadline:
                text = f"{len(unfinished)} saves are unfinished and will not be committed"
                t.log("error", text, facts_saves=[s.save_id for s in unfinished[:20]])
                self._exit(not unfinished, "drain timeout")
        elif self._idle_since is not None and 0 < self._config.idle_exit_s <= t.now - self._idle_since:
            self._exit(True, "idle")

    def _staging(self, drain_deadline: float) -> bool:
        """Whether a drain waits for a trainer that copies: each save gets the grace from its own begin."""
        t = self.tables
        begun = [e.begun_at for _, e in t.entries() if e.phase == BEGUN]
        for begun_at in begun:
            until = min(drain_deadline, begun_at + self._config.staging_grace_s)
            self._grace_deadline = max(self._grace_deadline, until)
        opened = t.now < t.begins_until and any(s.opened and not s.closing for s in t.slots.values())
        return opened or (bool(begun) and t.now < self._grace_deadline)

    def _exit(self, complete: bool, reason: str) -> None:
        self._exiting = True
        self.tables.actions.append(Exit(complete=complete, reason=reason))
