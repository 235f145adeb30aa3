"""A seed that a failing run has named is hypothesis's, too, in each process that runs a part of the tests."""

from __future__ import annotations

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import core  # noqa: E402


def test_the_examples_of_hypothesis_are_those_of_this_sessions_seed(request: pytest.FixtureRequest, seed: int) -> None:
    """Ask which seed it takes: what it makes of one depends on more, as which modules are loaded and what they hold."""
    of_run = int(request.config.getoption("hypothesis_seed"))
    assert of_run == seed or "--hypothesis-seed" in " ".join(request.config.invocation_params.args)
    assert core.global_force_seed == of_run
