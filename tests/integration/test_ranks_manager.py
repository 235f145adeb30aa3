"""CheckpointManager on several ranks: interrupted trainings, and what the ranks agree on without a collective."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import interrupted
import pytest
import rank_processes
import torch
import torch.distributed as dist
from rank_processes import talk
from real_worker import RealWorker
from storage_samples import flip_byte, shard_paths

from asyncckpt import CheckpointManager
from examples import managed

TERM, KILL = signal.SIGTERM, signal.SIGKILL


@pytest.mark.parametrize("kind", interrupted.WORLD_SIZES)
def test_a_training_that_was_told_to_stop_and_killed_ends_as_one_that_never_was(
    shared_worker: RealWorker, tmp_path: Path, kind: str, rng: random.Random
) -> None:
    signals, steps = rng.sample([TERM, KILL], 2), 5 * interrupted.EVERY  # the last run saves, and so removes as well
    print(interrupted.interrupted(kind, tmp_path, shared_worker.endpoint, steps=steps, rng=rng, signals=signals))
    assert len(list(tmp_path.iterdir())) <= interrupted.KEPT + 1


def stop_somewhere(rank: int, root: str, endpoint: str, tells: int) -> int:
    with CheckpointManager(root, endpoint=endpoint, preemption_signal=()) as manager:
        step = 0
        while not manager.reached_preemption(step):
            step += 1
            if step == 5:
                talk().say("here")
                talk().hear()
                if rank == tells:
                    manager.preempt()
        assert manager.reached_preemption(step + 1) and not manager.reached_preemption(step - 1)
        assert manager.should_save(step)
        manager.save(step, {"w": torch.full((10,), float(step))})
    return step


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("tells", [0, 1])
def test_ranks_that_wait_for_nobody_stop_at_the_same_step_when_one_is_told(
    shared_worker: RealWorker, tmp_path: Path, group: bool, tells: int
) -> None:
    environ = {"MASTER_PORT": f"{tmp_path}"}
    arguments = (str(tmp_path), shared_worker.endpoint, tells)
    with rank_processes.running(2, stop_somewhere, *arguments, group=group, environ=environ) as ranks:
        for rank in range(2):
            assert ranks.receive(rank) == "here"
        for rank in range(2):
            ranks.send(rank, "go on")
        stopped = ranks.results()
    assert stopped[0] == stopped[1] >= 5
    assert [one.name for one in tmp_path.iterdir()] == [f"step-{stopped[0]:08d}"], "all ranks have saved it"


def due(rank: int, root: str, endpoint: str, steps: int) -> list[int]:
    with CheckpointManager(root, endpoint=endpoint, save_interval_s=1e-3) as manager:
        found = [step for step in range(steps) if manager.should_save(step)]
        talk().say("done")  # what rank 0 has posted at a worker is gone with it
        talk().hear()
        return found


@pytest.mark.parametrize("group", [True, False])
def test_rank_0_s_clock_says_when_to_save_on_all_ranks(shared_worker: RealWorker, tmp_path: Path, group: bool) -> None:
    environ = {"MASTER_PORT": f"{tmp_path}"}
    arguments = (str(tmp_path), shared_worker.endpoint, 3000)
    with rank_processes.running(2, due, *arguments, group=group, environ=environ) as ranks:
        for rank in range(2):
            assert ranks.receive(rank) == "done"
        for rank in range(2):
            ranks.send(rank, "go on")
        found = ranks.results()
    assert found[0] == found[1] and found[0], "the same steps, and some"


def restored(rank: int, root: str, endpoint: str) -> dict[str, Any]:
    with CheckpointManager(root, endpoint=endpoint, max_to_keep=3) as manager:
        for step in (1, 2, 3):
            handle = manager.save(step, {"w": torch.full((10,), float(step))})
            assert handle is not None
            handle.written.result(60)
        talk().say("saved")
        talk().hear()
        state = {"w": torch.zeros(10)}
        found = manager.restore(state, source="disk")
        assert found is not None and found.step == state["w"][0]
        manager.restore(state, 1)
        assert state["w"][0] == 1
        return {"step": found.step, "skipped": [one.step for one in found.skipped]}


def test_all_ranks_go_on_from_the_same_step_and_all_say_what_was_broken(
    shared_worker: RealWorker, tmp_path: Path
) -> None:
    with rank_processes.running(2, restored, str(tmp_path), shared_worker.endpoint) as ranks:
        for rank in range(2):
            assert ranks.receive(rank) == "saved"
        for file in shard_paths(str(tmp_path / "step-00000003"))[:1]:
            flip_byte(file, -1 + Path(file).stat().st_size)
        for rank in range(2):
            ranks.send(rank, "go on")
        assert ranks.results() == [{"step": 2, "skipped": [3]}] * 2


def run_example(rank: int, arguments: list[str]) -> float:
    with contextlib.redirect_stdout(None):
        return managed.main(arguments)


def test_the_example_goes_on_bit_for_bit(shared_worker: RealWorker, tmp_path: Path) -> None:
    arguments = ["--dir", str(tmp_path / "a"), "--steps", "12", "--every", "4"]
    losses = []
    for _ in range(2):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "example"}
        environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environ |= {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
        losses.append(rank_processes.run(2, run_example, arguments, group=False, environ=environ))
        assert sorted(one.name for one in (tmp_path / "a").iterdir())[-1] == "step-00000012"
        shutil.rmtree(tmp_path / "a/step-00000012")
    assert losses[0] == losses[1]
