"""Which slot a save gets: reuse, a second one only when needed, limits, policies, and the loss of the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_pool import NOWAIT_ANSWER_S, SPARE_SAVES, SlotPool
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    InsufficientMemoryError,
    SaveSkippedError,
    SlotBusyError,
    SlotTimeoutError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.staging.cpu_copy import SlotImage

KIB = 1024
SMALL, LARGE = 64 * KIB, 128 * KIB


class Lender:
    """Stands for the worker: makes slots up to `room` bytes, and remembers what was given back."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.made: list[Slot] = []
        self.released: list[int] = []
        self.within_s: list[float | None] = []
        self.error: AsyncCkptError | None = None
        self.is_frozen = False

    def allocate(self, nbytes: int, within_s: float | None = None) -> Slot | None:
        self.within_s.append(within_s)
        if self.is_frozen and within_s is not None:
            return None
        if self.error is not None:
            raise self.error
        if sum(s.memory.nbytes for s in self.made if not s.memory.mapping.closed) + nbytes > self.room:
            raise InsufficientMemoryError(f"{nbytes} bytes do not fit", nbytes=nbytes)
        self.made.append(Slot(number=len(self.made) + 1, memory=SlotMemory.create(nbytes)))
        return self.made[-1]

    def release(self, slot: Slot) -> None:
        self.released.append(slot.number)


Make = Callable[..., tuple[SlotPool, Lender]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SlotPool] = []

    def build(room: int = 1 << 30, **fields: Any) -> tuple[SlotPool, Lender]:
        lender = Lender(room)
        made.append(SlotPool(CheckpointerConfig(**fields), lender.allocate, lender.release))
        return made[-1], lender

    yield build
    for pool in made:
        pool.close()
        for slot in list(pool._slots):  # those that a test left under a copy
            assert slot.user is not None
            pool.free(slot.user)
        assert pool.nbytes == 0


@pytest.fixture(scope="module")
def plan() -> SavePlan:
    return PlanCache(files_per_rank=1).plan_for({"a": torch.ones(1)})[0]


def name(n: int) -> SaveId:
    return SaveId(1, n, "0" * 12)


def acquire(pool: SlotPool, plan: SavePlan, n: int, nbytes: int = SMALL) -> Slot:
    return pool.acquire(nbytes, plan, name(n), step=n, path=f"/x/{n}")


