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
from overlapping import Gate, backward, linear, state_of
from real_worker import DEADLINE_S, RealWorker, manifest_of, slots_of, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import (
    CheckpointerClosedError,
    ForkedError,
    ReentrantCallError,
    SaveSkippedError,
    SnapshotTornError,
    StagingError,
    WorkerUnavailableError,
)
from asyncckpt.protocol import save_phases
from asyncckpt.save_tracker import SaveTracker
from asyncckpt.staging import overlap
from asyncckpt.staging.cpu_copy import SlotImage
from asyncckpt.staging.deferred_copy import BackgroundCopier


@pytest.fixture
def checkpointer(shared_worker: RealWorker) -> Any:
    """One slot only: whoever keeps it for a save that has failed makes the next one fail."""
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, slot_timeout_s=DEADLINE_S) as found:
        yield found


def assert_failed(handle: Any, error: type[BaseException], path: pathlib.Path) -> Any:
    """All three futures hold one error of that kind, and nothing was published."""
    found = handle.written.exception(DEADLINE_S)
    assert type(found) is error, found
    assert handle.staged.exception(0) is found and handle.durable.exception(0) is found
    assert not (path / "manifest.json").exists()
    return found


def assert_next_works(checkpointer: AsyncCheckpointer, state: dict[str, Any], path: pathlib.Path) -> None:
    written(checkpointer.save(state, path))
    states.assert_same(asyncckpt.load(path), state)


# ---- torn snapshots


def in_place(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    return "model.0.weight"


def through_a_view(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    next(model.parameters()).detach()[3, 4:7] = 1.0
    return "model.0.weight"


def in_the_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    next(iter(optimizer.state.values()))["exp_avg_sq"].zero_()
    return "optim.state.0.exp_avg_sq"


def by_a_module_that_is_not_attached(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    return "model.0.weight"


@pytest.mark.parametrize(
    "write",
    [
        in_place,
        through_a_view,
        in_the_state,
        by_a_module_that_is_not_attached,
    ],
)
def test_a_write_past_the_hooks_fails_that_save_and_only_that(
    checkpointer: AsyncCheckpointer,
    tmp_path: pathlib.Path,
    gate: Gate,
    write: Callable[[torch.nn.Module, torch.optim.Optimizer], str],
) -> None:
    model, optimizer = linear()
    backward(model)
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "torn", step=7)
    fqn = write(model, optimizer)
    gate.open()
    error = assert_failed(handle, SnapshotTornError, tmp_path / "torn")
    assert (error.fqn, error.step, error.path) == (fqn, 7, str(tmp_path / "torn"))
    assert error.save_id == str(handle.save_id)
    assert isinstance(error, RuntimeError)
    assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / "next")


def test_loading_from_elsewhere_into_a_model_that_is_being_copied_tears(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    gate.open()
    written(checkpointer.save(state_of(model, optimizer), tmp_path / "before"))
    checkpointer.attach(optimizer)
    gate.close()
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "torn")
    asyncckpt.load(tmp_path / "before", state_of(model, optimizer))
    gate.open()
    assert_failed(handle, SnapshotTornError, tmp_path / "torn")


def test_a_state_dict_of_data_is_watched_by_the_optimizer_s_own_counters(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    checkpointer.attach(optimizer)
    handle = checkpointer.save({"w": parameter.data}, tmp_path / "torn")  # .data has a counter of its own
    with torch.no_grad():
        parameter.add_(1)
    gate.open()
    assert assert_failed(handle, SnapshotTornError, tmp_path / "torn").fqn == "w"


@pytest.mark.parametrize("when", ["before its copy", "after its copy"])
def test_digests_find_writes_that_no_counter_sees(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    model, optimizer = linear()
    copy, writing = SlotImage.copy, [False]

    def copy_and_write(image: SlotImage, tensors: Any, work: Any, *options: Any) -> None:
        behind = writing[0] and threading.current_thread().name == "asyncckpt-overlap"
        if behind and when == "before its copy":
            next(model.parameters()).data.add_(1)
        copy(image, tensors, work, *options)
        if behind and when == "after its copy":
            next(model.parameters()).data.add_(1)

    monkeypatch.setattr(SlotImage, "copy", copy_and_write)
    for check, error in (("off", None), ("sample", SnapshotTornError), ("hash", SnapshotTornError)):
        with AsyncCheckpointer(endpoint=shared_worker.endpoint, overlap_check=check) as checkpointer:
            checkpointer.attach(optimizer)
            writing[0] = False
            written(checkpointer.save(state_of(model, optimizer), tmp_path / f"{check}-quiet"))
            writing[0] = True
            handle = checkpointer.save(state_of(model, optimizer), tmp_path / check)
            found = handle.written.exception(DEADLINE_S)
            assert found is None if error is None else type(found) is error
            if found is not None:
                assert found.fqn == "model.0.weight"  # type: ignore[attr-defined]
                assert not (tmp_path / check / "manifest.json").exists()


@pytest.mark.parametrize("check", ["off", "sample", "hash"])
def test_a_step_s_own_writes_never_tear(shared_worker: RealWorker, tmp_path: pathlib.Path, check: str) -> None:
    model, optimizer = linear(fused=True)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, overlap_check=check) as checkpointer:
        checkpointer.attach(optimizer)
        for n in range(20):
            handle = checkpointer.save(state_of(model, optimizer), tmp_path / str(n))
            backward(model)
            optimizer.step()
            assert handle.staged.exception(0) is None
        checkpointer.wait(DEADLINE_S)
        assert handle.written.exception(0) is None


# ---- failing copies


@pytest.mark.parametrize(
    "raised", [RuntimeError("cannot copy"), MemoryError(), SystemExit(3), KeyboardInterrupt(), OSError(5, "x")]
)
def test_what_the_copy_raises_ends_on_the_futures(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    copy = SlotImage.copy

    def broken(image: SlotImage, tensors: Any, work: Any, *options: Any) -> None:
        if threading.current_thread().name == "asyncckpt-overlap":
            raise raised
        copy(image, tensors, work, *options)

    with monkeypatch.context() as patch:
        patch.setattr(SlotImage, "copy", broken)
        handle = checkpointer.save(state_of(model, optimizer), tmp_path / "failed")
        optimizer.step()  # waits, and goes on
        error = assert_failed(handle, StagingError, tmp_path / "failed")
    assert repr(raised) in repr(error.__cause__)
    assert checkpointer.pending() == []
    assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / "next")


def test_where_no_thread_can_be_started_the_copy_is_made_in_save(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    written(checkpointer.save(state_of(model, optimizer), tmp_path / "before"))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
        assert handle.staged.done()
    written(handle)
    assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / "next")


def test_a_copy_that_outlasts_the_fence_is_given_up_and_training_goes_on(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap.Fence.wait, "__defaults__", (0.1,))
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "late")
    weight = next(model.parameters()).detach().clone()
    backward(model)
    optimizer.step()
    assert not torch.equal(weight, next(model.parameters()).detach()), "the step was made"
    assert not handle.staged.done()
    gate.open()
    assert "0.1 s" in str(assert_failed(handle, StagingError, tmp_path / "late"))
    assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / "next")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["before the copy is begun", "after it has begun"])
