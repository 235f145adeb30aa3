"""Stock `dcp.save` and `dcp.async_save` through a worker: what it writes, what fails, and who may die when."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import real_worker
import states
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import asyncckpt
from asyncckpt.client import launcher, slot_stream
from asyncckpt.client.pending_saves import WriteFuture
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.dcp import StorageReader, StorageWriter, worker_part, worker_save
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InsufficientMemoryError,
    ReentrantCallError,
    SaveFailedError,
    WorkerUnavailableError,
)
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.warm_python import WarmPython


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The worker writes a slot while it is filled, where the parameter says so."""
    if request.param:
        monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)


@pytest.fixture
def writer(shared_worker: real_worker.RealWorker, tmp_path: Path) -> Iterator[StorageWriter]:
    """A writer of this test alone, with the module's worker."""
    made = StorageWriter(tmp_path / "c", endpoint=shared_worker.endpoint)
    yield made
    made.close()


def state(seed: int = 0, rows: int = 300) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"w": torch.randn(rows, 100), "b": torch.randn(7).bfloat16(), "none": torch.empty(0, 3)},
        "nested": [{"lr": 0.1, "params": [0, 1]}, {"w": torch.ones(3)}],
        "raw": b"\x00\xff" * 40,
        "step": 7 + seed,
    }


def assert_saved(path: Path, expected: dict[str, Any]) -> None:
    states.assert_same(asyncckpt.load(path), expected)
    states.assert_same(dcp_calls.load(dcp_calls.erased(expected), StorageReader(path)), expected)
    verdict = verify_checkpoint(str(path), Files())
    assert verdict.state == "ok" and verdict.contents is not None
    assert verdict.contents.manifest.step == expected["step"]


def failure_of(save: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        save()
    ((found, _),) = caught.value.failures.values()
    return found


def gone(path: Path) -> None:
    """Wait until nothing is left; the worker lets the directory itself stand."""
    real_worker.wait_until(lambda: not path.exists() or not os.listdir(path), f"{path} is empty")


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "one_file", "early"), [(1, True, False), (3, False, False), (1, False, True), (3, True, True)],
    indirect=["early"],
)  # fmt: skip
def test_what_is_saved_is_there(
    writer: StorageWriter, tmp_path: Path, threads: int, one_file: bool, early: None
) -> None:
    writer.thread_count, writer.single_file_per_rank = threads, one_file
    for number in range(2):
        dcp_calls.save(state(number), writer, checkpoint_id=tmp_path / str(number))
    dcp_calls.save({"step": 3, "a": "b"}, writer, checkpoint_id=tmp_path / "no tensors")
    for number in range(2):
        assert_saved(tmp_path / str(number), state(number))
        n_files = sum(name.endswith(".safetensors") for name in os.listdir(tmp_path / str(number)))
        assert n_files == (1 if one_file else 4)
    assert_saved(tmp_path / "no tensors", {"step": 3, "a": "b"})


