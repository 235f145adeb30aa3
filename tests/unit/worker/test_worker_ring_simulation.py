"""The worker's core under random schedules in which many saves are written while they are staged.

Of `test_worker_simulation`'s world; a slot is STREAMED, full and SEALED one after the other, or its trainer stops. Of
those, some are rings, and some have room for everything.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_worker_simulation import COMMIT_TIMEOUT_S, STEPS, Memory, Trainer, World

from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import ENDED, OPEN
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev


@dataclass
class Ring:
    """A slot that is STREAMED, or was: `full` once every segment is filled."""

    request: SaveRequest
    generation: int
    peer: bytes
    number: int
    dies: bool
    full: bool = False


class RingWorld(World):
    """See the module. Of ten saves, seven are streamed, half of them through rings."""

    def __init__(self, seed: int, chaos: float) -> None:
        super().__init__(seed, chaos)
        self.rings: dict[int, Ring] = {}
        self.waiting: list[tuple[ac.Write, float]] = []
        """Writes that wait for segments, and since when."""

        self.cut: set[tuple[int, int]] = set()
        self.counts = {"full": 0, "gave up": 0, "written first": 0, "failed early": 0}

    # ---- the trainers

    def seal_or_stream(self, peer: bytes, trainer: Trainer, number: int, request: SaveRequest, *, dies: bool) -> None:
        self.rings.pop(number, None)
        if not self.luck(0.7):
            return super().seal_or_stream(peer, trainer, number, request, dies=dies)
        if self.luck(0.5):
            request = replace(request, ring_segments=4, ring_segment_nbytes=262_144)
        self.rings[number] = Ring(request, trainer.slots[number].generation, peer, number, dies)
        self.ring(peer, trainer, number, request.save_id)
        return None

    def act(self, peer: bytes, trainer: Trainer) -> None:
        mine = [r for r in self.rings.values() if r.peer == peer and self.memory_of(r) is not None]
        if not mine or self.luck(0.4):
            return super().act(peer, trainer)
        ring = self.random.choice(mine)
        save_id = ring.request.save_id
        if save_id not in trainer.pending or self.luck(0.05):
            self.give_up(trainer, ring)
        elif ring.dies and self.luck(0.5):
            trainer.alive = False
        elif not ring.full:
            ring.full = True
            self.counts["full"] += 1
        else:
            trainer.slots[ring.number].sealed = ring.request
            self.sealed.add((save_id, trainer.rank))
            del self.rings[ring.number]
            self.ring(peer, trainer, ring.number, save_id)
        return self.wake()

    def give_up(self, trainer: Trainer, ring: Ring) -> None:
        """Its save has ended, as the trainer was told; or it takes it back."""
        save_id = ring.request.save_id
        del self.rings[ring.number]
        self.counts["gave up"] += 1
        if save_id in trainer.pending:
            self.withdraw(ring.peer, trainer, save_id)

    def memory_of(self, ring: Ring) -> Memory | None:
        """Return the slot that a ring is in; None once the slot was opened again, or is gone."""
        memory = self.memory.get(ring.number)
        return memory if memory is not None and memory.generation == ring.generation else None

    # ---- kernel and disk

    def feed(self, event: ev.Event) -> None:
        super().feed(event)
        self.wake()

    def perform(self, action: ac.Action) -> list[ev.Event]:
        waiting = [write for write, _ in self.waiting]
        match action:
            case ac.CutOff():
                self.cut.add((action.slot, action.generation))
                self.wake()
            case ac.FreeSlot():
                assert all(w.slot != action.slot for w in waiting), "a slot is freed while its ring is written"
            case ac.Remove():
                assert all(w.key[0] != action.save_id for w in waiting), "files are removed while they are written"
            case ac.Write():
                part = self.core.tables.part(action.key)
                assert part is not None
                assert action.early == (part.phase == OPEN), "written before its seal"
        return super().perform(action)

    def do(self, job: Any) -> None:
        ring = self.rings.get(getattr(job, "slot", 0))
        if isinstance(job, ac.ReadSlot) and ring is not None and self.memory_of(ring) is not None:
            facts = {"slot": job.slot, "generation": ring.generation, "request": ring.request}
            return self.feed(ev.SlotRead(now=self.now, streamed=True, opened=True, **facts))
        if not isinstance(job, ac.Write) or ring is None or ring.request is not job.request:
            return super().do(job)
        if not self.may_end(job, self.now):
            self.waiting.append((job, self.now))
            return None
        self.files.add((*job.key, job.request.path))
        if not ring.full or self.luck(self.chaos / 3):
            if ring.request.ring_segments:  # else it is no reason for a save not to be committed
                self.injected.add(job.key[0])
            else:
                self.counts["failed early"] += 1
            return self.fail_write(job)
        self.counts["written first"] += 1
        self.written.setdefault(job.key[0], set()).add(job.key[1])
        return self.feed(ev.Written(now=self.now, key=job.key, result=job.key))

    def may_end(self, job: ac.Write, since: float) -> bool:
        """Whether a ring's writing has what it waits for, or waits no longer."""
        ring = self.rings.get(job.slot)
        streamed = ring is not None and ring.request is job.request and self.memory_of(ring) is not None
        over = (job.slot, job.generation) in self.cut or self.now - since >= COMMIT_TIMEOUT_S
        return not streamed or over or (ring is not None and ring.full)

    def wake(self) -> None:
        ready = [pair for pair in self.waiting if self.may_end(*pair)]
        for pair in ready:
            self.waiting.remove(pair)
            if not self.is_fed(pair[0]):
                self.cut.add((pair[0].slot, pair[0].generation))  # it waits no second time
            self.jobs.append(pair[0])

    def is_fed(self, job: ac.Write) -> bool:
        ring = self.rings.get(job.slot)
        return ring is None or ring.request is not job.request or ring.full

    def check_gone(self) -> None:
        assert not self.waiting, f"nobody cuts off {self.waiting}, whose trainers are dead"
        super().check_gone()


SCHEDULES = max(10, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))


@pytest.mark.parametrize("chaos", [0.0, 0.05, 0.3])
def test_random_schedules_with_rings_keep_every_promise(
    chaos: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    for schedule in range(SCHEDULES):
        seed = rng.getrandbits(32)
        print(f"schedule {schedule}: RingWorld(seed={seed}, chaos={chaos}).run(steps={STEPS})")
        RingWorld(seed, chaos).run(steps=STEPS)


def test_the_simulation_of_rings_reaches_what_is_rare(rng: random.Random) -> None:
    seen: set[str] = set()
    for _ in range(300):
        world = RingWorld(rng.getrandbits(32), 0.2)
        world.run(steps=STEPS)
        seen |= {name for name, count in world.counts.items() if count}
        seen |= {part.phase for part in world.core.parts() if part.streaming}
        if seen == {*world.counts, *ENDED}:
            break
    assert seen == {*world.counts, *ENDED}
