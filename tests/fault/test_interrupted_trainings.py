"""Trainings that are told to stop and killed, again and again at random steps: they end as if they never had been."""

from __future__ import annotations

import pathlib
import random
import signal

import interrupted
import pytest
import real_worker

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("kind", interrupted.WORLD_SIZES)
@pytest.mark.timeout(600)
def test_a_training_interrupted_many_times_ends_as_one_that_never_was(
    endpoint: str, tmp_path: pathlib.Path, kind: str, rng: random.Random
) -> None:
    interrupted.rank_processes.start_server()
    with real_worker.running(endpoint):
        signals = rng.choices([signal.SIGTERM, signal.SIGKILL], k=15)
        print(interrupted.interrupted(kind, tmp_path, endpoint, steps=60, rng=rng, signals=signals))
