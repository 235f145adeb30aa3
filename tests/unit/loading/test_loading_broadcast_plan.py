"""loading.broadcast_plan: who reads what for whom, and what is sent in one message."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from asyncckpt.loading.shared.broadcast_plan import (
    ALIGN_NBYTES,
    Box,
    ReadRequest,
    Transfer,
    assign_reads,
    balance_reads,
    cut_into_messages,
    decode_request,
    encode_request,
    transfers_by_rank,
)


def box(name: str, *sizes: int) -> Box:
    return name, (0,) * len(sizes), sizes


def request(*boxes: Box, can_send: bool = True) -> ReadRequest:
    return ReadRequest("save", {b: ("float32", can_send) for b in boxes})


def test_a_request_decodes_as_it_was_encoded() -> None:
    sent = request(box("a.b", 3, 4), box("scalar"), ("c", (5, 0), (1, 2)))
    assert decode_request(encode_request(sent)) == sent


# ---- reads that are balanced ----------------------------------------------------------------------------------------


def test_what_one_rank_wants_is_left_to_it() -> None:
    assert not balance_reads([request(box("a", 3)), request(box("b", 3)), request(("a", (1,), (3,)))])


def test_reads_are_spread_by_bytes_over_those_who_want_them() -> None:
    common = [box(f"w{n}", 10 + n) for n in range(30)]
    own = box("mine", 300)
    transfers = balance_reads([request(*common, own), request(*common), request(*common)])
    loads = [sum(b[2][0] for t in transfers if t.reader == rank for b in t.boxes) for rank in range(3)]
    assert sum(loads) == sum(b[2][0] for b in common)
    loads[0] += 300  # for itself
    assert max(loads) - min(loads) <= 40
    assert {(t.reader, *t.receivers) for t in transfers} <= set(itertools.permutations(range(3)))


def test_ranks_that_cannot_pass_on_what_they_read_get_it_from_others() -> None:
    a, b = box("a", 5), box("b", 5)
    transfers = balance_reads([request(a, b, can_send=False), request(a), request(b, can_send=False)])
    assert transfers == [Transfer(1, (0,), (a,))]


def test_the_plan_does_not_depend_on_the_order_in_which_a_rank_names_its_boxes() -> None:
    boxes = [box(f"w{n}", n % 4 + 1) for n in range(12)]
    plans = [balance_reads([request(*order), request(*boxes)]) for order in (boxes, boxes[::-1])]
    assert plans[0] == plans[1] and plans[0] == sorted(plans[0])


# ---- reads by ranks that are given ----------------------------------------------------------------------------------


def test_what_all_want_is_sent_first_and_the_rest_by_name() -> None:
    a, b, c = ("a", (0,), (4,)), ("b", (0,), (2,)), ("b", (2,), (2,))  # only the others want c
    transfers = assign_reads([[b, a], [c, a], [a, c, a]], [0, 0, 0])
    assert transfers == [Transfer(0, (1, 2), (c, a)), Transfer(0, (), (b,))]


def test_two_readers_serve_their_own() -> None:
    a = box("a", 4)
    assert assign_reads([[a], [a], [a], [a]], [0, 0, 3, 3]) == [Transfer(0, (1,), (a,)), Transfer(3, (2,), (a,))]


def test_every_rank_gets_what_it_wants_once_from_its_reader_in_the_reader_s_order(rng: random.Random) -> None:
    for _ in range(50):
        n = rng.randrange(1, 5)
        wanted = [[(rng.choice("abc"), (rng.randrange(3),), (1,)) for _ in range(rng.randrange(6))] for _ in range(n)]
        readers = [0] * n if rng.random() < 0.5 else [rank - rank % 2 for rank in range(n)]
        routes = transfers_by_rank(assign_reads(wanted, readers), n)
        for rank, reader in enumerate(readers):
            assert {t.reader for t in routes[rank]} <= {reader}
            assert [t for t in routes[reader] if rank in (reader, *t.receivers)] == routes[rank]
            got = [b for t in routes[rank] if rank in t.receivers for b in t.boxes]
            if rank != reader:
                assert len(got) == len(set(got)) and set(got) == set(wanted[rank])
            else:
                assert set(wanted[rank]) <= {b for t in routes[rank] for b in t.boxes} and not got


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed_offset", range(5))
def test_messages_hold_every_element_once_and_parts_are_aligned(rng: random.Random, seed_offset: int) -> None:
    for _ in range(seed_offset):
        rng.random()
    itemsizes = {f"w{n}": rng.choice([1, 2, 8, 16]) for n in range(38)}  # of two nothing is there

    def some_box(n: int) -> Box:
        sizes = tuple(rng.choice([0, 1, 2, 3, 7, 40]) for _ in range(rng.randrange(4)))
        return f"w{n}", (n,) * len(sizes), sizes

    boxes = [some_box(n) for n in range(40)]
    transfers = [Transfer(0, (1,), tuple(boxes[:25])), Transfer(1, (0,), tuple(boxes[25:]))]
    found: dict[tuple[int, Box], list[int]] = {}
    for message in cut_into_messages(transfers, itemsizes, 1024):
        assert message.nbytes <= 1024
        for one, other in itertools.pairwise(message.parts):
            assert one.start + one.nbytes <= other.start
        for part in message.parts:
            name, _, sizes = part.box
            assert part.start % ALIGN_NBYTES == 0 and part.nbytes == math.prod(part.sizes) * itemsizes[name] > 0
            inside = [range(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True)]
            strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
            places = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*inside)]
            first = part.position // itemsizes[name]
            assert places == list(range(first, first + len(places))), "a run"
            taken = found.setdefault((message.transfer.reader, part.box), [])
            taken += places
            assert part.is_last == (len(taken) == math.prod(sizes))
    for transfer in transfers:
        for one in transfer.boxes:
            elements = math.prod(one[2]) if one[0] in itemsizes else 0
            assert found.get((transfer.reader, one), []) == list(range(elements))


def test_small_boxes_of_one_transfer_share_a_message_and_those_of_another_do_not() -> None:
    a, b, c = box("a", 10), box("b", 10), box("c", 10)
    sent = list(cut_into_messages([Transfer(0, (1,), (a, b)), Transfer(0, (2,), (c,))], dict.fromkeys("abc", 4), 1000))
    assert [[part.box for part in message.parts] for message in sent] == [[a, b], [c]]
