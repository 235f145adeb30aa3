"""Replicas spread over their holders: exactly once, about evenly, small ones whole."""

from __future__ import annotations

import math
import random

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from asyncckpt.planning.load_balancing import (  # noqa: E402
    CUT_NBYTES,
    Replica,
    box_of_rows,
    divide_replicas,
    replica_of,
    row_dimension,
)


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    n_rows = draw(st.one_of(st.integers(1, 5), st.integers(1, 10**6)))
    row_nbytes = draw(st.one_of(st.integers(1, 64), st.integers(1, 4 * CUT_NBYTES)))
    return draw(st.sampled_from([Replica(n_rows * row_nbytes, n_rows), Replica(0, 1)]))


HOLDERS = st.sets(st.integers(0, 11), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
SETS = st.dictionaries(HOLDERS, st.lists(replicas(), max_size=8), max_size=5)
LOADS = st.dictionaries(st.integers(0, 11), st.integers(0, 50 * CUT_NBYTES))


def nbytes_of(replica: Replica, n_rows: int) -> int:
    return replica.nbytes * n_rows // replica.n_rows


def grain_of(replica: Replica) -> int:
    return replica.nbytes if replica.nbytes <= CUT_NBYTES else max(CUT_NBYTES, replica.nbytes // replica.n_rows)


@given(SETS, LOADS)
def test_every_row_is_written_once_by_a_holder(
    sets: dict[tuple[int, ...], list[Replica]], loads: dict[int, int]
) -> None:
    found = divide_replicas(sets, loads)
    assert found.keys() == sets.keys()
    for holders, members in sets.items():
        for replica, pieces in zip(members, found[holders], strict=True):
            row = 0
            for piece in pieces:
                assert piece.rank in holders and piece.first_row == row and piece.n_rows > 0
                row += piece.n_rows
            assert row == replica.n_rows
            assert len({piece.rank for piece in pieces}) == len(pieces)


@given(SETS, LOADS)
def test_small_replicas_are_never_cut(sets: dict[tuple[int, ...], list[Replica]], loads: dict[int, int]) -> None:
    for holders, found in divide_replicas(sets, loads).items():
        for replica, pieces in zip(sets[holders], found, strict=True):
            assert replica.nbytes > CUT_NBYTES or len(pieces) == 1


@given(HOLDERS, st.lists(replicas(), max_size=12), LOADS)
def test_no_rank_ends_more_than_a_grain_above_the_level(
    holders: tuple[int, ...], members: list[Replica], loads: dict[int, int]
) -> None:
    pieces = [
        p for cut in zip(members, divide_replicas({holders: members}, loads)[holders], strict=True) for p in [cut]
    ]
    given_to = dict.fromkeys(holders, 0)
    for replica, cut in pieces:
        for piece in cut:
            given_to[piece.rank] += nbytes_of(replica, piece.n_rows)
    total = sum(r.nbytes for r in members)
    # The level: the least height at which what lies below it holds everything.
    own = sorted(loads.get(rank, 0) for rank in holders)
    level = min(math.ceil((total + sum(own[:n])) / n) for n in range(1, len(own) + 1))
    grain = max(map(grain_of, members), default=0)
    for rank, nbytes in given_to.items():
        assert not nbytes or loads.get(rank, 0) + nbytes <= level + grain


@given(SETS, LOADS, st.randoms(use_true_random=False))
def test_the_order_of_dicts_does_not_matter(
    sets: dict[tuple[int, ...], list[Replica]], loads: dict[int, int], rng: random.Random
) -> None:
    shuffled, other = list(sets.items()), list(loads.items())
    rng.shuffle(shuffled)
    rng.shuffle(other)
    assert divide_replicas(dict(shuffled), dict(other)) == divide_replicas(sets, loads)


def test_a_large_replica_is_shared_by_all_and_few_holders_choose_first() -> None:
    rows = 1 << 12
    everybody, pair = (0, 1, 2, 3), (0, 1)
    found = divide_replicas({everybody: [Replica(64 << 20, rows)], pair: [Replica(16 << 20, rows)]}, {})
    assert [(p.rank, p.n_rows) for p in found[pair][0]] == [(0, rows // 2), (1, rows // 2)]
    shares = {p.rank: p.n_rows * (64 << 20) // rows for p in found[everybody][0]}
    assert shares == {0: 12 << 20, 1: 12 << 20, 2: 20 << 20, 3: 20 << 20}


def test_a_rank_that_writes_much_anyway_gets_nothing() -> None:
    found = divide_replicas({(0, 1, 2): [Replica(8 << 20, 8)]}, {1: 100 << 20})
    assert {piece.rank for piece in found[0, 1, 2][0]} == {0, 2}


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(0, 4), st.integers(1, 4))
def test_rows_are_boxes_that_are_one_run_of_bytes(shape: tuple[int, ...], first: int, n_rows: int) -> None:
    dimension = row_dimension(shape)
    replica = replica_of(shape, 4)
    assert replica.nbytes == 4 * math.prod(shape)
    if dimension is None:
        assert replica.n_rows == 1 and box_of_rows(shape, 0, 1) == ((0,) * len(shape), shape)
        return
    assert replica.n_rows == shape[dimension] and set(shape[:dimension]) <= {1}
    first = min(first, replica.n_rows - 1)
    n_rows = min(n_rows, replica.n_rows - first)
    offsets, sizes = box_of_rows(shape, first, n_rows)
    numbers = [n for n in range(math.prod(shape)) if _inside(n, shape, offsets, sizes)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) == math.prod(sizes)


def _inside(number: int, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    for offset, size, length in zip(reversed(offsets), reversed(sizes), reversed(shape), strict=True):
        number, at = divmod(number, length)
        if not offset <= at < offset + size:
            return False
    return True
