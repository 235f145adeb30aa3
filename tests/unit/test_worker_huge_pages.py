"""Slots on huge pages: only while nobody wants anything, only when all pages are there, and never at any cost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import HUGE_NBYTES, Mapping
from asyncckpt.protocol.lifecycle import BEGUN, COMMITTED, SUBMITTED
from asyncckpt_worker import huge_pages
from asyncckpt_worker.huge_pages import LOOK_EVERY_S, MAX_REFUSED, HugePages
from asyncckpt_worker.records import RankSave, Save, Slot
from asyncckpt_worker.scheduler import Scheduler
from asyncckpt_worker.slots import SlotStore
from asyncckpt_worker.tables import Tables

PATIENCE_S = 60.0
N_PAGES = 3


class Bench:
    """One slot of three huge pages and a bit, a brain's tables, and a kernel that says what we want."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scheduler, self.store, self.tables = Scheduler(), SlotStore(), Tables()
        self.huge = HugePages(self.scheduler, self.store)
        self.memory = self.store.create(1, N_PAGES * HUGE_NBYTES + 8192)
        self.asked: list[int] = []
        self.answer: Callable[[int], bool] = lambda _: True
        self.now = 0.0
        monkeypatch.setattr(huge_pages, "REST", 0)

        def collapse(_: Mapping, offset: int) -> bool:
            self.asked.append(offset // HUGE_NBYTES)
            return self.answer(offset)

        monkeypatch.setattr(Mapping, "collapse", collapse)

    def fill(self) -> None:
        """Have all pages there."""
        self.store.populate(1)

    def turn(self) -> None:
        """One turn of the control loop, a while after the last, and whatever it has begun."""
        self.now += LOOK_EVERY_S
        self.huge.turn(self.now, self.tables)
        done = threading.Event()
        self.scheduler.submit("gather", done.set)
        assert done.wait(PATIENCE_S)

    def save(self, phase: str) -> None:
        """Say that the slot holds a save in `phase`."""
        slot = Slot(1, self.memory.nbytes, "session", 0, 1, 1)
        slot.key = ("save", 0)
        entry = RankSave(0, "session", 1, 1, "/path", 1, 1, 0, False, 0.0, 60.0, phase)
        save = Save("save", 1)
        save.ranks[0] = entry
        self.tables.slots, self.tables.saves = {1: slot}, {"save": save}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench that leaves nothing behind."""
    made = Bench(monkeypatch)
    yield made
    made.huge.close()
    made.store.close()
    assert made.scheduler.close(PATIENCE_S)


def test_full_slot_is_put_on_huge_pages_once_and_its_end_left_alone(bench: Bench) -> None:
    bench.fill()
    for _ in range(3):
        bench.turn()
    assert bench.asked == list(range(N_PAGES))


def test_slot_that_lacks_pages_waits_for_them(bench: Bench) -> None:
    bench.memory.mapping.populate(0, HUGE_NBYTES)
    bench.turn()
    assert not bench.asked
    bench.fill()
    bench.turn()
    assert bench.asked == list(range(N_PAGES))


@pytest.mark.parametrize("phase", [BEGUN, SUBMITTED])
def test_nothing_is_done_while_a_save_is_under_way(bench: Bench, phase: str) -> None:
    bench.fill()
    bench.save(phase)
    bench.turn()
    assert not bench.asked
    bench.save(COMMITTED)
    bench.turn()
    assert bench.asked == list(range(N_PAGES))


def test_nothing_is_done_while_a_slot_is_written_although_its_save_has_ended(bench: Bench) -> None:
    bench.fill()
    bench.save(COMMITTED)
    bench.tables.slots[1].writes.add(("save", 0))
    bench.turn()
    assert not bench.asked


def test_nothing_is_done_to_a_slot_that_was_opened_before_its_doorbell_came(bench: Bench) -> None:
    bench.fill()
    bench.memory.control.open(1)
    bench.turn()
    assert not bench.asked
    bench.memory.control.seal(b"request", bench.memory.nbytes - 8192)
    bench.turn()
    assert bench.asked == list(range(N_PAGES))


def test_it_stops_behind_the_page_at_which_a_save_begins_and_goes_on_there_later(bench: Bench) -> None:
    bench.fill()

    def begin(offset: int) -> bool:
        if offset == HUGE_NBYTES:
            bench.save(BEGUN)
            bench.huge.turn(bench.now, bench.tables)
        return True

    bench.answer = begin
    bench.turn()
    assert bench.asked == [0, 1]
    bench.save(COMMITTED)
    bench.turn()
    assert bench.asked == [0, 1, 2]


def test_it_begins_nothing_new_while_the_worker_drains(bench: Bench) -> None:
    bench.fill()
    bench.tables.draining = True
    bench.turn()
    assert not bench.asked


def test_it_looks_once_a_second_at_most(bench: Bench) -> None:
    bench.turn()
    bench.fill()
    bench.now -= LOOK_EVERY_S
    bench.turn()
    assert not bench.asked


def test_pages_that_are_refused_are_passed_over_and_many_end_it_for_this_slot(bench: Bench) -> None:
    bench.store.create(2, (MAX_REFUSED + 5) * HUGE_NBYTES)
    bench.store.populate(2)
    bench.fill()
    asked: list[int] = []

    def refuse(offset: int) -> bool:
        asked.append(offset)
        return len(asked) <= N_PAGES

    bench.answer = refuse
    bench.turn()
    bench.turn()
    assert len(asked) == N_PAGES + MAX_REFUSED
    bench.store.create(3, HUGE_NBYTES)
    bench.store.populate(3)
    bench.turn()
    assert len(asked) == N_PAGES + MAX_REFUSED + 1, "another slot is tried: the kernel can do it"


def test_kernel_that_never_does_it_is_asked_no_more(bench: Bench) -> None:
    bench.answer = lambda _: False
    bench.store.create(2, (MAX_REFUSED + 5) * HUGE_NBYTES)
    bench.store.populate(2)
    bench.fill()
    for _ in range(3):
        bench.turn()
    assert len(bench.asked) == N_PAGES + MAX_REFUSED
    bench.store.create(3, HUGE_NBYTES)
    bench.store.populate(3)
    bench.turn()
    assert len(bench.asked) == N_PAGES + MAX_REFUSED


def test_page_that_takes_long_counts_as_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "DEAR_S", -1.0)
    bench.store.create(2, (MAX_REFUSED + 5) * HUGE_NBYTES)
    bench.store.populate(2)
    bench.turn()
    assert len(bench.asked) == MAX_REFUSED


def test_slot_that_is_freed_meanwhile_is_closed_by_the_one_who_leaves_it_last(bench: Bench) -> None:
    bench.fill()

    def free(offset: int) -> bool:
        bench.store.free(1)
        assert not bench.memory.mapping.closed
        return True

    bench.answer = free
    bench.turn()
    assert bench.asked == [0] and bench.memory.mapping.closed and not len(bench.store)


def test_slot_that_takes_the_place_of_another_is_done_too(bench: Bench) -> None:
    bench.fill()
    bench.turn()
    bench.store.free(1)
    bench.store.create(2, HUGE_NBYTES)
    bench.store.populate(2)
    bench.turn()
    assert bench.asked == [0, 1, 2, 0]


def test_nothing_is_begun_after_the_end(bench: Bench) -> None:
    bench.fill()
    bench.huge.close()
    bench.turn()
    assert not bench.asked


def test_bytes_stay_the_same_whether_the_kernel_does_it_or_not() -> None:
    slot = SlotMemory.create(2 * HUGE_NBYTES + 4096)
    try:
        view = slot.mapping.view()
        view[4096 : 2 * HUGE_NBYTES] = data = os.urandom(2 * HUGE_NBYTES - 4096)
        other = SlotMemory.attach(os.getpid(), slot.fd, slot.nbytes, slot.token)
        try:
            assert bytes(other.mapping.view()[4096 : 2 * HUGE_NBYTES]) == data
            done = [slot.mapping.collapse(at) for at in (0, HUGE_NBYTES)]
            assert done in ([True, True], [False, False], [True, False], [False, True])
            assert not slot.mapping.collapse(2 * HUGE_NBYTES), "there is less than a huge page behind it"
            other.control.check(slot.token)
            other.mapping.view()[5000] = view[5000] ^ 255
            assert view[5000] != data[5000 - 4096]
            assert bytes(view[8192 : 2 * HUGE_NBYTES]) == data[4096:]
        finally:
            other.close()
    finally:
        slot.close()
