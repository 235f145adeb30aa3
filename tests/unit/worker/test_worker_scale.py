"""What an event costs the worker's core: neither the saves that have ended nor the number of ranks count."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from worker_bench import ERROR, FIRST, OTHER_RUN, REQUEST, RUN, Bench, code

from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import tables as tables_module
from tests.bytecodes import bytecodes

SMALL, LARGE = (4, 2), (64, 60)
"""Ranks, and saves of all of them that have ended."""


class Crowd(Bench):
    """A core with a session and a slot for each rank, and some saves that have ended."""

    def __init__(self, world_size: int, ended: int) -> None:
        super().__init__()
        self.world_size, self.sequence, self.run, self.first = world_size, 0, RUN, 1
        for rank in range(world_size):
            self.hello(self.peer(rank), f"{rank + 1:016x}", rank, world_size, pid=1000 + rank)
            self.slot(self.peer(rank))
        for _ in range(ended):
            self.ends_a_save()

    def peer(self, rank: int) -> bytes:
        return str(rank).encode()

    @property
    def save_id(self) -> str:
        return f"000001-{self.sequence:08d}-{self.run}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"path": f"/ckpt/step-{self.sequence}", "step": self.sequence}

    def begins(self, rank: int) -> None:
        reply = self.begin(self.first + rank, self.save_id, self.sequence + 1, self.peer(rank), **self.fields)
        assert reply == m.Ok(id=self.ids)

    def prepared(self, rank: int) -> None:
        self.feed(ev.Prepared, key=(self.save_id, rank))

    def submits(self, rank: int) -> None:
        self.submit(self.first + rank, self.save_id, self.sequence + 1, self.peer(rank))

    def seals(self, rank: int) -> None:
        self.read(
            self.first + rank, self.save_id, self.sequence + 1, rank=rank, world_size=self.world_size, **self.fields
        )  # fmt: skip

    def is_written(self, rank: int) -> None:
        report = {f"seconds_{name}": 0.5 for name in ("write", "flush", "index", "objects")}
        self.feed(ev.Written, key=(self.save_id, rank), result="files", report=report)

    def asks(self, rank: int) -> None:
        assert self.row(self.save_id, self.peer(rank))

    def ticks(self, _: int) -> None:
        self.feed(ev.Tick)

    def ends_a_save(self) -> None:
        for step in (self.begins, self.prepared, self.submits, self.seals, self.is_written):
            for rank in range(self.world_size):
                step(rank)
        self.feed(ev.Published, save_id=self.save_id, report={"seconds_commit": 0.5})
        assert self.phase(self.save_id) == "committed"
        self.sequence += 1


def work(world_size: int, ended: int) -> dict[str, int]:
    """Return what the events of one rank's part in a save cost, in the midst of the others."""
    crowd = Crowd(world_size, ended)
    found = {}
    for step in (crowd.begins, crowd.prepared, crowd.submits, crowd.seals, crowd.is_written):
        for rank in range(world_size):
            spent = bytecodes(lambda step=step, rank=rank: step(rank))  # type: ignore[misc]
            if rank == world_size // 2:
                found[step.__name__] = spent
                for other in (crowd.asks, crowd.ticks):
                    spent = bytecodes(lambda other=other, rank=rank: other(rank))  # type: ignore[misc]
                    found[f"{other.__name__} while the others are: {step.__name__}"] = spent
    return found


def test_work_of_an_event_depends_neither_on_the_saves_that_have_ended_nor_on_the_number_of_ranks() -> None:
    small, large = work(*SMALL), work(*LARGE)
    assert {name: (small[name], large[name]) for name in small if large[name] > 1.5 * small[name] + 1000} == {}


