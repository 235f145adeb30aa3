"""Overlap: snapshots that tear, copies that fail, and everything that may end while a copy runs."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch
from exit_times import assert_exits_in_time
from overlapping import COPIER, Gate, backward, linear, state_of
from real_worker import DEADLINE_S, RealWorker, slots_of, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointerClosedError,
    ForkedError,
    ReentrantCallError,
    SnapshotTornError,
    StagingError,
    WorkerUnavailableError,
)
from asyncckpt.protocol import save_phases
from asyncckpt.save_handle import SaveHandle
from asyncckpt.save_tracker import SaveTracker
from asyncckpt.staging import overlap
from asyncckpt.staging.cpu_copy import SlotImage
from asyncckpt.staging.deferred_copy import BackgroundCopier
from tests.warm_python import WarmPython


class Training:
    """A small model whose optimizer is attached to a checkpointer."""

    def __init__(self, checkpointer: AsyncCheckpointer, root: pathlib.Path) -> None:
        self.checkpointer, self.root = checkpointer, root
        self.model, self.optimizer = linear()
        backward(self.model)
        checkpointer.attach(self.optimizer)

    @property
    def weight(self) -> torch.Tensor:
        return next(self.model.parameters())

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)

    def save(self, name: str, **options: Any) -> SaveHandle:
        return self.checkpointer.save(self.state(), self.root / name, **options)

    def is_committed(self, name: str) -> bool:
        return (self.root / name / "manifest.json").exists()

    def assert_failed(self, handle: SaveHandle, error: type[BaseException], name: str) -> Any:
        """All three futures hold one error of that kind, and nothing was published."""
        found = handle.written.exception(DEADLINE_S)
        assert type(found) is error, found
        assert handle.staged.exception(0) is found and handle.durable.exception(0) is found
        assert not self.is_committed(name)
        return found

    def assert_next_works(self, name: str = "next") -> None:
        written(self.save(name))
        states.assert_same(asyncckpt.load(self.root / name), self.state())


@pytest.fixture
def checkpointer(shared_worker: RealWorker) -> Any:
    """One slot only: whoever keeps it for a save that has failed makes the next one fail."""
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, slot_timeout_s=DEADLINE_S) as found:
        yield found


@pytest.fixture
def training(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> Training:
    return Training(checkpointer, tmp_path)


# ---- torn snapshots


def in_place(training: Training) -> str:
    with torch.no_grad():
        training.weight.mul_(2)
    return "model.0.weight"


def through_a_view(training: Training) -> str:
    training.weight.detach()[3, 4:7] = 1.0
    return "model.0.weight"


def in_the_state(training: Training) -> str:
    next(iter(training.optimizer.state.values()))["exp_avg_sq"].zero_()
    return "optim.state.0.exp_avg_sq"


def by_a_module_that_is_not_attached(training: Training) -> str:
    training.model.load_state_dict({k: torch.zeros_like(v) for k, v in training.model.state_dict().items()})
    return "model.0.weight"


def by_a_load_of_another_checkpointer(training: Training) -> str:
    weights = training.state()["model"]
    with SyncCheckpointer() as other:
        other.save({"model": {k: torch.zeros_like(v) for k, v in weights.items()}}, training.root / "other")
    asyncckpt.load(training.root / "other", {"model": weights})
    return "model.0.weight"


WRITES = [
    in_place,
    through_a_view,
    in_the_state,
    by_a_module_that_is_not_attached,
    by_a_load_of_another_checkpointer,
]


@pytest.mark.parametrize("data", [False, True], ids=["", "of .data, which has counters of its own"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_past_the_hooks_fails_that_save_and_only_that(
    training: Training, gate: Gate, write: Callable[[Training], str], data: bool
) -> None:
    state = training.state()
    if data:
        state["model"] = {name: parameter.data for name, parameter in training.model.named_parameters()}
    handle = training.checkpointer.save(state, training.root / "torn", step=7)
    fqn = write(training)
    gate.open()
    error = training.assert_failed(handle, SnapshotTornError, "torn")
    assert (error.fqn, error.step, error.path) == (fqn, 7, str(training.root / "torn"))
    assert error.save_id == str(handle.save_id)
    assert isinstance(error, RuntimeError)
    training.assert_next_works()


def test_a_write_between_two_saves_tears_the_first_only(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=3) as checkpointer:
        training = Training(checkpointer, tmp_path)
        torn = training.save("torn")
        in_place(training)
        second = training.save("second")
        gate.open()
        written(second)
        training.assert_failed(torn, SnapshotTornError, "torn")
        states.assert_same(asyncckpt.load(tmp_path / "second"), training.state())
        training.assert_next_works()


# ---- failing copies


@pytest.mark.parametrize(
    "raised", [RuntimeError("cannot copy"), MemoryError(), SystemExit(3), KeyboardInterrupt(), OSError(5, "x")]
)
def test_what_the_copy_raises_ends_on_the_futures(
    training: Training, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    copy = SlotImage.copy

    def broken(image: SlotImage, tensors: Any, work: Any, *options: Any) -> None:
        if threading.current_thread().name == COPIER:
            raise raised
        copy(image, tensors, work, *options)

    with monkeypatch.context() as patch:
        patch.setattr(SlotImage, "copy", broken)
        handle = training.save("failed")
        training.optimizer.step()  # waits, and goes on
        error = training.assert_failed(handle, StagingError, "failed")
    assert repr(raised) in repr(error.__cause__)
    assert training.checkpointer.pending() == []
    training.assert_next_works()


@pytest.mark.parametrize("owner", [BackgroundCopier, threading.Thread], ids=["where it is taken", "where it starts"])
def test_a_copy_that_cannot_be_begun_fails_that_save_only(
    training: Training, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room for a thread")

    written(training.save("before"))
    for n in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "submit" if owner is BackgroundCopier else "start", broken)
            handle = training.save(f"failed-{n}")
        error = training.assert_failed(handle, StagingError, f"failed-{n}")
        assert isinstance(error.__cause__, MemoryError)
        assert training.checkpointer.pending() == []
        training.assert_next_works(f"next-{n}")


def wait_for_copier() -> None:
    """Wait until the thread of the copies has ended, which it may do after what it copied is written."""
    wait_until(lambda: COPIER not in {thread.name for thread in threading.enumerate()}, "the copier's thread has ended")


def test_where_no_thread_can_be_started_the_copy_is_made_in_save(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    written(training.save("before"))
    wait_for_copier()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handle = training.save("a")
        assert handle.staged.done()
    written(handle)
    training.assert_next_works()


def test_a_copy_that_outlasts_the_fence_is_given_up_and_training_goes_on(
    training: Training, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap.Fence.wait, "__defaults__", (0.1,))
    handle = training.save("late")
    weight = training.weight.detach().clone()
    training.optimizer.step()
    assert not torch.equal(weight, training.weight.detach()), "the step was made"
    assert not handle.staged.done()
    gate.open()
    assert "0.1 s" in str(training.assert_failed(handle, StagingError, "late"))
    training.assert_next_works()


@pytest.mark.parametrize("where", ["before the copy is begun", "after it has begun"])
def test_an_interrupted_save_leaves_nothing_behind(
    training: Training, gate: Gate, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gate.open()
    written(training.save("before"))
    take = BackgroundCopier._enqueue
    for n, interrupt in enumerate((KeyboardInterrupt, SystemExit, KeyboardInterrupt)):

        def interrupted(*arguments: Any, interrupt: type[BaseException] = interrupt) -> None:
            if where == "after it has begun":
                take(*arguments)
                assert gate.reached.wait(DEADLINE_S)
            raise interrupt

        gate.close()
        with monkeypatch.context() as patch:
            owner, name = (BackgroundCopier, "_enqueue") if where == "after it has begun" else (SaveTracker, "add")
            patch.setattr(owner, name, interrupted)
            with pytest.raises(interrupt):
                training.save(f"interrupted-{n}")
        (slot,) = slots_of(training.checkpointer)
        assert (slot.user is not None) is (where == "after it has begun"), "freed under a copy, or never"
        gate.open()
        training.optimizer.step()
        training.assert_next_works(f"next-{n}")
        assert not training.is_committed(f"interrupted-{n}")
    assert training.checkpointer.pending() == []


def test_an_interrupted_start_of_the_thread_leaves_nothing_behind(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    for n, starts in enumerate((False, True, False)):

        def interrupted(thread: threading.Thread, starts: bool = starts) -> None:
            if starts or thread.name != COPIER:
                start(thread)
            if thread.name == COPIER:
                raise KeyboardInterrupt

        wait_for_copier()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                training.save(f"interrupted-{n}")
        training.assert_next_works(f"next-{n}")


# ---- policies, callbacks


def test_a_callback_in_the_copier_s_thread_cannot_save_or_wait(training: Training, gate: Gate) -> None:
    checkpointer, found = training.checkpointer, list[Any]()

    def call(_: Any) -> None:
        for work in (
            lambda: training.save("x"),
            lambda: checkpointer.wait(1),
            checkpointer.close,
            checkpointer.fence,
            training.optimizer.step,
        ):
            try:
                work()
            except Exception as error:
                found.append(type(error))

    handle = training.save("a")
    handle.staged.add_done_callback(call)
    gate.open()
    written(handle)
    wait_until(lambda: len(found) == 5, "the callback has ended")
    assert found == [ReentrantCallError] * 5


# ---- the end of things


def test_closing_gives_up_a_copy_that_takes_too_long_and_unmaps_nothing_under_it(
    training: Training, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "CLOSE_S", 0.1)
    handle = training.save("a")
    assert gate.reached.wait(DEADLINE_S)
    (slot,) = slots_of(training.checkpointer)
    training.checkpointer.close(timeout_s=0.1)
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    assert not slot.memory.mapping.closed, "the copier still writes to it"
    gate.open()
    wait_until(lambda: slot.memory.mapping.closed, "unmapped when the copy has ended")
    assert not training.is_committed("a")
    with pytest.raises(CheckpointerClosedError):
        training.checkpointer.fence()
    training.optimizer.step()


@pytest.mark.parametrize("is_staged", [True, False])
def test_leaving_by_an_exception_waits_for_staged_as_long_as_an_exit_would(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, is_staged: bool
) -> None:
    timer = threading.Timer(0.2, gate.open)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        training = Training(checkpointer, tmp_path)
        handle = training.save("a")
        assert gate.reached.wait(DEADLINE_S)
        if is_staged:
            timer.start()
        raise ZeroDivisionError
    took_s = time.monotonic() - began
    gate.open()
    error = handle.staged.exception(DEADLINE_S)
    if is_staged:
        timer.join()
        assert error is None
        wait_until(lambda: training.is_committed("a"), "the worker commits what was staged")
        states.assert_same(asyncckpt.load(tmp_path / "a"), training.state())
    else:
        assert isinstance(error, CheckpointerClosedError)
        assert took_s < 60.0, "5 s, on a machine that others use too"


def end_of(path: pathlib.Path, worker: RealWorker) -> str:
    """Wait for the end of the save to `path`, which comes after its slot is freed, and return which it was."""

    def ends() -> list[str]:
        rows = [row for row in worker.status()["saves"] if row["path"] == str(path)]
        return [row["phase"] for row in rows if row["phase"] in save_phases.ENDED]

    wait_until(ends, "the save has ended")
    return ends()[-1]


EXIT = """
    import os, sys, threading, time, torch, asyncckpt
    from asyncckpt.staging.cpu_copy import SlotImage
    endpoint, directory, way = sys.argv[1:]
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    copy = SlotImage.copy
    def slow(*arguments):
        if threading.current_thread().name == "asyncckpt-overlap":
            time.sleep(0.2 if way == "soon" else 600)
        copy(*arguments)
    checkpointer = asyncckpt.AsyncCheckpointer(endpoint=endpoint, staging="overlap")
    checkpointer.attach(optimizer)
    SlotImage.copy = slow
    handle = checkpointer.save({"model": model.state_dict()}, f"{directory}/a")
    print(time.monotonic(), flush=True)
