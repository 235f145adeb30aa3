"""SIGKILL, an error, a long wait at the named instants of saves and loads of several ranks, and of several workers.

Promises P3, P9, P13 and P14: all ranks or none; every rank hears of the end, and none waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import rank_processes
import torch
from real_worker import DEADLINE_S, wait_until
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, RankInfo, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.client import worker_links as links
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.failing_process import ACTIONS, At
from tests.failpoint_groups import RANKS, WORKERS, cases
from tests.saving import ENVIRONMENT, ROOT

pytestmark = pytest.mark.fault

LENGTH = 700_000
PATIENT_S, SHORT_S = 60.0, 4.0
"""Timeouts of saves that are to work, or to end before them, and of those that have to end by them."""


@pytest.fixture(scope="module", autouse=True)
def _ranks_server() -> None:
    rank_processes.start_server()


def state_of(rank: int, n: int) -> dict[str, Any]:
    return {"w": torch.full((LENGTH,), float(n)), "own": PerRank(torch.full((5,), float(rank + n))), "n": n}


def is_state(found: Any, rank: int, n: int) -> bool:
    wanted = state_of(rank, n)
    is_own = "own" not in found or torch.equal(found["own"], wanted["own"].value)
    return bool(torch.equal(found["w"], wanted["w"]) and is_own and found["n"] == n)


def is_listed(path: pathlib.Path) -> bool:
    """Whether there is a checkpoint; then it is whole."""
    if not (path / "manifest.json").exists():
        return False
    assert verify_checkpoint(str(path), Files()).faults == []
    return is_state(asyncckpt.load(path, keys=["w", "n"], source="disk"), 0, 1)


def error_of(error: BaseException | None) -> str:
    assert error is None or isinstance(error, (AsyncCkptError, OSError)), error
    return "" if error is None else repr(error)


def saves_first(rank: int, root: str, endpoint: str, timeout_s: float) -> Iterator[str]:
    with AsyncCheckpointer(endpoint=endpoint, plan_timeout_s=timeout_s, commit_timeout_s=timeout_s) as checkpointer:
        for n in (1, 2):
            yield error_of(checkpointer.save(state_of(rank, n), f"{root}/{n}").written.exception(DEADLINE_S))
        assert is_state(checkpointer.load(f"{root}/2"), rank, 2)


def saves_first_of_two_nodes(rank: int, root: str, endpoint: str, timeout_s: float) -> Iterator[str]:
    return saves_first(rank, root, endpoint if rank == 0 else f"{endpoint}2", timeout_s)


def saves_without_a_worker(rank: int, root: str, endpoint: str, timeout_s: float) -> Iterator[str]:
    with SyncCheckpointer(plan_timeout_s=timeout_s, commit_timeout_s=timeout_s) as checkpointer:
        for n in (1, 2):
            try:
                checkpointer.save(state_of(rank, n), f"{root}/{n}")
            except (AsyncCkptError, OSError) as error:
                yield error_of(error)
            else:
                yield ""
        assert is_state(checkpointer.load(f"{root}/2"), rank, 2)


def loads_together(rank: int, root: str, endpoint: str, timeout_s: float) -> Iterator[str]:
    for _ in (1, 2):
        try:
            found = asyncckpt.load(f"{root}/0", keys=["w", "n"], redundant_reads="broadcast")
        except (AsyncCkptError, OSError) as error:
            yield error_of(error)
        else:
            assert is_state(found, rank, 0)
            yield ""


WAYS = {
    "first save": saves_first,
    "first save of two nodes": saves_first_of_two_nodes,
    "save without a worker": saves_without_a_worker,
    "load that is shared": loads_together,
}


def patience_s(point: str, action: str) -> float:
    """Return the timeout: a rank that dies before it has met the others is waited for, any other is missed at once."""
    return SHORT_S if action == "kill" and point in ("ranks: meeting", "ranks: telling") else PATIENT_S


def who_meets(point: str) -> int:
    return 0 if point == "ranks: leading" else 1


def takes_part(rank: int, way: str, point: str, action: str, root: str, endpoint: str) -> list[str]:
    """Do something twice; one rank meets `action` the first time. Returns how both ended, "" if well."""
    ended = WAYS[way](rank, root, endpoint, patience_s(point, action))
    observer = At(point, ACTIONS[action])
    torch.distributed.barrier()  # from here on nobody comes late
    with observed(observer) if rank == who_meets(point) else contextlib.nullcontext():
        found = [next(ended)]
    if action == "kill":
        return found
    assert rank != who_meets(point) or observer.met
    return found + list(ended)


def names(error: str, rank: int) -> bool:
    """Whether the text of an error says that it was this rank."""
    return re.search(rf"\brank {rank}\b|\branks \[{rank}\]", error) is not None


@pytest.mark.parametrize("action", ["kill", "raise", "sleep"])
@pytest.mark.parametrize(("way", "point"), cases(RANKS))
def test_what_meets_one_rank_ends_on_all_and_the_next_one_works(
    endpoint: str, tmp_path: pathlib.Path, way: str, point: str, action: str
) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"w": torch.zeros(LENGTH), "n": 0}, tmp_path / "0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(Here(endpoint)))
        if way == "first save of two nodes":
            stack.enter_context(contextlib.closing(Here(f"{endpoint}2")))
        bad = who_meets(point)
        arguments = (way, point, action, str(tmp_path), endpoint)
        ranks = stack.enter_context(rank_processes.running(2, takes_part, *arguments))
        if action == "kill":
            (first,) = ranks.receive(1 - bad)
            ranks.processes[bad].join(DEADLINE_S)
            assert ranks.processes[bad].exitcode == -signal.SIGKILL
            assert names(first, bad), first
        else:
            results = ranks.results()
            firsts = [first for first, _ in results]
            if action == "raise":
                assert names(firsts[1 - bad], bad) and all("Input/output error" in first for first in firsts), results
            else:
                assert firsts == ["", ""], results
            assert [second for _, second in results] == ["", ""], results
    assert is_listed(tmp_path / "1") == (action == "sleep" and way != "load that is shared")


# ---- several workers ------------------------------------------------------------------------------------------------


@pytest.fixture
def places() -> Iterator[tuple[str, str]]:
    """Endpoints of two workers, each as if it were a node's."""
    directory = tempfile.mkdtemp(prefix="ackpt-", dir="/tmp")
    yield f"ipc://{directory}/a.sock", f"ipc://{directory}/b.sock"
    shutil.rmtree(directory, ignore_errors=True)