def test_a_layout_that_is_set_for_checkpointers_is_not_for_stock_saves(
    shared_worker: real_worker.RealWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_LAYOUT", "dcp")
    writer = StorageWriter(tmp_path / "c", endpoint=shared_worker.endpoint)
    dcp_calls.save(state(), writer)
    writer.close()
    assert_saved(tmp_path / "c", state())
    assert not [name for name in os.listdir(tmp_path / "c") if name.endswith("distcp") or name == ".metadata"]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_larger_than_the_memory_passes_through_it(
    shared_worker: real_worker.RealWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    before = shared_worker.status()["counters"].get("saves_ringed", 0)
    writer = StorageWriter(
        tmp_path / "c", endpoint=shared_worker.endpoint, arena_limit_bytes=24 << 20, thread_count=threads
    )
    with caplog.at_level(logging.WARNING, "asyncckpt.dcp"):
        dcp_calls.save(state(rows=100_000), writer)
    assert "in segments" in caplog.text
    assert shared_worker.status()["counters"]["saves_ringed"] == before + 1
    assert_saved(tmp_path / "c", state(rows=100_000))
    writer.close()


def test_a_machine_without_memory_for_all_of_it_gets_segments(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_part, "SMALL_RING_NBYTES", 24 << 20)
    found = worker_part._Part._slot

    def scarce(part: Any, nbytes: int, spare_nbytes: int = 0) -> Any:
        if nbytes > 24 << 20:
            raise InsufficientMemoryError("there is not so much", nbytes=nbytes)
        return found(part, nbytes, spare_nbytes)

    monkeypatch.setattr(worker_part._Part, "_slot", scarce)
    dcp_calls.save(state(rows=100_000), writer)
    assert_saved(tmp_path / "c", state(rows=100_000))


def test_a_request_that_is_longer_than_its_room_gets_another_slot(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_part._Part, "_rooms", lambda part, nbytes: (4096, 4096))
    moved = []
    move = worker_part.UnsealedPart._move
    monkeypatch.setattr(
        worker_part.UnsealedPart, "_move", lambda one, nbytes: (moved.append(nbytes), move(one, nbytes))
    )
    long = {**state(), "text": "x" * 50_000}
    for number in range(3):
        dcp_calls.save(long, writer, checkpoint_id=tmp_path / str(number))
        assert_saved(tmp_path / str(number), long)
    assert len(moved) >= 1


def test_a_request_that_is_too_long_for_a_slot_that_is_being_written_is_said(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)
    monkeypatch.setattr(worker_part._Part, "_rooms", lambda part, nbytes: (8192, 8192))
    error = failure_of(lambda: dcp_calls.save({**state(), "text": "x" * 50_000}, writer))
    assert isinstance(error, SaveFailedError) and error.code == "request"
    gone(tmp_path / "c")
    monkeypatch.undo()
    dcp_calls.save(state(), writer)
    assert_saved(tmp_path / "c", state())


def test_slots_are_kept_for_the_next_save_and_given_back_by_close(
    shared_worker: real_worker.RealWorker, tmp_path: Path
) -> None:
    writer = StorageWriter(tmp_path / "0", endpoint=shared_worker.endpoint)
    for number in range(3):
        dcp_calls.save(state(number), writer, checkpoint_id=tmp_path / str(number))
        assert len(shared_worker.status()["slots"]) == 1
    writer.close()
    real_worker.wait_until(lambda: not shared_worker.status()["slots"], "the slot is given back")
    dcp_calls.save(state(3), writer, checkpoint_id=tmp_path / "3")
    assert_saved(tmp_path / "3", state(3))
    del writer
    real_worker.wait_until(lambda: not shared_worker.status()["sessions"], "nobody holds the writer")


def test_a_pickled_writer_and_a_forked_child_s_are_their_own(writer: StorageWriter, tmp_path: Path) -> None:
    dcp_calls.save(state(0), writer, checkpoint_id=tmp_path / "0")
    other = pickle.loads(pickle.dumps(writer))
    dcp_calls.save(state(1), other, checkpoint_id=tmp_path / "1")
    other.close()
    child = os.fork()
    if child == 0:
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dcp_calls.save(state(2), writer, checkpoint_id=tmp_path / "2")
    for number in range(3):
        assert_saved(tmp_path / str(number), state(number))


# ---- what fails -----------------------------------------------------------------------------------------------------


class Fails(DefaultSavePlanner):
    """Raises at one tensor."""

    def lookup_object(self, index: Any) -> Any:
        if index.fqn == "model.w":
            raise ZeroDivisionError("model.w")
        return super().lookup_object(index)


@pytest.mark.parametrize(("early", "threads"), [(False, 3), (True, 1)], indirect=["early"])
def test_a_planner_that_fails_leaves_the_older_one_alone(
    writer: StorageWriter, tmp_path: Path, early: None, threads: int
) -> None:
    writer.thread_count = threads
    error = failure_of(lambda: dcp_calls.save(state(), writer, planner=Fails()))
    assert isinstance(error, ZeroDivisionError)
    gone(tmp_path / "c")
    dcp_calls.save(state(1), writer)
    failure_of(lambda: dcp_calls.save(state(2), writer, planner=Fails()))
    assert_saved(tmp_path / "c", state(1))
    dcp_calls.save(state(3), writer)
    assert_saved(tmp_path / "c", state(3))
    assert len(os.listdir(tmp_path / "c")) == 4


@pytest.mark.parametrize("kind", ["whole", "early", "ring"])
def test_a_tensor_that_nobody_has_stored_is_found_after_the_same_plan_was_whole(
    shared_worker: real_worker.RealWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Forgets(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            about = metadata.state_dict_metadata
            return plans, dataclasses.replace(metadata, state_dict_metadata={**about, "more": about["model.w"]})

    if kind == "early":
        monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)
    fields = {"arena_limit_bytes": 24 << 20} if kind == "ring" else {}
    rows = 100_000 if kind == "ring" else 300
    writer = StorageWriter(tmp_path / "c", endpoint=shared_worker.endpoint, **fields)
    dcp_calls.save(state(rows=rows), writer, checkpoint_id=tmp_path / "whole")
    error = failure_of(
        lambda: dcp_calls.save(state(rows=rows), writer, checkpoint_id=tmp_path / "hole", planner=Forgets())
    )
    assert isinstance(error, SaveFailedError) and (error.code, "'more'" in str(error)) == ("coverage", True)
    gone(tmp_path / "hole")
    assert_saved(tmp_path / "whole", state(rows=rows))
    writer.close()


def test_what_stands_is_replaced_only_where_that_is_wanted(
    shared_worker: real_worker.RealWorker, writer: StorageWriter, tmp_path: Path
) -> None:
    dcp_calls.save(state(), writer)
    writer.overwrite = False
    assert isinstance(failure_of(lambda: dcp_calls.save(state(1), writer)), CheckpointExistsError)
    assert_saved(tmp_path / "c", state())


def test_the_file_system_s_errors_come_from_the_worker(writer: StorageWriter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = failure_of(lambda: dcp_calls.save(state(), writer, checkpoint_id=tmp_path / "file" / "c"))
    assert isinstance(error, SaveFailedError) and error.code == "ENOTDIR"
    dcp_calls.save(state(), writer, checkpoint_id=tmp_path / "c")
    assert_saved(tmp_path / "c", state())


def test_an_endpoint_that_was_named_must_answer(endpoint: str, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", endpoint=endpoint, worker_start_timeout_s=0.5)
    assert isinstance(failure_of(lambda: dcp_calls.save(state(), writer)), WorkerUnavailableError)
    assert not (tmp_path / "c").exists()
    writer.close()


def test_without_any_worker_the_process_writes_by_itself_and_says_so(
    default_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise WorkerUnavailableError("no process can be started here")

    monkeypatch.setattr(launcher, "start_worker", none)
    writer = StorageWriter(tmp_path / "c", worker_start_timeout_s=0.5)
    with caplog.at_level(logging.WARNING, "asyncckpt.dcp"):
        dcp_calls.save(state(), writer)
    assert "the training processes write it themselves" in caplog.text
    assert "no process can be started here" in caplog.text
    assert_saved(tmp_path / "c", state())
    writer.close()


def test_every_setting_reaches_the_worker_s_side(tmp_path: Path) -> None:
    given = {name: 5 for name in worker_save.FIELDS - {"on_worker_loss"}} | {"on_worker_loss": "fail"}
    made = StorageWriter(tmp_path / "c", **given)
    config = made._by_worker._config  # type: ignore[union-attr]
    assert {name: getattr(config, name) for name in given} == given


# ---- deaths ---------------------------------------------------------------------------------------------------------


TRAINER = """
import os, signal, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from asyncckpt.dcp import StorageWriter, worker_part, worker_save

warnings.simplefilter("ignore")
endpoint, path, when = sys.argv[1:]
seal = worker_part.UnsealedPart.seal

def sealed(one, metadata, results):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    seal(one, metadata, results)
    os.kill(os.getpid(), signal.SIGKILL)

worker_part.UnsealedPart.seal = sealed
state = {"w": torch.arange(50_000.0), "step": 5}
future = dcp.async_save(state, storage_writer=StorageWriter(path, endpoint=endpoint), no_dist=True)
future.result(60)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_that_is_killed_once_all_is_sealed_loses_nothing(
    worker: real_worker.RealWorker, warm_python: WarmPython, tmp_path: Path, when: str
) -> None:
    path = tmp_path / "c"
    assert warm_python.run(TRAINER, worker.endpoint, str(path), when).returncode == -signal.SIGKILL
    real_worker.wait_until(lambda: not worker.status()["sessions"] and not worker.status()["jobs"], "all has ended")
    if when == "after":
        real_worker.wait_until((path / "manifest.json").exists, "it is committed")
        assert_saved(path, {"w": torch.arange(50_000.0), "step": 5})
    else:
        with pytest.raises(CheckpointNotFoundError):
            asyncckpt.load(path)


@pytest.mark.parametrize("kind", ["whole", "early", "ring"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_is_killed_is_replaced_and_costs_at_most_a_save_through_a_ring(
    default_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, when: str
) -> None:
    if kind == "early":
        monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)
    fields = {"arena_limit_bytes": 24 << 20} if kind == "ring" else {}
    writer = StorageWriter(tmp_path / "c", **fields)
    seal, killed = worker_part.UnsealedPart.seal, []

    def kill(one: Any) -> None:
        pid = one.process.connect().worker.pid
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    def sealed(one: Any, metadata: Any, results: Any) -> Any:
        if when == "before":
            kill(one)
        future = seal(one, metadata, results)
        if when == "after" and not future.done():
            kill(one)
        return future

    monkeypatch.setattr(worker_part.UnsealedPart, "seal", sealed)
    expected = state(rows=100_000 if kind == "ring" else 3000)
    try:
        if kind != "ring":
            dcp_calls.save(expected, writer)
        else:
            try:
                dcp_calls.save(expected, writer)
                assert when == "after"
            except CheckpointException as caught:
                ((error, _),) = caught.failures.values()
                assert isinstance(error, SaveFailedError) and error.code == "stream_lost"
                gone(tmp_path / "c")
                monkeypatch.setattr(worker_part.UnsealedPart, "seal", seal)
                dcp_calls.save(expected, writer)
        assert_saved(tmp_path / "c", expected)
    finally:
        endpoint = writer._by_worker._session.endpoint  # type: ignore[union-attr]
        writer.close()
        real_worker.stop_whoever_serves(endpoint)
    assert killed or when == "after"


# ---- one writer, two saves at once ----------------------------------------------------------------------------------


class Waits(DefaultSavePlanner):
    """Stops in the middle of the staging until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def lookup_object(self, index: Any) -> Any:
        if index.fqn == "model.b":
            self.is_there.set()
            assert self.goes_on.wait(60)
        return super().lookup_object(index)


@pytest.mark.parametrize(("use_worker", "rows"), [(True, 300), (True, 100_000), (False, 300)])
def test_a_writer_whose_save_is_being_staged_by_another_thread_is_refused_and_that_save_goes_on(
    shared_worker: real_worker.RealWorker, tmp_path: Path, rows: int, use_worker: bool
) -> None:
    endpoint = {"endpoint": shared_worker.endpoint} if use_worker else {}
    writer = StorageWriter(tmp_path / "0", use_worker=use_worker, **endpoint)
    dcp_calls.save(state(0, rows), writer)
    planner = Waits()
    seconds: list[Callable[[], Any]] = [
        lambda: dcp_calls.save(state(2, rows), writer, checkpoint_id=tmp_path / "2"),
        writer.reset,
        writer.close,
    ]
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(dcp_calls.save, state(1, rows), writer, checkpoint_id=tmp_path / "1", planner=planner)
        assert planner.is_there.wait(60)
        for second in seconds:
            with pytest.raises(ReentrantCallError):
                second()
        planner.goes_on.set()
        saving.result(60)
    assert_saved(tmp_path / "1", state(1, rows))
    assert not (tmp_path / "2").exists()
    dcp_calls.save(state(3, rows), writer, checkpoint_id=tmp_path / "3")
    assert_saved(tmp_path / "3", state(3, rows))
    writer.close()


def test_a_save_that_another_thread_has_taken_the_writer_from_between_two_steps_ends_by_a_typed_error(
    writer: StorageWriter, tmp_path: Path
) -> None:
    staged, goes_on = threading.Event(), threading.Event()

    class Between(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            staged.set()
            assert goes_on.wait(60)
            return super().create_global_plan(all_plans)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(dcp_calls.save, state(1), writer, checkpoint_id=tmp_path / "1", planner=Between())
        assert staged.wait(60)
        dcp_calls.save(state(2), writer, checkpoint_id=tmp_path / "2")
        goes_on.set()
        error = failure_of(lambda: saving.result(60))
    assert isinstance(error, ReentrantCallError)
    assert_saved(tmp_path / "2", state(2))
    assert not (tmp_path / "1").exists()


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def slots_of(writer: StorageWriter) -> list[Any]:
    assert writer._by_worker is not None and writer._by_worker._session is not None
    process = writer._by_worker._session._client
    assert process is not None
    return process.pool.held()


def interrupted_handover(pool: SlotPool, slot: Any, staged: Any = SlotPool.staged) -> None:
    signal.raise_signal(signal.SIGINT)
    staged(pool, slot)


def interrupted_wait(future: WriteFuture, timeout_s: float | None = None) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("rows", [300, 100_000])
def test_ctrl_c_in_the_middle_of_the_handover_waits_for_its_end(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    dcp_calls.save(state(rows=rows), writer, checkpoint_id=tmp_path / "0")
    for number in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(SlotPool, "staged", interrupted_handover)
            error = failure_of(lambda n=number: dcp_calls.save(state(n, rows), writer, checkpoint_id=tmp_path / str(n)))
        assert isinstance(error, KeyboardInterrupt)
    real_worker.wait_until(lambda: all(slot.free for slot in slots_of(writer)), "no slot is in use")
    for number in (1, 2):  # it was handed over
        assert_saved(tmp_path / str(number), state(number, rows))


@pytest.mark.parametrize(
    ("owner", "name", "interrupted"),
    [(SlotPool, "staged", interrupted_handover), (WriteFuture, "result", interrupted_wait)],
)
def test_a_save_waits_for_an_earlier_one_to_the_same_path_that_ctrl_c_met(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, interrupted: Any
) -> None:
    for number in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            error = failure_of(lambda n=number: dcp_calls.save(state(n, 100_000), writer))
        assert isinstance(error, KeyboardInterrupt)
        later = state(number + 10)
        dcp_calls.save(later, writer)
        assert_saved(tmp_path / "c", later)


def test_a_time_limit_that_ends_the_wait_for_the_commit_is_not_said_to_have_published_nothing(
    writer: StorageWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: Any) -> Any:
        raise TimeoutError("the alarm rang")

    with monkeypatch.context() as patched:
        patched.setattr(WriteFuture, "result", too_late)
        error = failure_of(lambda: dcp_calls.save(state(1), writer))
    assert type(error) is TimeoutError and str(error) == "the alarm rang"
    real_worker.wait_until(lambda: all(slot.free for slot in slots_of(writer)), "no slot is in use")
    assert_saved(tmp_path / "c", state(1))
