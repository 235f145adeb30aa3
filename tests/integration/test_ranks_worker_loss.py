"""Ranks whose workers die: others take over, and the same saves end well; rings that are lost end on all ranks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch
from own_worker import REPOSITORY, dying_worker, lose
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, manifest_of, slots_of, stop_whoever_serves, wait_until
from worker_pair import Places

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.memory.streaming import Counters
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

SOAK = pytest.mark.soak


def state_of(step: int) -> dict[str, Any]:
    """Return what the ranks split: 6 MB each, more than 20 segments of a ring."""
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(6000, 500, generator=generator), "step": step}


def assert_whole(root: pathlib.Path, step: int) -> None:
    assert verify_checkpoint(str(root / str(step)), Files()).state == "ok"
    states.assert_same(asyncckpt.load(root / str(step), source="disk"), state_of(step))
    assert manifest_of(root / str(step))["world_size"] == 2


# ---- one worker, which dies at a call of its storage


def saves(rank: int, root: str) -> list[Any]:
    outcome = []
    with AsyncCheckpointer(commit_timeout_s=30) as checkpointer:
        for step in range(3):
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            report = handle.written.result(DEADLINE_S)
            outcome.append((report.details.get("resubmitted", 0), report.details.get("kept")))
    return outcome


@pytest.mark.parametrize(
    ("kill", "kept"),
    [
        pytest.param("pwrite:1:9:1", {False}, id="while it writes", marks=SOAK),
        pytest.param("close:10:9:1", {False, True}, id="while some files are durable"),
        pytest.param("link:1:9:0", {True}, id="before the manifest stands"),
        pytest.param("link:1:9:1", {None}, id="after the manifest stands"),
    ],
)
def test_both_ranks_go_on_with_the_next_worker(
    kill: str, kept: set[bool | None], endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(endpoint_dir), "ASYNCCKPT_JOB": "dies"}
    with dying_worker(kill, environ):
        results = rank_processes.run(2, saves, str(tmp_path), environ=environ)
    for rank in results:
        # Where the manifest stands the other rank's memory may be enough for the next worker to tell both of it.
        assert rank[0][0] in ({0, 1} if kept == {None} else {1})
        assert [resubmitted for resubmitted, _ in rank[1:]] == [0, 0]
        assert rank[0][1] in kept
    assert any(rank[0][0] for rank in results)
    for step in range(3):
        assert_whole(tmp_path, step)


# ---- two workers, as of two nodes


def saves_when_told(rank: int, places: Places, root: str, fields: dict[str, Any]) -> None:
    """Save each step that the test names; say that it is staged, and how it has ended.

    With a step come the segments ahead of which the rank stops, says so, and waits.
    """
    await_cell = SlotStream.await_cell
    stops: list[int] = []
    settings = {"endpoint": places[rank % 2], "worker_start_timeout_s": DEADLINE_S, **fields}
    with AsyncCheckpointer(**settings) as checkpointer:

        def held(stream: SlotStream, number: int) -> None:
            if number in stops:
                (slot,) = slots_of(checkpointer)
                counters = Counters(slot.memory, slot.generation)
                wait_until(lambda: stream.ring.count_in(counters.freed) == number, "all that is filled is written")
                talk().say(number)
                talk().hear()
            await_cell(stream, number)

        SlotStream.await_cell = held  # type: ignore[method-assign]
        while (order := talk().hear()) is not None:
            step, *stops[:] = order
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            handle.staged.exception(2 * DEADLINE_S)
            talk().say("staged")
            error = handle.written.exception(2 * DEADLINE_S)
            if error:
                talk().say((type(error).__name__, getattr(error, "code", ""), getattr(error, "rank", None)))
            else:
                talk().say(("", dict(handle.written.result().details)))


def begin(ranks: rank_processes.Ranks, step: int, *which: int) -> None:
    for rank in which or (0, 1):
        ranks.send(rank, (step,))
    staged(ranks, *which)


def staged(ranks: rank_processes.Ranks, *which: int) -> None:
    for rank in which or (0, 1):
        assert ranks.receive(rank, 2 * DEADLINE_S) == "staged"


def ends(ranks: rank_processes.Ranks, root: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Wait until a save has succeeded on both ranks; returns the details of their reports."""
    found = [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)]
    assert [error for error, _ in found] == ["", ""]
    assert_whole(root, step)
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
        pytest.param([0, 1], id="both", marks=SOAK),
    ],
)
def test_the_same_futures_complete_on_all_ranks_when_a_worker_is_killed_with_a_save_in_flight(
    dies: list[int], places: Places, workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), {}) as ranks:
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
    places: Places, workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), {}) as ranks:
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
        pytest.param(0, id="before the manifest stands", marks=SOAK),
        pytest.param(1, id="after the manifest stands"),
    ],
)
def test_a_leader_that_dies_as_it_commits_is_followed_by_one_that_finds_out(
    late: int, places: Places, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-m", "tests.killing_worker", places[0], f"link:1:9:{late}"]
    with subprocess.Popen(command, cwd=REPOSITORY) as dying, real_worker.running(places[1]):
        try:
            RealWorker(places[0])
            with rank_processes.running(2, saves_when_told, places, str(tmp_path), {}) as ranks:
                begin(ranks, 1)
                assert dying.wait(DEADLINE_S) == -9
                assert (tmp_path / "1" / "manifest.json").exists() or not late
                ends(ranks, tmp_path, 1)
                goes_on(ranks, tmp_path, 2)
        finally:
            dying.kill()


def test_a_follower_whose_memory_is_not_handed_on_ends_the_save_on_the_other_ranks_too(
    places: Places, workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), {"on_worker_loss": "fail"}) as ranks:
        begin(ranks, 1)
        ends(ranks, tmp_path, 1)
        with workers[1].frozen():
            begin(ranks, 2)
            workers[1].kill()
        assert ranks.receive(1)[0] == "WorkerUnavailableError"
        ranks.send(1, (3,))  # with another worker, which is told what became of the one before
        kind, code, rank = ranks.receive(0)
        assert kind == "SaveFailedError" and code in ("withdrawn", "worker_lost") and rank == 1
        ranks.send(0, (3,))
        staged(ranks)
        ends(ranks, tmp_path, 3)
        goes_on(ranks, tmp_path)


