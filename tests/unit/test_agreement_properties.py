"""However an agreement grows: what was told is known, nothing is written twice, and all ranks come to the same."""

from __future__ import annotations

from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_agreement import NEWS, ONE, PER_RANK, SHARED, SOLE, TWO, duties, grown, of  # noqa: E402

from asyncckpt.planning.agreement import Agreement  # noqa: E402
from asyncckpt.planning.contributions import Change  # noqa: E402

WORLD = 4
KEYS = [(n, d, s) for n in "abc" for d, s in (("float32", (4,)), ("float32", (1 << 20,)), ("int8", (3, 700_000)))]
HELD = st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from(KEYS), st.sampled_from([b"", ONE, TWO])))
CONTRIBUTION = st.builds(
    lambda held, own: of(*(((n, *k[1:]), d) for n, (k, d) in held.items()), own_nbytes=own),
    HELD,
    st.integers(0, 1 << 22),
)
CHANGES = st.lists(
    st.tuples(st.dictionaries(st.integers(0, WORLD - 1), CONTRIBUTION), st.lists(st.sampled_from("abc"), max_size=1)),
    max_size=5,
)


@given(CHANGES)
def test_however_it_grows_ranks_never_write_the_same_twice(changes: Any) -> None:
    agreement = Agreement.start(WORLD)
    seen_unsettled: set[str] = set()
    for contributions, names in changes:
        before, agreement = agreement, grown(agreement, contributions, tuple(names))
        unsettled = {key[0] for key in KEYS if sole_of(before, key) and not sole_of(agreement, key)} - set(names)
        assert not unsettled & seen_unsettled, "a name is unsettled once at most"
        seen_unsettled |= unsettled
        for rank, contribution in contributions.items():
            for key in contribution.tensors:
                is_news = agreement.duty(rank, *key).kind is NEWS
                assert is_news == (key[0] in unsettled), "what was told is known, or all its holders are asked"
        for key in KEYS:
            found = duties(agreement, key)
            holders = [rank for rank, duty in enumerate(found) if duty.kind is SHARED]
            pieces = sorted(piece for duty in found for piece in duty.pieces)
            if holders:
                assert len(holders) > 1 and not any(duty.kind is SOLE for duty in found)
                rows = 0
                for first, n_rows in pieces:
                    assert first == rows
                    rows += n_rows
                assert rows == max(key[2][0], 1)
                assert {duty.split for duty in found if duty.kind is SHARED} == {len(pieces) > 1}
            assert sum(duty.kind is SOLE for duty in found) <= 1
            for was, now in zip(duties(before, key), found, strict=True):
                dropped = key[0] in unsettled and was.kind is SOLE and now.kind is NEWS
                asked = was.kind is NEWS or key[0] in names or key[0] in before._everywhere
                assert was == now or dropped or asked


def sole_of(agreement: Agreement, key: Any) -> bool:
    """Whether one rank alone holds it."""
    return any(duty.kind is SOLE for duty in duties(agreement, key))


@given(CHANGES, st.lists(st.sets(st.integers(0, WORLD - 1), min_size=1), max_size=6))
def test_whoever_reports_when_nothing_is_news_for_ever(changes: Any, groups: Any) -> None:
    """Ranks that hold one tensor alike report it as long as it is news, first in any groups, then together."""
    agreement = Agreement.start(WORLD)
    for contributions, names in changes:
        agreement = grown(agreement, contributions, tuple(names))
    key, everybody = KEYS[0], set(range(WORLD))
    for group in [*groups, everybody, everybody]:
        news = {rank for rank in group if agreement.duty(rank, *key).kind is NEWS}
        agreement = grown(agreement, {rank: of((key, ONE)) for rank in news})
    found = duties(agreement, key)
    assert not any(duty.kind is NEWS for duty in found)
    if not changes and not groups:
        assert all(duty.kind is SHARED for duty in found)
    assert sum(duty.kind is SOLE for duty in found) + any(duty.kind is SHARED for duty in found) <= 1
    assert all(duty.kind in (SHARED, SOLE, PER_RANK) for duty in found)


@given(CHANGES)
def test_every_rank_that_decodes_the_changes_agrees(changes: Any) -> None:
    one, other = Agreement.start(WORLD), Agreement.start(WORLD)
    for contributions, names in changes:
        change = Change(contributions=contributions, per_rank=tuple(names))
        raw = change.encode()
        one, other = one.extended(change, raw), other.extended(Change.decode(raw), raw)
        assert one.fingerprint == other.fingerprint
        assert all(duties(one, key) == duties(other, key) for key in KEYS)
