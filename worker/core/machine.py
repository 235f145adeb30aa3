"""The worker's state machine: events in, actions out. It has no clock and no randomness, and does no I/O.

The table in `model` defines the phases of a rank's part in a save.

The states of a slot (`Slot.state`):

    creating   Adopt was received and AdoptSlot is in progress, or the slot waits until there is memory for it
    lent       the session stages into it; only the session decides when to reuse it
    closing    Release, Goodbye, or the process is dead: the slot is read once more (a sealed snapshot is accepted, an
               unsealed one is abandoned), then freed when no save and no job needs it
    kept       its session has ended and its snapshot may be loaded (`kept_snapshots`); it is freed or lent again later

A slot is read when its Submit arrives, after it was adopted, when it is closing, and when a drain begins.
`Slot.accepted_generation` and the save ID make every request repeatable.
Messages may be lost, repeated or reordered. An invalid message is refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncckpt.basics.urls import parent_of
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
    Mirror,
    Ok,
    Recall,
    Release,
    Share,
    Status,
    Submit,
    Welcome,
    Withdraw,
)
from asyncckpt_worker.core.actions import Action, Draining, Exit, Resources, SendStatus
from asyncckpt_worker.core.events import (
    Copied,
    Died,
    Event,
    InternalFault,
    LineageScanned,
    Prepared,
    Published,
    Received,
    Relayed,
    Removed,
    SlotAdopted,
    SlotFreed,
    SlotRead,
    StopRequested,
    Tick,
    UnmirroredFound,
    Written,
)
from asyncckpt_worker.core.exchange import BoardRegistry
from asyncckpt_worker.core.kept_snapshots import SnapshotRegistry
from asyncckpt_worker.core.model import Session
from asyncckpt_worker.core.nodes.follower import Follower
from asyncckpt_worker.core.nodes.leader import Leader
from asyncckpt_worker.core.runs import LineageRegistry, RunRegistry
from asyncckpt_worker.core.save_admission import SaveAdmission
from asyncckpt_worker.core.saves import SaveRegistry, bring_deadline_forward, stop_early_writes
from asyncckpt_worker.core.sessions import SessionRegistry
from asyncckpt_worker.core.slots import AdoptionRegistry, SlotRegistry
from asyncckpt_worker.core.status import MAX_ROWS, PhaseChange, heartbeat_answer, note_phase_change, notify, report
from asyncckpt_worker.core.tables import Tables
from asyncckpt_worker.mirrors.schedule import MirrorRegistry


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreConfig:
    """Identity of the worker, and times in seconds (see `WorkerConfig`). `instance`: a random ID of the process."""

    package: str
    pid: int
    pid_start: int
    instance: str
    heartbeat_s: float
    idle_exit_s: float
    drain_timeout_s: float
    staging_grace_s: float
    keep_snapshots_s: float
    mirror_roots: tuple[str, ...]


class Shutdown:
    """Decides when the worker exits, and adds the action Exit once.

    Args:
        tables: The tables of the core.
        slot_registry: Reads all lent slots when a drain begins, and again before the exit.
        config: Uses `idle_exit_s`, `drain_timeout_s` and `staging_grace_s`.
        mirrors: Copies that the worker stays for, and a drain waits for.
        has_unacknowledged: Whether a reachable leader or follower has not acknowledged everything yet.

    Attributes:
        has_owner: Whether the worker must not exit when idle; from the last Tick.
    """

    def __init__(
        self,
        tables: Tables,
        slot_registry: SlotRegistry,
        config: CoreConfig,
        mirrors: MirrorRegistry,
        has_unacknowledged: Callable[[], bool],
    ) -> None:
        self._t, self._slot_registry, self._config = tables, slot_registry, config
        self._mirrors, self._has_unacknowledged = mirrors, has_unacknowledged
        self._idle_since: float | None = tables.now
        self.has_owner = False
        self._drain_deadline: float | None = None
        self._why = "drain timeout"
        self._grace_deadline = tables.now
        self._slots_reread = False
        self._exiting = False

    def times(self) -> Iterator[float]:
        """Yield the times at which `update` must run again."""
        if self._drain_deadline is not None:
            yield self._drain_deadline
        if self._t.draining:
            yield self._grace_deadline
        if self._idle_since is not None and self._config.idle_exit_s > 0:
            yield self._idle_since + self._config.idle_exit_s

    def drain(self, immediately: bool, why: str) -> None:
        t = self._t
        if self._drain_deadline is None:
            t.draining = True
            self._drain_deadline = t.now + self._config.drain_timeout_s
            t.begins_until = self._grace_deadline = min(self._drain_deadline, t.now + self._config.staging_grace_s)
            t.log(
                "info", f"draining: {why}", sessions=len(t.sessions), saves=sum(s.unfinished for s in t.saves.values())
            )
            t.actions.append(Draining())
            self._slot_registry.read_all_lent()
        if immediately:
            self._drain_deadline = t.now
            self._why = "stopped at once"

    def update(self) -> None:
        t = self._t
        if self._exiting:
            return
        busy = t.sessions or self.has_owner or t.n_reading or t.lineage_scans or self._mirrors.is_behind
        idle = not busy and not any(s.unfinished for s in t.saves.values())
        self._idle_since = (t.now if self._idle_since is None else self._idle_since) if idle else None
        if self._drain_deadline is not None:
            unfinished = [s for s in t.saves.values() if s.unfinished]
            staging = self._staging(self._drain_deadline)
            if not staging:
                stop_early_writes(t)
            # Not while trainers are connected: until this worker has left they can save nowhere. The next one copies.
            copies = self._mirrors.is_behind and not t.sessions
            working = bool(unfinished) or staging or self._has_unacknowledged() or copies
            at_rest = not working and not t.n_reading
            self._slots_reread = self._slots_reread and not working
            if (
                at_rest
                and not self._slots_reread
                and t.now < self._drain_deadline
                and self._slot_registry.read_all_lent()
            ):
                # IMPORTANT: a snapshot sealed since the first read, whose Submit has not arrived, must not be lost.
                self._slots_reread = True
            elif at_rest:
                self._leave(True, "drained")
            elif t.now >= self._drain_deadline:
                if lost := [s for s in unfinished if s.sealed]:
                    text = f"{len(lost)} saves are unfinished and will not be committed ({self._why})"
                    t.log("error", text, unfinished_saves=[s.save_id for s in lost[:20]])
                self._leave(not unfinished, self._why)
        elif self._idle_since is not None and 0 < self._config.idle_exit_s <= t.now - self._idle_since:
            self._leave(True, "idle")

    def _staging(self, drain_deadline: float) -> bool:
        """Whether a drain waits for trainers that are staging; each save has `staging_grace_s` from its begin."""
        t = self._t
        begun = [e.begun_at for _, e in t.parts() if e.is_open]
        for begun_at in begun:
            until = min(drain_deadline, begun_at + self._config.staging_grace_s)
            self._grace_deadline = max(self._grace_deadline, until)
        opened = t.now < t.begins_until and any(s.opened and not s.closing for s in t.slots.values())
        return opened or (bool(begun) and t.now < self._grace_deadline)

    def _leave(self, complete: bool, reason: str) -> None:
        self._exiting = True
        if left := self._mirrors.left_behind():
            text = f"{len(left)} checkpoints are not in their mirrors, the oldest is {left[0].path}; "
            text += "the next worker that mirrors checkpoints beside it goes on, "
            text += f"or one with --mirror {parent_of(left[0].path)}"
            self._t.log("warning", text)
        self._t.actions.append(Exit(complete=complete, reason=reason))


class Core:
    """The state machine of the worker: takes events, returns actions, does no I/O. Used from one thread."""

    def __init__(self, config: CoreConfig, now: float, resources: Resources) -> None:
        self._config = config
        self.tables = Tables(now=now, instance=config.instance)
        self._runs = RunRegistry(self.tables)
        self._mirrors = MirrorRegistry(self.tables)
        for root in config.mirror_roots:
            self._mirrors.scan(root)
        self._saves = SaveRegistry(self.tables, self._runs, self._mirrors)
        self._admission = SaveAdmission(self.tables, self._saves, self._runs)
        self.snapshot_registry = SnapshotRegistry(self.tables, config.keep_snapshots_s)
        self._slot_registry = SlotRegistry(self.tables, self._admission, self.snapshot_registry, resources)
        self._adoption = AdoptionRegistry(self.tables, self._slot_registry)
        self._follower = Follower(self.tables, self._runs, self._saves, self._slot_registry, self._mirrors, resources)
        self._lineages = LineageRegistry(self.tables, self._runs, self._follower.lineage)
        self._boards = BoardRegistry(self.tables)
        self._sessions = SessionRegistry(
            self.tables, self._slot_registry, self.snapshot_registry, self._runs, self._boards, self._welcome, resources
        )
        self._leader = Leader(
            self.tables,
            self._runs,
            self._admission,
            self._saves,
            self._slot_registry,
            self._lineages,
            self._mirrors,
            resources,
        )
        self._lineages.notify_followers = self._leader.epoch_found
        self.phase_changes: list[PhaseChange] = []
        """Phase changes caused by the last event."""

        self._shutdown = Shutdown(
            self.tables, self._slot_registry, config, self._mirrors, lambda: self._leader.busy or self._follower.busy
        )

    def handle(self, event: Event) -> list[Action]:
        """Handle `event`, then take the steps that it has made due; return the actions to perform, in order."""
        t = self.tables
        t.now = max(t.now, event.now)
        self.phase_changes = []
        self._dispatch(event)
        # IMPORTANT: each step is guarded, and within it what belongs to one save. A bug there may be met again at every
        # event, and must stop nothing else.
        if t.adopted_committed:
            t.run_guarded("", self._adoption.restore_committed)
        if self._runs.leaving:
            # IMPORTANT: before slots are freed, so that saves end with the reason of the departure, not "not sealed".
            t.run_guarded("", self._end_departed)
        if t.closing and t.review_closing_slots:
            t.run_guarded("", self._slot_registry.abandon_released)
        if self._saves.commits_waiting:
            t.run_guarded("", self._saves.commit_waiting)
        if t.closing and (t.review_closing_slots or t.now >= self.snapshot_registry.decides_at):
            t.run_guarded("", self._slot_registry.free_unneeded)
        if t.postponed:
            t.run_guarded("", self._slot_registry.create_postponed)
            if t.review_closing_slots:  # kept slots were dropped to make room: free them now
                t.run_guarded("", self._slot_registry.free_unneeded)
        if self.snapshot_registry.asked:
            t.run_guarded("", self.snapshot_registry.answer)
        if t.touched:
            t.run_guarded("", self._note_touched)
        # IMPORTANT: in this order. Both flushes read `touched`, and the leader's also `changed` and `announced`, which
        # `notify` clears. Without followed runs or followers they only empty `to_report` and `new_failures`.
        if self._follower.followed or t.to_report:
            t.run_guarded("", self._follower.flush)
        if self._leader.followers or self._mirrors.new_failures:
            t.run_guarded("", self._leader.flush)
        t.touched.clear()
        if t.changed or t.announced:
            t.run_guarded("", notify, t)
        for save in [s for s in t.saves.values() if s.outcome is not None and not s.jobs]:
            t.run_guarded("", t.archive, save)
        t.run_guarded("", self._shutdown.update)
        actions, t.actions = t.actions, []
        return actions

    def _end_departed(self) -> None:
        for run, rank in self._runs.complete_departures():
            self._saves.rank_departed(run, rank)

    def _note_touched(self) -> None:
        """Update the deadlines of the parts that have changed, and collect their phase changes."""
        t = self.tables
        for save_id, rank in t.touched:
            save = t.saves.get(save_id)
            if save is None or rank not in save.ranks:
                continue
            part = save.ranks[rank]
            if save.outcome is None:
                t.run_guarded(save_id, bring_deadline_forward, save, part, t.now)
            if part.seen != part.phase:
                t.run_guarded("", note_phase_change, t, save, part, self.phase_changes)

    @property
    def wakes_at(self) -> float | None:
        """When the next Tick is due, by the clock of the events; None: no deadline is pending.

        Deadlines that have passed are left out: one that nothing resolves must not make the loop spin. They are looked
        at with every Tick.
        """
        times = [*self._shutdown.times(), *self._leader.times(), *self._follower.times(), *self._mirrors.times()]
        times += [save.next_deadline_at for save in self.tables.saves.values() if save.outcome is None]
        return min((t for t in times if self.tables.now <= t < float("inf")), default=None)

    def report(self, *, has_all_mirrors: bool = False) -> dict[str, Any]:
        """Return the core's part of the status report; `has_all_mirrors`: as `has_all` of `MirrorRegistry.rows`."""
        found = {"followers": self._leader.report()[:MAX_ROWS], "followed": self._follower.report()}
        return {
            **found,
            **report(self.tables, self._config.instance),
            "mirrors": self._mirrors.rows(has_all=has_all_mirrors),
        }

    def run_of_key(self, client_public: str) -> str | None:
        """Return the run whose followers authenticate with this key, or None."""
        return self._leader.run_of(client_public)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        match event:
            case Received():
                self._received(event)
            case Died():
                self._sessions.died(event)
            case SlotAdopted():
                self._slot_registry.adopted(event)
            case SlotFreed():
                self.tables.freeing.discard(event.slot)
            case SlotRead():
                self._slot_registry.slot_read(event)
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
            case Copied():
                self._mirrors.copied(event)
            case UnmirroredFound():
                self._mirrors.found(event)
            case Relayed():
                (self._leader if event.route else self._follower).received(event)
            case StopRequested():
                self._shutdown.drain(event.immediately, "asked to stop")
            case InternalFault():
                self._saves.internal_fault(event)
            case Tick():
                self._shutdown.has_owner = event.has_owner
                if event.memory_short:
                    self.snapshot_registry.make_room(include_uncommitted=True)
                for tick in (self._saves.tick, self._follower.tick, self._leader.tick, self._mirrors.tick):
                    self.tables.run_guarded("", tick)

    def _received(self, event: Received) -> None:
        peer, m = event.peer, event.message
        match m:
            case Hello():
                return self._sessions.hello(peer, m)
            case Status():
                return self.tables.actions.append(SendStatus(peer=peer, id=m.id, report=self.report()))
            case Drain():
                self.tables.send(peer, Ok(id=m.id))
                return self._shutdown.drain(m.now, "asked to drain")
        session = self.tables.sessions.get(self.tables.peers.get(peer, ""))
        id = getattr(m, "id", 0)
        if session is None:
            error = UnknownSaveError("this worker has no such session: it was restarted, or it saw the process exit")
            return self.tables.refuse(peer, id, error)
        return self._requested(session, m)

    def _requested(self, session: Session, m: Any) -> None:
        match m:
            case Heartbeat():
                self.tables.send(session.peer, heartbeat_answer(self.tables, session, m))
            case Allocate():
                self._slot_registry.allocate(session, m)
            case Adopt():
                self._adoption.adopt(session, m)
            case Release():
                self._slot_registry.release(session, m)
            case Begin():
                self._slot_registry.begin(session, m)
            case Submit():
                self._slot_registry.submit(session, m)
            case Withdraw():
                self._admission.withdraw(session, m)
                self.tables.send(session.peer, Ok(id=m.id))
            case Consent():
                self._admission.consent(session, m)
                self.tables.send(session.peer, Ok(id=m.id))
            case Share():
                self._answer(session, m.id, self._boards.share(session, m))
            case Fetch():
                self._answer(session, m.id, self._boards.fetch(session, m))
            case Recall():
                self.snapshot_registry.recall(session, m)
            case Goodbye():
                self.tables.send(session.peer, Ok(id=m.id))
                self._sessions.goodbye(session)
            case Lead():
                self._leader.lead(session, m)
            case Follow():
                self._follower.follow(session, m)
            case Lineage():
                self._lineages.ask(session, m)
            case Mirror():
                self._mirrors.ask(session, m)

    def _answer(self, session: Session, id: int, found: Message | AsyncCkptError) -> None:
        if isinstance(found, AsyncCkptError):
            return self.tables.refuse(session.peer, id, found)
        return self.tables.send(session.peer, found)

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
