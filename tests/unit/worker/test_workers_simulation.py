"""Two and three workers' cores under thousands of random schedules: a lossy network, partitions, deaths.

Where workers are only killed, and others take over in time, every save that was staged everywhere must be committed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from simulated_workers import Workers

from asyncckpt.protocol.node_tables import BEAT_S
from asyncckpt_worker.core.nodes.leader import FORGET_S

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
        print(f"schedule {schedule}: Workers({seed}, n_nodes={n_nodes}, chaos={chaos}, deaths={deaths}).run({STEPS})")
        Workers(seed, n_nodes=n_nodes, chaos=chaos, deaths=deaths).run(STEPS)


@pytest.mark.parametrize("n_nodes", [2, 3])
@pytest.mark.parametrize("chaos", [0.0, 0.3])
@pytest.mark.parametrize("deaths", [False, True])
def test_workers_that_take_over_from_dead_ones_keep_every_promise(
    n_nodes: int, chaos: float, deaths: bool, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    resumed = 0
    for schedule in range(100 * SCHEDULES):
        if schedule >= SCHEDULES and resumed:
            break  # two of three schedules commit what was handed over
        record_property("count", schedule + 1)
        seed, kills = rng.getrandbits(32), rng.choice((0.003, 0.01, 0.02))
        world = Workers(seed, n_nodes=n_nodes, chaos=chaos, deaths=deaths, kills=kills)
        about = f"{seed}, n_nodes={n_nodes}, chaos={chaos}, deaths={deaths}, kills={kills}"
        print(f"schedule {schedule}: Workers({about}).run({STEPS})")
        world.run(STEPS)
        resumed += len(world.resumed & set(world.commits))
    assert resumed


@pytest.mark.parametrize("n_nodes", [2, 3])
@pytest.mark.parametrize("chaos", [0.0, 0.2])
def test_a_node_that_was_cut_off_for_longer_than_it_is_remembered_takes_part_again(
    n_nodes: int, chaos: float, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", SCHEDULES)
    for schedule in range(SCHEDULES):
        seed = rng.getrandbits(32)
        world = Workers(seed, n_nodes=n_nodes, chaos=chaos, deaths=False)
        print(f"schedule {schedule}: Workers({seed}, n_nodes={n_nodes}, chaos={chaos}, deaths=False)")
        world.spawn_run()
        world.live(STEPS)
        world.part(1, FORGET_S + 2 * BEAT_S)
        world.live(STEPS)
        world.settle()


def test_the_simulation_reaches_every_outcome(rng: random.Random) -> None:
    heard, outcomes = set[str](), {"committed", "failed", "unknown"}
    for _ in range(100):
        world = Workers(rng.getrandbits(32), n_nodes=2, chaos=0.1, deaths=True)
        world.run(STEPS)
        heard |= set().union(*world.heard.values())
        if heard == outcomes:
            return
    raise AssertionError(heard)