# ---- and rings: states that are larger than the memory for them

RING: dict[str, Any] = {"arena_limit_bytes": 2_000_000, "staging": "blocking"}


def stop_both(ranks: rank_processes.Ranks, root: pathlib.Path) -> None:
    """Save once, and let both ranks fill a part of their rings in a second save."""
    begin(ranks, 1)
    ends(ranks, root, 1)
    for rank in (0, 1):
        ranks.send(rank, (2, 5))
    assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [5, 5]


def assert_lost(root: pathlib.Path, step: int) -> None:
    wait_until(lambda: not list((root / str(step)).glob("rank-*")), "what was written is removed")
    assert not (root / str(step) / "manifest.json").exists()


@pytest.mark.parametrize(
    ("dies", "fields"),
    [
        pytest.param([1], {}, id="a follower"),
        pytest.param([0], {"files_per_rank": 2}, id="the leader"),
        pytest.param([0, 1], {"layout": "dcp"}, id="both", marks=SOAK),
        pytest.param([0], {"keep_in_memory": "none"}, id="the leader, nothing kept", marks=SOAK),
    ],
)
def test_a_worker_of_several_nodes_that_dies_while_windows_are_filled_ends_the_save_on_all_ranks(
    dies: list[int], fields: dict[str, Any], places: Places, workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), {**RING, **fields}) as ranks:
        stop_both(ranks, tmp_path)
        for n in dies:
            workers[n].kill()
        for rank in (0, 1):
            ranks.send(rank, "go on")
        staged(ranks)
        assert [ranks.receive(rank, 2 * DEADLINE_S)[1] for rank in (0, 1)] == ["stream_lost", "stream_lost"]
        assert_lost(tmp_path, 2)
        goes_on(ranks, tmp_path, 3)


@pytest.mark.parametrize(
    ("dies", "fields"),
    [
        pytest.param(0, {}, id="rank 0", marks=SOAK),
        pytest.param(1, {"files_per_rank": 2}, id="rank 1"),
    ],
)
def test_a_trainer_that_is_killed_while_its_window_is_filled_ends_the_save_and_leaves_nothing(
    dies: int, fields: dict[str, Any], places: Places, workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), {**RING, **fields}) as ranks:
        stop_both(ranks, tmp_path)
        ranks.kill(dies)
        ranks.send(1 - dies, "go on")
        staged(ranks, 1 - dies)
        assert ranks.receive(1 - dies, 2 * DEADLINE_S)[1] == "not_sealed"
        assert_lost(tmp_path, 2)
        ranks.kill(1 - dies)


# ---- and then the trainer dies: what had been committed before is in the next worker's memory all the same


def loses_its_worker(rank: int, root: str, saves_again: bool) -> None:
    checkpointer = AsyncCheckpointer(keep_in_memory="latest")
    checkpointer.save(state_of(1), f"{root}/1").written.result(DEADLINE_S)
    lose(checkpointer)
    if saves_again:
        assert checkpointer.save(state_of(2), f"{root}/2").written.result(DEADLINE_S)
    talk().say(checkpointer._process.endpoint)  # type: ignore[attr-defined]
    time.sleep(DEADLINE_S)


@pytest.mark.parametrize("saves_again", [False, True], ids=["no save since", "a save since"])
def test_a_snapshot_that_is_kept_outlives_worker_and_trainer(
    saves_again: bool, endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environ, newest = {"XDG_RUNTIME_DIR": str(endpoint_dir)}, 1 + saves_again
    with rank_processes.running(1, loses_its_worker, str(tmp_path), saves_again, environ=environ) as ranks:
        endpoint = ranks.receive(0)
        try:

            def held() -> list[int]:
                return [snapshot.step for snapshot in asyncckpt.held_snapshots(tmp_path, endpoint=endpoint)]

            wait_until(lambda: held() == list(range(newest, 0, -1)), "the next worker has what the trainer held")
            ranks.kill()
            wait_until(lambda: not RealWorker(endpoint).status()["sessions"], "the trainer's death is noticed")
            with AsyncCheckpointer(endpoint=endpoint) as restarted:
                states.assert_same(restarted.load(tmp_path / str(newest), source="memory"), state_of(newest))
        finally:
            stop_whoever_serves(endpoint)
