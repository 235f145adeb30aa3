"""The machine: events in, actions out. No clock, no randomness, no I/O of its own.

A rank's part in a save is moved by the table in `part_table`.

A slot's states:

    creating   Adopt came, and AdoptSlot is under way; or it waits until there is memory for it
    lent       the session stages into it; only the session decides when it is used again
    closing    Release, Goodbye, or proof of death: it is read once more (a sealed snapshot is taken up, one that is
               open is abandoned), then freed when no save and no job needs it any more
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
from asyncckpt_worker.core.actions import Action, SendStatus
from asyncckpt_worker.core.boards import BoardBook
from asyncckpt_worker.core.deadlines import look_sooner
from asyncckpt_worker.core.decider import Decider
from asyncckpt_worker.core.events import (
    Broken,
    Died,
    Event,
    LineageScanned,
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
    Written,
)
from asyncckpt_worker.core.follower import Follower
from asyncckpt_worker.core.intake import Intake
from asyncckpt_worker.core.kept_snapshots import KeepBook
from asyncckpt_worker.core.lineages import LineageBook
from asyncckpt_worker.core.model import Session
from asyncckpt_worker.core.resources import Resources
from asyncckpt_worker.core.runs import RunBook
from asyncckpt_worker.core.saves import SaveBook
from asyncckpt_worker.core.sessions import SessionBook
from asyncckpt_worker.core.shutdown import BrainConfig, Ending
from asyncckpt_worker.core.slots import AdoptionBook, Lending
from asyncckpt_worker.core.status import MAX_ROWS, Moved, look, news, report, states
from asyncckpt_worker.core.tables import Tables


class Brain:
    """See the module. Used from one thread."""

    def __init__(self, config: BrainConfig, now: float, resources: Resources) -> None:
        self._config = config
        self.tables = Tables(now=now, instance=config.instance)
        self._runs = RunBook(self.tables)
        self._saves = SaveBook(self.tables, self._runs)
        self._intake = Intake(self.tables, self._saves, self._runs)
        self.keeping = KeepBook(self.tables, config.keep_snapshots_s)
        self._lending = Lending(self.tables, self._intake, self.keeping, resources)
        self._adoption = AdoptionBook(self.tables, self._lending)
        self._follower = Follower(self.tables, self._runs, self._saves, self._lending, resources)
        self._lineages = LineageBook(self.tables, self._runs, self._lending, self._follower.lineage)
        self._boards = BoardBook(self.tables)
        self._sessions = SessionBook(
            self.tables, self._lending, self.keeping, self._runs, self._boards, self._welcome, resources
        )
        self._decider = Decider(
            self.tables, self._runs, self._intake, self._saves, self._lending, self._lineages, resources
        )
        self._lineages.tell_followers = self._decider.epoch_found
        self.moves: list[Moved] = []
        """What the last event has moved."""

        self._ending = Ending(self.tables, self._lending, config, lambda: self._decider.busy or self._follower.busy)

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done about `event`, in this order."""
        t = self.tables
        t.now = max(t.now, event.now)
        self.moves = []
        self._dispatch(event)
        if t.found:
            self._adoption.remember()
        # IMPORTANT: before its slots are freed: a save ends with why its rank is gone, not with what it leaves behind.
        if self._runs.leaving:
            for run, rank in self._runs.settle():
                self._saves.gone(run, rank)
        if t.stirred:
            self._lending.abandon_what_was_given_back()
        if self._saves.held_back:
            self._saves.commit_what_was_held_back()
        self._lending.free_what_is_over()
        if t.postponed:
            self._lending.create_what_was_postponed()
        if t.stirred:
            self._lending.free_what_is_over()  # what was kept may have to make room
        if self.keeping.asked:
            self.keeping.answer()
        if t.touched:
            self._look_sooner()
            self.moves = look(t)
        self._follower.flush()
        self._decider.flush()
        t.touched.clear()
        if t.changed or t.announced:
            t.actions += news(t)
        t.settle()
        self._ending.consider()
        actions, t.actions = t.actions, []
        return actions

    def _look_sooner(self) -> None:
        for save_id, rank in self.tables.touched:
            save = self.tables.saves.get(save_id)
            if save is not None and save.outcome is None and rank in save.ranks:
                look_sooner(save, save.ranks[rank], self.tables.now)

    @property
    def wakes_at(self) -> float | None:
        """When the next Tick is due at the latest, by the events' clock; None: whenever."""
        times = [*self._ending.times(), *self._decider.times(), *self._follower.times()]
        times += [save.look_at for save in self.tables.saves.values() if save.outcome is None]
        return min((t for t in times if self.tables.now <= t < float("inf")), default=None)

    def report(self) -> dict[str, Any]:
        """Return the brain's part of the status report."""
        found = {"followers": self._decider.report()[:MAX_ROWS], "followed": self._follower.report()}
        return {**found, **report(self.tables, self._config.instance)}

    def run_of_key(self, client_public: str) -> str | None:
        """Return the run whose followers prove this key, or None."""
        return self._decider.run_of(client_public)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        match event:
            case Received():
                self._received(event)
            case Died():
                self._sessions.died(event)
            case SlotCreated():
                self._lending.adopted(event)
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
            case Relayed():
                (self._decider if event.route else self._follower).received(event)
            case StopRequested():
                self._ending.drain(event.immediately, "asked to stop")
            case Broken():
                self._saves.broken(event)
            case Tick():
                self._ending.kept = event.kept
                if event.memory_short:
                    self.keeping.make_room(wholly=True)
                for tick in (self._saves.tick, self._follower.tick, self._decider.tick):
                    self.tables.contained("", tick)

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
        if session is None:
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
                self._intake.consent(session, m)
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
                self._decider.lead(session, m)
            case Follow():
                self._follower.follow(session, m)
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
