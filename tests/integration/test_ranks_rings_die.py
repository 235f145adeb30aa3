"""Ranks on several workers, whose states go through windows: a death in the middle ends the save on all of them."""

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
from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.memory.streaming import Counters
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
    await_cell = SlotStream.await_cell
    stops: list[int] = []
    endpoint = places[rank % 2]
    with AsyncCheckpointer(
        endpoint=endpoint, worker_start_timeout_s=DEADLINE_S, arena_limit_bytes=LIMIT, staging="blocking", **fields
    ) as checkpointer:

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
            step, stops[:] = order
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            error = handle.written.exception(2 * DEADLINE_S)
            talk().say(str(getattr(error, "code", error)) if error else "")


def is_whole(root: pathlib.Path, step: int) -> None:
    assert verify_checkpoint(str(root / str(step)), Files()).state == "ok"
    states.assert_same(asyncckpt.load(root / str(step), source="disk"), state_of(step))
    assert manifest_of(root / str(step))["world_size"] == 2


def saves_undisturbed(ranks: rank_processes.Ranks, root: pathlib.Path, step: int) -> None:
    for rank in (0, 1):
        ranks.send(rank, (step, []))
    assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == ["", ""]
    is_whole(root, step)


def is_lost(root: pathlib.Path, step: int) -> None:
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
    dies: list[int], fields: dict[str, Any], places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), fields) as ranks:
        saves_undisturbed(ranks, tmp_path, 1)
        for rank in (0, 1):
            ranks.send(rank, (2, [5]))
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [5, 5]
        for n in dies:
            workers[n].kill()
        for rank in (0, 1):
            ranks.send(rank, "go on")
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == ["stream_lost", "stream_lost"]
        is_lost(tmp_path, 2)
        saves_undisturbed(ranks, tmp_path, 3)
        for rank in (0, 1):
            ranks.send(rank, None)
        ranks.results()


@pytest.mark.parametrize(
    ("ends", "fields"),
    [
        pytest.param(0, {}, id="rank 0", marks=SOAK),
        pytest.param(1, {"files_per_rank": 2}, id="rank 1"),
    ],
)
def test_a_trainer_that_is_killed_while_its_window_is_filled_ends_the_save_and_leaves_nothing(
    ends: int, fields: dict[str, Any], places: tuple[str, str], workers: list[RealWorker], tmp_path: pathlib.Path
) -> None:
    with rank_processes.running(2, saves_when_told, places, str(tmp_path), fields) as ranks:
        saves_undisturbed(ranks, tmp_path, 1)
        for rank in (0, 1):
            ranks.send(rank, (2, [5]))
        assert [ranks.receive(rank, 2 * DEADLINE_S) for rank in (0, 1)] == [5, 5]
        ranks.kill(ends)
        ranks.send(1 - ends, "go on")
        assert ranks.receive(1 - ends, 2 * DEADLINE_S) == "not_sealed"
        is_lost(tmp_path, 2)
        ranks.kill(1 - ends)
