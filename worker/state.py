"""The worker's brain: events in, actions out. No clock, no randomness, no I/O of its own.

A save's phases are the table of `asyncckpt.protocol.lifecycle`. What leads from one to the next, per rank:

    none       Begin                                        -> begun        Prepare (make the directory, preflight)
    none       a sealed slot is read                        -> begun, then as below
    begun      its slot is read and sealed                  -> submitted    Prepare, unless that is done; failed, if
                                                                   the ranks disagree or their replicas differ
    begun      a streamed slot is read, Prepared            -> begun        Write, while the trainer goes on staging
    begun      Written with an error, of no ring            -> begun        the seal leads to another Write
    begun      Prepared with an error                       -> failed
    begun      Withdraw, slot closing and not sealed        -> abandoned    on all ranks; also when a rank is gone
                                                                   (`runs`) that has not sealed
    submitted  Prepared                                     -> writing      Write
    submitted  that is being written already                -> writing      durable at once if Written has come before
    writing    Written                                      -> durable      Commit, once all ranks are durable and agree
                                                                   (hooks included) and no earlier save of the run
                                                                   is in flight
    durable    Published                                    -> committed
    durable    Published, unknown                           -> unknown
    any of them, on an error of its own or of another rank  -> failed       Remove, once no job writes any more

A slot's states:

    creating   Allocate or Adopt came; CreateSlot or AdoptSlot is under way
    lent       the session stages into it; only the session decides when it is used again
    closing    Release, Goodbye, or proof of death: it is read once more (a sealed snapshot is taken up, one that was
               begun and not sealed is abandoned), then freed when no save and no job needs it any more
    kept       its session has ended, and what it holds may be loaded (`keeping`): freed or lent again later

A slot is read when its doorbell (Submit) comes, when it was adopted, when it is closing, and when a drain begins.
`taken` holds the highest generation that was taken up: together with the save id it makes every message repeatable.
Messages may be lost, repeated, or overtake each other; a message that makes no sense is refused and changes nothing.
"""

from __future__ import annotations

from typing import Any

from asyncckpt.errors import AsyncCkptError, UnknownSaveError
from asyncckpt.protocol.messages import (
    Adopt,
    Allocate,
    Begin,
    Consent,
    Drain,
    Fetch,
    Follow,
    Goodbye,
    Heartbeat,
    Hello,
    Lead,
    Lineage,
    Message,
    Ok,
    Recall,
    Release,
    Share,
    Status,
    Submit,
    Welcome,
    Withdraw,
)
from asyncckpt_worker.actions import Action, SendStatus
from asyncckpt_worker.adoption import AdoptionBook
from asyncckpt_worker.boards import BoardBook
from asyncckpt_worker.changes import ChangeBook
from asyncckpt_worker.consents import ConsentBook
from asyncckpt_worker.deadlines import deadline
from asyncckpt_worker.ending import BrainConfig, Ending
from asyncckpt_worker.events import (
    Broken,
    Died,
    Event,
    LineageScanned,
    Listening,
    Prepared,
    Published,
    Received,
    Relayed,
    Removed,
    SlotCreated,
    SlotFreed,
    SlotRead,
    StopRequested,
    Tick,
    Unconnected,
    Watched,
    Written,
)
from asyncckpt_worker.following import FollowBook
from asyncckpt_worker.intake import Intake
from asyncckpt_worker.keeping import KeepBook
from asyncckpt_worker.leading import LeadBook
from asyncckpt_worker.lending import Lending
from asyncckpt_worker.lineages import LineageBook
from asyncckpt_worker.moves import Moved, look
from asyncckpt_worker.records import Session
from asyncckpt_worker.report import MAX_ROWS, report
from asyncckpt_worker.rows import news, states
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.sessions import SessionBook
from asyncckpt_worker.tables import Tables


