"""Two ranks with a worker each, of which random ones are killed at random instants: every save succeeds all the same.

No more are killed during one save than memory is handed on for (`failover.MAX_HANDOVERS`), and there is time enough.
"""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import worker_pair
from rank_processes import talk
from real_worker import RealWorker, is_served, status_of

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client.failover import MAX_HANDOVERS
from asyncckpt.errors import WorkerUnavailableError

pytestmark = [pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(3000)]

SAVES = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "50")) // 2
PATIENCE_S = 120.0
LOOK_S = 10.0
"""For a worker that is being started, or is dead and still holds its lock."""


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """What the ranks are forked from, started before a test could be blamed for its pipes."""
    rank_processes.start_server()


@pytest.fixture
def places() -> Iterator[worker_pair.Places]:
    """Two endpoints of this test alone."""
    with worker_pair.empty_places() as found:
        yield found


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(3000, 500, generator=generator), "step": step}


def saves(rank: int, places: tuple[str, str], root: str) -> None:
    settings = {"commit_timeout_s": PATIENCE_S, "worker_start_timeout_s": PATIENCE_S, "worker_timeout_s": 30.0}
    with AsyncCheckpointer(endpoint=places[rank], **settings) as checkpointer:  # type: ignore[arg-type]
        while (step := talk().hear(PATIENCE_S)) is not None:
            error: BaseException | None
            try:
                error = checkpointer.save(state_of(step), f"{root}/{step}").written.exception(2 * PATIENCE_S)
            except asyncckpt.AsyncCkptError as raised:
                error = raised
            talk().say("" if error is None else f"{type(error).__name__}: {error}")


def kill_some(places: tuple[str, str], rng: random.Random) -> list[str]:
    """Kill up to two workers, one after the other or the same twice; returns which, and after how long."""
    killed = []
    for _ in range(rng.choice((0, 1, 1, 2, min(2, MAX_HANDOVERS - 1)))):
        pause, which = rng.random() ** 2 * 0.4, rng.randrange(2)
        time.sleep(pause)
        if not is_served(
            places[which]
        ):  # killed once: where no save is in flight any more, the next one starts another
            continue
        try:
            worker = status_of(places[which], LOOK_S)
        except WorkerUnavailableError:
            continue
        os.kill(worker["pid"], signal.SIGKILL)
        killed.append(f"{which} after {pause:.3f} s")
    return killed


def test_every_save_succeeds_on_all_ranks_though_workers_are_killed(
    places: tuple[str, str],
    tmp_path: pathlib.Path,
    rng: random.Random,
    record_property: Callable[[str, object], None],
) -> None:
    for endpoint in places:
        real_worker.launcher.start_worker(endpoint)
        RealWorker(endpoint)
    kills, wrong = 0, []
    with rank_processes.running(2, saves, places, str(tmp_path)) as ranks:
        for step in range(SAVES):
            for rank in (0, 1):
                ranks.send(rank, step)
            if step == 0:  # in the first one they are linked, which is no save in flight yet
                found, killed = [ranks.receive(rank, 3 * PATIENCE_S) for rank in (0, 1)], []
            else:
                killed = kill_some(places, rng)
                found = [ranks.receive(rank, 3 * PATIENCE_S) for rank in (0, 1)]
            kills += len(killed)
            if found != ["", ""]:
                wrong.append((step, killed, found, (tmp_path / str(step) / "manifest.json").exists()))
            else:
                loaded = asyncckpt.load(tmp_path / str(step))
                assert torch.equal(loaded["large"], state_of(step)["large"])
            shutil.rmtree(tmp_path / str(step - 2), ignore_errors=True)
        for rank in (0, 1):
            ranks.send(rank, None)
        ranks.results()
    record_property("count", kills)
    assert not wrong, wrong
