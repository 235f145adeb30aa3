"""Ranks that have several workers, of which some die: others take over, and the same saves end well."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, manifest_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(2000, 300, generator=generator), "step": step}


def saves_when_told(rank: int, places: tuple[str, str], root: str) -> None:
    """Save at each step that the test names, and say that it is staged, and how it has ended."""
    with AsyncCheckpointer(endpoint=places[rank % 2], worker_start_timeout_s=DEADLINE_S) as checkpointer:
        while (step := talk().hear()) is not None:
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            handle.staged.result(DEADLINE_S)
            talk().say("staged")
            error = handle.written.exception(DEADLINE_S)
            report = {} if error else handle.written.result().details
            talk().say((repr(error) if error else "", dict(report)))


def begin(ranks: rank_processes.Ranks, step: int, *which: int) -> None:
    for rank in which or (0, 1):
        ranks.send(rank, step)
    assert [ranks.receive(rank) for rank in which or (0, 1)] == ["staged"] * len(which or (0, 1))


def ends(ranks: rank_processes.Ranks, root: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Wait until a save has succeeded on both ranks; returns the details of their reports."""
    found = [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)]
    assert [error for error, _ in found] == ["", ""]
    states.assert_same(asyncckpt.load(root / str(step)), state_of(step))
    assert manifest_of(root / str(step))["world_size"] == 2
    return [details for _, details in found]


def goes_on(ranks: rank_processes.Ranks, root: pathlib.Path, *steps: int) -> None:
    for step in steps:
        begin(ranks, step)
        ends(ranks, root, step)
    for rank in (0, 1):
        ranks.send(rank, None)
    ranks.results()


def is_durable(endpoint: str) -> bool:
    """Whether rank 1 is, in the save that the worker has begun last."""
    saves = real_worker.status_of(endpoint)["saves"]
    return bool(saves) and saves[-1]["ranks"] == {"1": "durable"}


@pytest.mark.parametrize(
    "dies",
    [
        pytest.param([1], id="a follower"),
        pytest.param([0], id="the leader"),
        pytest.param([0, 1], id="both", marks=pytest.mark.soak),
    ],
)
def test_the_same_futures_complete_on_all_ranks_when_a_worker_is_killed_with_a_save_in_flight(
    dies: list[int], places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path)) as ranks:
        begin(ranks, 1)
        ends(ranks, tmp_path, 1)
        with contextlib.ExitStack() as frozen:
            for n in dies:
                frozen.enter_context(workers[n].frozen())
            begin(ranks, 2)
            for n in dies:
                workers[n].kill()
        details = ends(ranks, tmp_path, 2)
        assert [n for n in (0, 1) if details[n].get("resubmitted")] == dies
        goes_on(ranks, tmp_path, 3, 4)


def test_what_a_follower_had_made_durable_is_not_written_again(
    places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path)) as ranks:
        begin(ranks, 1)
        ends(ranks, tmp_path, 1)
        begin(ranks, 2, 1)
        wait_until(lambda: is_durable(places[1]), "rank 1 is durable")
        shards = {path.name: os.stat(path).st_ino for path in (tmp_path / "2").glob("rank-00001*.safetensors")}
        workers[1].kill()
        wait_until(lambda: is_durable(places[1]), "the next worker has found that rank 1 is durable")
        begin(ranks, 2, 0)
        details = ends(ranks, tmp_path, 2)
        assert details[1]["kept"] is True and details[1]["resubmitted"] == 1 and "resubmitted" not in details[0]
        assert shards and {path: os.stat(tmp_path / "2" / path).st_ino for path in shards} == shards
        goes_on(ranks, tmp_path, 3)


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(0, id="before the manifest stands", marks=pytest.mark.soak),
        pytest.param(1, id="after the manifest stands"),
    ],
)
def test_a_leader_that_dies_as_it_commits_is_followed_by_one_that_finds_out(
    late: int, places: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "tests.killing_worker", places[0], f"link:1:9:{late}"]
    with subprocess.Popen(command, cwd=REPOSITORY) as dying, real_worker.running(places[1]):
        try:
            RealWorker(places[0])
            with rank_processes.running(2, saves_when_told, places, str(tmp_path)) as ranks:
                begin(ranks, 1)
                assert dying.wait(DEADLINE_S) == -9
                assert (tmp_path / "1" / "manifest.json").exists() or not late
                ends(ranks, tmp_path, 1)
                goes_on(ranks, tmp_path, 2)
        finally:
            dying.kill()


def test_a_follower_whose_memory_is_not_handed_on_ends_the_save_on_the_other_ranks_too(
    places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, fails_by_choice, places, str(tmp_path)) as ranks:
        assert [ranks.receive(rank) for rank in (0, 1)] == ["ready"] * 2
        with workers[1].frozen():
            for rank in (0, 1):
                ranks.send(rank, "save")
            assert [ranks.receive(rank) for rank in (0, 1)] == ["staged"] * 2
            workers[1].kill()
        assert ranks.receive(1)[0] == "WorkerUnavailableError"
        kind, facts = ranks.receive(0)
        assert kind == "SaveFailedError" and facts["code"] in ("withdrawn", "worker_lost") and facts["rank"] == 1
        ranks.results()


def fails_by_choice(rank: int, places: tuple[str, str], root: str) -> None:
    with AsyncCheckpointer(endpoint=places[rank % 2], on_worker_loss="fail") as checkpointer:
        checkpointer.save(state_of(1), f"{root}/1").written.result(DEADLINE_S)
        talk().say("ready")
        talk().hear()
        handle = checkpointer.save(state_of(2), f"{root}/2")
        handle.staged.result(DEADLINE_S)
        talk().say("staged")
        error = handle.written.exception(DEADLINE_S)
        talk().say((type(error).__name__, error.facts()))  # type: ignore[attr-defined, union-attr]
        checkpointer.save(state_of(3), f"{root}/3")  # with another worker, which is told what became of the one before
