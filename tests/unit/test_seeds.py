"""A seed that a failing run has named gives the same numbers again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402


def examples(decorate: Callable[[Callable[..., None]], Callable[..., None]]) -> list[list[bool]]:
    """Return what hypothesis gives to a test.

    Coins alone: numbers and texts come also from the constants of all modules that are loaded, which may be more for
    the second call.
    """
    found: list[list[bool]] = []

    @hypothesis.settings(max_examples=30)
    @hypothesis.given(coins=st.lists(st.booleans(), min_size=20, max_size=20))
    def collect(coins: list[bool]) -> None:
        found.append(coins)

    decorate(collect)()
    return found


def test_the_examples_of_hypothesis_are_those_of_this_sessions_seed(request: pytest.FixtureRequest, seed: int) -> None:
    of_run = int(request.config.getoption("hypothesis_seed"))
    assert of_run == seed or "--hypothesis-seed" in " ".join(request.config.invocation_params.args)
    found = examples(lambda test: test)
    assert found == examples(hypothesis.seed(of_run))
    assert found != examples(hypothesis.seed(of_run + 1))
