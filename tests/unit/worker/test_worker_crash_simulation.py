"""The worker dies in the middle of random schedules; the next core gets the trainers' slots, and the disk stays.

As `test_worker_simulation`, with the same checks; what dies with the worker is its memory, its jobs (half done or not),
and what was under way to it or from it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_worker_simulation import CONFIG, ERROR, Memory, Trainer, World
from worker_bench import WatchedBrain

from asyncckpt.protocol import messages as m
from asyncckpt.protocol.save_phases import COMMITTED
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

SCHEDULES = max(6, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))
"""Of each kind; `make test-fault` raises it."""
STEPS = 1500


class CrashingWorld(World):
    """See the module. `crash_chance`: at each step of a trainer."""

    def __init__(self, seed: int, chaos: float, crash_chance: float) -> None:
        super().__init__(seed, chaos)
        self.crash_chance = crash_chance
        self.crashes = 0
        self.resumed = 0
        """Saves that a worker finished after the one before it had died."""

        self.hurt: set[str] = set()
        """Runs of which a rank was dead when a worker died: its memory is gone."""

        self.kept: dict[str, list[tuple[Memory, str]]] = {}
        """Trainer -> what it holds that no worker has yet, and the save in it."""

        self.fds: dict[int, tuple[Memory, Trainer]] = {}
        self.failed: dict[str, list[str]] = {}
        """Trainer -> saves that it was told to have failed."""

    # ---- the death

    def act(self, peer: bytes, trainer: Trainer) -> None:
        if self.luck(self.crash_chance):
            self.crash()
        elif trainer.welcomed and peer in self.trainers:
            super().act(peer, trainer)
        elif peer in self.trainers:
            for message in list(trainer.waiting.values()):
                self.post(peer, message)

    def crash(self) -> None:
        self.count_resumed()
        self.crashes += 1
        for job in self.jobs:
            if isinstance(job, ac.Commit) and self.luck(0.5) and job.requests[0].path not in self.paths:
                self.commits.add(job.save_id)
                self.paths.add(job.requests[0].path)
        self.jobs.clear()
        self.network.clear()
        self.memory, self.fds, self.written, self.removed = {}, {}, {}, set()
        self.files.clear()  # what a dead worker leaves of a rank that is dead too is garbage collection's
        self.core = WatchedBrain(replace(CONFIG, instance=f"{self.crashes:016x}"), self.now, self)
        trainers, self.trainers = list(self.trainers.values()), {}
        self.hurt |= {t.run for t in trainers if not t.alive or t.epoch is None}
        for trainer in trainers:
            trainer.alive = trainer.alive and trainer.epoch is not None
            if trainer.alive:
                self.greet_anew(trainer)
            else:
                self.trainers[trainer.name.encode()] = trainer

    def count_resumed(self) -> None:
        self.resumed += sum(part.from_dead_worker and part.phase == COMMITTED for part in self.core.parts())

    def greet_anew(self, trainer: Trainer) -> None:
        kept = self.kept.pop(trainer.name, [])
        kept += [(memory, trainer.holds.get(number, "")) for number, memory in trainer.slots.items()]
        failed = self.failed.pop(trainer.name, [])
        trainer.name = f"{self.random.getrandbits(64):016x}"
        self.kept[trainer.name], self.failed[trainer.name] = kept, failed
        trainer.slots, trainer.holds, trainer.welcomed = {}, {}, False
        trainer.answered.clear()
        trainer.waiting = {id: w for id, w in trainer.waiting.items() if isinstance(w, m.Withdraw)}
        self.trainers[trainer.name.encode()] = trainer
        self.greet(trainer)

    # ---- the takeover

    def deliver(self, peer: bytes, message: m.Message) -> None:
        trainer = self.trainers.get(peer)
        if trainer is None or not trainer.alive:
            return
        asked = trainer.waiting.get(getattr(message, "id", 0))
        greeted = isinstance(message, m.Welcome) and not trainer.welcomed
        if isinstance(message, m.Granted) and isinstance(asked, m.Adopt):
            memory, _ = self.fds[asked.fd]
            found = [pair for pair in self.kept[trainer.name] if pair[0] is memory]
            del trainer.waiting[asked.id]
            self.kept[trainer.name] = [pair for pair in self.kept[trainer.name] if pair[0] is not memory]
            trainer.slots[message.slot] = memory
            if found and found[0][1] in trainer.pending:
                trainer.holds[message.slot] = found[0][1]
                self.ring(peer, trainer, message.slot, found[0][1])
            return
        if isinstance(message, m.Refused) and isinstance(asked, m.Adopt):
            self.rejected |= {save for memory, save in self.kept[trainer.name] if memory is self.fds[asked.fd][0]}
            trainer.pending -= self.rejected
        super().deliver(peer, message)
        if greeted:
            for memory, save_id in self.kept.get(trainer.name, []):
                self.hand_over(peer, trainer, memory, save_id)
            for save_id in self.failed.get(trainer.name, []):
                withdraw = m.Withdraw(id=trainer.id(), save_id=save_id, reason="it had failed", skipped=False)
                self.post(peer, trainer.ask(withdraw))

    def hand_over(self, peer: bytes, trainer: Trainer, memory: Memory, save_id: str) -> None:
        fd = len(self.fds) + 1
        self.fds[fd] = (memory, trainer)
        adopt = m.Adopt(
            id=trainer.id(),
            fd=fd,
            nbytes=12288,
            token=b"t" * 16,
            generation=memory.generation,
            ended=memory.generation - (save_id in trainer.pending),
            committed=save_id if save_id in self.commits and save_id not in trainer.pending else "",
        )
        self.post(peer, trainer.ask(adopt))

    def told(self, peer: bytes, trainer: Trainer, row: Any) -> None:
        super().told(peer, trainer, row)
        if row["phase"] in ("failed", "abandoned"):
            self.failed.setdefault(trainer.name, []).append(row["save_id"])

    def perform(self, action: ac.Action) -> list[ev.Event]:
        if isinstance(action, ac.AdoptSlot):
            self.jobs.append(action)
            return []
        return super().perform(action)

    def do(self, job: Any) -> None:
        if isinstance(job, ac.AdoptSlot):
            memory, trainer = self.fds[job.fd]
            if not trainer.alive or self.luck(self.chaos / 10):
                return self.feed(ev.SlotAdopted(now=self.now, slot=job.slot, error=ERROR))
            self.memory[job.slot] = memory
            return self.feed(ev.SlotAdopted(now=self.now, slot=job.slot, fd=job.fd, token=b"t" * 16))
        if isinstance(job, ac.Prepare) and job.key[0] in self.commits:
            assert job.resumed, "a committed save is taken for a new one"
            return self.feed(ev.Prepared(now=self.now, key=job.key, committed=True))
        if isinstance(job, ac.ScanLineage):  # what was only promised to a run dies with the worker: here each has saved
            epoch = max((e for run, e in self.epochs.items() if run != job.run), default=0) + 1
            epoch = self.epochs.get(job.run, epoch)
            scanned = ev.LineageScanned(now=self.now, run=job.run, path=job.path, epoch=epoch)
            return self.feed(scanned)
        return super().do(job)

    # ---- what holds

    def check_gone(self) -> None:
        """The worker has not known those that died with the one before."""

    def check_nothing_lost(self) -> None:
        """P5 and P6: what all ranks sealed is committed, although workers died, unless there is a reason."""
        for save_id, heard in self.heard.items():
            told_committed = {committed for committed, _, _ in heard}
            assert len(told_committed) == 1, f"ranks of {save_id} were told different ends: {heard}"
            assert (save_id in self.commits) == told_committed.pop()
        excused = self.injected | self.rejected | self.withdrawn | self.split | set(self.heard)
        for trainer in self.trainers.values():
            for sequence in range(trainer.sequence if trainer.run not in self.hurt else 0):
                save_id = f"{trainer.epoch:06d}-{sequence:08d}-{trainer.run}"
                everywhere = all((save_id, r) in self.sealed for r in range(trainer.world_size))
                if everywhere and save_id not in excused:
                    save = self.core.tables.find(save_id)
                    known = ("commit_timeout", "path_in_use", "vetoed", "withdrawn", "not_sealed")
                    ended = save is not None and any(code in str(save.error) for code in known)
                    assert save_id in self.commits or ended or trainer.name in self.kept, f"{save_id} is lost: {save}"

    def check_end(self) -> None:
        heard, self.heard = self.heard, {}
        self.later_heard = heard
        super().check_end()


@pytest.mark.parametrize("chaos", [0.0, 0.05, 0.3])
def test_random_schedules_with_crashes_keep_every_promise(
    chaos: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    crashes = commits = resumed = 0
    for schedule in range(10 * SCHEDULES):
        if schedule >= SCHEDULES and min(crashes, commits) >= SCHEDULES and resumed:
            break  # on average; a few schedules in which nothing worth a check happened prove nothing
        seed = rng.getrandbits(32)
        world = CrashingWorld(seed, chaos, 0.01)
        print(f"schedule {schedule}: CrashingWorld(seed={seed}, chaos={chaos}, crash_chance=0.01).run({STEPS})")
        world.run(steps=STEPS)
        world.count_resumed()
        crashes, commits, resumed = crashes + world.crashes, commits + len(world.commits), resumed + world.resumed
    assert crashes >= SCHEDULES and commits >= SCHEDULES and resumed, (crashes, commits, resumed)
