"""Who writes what: the rules by which an agreement grows, and that no two ranks ever write one name twice."""

from __future__ import annotations

import pytest

from asyncckpt.errors import ProtocolError
from asyncckpt.planning.agreement import MAX_SHAPES, Agreement, Duty, DutyKind
from asyncckpt.planning.contributions import Change, Contribution, TensorKey

SHARED, SOLE, PER_RANK, NEWS = DutyKind.SHARED, DutyKind.SOLE, DutyKind.PER_RANK, DutyKind.NEWS
W: TensorKey = ("w", "float32", (4, 3))
BIG: TensorKey = ("big", "float32", (1024, 1024))
ONE, TWO = b"11111111", b"22222222"


def of(*held: tuple[TensorKey, bytes], own_nbytes: int = 0) -> Contribution:
    return Contribution(tensors=tuple(k for k, _ in held), own_nbytes=own_nbytes, digests=tuple(d for _, d in held))


def grown(agreement: Agreement, contributions: dict[int, Contribution], per_rank: tuple[str, ...] = ()) -> Agreement:
    change = Change(contributions=contributions, per_rank=per_rank)
    return agreement.extended(change, change.encode())


def agreed(*contributions: Contribution) -> Agreement:
    return grown(Agreement.start(len(contributions)), dict(enumerate(contributions)))


def kinds(agreement: Agreement, key: TensorKey) -> list[DutyKind]:
    return [agreement.duty(rank, *key).kind for rank in range(agreement.world_size)]


def duties(agreement: Agreement, key: TensorKey) -> list[Duty]:
    return [agreement.duty(rank, *key) for rank in range(agreement.world_size)]


def test_before_any_exchange_everything_is_news() -> None:
    assert kinds(Agreement.start(2), W) == [NEWS, NEWS]


def test_one_rank_has_nobody_to_agree_with() -> None:
    assert kinds(Agreement.start(1), W) == [SOLE]
    assert kinds(agreed(of((W, ONE))), W) == [SOLE]


def test_equal_replicas_are_written_once() -> None:
    found = duties(agreed(of((W, ONE)), of((W, ONE))), W)
    assert [d.kind for d in found] == [SHARED, SHARED]
    assert sorted(d.pieces for d in found) == [(), ((0, 4),)]
    assert not any(d.split for d in found)


def test_a_large_replica_is_split_and_all_holders_know() -> None:
    found = duties(agreed(of((BIG, ONE)), of((BIG, ONE)), of((BIG, ONE))), BIG)
    assert all(d.split and d.kind is SHARED for d in found)
    rows = sorted(piece for d in found for piece in d.pieces)
    assert sum(n for _, n in rows) == 1024 and len(rows) == 3


def test_a_rank_whose_other_tensors_are_many_gets_less_of_a_replica() -> None:
    own = ("own", "uint8", (100 << 20,))
    found = duties(agreed(of((BIG, ONE), (own, b"")), of((BIG, ONE))), BIG)
    assert [d.pieces for d in found] == [(), ((0, 1024),)]
    found = duties(agreed(of((BIG, ONE)), of((BIG, ONE), own_nbytes=100 << 20)), BIG)
    assert [d.pieces for d in found] == [((0, 1024),), ()]


def test_unequal_replicas_are_stored_per_rank() -> None:
    assert kinds(agreed(of((W, ONE)), of((W, TWO))), W) == [PER_RANK, PER_RANK]
    assert kinds(agreed(of((W, ONE)), of((W, ONE)), of((W, TWO))), W) == [PER_RANK] * 3


@pytest.mark.parametrize("other", [("w", "float32", (2, 6)), ("w", "float64", (4, 3))])
def test_one_name_with_two_shapes_or_dtypes_is_stored_per_rank(other: TensorKey) -> None:
    agreement = agreed(of((W, b"")), of((other, b"")))
    assert agreement.duty(0, *W).kind is PER_RANK
    assert agreement.duty(1, *other).kind is PER_RANK


def test_what_one_rank_holds_is_its_own_in_every_shape() -> None:
    agreement = agreed(of((W, b"")), of())
    assert kinds(agreement, W) == [SOLE, NEWS]
    assert agreement.duty(0, "w", "float64", (9,)).kind is SOLE


def test_without_digests_equal_shapes_count_as_equal_and_half_given_ones_do_not() -> None:
    assert kinds(agreed(of((W, b"")), of((W, b""))), W) == [SHARED, SHARED]
    assert kinds(agreed(of((W, ONE)), of((W, b""))), W) == [PER_RANK, PER_RANK]


