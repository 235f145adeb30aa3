"""The worker's core under thousands of random schedules: lost, repeated, late messages, crashes, failing jobs.

The simulation plays network, trainers, kernel, disk and clock. After every action it checks what must always hold.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from worker_bench import BEGIN, HELLO, REQUEST, FakeResources, WatchedBrain, all_parts, all_saves

from asyncckpt.errors import InsufficientMemoryError, SaveFailedError, from_wire, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.samples import encode_samples
from asyncckpt.protocol.save_phases import ABANDONED, COMMITTED, DURABLE, ENDED, FAILED
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.machine import CoreConfig

ERROR = to_wire(SaveFailedError("the simulated disk failed", code="EIO"))
NO_MEMORY = to_wire(InsufficientMemoryError("it does not fit", nbytes=12288, available=0))
COMMIT_TIMEOUT_S = 300.0
HOOK_TIMEOUT_S = 100.0
CONFIG = CoreConfig(
    package="sim",
    pid=1,
    pid_start=1,
    instance="0" * 16,
    heartbeat_s=1.0,
    idle_exit_s=0.0,
    drain_timeout_s=1e6,
    staging_grace_s=1e5,
    keep_snapshots_s=0.0,
    mirror_roots=(),
)


@dataclass
class Memory:
    """A slot's control page."""

    generation: int = 0
    sealed: SaveRequest | None = None
    freed: bool = False


@dataclass
class Trainer:
    """One rank of one run: a small, honest client that repeats what is not answered."""

    name: str
    run: str
    rank: int
    world_size: int
    alive: bool = True
    ids: int = 0
    slots: dict[int, Memory] = field(default_factory=dict)
    holds: dict[int, str] = field(default_factory=dict)
    """Slot -> save that uses it."""

    sequence: int = 0
    waiting: dict[int, m.Message] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    """Saves to which its hook has spoken."""

    hooked: bool = False
    welcomed: bool = False
    epoch: int | None = None

    def id(self) -> int:
        self.ids += 1
        return self.ids

    def ask(self, message: Any) -> m.Message:
        self.waiting[message.id] = message
        return message


