"""The worker's brain: events in, actions out. No clock, no randomness, no I/O of its own.

A save's phases are the table of `asyncckpt.protocol.lifecycle`. What leads from one to the next, per rank:

    none       Begin                                        -> begun        Prepare (make the directory, preflight)
    none       a sealed slot is read                        -> begun, then as below
    begun      its slot is read and sealed                  -> submitted    Prepare, unless that is done; failed, if
                                                                   the ranks disagree or their replicas differ
    begun      Prepared with an error                       -> failed
    begun      Withdraw, slot closing and not sealed        -> abandoned    on all ranks; also when a rank is gone
                                                                   (`runs`) that has not sealed
    submitted  Prepared                                     -> writing      Write
    writing    Written                                      -> durable      Commit, once all ranks are durable and agree
                                                                   (hooks included) and no earlier save of the run
                                                                   is in flight
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

from asyncckpt.errors import AsyncCkptError, UnknownSaveError
from asyncckpt.protocol.lifecycle import BEGUN
from asyncckpt.protocol.messages import (
    Allocate,
    Begin,
    Consent,
    Drain,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Lineage,
    Message,
    Ok,
    Release,
    Share,
    Status,
    Submit,
    Welcome,
    Withdraw,
)
from asyncckpt_worker.actions import Action, Exit, SendStatus
from asyncckpt_worker.boards import BoardBook
from asyncckpt_worker.changes import ChangeBook
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
from asyncckpt_worker.intake import Intake
from asyncckpt_worker.lending import Lending
from asyncckpt_worker.lineages import LineageBook
from asyncckpt_worker.records import Session, Tables
from asyncckpt_worker.report import report
from asyncckpt_worker.rows import news, states
from asyncckpt_worker.runs import RunBook
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


class Brain:
    """See the module. Used from one thread."""

    def __init__(self, config: BrainConfig, now: float) -> None:
        self._config = config
        self.tables = Tables(now=now)
        self._runs, changes = RunBook(self.tables), ChangeBook(self.tables)
        self._saves = SaveBook(self.tables, self._runs, changes)
        self._intake = Intake(self.tables, self._saves, self._runs, changes)
        self._lending = Lending(self.tables, self._intake)
        self._lineages = LineageBook(self.tables, self._runs, self._lending)
        self._boards = BoardBook(self.tables, changes)
        self._sessions = SessionBook(self.tables, self._lending, self._runs, self._boards, self._welcome)
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
        self._saves.commit_what_was_held_back()
        for run, rank in self._runs.settle():
            self._saves.gone(run, rank)
        self._lending.free_what_is_over()
        self._lending.create_what_was_postponed()
        t.actions += news(t)
        t.forget_old_saves()
        self._consider_exit()
        actions, t.actions = t.actions, []
        return actions

    @property
    def wakes_at(self) -> float | None:
        """When the next Tick is due at the latest, by the events' clock; None: whenever."""
        times = [self._drain_deadline, self._grace_deadline if self.tables.draining else None]
        times += [self._saves.deadline(save)[0] for save in self.tables.saves.values() if save.outcome is None]
        if self._idle_since is not None and self._config.idle_exit_s > 0:
            times.append(self._idle_since + self._config.idle_exit_s)
        return min((t for t in times if t is not None and self.tables.now <= t < float("inf")), default=None)

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
                self._lineages.scanned(event)
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
                self._lending.send(session.peer, states(self.tables, session, m))
            case Allocate():
                self._lending.allocate(session, m)
            case Release():
                self._lending.release(session, m)
            case Begin():
                self._lending.begin(session, m)
            case Submit():
                self._lending.submit(session, m)
            case Withdraw():
                self._intake.withdraw(session, m)
                self._lending.send(session.peer, Ok(id=m.id))
            case Consent():
                self._saves.consent(session, m)
                self._lending.send(session.peer, Ok(id=m.id))
            case Share():
                self._answer(session, m.id, self._boards.share(session, m))
            case Fetch():
                self._answer(session, m.id, self._boards.fetch(session, m))
            case Goodbye():
                self._lending.send(session.peer, Ok(id=m.id))
                self._sessions.goodbye(session)
            case Lineage():
                self._lineages.ask(session, m)

    def _answer(self, session: Session, id: int, found: Message | AsyncCkptError) -> None:
        if isinstance(found, AsyncCkptError):
            return self._lending.refuse(session.peer, id, found)
        return self._lending.send(session.peer, found)

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