def test_saves_that_do_not_overlap_share_one_slot(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    for n in range(5):
        slot = acquire(pool, plan, n)
        pool.staged(slot)
        pool.free(name(n))
    assert len(lender.made) == 1
    assert pool.nbytes == SMALL


def test_a_second_slot_is_made_only_while_the_first_is_in_use(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    first = acquire(pool, plan, 0)
    second = acquire(pool, plan, 1)
    assert first is not second
    pool.free(name(0))
    assert acquire(pool, plan, 2) is first
    assert len(lender.made) == 2


def test_the_slot_that_holds_the_plan_s_headers_is_taken_first(make: Make, plan: SavePlan) -> None:
    pool, _ = make()
    first, second = acquire(pool, plan, 0), acquire(pool, plan, 1)
    second.views = SlotImage(second.memory.mapping.address, plan)
    pool.free(name(0))
    pool.free(name(1))
    assert acquire(pool, plan, 2) is second
    assert acquire(pool, plan, 3) is first


def test_free_slots_that_are_too_small_are_given_back_before_a_larger_one_is_made(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    acquire(pool, plan, 0)
    pool.free(name(0))
    acquire(pool, plan, 1, LARGE)
    assert lender.released == [1]
    assert pool.nbytes == LARGE, "memory stays at one snapshot while saves do not overlap"
    pool.free(name(1))
    assert acquire(pool, plan, 2, SMALL).memory.nbytes == LARGE


def test_spare_room_is_asked_for_and_used_by_what_grows(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    for n in range(5):
        pool.acquire(SMALL + n * 4 * KIB, plan, name(n), step=n, path="/x", spare_nbytes=16 * KIB)
        pool.free(name(n))
    assert len(lender.made) == 1
    assert pool.nbytes == SMALL + 16 * KIB


def test_a_limit_leaves_no_spare_room_rather_than_refuse(make: Make, plan: SavePlan) -> None:
    pool, _ = make(arena_limit_bytes=SMALL)
    slot = pool.acquire(SMALL, plan, name(0), step=0, path="/x", spare_nbytes=16 * KIB)
    assert slot.memory.nbytes == SMALL


def test_more_than_the_limit_is_refused_at_once(make: Make, plan: SavePlan) -> None:
    pool, lender = make(arena_limit_bytes=SMALL)
    with pytest.raises(InsufficientMemoryError, match="arena_limit_bytes") as caught:
        acquire(pool, plan, 0, LARGE)
    assert (caught.value.nbytes, caught.value.limit) == (LARGE, SMALL)
    assert not lender.made


def test_the_limit_covers_all_slots_together(make: Make, plan: SavePlan) -> None:
    pool, lender = make(arena_limit_bytes=SMALL + SMALL // 2, on_busy="error")
    acquire(pool, plan, 0)
    with pytest.raises(SlotBusyError):
        acquire(pool, plan, 1)
    pool.free(name(0))
    acquire(pool, plan, 2)
    assert len(lender.made) == 1


def test_memory_that_is_not_there_is_an_error_when_no_slot_will_become_free(make: Make, plan: SavePlan) -> None:
    pool, _ = make(room=SMALL)
    with pytest.raises(InsufficientMemoryError):
        acquire(pool, plan, 0, LARGE)
    acquire(pool, plan, 1, SMALL)


def test_memory_for_one_slot_only_makes_the_second_save_wait_for_the_first(make: Make, plan: SavePlan) -> None:
    pool, lender = make(room=SMALL)
    first = acquire(pool, plan, 0)
    timer = threading.Timer(0.05, pool.free, (name(0),))
    timer.start()
    assert acquire(pool, plan, 1) is first
    timer.join()
    assert len(lender.made) == 1


@pytest.mark.parametrize(("policy", "error"), [("skip", SaveSkippedError), ("error", SlotBusyError)])
def test_policy_when_every_slot_is_in_use(make: Make, plan: SavePlan, policy: str, error: type[AsyncCkptError]) -> None:
    pool, _ = make(slots=1, on_busy=policy)
    acquire(pool, plan, 0)
    with pytest.raises(error, match=str(name(0))) as caught:
        acquire(pool, plan, 7)
    assert (caught.value.step, caught.value.path, caught.value.save_id) == (7, "/x/7", str(name(7)))


def test_waiting_for_a_slot_ends_at_its_deadline(make: Make, plan: SavePlan) -> None:
    pool, _ = make(slots=1, slot_timeout_s=0.05)
    acquire(pool, plan, 0)
    began = time.monotonic()
    with pytest.raises(SlotTimeoutError, match=r"slot_timeout_s=0\.05") as caught:
        acquire(pool, plan, 1)
    assert time.monotonic() - began >= 0.05
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize(
    ("policy", "error"), [("skip", SaveSkippedError), ("error", SlotBusyError), ("wait", SlotTimeoutError)]
)
def test_a_worker_that_does_not_answer_is_no_longer_waited_for_than_a_slot_in_use(
    make: Make, plan: SavePlan, policy: str, error: type[AsyncCkptError]
) -> None:
    pool, lender = make(on_busy=policy, slot_timeout_s=0.05)
    first = acquire(pool, plan, 0)
    lender.is_frozen = True
    with pytest.raises(error):
        acquire(pool, plan, 1)
    assert lender.within_s[0] is None, "without a slot there is nothing else to wait for"
    assert lender.within_s[1] is not None and 0 <= lender.within_s[1] <= 0.05
    pool.free(name(0))
    assert acquire(pool, plan, 2) is first


def test_who_waits_for_no_slot_waits_a_second_for_an_answer(make: Make, plan: SavePlan) -> None:
    pool, lender = make(on_busy="skip")
    acquire(pool, plan, 0)
    acquire(pool, plan, 1)
    assert lender.within_s == [None, NOWAIT_ANSWER_S]


def test_a_waiting_save_gets_the_slot_that_is_freed(make: Make, plan: SavePlan) -> None:
    pool, _ = make(slots=1)
    first = acquire(pool, plan, 0)
    timer = threading.Timer(0.05, pool.free, (name(0),))
    timer.start()
    assert acquire(pool, plan, 1) is first
    timer.join()
    assert first.user == name(1)


@pytest.mark.parametrize("looks", range(1, 5))
def test_a_slot_whose_last_copy_ends_while_it_is_asked_for_is_waited_for(
    make: Make, plan: SavePlan, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    pool, _ = make(slots=1)
    first = acquire(pool, plan, 0)
    copying = iter([False] * looks)  # a device's copies end after so many looks at the slot
    monkeypatch.setattr(type(first), "is_quiet", lambda _: next(copying, True))
    pool.free(name(0))
    assert acquire(pool, plan, 1) is first


def test_a_lost_worker_closes_what_nobody_copies_into(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    copying, written = acquire(pool, plan, 0), acquire(pool, plan, 1)
    pool.staged(written)
    pool.orphan_all()
    assert written.memory.mapping.closed
    assert not copying.memory.mapping.closed, "the training thread still writes to it"
    pool.free(name(0))
    assert copying.memory.mapping.closed
    assert pool.nbytes == 0
    assert lender.released == []
    assert acquire(pool, plan, 2) not in (copying, written)


def test_a_waiting_save_goes_on_with_a_new_slot_when_the_worker_is_lost(make: Make, plan: SavePlan) -> None:
    pool, lender = make(slots=1)
    pool.staged(acquire(pool, plan, 0))
    timer = threading.Timer(0.05, pool.orphan_all)
    timer.start()
    acquire(pool, plan, 1)
    timer.join()
    assert len(lender.made) == 2


def test_an_allocation_that_fails_leaves_nothing(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    lender.error = WorkerUnavailableError("gone")
    with pytest.raises(WorkerUnavailableError):
        acquire(pool, plan, 0)
    assert pool.nbytes == 0
    lender.error = None
    acquire(pool, plan, 1)


def test_closing_ends_a_waiting_save_and_unmaps_what_nobody_copies_into(make: Make, plan: SavePlan) -> None:
    pool, lender = make(slots=1)
    slot = acquire(pool, plan, 0)
    timer = threading.Timer(0.05, pool.close)
    timer.start()
    with pytest.raises(CheckpointerClosedError):
        acquire(pool, plan, 1)
    timer.join()
    pool.close()
    assert not slot.memory.mapping.closed, "somebody may be copying into it"
    pool.give_up(name(0))
    assert slot.memory.mapping.closed
    assert lender.released == []


def test_freeing_an_unknown_save_is_ignored(make: Make, plan: SavePlan) -> None:
    pool, _ = make()
    acquire(pool, plan, 0)
    pool.free(name(99))
    assert pool._slots[0].user == name(0)


def test_a_second_slot_is_given_back_when_saves_overlap_no_longer(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    overlapping = [SaveId(1, n, "a" * 12) for n in range(2)]
    for save_id in overlapping:
        pool.acquire(SMALL, plan, save_id, step=0, path="/x")
    for save_id in overlapping:
        pool.free(save_id)
    for n in range(2, 2 + SPARE_SAVES):
        assert lender.released == []
        save_id = SaveId(1, n, "a" * 12)
        pool.acquire(SMALL, plan, save_id, step=0, path="/x")
        pool.free(save_id)
    assert len(lender.released) == 1
    assert pool.nbytes == SMALL


def test_a_small_structure_keeps_its_slot_while_a_large_one_waits_for_its_own(make: Make, plan: SavePlan) -> None:
    pool, lender = make(arena_limit_bytes=SMALL + LARGE, slot_timeout_s=0.05)
    acquire(pool, plan, 0, LARGE)
    acquire(pool, plan, 1, SMALL)
    pool.free(name(1))
    with pytest.raises(SlotTimeoutError):
        acquire(pool, plan, 2, LARGE)
    assert lender.released == []
    acquire(pool, plan, 3, SMALL)
    assert len(lender.made) == 2


def test_the_least_recently_used_slot_goes_first_when_room_is_needed(make: Make, plan: SavePlan) -> None:
    pool, lender = make(slots=3)
    slots = [acquire(pool, plan, n) for n in range(3)]
    for n in (1, 0):
        pool.free(name(n))
    pool.free(acquire(pool, plan, 3).user or name(9))  # one of the first two is used again
    latest = max(slots[:2], key=lambda s: s.used)
    acquire(pool, plan, 4, LARGE)
    assert lender.released == [slot.number for slot in slots[:2] if slot is not latest]
    assert not latest.memory.mapping.closed


def test_free_slots_go_when_the_machine_has_no_room_for_another(make: Make, plan: SavePlan) -> None:
    pool, lender = make(slots=3, room=SMALL + LARGE)
    acquire(pool, plan, 0)
    acquire(pool, plan, 1)
    pool.free(name(1))
    assert acquire(pool, plan, 2, LARGE).memory.nbytes == LARGE
    assert len(lender.released) == 1


def test_the_largest_slot_is_no_spare_one(make: Make, plan: SavePlan) -> None:
    pool, lender = make()
    acquire(pool, plan, 0, LARGE)
    acquire(pool, plan, 1, SMALL)
    pool.free(name(0))
    pool.free(name(1))
    for n in range(2, 3 * SPARE_SAVES):
        acquire(pool, plan, n, SMALL)
        pool.free(name(n))
    assert lender.released == [2]
    acquire(pool, plan, 100, LARGE)
    assert len(lender.made) == 2, "the large structure is as warm as it was"


def test_a_slot_that_comes_when_the_pool_was_closed_is_given_back(plan: SavePlan) -> None:
    lender = Lender()

    def closed_meanwhile(nbytes: int, within_s: float | None) -> Slot | None:
        pool.close()
        return lender.allocate(nbytes, within_s)

    pool = SlotPool(CheckpointerConfig(), closed_meanwhile, lender.release)
    with pytest.raises(CheckpointerClosedError):
        pool.acquire(SMALL, plan, SaveId(1, 0, "0123456789ab"), step=0, path="/c")
    assert lender.made[0].memory.mapping.closed and lender.released == [1] and pool.nbytes == 0
