"""Trainings that are told to stop and killed, again and again at random steps: they end as if they never had been."""

from __future__ import annotations

import pathlib
import random
import signal
from typing import Any

import interrupted
import pytest
import rank_processes
import real_worker

pytestmark = [pytest.mark.fault, pytest.mark.soak]

TIMES = 15


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    """What the ranks are forked from."""
    rank_processes.start_server()


@pytest.mark.parametrize("kind", interrupted.WORLD_SIZES)
@pytest.mark.timeout(600)
def test_a_training_interrupted_many_times_ends_as_one_that_never_was(
    endpoint: str, tmp_path: pathlib.Path, kind: str, rng: random.Random, record_property: Any
) -> None:
    with real_worker.running(endpoint):
        signals = rng.choices([signal.SIGTERM, signal.SIGKILL], k=TIMES)
        print(interrupted.interrupted(kind, tmp_path, endpoint, steps=60, rng=rng, signals=signals))
    record_property("count", TIMES)
