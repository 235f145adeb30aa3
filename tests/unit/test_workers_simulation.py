"""Two and three workers' brains under thousands of random schedules: a lossy network, partitions, deaths."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from simulated_workers import Workers

SCHEDULES = int(os.environ.get("ASYNCCKPT_TEST_SCHEDULES", "3"))
STEPS = 800


@pytest.mark.parametrize("n_nodes", [2, 3])
@pytest.mark.parametrize(("chaos", "deaths"), [(0.0, False), (0.2, False), (0.05, True), (0.4, True)])
def test_workers_keep_every_promise(
    n_nodes: int, chaos: float, deaths: bool, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    for schedule in range(SCHEDULES):
        seed = rng.getrandbits(32)
        try:
            Workers(seed, n_nodes=n_nodes, chaos=chaos, deaths=deaths).run(STEPS)
        except BaseException:
            print(
                f"schedule {schedule}: Workers({seed}, n_nodes={n_nodes}, chaos={chaos}, deaths={deaths}).run({STEPS})"
            )
            raise


def test_the_simulation_reaches_every_outcome(rng: random.Random) -> None:
    heard, outcomes = set[str](), {"committed", "failed", "unknown"}
    for _ in range(100):
        world = Workers(rng.getrandbits(32), n_nodes=2, chaos=0.1, deaths=True)
        world.run(STEPS)
        heard |= set().union(*world.heard.values())
        if heard == outcomes:
            return
    raise AssertionError(heard)
