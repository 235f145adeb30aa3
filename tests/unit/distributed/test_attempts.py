"""Which attempt of a job a process belongs to, in a store that outlives its ranks."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from asyncckpt.config import RankInfo
from asyncckpt.distributed.attempts import attempt_of

DEADLINE_S = 60.0


class NobodyError(Exception):
    """There is no time left."""


def process_over(store: Any) -> Any:
    """Return the store as a process has it: an object of its own."""
    return PrefixStore("group", store)


def token_of(rank: int, store: Any, within_s: float = DEADLINE_S) -> str:
    deadline = time.monotonic() + within_s

    def wait() -> None:
        if time.monotonic() > deadline:
            raise NobodyError
        time.sleep(0.001)

    return attempt_of(RankInfo(rank, 3), store).token(store, wait)


def counting_threads() -> int:
    return sum(thread.name == "asyncckpt-attempt" for thread in threading.enumerate())


def wait_for_threads(wanted: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while counting_threads() != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    assert counting_threads() == wanted


def test_all_ranks_have_the_token_of_rank_0_and_its_thread_ends_then() -> None:
    store = HashStore()
    ranks = [process_over(store) for _ in range(3)]
    first = token_of(0, ranks[0])
    assert [token_of(1, ranks[1]) for _ in range(2)] == [first, first]
    time.sleep(0.1)
    assert counting_threads() == 1, "rank 2 may come yet"
    assert token_of(2, ranks[2]) == first
    wait_for_threads(0)
    assert token_of(1, ranks[1], 0) == token_of(0, ranks[0]) == first


def test_a_token_is_taken_only_from_a_living_rank_0() -> None:
    store = HashStore()
    dead = process_over(store)
    token = token_of(0, dead)
    assert token_of(1, process_over(store)) == token
    del dead
    gc.collect()
    wait_for_threads(0)
    late = process_over(store)
    with pytest.raises(NobodyError):
        token_of(1, late, 0.2)
    living = process_over(store)
    attempt_of(RankInfo(0, 3), living)
    assert token_of(1, late) == token_of(0, living)


def test_a_rank_goes_over_to_a_rank_0_that_comes_again() -> None:
    store = HashStore()
    other, first = process_over(store), process_over(store)
    old = token_of(0, first)
    assert token_of(1, other) == old
    second = process_over(store)
    new = token_of(0, second)
    assert token_of(1, other) == new != old
    assert token_of(2, process_over(store)) == new


def test_rank_0_waits_for_the_last_rank_although_another_has_asked_with_two_threads() -> None:
    store = HashStore()
    first, other = process_over(store), process_over(store)
    token = token_of(0, first)
    threads = [threading.Thread(target=token_of, args=(1, other)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    time.sleep(0.1)
    assert counting_threads() == 1
    assert token_of(2, process_over(store)) == token