class Brain:
    """See the module. Used from one thread."""

    def __init__(self, config: BrainConfig, now: float) -> None:
        self._config = config
        self.tables = Tables(now=now, instance=config.instance)
        self._runs, changes = RunBook(self.tables), ChangeBook(self.tables)
        self._saves = SaveBook(self.tables, self._runs, changes)
        self._intake = Intake(self.tables, self._saves, self._runs, changes)
        self._consents = ConsentBook(self.tables, self._saves)
        self.keeping = KeepBook(self.tables, config.keep_snapshots_s)
        self._lending = Lending(self.tables, self._intake, self.keeping)
        self._adoption = AdoptionBook(self.tables, self._lending)
        self._following = FollowBook(self.tables, self._runs, self._saves, self._lending)
        self._lineages = LineageBook(self.tables, self._runs, self._lending, self._following.lineage)
        self._boards = BoardBook(self.tables, changes)
        self._sessions = SessionBook(self.tables, self._lending, self.keeping, self._runs, self._boards, self._welcome)
        self._leading = LeadBook(self.tables, self._runs, self._intake, self._saves, self._lending, self._lineages)
        self._lineages.tell_followers = self._leading.epoch_found
        self.moves: list[Moved] = []
        """What the last event has moved."""

        self._ending = Ending(self.tables, self._lending, config, lambda: self._leading.busy or self._following.busy)

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done about `event`, in this order."""
        t = self.tables
        t.now = max(t.now, event.now)
        self.moves = []
        self._dispatch(event)
        self._adoption.remember()
        self._lending.free_what_is_over()
        self._saves.commit_what_was_held_back()
        for run, rank in self._runs.settle():
            self._saves.gone(run, rank)
        self._lending.free_what_is_over()
        self._lending.create_what_was_postponed()
        self.keeping.answer()
        self.moves = look(t)
        self._following.flush()
        self._leading.flush()
        t.actions += news(t)
        t.forget_old_saves()
        self._ending.consider()
        actions, t.actions = t.actions, []
        return actions

    @property
    def wakes_at(self) -> float | None:
        """When the next Tick is due at the latest, by the events' clock; None: whenever."""
        times = [*self._ending.times(), *self._leading.times(), *self._following.times()]
        times += [deadline(self.tables, save)[0] for save in self.tables.saves.values() if save.outcome is None]
        return min((t for t in times if self.tables.now <= t < float("inf")), default=None)

    def report(self) -> dict[str, Any]:
        """Return the brain's part of the status report."""
        found = {"followers": self._leading.report()[:MAX_ROWS], "followed": self._following.report()}
        return {**found, **report(self.tables, self._config.instance)}

    def run_of_key(self, client_public: str) -> str | None:
        """Return the run whose followers prove this key, or None."""
        return self._leading.run_of(client_public)

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
            case Listening():
                self._leading.listening(event)
            case Unconnected():
                self._following.unconnected(event)
            case Relayed():
                (self._leading if event.route else self._following).received(event)
            case StopRequested():
                self._ending.drain(event.immediately, "asked to stop")
            case Broken():
                self._saves.broken(event)
            case Tick():
                self._ending.kept = event.kept
                if event.memory_short:
                    self.keeping.make_room(wholly=True)
                self._saves.tick()
                self._following.tick()
                self._leading.tick()

    def _received(self, event: Received) -> None:
        peer, m = event.peer, event.message
        match m:
            case Hello():
                return self._sessions.hello(peer, m)
            case Status():
                return self.tables.actions.append(SendStatus(peer=peer, id=m.id, report=self.report()))
            case Drain():
                self._lending.send(peer, Ok(id=m.id))
                return self._ending.drain(m.now, "asked to drain")
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
            case Adopt():
                self._adoption.adopt(session, m)
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
                self._consents.consent(session, m)
                self._lending.send(session.peer, Ok(id=m.id))
            case Share():
                self._answer(session, m.id, self._boards.share(session, m))
            case Fetch():
                self._answer(session, m.id, self._boards.fetch(session, m))
            case Recall():
                self.keeping.recall(session, m)
            case Goodbye():
                self._lending.send(session.peer, Ok(id=m.id))
                self._sessions.goodbye(session)
            case Lead():
                self._leading.lead(session, m)
            case Follow():
                self._following.follow(session, m)
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
