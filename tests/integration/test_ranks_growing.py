"""States that grow, on all ranks or some: what each save writes, which save meets, and that none waits in vain."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S, RealWorker

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.distributed.run_agreement import Coordination

N_ELEMENTS = 250_000
N_SAVES = 8
State = dict[str, Any]


def weights(step: int) -> State:
    return {"weight": torch.arange(float(N_ELEMENTS)) + step, "step": step}


def moments(rank: int, step: int) -> State:
    """Optimizer state, which is there after the first step."""
    return weights(step) | ({} if step == 0 else {"exp_avg": torch.arange(float(N_ELEMENTS)) * step})


def experts(rank: int, step: int) -> State:
    """Moments of a rank's own expert, which is first used at step 1 + rank."""
    return weights(step) | ({} if step <= rank else {f"expert{rank}.exp_avg": torch.full((N_ELEMENTS,), step + rank)})


def adapter_on_all(rank: int, step: int) -> State:
    return weights(step) | ({} if step < 2 else {"adapter": torch.arange(float(N_ELEMENTS)) - step})


def adapter_on_one(rank: int, step: int) -> State:
    return weights(step) | ({} if step < 2 or rank else {"adapter": torch.arange(float(N_ELEMENTS)) - step})


def saves(rank: int, build: str, slots: int, root: str) -> list[tuple[str | None, bool]]:
    """Save step by step; returns for each the error, and whether the ranks have met in it."""
    met: list[int] = []
    agree = Coordination._meet_and_agree

    def counted(ranks: Coordination, *arguments: Any, **named: Any) -> Any:
        met.append(1)
        return agree(ranks, *arguments, **named)

    Coordination._meet_and_agree = counted  # type: ignore[method-assign]
    found: list[tuple[str | None, bool]] = []
    with AsyncCheckpointer(slots=slots, keep_in_memory="none", plan_timeout_s=DEADLINE_S) as checkpointer:
        for step in range(N_SAVES):
            met.clear()
            handle = checkpointer.save(globals()[build](rank, step), f"{root}/{step}", step=step)
            error = handle.written.exception(DEADLINE_S)
            found.append((None if error is None else repr(error), bool(met)))
            dist.barrier()
    return found


def stored(path: pathlib.Path) -> set[str]:
    with asyncckpt.open_checkpoint(path) as checkpoint:
        return set(checkpoint.stored_tensors)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("build", "first"), [("moments", 1), ("adapter_on_all", 2), ("adapter_on_one", 2)])
def test_what_grows_is_stored_at_once_and_written_once_after_the_save_that_meets(
    build: str, first: int, slots: int, world_size: int, tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    found = rank_processes.run(world_size, saves, build, slots, str(tmp_path), environ=environ)
    for outcome in found:
        assert [error for error, _ in outcome] == [None] * N_SAVES
        assert [step for step, (_, met) in enumerate(outcome) if met] == [0, first + slots]
    name = {"moments": "exp_avg"}.get(build, "adapter")
    holders = range(1 if build == "adapter_on_one" else world_size)
    for step in range(N_SAVES):
        own = {f"{name}@rank{rank}" for rank in holders}
        expected = set() if step < first else own if step < first + slots else {name}
        assert stored(tmp_path / str(step)) == {"weight", *expected}, f"step {step}"
        loaded = asyncckpt.load(tmp_path / str(step))
        assert torch.equal(loaded["weight"], weights(step)["weight"])
        if step >= first:
            assert torch.equal(loaded[name], globals()[build](0, step)[name])


@pytest.mark.parametrize("world_size", [2, 4])
def test_moments_of_experts_that_come_rank_by_rank_are_each_stored_from_the_first_save_on(
    world_size: int, tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    found = rank_processes.run(world_size, saves, "experts", 1, str(tmp_path), environ=environ)
    for outcome in found:
        assert [error for error, _ in outcome] == [None] * N_SAVES
        # The save after that of rank r's first moments meets, and holds the first ones of rank r + 1 already.
        assert [step for step, (_, met) in enumerate(outcome) if met] == [0, *range(2, 1 + world_size, 2)]
    for step in range(N_SAVES):
        names = {f"expert{rank}.exp_avg" for rank in range(world_size) if step > rank}
        plain = {name.partition("@")[0] for name in stored(tmp_path / str(step))}
        assert plain == {"weight", *names}, f"step {step}"
    assert stored(tmp_path / str(N_SAVES - 1)) == {"weight", *(f"expert{rank}.exp_avg" for rank in range(world_size))}
    for rank in range(world_size):
        loaded = asyncckpt.load(tmp_path / str(N_SAVES - 1))[f"expert{rank}.exp_avg"]
        assert torch.equal(loaded, torch.full((N_ELEMENTS,), N_SAVES - 1 + rank))
