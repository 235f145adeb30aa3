"""Overlap and `prepare()` on several ranks: replicas, torn snapshots and withdrawals are all the ranks' affair."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

import overlapping
import pytest
import rank_processes
import states
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until
from torch import nn

import asyncckpt
from asyncckpt import AsyncCheckpointer, AsyncCkptError
from asyncckpt.errors import (
    PlanTimeoutError,
    ReentrantCallError,
    SaveFailedError,
    SnapshotTornError,
    UnsupportedLeafError,
    WorkerUnavailableError,
)
from asyncckpt.staging.cpu_copy import SlotImage

STEPS = 4


def run(worker: RealWorker, function: Any, root: pathlib.Path) -> Any:
    return rank_processes.run(2, function, str(root), environ={"ASYNCCKPT_ENDPOINT": worker.endpoint})


def trains(rank: int, root: str) -> list[Any]:
    overlapping.copy_all_behind()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(300, 2000), nn.Linear(2000, 300)))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with AsyncCheckpointer(overlap_check="hash") as checkpointer:
        checkpointer.attach(optimizer)
        for step in range(STEPS):
            model(torch.randn(4, 300) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.module.state_dict(), "optim": optimizer.state_dict(), "step": step}
            kept.append({name: tensor.clone() for name, tensor in state["model"].items()})
            handle = checkpointer.save(state, f"{root}/{step}")
        checkpointer.wait(DEADLINE_S)
        assert handle.written.exception(0) is None
    return kept


def test_replicas_that_are_copied_behind_the_training_are_one_checkpoint(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    zero, _ = run(shared_worker, trains, tmp_path)
    for step in range(STEPS):
        states.assert_same(dict(asyncckpt.load(tmp_path / str(step), keys=["model"])["model"]), zero[step])


def tears(rank: int, root: str) -> list[str]:
    overlapping.copy_all_behind()
    parameter = nn.Parameter(torch.arange(300_000.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    copy = SlotImage.copy

    def torn(image: SlotImage, tensors: Any, work: Any, *options: Any) -> None:
        if rank == 1 and threading.current_thread().name == "asyncckpt-overlap":
            with torch.no_grad():
                parameter.add_(1)
        copy(image, tensors, work, *options)

    with AsyncCheckpointer() as checkpointer:
        checkpointer.attach(optimizer)
        found = []
        for name in ("before", "torn", "after"):
            if name == "torn":
                SlotImage.copy = torn  # type: ignore[method-assign]
            handle = checkpointer.save({"w": parameter.detach(), "rank": rank}, f"{root}/{name}")
            found.append(type(handle.written.exception(DEADLINE_S)).__name__)
            SlotImage.copy = copy  # type: ignore[method-assign]
            if name == "torn" and rank == 0:
                with torch.no_grad():
                    parameter.add_(1)
        return found


def test_a_snapshot_torn_on_one_rank_ends_on_all_and_the_next_one_works(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    zero, one = run(shared_worker, tears, tmp_path)
    assert zero == ["NoneType", SaveFailedError.__name__, "NoneType"]
    assert one == ["NoneType", SnapshotTornError.__name__, "NoneType"]
    assert not (tmp_path / "torn" / "manifest.json").exists()
    assert torch.equal(asyncckpt.load(tmp_path / "after", keys=["w"])["w"], torch.arange(300_000.0) + 1)


# ---- prepare()


def prepares(rank: int, root: str) -> dict[str, Any]:
    state = {"w": torch.arange(300_000.0), "own": torch.full((3,), float(rank))}
    weights = {"w": state["w"]}
    with AsyncCheckpointer() as checkpointer:
        checkpointer.prepare(state)
        checkpointer.prepare({"more": torch.ones(5), **weights})
        pool: Any = checkpointer._process.pool  # type: ignore[attr-defined]
        pool._allocate = None  # nothing is allocated any more
        first = checkpointer.save(state, f"{root}/a")
        second = None
        if first.written.exception(DEADLINE_S) is None:
            second = checkpointer.save({"more": torch.ones(5), **weights}, f"{root}/b")
            second.written.result(DEADLINE_S)
        return {"error": repr(first.written.exception(0)), "id": str(first.save_id)}


def test_prepare_is_a_collective_and_what_it_agreed_on_is_shared(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    zero, one = run(shared_worker, prepares, tmp_path)
    assert zero["error"] == one["error"] == "None"
    assert zero["id"] == one["id"]
    assert zero["id"].split("-")[1] == "00000000"
    with asyncckpt.open_checkpoint(tmp_path / "b") as found:
        assert torch.equal(found.tensor("w"), torch.arange(300_000.0))
    sizes = [p.stat().st_size for p in (tmp_path / "b").glob("*.safetensors")]
    assert sum(sizes) < 1_300_000, "replicas are written once"


def prepares_alone(rank: int, root: str) -> str:
    with AsyncCheckpointer(plan_timeout_s=2.0) as checkpointer:
        try:
            if rank == 0:
                checkpointer.prepare({"w": torch.ones(3)})
        except AsyncCkptError as error:
            return type(error).__name__
        return ""


def prepares_what_cannot_be_saved(rank: int, root: str) -> str:
    with AsyncCheckpointer() as checkpointer:
        try:
            checkpointer.prepare({"w": torch.ones(3), "f": print if rank else None})
        except AsyncCkptError as error:
            found = type(error).__name__
        handle = checkpointer.save({"w": torch.ones(3)}, f"{root}/a")
        assert handle.written.exception(DEADLINE_S) is None
        return found


def test_a_rank_that_cannot_prepare_or_does_not_leaves_nobody_hanging(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    found = run(shared_worker, prepares_alone, tmp_path)
    assert found == [PlanTimeoutError.__name__, ""]
    found = run(shared_worker, prepares_what_cannot_be_saved, tmp_path)
    assert found == [SaveFailedError.__name__, UnsupportedLeafError.__name__]
    wait_until(lambda: not shared_worker.status()["slots"], "all slots are given back")


def prepares_too_late(rank: int, root: str) -> list[str]:
    """A rank fails before it comes to the meeting: it finds no worker, is interrupted, or calls from a callback."""
    state, more = {"w": torch.ones(3)}, {"w": torch.ones(3), "more": torch.zeros(4)}
    found: list[str] = []
    with AsyncCheckpointer() as checkpointer:
        process: Any = checkpointer._process  # type: ignore[attr-defined]
        for n, broken in enumerate(("connect", "plan", "thread")):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and broken == "connect":
                    patch.setattr(process, "connect", _no_worker)
                elif rank == 1 and broken == "plan":
                    patch.setattr(checkpointer._stager.plans, "flatten", _interrupt)  # type: ignore[attr-defined]
                if broken == "thread":
                    handle = checkpointer.save(state, f"{root}/first")
                    handle.written.add_done_callback(lambda _: found.append(_prepared(checkpointer, more)))
                    handle.written.exception(DEADLINE_S)
                    wait_until(lambda n=n: len(found) > n, "the callback has ended")
                else:
                    found.append(_prepared(checkpointer, more))
            handle = checkpointer.save(state, f"{root}/{n}")
            assert handle.written.exception(DEADLINE_S) is None
        checkpointer.prepare(more)
        handle = checkpointer.save(more, f"{root}/last")
        assert handle.written.exception(DEADLINE_S) is None
    return found


def _no_worker(**_: Any) -> Any:
    raise WorkerUnavailableError("there is none", endpoint="", detail="")


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def _prepared(checkpointer: Any, state: Any) -> str:
    began = time.monotonic()
    try:
        checkpointer.prepare(state)
    except BaseException as error:
        assert time.monotonic() - began < 50, "nobody waits for the timeout"
        return type(error).__name__
    return ""


def test_a_rank_that_fails_before_it_meets_the_others_leaves_all_in_step(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    zero, one = run(shared_worker, prepares_too_late, tmp_path)
    assert zero == [SaveFailedError.__name__] * 2 + [ReentrantCallError.__name__]
    assert one == ["WorkerUnavailableError", "KeyboardInterrupt", "ReentrantCallError"]
