"""Ranks on several workers, whose states go through rings: workers die in the middle, others go on, nothing is lost."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import states
import torch
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, manifest_of, slots_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.memory.ring import Counters
from asyncckpt.staging.ring_copy import RingCopy
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

LIMIT = 2_000_000
SOAK = pytest.mark.soak


def state_of(step: int) -> dict[str, Any]:
    """Return what the ranks split: 6 MB each, more than 20 segments."""
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(6000, 500, generator=generator), "step": step}


def saves_when_told(rank: int, places: tuple[str, str], root: str, fields: dict[str, Any]) -> None:
    """Save each step that the test names, and stop ahead of the segments that it names with it, until it says so."""
    await_cell = RingCopy._await_cell
    stops: list[int] = []
    endpoint = places[rank % 2]
    with AsyncCheckpointer(
        endpoint=endpoint, worker_start_timeout_s=DEADLINE_S, arena_limit_bytes=LIMIT, staging="blocking", **fields
    ) as checkpointer:

        def held(copy: RingCopy, number: int) -> None:
            if number in stops:
                (slot,) = slots_of(checkpointer)
                counters = Counters(slot.memory, slot.generation)
                wait_until(lambda: counters.freed == number, "all that is filled is written")
                talk().say(number)
                talk().hear()
            await_cell(copy, number)

        RingCopy._await_cell = held  # type: ignore[method-assign]
        while (order := talk().hear()) is not None:
            step, stops[:] = order
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            error = handle.written.exception(2 * DEADLINE_S)
            talk().say(repr(error) if error else "")


def is_whole(root: pathlib.Path, step: int) -> None:
    assert verify_checkpoint(str(root / str(step)), Files()).state == "ok"
    states.assert_same(asyncckpt.load(root / str(step), source="disk"), state_of(step))
    assert manifest_of(root / str(step))["world_size"] == 2


def saves_undisturbed(ranks: rank_processes.Ranks, root: pathlib.Path, step: int) -> None:
    for rank in (0, 1):
        ranks.send(rank, (step, []))
    assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == ["", ""]
    is_whole(root, step)


@pytest.mark.parametrize(
    ("dies", "fields"),
    [
        pytest.param([[1]], {}, id="a follower", marks=SOAK),
        pytest.param([[0]], {}, id="the leader"),
        pytest.param([[0, 1]], {}, id="both", marks=SOAK),
        pytest.param([[1], [0]], {"files_per_rank": 2}, id="the follower, then the leader", marks=SOAK),
        pytest.param([[0], [1], [0]], {"layout": "dcp"}, id="in turns", marks=SOAK),
        pytest.param([[0], [0], [0]], {"keep_in_memory": "none"}, id="the leader three times", marks=SOAK),
    ],
)
def test_workers_of_several_nodes_that_die_while_rings_are_filled_cost_nothing(
    dies: list[list[int]],
    fields: dict[str, Any],
    places: tuple[str, str],
    workers: list[RealWorker],
    tmp_path: pathlib.Path,
) -> None:
    stops = [5 + 6 * n for n in range(len(dies))]
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), fields) as ranks:
        saves_undisturbed(ranks, tmp_path, 1)
        for rank in (0, 1):
            ranks.send(rank, (2, stops))
        for stop, which in zip(stops, dies, strict=True):
            assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [stop, stop]
            for n in which:
                RealWorker(places[n]).kill()
            for rank in (0, 1):
                ranks.send(rank, "go on")
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == ["", ""]
        is_whole(tmp_path, 2)
        saves_undisturbed(ranks, tmp_path, 3)
        for rank in (0, 1):
            ranks.send(rank, None)
        ranks.results()


@pytest.mark.parametrize(
    ("ends", "fields"),
    [
        pytest.param(0, {}, id="rank 0", marks=SOAK),
        pytest.param(1, {"files_per_rank": 2}, id="rank 1", marks=SOAK),
    ],
)
def test_a_trainer_that_is_killed_after_its_ring_was_taken_over_ends_the_save_and_leaves_nothing(
    ends: int, fields: dict[str, Any], places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), fields) as ranks:
        saves_undisturbed(ranks, tmp_path, 1)
        for rank in (0, 1):
            ranks.send(rank, (2, [5, 15]))
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [5, 5]
        workers[ends].kill()
        for rank in (0, 1):
            ranks.send(rank, "go on")
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [15, 15]
        ranks.kill(ends)
        ranks.send(1 - ends, "go on")
        assert "Error" in ranks.receive(1 - ends, 2 * DEADLINE_S)
        wait_until(lambda: not list((tmp_path / "2").glob("rank-*")), "what was written is removed")
        assert not (tmp_path / "2" / "manifest.json").exists()
        ranks.kill(1 - ends)
