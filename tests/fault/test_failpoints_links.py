"""SIGKILL, an error, a long wait where a rank with another worker links that with the workers of the other nodes.

Promises P3, P6 and P13: all ranks or none; every rank hears of the end; and the save after it works.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import rank_processes
import torch
import worker_pair
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, limit_commits

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.failing_process import ACTIONS, At
from tests.failpoint_groups import LINKS

pytestmark = pytest.mark.fault

PATIENT_S, SHORT_S = 60.0, 4.0
"""Limits of commits that are to work, and of those that wait for a dead rank."""


@pytest.fixture(scope="module", autouse=True)
def _ranks_server() -> None:
    rank_processes.start_server()


@pytest.fixture
def places() -> Iterator[worker_pair.Places]:
    with worker_pair.empty_places() as found:
        yield found


@pytest.fixture
def workers(places: worker_pair.Places) -> Iterator[list[RealWorker]]:
    with worker_pair.both_running(places) as found:
        yield found


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((100_000,), float(step)), "step": step}


def is_listed(path: pathlib.Path, step: int) -> bool:
    """Whether there is a checkpoint; then it is whole."""
    if not (path / "manifest.json").exists():
        return False
    assert verify_checkpoint(str(path), Files()).faults == []
    found = asyncckpt.load(path, source="disk")
    return bool(torch.equal(found["w"], state_of(step)["w"]) and found["step"] == step)


def saves(rank: int, places: worker_pair.Places, root: str, who: int, action: str, point: str) -> None:
    """Save three times when the test says so; one rank meets `action` in the second. Says how each has ended."""
    observer = At(point, ACTIONS[action])
    with AsyncCheckpointer(endpoint=places[rank], worker_start_timeout_s=DEADLINE_S) as checkpointer:
        for step in (1, 2, 3):
            talk().hear()
            meets = rank == who and step == 2
            limit_commits(checkpointer, SHORT_S if step == 2 and action in ("kill", "raise") else PATIENT_S)
            with observed(observer) if meets else contextlib.nullcontext():
                handle = checkpointer.save(state_of(step), f"{root}/{step}")
                handle.staged.result(DEADLINE_S)
                talk().say("staged")
                error = handle.written.exception(DEADLINE_S)
            assert observer.met or not meets
            assert error is None or isinstance(error, AsyncCkptError), error
            talk().say("" if error is None else repr(error))


def names(error: str, rank: int) -> bool:
    """Whether the text of an error says that it was this rank."""
    return re.search(rf"\brank {rank}\b|\branks \[{rank}\]", error) is not None


def begin(ranks: rank_processes.Ranks) -> None:
    for rank in (0, 1):
        ranks.send(rank, None)
    assert [ranks.receive(rank) for rank in (0, 1)] == ["staged", "staged"]


SOAK = {(0, "kill"), (1, "raise"), (1, "sleep")}


@pytest.mark.parametrize(
    ("who", "action"),
    [
        pytest.param(who, action, marks=[pytest.mark.soak] if (who, action) in SOAK else [])
        for who in (0, 1)
        for action in ("kill", "raise", "sleep")
    ],
)
@pytest.mark.parametrize("point", LINKS["another worker"])
def test_what_meets_a_rank_whose_next_worker_is_linked_costs_one_save_at_most(
    places: worker_pair.Places, workers: list[RealWorker], tmp_path: pathlib.Path, point: str, who: int, action: str
) -> None:
    other = 1 - who
    with rank_processes.running(2, saves, places, str(tmp_path), who, action, point) as ranks:
        begin(ranks)
        assert [ranks.receive(rank) for rank in (0, 1)] == ["", ""]
        with workers[who].frozen():
            begin(ranks)
            workers[who].kill()
        if action == "kill":
            ranks.processes[who].join(DEADLINE_S)
            assert ranks.processes[who].exitcode == -signal.SIGKILL
            assert names(ranks.receive(other), who)
        else:
            seconds = [ranks.receive(rank) for rank in (0, 1)]
            if action == "raise":
                assert "Input/output error" in seconds[who] and names(seconds[other], who), seconds
            else:
                assert seconds == ["", ""]
            begin(ranks)
            assert [ranks.receive(rank) for rank in (0, 1)] == ["", ""]
            assert is_listed(tmp_path / "3", 3)
            ranks.results()
    assert is_listed(tmp_path / "2", 2) is (action == "sleep")
    if action == "kill":
        with rank_processes.running(2, saves, places, str(tmp_path / "again"), who, "none", point) as ranks:
            begin(ranks)
            assert [ranks.receive(rank) for rank in (0, 1)] == ["", ""]
        assert is_listed(tmp_path / "again" / "1", 1)
