"""However an agreement grows: what was told is known, nothing is written twice, and all ranks come to the same."""

from __future__ import annotations

from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_agreement import NEWS, ONE, SHARED, SOLE, TWO, duties, grown, of  # noqa: E402

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
    for contributions, names in changes:
        before, agreement = agreement, grown(agreement, contributions, tuple(names))
        for rank, contribution in contributions.items():
            for key in contribution.tensors:
                assert agreement.duty(rank, *key).kind is not NEWS, "what was told is known"
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
                assert was.kind is NEWS or was == now or key[0] in names or key[0] in before._everywhere


@given(CHANGES)
def test_every_rank_that_decodes_the_changes_agrees(changes: Any) -> None:
    one, other = Agreement.start(WORLD), Agreement.start(WORLD)
    for contributions, names in changes:
        change = Change(contributions=contributions, per_rank=tuple(names))
        raw = change.encode()
        one, other = one.extended(change, raw), other.extended(Change.decode(raw), raw)
        assert one.fingerprint == other.fingerprint
        assert all(duties(one, key) == duties(other, key) for key in KEYS)