def held_nbytes() -> int:
    """Return what is traced; without what the interpreter keeps for tuples to come."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("world_size", [1, 64])
def test_memory_of_a_save_that_has_ended_is_small(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "MAX_REPORTS", world_size)  # of the latest saves only
    n_saves = 40
    tracemalloc.start()
    try:
        crowd = Crowd(world_size, 5)
        before = held_nbytes()
        for _ in range(n_saves):
            crowd.ends_a_save()
        grown = held_nbytes() - before
    finally:
        tracemalloc.stop()
    assert grown / n_saves < 3000 + 16 * world_size, f"{grown / n_saves:.0f} bytes for each save"


# ---- what is kept of ranks that are dead


class Restarted(Crowd):
    """A job whose processes have died after a save, and a second one beside what is kept of it."""

    def __init__(self, world_size: int, n_ended: int) -> None:
        super().__init__(world_size, 1)
        for rank in range(world_size):
            self.feed(ev.Died, session=f"{rank + 1:016x}")
        for rank in range(world_size):
            request = replace(REQUEST, save_id=FIRST, rank=rank, world_size=world_size)
            self.feed(ev.SlotRead, slot=rank + 1, generation=1, request=request)
        assert sum(slot.kept for slot in self.core.tables.slots.values()) == world_size
        last = self.core.tables.ended.latest(1)[0].reopened(range(world_size))
        for self.sequence in range(1, n_ended):
            self.core.tables.ended.add(replace(last, save_id=SaveId(1, self.sequence, "e" * 12)))
        self.first = self.core.tables.next_slot
        self.run = OTHER_RUN

    def peer(self, rank: int) -> bytes:
        return (f"second {rank}" if self.run == OTHER_RUN else f"{rank}").encode()

    @property
    def fields(self) -> dict[str, Any]:
        return {**super().fields, "path": f"/{self.run}/{self.sequence}"}

    def opens(self, rank: int) -> None:
        self.hello(self.peer(rank), f"{rank + 10_001:016x}", rank, self.world_size, pid=20_000 + rank)

    def allocates(self, rank: int) -> None:
        self.say(m.Allocate, self.peer(rank), nbytes=1 << 20, populate=False)

    def dies(self, rank: int) -> None:
        self.feed(ev.Died, session=f"{rank + 10_001:016x}")

    def is_read(self, rank: int) -> None:
        self.feed(ev.SlotRead, slot=self.first + rank, reason="it is open")


N_RANKS, N_ENDED = 512, 1024
MAX_EVENT_S = 1e-3


def test_event_takes_less_than_a_millisecond_beside_what_is_kept_of_512_ranks_and_1024_saves() -> None:
    crowd = Restarted(N_RANKS, N_ENDED)
    steps = [crowd.opens, crowd.allocates, crowd.begins, crowd.prepared, crowd.submits, crowd.seals, crowd.is_written]
    found = {}
    for step in (*steps, crowd.asks, crowd.ticks, crowd.dies, crowd.is_read):
        before = time.process_time()
        for rank in range(N_RANKS):
            step(rank)
        found[step.__name__] = (time.process_time() - before) / N_RANKS
    tables = crowd.core.tables
    assert sum(slot.kept for slot in tables.slots.values()) >= N_RANKS and len(tables.ended) == N_ENDED
    assert {name: spent_s for name, spent_s in found.items() if spent_s > MAX_EVENT_S} == {}


# ---- what comes after the end of a save


def test_request_that_is_repeated_after_the_end_is_answered_as_before_and_one_that_contradicts_it_is_refused() -> None:
    crowd = Crowd(3, 1)
    crowd.sequence = 0
    for rank in range(3):
        crowd.begins(rank)
        crowd.submits(rank)
        assert crowd.of(ac.Send)[-1].message == m.Ok(id=crowd.ids)
        assert not crowd.of(ac.ReadSlot) and not crowd.of(ac.Prepare)
    assert code(crowd.begin(1, crowd.save_id, 7, b"0")) == "protocol"


def test_rank_that_begins_a_save_that_has_failed_hears_so_and_the_others_keep_their_ends() -> None:
    crowd = Crowd(3, 0)
    crowd.begins(0)
    crowd.prepared(0)
    crowd.say(m.Withdraw, b"2", save_id=crowd.save_id, reason="out of luck", skipped=False)
    assert not crowd.core.tables.saves
    crowd.begins(1)
    assert [(row["phase"], row["error"]["fields"]["code"]) for row in crowd.pushed()] == [("failed", "withdrawn")]
    assert not crowd.core.tables.saves and not crowd.of(ac.Prepare)
    assert [crowd.phase(crowd.save_id, rank) for rank in range(3)] == ["abandoned", "failed", None]


def test_reports_are_kept_for_the_latest_saves_and_the_ends_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "MAX_REPORTS", 6)
    crowd = Crowd(2, 5)
    reported = []
    for crowd.sequence in range(5):
        row = crowd.row(crowd.save_id, b"1")
        assert row["phase"] == "committed"
        reported.append(row["report"].get("seconds_write"))
    assert reported == [None, None, 0.5, 0.5, 0.5]


def test_save_that_has_ended_stays_open_while_one_of_its_jobs_runs() -> None:
    crowd = Crowd(2, 0)
    for step in (crowd.begins, crowd.prepared, crowd.submits, crowd.seals):
        for rank in range(2):
            step(rank)
    crowd.feed(ev.Written, key=(crowd.save_id, 0), error=ERROR)
    assert crowd.phase(crowd.save_id, 1) == "failed" and not crowd.of(ac.Remove)
    crowd.is_written(1)
    assert [remove.save_id for remove in crowd.of(ac.Remove)] == [crowd.save_id]
    crowd.feed(ev.Removed, save_id=crowd.save_id)
    assert not crowd.core.tables.saves and crowd.core.tables.jobs == 0