"""


def test_an_exit_waits_for_the_copies(
    shared_worker: RealWorker, warm_python: WarmPython, tmp_path: pathlib.Path
) -> None:
    done = warm_python.run(textwrap.dedent(EXIT), shared_worker.endpoint, str(tmp_path), "soon")
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path / "a", shared_worker) == save_phases.COMMITTED
    assert asyncckpt.load(tmp_path / "a")["model"]["weight"].shape == (1000, 1000)


def test_an_exit_waits_for_the_copies_for_five_seconds_only(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    def exit_s(number: int) -> float:
        """Let a trainer end, and return the seconds from its last line on, the interpreter's own end included."""
        (root := tmp_path / str(number)).mkdir()
        command = [sys.executable, "-c", textwrap.dedent(EXIT), shared_worker.endpoint, str(root), "never"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        ended = time.monotonic()
        assert done.returncode == 0, done.stderr
        return ended - float(done.stdout)

    assert_exits_in_time(exit_s)
    assert end_of(tmp_path / "0" / "a", shared_worker) == save_phases.ABANDONED
    assert not (tmp_path / "0" / "a" / "manifest.json").exists()


def test_a_trainer_killed_under_a_copy_publishes_nothing(
    shared_worker: RealWorker, warm_python: WarmPython, tmp_path: pathlib.Path
) -> None:
    program = textwrap.dedent(EXIT) + "time.sleep(600)\n"
    trainer = warm_python.start(program, shared_worker.endpoint, str(tmp_path), "never")
    try:  # what the worker has not been told when a trainer is killed, nobody tells it
        wait_until(lambda: str(tmp_path / "a") in paths_of(shared_worker), "the worker knows of the save")
    finally:
        trainer.close()
    assert end_of(tmp_path / "a", shared_worker) == save_phases.ABANDONED
    assert not (tmp_path / "a" / "manifest.json").exists()
    wait_until(lambda: not shared_worker.status()["slots"], "its slot is freed")


def paths_of(worker: RealWorker) -> list[str]:
    """Return where the saves that a worker knows go."""
    return [row["path"] for row in worker.status()["saves"]]


def test_a_forked_child_steps_without_waiting_for_the_parent_s_copies(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)  # whatever needs torch's threads hangs in a forked child
    checkpointer.attach(optimizer)
    state = {"w": parameter.detach().clone()}
    handle = checkpointer.save({"w": parameter.detach()}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    child = os.fork()
    if child == 0:  # no pytest in here
        try:
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            checkpointer.fence()
        except ForkedError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    gate.open()
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


@pytest.mark.parametrize("on_worker_loss", ["fail", "resubmit"])
def test_a_worker_that_dies_under_a_copy_is_replaced_and_gets_the_snapshot_unless_that_is_to_fail(
    worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, on_worker_loss: str
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, on_worker_loss=on_worker_loss) as checkpointer:
        training = Training(checkpointer, tmp_path)
        expected = copy.deepcopy(training.state())
        handle = training.save("a")
        assert gate.reached.wait(DEADLINE_S)
        (slot,) = slots_of(checkpointer)
        session = slot.session
        worker.kill()
        if on_worker_loss == "fail":
            wait_until(lambda: slot.orphaned, "the trainer knows")
            assert not slot.memory.mapping.closed
            gate.open()
            assert isinstance(handle.written.exception(DEADLINE_S), WorkerUnavailableError)
            wait_until(lambda: slot.memory.mapping.closed, "unmapped when the copy has ended")
            assert not training.is_committed("a")
            training.optimizer.step()
        else:
            wait_until(lambda: slot.session != session, "another worker has the slot")
            assert handle.phase == "staging"
            gate.open()
            written(handle)
            training.optimizer.step()
            states.assert_same(asyncckpt.load(tmp_path / "a"), expected)
        training.assert_next_works()


def test_a_checkpointer_dropped_under_a_copy_ends_when_it_has_ended(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    training = Training(AsyncCheckpointer(endpoint=shared_worker.endpoint), tmp_path)
    handle = training.save("a")
    with pytest.warns(ResourceWarning, match="without close") as said:
        del training.checkpointer
        time.sleep(0.2)  # for a session that would end at once
        gate.open()
        assert handle.staged.exception(DEADLINE_S) is None
        wait_until(lambda: gc.collect() is not None and said.list, "it is collected")
    wait_until(lambda: training.is_committed("a"), "what was staged is committed")
    training.optimizer.step()


def test_neither_an_attached_optimizer_nor_what_was_saved_is_kept_alive(training: Training) -> None:
    written(training.save("a"))
    moment = weakref.ref(training.optimizer.state[training.weight]["exp_avg"])
    weight = weakref.ref(training.weight)
    del training.optimizer
    gc.collect()
    assert moment() is None
    handle = training.checkpointer.save({"model": training.model.state_dict()}, training.root / "b")
    assert handle.staged.done(), "nobody owns it any more"
    del training.model
    gc.collect()
    assert weight() is None


# ---- memory that is swapped away


def test_swapping_a_parameters_memory_behind_the_copy_never_shows(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    weight = torch.nn.Parameter(torch.randn(1_000_000))
    expected = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    handle = checkpointer.save({"w": weight}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    weight.data = torch.zeros(1_000_000)  # the old memory is nobody's now but the copy's
    gate.open()
    written(handle)
    assert torch.equal(asyncckpt.load(tmp_path / "a")["w"], expected)


@pytest.mark.parametrize("how", ["work", "resize"])
def test_memory_that_goes_away_under_the_copy_fails_that_save_and_no_process(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    weight = torch.nn.Parameter(torch.randn(6_000_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    reached, swapped, start = threading.Event(), threading.Event(), SlotImage._start_threads

    def held(image: SlotImage, options: Any) -> None:  # it knows by now where the bytes are
        if threading.current_thread().name == COPIER:
            reached.set()
            assert swapped.wait(DEADLINE_S)
        start(image, options)

    monkeypatch.setattr(SlotImage, "_start_threads", held)
    handle = checkpointer.save({"w": weight}, tmp_path / "torn")
    assert reached.wait(DEADLINE_S)
    if how == "work":  # as a queue of torch.multiprocessing does
        weight.detach().share_memory_()
    else:
        weight.untyped_storage().resize_(8)
    swapped.set()
    error = handle.written.exception(DEADLINE_S)
    assert isinstance(error, SnapshotTornError) and error.fqn == "w"
    if how == "resize":
        weight.untyped_storage().resize_(weight.nbytes)
    written(checkpointer.save({"w": weight}, tmp_path / "next"))
    states.assert_same(asyncckpt.load(tmp_path / "next"), {"w": weight})


def test_buffers_beside_owned_parameters_in_one_storage_are_copied_at_once(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    flat = torch.arange(100.0)
    weight = torch.nn.Parameter(torch.zeros(50))
    weight.data = flat[:50]
    buffer = flat[50:]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    handle = checkpointer.save({"w": weight, "buffer": buffer}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    flat[50:] = -1.0
    gate.open()
    written(handle)
    assert asyncckpt.load(tmp_path / "a")["buffer"].tolist() == list(range(50, 100))