def test_an_interrupted_save_leaves_nothing_behind(
    checkpointer: AsyncCheckpointer,
    tmp_path: pathlib.Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: type[BaseException],
    where: str,
) -> None:
    model, optimizer = linear()
    gate.open()
    checkpointer.attach(optimizer)
    written(checkpointer.save(state_of(model, optimizer), tmp_path / "before"))
    take = BackgroundCopier._enqueue

    def raise_interrupt(*_: Any) -> None:
        raise interrupt

    def take_and_raise(copier: BackgroundCopier, copy: Any) -> None:
        take(copier, copy)
        assert gate.reached.wait(DEADLINE_S)
        raise interrupt

    for n in range(3):
        gate.close()
        with monkeypatch.context() as patch:
            if where == "after it has begun":
                patch.setattr(BackgroundCopier, "_enqueue", take_and_raise)
            else:
                patch.setattr(SaveTracker, "add", raise_interrupt)
            with pytest.raises(interrupt):
                checkpointer.save(state_of(model, optimizer), tmp_path / f"interrupted-{n}")
        (slot,) = slots_of(checkpointer)
        assert (slot.user is not None) is (where == "after it has begun"), "freed under a copy, or never"
        gate.open()
        optimizer.step()
        assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / f"next-{n}")
    assert checkpointer.pending() == []
    assert [p.name for p in tmp_path.glob("interrupted-*/manifest.json")] == []


