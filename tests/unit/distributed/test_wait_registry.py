"""Ranks that wait for each other in different saves find out, and each tells the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from asyncckpt.distributed import process_group
from asyncckpt.distributed.meetings import Save
from asyncckpt.distributed.process_group import LOOKUP_PERIOD_S, WRONG_MEETING_S, WaitRegistry
from asyncckpt.errors import RanksDisagreeError


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def waiting(rank: int, store: Any, path: str) -> WaitRegistry:
    found = WaitRegistry(rank, store, Save(path, 3))
    found.start_waiting()
    return found


def test_the_rank_that_finds_it_out_tells_the_other_which_has_not_waited_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(process_group, "time", clock)
    first, second = waiting(0, store, "/a"), waiting(1, store, "/b")
    first.check_missing(lambda: [1])
    clock.now += WRONG_MEETING_S
    for rank in (first, second):  # the second one in its first look
        with pytest.raises(RanksDisagreeError) as caught:
            rank.check_missing(lambda: [0, 1])
        assert "/a" in str(caught.value) and "/b" in str(caught.value)


def test_what_was_told_of_an_earlier_save_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(process_group, "time", clock)
    first, second = waiting(0, store, "/a"), waiting(1, store, "/b")
    first.check_missing(lambda: [1])
    clock.now += WRONG_MEETING_S
    with pytest.raises(RanksDisagreeError):
        first.check_missing(lambda: [1])
    again = waiting(1, store, "/a")
    again.check_missing(lambda: [])
    clock.now += LOOKUP_PERIOD_S
    again.check_missing(lambda: [])
    assert second is not again