def test_another_shape_of_a_replica_is_news_and_then_shared_as_well() -> None:
    longer: TensorKey = ("w", "float32", (5, 3))
    before = agreed(of((W, ONE)), of((W, ONE)))
    assert kinds(before, longer) == [NEWS, NEWS]
    after = grown(before, {0: of((longer, TWO)), 1: of((longer, TWO))})
    assert kinds(after, longer) == kinds(after, W) == [SHARED, SHARED]
    assert duties(after, W) == duties(before, W)


def test_a_name_that_is_shared_under_ever_more_shapes_ends_per_rank() -> None:
    agreement = Agreement.start(2)
    for n in range(MAX_SHAPES + 1):
        key: TensorKey = ("w", "float32", (n + 1,))
        assert kinds(agreement, key) == [NEWS, NEWS]
        agreement = grown(agreement, {0: of((key, ONE)), 1: of((key, ONE))})
        assert kinds(agreement, key) == [SHARED, SHARED] if n < MAX_SHAPES else [PER_RANK, PER_RANK]
    assert kinds(agreement, ("w", "float32", (99,))) == [PER_RANK, PER_RANK]


def test_a_new_holder_of_an_agreed_name_stores_its_own() -> None:
    shared = agreed(of((W, ONE)), of((W, ONE)), of())
    assert kinds(shared, W) == [SHARED, SHARED, NEWS]
    assert kinds(grown(shared, {2: of((W, ONE))}), W) == [SHARED, SHARED, PER_RANK]


def late(agreement: Agreement) -> Agreement:
    """Let rank 1 report what rank 0 was the only one to report."""
    return grown(grown(agreement, {0: of((W, ONE))}), {1: of((W, TWO))})


@pytest.mark.parametrize(("second", "expected"), [(ONE, SHARED), (TWO, PER_RANK)])
def test_a_holder_that_reports_late_is_compared_with_the_others(second: bytes, expected: DutyKind) -> None:
    unsettled = late(Agreement.start(3))
    assert kinds(unsettled, W) == [NEWS, NEWS, NEWS]
    settled = grown(unsettled, {0: of((W, ONE)), 1: of((W, second))})
    assert kinds(settled, W) == [expected, expected, NEWS]
    assert kinds(grown(settled, {2: of((W, ONE))}), W) == [expected, expected, PER_RANK]


def test_a_tensor_that_has_moved_to_another_rank_is_that_ranks() -> None:
    assert kinds(grown(late(Agreement.start(2)), {1: of((W, TWO))}), W) == [NEWS, SOLE]


def test_a_holder_that_reports_late_once_more_stores_its_own_for_ever() -> None:
    assert kinds(late(late(Agreement.start(2))), W) == [SOLE, PER_RANK]


def test_names_that_proved_unequal_are_per_rank_for_ever() -> None:
    agreement = grown(agreed(of((W, ONE)), of((W, ONE))), {}, ("w", "later"))
    assert kinds(agreement, W) == [PER_RANK, PER_RANK]
    later: TensorKey = ("later", "bool", ())
    agreement = grown(agreement, {0: of((W, ONE), (later, ONE)), 1: of((W, ONE), (later, ONE))})
    assert kinds(agreement, W) == kinds(agreement, later) == [PER_RANK, PER_RANK]


def test_growing_leaves_the_smaller_agreement_as_it_was() -> None:
    before = agreed(of((W, ONE)), of((W, ONE)))
    fingerprint, found = before.fingerprint, duties(before, W)
    grown(before, {0: of((BIG, ONE))}, ("w",))
    assert (before.fingerprint, duties(before, W)) == (fingerprint, found)


def test_fingerprints_tell_histories_apart() -> None:
    start = Agreement.start(2)
    one, other = {0: of((W, ONE))}, {1: of((W, ONE))}
    found = [start, Agreement.start(3), grown(start, one), grown(start, other), grown(grown(start, one), other)]
    assert len({a.fingerprint for a in found}) == len(found)
    assert grown(start, one).fingerprint == grown(Agreement.start(2), one).fingerprint
    assert all(len(a.fingerprint) == 16 and int(a.fingerprint, 16) >= 0 for a in found)


@pytest.mark.parametrize("rank", [2, 99])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ProtocolError, match=str(rank)):
        grown(Agreement.start(2), {rank: of((W, ONE))})