def test_an_interrupted_start_of_the_thread_leaves_nothing_behind(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    start = threading.Thread.start

    def before(thread: threading.Thread) -> None:
        if thread.name == "asyncckpt-overlap":
            raise KeyboardInterrupt
        start(thread)

    def after(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "asyncckpt-overlap":
            raise KeyboardInterrupt

    for n, interrupted in enumerate((before, after, before)):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(state_of(model, optimizer), tmp_path / f"interrupted-{n}")
        assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / f"next-{n}")


# ---- policies, callbacks


def test_the_policy_decides_while_the_only_slot_is_being_copied_into(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, on_busy="skip") as checkpointer:
        checkpointer.attach(optimizer)
        first = checkpointer.save(state_of(model, optimizer), tmp_path / "1")
        second = checkpointer.save(state_of(model, optimizer), tmp_path / "2")
        assert isinstance(second.staged.exception(0), SaveSkippedError)
        gate.open()
        written(first)


def test_a_callback_in_the_copier_s_thread_cannot_save_or_wait(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    found: list[Any] = []

    def call(_: Any) -> None:
        for work in (
            lambda: checkpointer.save({}, tmp_path / "x"),
            lambda: checkpointer.wait(1),
            checkpointer.close,
            checkpointer.fence,
            optimizer.step,
        ):
            try:
                work()
            except Exception as error:
                found.append(type(error))

    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    handle.staged.add_done_callback(call)
    gate.open()
    written(handle)
    wait_until(lambda: len(found) == 5, "the callback has ended")
    assert found == [ReentrantCallError] * 5


# ---- the end of things


def test_closing_waits_for_a_copy_and_its_commit(shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate) -> None:
    model, optimizer = linear()
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    checkpointer.close()
    timer.join()
    assert handle.written.exception(0) is None


def test_closing_gives_up_a_copy_that_takes_too_long_and_unmaps_nothing_under_it(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.staging.overlap.CLOSE_S", 0.1)
    model, optimizer = linear()
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    (slot,) = slots_of(checkpointer)
    checkpointer.close(timeout_s=0.1)
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    assert not slot.memory.mapping.closed, "the copier still writes to it"
    gate.open()
    wait_until(lambda: slot.memory.mapping.closed, "unmapped when the copy has ended")
    assert not (tmp_path / "a" / "manifest.json").exists()
    with pytest.raises(CheckpointerClosedError):
        checkpointer.fence()
    optimizer.step()


def test_leaving_by_an_exception_waits_until_all_is_staged(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    state = state_of(model, optimizer)
    timer = threading.Timer(0.2, gate.open)
    with pytest.raises(ZeroDivisionError), AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        checkpointer.attach(optimizer)
        handle = checkpointer.save(state, tmp_path / "a")
        timer.start()
        raise ZeroDivisionError
    timer.join()
    assert handle.staged.exception(0) is None
    wait_until((tmp_path / "a" / "manifest.json").exists, "the worker commits what was staged")
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


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


@pytest.mark.parametrize("way", ["soon", "never"])
def test_an_exit_waits_for_the_copies_but_five_seconds_only(
    shared_worker: RealWorker, tmp_path: pathlib.Path, way: str
) -> None:
    def exit_s(number: int) -> float:
        """Let a trainer end, and return the seconds from its last line on, the interpreter's own end included."""
        (root := tmp_path / str(number)).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(EXIT), shared_worker.endpoint, str(root), way],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        ended = time.monotonic()
        assert done.returncode == 0, done.stderr
        return ended - float(done.stdout)

    assert_exits_in_time(exit_s)
    tmp_path /= "0"
    assert end_of(tmp_path / "a", shared_worker) == (save_phases.COMMITTED if way == "soon" else save_phases.ABANDONED)
    assert (tmp_path / "a" / "manifest.json").exists() is (way == "soon")
    if way == "soon":
        assert asyncckpt.load(tmp_path / "a")["model"]["weight"].shape == (1000, 1000)


def test_a_trainer_killed_under_a_copy_publishes_nothing(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    program = textwrap.dedent(EXIT) + "time.sleep(600)\n"
    arguments = [sys.executable, "-c", program, shared_worker.endpoint, str(tmp_path), "never"]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as trainer:
        try:  # what the worker has not been told when a trainer is killed, nobody tells it
            wait_until(lambda: str(tmp_path / "a") in paths_of(shared_worker), "the worker knows of the save")
        finally:
            trainer.kill()
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


def test_a_worker_that_dies_under_a_copy_fails_that_save_and_the_next_one_works(
    worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=worker.endpoint, on_worker_loss="fail") as checkpointer:
        gate.open()
        checkpointer.attach(optimizer)
        written(checkpointer.save(state_of(model, optimizer), tmp_path / "before"))
        gate.close()
        handle = checkpointer.save(state_of(model, optimizer), tmp_path / "lost")
        assert gate.reached.wait(DEADLINE_S)
        (slot,) = slots_of(checkpointer)
        worker.kill()
        wait_until(lambda: slot.orphaned, "the trainer knows")
        assert not slot.memory.mapping.closed
        gate.open()
        assert isinstance(handle.written.exception(DEADLINE_S), WorkerUnavailableError)
        wait_until(lambda: slot.memory.mapping.closed, "unmapped when the copy has ended")
        optimizer.step()
        assert_next_works(checkpointer, state_of(model, optimizer), tmp_path / "next")
    assert not (tmp_path / "lost" / "manifest.json").exists()


def test_a_worker_that_dies_under_a_copy_is_replaced_and_gets_the_snapshot_when_it_is_sealed(
    worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.attach(optimizer)
        state = state_of(model, optimizer)
        expected = copy.deepcopy(state)
        handle = checkpointer.save(state, tmp_path / "kept")
        assert gate.reached.wait(DEADLINE_S)
        (slot,) = slots_of(checkpointer)
        session = slot.session
        worker.kill()
        wait_until(lambda: slot.session != session, "another worker has the slot")
        assert handle.phase == "staging"
        gate.open()
        written(handle)
        optimizer.step()
        states.assert_same(asyncckpt.load(tmp_path / "kept"), expected)


def test_a_checkpointer_dropped_under_a_copy_ends_when_it_has_ended(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    with pytest.warns(ResourceWarning, match="without close") as said:
        del checkpointer
        time.sleep(0.2)  # for a session that would end at once
        gate.open()
        assert handle.staged.exception(DEADLINE_S) is None
        wait_until(lambda: gc.collect() is not None and said.list, "it is collected")
    wait_until((tmp_path / "a" / "manifest.json").exists, "what was staged is committed")
    optimizer.step()


def test_an_attached_optimizer_is_not_kept_alive(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    written(checkpointer.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a"))
    moment = weakref.ref(optimizer.state[next(model.parameters())]["exp_avg"])
    del optimizer
    gc.collect()
    assert moment() is None
    assert checkpointer.save({"model": model.state_dict()}, tmp_path / "b").staged.done(), "nobody owns it any more"


def test_a_save_that_has_been_copied_keeps_nothing_of_the_state(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    checkpointer.attach(optimizer)
    handle = checkpointer.save({"w": parameter.detach()}, tmp_path / "a")
    written(handle)
    watched = weakref.ref(parameter)
    del parameter, optimizer
    gc.collect()
    assert watched() is None
    assert manifest_of(tmp_path / "a")["save_id"] == str(handle.save_id)


# ---- memory that is swapped away


def test_swapping_a_parameters_memory_behind_the_copy_never_shows(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.randn(3_000_000))
    expected = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    gate = Gate(monkeypatch)
    handle = checkpointer.save({"w": weight}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    weight.data = torch.zeros(3_000_000)  # the old memory is nobody's now but the copy's
    gate.open()
    written(handle)
    assert torch.equal(asyncckpt.load(tmp_path / "a")["w"], expected)


@pytest.mark.parametrize("how", ["work", "resize"])
def test_memory_that_goes_away_under_the_copy_fails_that_save_and_no_process(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    weight = torch.nn.Parameter(torch.randn(30_000_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    reached, swapped, start = threading.Event(), threading.Event(), SlotImage._start_threads

    def held(image: SlotImage, options: Any) -> None:  # it knows by now where the bytes are
        if threading.current_thread().name == "asyncckpt-overlap":
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
    assert assert_failed(handle, SnapshotTornError, tmp_path / "torn").fqn == "w"
    if how == "resize":
        weight.untyped_storage().resize_(weight.nbytes)
    assert_next_works(checkpointer, {"w": weight}, tmp_path / "next")


def test_the_step_of_another_optimizer_over_the_same_parameters_waits(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    backward(model)
    gate = Gate(monkeypatch)
    state = state_of(model, optimizer)
    expected = {name: value.clone() for name, value in state["model"].items()}
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    with gate.held_back(other.step):
        pass
    written(handle)
    states.assert_same(dict(asyncckpt.load(tmp_path / "a", keys=["model"])["model"]), expected)


def test_buffers_beside_owned_parameters_in_one_storage_are_copied_at_once(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.arange(100.0)
    weight = torch.nn.Parameter(torch.zeros(50))
    weight.data = flat[:50]
    buffer = flat[50:]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer.attach(optimizer)
    gate = Gate(monkeypatch)
    handle = checkpointer.save({"w": weight, "buffer": buffer}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    flat[50:] = -1.0
    gate.open()
    written(handle)
    assert asyncckpt.load(tmp_path / "a")["buffer"].tolist() == list(range(50, 100))
