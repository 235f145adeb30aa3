"""Whose the root of a CheckpointManager is, and that what a run went on from is not removed too soon."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import rank_processes
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until
from storage_samples import flip_byte, shard_paths

import asyncckpt
from asyncckpt import CheckpointManager
from asyncckpt.cli import main
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, ConfigError, DirectoryInUseError
from asyncckpt.manager import retention_thread
from asyncckpt.manager.root_lock import ROOT_LOCK_NAME
from tests.warm_python import WarmProcess, WarmPython

Managers = Callable[..., CheckpointManager]
Holding = Callable[[int], contextlib.AbstractContextManager["Other"]]
HOLD = """
import sys, torch, asyncckpt
manager = asyncckpt.CheckpointManager(sys.argv[1], endpoint=sys.argv[2], preemption_signal=())
handle = manager.save(int(sys.argv[3]), {"w": torch.full((300,), float(sys.argv[3])), "step": int(sys.argv[3])})
handle.staged.result(60)
print("saved", flush=True)
sys.stdin.read()
manager.close()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def manager(shared_worker: RealWorker, root: Path) -> Iterator[Managers]:
    """Makes managers of the test's root, and closes them."""
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        made.append(CheckpointManager(root, endpoint=shared_worker.endpoint, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def save(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        handle = manager.save(step, state_of(step), **more)
        assert handle is not None
        handle.written.result(DEADLINE_S)
        manager.wait()


def restore(manager: CheckpointManager, step: int | None = None, **options: Any) -> int | None:
    state = state_of(-1)
    found = manager.restore(state, step, **options)
    assert found is None or found.step == state["step"] == state["w"][0]
    return None if found is None else found.step


def damage(root: Path, step: int) -> None:
    """Flip the last byte of its data: its sizes and indexes are as they were."""
    shard = shard_paths(str(root / f"step-{step:08d}"))[0]
    flip_byte(shard, os.path.getsize(shard) - 1)


@dataclasses.dataclass
class Other:
    """Another process that has saved to the root, and lives on."""

    process: WarmProcess
    stdin: IO[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.stdin.close()
        assert self.process.wait(DEADLINE_S) == 0


@pytest.fixture
def holding(warm_python: WarmPython, shared_worker: RealWorker, root: Path) -> Holding:
    """Starts another process that saves a step."""

    @contextlib.contextmanager
    def held(step: int) -> Iterator[Other]:
        arguments = (str(root), shared_worker.endpoint, str(step))
        with warm_python.talking(HOLD, *arguments) as (process, stdin, stdout):
            assert stdout.readline() == "saved\n"
            yield Other(process, stdin)

    return held


# ---- two managers ---------------------------------------------------------------------------------------------------


def test_a_second_manager_is_refused_at_its_first_save_by_name_and_may_read_before_and_after(
    manager: Managers, holding: Holding, root: Path
) -> None:
    with holding(1) as other, manager(max_to_keep=1) as second:
        wait_until(lambda: second.all_steps() == [1], "it is committed")
        assert restore(second) == 1
        for _ in range(2):
            with pytest.raises(DirectoryInUseError, match=f"process {other.pid} on .*shared=True") as raised:
                second.save(2, state_of(2))
            assert (raised.value.pid, raised.value.path) == (other.pid, str(root)) and raised.value.host
        assert restore(second) == 1 and second.all_steps() == [1] and second.latest_step() == 1
        other.end()
        assert not (root / ROOT_LOCK_NAME).exists()
        save(second, 2)
        assert second.all_steps() == [2]
    assert not (root / ROOT_LOCK_NAME).exists()


def test_who_only_restores_takes_nothing_and_removes_nothing(manager: Managers) -> None:
    with manager() as training:
        save(training, 1, 2, 3)
        with manager(max_to_keep=1) as reader:
            assert restore(reader) == 3
        assert training.all_steps() == [1, 2, 3]
        save(training, 4)
    with manager(max_to_keep=1) as reader:
        assert restore(reader) == 4
        assert os.listdir(reader.root).count(ROOT_LOCK_NAME) == 0


def test_two_managers_of_one_process_take_turns_unless_they_mean_to_share(manager: Managers, root: Path) -> None:
    first, second = manager(), manager()
    save(first, 1)
    with pytest.raises(DirectoryInUseError, match="close what saves there first"):
        second.save(2, state_of(2))
    first.close()
    save(second, 2)
    second.close()
    first, second = manager(shared=True), manager(shared=True)
    save(first, 3)
    save(second, 4)
    assert first.all_steps() == [1, 2, 3, 4] and not (root / ROOT_LOCK_NAME).exists()
    with pytest.raises(ConfigError, match="shared"):
        manager(shared=1)


def test_a_manager_that_was_dropped_gives_the_root_back(shared_worker: RealWorker, root: Path) -> None:
    for step in (1, 2, 3):
        dropped = CheckpointManager(root, endpoint=shared_worker.endpoint, max_to_keep=1, preemption_signal=())
        save(dropped, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del dropped
            gc.collect()
        wait_until(lambda: not (root / ROOT_LOCK_NAME).exists(), "nobody holds it any more")
    assert not [one for one in threading.enumerate() if one.name == "asyncckpt-retention"]


@pytest.mark.parametrize("becomes", ["another one's", "nobody's", "released"])
def test_what_is_lost_while_a_checkpoint_is_read_back_is_not_removed(
    manager: Managers, root: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    def stopped_for_long(*arguments: Any) -> bool:
        if becomes == "released":
            assert second._root_lock is not None
            second._root_lock.release()
        else:
            (root / ROOT_LOCK_NAME).unlink()
        if becomes == "another one's":
            (root / ROOT_LOCK_NAME).write_text("{}")
        return True

    with manager() as first:
        save(first, 1, 2)
    with manager(max_to_keep=1) as second:
        assert restore(second) == 2
        monkeypatch.setattr(retention_thread, "is_read_back", stopped_for_long)
        save(second, 3)
        assert second.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_lock_whose_file_was_removed_is_taken_again_before_anything_goes(
    manager: Managers, holding: Holding, root: Path, is_taken: bool
) -> None:
    with manager(max_to_keep=1) as one:
        for step in (1, 2):
            handle = one.checkpointer.save(state_of(step), root / f"step-{step:08d}", step=step)
            handle.written.result(DEADLINE_S)
        save(one, 3)
        one._retention._policy = manager()._retention._policy
        save(one, 4)
        (root / ROOT_LOCK_NAME).unlink()
        with holding(5) if is_taken else contextlib.nullcontext() as other:
            one._retention._policy = manager(max_to_keep=1)._retention._policy
            for _ in range(2):
                one._retention.request_prune()
                one.wait()
            assert (root / ROOT_LOCK_NAME).exists()
            there = one.all_steps()
            if other is not None:
                with pytest.raises(DirectoryInUseError):
                    one.save(6, state_of(6))
                one._retention.request_prune()
                one.wait()
                there = one.all_steps()
                other.end()
        assert [step for step in there if step < 5] == ([3, 4] if is_taken else [4])


def test_an_interrupt_while_the_last_state_is_saved_closes_the_manager_all_the_same(
    manager: Managers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(error: BaseException) -> bool:
        raise KeyboardInterrupt

    one = manager()
    monkeypatch.setattr(one, "_save_after", interrupted)
    with pytest.raises(KeyboardInterrupt), one:
        save(one, 1)
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")
    assert not (root / ROOT_LOCK_NAME).exists()
    with pytest.raises(CheckpointerClosedError):
        one.save(2, state_of(2))


def test_after_a_killed_one_the_next_saves_at_once_while_the_worker_may_still_write(
    manager: Managers, holding: Holding, root: Path
) -> None:
    with holding(1) as other:
        other.process.kill()
        other.process.wait(DEADLINE_S)
    assert (root / ROOT_LOCK_NAME).exists()
    with manager() as again:
        save(again, 2)
        assert again.all_steps() == [1, 2], "the dead one's save was not lost either"


def test_the_file_of_the_lock_is_nothing_that_a_command_lists_counts_or_removes(
    manager: Managers, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with manager() as training:
        save(training, 1, 2)
        lock = root / ROOT_LOCK_NAME
        assert lock.exists()
        for command in (
            ["ls", str(root)],
            ["ls", "--json", str(root)],
            ["du", str(root)],
            ["gc", str(root)],
            ["gc", "--delete", str(root)],
            ["gc", "--locks", "--delete", "--older-than", "0", str(root)],
            ["verify", str(root / "step-00000001"), str(root / "step-00000002")],
            ["prune", str(root), "--keep", "1", "--delete"],
        ):
            assert main(command) == 0, capsys.readouterr()
            assert "asyncckpt.lock" not in capsys.readouterr().out, command
        assert lock.exists() and training.all_steps() == [2]
        found = asyncckpt.restore_latest(root)
        assert found is not None and found.step == 2
        save(training, 3)


def refused(rank: int, root: str, endpoint: str) -> list[Any]:
    with CheckpointManager(root, endpoint=endpoint) as second:
        assert restore(second) == 1
        try:
            second.save(2, state_of(2))
        except AsyncCkptError as error:
            return [type(error).__name__, error.pid]  # type: ignore[attr-defined]
    return ["saved"]


@pytest.mark.parametrize("group", [True, False])
def test_ranks_are_all_refused_by_the_name_of_who_has_it(
    shared_worker: RealWorker, holding: Holding, root: Path, group: bool
) -> None:
    environ = {"MASTER_PORT": f"{root}"}
    with holding(1) as other:
        arguments = (str(root), shared_worker.endpoint)
        with rank_processes.running(2, refused, *arguments, group=group, environ=environ) as ranks:
            assert ranks.results() == [["DirectoryInUseError", other.pid]] * 2
        other.end()
    with rank_processes.running(2, refused, *arguments, group=group, environ={"MASTER_PORT": f"{root}2"}) as ranks:
        assert ranks.results() == [["saved"]] * 2
    assert not (root / ROOT_LOCK_NAME).exists()


# ---- what a run went on from ----------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "one": {"max_to_keep": 1},
    "a period": {"max_to_keep": 1, "keep_period": 1000},
    "the best": {"max_to_keep": 2, "best_fn": lambda metrics: metrics["loss"]},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by", ["the manager", "another manager", "asyncckpt prune"])
def test_nobody_removes_it_while_all_that_the_run_has_saved_since_is_damaged(
    manager: Managers, root: Path, policy: str, by: str
) -> None:
    metrics = {"metrics": {"loss": 1.0}} if policy == "the best" else {}
    with manager() as first:
        save(first, 1, 2, metrics={"loss": 5.0})
    with manager() as second:
        assert restore(second) == 2
        save(second, 3, 4, **metrics)
        damage(root, 3)
        damage(root, 4)
        if by == "the manager":
            second._retention._policy = manager(**POLICIES[policy])._retention._policy
            second._retention.request_prune()
            second.wait()
            assert 2 in second.all_steps() and 1 not in second.all_steps()
            save(second, 5, **metrics)
            second.wait()
            assert second.all_steps() in ([5], [3, 5], [4, 5]), "the newest was read back"
            return
    if by == "another manager":
        with manager(shared=True, **POLICIES[policy]) as third:
            third._retention.request_prune()
            third.wait()
            assert 2 in third.all_steps() and 1 not in third.all_steps()
    else:
        keep = str(POLICIES[policy]["max_to_keep"])
        best = ["--best", "loss"] if policy == "the best" else []
        for _ in range(2):
            assert main(["prune", str(root), "--keep", keep, *best, "--delete"]) == 0
        assert 2 in manager().all_steps() and 1 not in manager().all_steps()
    with manager(**POLICIES[policy]) as last:
        assert restore(last, source="disk") == 2, "the newest that is sound, and it is there"
        save(last, 6, **metrics)
        last.wait()
        assert last.all_steps() == ([2, 6] if policy == "the best" else [6])


def test_a_failed_first_save_removes_nothing_of_what_was_restored_by_its_step(manager: Managers, root: Path) -> None:
    with manager() as first:
        save(first, 1, 2, 3)
    with manager(max_to_keep=1) as second:
        assert restore(second, 1) == 1
        (root / "step-00000004").write_text("in the way")
        handle = second.save(4, state_of(4))
        assert handle is not None and handle.written.exception(DEADLINE_S) is not None
        second.wait()
        assert second.all_steps() == [1, 3], "the newest, and what this run went on from"
        save(second, 5)
        assert second.all_steps() == [5]


def test_of_a_chain_of_restarts_only_the_last_origin_is_kept(manager: Managers) -> None:
    for step in range(1, 6):
        with manager(max_to_keep=1) as one:
            assert restore(one) == (step - 1 or None)
            save(one, step)
            assert one.all_steps() == [step]


def test_no_save_waits_while_a_checkpoint_is_read_back(manager: Managers, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bool:
        reading.set()
        return go.wait(DEADLINE_S)

    monkeypatch.setattr(retention_thread, "is_read_back", slow)
    with manager() as first:
        save(first, 1)
    with manager(max_to_keep=1, slot_timeout_s=1000.0) as second:
        assert restore(second) == 1
        for step in (2, 3):
            handle = second.save(step, state_of(step))
            assert handle is not None
            handle.written.result(DEADLINE_S)
            assert reading.wait(DEADLINE_S)
        go.set()
        second.wait()
        assert second.all_steps() == [3]
