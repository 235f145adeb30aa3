"""CheckpointManager with a real worker, in one process: what it saves, goes on from, keeps and removes."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, manifest_of, wait_until
from storage_samples import flip_byte, shard_paths
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, PerRank, RngState, SaveHandle, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointerClosedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    NoSoundCheckpointError,
    UnsupportedLeafError,
    WaitTimeoutError,
)
from asyncckpt.manager.root_lock import ROOT_LOCK_NAME

Managers = Callable[..., CheckpointManager]
STEPS = 12


class Data:
    """A data loader with a place in its data."""

    def __init__(self) -> None:
        self.place = 0

    def __next__(self) -> torch.Tensor:
        self.place += 1
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(self.place))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Training:
    """Everything that a training has: what a manager is given is `state`."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.data = Data()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "data": self.data,
            "rng": PerRank(RngState()),
            "step": 0,
        }

    def train(self) -> int:
        """One step; returns its number."""
        self.state["step"] += 1
        loss = self.model(next(self.data)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return int(self.state["step"])

    def weights(self) -> list[Any]:
        """Return all that must be equal bit for bit."""
        numbers = (self.schedule.get_last_lr(), self.scaler.get_scale(), self.data.place, self.state["step"])
        return [*(p.tolist() for p in self.model.parameters()), *numbers, torch.rand(2).tolist()]


@pytest.fixture
def own_numbers() -> Iterator[None]:
    """Generators that a restore may set: afterwards they are as before."""
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


@pytest.fixture
def manager(shared_worker: RealWorker, tmp_path: Path) -> Iterator[Managers]:
    """Makes managers of the test's root, and closes them."""
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        made.append(CheckpointManager(tmp_path / "runs", endpoint=shared_worker.endpoint, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def save(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    """Save and wait, step by step."""
    for step in steps:
        handle = manager.save(step, {"w": torch.full((300,), float(step)), "step": step}, **more)
        if handle is not None:
            handle.written.result(DEADLINE_S)
        manager.wait()


def written(handle: SaveHandle | None) -> SaveHandle:
    """Wait until a save that was due is written; return it."""
    assert handle is not None
    handle.written.result(DEADLINE_S)
    return handle


def loaded(manager: CheckpointManager, step: int | None = None) -> int:
    """Return the step that is restored, which its tensor must agree with."""
    state = {"w": torch.zeros(300), "step": -1}
    found = manager.restore(state, step)
    assert found is not None and found.step == state["step"] == state["w"][0]
    return found.step


# ---- a training -----------------------------------------------------------------------------------------------------


def test_a_training_goes_on_bit_for_bit_with_all_that_it_has(manager: Managers, own_numbers: None) -> None:
    whole = Training()
    while whole.train() < STEPS:
        pass
    expected = whole.weights()
    first = Training()
    with manager(save_interval_steps=5) as saving:
        assert saving.restore(first.state) is None, "nothing is there yet"
        while first.train() < 7:
            if saving.should_save(first.state["step"]):
                saving.save(first.state["step"], first.state)
    again = Training(seed=9)
    with manager(save_interval_steps=5) as going_on:
        found = going_on.restore(again.state)
        assert found is not None and found.step == again.state["step"] == 5
        assert not going_on.should_save(5), "it is there"
        while again.train() < STEPS:
            pass
    assert again.weights() == expected


def test_restore_sets_the_masters_that_the_checkpoint_lacks(manager: Managers) -> None:
    class Halved(torch.optim.SGD):
        """Steps on float32 masters of its weights, and does not save them."""

        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__([weight], lr=0.1)
            self.master = weight.detach().float()

        def master_param_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(self.param_groups[0]["params"][0], self.master)]

        def step(self, closure: Any = None) -> None:
            weight = self.param_groups[0]["params"][0]
            self.master -= 0.1 * weight.detach().float()
            weight.data.copy_(self.master)

    weight, other = (torch.nn.Parameter(torch.full((4,), x).bfloat16()) for x in (3.0, 7.0))
    model, target = torch.nn.ParameterList([weight]), torch.nn.ParameterList([other])
    with manager() as managed:
        written(managed.save(1, {"model": model, "optimizer": Halved(weight)}))
        restored = Halved(other)
        managed.restore({"model": target, "optimizer": restored})
    Halved(weight).step()
    restored.step()
    assert torch.equal(other, weight)


# ---- which one ------------------------------------------------------------------------------------------------------


def test_a_broken_one_is_passed_over_and_that_is_said(manager: Managers, caplog: pytest.LogCaptureFixture) -> None:
    with manager(quarantine=True) as managed:
        save(managed, 1, 2)
        newest = os.path.join(managed.root, "step-00000002")
        flip_byte(shard_paths(newest)[0], -1 + os.path.getsize(shard_paths(newest)[0]))
        state = {"w": torch.zeros(300), "step": -1}
        found = managed.restore(state, source="disk")
        assert found is not None and found.step == 1 and [one.step for one in found.skipped] == [2]
        assert found.skipped[0].moved_to == newest + ".broken-1"
        assert "skipped" in caplog.text and managed.all_steps() == [1]


def test_a_step_is_restored_or_nothing(manager: Managers) -> None:
    with manager() as managed:
        save(managed, 1, 2)
        assert [loaded(managed, step) for step in (1, 2)] == [1, 2]
        with pytest.raises(CheckpointNotFoundError):
            managed.restore({"w": torch.zeros(300)}, 3)
        for file in shard_paths(os.path.join(managed.root, "step-00000001")):
            os.unlink(file)
        with pytest.raises(NoSoundCheckpointError):
            managed.restore({"w": torch.zeros(300)}, 1, source="disk")


def test_what_is_in_memory_only_comes_first(endpoint: str, tmp_path: Path) -> None:
    with closing(Here(endpoint)) as here, CheckpointManager(tmp_path, endpoint=endpoint) as managed:
        save(managed, 1)
        here.storage.flows.clear()
        handle = managed.save(2, {"w": torch.full((300,), 2.0), "step": 2})
        assert handle is not None and handle.staged.result(DEADLINE_S)
        wait_until(lambda: asyncckpt.held_snapshots(handle.path, endpoint=endpoint), "the worker has taken it up")
        state = {"w": torch.zeros(300), "step": -1}
        found = managed.restore(state, timeout_s=0.0)
        assert found is not None and found.step == state["step"] == 2, "the disk has not got it yet"
        assert managed.latest_step() == 1
        here.storage.flows.set()


def test_after_a_rollback_the_new_branch_is_newest_and_the_old_future_goes_first(
    manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    with manager() as managed:
        save(managed, 1, 2, 3, 4)
    with manager(max_to_keep=4) as managed:
        assert loaded(managed, 2) == 2
        assert managed.latest_step() == 4, "nothing is abandoned before the new branch has a checkpoint"
        save(managed, 3)
        assert (managed.latest_step(), managed.all_steps()) == (3, [1, 2, 3, 4])
        metadata = manifest_of(os.path.join(managed.root, "step-00000003"))["metadata"]
        assert len(metadata["asyncckpt_manager"]["ancestry"]) == 1
        shutil.rmtree(os.path.join(managed.root, "step-00000003"))
        save(managed, 5)
        for file in shard_paths(os.path.join(managed.root, "step-00000005")):
            os.unlink(file)
        state = {"w": torch.zeros(300), "step": -1}
        found = managed.restore(state, source="disk")
        assert found is not None and found.step == 2, "not step 4 of the branch that was given up"
        save(managed, 6, 7)
        assert managed.all_steps() == [1, 2, 6, 7], "what is broken and what was abandoned has gone first"


def test_a_rollback_without_a_restart_abandons_what_the_same_manager_has_saved_since(manager: Managers) -> None:
    with manager(max_to_keep=4) as managed:
        save(managed, 1, 2, 3, 4)
        for step, left in ((5, [1, 2, 4, 5]), (6, [1, 2, 5, 6])):
            assert loaded(managed, 2) == 2
            save(managed, step)
            assert managed.all_steps() == left, "what was abandoned last goes last"
        for file in shard_paths(os.path.join(managed.root, "step-00000006")):
            os.unlink(file)
        found = managed.restore({"w": torch.zeros(300), "step": -1}, source="disk")
        assert found is not None and found.step == 2, "not step 5, which was given up"


def test_a_step_saved_again_takes_the_old_one_s_place(manager: Managers) -> None:
    with manager() as managed:
        save(managed, 1, 2)
        loaded(managed, 1)
        written(managed.save(2, {"w": torch.full((300,), 2.0), "step": 2, "more": 1}))
        found = managed.restore()
        assert found is not None and found.state_dict["more"] == 1
    with AsyncCheckpointer(endpoint=managed.checkpointer._endpoint) as given:  # type: ignore[arg-type]
        with CheckpointManager(managed.root, checkpointer=given) as other:
            handle = other.save(2, {"w": torch.zeros(1)})
            assert handle is not None
            assert isinstance(handle.written.exception(DEADLINE_S), CheckpointExistsError)
        given.wait()


def test_a_pinned_step_outlives_a_rollback_that_saves_it_again(manager: Managers) -> None:
    with manager(max_to_keep=2) as managed:
        save(managed, 1, 2)
        managed.pin(2)
        loaded(managed, 1)
        handle = managed.save(2, {"w": torch.zeros(300), "step": 2})
        assert handle is not None
        with pytest.raises(CheckpointExistsError, match="pinned"):
            handle.written.result(DEADLINE_S)
        save(managed, 3, 4, 5)
        assert managed.all_steps() == [2, 4, 5] and loaded(managed, 2) == 2


def test_who_saves_beside_another_training_without_restoring_is_warned_once(
    manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    with manager() as managed:
        save(managed, 1, 2)
    assert "restore() was not called" not in caplog.text
    with manager() as managed:
        loaded(managed)
        save(managed, 3)
    assert "restore() was not called" not in caplog.text
    with manager() as managed:
        save(managed, 1, 2)
    assert caplog.text.count("restore() was not called") == 1 and "3 checkpoints, up to step 3" in caplog.text


# ---- what stays -----------------------------------------------------------------------------------------------------


def test_the_newest_the_best_the_pinned_and_those_of_the_period_stay(manager: Managers) -> None:
    options: dict[str, Any] = {"max_to_keep": 2, "best_fn": lambda metrics: metrics["loss"], "keep_period": 5}
    with manager(**options) as managed:
        for step in range(1, 9):
            save(managed, step, metrics={"loss": abs(step - 3)}, metadata={"note": step})
            if step == 4:
                managed.pin(4)
        assert (managed.all_steps(), managed.best_step(), managed.latest_step()) == ([3, 4, 5, 8], 3, 8)
        metadata = manifest_of(os.path.join(managed.root, "step-00000008"))["metadata"]
        assert metadata["note"] == 8 and metadata["asyncckpt_manager"]["metrics"] == {"loss": 5}
    with manager(**{**options, "best_mode": "max"}) as again:
        save(again, 9, metrics={"loss": 100})
        assert (again.all_steps(), again.best_step()) == ([4, 5, 8, 9], 9), "the pin has survived"
        assert [again.unpin(4), again.unpin(4)] == [True, False]
        save(again, 11)
        assert again.all_steps() == [5, 9, 11]
        with pytest.raises(CheckpointNotFoundError):
            again.pin(4)


def test_a_loss_that_is_no_number_fails_no_save_and_is_never_the_best(
    manager: Managers,
) -> None:
    with manager(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="max") as managed:
        for step, loss in enumerate([torch.tensor(0.5), math.nan, math.inf, torch.tensor(0.25)], 1):
            save(managed, step, metrics={"loss": loss})
        assert managed.best_step() == 1 and managed.all_steps() == [1, 4]


def test_home_made_masters_that_no_checkpoint_holds_are_pointed_out(
    manager: Managers, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    copies = [one.detach().clone().float() for one in model.parameters()]
    state = {"model": model, "optimizer": torch.optim.SGD(copies, lr=0.1, momentum=0.9)}
    with manager() as managed:
        written(managed.save(1, state))
        managed.restore(state)
        assert "restore did not change 2 of the parameters" in caplog.text
        caplog.clear()
        written(managed.save(2, {**state, "copies": copies}))
        managed.restore({**state, "copies": copies})
    assert "restore did not change" not in caplog.text


def test_nothing_goes_before_a_newer_one_is_committed(worker: RealWorker, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "runs", endpoint=worker.endpoint, max_to_keep=1) as managed:
        save(managed, 1)
        with worker.frozen():
            handle = managed.save(2, {"w": torch.zeros(300)})
            assert handle is not None and handle.staged.result(DEADLINE_S)
            assert managed.all_steps() == [1]
        handle.written.result(DEADLINE_S)
        managed.wait()
        assert managed.all_steps() == [2]


def test_a_synchronous_checkpointer_is_managed_alike(tmp_path: Path) -> None:
    with SyncCheckpointer() as given:
        with CheckpointManager(tmp_path, checkpointer=given, max_to_keep=2, step_format="checkpoint-{step}") as managed:
            save(managed, 1, 2, 3)
            assert sorted(os.listdir(tmp_path)) == [ROOT_LOCK_NAME, "checkpoint-2", "checkpoint-3"]
            assert loaded(managed) == 3
        given.load(tmp_path / "checkpoint-3")  # the manager has not closed it


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_to_keep": 1, "best_fn": len}, "max_to_keep"),
        ({"max_to_keep": 0}, "max_to_keep"),
        ({"keep_period": 0}, "keep_period"),
        ({"best_mode": "most"}, "best_mode"),
        ({"save_interval_s": 0}, "save_interval_s"),
        *(({"save_interval_steps": steps}, "save_interval_steps") for steps in (0, 1.5, True)),
        ({"save_when": 3}, "save_when"),
        ({"best_fn": "loss"}, "best_fn"),
        *(({"save_on_steps": steps}, "save_on_steps") for steps in (5, iter([5]))),
        ({"mtbf_s": -1}, "mtbf_s"),
        *(({"grace_s": grace_s}, "grace_s") for grace_s in (0, -1.0, math.inf, None, "1")),
        *(
            ({"preemption_signal": given}, "preemption_signal")
            for given in (signal.SIGKILL, 12345, "SIGTERM", [signal.SIGSTOP])
        ),
        *(
            ({"step_format": text}, "step_format")
            for text in (
                "step",
                "{step:04.1f}/x",
                "../{step}",
                ".{step}",
                "{step}.broken-1",
                "{nothing}",
                "{step:3",
                "",
            )
        ),
        ({"step_format": "{step:x!}"}, "step_format"),
        ({"slots": 3, "checkpointer": "given"}, "slots"),
        ({"unheard_of": 3}, "unheard_of"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    checkpointer: AsyncCheckpointer, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    where: dict[str, Any] = {"endpoint": checkpointer._endpoint}
    if "checkpointer" in options:
        where = {"checkpointer": checkpointer}
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(tmp_path, **{**options, **where})
    assert caught.value.field == field


def test_a_manager_that_is_refused_leaves_the_signal_to_the_handler_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SyncCheckpointer() as checkpointer, pytest.raises(ConfigError, match="export_to"):
        CheckpointManager(
            tmp_path,
            checkpointer=checkpointer,
            preemption_signal=signal.SIGUSR1,
            export_every=1,
            export_to=tmp_path,
        )
    assert signal.getsignal(signal.SIGUSR1) is before


def test_an_unknown_setting_is_told_its_nearest_name(tmp_path: Path) -> None:
    said = r"unknown field 'max_to_kep'; the nearest is 'max_to_keep'; .*endpoint.*slots"
    with pytest.raises(ConfigError, match=said):
        CheckpointManager(tmp_path, max_to_kep=3)


# ---- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"save_interval_steps": 2}, [0, 2, 4]),
        ({"save_on_steps": [1, 4, 99]}, [1, 4]),
        ({"save_when": lambda step: step == 3}, [3]),
        ({"save_interval_steps": 5, "save_on_steps": [1], "save_when": lambda step: step == 2}, [0, 1, 2, 5]),
        ({"save_interval_s": 1e-6}, [0, 1, 2, 3, 4, 5]),
        ({"save_interval_s": 1e6}, []),
    ],
)
def test_any_policy_is_a_reason_to_save_and_without_one_every_step_is_saved(
    manager: Managers, options: dict[str, Any], expected: list[int]
) -> None:
    with manager(**options) as managed:
        assert [step for step in range(6) if managed.should_save(step)] == expected


def test_should_save_makes_few_calls_and_none_of_the_operating_system(
    manager: Managers,
) -> None:
    calls: list[str] = []

    def count(frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            calls.append(f"{function.__module__}.{function.__qualname__}")
        elif event == "call":
            calls.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    with manager(save_interval_steps=10, save_interval_s=1e6, save_on_steps=[3], preemption_signal=()) as managed:
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for step in range(1, 4):
                managed.should_save(step)
        finally:
            sys.setprofile(before)
    calls = [call for call in calls if "setprofile" not in call]
    assert not [
        call for call in calls if call.partition(".")[0] in ("posix", "_io", "_socket", "select", "fcntl", "zmq")
    ]
    assert len(calls) <= 3 * 12, calls


def test_the_interval_is_suggested_in_the_log(manager: Managers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    with manager(mtbf_s=3600.0) as managed:
        save(managed, *range(1, 7))
    assert caplog.text.count("loses the least time") == 1


# ---- told to stop ---------------------------------------------------------------------------------------------------


def test_after_the_signal_the_last_save_is_staged_and_the_worker_finishes_it(
    worker: RealWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, root = signal.getsignal(signal.SIGUSR1), tmp_path / "runs"
    options: dict[str, Any] = {"save_interval_steps": 100, "preemption_signal": signal.SIGUSR1, "grace_s": 0.5}
    managed = CheckpointManager(root, endpoint=worker.endpoint, **options)
    save(managed, 1)
    assert not managed.should_save(2) and not managed.reached_preemption(2)
    os.kill(os.getpid(), signal.SIGUSR1)
    with worker.frozen():  # nothing is written any more while this process is at it
        assert managed.should_save(3) and managed.reached_preemption(3)
        managed.save(3, {"w": torch.full((300,), 3.0), "step": 3})
        assert "step 3 is staged" in caplog.text
        managed.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == str(root / "step-00000003"), "the worker has finished it")


def test_nobody_told_to_stop_never_stops(manager: Managers) -> None:
    with manager() as managed:
        assert not any(managed.reached_preemption(step) for step in range(5))
        with pytest.raises(ConfigError, match="preemption_signal"):
            managed.preempt()


def test_arguments_that_no_part_takes_are_refused(manager: Managers) -> None:
    with manager() as managed, pytest.raises(ConfigError, match="unheard_of"):
        managed.save(1, {"w": torch.zeros(3)}, unheard_of=3)


@pytest.mark.parametrize("given", [{"metadata": 5}, {"metrics": 5}, {"metrics": "loss"}, {"metadata": [1]}])
def test_metrics_and_metadata_that_are_no_dicts_are_refused_with_a_typed_error(
    manager: Managers, given: dict[str, Any]
) -> None:
    with manager() as managed:
        with pytest.raises(ConfigError, match="must be dicts of JSON values"):
            managed.save(1, {"step": 1}, **given)
        save(managed, 2)


@pytest.mark.parametrize("n_saved", [0, 1])
def test_restore_refuses_a_bare_model_in_the_first_run_too(manager: Managers, n_saved: int) -> None:
    with manager(preemption_signal=()) as managed:
        save(managed, *range(n_saved))
        with pytest.raises(UnsupportedLeafError, match="expected a dict"):
            managed.restore(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_waiting_ends_at_its_timeout(worker: RealWorker, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, endpoint=worker.endpoint) as managed:
        save(managed, 1)
        with worker.frozen():
            managed.save(2, {"w": torch.zeros(300)})
            with pytest.raises(WaitTimeoutError):
                managed.wait(timeout=0.05)
        managed.wait()


def test_a_closed_manager_says_so(manager: Managers) -> None:
    managed = manager()
    for _ in range(2):
        managed.close()
    for call in (lambda: managed.should_save(1), lambda: managed.save(1, {}), managed.restore, managed.wait):
        with pytest.raises(CheckpointerClosedError):
            call()
