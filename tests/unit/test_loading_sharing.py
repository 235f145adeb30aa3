"""loading.sharing: who reads what for whom."""

from __future__ import annotations

import itertools
import random

import pytest

from asyncckpt.loading.sharing import Box, Wish, decode_wish, encode_wish, messages, plan_sharing


def box(name: str, *sizes: int) -> Box:
    return name, (0,) * len(sizes), sizes


def wish(*boxes: Box, gives: bool = True) -> Wish:
    return Wish("save", {b: ("float32", gives) for b in boxes})


def test_a_wish_comes_through_as_it_was_sent() -> None:
    sent = wish(box("a.b", 3, 4), box("scalar"), ("c", (5, 0), (1, 2)))
    assert decode_wish(encode_wish(sent)) == sent


def test_what_one_rank_wants_is_left_to_it() -> None:
    plan = plan_sharing([wish(box("a", 3)), wish(box("b", 3)), wish(("a", (1,), (3,)))])
    assert not plan.readers and not plan.groups


def test_reads_are_spread_by_bytes_over_those_who_want_them() -> None:
    common = [box(f"w{n}", 10 + n) for n in range(30)]
    own = box("mine", 300)
    plan = plan_sharing([wish(*common, own), wish(*common), wish(*common)])
    loads = [sum(b[2][0] for b, reader in plan.readers.items() if reader == rank) for rank in range(3)]
    assert sum(loads) == sum(b[2][0] for b in common)
    loads[0] += 300  # for itself
    assert max(loads) - min(loads) <= 40
    assert list(plan.groups) == [(0, 1, 2)]


def test_ranks_that_cannot_pass_on_what_they_read_get_it_from_others() -> None:
    a, b = box("a", 5), box("b", 5)
    plan = plan_sharing([wish(a, b, gives=False), wish(a), wish(b, gives=False)])
    assert plan.readers == {a: 1} and plan.groups == {(0, 1): {1: [a]}}


def test_the_plan_does_not_depend_on_the_order_in_which_a_rank_names_its_boxes() -> None:
    boxes = [box(f"w{n}", n % 4 + 1) for n in range(12)]
    plans = [plan_sharing([wish(*order), wish(*boxes)]) for order in (boxes, boxes[::-1])]
    assert plans[0] == plans[1] and list(plans[0].groups[0, 1]) == sorted(plans[0].groups[0, 1])


@pytest.mark.parametrize("seed_offset", range(5))
def test_messages_hold_every_byte_once_and_items_are_aligned(rng: random.Random, seed_offset: int) -> None:
    for _ in range(seed_offset):
        rng.random()
    lengths = [rng.choice([0, 1, 63, 64, 65, 1000, 5000]) for _ in range(40)]
    found: list[set[int]] = [set() for _ in lengths]
    for message in messages(lengths, 1024, 64):
        for one, other in itertools.pairwise(message):
            assert one.at + one.nbytes <= other.at
        for segment in message:
            assert segment.at % 64 == 0 and segment.at + segment.nbytes <= 1024 and segment.position % 64 == 0
            taken = set(range(segment.position, segment.position + segment.nbytes))
            assert taken and not taken & found[segment.number]
            found[segment.number] |= taken
    assert found == [set(range(length)) for length in lengths]
