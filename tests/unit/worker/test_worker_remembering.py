"""The worker's core: what the worker before had committed lies in adopted slots, and is offered from there."""

from __future__ import annotations

from typing import Any

import pytest
from worker_bench import FIRST, PATH, SECOND, Bench

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

TOKEN = b"t" * 16


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.hello()
    return made


def adopted(bench: Bench, committed: str = FIRST, *, peer: bytes = b"p", generation: int = 4, ended: int = 4) -> int:
    """Bring an adopted slot, of which all saves have ended, to where it is looked into."""
    body = {"fd": 9, "nbytes": 12288, "token": TOKEN, "generation": generation, "ended": ended}
    assert bench.say(m.Adopt, peer, **body, committed=committed) is None
    (job,) = bench.of(ac.AdoptSlot)
    bench.feed(ev.SlotCreated, slot=job.slot, fd=100 + job.slot, token=TOKEN)
    return job.slot


def recalled(bench: Bench) -> list[tuple[str, int, bool]]:
    """Return save, slot and whether it is committed, of each part that a reader is offered."""
    reply: Any = bench.say(m.Recall, path=PATH, hold=False)
    return [(part["save_id"], part["slot"], part["committed"]) for part in reply.parts]


def died(bench: Bench, session: str = "1" * 16) -> None:
    """Its process dies, and its slots are read once more by the caller."""
    bench.feed(ev.Died, session=session)


def test_what_was_committed_before_is_offered_and_nothing_is_done_about_it(bench: Bench) -> None:
    slot = adopted(bench)
    bench.read(slot, generation=4)
    assert not bench.of(ac.Prepare) and not bench.of(ac.Write) and not bench.pushed()
    assert recalled(bench) == [(FIRST, slot, True)]


def test_it_is_kept_when_the_trainer_dies_and_lent_again(bench: Bench) -> None:
    slot = adopted(bench)
    bench.read(slot, generation=4)
    died(bench)
    bench.read(slot, generation=4)
    assert not bench.of(ac.FreeSlot)
    bench.hello(b"q", "2" * 16)
    assert bench.say(m.Recall, b"q", path=PATH, hold=False).parts[0]["save_id"] == FIRST
    granted = bench.say(m.Allocate, b"q", nbytes=12288, populate=True)
    assert granted.slot == slot


def test_a_trainer_that_dies_before_its_slot_was_looked_into_leaves_it_all_the_same(bench: Bench) -> None:
    slot = adopted(bench)
    died(bench)
    bench.read(slot, generation=4)
    if bench.of(ac.ReadSlot):  # the look that had begun before the death proves nothing
        bench.read(slot, generation=4)
    assert not bench.of(ac.FreeSlot)
    bench.hello(b"q", "2" * 16)
    assert bench.say(m.Recall, b"q", path=PATH, hold=False).parts[0]["save_id"] == FIRST


@pytest.mark.parametrize(
    ("committed", "generation", "changes"),
    [
        ("", 4, {}),
        (SECOND, 4, {}),
        (FIRST, 3, {}),
        (FIRST, 4, {"rank": 1, "world_size": 2}),
    ],
    ids=["said to have failed", "another save", "an older one", "another rank's"],
)
def test_nothing_else_is_taken_for_it(bench: Bench, committed: str, generation: int, changes: dict[str, int]) -> None:
    slot = adopted(bench, committed)
    bench.read(slot, generation=generation, **changes)
    assert recalled(bench) == []
    died(bench)
    bench.read(slot, generation=generation, **changes)
    assert [action.slot for action in bench.of(ac.FreeSlot)] == [slot]


def test_a_slot_that_is_used_for_the_next_save_offers_that_one(bench: Bench) -> None:
    slot = adopted(bench)
    bench.read(slot, generation=4)
    bench.at_writing(slot, SECOND, 5)
    assert recalled(bench) == [(SECOND, slot, False)]


def two_ranks() -> Bench:
    made = Bench()
    for rank in (0, 1):
        made.hello(bytes([65 + rank]), str(rank + 1) * 16, rank=rank, world_size=2)
    return made


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_of_which_one_had_not_heard_of_the_commit_have_it_in_memory_together(first: int) -> None:
    """Rank 0 was told; rank 1 was not, so that its part is looked for on disk."""
    bench = two_ranks()

    def told() -> int:
        slot = adopted(bench, peer=b"A")
        bench.read(slot, generation=4, rank=0, world_size=2)
        return slot

    def untold() -> int:
        slot = adopted(bench, "", peer=b"B", ended=3)
        bench.read(slot, generation=4, rank=1, world_size=2)
        return slot

    slots = [told(), untold()] if first == 0 else [untold(), told()][::-1]
    if bench.core.tables.entry((FIRST, 1)).preparing:  # type: ignore[union-attr]
        bench.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    assert bench.phase(FIRST, 1) == "committed"
    bench.feed(ev.Tick)
    reply = bench.say(m.Recall, b"A", path=PATH, hold=False)
    assert [(part["rank"], part["slot"], part["committed"]) for part in reply.parts] == [
        (0, slots[0], True),
        (1, slots[1], True),
    ]


def test_a_rank_that_was_told_waits_for_the_look_on_disk_even_if_its_trainer_dies() -> None:
    bench = two_ranks()
    slot = adopted(bench, "", peer=b"B", ended=3)
    bench.read(slot, generation=4, rank=1, world_size=2)
    mine = adopted(bench, peer=b"A")
    bench.read(mine, generation=4, rank=0, world_size=2)
    died(bench)
    bench.read(mine, generation=4, rank=0, world_size=2)
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    bench.feed(ev.Tick)
    reply = bench.say(m.Recall, b"B", path=PATH, hold=False)
    assert [part["rank"] for part in reply.parts] == [0, 1]