def saves_at(rank: int, places: tuple[str, str], root: str, timeout_s: float, *numbers: int) -> list[str]:
    links.FOLLOW_TIMEOUT_S = min(links.FOLLOW_TIMEOUT_S, timeout_s / 2)  # of this process, which saves no more
    fields: dict[str, Any] = {"commit_timeout_s": timeout_s, "on_worker_loss": "fail", "plan_timeout_s": PATIENT_S}
    with AsyncCheckpointer(endpoint=places[rank], **fields) as checkpointer:
        handles = []
        for n in numbers:
            handles.append(checkpointer.save(state_of(rank, n), f"{root}/{n}"))
            handles[-1].written.exception(DEADLINE_S)
        return [error_of(handle.written.exception(0)) for handle in handles]


@pytest.mark.parametrize("action", ["raise", "sleep"])
@pytest.mark.parametrize("point", WORKERS["two nodes"])
def test_an_error_or_a_wait_between_workers_costs_one_save_at_most(
    places: tuple[str, str], tmp_path: pathlib.Path, point: str, action: str
) -> None:
    observer = At(point, ACTIONS[action])
    with contextlib.closing(Here(places[0])), contextlib.closing(Here(places[1])), observed(observer):
        results = rank_processes.run(2, saves_at, places, str(tmp_path), PATIENT_S, 1, 2)
        wait_until(lambda: observer.met, point)  # the last of them comes when both ranks have ended
    is_lost = action == "raise" and point not in (
        "peers: sending", "peers: received",  # it is said again until it is heard
        "peers: disconnecting",
    )  # fmt: skip
    if is_lost:
        bad = 1 if point == "peers: connecting" else 0  # the worker beside rank 0 leads, and commits
        assert names(results[1 - bad][0], bad), results
        assert all("Input/output error" in first for first, _ in results), results
    else:
        assert [first for first, _ in results] == ["", ""], results
    assert [second for _, second in results] == ["", ""]
    assert is_listed(tmp_path / "1") == (not is_lost)


@pytest.mark.parametrize(
    ("point", "which"),
    [
        ("peers: received", 1),
        ("peers: sending", 1),
        ("peers: connecting", 1),
        ("peers: listening", 0),
        pytest.param("commit: others seen", 0, marks=pytest.mark.soak),
        pytest.param("peers: received", 0, marks=pytest.mark.soak),
        pytest.param("peers: sending", 0, marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_is_killed_among_several_lists_nothing_in_part(
    places: tuple[str, str], tmp_path: pathlib.Path, point: str, which: int
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(Here(places[1 - which])))
        command = [sys.executable, "-m", "tests.failing_process", "worker", places[which], "kill", "1", point]
        process = stack.enter_context(subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL))
        wait_until(lambda: os.path.exists(places[which].removeprefix("ipc://")), "it listens")
        results = rank_processes.run(2, saves_at, places, str(tmp_path), 2 * SHORT_S, 1)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        assert all(first for (first,) in results), results
        assert not is_listed(tmp_path / "1")
        stack.enter_context(contextlib.closing(Here(places[which])))
        assert rank_processes.run(2, saves_at, places, str(tmp_path), PATIENT_S, 1) == [[""], [""]]
    assert is_listed(tmp_path / "1")


def test_a_worker_that_is_killed_when_it_parts_from_the_others_has_lost_nothing(
    places: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    with contextlib.closing(Here(places[0])):
        command = [
            sys.executable,
            "-m",
            "tests.failing_process",
            "worker",
            places[1],
            "kill",
            "1",
            "peers: disconnecting",
        ]
        with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: os.path.exists(places[1].removeprefix("ipc://")), "it listens")
            assert rank_processes.run(2, saves_at, places, str(tmp_path), PATIENT_S, 1, 2) == [["", ""], ["", ""]]
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        with contextlib.closing(Here(places[1])):
            assert rank_processes.run(2, saves_at, places, str(tmp_path / "next"), PATIENT_S, 1) == [[""], [""]]
    assert is_listed(tmp_path / "1") and (tmp_path / "2" / "manifest.json").exists()
    assert is_listed(tmp_path / "next" / "1")
