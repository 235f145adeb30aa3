"""Who writes what: the rules by which ranks agree when they meet, and that no two ranks ever write one name twice."""

from __future__ import annotations

import pytest

from asyncckpt.errors import ProtocolError
from asyncckpt.planning.contributions import Contribution, TensorKey, tag_digest
from asyncckpt.planning.write_agreement import MAX_SHAPES, Agreement, AssignmentKind, WriteAssignment

SHARED, SOLE, PER_RANK, UNAGREED = (
    AssignmentKind.SHARED,
    AssignmentKind.SOLE,
    AssignmentKind.PER_RANK,
    AssignmentKind.UNAGREED,
)
W: TensorKey = ("w", "float32", (4, 3))
BIG: TensorKey = ("big", "float32", (1024, 1024))
ONE, TWO = b"11111111", b"22222222"
TRIVIAL = tag_digest(ONE, trivial=True)


def of(*held: tuple[TensorKey, bytes], own_nbytes: int = 0) -> Contribution:
    return Contribution(tensors=tuple(k for k, _ in held), own_nbytes=own_nbytes, digests=tuple(d for _, d in held))


def met(agreement: Agreement, *contributions: Contribution, per_rank: tuple[str, ...] = ()) -> Agreement:
    """Return the agreement after a meeting of all ranks."""
    return agreement.after(dict(enumerate(contributions)), per_rank)


def agreed(*contributions: Contribution) -> Agreement:
    return met(Agreement.start(len(contributions)), *contributions)


def kinds(agreement: Agreement, key: TensorKey) -> list[AssignmentKind]:
    return [agreement.assignment(rank, *key).kind for rank in range(agreement.world_size)]


def assignments(agreement: Agreement, key: TensorKey) -> list[WriteAssignment]:
    return [agreement.assignment(rank, *key) for rank in range(agreement.world_size)]


def test_before_any_meeting_everything_is_news() -> None:
    assert kinds(Agreement.start(2), W) == [UNAGREED, UNAGREED]


def test_one_rank_has_nobody_to_agree_with() -> None:
    assert kinds(Agreement.start(1), W) == [SOLE]
    assert kinds(agreed(of((W, ONE))), W) == [SOLE]


def test_equal_replicas_are_written_once() -> None:
    found = assignments(agreed(of((W, ONE)), of((W, ONE))), W)
    assert [d.kind for d in found] == [SHARED, SHARED]
    assert sorted(d.rows for d in found) == [(), ((0, 4),)]
    assert not any(d.split for d in found)


def test_a_large_replica_is_split_and_all_holders_know() -> None:
    found = assignments(agreed(of((BIG, ONE)), of((BIG, ONE)), of((BIG, ONE))), BIG)
    assert all(d.split and d.kind is SHARED for d in found)
    rows = sorted(piece for d in found for piece in d.rows)
    assert sum(n for _, n in rows) == 1024 and len(rows) == 3


def test_a_rank_whose_other_tensors_are_many_gets_less_of_a_replica() -> None:
    own = ("own", "uint8", (100 << 20,))
    found = assignments(agreed(of((BIG, ONE), (own, b"")), of((BIG, ONE))), BIG)
    assert [d.rows for d in found] == [(), ((0, 1024),)]
    found = assignments(agreed(of((BIG, ONE)), of((BIG, ONE), own_nbytes=100 << 20)), BIG)
    assert [d.rows for d in found] == [((0, 1024),), ()]


def test_unequal_replicas_are_stored_per_rank() -> None:
    assert kinds(agreed(of((W, ONE)), of((W, TWO))), W) == [PER_RANK, PER_RANK]
    assert kinds(agreed(of((W, ONE)), of((W, ONE)), of((W, TWO))), W) == [PER_RANK] * 3


@pytest.mark.parametrize("other", [("w", "float32", (2, 6)), ("w", "float64", (4, 3))])
def test_one_name_with_two_shapes_or_dtypes_is_stored_per_rank(other: TensorKey) -> None:
    agreement = agreed(of((W, b"")), of((other, b"")))
    assert agreement.assignment(0, *W).kind is PER_RANK
    assert agreement.assignment(1, *other).kind is PER_RANK


def test_what_one_rank_holds_is_its_own_in_every_shape() -> None:
    agreement = agreed(of((W, b"")), of())
    assert kinds(agreement, W) == [SOLE, UNAGREED]
    assert agreement.assignment(0, "w", "float64", (9,)).kind is SOLE


def test_without_digests_equal_shapes_count_as_equal_and_half_given_ones_do_not() -> None:
    assert kinds(agreed(of((W, b"")), of((W, b""))), W) == [SHARED, SHARED]
    assert kinds(agreed(of((W, ONE)), of((W, b""))), W) == [PER_RANK, PER_RANK]


def test_tensors_as_they_were_initialised_are_replicas_at_the_second_meeting() -> None:
    first = agreed(of((W, TRIVIAL)), of((W, TRIVIAL)))
    assert kinds(first, W) == [UNAGREED, UNAGREED]
    assert kinds(met(first, of((W, TRIVIAL)), of((W, TRIVIAL))), W) == [SHARED, SHARED]
    assert kinds(met(first, of((W, ONE)), of((W, TWO))), W) == [PER_RANK, PER_RANK]


def test_another_shape_of_a_replica_is_news_and_shared_as_well_after_the_next_meeting() -> None:
    longer: TensorKey = ("w", "float32", (5, 3))
    before = agreed(of((W, ONE)), of((W, ONE)))
    assert kinds(before, longer) == [UNAGREED, UNAGREED]
    after = met(before, of((longer, TWO)), of((longer, TWO)))
    assert kinds(after, longer) == kinds(after, W) == [SHARED, SHARED]
    assert assignments(after, W) == assignments(before, W)


