"""`keep_in_memory="latest"`: which slot is spared, what that costs, and when it is said that there is no room."""

from __future__ import annotations

import pytest
import torch
from test_slot_pool import LARGE, SMALL, Lender, acquire, name

from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_pool import SPARE_SAVES, SlotPool
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import ConfigError, InsufficientMemoryError, SlotBusyError
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan


@pytest.fixture(scope="module")
def plan() -> SavePlan:
    return PlanCache(files_per_rank=1).plan_for({"a": torch.ones(1)})[0]


def keeping(lender: Lender, **fields: object) -> SlotPool:
    config = CheckpointerConfig(keep_in_memory="latest", **fields)  # type: ignore[arg-type]
    return SlotPool(config, lender.allocate, lender.release)


def save(pool: SlotPool, plan: SavePlan, n: int, nbytes: int = SMALL, *, commits: bool = True) -> Slot:
    """Save `n`, and let it end."""
    slot = acquire(pool, plan, n, nbytes)
    pool.staged(slot)
    if commits:
        pool.committed(name(n))
    pool.free(name(n))
    return slot


def test_the_newest_committed_snapshot_is_never_overwritten(plan: SavePlan) -> None:
    lender = Lender()
    pool = keeping(lender)
    first = save(pool, plan, 0)
    second = save(pool, plan, 1)
    assert second is not first
    for n in range(2, 2 + 2 * SPARE_SAVES):  # nor is it given back for not being used
        assert save(pool, plan, n) is (first, second)[n % 2]
    assert len(lender.made) == 2
    assert lender.released == []
    pool.close()


def test_a_save_that_fails_costs_only_its_own_slot(plan: SavePlan) -> None:
    pool = keeping(Lender())
    first = save(pool, plan, 0)
    second = save(pool, plan, 1, commits=False)
    assert save(pool, plan, 2, commits=False) is second
    assert save(pool, plan, 3) is second
    assert save(pool, plan, 4) is first
    pool.close()


def test_while_one_is_written_and_one_is_kept_two_slots_are_all_in_use(plan: SavePlan) -> None:
    pool = keeping(Lender(), on_busy="error")
    save(pool, plan, 0)
    acquire(pool, plan, 1)
    with pytest.raises(SlotBusyError):
        acquire(pool, plan, 2)
    pool.committed(name(1))
    pool.free(name(1))
    save(pool, plan, 3)
    pool.close()


def test_a_structure_that_grows_replaces_the_other_slot_and_then_the_kept_one(plan: SavePlan) -> None:
    lender = Lender()
    pool = keeping(lender, slots=3)
    small = [save(pool, plan, n) for n in range(2)]
    large = save(pool, plan, 2, LARGE)
    assert lender.released == [small[0].number]  # two at a time, whatever `slots` allows
    save(pool, plan, 3, LARGE)
    assert lender.released == [slot.number for slot in small]
    assert pool.nbytes == 2 * large.memory.nbytes
    pool.close()


@pytest.mark.parametrize("limit", [SMALL, 2 * SMALL - 4096])
def test_a_limit_that_does_not_hold_two_is_an_error_of_the_first_save(limit: int, plan: SavePlan) -> None:
    pool = keeping(Lender(), arena_limit_bytes=limit)
    with pytest.raises(InsufficientMemoryError, match="two slots") as caught:
        acquire(pool, plan, 0)
    assert (caught.value.nbytes, caught.value.limit) == (2 * SMALL, limit)
    assert pool.nbytes == 0
    pool.close()


def test_a_kept_snapshot_that_leaves_no_room_for_a_smaller_one_is_an_error_and_no_wait(plan: SavePlan) -> None:
    pool = keeping(Lender(), arena_limit_bytes=2 * LARGE)
    save(pool, plan, 0, LARGE)
    pool._config = CheckpointerConfig(keep_in_memory="latest", arena_limit_bytes=LARGE + SMALL - 4096)
    with pytest.raises(InsufficientMemoryError, match="keeps"):
        acquire(pool, plan, 1, SMALL)
    pool.close()


def test_a_machine_without_room_for_two_is_an_error_and_no_wait(plan: SavePlan) -> None:
    pool = keeping(Lender(room=SMALL + 4096))
    first = save(pool, plan, 0)
    with pytest.raises(InsufficientMemoryError):
        acquire(pool, plan, 1)
    assert pool.held() == [first]
    pool.close()


def test_what_was_lost_with_its_worker_is_kept_no_longer(plan: SavePlan) -> None:
    pool = keeping(Lender())
    save(pool, plan, 0)
    pool.orphan_all()
    slots = [save(pool, plan, n) for n in (1, 2, 3)]
    assert slots[0] is slots[2] is not slots[1]
    pool.close()


def test_one_slot_is_too_few(plan: SavePlan) -> None:
    with pytest.raises(ConfigError, match="takes two") as caught:
        CheckpointerConfig(keep_in_memory="latest", slots=1)
    assert caught.value.field == "keep_in_memory"
