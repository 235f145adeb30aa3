"""Workers die in the middle of random schedules, and most saves are written while they are staged.

As `test_worker_crash_simulation`; files that a worker has written, or begun to, stay on the disk when it dies. Slots
outlive it whatever their state: the trainer fills on, and seals or gives up when it likes. Some are rings: the next
worker ends their saves, unless the dead one had finished them, and what stands of these is removed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_worker_crash_simulation import CrashingWorld
from test_worker_simulation import ERROR, STEPS, Memory, Trainer
from worker_bench import all_parts

from asyncckpt.protocol import messages as m
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import ABANDONED, COMMITTED, FAILED, OPEN
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev


@dataclass
class Stream:
    """A slot that is STREAMED."""

    memory: Memory
    generation: int
    trainer: Trainer
    request: SaveRequest
    full: bool = False

    @property
    def is_ring(self) -> bool:
        return self.request.ring_segments > 0


class EarlyWorld(CrashingWorld):
    """See the module."""

    def __init__(self, seed: int, chaos: float, crash_chance: float) -> None:
        super().__init__(seed, chaos, crash_chance)
        self.streams: list[Stream] = []
        self.standing: set[tuple[str, int]] = set()
        """Ranks of saves of which files were left by a worker that is dead."""

        self.cut: set[tuple[int, int]] = set()
        self.lost: set[tuple[str, int]] = set()
        names = ("written first", "failed early", "failed, sealed", "taken over", "given up", "swept", "lost")
        self.counts = dict.fromkeys(names, 0)

    # ---- the trainers

    def seal_or_stream(self, peer: bytes, trainer: Trainer, number: int, request: SaveRequest, *, dies: bool) -> None:
        memory = trainer.slots[number]
        self.streams = [s for s in self.streams if s.memory is not memory]
        if not self.luck(0.7):
            return super().seal_or_stream(peer, trainer, number, request, dies=dies)
        if self.luck(0.5):
            request = replace(request, ring_segments=4, ring_segment_nbytes=262_144)
        self.streams.append(Stream(memory, memory.generation, trainer, request))
        self.ring(peer, trainer, number, request.save_id)
        trainer.alive = not dies
        return None

    def act(self, peer: bytes, trainer: Trainer) -> None:
        mine = [s for s in self.streams if s.trainer is trainer and s.memory.generation == s.generation]
        if not mine or self.luck(0.5):
            return super().act(peer, trainer)
        stream = self.random.choice(mine)
        number = next((n for n, memory in trainer.slots.items() if memory is stream.memory), None)
        save_id = stream.request.save_id
        if save_id not in trainer.pending or self.luck(0.05):
            self.streams.remove(stream)
            self.counts["given up"] += 1
            if save_id in trainer.pending:
                self.withdraw(peer, trainer, save_id)
        elif not stream.full:
            stream.full = True
        else:
            self.streams.remove(stream)
            stream.memory.sealed = stream.request
            self.sealed.add((save_id, trainer.rank))
            if number is not None:  # else the next worker finds it sealed
                self.ring(peer, trainer, number, save_id)
        return None

    def deliver(self, peer: bytes, message: m.Message) -> None:
        trainer = self.trainers.get(peer)
        asked = None if trainer is None else trainer.waiting.get(getattr(message, "id", 0))
        stream = None
        if isinstance(message, m.Granted) and isinstance(asked, m.Adopt):
            stream = self.stream_in(self.fds[asked.fd][0])
        if trainer is None or not trainer.alive or stream is None or not isinstance(message, m.Granted):
            return super().deliver(peer, message)
        # It is not sealed yet: what the next worker is told is that it was begun.
        assert isinstance(asked, m.Adopt)
        del trainer.waiting[asked.id]
        self.kept[trainer.name] = [pair for pair in self.kept[trainer.name] if pair[0] is not stream.memory]
        trainer.slots[message.slot] = stream.memory
        request = stream.request
        trainer.holds[message.slot] = request.save_id
        if request.save_id in trainer.pending:
            self.counts["taken over"] += 1
            self.announce(peer, trainer, message.slot, request.save_id, path=request.path, step=request.step or 0)
            if stream.is_ring:
                self.ring(peer, trainer, message.slot, request.save_id)
        return None

    def stream_in(self, memory: Memory | None) -> Stream | None:
        return next((s for s in self.streams if s.memory is memory and s.generation == s.memory.generation), None)

    # ---- kernel and disk

    def crash(self) -> None:
        self.standing |= {job.key for job in self.jobs if isinstance(job, ac.Write)}
        self.standing |= {(save_id, rank) for save_id, ranks in self.written.items() for rank in ranks}
        super().crash()
        self.cut.clear()

    def perform(self, action: ac.Action) -> list[ev.Event]:
        if isinstance(action, ac.Write):
            part = self.core.tables.part(action.key)
            assert part is not None
            assert action.early == (part.phase == OPEN)
            assert action.resumed or action.key not in self.standing, f"{action.key} is written beside files that stand"
            is_ring = action.request.ring_segments > 0
            assert is_ring or not (action.early and action.resumed), "an adopted slot is written before its seal"
        elif isinstance(action, ac.CutOff):
            self.cut.add((action.slot, action.generation))
        return super().perform(action)

    def do(self, job: Any) -> None:
        stream = self.stream_in(self.memory.get(getattr(job, "slot", 0)))
        if isinstance(job, ac.ReadSlot) and stream is not None:
            facts = {"slot": job.slot, "generation": stream.generation, "request": stream.request}
            return self.feed(ev.SlotRead(now=self.now, streamed=True, opened=True, **facts))
        if isinstance(job, ac.Remove):
            self.counts["swept"] += any(key[0] == job.save_id for key in self.standing)
            self.standing = {key for key in self.standing if key[0] != job.save_id}
        if not isinstance(job, ac.Write):
            return super().do(job)
        if job.resumed and job.request.ring_segments and (job.early or self.luck(0.5)):
            self.counts["lost"] += 1
            self.injected.add(job.key[0])
            self.lost.add(job.key)
            return self.feed(ev.Written(now=self.now, key=job.key, error=ERROR))  # what stands stays
        if not job.early:
            self.standing.discard(job.key)  # written anew, kept, or removed by the job
            return super().do(job)
        mine = stream is not None and stream.request is job.request
        memory = self.memory[job.slot]  # KeyError: it was freed while it was written
        sealed = memory.sealed is job.request and memory.generation == job.generation
        waits = mine and stream is not None and stream.is_ring and not stream.full and stream.trainer.alive
        if waits and (job.slot, job.generation) not in self.cut and self.luck(0.98):
            self.jobs.append(job)  # as long as its trainer fills cells
            return None
        self.standing.discard(job.key)
        # It may fail at any time, and that is heard of before the seal or after it.
        if (sealed or (mine and stream is not None and stream.full)) and not self.luck(0.2):
            self.counts["written first"] += not sealed
            self.written.setdefault(job.key[0], set()).add(job.key[1])
            return self.feed(ev.Written(now=self.now, key=job.key, result=job.key))
        self.counts["failed early" if not sealed else "failed, sealed"] += 1
        if job.request.ring_segments:  # else it is no reason for a save not to be committed
            self.injected.add(job.key[0])
        return self.feed(ev.Written(now=self.now, key=job.key, error=ERROR))

    def check_end(self) -> None:
        for save, part in all_parts(self.core.tables):
            key = (save.save_id, part.rank)
            written = key in self.sealed and key not in self.lost  # anew, or removed by the job
            swept = save.outcome not in (FAILED, ABANDONED) or written or key not in self.standing
            assert swept, f"{key} was not written again, and files of a dead worker stand"
        super().check_end()


SCHEDULES = max(6, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))


@pytest.mark.parametrize("chaos", [0.0, 0.05, 0.3])
def test_random_schedules_with_early_writing_and_crashes_keep_every_promise(
    chaos: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    for schedule in range(SCHEDULES):
        seed = rng.getrandbits(32)
        print(f"schedule {schedule}: EarlyWorld(seed={seed}, chaos={chaos}, crash_chance=0.01).run({STEPS})")
        EarlyWorld(seed, chaos, 0.01).run(steps=STEPS)


def test_the_simulation_of_early_writing_reaches_what_is_rare(rng: random.Random) -> None:
    seen: set[str] = set()
    for _ in range(300):
        world = EarlyWorld(rng.getrandbits(32), 0.05, 0.01)
        world.run(steps=STEPS)
        seen |= {name for name, count in world.counts.items() if count}
        seen |= {part.phase for part in world.core.parts() if part.streaming}
        if seen >= {*world.counts, COMMITTED, ABANDONED}:
            break
    assert seen >= {*world.counts, COMMITTED, ABANDONED}
