"""Snapshots are kept, recalled, held and lent again in random schedules in which trainers and workers die.

As `test_worker_crash_simulation`, with the same checks, and those of a reader: what it is offered is whole, and what it
holds stays as it is until it lets go.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from test_worker_crash_simulation import CrashingWorld
from test_worker_simulation import CONFIG, Memory, Trainer
from worker_bench import WatchedBrain

from asyncckpt.protocol import messages as m

SCHEDULES = max(5, int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "0")))
"""Of each kind; `make test-fault` raises it."""
STEPS = 1500
KEEP_S = 300.0


class KeepingWorld(CrashingWorld):
    """See the module."""

    def __init__(self, seed: int, chaos: float, crash_chance: float) -> None:
        super().__init__(seed, chaos, crash_chance)
        self.begin_anew()
        self.held: dict[str, list[tuple[Memory, int]]] = {}
        """Session -> what it was told that it holds of the dead."""

        self.recalled = self.lent_again = self.kept_ones = 0

    def begin_anew(self) -> None:
        instance = f"{self.crashes:016x}"
        self.core = WatchedBrain(replace(CONFIG, instance=instance, keep_snapshots_s=KEEP_S), self.now, self)

    def crash(self) -> None:
        super().crash()
        self.held = {}
        self.begin_anew()

    def post(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            message = replace(message, pid=1000 + int(message.session[:4], 16))
        if isinstance(message, m.Goodbye):
            self.held.pop(peer.decode(), None)
        super().post(peer, message)

    def act(self, peer: bytes, trainer: Trainer) -> None:
        if trainer.welcomed and peer in self.trainers and self.luck(0.05):
            recall = m.Recall(id=trainer.id(), path="/ckpt", hold=self.luck(0.5))
            return self.post(peer, trainer.ask(recall))
        return super().act(peer, trainer)

    def deliver(self, peer: bytes, message: m.Message) -> None:
        trainer = self.trainers.get(peer)
        asked = trainer.waiting.get(getattr(message, "id", 0)) if trainer is not None else None
        if trainer is not None and trainer.alive:
            if isinstance(message, m.Granted) and isinstance(asked, m.Allocate):
                self.check_lent(self.memory[message.slot])
            if isinstance(message, m.Recalled) and isinstance(asked, m.Recall):
                self.check_recalled(trainer, message, hold=asked.hold)
        super().deliver(peer, message)

    # ---- what holds

    def check_lent(self, memory: Memory) -> None:
        if memory.generation == 0:
            return
        self.lent_again += 1
        assert memory.sealed is not None and memory.sealed.save_id in self.commits, "lent again, and nowhere else"
        users = [t.name for t in self.trainers.values() if t.alive and memory in t.slots.values()]
        assert not users, f"lent again, and {users} still have it"
        readers = [of for name, of in self.held.items() if name in self.core.tables.sessions]
        assert not any(memory is held for of in readers for held, _ in of), "lent again under a reader"

    def check_recalled(self, trainer: Trainer, message: m.Recalled, *, hold: bool) -> None:
        for part in message.parts:
            self.recalled += 1
            memory, save_id = self.memory[part["slot"]], part["save_id"]
            assert all((save_id, r) in self.sealed for r in range(part["world_size"])), "not whole"
            assert save_id not in self.split, "its ranks differ"
            assert save_id in self.commits or not part["committed"]
            slot = self.core.tables.slots.get(part["slot"])
            if slot is None:
                assert not hold, "freed under a reader"
                continue  # its time was over as it was listed
            if not slot.closing:
                continue  # its trainer may use it again at any time
            self.kept_ones += 1
            assert memory.sealed is not None, "its trainer was killed while it staged the next one"
            assert (memory.sealed.save_id, memory.generation) == (save_id, part["generation"])
            if hold:
                self.held.setdefault(trainer.name, []).append((memory, memory.generation))

    def check_slots(self) -> None:
        super().check_slots()
        for name, held in self.held.items():
            if name in self.core.tables.sessions:
                assert all(memory.generation == was and not memory.freed for memory, was in held), "a reader lost it"


@pytest.mark.parametrize("chaos", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("crash_chance", [0.0, 0.005])
def test_random_schedules_with_readers_keep_every_promise(
    chaos: float, crash_chance: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    recalled = kept = lent = 0
    for schedule in range(10 * SCHEDULES):
        if schedule >= SCHEDULES and recalled >= SCHEDULES:
            break  # in a few schedules chance may let nothing be recalled
        seed = rng.getrandbits(32)
        world = KeepingWorld(seed, chaos, crash_chance)
        print(f"schedule {schedule}: KeepingWorld({seed}, {chaos}, {crash_chance}).run({STEPS})")
        world.run(steps=STEPS)
        recalled, kept, lent = recalled + world.recalled, kept + world.kept_ones, lent + world.lent_again
    print(f"recalled {recalled}, of the dead {kept}, lent again {lent}")
    assert recalled >= SCHEDULES
