"""`benchmarks.ring`: how much memory each kind has, and what its saves are compared with."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import ring


def saves(*written_s: float) -> list[dict[str, Any]]:
    return [{"written_s": seconds, "stall_s": seconds / 2} for seconds in written_s]


def test_one_kind_has_no_limit_one_a_quarter_of_the_state_and_one_less_than_the_largest_tensor() -> None:
    state = {"a": torch.zeros(100), "b": [torch.zeros(50, dtype=torch.int64)], "step": 3}
    assert ring.arena_limits(state) == {ring.WHOLE: None, ring.QUARTER: 200, ring.TENSOR: 200}
    state = {"a": torch.zeros(300), "b": torch.zeros(100)}
    assert ring.arena_limits(state) == {ring.WHOLE: None, ring.QUARTER: 400, ring.TENSOR: 600}


def test_each_save_is_compared_with_whole_slots_and_the_limit_of_its_own_round() -> None:
    rounds = [
        {"limits": {"write_s": 0.5}, "saves": {ring.WHOLE: saves(1.0, 2.0, 6.0), ring.QUARTER: saves(4.0)}},
        {"limits": {"write_s": 2.0}, "saves": {ring.WHOLE: saves(4.0), ring.QUARTER: saves(4.0, 8.0)}},
    ]
    found = ring.ratios({"rounds": rounds}, ring.QUARTER)
    assert found == {"over whole": [2.0, 1.0, 2.0], "over the write limit": [8.0, 2.0, 4.0], "stall": [2.0, 2.0, 4.0]}