def test_a_name_that_comes_in_ever_more_shapes_ends_per_rank() -> None:
    agreement = Agreement.start(2)
    for n in range(MAX_SHAPES + 1):
        key: TensorKey = ("w", "float32", (n + 1,))
        assert kinds(agreement, key) == [UNAGREED, UNAGREED]
        agreement = met(agreement, of((key, ONE)), of((key, ONE)))
        assert kinds(agreement, key) == ([SHARED, SHARED] if n < MAX_SHAPES else [PER_RANK, PER_RANK])
    assert kinds(agreement, ("w", "float32", (99,))) == [PER_RANK, PER_RANK]


def test_a_new_holder_is_news_to_itself_and_shares_after_the_next_meeting() -> None:
    before = agreed(of((W, ONE)), of((W, ONE)), of())
    assert kinds(before, W) == [SHARED, SHARED, UNAGREED]
    assert kinds(met(before, of((W, ONE)), of((W, ONE)), of((W, ONE))), W) == [SHARED] * 3


def test_a_holder_that_is_gone_holds_nothing_after_the_next_meeting() -> None:
    before = agreed(of((W, ONE)), of((W, ONE)), of((W, ONE)))
    assert kinds(met(before, of((W, ONE)), of((W, ONE)), of()), W) == [SHARED, SHARED, UNAGREED]
    assert kinds(met(before, of(), of((W, TWO)), of()), W) == [UNAGREED, SOLE, UNAGREED]


def test_what_no_rank_holds_at_a_meeting_stays_as_it_was() -> None:
    before = agreed(of((W, ONE)), of((W, ONE)))
    after = met(before, of((BIG, ONE)), of((BIG, ONE)))
    assert assignments(after, W) == assignments(before, W) and kinds(after, BIG) == [SHARED, SHARED]


def test_a_replica_that_the_same_ranks_still_hold_alike_keeps_its_writers() -> None:
    own = ("own", "uint8", (100 << 20,))
    before = agreed(of((BIG, ONE), (W, ONE)), of((BIG, ONE), (W, ONE)))
    trivial = tag_digest(TWO, trivial=True)
    after = met(before, of((BIG, TWO), (W, trivial), (own, b"")), of((BIG, TWO), (W, trivial)))
    assert assignments(after, BIG) == assignments(before, BIG) and assignments(after, W) == assignments(before, W)


def test_what_is_new_goes_to_ranks_that_write_less_of_the_replicas_before() -> None:
    """Rank 0 writes all of `big`, as rank 1 has much else to write at first; and so rank 1 writes what comes later."""
    small: TensorKey = ("small", "float32", (512, 1024))
    own = ("own", "uint8", (100 << 20,))
    before = agreed(of((BIG, ONE)), of((BIG, ONE), (own, b"")))
    after = met(before, of((BIG, ONE), (small, ONE)), of((BIG, ONE), (small, ONE)))
    assert [d.rows for d in assignments(after, BIG)] == [((0, 1024),), ()]
    assert [d.rows for d in assignments(after, small)] == [(), ((0, 512),)]


def test_what_differed_is_a_replica_when_it_is_equal_at_the_next_meeting() -> None:
    differed = agreed(of((W, ONE)), of((W, TWO)))
    assert kinds(met(differed, of((W, ONE)), of((W, ONE))), W) == [SHARED, SHARED]


def test_what_differed_at_two_meetings_running_is_stored_per_rank_for_good() -> None:
    twice = met(agreed(of((W, ONE)), of((W, TWO))), of((W, TWO)), of((W, ONE)))
    assert kinds(met(twice, of((W, ONE)), of((W, ONE))), W) == [PER_RANK, PER_RANK]
    between = met(agreed(of((W, ONE)), of((W, TWO))), of((W, ONE)), of((W, ONE)))
    again = met(between, of((W, ONE)), of((W, TWO)))
    assert kinds(met(again, of((W, ONE)), of((W, ONE))), W) == [SHARED, SHARED], "it did not differ in between"


def test_names_that_proved_unequal_are_per_rank_for_good() -> None:
    agreement = agreed(of((W, ONE)), of((W, ONE))).after({}, ("w", "later"))
    assert kinds(agreement, W) == [PER_RANK, PER_RANK]
    later: TensorKey = ("later", "bool", ())
    agreement = met(agreement, of((W, ONE), (later, ONE)), of((W, ONE), (later, ONE)))
    assert kinds(agreement, W) == kinds(agreement, later) == [PER_RANK, PER_RANK]


def test_a_meeting_leaves_the_agreement_before_as_it_was() -> None:
    before = agreed(of((W, ONE)), of((W, ONE)))
    fingerprint, found = before.fingerprint, assignments(before, W)
    met(before, of((W, TWO)), of(), per_rank=("w",))
    assert (before.fingerprint, assignments(before, W)) == (fingerprint, found)


def test_fingerprints_tell_histories_apart() -> None:
    start, one, other = Agreement.start(2), (of((W, ONE)), of()), (of(), of((W, ONE)))
    found = [start, Agreement.start(3), met(start, *one), met(start, *other), met(met(start, *one), *other)]
    found += [start.after({}, ("w",)), start.after({}, ("v",)), met(start, *one, per_rank=("w",))]
    assert len({a.fingerprint for a in found}) == len(found)
    assert met(start, *one).fingerprint == met(Agreement.start(2), *one).fingerprint
    assert all(len(a.fingerprint) == 16 and int(a.fingerprint, 16) >= 0 for a in found)


@pytest.mark.parametrize("ranks", [(0,), (0, 2), (0, 1, 2)])
def test_contributions_of_other_ranks_than_all_of_the_world_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="of 2 ranks"):
        Agreement.start(2).after({rank: of((W, ONE)) for rank in ranks})