class World(FakeResources):
    """Everything around the core. `chaos` is the chance of each mischief."""

    def __init__(self, seed: int, chaos: float) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.chaos = chaos
        self.now = 0.0
        self.core = WatchedBrain(CONFIG, 0.0, self)
        self.trainers: dict[bytes, Trainer] = {}
        self.memory: dict[int, Memory] = {}
        self.network: list[tuple[bytes, m.Message]] = []
        self.jobs: list[Any] = []
        self.seen_early: dict[int, tuple[int, SaveRequest | None]] = {}
        self.written: dict[str, set[int]] = {}
        self.sealed: set[tuple[str, int]] = set()
        self.withdrawn: set[str] = set()
        self.injected: set[str] = set()
        self.commits: set[str] = set()
        self.paths: set[str] = set()
        self.rejected: set[str] = set()
        self.removed: set[str] = set()
        self.files: set[tuple[str, int, str]] = set()
        """Save, rank and directory of what was written, or in part, and not removed."""

        self.granted: set[tuple[str, int]] = set()
        self.refused: set[str] = set()
        self.split: set[str] = set()
        """Saves whose ranks differ: in their plans, or in a replica that is split."""

        self.heard: dict[str, set[tuple[bool, str, str]]] = {}
        """What trainers were told of a save's end: committed, the error's code, and its detail."""

        self.epochs: dict[str, int] = {}
        self.exit: ac.Exit | None = None

    def luck(self, share: float) -> bool:
        return self.random.random() < share

    # ---- the core's surroundings

    def feed(self, event: ev.Event) -> None:
        if self.luck(self.chaos / 10):  # of a thread that looked at the clock, and then had to wait for a core
            event = replace(event, now=max(0.0, event.now - 10 * self.random.random()))
        todo = [event]
        while todo:
            for action in self.core.handle(todo.pop(0)):
                todo += self.perform(action)
            self.check_slots()

    def perform(self, action: ac.Action) -> list[ev.Event]:
        match action:
            case ac.Send():
                if not self.luck(self.chaos):
                    self.deliver(action.peer, action.message)
            case ac.FreeSlot():
                users = (ac.Write, ac.ReadSlot, ac.FreeSlot)
                running = [j for j in self.jobs if isinstance(j, users) and j.slot == action.slot]
                assert not running, f"slot {action.slot} is freed under {running}"
                self.jobs.append(action)
            case ac.Exit():
                self.exit = action
            case ac.Commit():
                self.check_commit(action)
                self.jobs.append(action)
            case ac.ReadSlot():
                memory = self.memory[action.slot]
                self.seen_early[action.slot] = (memory.generation, memory.sealed)
                self.jobs.append(action)
            case ac.Remove():
                rivals = [j for j in self.jobs if isinstance(j, (ac.Write, ac.Prepare)) and j.key[0] == action.save_id]
                assert not rivals, f"files of {action.save_id} are removed while {rivals} are under way"
                self.jobs.append(action)
            case ac.Prepare() | ac.Write() | ac.ScanLineage():
                self.jobs.append(action)
        return []

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """See `Resources`."""
        return any(t.name == session and t.alive for t in self.trainers.values())

    def create_slot(self, number: int, nbytes: int, *, populate: bool) -> tuple[int, bytes]:
        """See `Resources`."""
        if self.luck(self.chaos / 4):
            raise from_wire(self.random.choice((ERROR, NO_MEMORY)))
        self.memory[number] = Memory()
        return number, b"t" * 16

    def check_commit(self, action: ac.Commit) -> None:
        world_size = action.requests[0].world_size
        assert self.written.get(action.save_id, set()) == set(range(world_size)), "commit without every rank durable"
        assert action.save_id not in self.commits, "committed twice"
        assert action.save_id not in self.removed, "committed after its files were removed"
        assert all((action.save_id, r) in self.sealed for r in range(world_size)), "committed what nobody sealed"
        assert len({(r.path, r.step, r.world_size, r.plan) for r in action.requests}) == 1
        assert action.save_id not in self.split, "committed though ranks differ"
        asked = {(action.save_id, r.rank) for r in action.requests if r.hook_timeout_s}
        assert asked <= self.granted and action.save_id not in self.refused, "committed without consent"
        gone = self.core.tables.runs[action.save_id[-12:]].departed
        assert all(r in {q.rank for q in action.requests} for r in gone)
        assert len(action.results) == world_size
        saves = self.core.tables.saves
        others = [s for s in saves.values() if s.outcome is None and s.save_id != action.save_id]
        path = action.requests[0].path
        rivals = [s.save_id for s in others for e in s.ranks.values() if e.path == path and not s.is_recovering]
        assert not rivals, f"{action.save_id} is committed while {rivals} use its path"
        elders = [s.save_id for s in others if s.save_id[16:] == action.save_id[16:] and s.save_id < action.save_id]
        since = saves[action.save_id].waiting_since
        overdue = since is not None and self.now - since >= COMMIT_TIMEOUT_S
        assert overdue or not elders, f"{action.save_id} is committed before {elders}"

    def check_slots(self) -> None:
        tables = self.core.tables
        for session in tables.sessions.values():
            assert all(tables.slots[n].session == session.name and not tables.slots[n].closing for n in session.slots)
        for _, part in tables.parts():
            if part.in_flight or part.writing:
                assert part.slot in tables.slots and part.slot in self.memory, f"{part} lost its slot"

    def finish_job(self) -> None:
        self.do(self.jobs.pop(self.random.randrange(len(self.jobs))))

    def do(self, job: Any) -> None:
        fails = self.luck(self.chaos / 3)
        match job:
            case ac.ReadSlot():
                memory = self.memory[job.slot]
                if memory.sealed is None:
                    return self.feed(ev.SlotRead(now=self.now, slot=job.slot, reason="OPEN"))
                event = ev.SlotRead(now=self.now, slot=job.slot, generation=memory.generation, request=memory.sealed)
                return self.feed(event)
            case ac.Prepare():
                self.injected |= {job.key[0]} if fails else set()
                return self.feed(ev.Prepared(now=self.now, key=job.key, error=ERROR if fails else None))
            case ac.Write():
                memory = self.memory[job.slot]  # KeyError: it was freed while it was written
                self.files.add((*job.key, job.request.path))
                intact = memory.sealed is job.request and memory.generation == job.generation
                if fails or not intact:
                    self.injected |= {job.key[0]}
                    return self.fail_write(job)
                self.written.setdefault(job.key[0], set()).add(job.key[1])
                return self.feed(ev.Written(now=self.now, key=job.key, result=job.key))
            case ac.Commit():
                unknown = self.luck(0.5)
                path = job.requests[0].path
                if fails or path in self.paths:
                    unknown = unknown and path not in self.paths
                    self.injected.add(job.save_id)
                    return self.feed(ev.Published(now=self.now, save_id=job.save_id, error=ERROR, unknown=unknown))
                self.commits.add(job.save_id)
                self.paths.add(path)
                return self.feed(ev.Published(now=self.now, save_id=job.save_id))
            case ac.FreeSlot():
                self.memory.pop(job.slot).freed = True
                return self.feed(ev.SlotFreed(now=self.now, slot=job.slot))
            case ac.Remove():
                assert job.save_id not in self.commits, "the files of a committed checkpoint were removed"
                self.removed.add(job.save_id)
                self.files = {found for found in self.files if (found[0], found[2]) != (job.save_id, job.path)}
                return self.feed(ev.Removed(now=self.now, save_id=job.save_id))
            case ac.ScanLineage():
                return self.feed(ev.LineageScanned(now=self.now, run=job.run, path=job.path, epoch=1))

    def fail_write(self, job: ac.Write) -> None:
        """A writer that fails removes what it has created, but for what resists."""
        if not self.luck(self.chaos):
            self.files.discard((*job.key, job.request.path))
        self.feed(ev.Written(now=self.now, key=job.key, error=ERROR))

    # ---- the network

    def post(self, peer: bytes, message: m.Message) -> None:
        self.network += [(peer, message)] * (0 if self.luck(self.chaos) else 2 if self.luck(self.chaos) else 1)

    def carry(self) -> None:
        index = self.random.randrange(len(self.network)) if self.luck(self.chaos) else 0
        peer, message = self.network.pop(index)
        self.feed(ev.Received(now=self.now, peer=peer, message=message))

    def deliver(self, peer: bytes, message: m.Message) -> None:
        trainer = self.trainers.get(peer)
        if trainer is None or not trainer.alive:
            return
        if isinstance(message, m.Saves):
            for row in message.saves:
                self.told(peer, trainer, row)
        asked = trainer.waiting.pop(getattr(message, "id", 0), None)
        if isinstance(message, m.Welcome):
            trainer.welcomed = True
        elif isinstance(message, m.LineageFound):
            trainer.epoch = message.epoch
            assert self.epochs.setdefault(trainer.run, message.epoch) == message.epoch, "ranks of a run differ in epoch"
            assert len(set(self.epochs.values())) == len(self.epochs), "two runs have one epoch"
        elif isinstance(message, m.Granted) and asked is not None:
            trainer.slots.setdefault(message.slot, self.memory[message.slot])
        elif isinstance(message, m.Refused) and isinstance(asked, (m.Begin, m.Submit)):
            trainer.pending.discard(asked.save_id)
            self.rejected.add(asked.save_id)
            if isinstance(asked, m.Begin):
                # The slot was opened for nothing; the next save opens a further generation.
                trainer.holds = {n: s for n, s in trainer.holds.items() if s != asked.save_id}

    def told(self, peer: bytes, trainer: Trainer, row: Any) -> None:
        """A trainer reads a row: its save has ended, or waits for its hook."""
        save_id = row["save_id"]
        if row["phase"] in ENDED:
            trainer.pending.discard(save_id)
            error = row.get("error", {})
            facts = (row["phase"] == COMMITTED, error.get("code", ""), str(error.get("fields", {}).get("detail", "")))
            self.heard.setdefault(save_id, set()).add(facts)
        elif row["phase"] == DURABLE and trainer.hooked and save_id not in trainer.answered:
            trainer.answered.add(save_id)
            granted = (save_id, trainer.rank) in self.granted or not self.luck(0.05)
            if granted and save_id in self.refused:
                granted = (save_id, trainer.rank) in self.granted
            if granted:
                self.granted.add((save_id, trainer.rank))
            else:
                self.refused.add(save_id)
            consent = m.Consent(id=trainer.id(), save_id=save_id, granted=granted, reason="simulated")
            self.post(peer, trainer.ask(consent))

    # ---- the trainers

    def spawn(self, run: str, rank: int, world_size: int) -> None:
        name = f"{self.random.getrandbits(64):016x}"
        trainer = Trainer(name, run, rank, world_size, hooked=self.luck(0.2))
        self.trainers[name.encode()] = trainer
        self.greet(trainer)

    def greet(self, trainer: Trainer) -> None:
        fields: dict[str, Any] = {**HELLO, "rank": trainer.rank, "world_size": trainer.world_size}
        self.post(trainer.name.encode(), trainer.ask(m.Hello(id=trainer.id(), session=trainer.name, **fields)))

    def act(self, peer: bytes, trainer: Trainer) -> None:
        """One step of a trainer: whatever an honest one might do now."""
        asking = any(isinstance(w, m.Lineage) for w in trainer.waiting.values())
        if trainer.welcomed and trainer.epoch is None and not asking:
            self.post(
                peer,
                trainer.ask(m.Lineage(id=trainer.id(), run=trainer.run, path="/ckpt/first", least_epoch=0)),
            )
        if trainer.epoch is None or self.luck(0.2):
            for message in list(trainer.waiting.values()):
                self.post(peer, message)
            return
        free = [n for n in trainer.slots if trainer.holds.get(n) not in trainer.pending]
        choice = self.random.random()
        if choice < 0.02:
            self.post(peer, trainer.ask(m.Goodbye(id=trainer.id())))
            trainer.alive = False
        elif choice < 0.07 and free:
            number = self.random.choice(free)
            del trainer.slots[number]
            self.post(peer, trainer.ask(m.Release(id=trainer.id(), slot=number)))
        elif choice < (0.15 if trainer.slots else 1.0):
            if len(trainer.slots) < 3 and not any(isinstance(w, m.Allocate) for w in trainer.waiting.values()):
                self.post(peer, trainer.ask(m.Allocate(id=trainer.id(), nbytes=12288, populate=False)))
        elif choice < 0.25:
            saves = tuple(sorted(trainer.pending))
            self.post(peer, m.Heartbeat(id=trainer.id(), saves=saves))
        elif choice < 0.255 and self.chaos > 0:
            self.post(peer, m.Goodbye(id=trainer.id()))
            trainer.alive = False
        elif choice < 0.28:
            self.skip(peer, trainer)
        elif free:
            self.save(peer, trainer, self.random.choice(free))

    def skip(self, peer: bytes, trainer: Trainer) -> None:
        """Take no part in the next save, and say so before anything else; its epoch may not be known."""
        tail = f"-{trainer.sequence:08d}-{trainer.run}"
        epoch = self.random.choice((0, trainer.epoch))
        trainer.sequence += 1
        message = m.Withdraw(id=trainer.id(), save_id=f"{epoch:06d}{tail}", reason="simulated", skipped=True)
        self.post(peer, trainer.ask(message))
        self.withdrawn.add(f"{trainer.epoch:06d}{tail}")

    def save(self, peer: bytes, trainer: Trainer, number: int) -> None:
        memory = trainer.slots[number]
        save_id = f"{trainer.epoch:06d}-{trainer.sequence:08d}-{trainer.run}"
        trainer.sequence += 1
        memory.generation += 1
        memory.sealed = None
        trainer.pending.add(save_id)
        trainer.holds[number] = save_id
        shared = trainer.sequence % 2 == 0  # by all runs, so that some meet at one path
        path = f"/ckpt/shared-{trainer.sequence}" if shared else f"/ckpt/{save_id}"
        self.announce(peer, trainer, number, save_id, path=path, step=trainer.sequence)
        fate = self.random.random()
        if fate < 0.04 * (self.chaos > 0):
            trainer.alive = False
            return
        if fate < 0.1:
            self.withdraw(peer, trainer, save_id)
            return
        plan, samples = self.views(save_id, trainer)
        request = replace(
            REQUEST,
            save_id=save_id,
            step=trainer.sequence,
            path=path,
            rank=trainer.rank,
            world_size=trainer.world_size,
            commit_timeout_s=COMMIT_TIMEOUT_S,
            hook_timeout_s=HOOK_TIMEOUT_S if trainer.hooked else 0,
            plan=plan,
            samples=samples,
            changed=self.random.random() < 0.5,
        )
        self.seal_or_stream(peer, trainer, number, request, dies=fate < 0.16 * (self.chaos > 0))

    def announce(self, peer: bytes, trainer: Trainer, number: int, save_id: str, *, path: str, step: int) -> None:
        """Say which save is staged into a slot."""
        where = {"slot": number, "generation": trainer.slots[number].generation}
        fields: dict[str, Any] = {**BEGIN, **where, "path": path, "step": step, "commit_timeout_s": COMMIT_TIMEOUT_S}
        self.post(peer, trainer.ask(m.Begin(id=trainer.id(), save_id=save_id, **fields)))

    def withdraw(self, peer: bytes, trainer: Trainer, save_id: str) -> None:
        """Take a save back."""
        message = m.Withdraw(id=trainer.id(), save_id=save_id, reason="simulated", skipped=False)
        self.post(peer, trainer.ask(message))
        trainer.pending.discard(save_id)
        self.withdrawn.add(save_id)

    def seal_or_stream(self, peer: bytes, trainer: Trainer, number: int, request: SaveRequest, *, dies: bool) -> None:
        """Seal a slot, and ring its doorbell."""
        memory = trainer.slots[number]
        memory.sealed = request
        self.sealed.add((request.save_id, trainer.rank))
        if dies:
            trainer.alive = False
            return
        self.ring(peer, trainer, number, request.save_id)

    def ring(self, peer: bytes, trainer: Trainer, number: int, save_id: str) -> None:
        """Ring a slot's doorbell."""
        generation = trainer.slots[number].generation
        submit = m.Submit(id=trainer.id(), save_id=save_id, slot=number, generation=generation)
        self.post(peer, trainer.ask(submit))

    def views(self, save_id: str, trainer: Trainer) -> tuple[str, bytes]:
        """What a rank thinks of plan and replicas; now and then another than the others."""
        if trainer.world_size == 1 or trainer.rank or not self.luck(0.05):
            return "0" * 16, encode_samples([("w", True, bytes(8)), ("v", False, bytes(8))])
        kind = self.random.randrange(3)
        self.split.add(save_id)
        w, v = (b"another." if kind == n else bytes(8) for n in (1, 2))
        return ("1" if kind == 0 else "0") * 16, encode_samples([("w", True, w), ("v", False, v)])

    # ---- the run

    def run(self, steps: int) -> None:
        self.spawn_run()
        unseen: list[Trainer] = []
        for _ in range(steps):
            self.let_time_pass()
            dice = self.random.random()
            living = [(p, t) for p, t in self.trainers.items() if t.alive]
            unseen += [t for t in self.trainers.values() if not t.alive and t not in unseen]
            if dice < 0.3 and living:
                self.act(*self.random.choice(living))
            elif dice < 0.6 and self.network:
                self.carry()
            elif dice < 0.85 and self.jobs:
                self.finish_job()
            elif dice < 0.90 and unseen:
                self.feed(ev.Died(now=self.now, session=self.random.choice(unseen).name))
            elif dice < 0.91 and len(self.trainers) < 12 and self.luck(0.3):
                self.spawn_run()
            else:
                self.feed(ev.Tick(now=self.now))
        self.settle()

    def let_time_pass(self) -> None:
        """Most often less than a second; or the machine slept."""
        self.now += self.random.random()
        if self.luck(self.chaos / 100):
            self.now += self.random.choice((COMMIT_TIMEOUT_S / 4, COMMIT_TIMEOUT_S + 1))

    def spawn_run(self) -> None:
        world_size = self.random.choice((1, 2, 2, 3))
        run = f"{self.random.getrandbits(48):012x}"
        for rank in range(world_size):
            self.spawn(run, rank, world_size)

    def settle(self) -> None:
        """Everybody dies; everything that is under way comes to its end."""
        if self.luck(0.5):
            self.wait_long()
        for trainer in self.trainers.values():
            trainer.alive = False
        self.network.clear()
        for trainer in self.trainers.values():
            self.feed(ev.Died(now=self.now, session=trainer.name))
        while self.jobs:
            self.finish_job()
        self.check_gone()
        self.now += 1000.0
        self.feed(ev.Tick(now=self.now))
        while self.jobs:
            self.finish_job()
        self.check_end()

    def wait_long(self) -> None:
        """Nobody does anything any more, and nobody dies: whatever a rank has sealed ends in time."""
        self.network.clear()
        for _ in range(8):
            while self.jobs:
                self.finish_job()
            self.now += max(COMMIT_TIMEOUT_S, HOOK_TIMEOUT_S)
            self.feed(ev.Tick(now=self.now))
        while self.jobs:
            self.finish_job()
        stuck = [s for s in self.core.tables.saves.values() if s.outcome is None and s.sealed_since is not None]
        assert not stuck, f"they never end: {stuck}"

    def check_gone(self) -> None:
        """Everybody is dead, and no time has passed since: nobody waits for a rank that the worker has known."""
        known = {t.run: 0 for t in self.trainers.values()}
        for trainer in self.trainers.values():
            known[trainer.run] += trainer.epoch is not None
        for save in self.core.tables.saves.values():
            waits = save.outcome is None and known[save.save_id[-12:]] == save.world_size
            assert not waits, f"{save} waits for the dead"

    def check_end(self) -> None:
        for save_id, heard in self.heard.items():
            assert len(heard) == 1, f"ranks of {save_id} were told different ends: {heard}"
        tables = self.core.tables
        assert not tables.slots and not self.memory, "slots are left"
        assert not tables.sessions and not tables.peers
        assert tables.jobs == 0
        for save, part in all_parts(tables):
            assert part.phase in ENDED and save.outcome is not None, f"{save.save_id} never ended"
            assert (part.phase == COMMITTED) == (save.save_id in self.commits)
            assert part.phase == COMMITTED or part.error is not None, f"{save.save_id} ended without a reason"
        lost = {save.save_id for save in all_saves(tables) if save.outcome in (FAILED, ABANDONED)}
        left = [found for found in self.files if found[0] in lost]
        assert not left, f"files of lost saves are left: {left}"
        self.check_nothing_lost()
        self.feed(ev.StopRequested(now=self.now))
        assert self.exit == ac.Exit(complete=True, reason="drained")

    def check_nothing_lost(self) -> None:
        """P5: what all ranks sealed is committed, unless its disk failed or it was refused or taken back."""
        for trainer in self.trainers.values():
            for sequence in range(trainer.sequence):
                save_id = f"{trainer.epoch or 0:06d}-{sequence:08d}-{trainer.run}"
                everywhere = all((save_id, r) in self.sealed for r in range(trainer.world_size))
                if everywhere and save_id not in self.injected | self.rejected | self.withdrawn | self.split:
                    save = self.core.tables.find(save_id)
                    excuses = ["commit_timeout", "path_in_use"]
                    if any(t.hooked for t in self.trainers.values() if t.run == trainer.run):
                        excuses.append("vetoed")
                    excused = save is not None and any(code in str(save.error) for code in excuses)
                    assert save_id in self.commits or excused, f"{save_id} was staged and is lost: {save}"


SCHEDULES = max(20, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))
"""Of each kind; `make test-fault` raises it."""
STEPS = 1500


@pytest.mark.parametrize("chaos", [0.0, 0.05, 0.3])
def test_random_schedules_keep_every_promise(
    chaos: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    for schedule in range(SCHEDULES):
        seed = rng.getrandbits(32)
        print(f"schedule {schedule}: World(seed={seed}, chaos={chaos}).run(steps=STEPS)")
        World(seed, chaos).run(steps=STEPS)


def test_the_simulation_reaches_every_outcome(rng: random.Random) -> None:
    seen: set[str] = set()
    for _ in range(300):  # a quarter of them reach the rarest
        world = World(rng.getrandbits(32), 0.2)
        world.run(steps=STEPS)
        seen |= {part.phase for _, part in all_parts(world.core.tables)}
        if seen == ENDED:
            break
    assert seen == ENDED
