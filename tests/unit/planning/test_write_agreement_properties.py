"""Whatever the ranks bring to their meetings: what was told is known, and nothing is written twice."""

from __future__ import annotations

from typing import Any

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_write_agreement import ONE, PER_RANK, SHARED, SOLE, TRIVIAL, TWO, UNAGREED, assignments, met, of  # noqa: E402

from asyncckpt.planning.contributions import Contribution  # noqa: E402
from asyncckpt.planning.write_agreement import Agreement  # noqa: E402

WORLD = 4
KEYS = [(n, d, s) for n in "abc" for d, s in (("float32", (4,)), ("float32", (1 << 20,)), ("int8", (3, 700_000)))]
DIGESTS = st.sampled_from([b"", ONE, TWO, TRIVIAL])
HELD = st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from(KEYS), DIGESTS))
CONTRIBUTION = st.builds(
    lambda held, own: of(*(((n, *k[1:]), d) for n, (k, d) in held.items()), own_nbytes=own),
    HELD,
    st.integers(0, 1 << 22),
)
MEETINGS = st.lists(
    st.tuples(st.lists(CONTRIBUTION, min_size=WORLD, max_size=WORLD), st.lists(st.sampled_from("abc"), max_size=1)),
    max_size=5,
)


@given(MEETINGS)
def test_whatever_ranks_bring_they_never_write_the_same_twice(meetings: Any) -> None:
    agreement, trivial = Agreement.start(WORLD), set[str]()
    for contributions, names in meetings:
        before, agreement = agreement, met(agreement, *contributions, per_rank=tuple(names))
        held = {key[0] for contribution in contributions for key in contribution.tensors}
        for rank, contribution in enumerate(contributions):
            for key in contribution.tensors:
                if agreement.assignment(rank, *key).kind is UNAGREED:
                    assert key[0] not in trivial, "a name is looked at twice at most"
        trivial |= {
            key[0]
            for rank, contribution in enumerate(contributions)
            for key in contribution.tensors
            if agreement.assignment(rank, *key).kind is UNAGREED
        }
        for key in KEYS:
            found = assignments(agreement, key)
            holders = [rank for rank, assignment in enumerate(found) if assignment.kind is SHARED]
            written = sorted(one for assignment in found for one in assignment.rows)
            if holders:
                assert len(holders) > 1 and not any(assignment.kind is SOLE for assignment in found)
                rows = 0
                for first, n_rows in written:
                    assert first == rows
                    rows += n_rows
                assert rows == max(key[2][0], 1)
                assert {assignment.split for assignment in found if assignment.kind is SHARED} == {len(written) > 1}
            assert sum(assignment.kind is SOLE for assignment in found) <= 1
            if key[0] not in held and key[0] not in names:
                assert found == assignments(before, key), "nobody has brought it"


@given(st.lists(CONTRIBUTION, min_size=WORLD, max_size=WORLD))
def test_a_structure_that_stays_is_agreed_upon_after_two_meetings(contributions: Any) -> None:
    agreement = met(met(Agreement.start(WORLD), *contributions), *contributions)
    for rank, contribution in enumerate(contributions):
        for key in contribution.tensors:
            assert agreement.assignment(rank, *key).kind in (SHARED, SOLE, PER_RANK)


@given(MEETINGS)
def test_every_rank_that_decodes_what_all_have_brought_agrees(meetings: Any) -> None:
    one, other = Agreement.start(WORLD), Agreement.start(WORLD)
    for contributions, names in meetings:
        one = met(one, *contributions, per_rank=tuple(names))
        other = met(other, *(Contribution.decode(c.encode()) for c in contributions), per_rank=tuple(reversed(names)))
        assert one.fingerprint == other.fingerprint
        assert all(assignments(one, key) == assignments(other, key) for key in KEYS)
