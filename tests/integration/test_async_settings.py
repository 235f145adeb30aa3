"""AsyncCheckpointer with a real worker: what each setting changes, own parts among them, and which worker it finds."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import states
import torch
from real_worker import (
    DEADLINE_S,
    RealWorker,
    manifest_of,
    saved_at_last,
    slots_of,
    stop_whoever_serves,
    wait_until,
    written,
)

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointerConfig, RankInfo, cli
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    CheckpointExistsError,
    CommitTimeoutError,
    ConfigError,
    PendingSavesError,
    WorkerUnavailableError,
)
from asyncckpt.format.index import decode_index
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import decode_structure
from asyncckpt.memory.slot import STATE_EMPTY
from asyncckpt.protocol.request import decode_request
from asyncckpt.staging.cpu_copy import SlotImage

STATE = {"w": torch.arange(100_000.0), "n": {"lr": 0.1}}


# ---- settings -------------------------------------------------------------------------------------------------------


def test_without_fsync_the_manifest_says_so(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, fsync=False) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
    assert manifest_of(tmp_path / "a")["fsync"] is False


def test_files_per_rank_spreads_the_tensors(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    state = {f"t{n}": torch.full((1000,), float(n)) for n in range(9)}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, files_per_rank=3) as checkpointer:
        written(checkpointer.save(state, tmp_path / "a"))
    sizes = [p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 1000
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


@pytest.mark.parametrize("files", [1, 3])
def test_no_shard_file_is_larger_than_the_limit_and_the_index_knows_which_holds_what(
    shared_worker: RealWorker, tmp_path: pathlib.Path, files: int
) -> None:
    state = {f"t{n}": torch.full((n, 1000), float(n)) for n in range(9)} | {"large": torch.randn(3, 2, 40_000)}
    limit = 100_000
    with AsyncCheckpointer(
        endpoint=shared_worker.endpoint, max_shard_bytes=limit, files_per_rank=files
    ) as checkpointer:
        written(checkpointer.save(state, tmp_path / "a"))
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors")}
    assert max(sizes.values()) <= limit and len(sizes) >= 12
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    (found,) = (decode_index(p.read_bytes()) for p in (tmp_path / "a").glob("*.index"))
    for entry in decode_structure(found.structure).tensors:
        for chunk in entry.chunks:
            data = (tmp_path / "a" / found.shards[chunk.part].name).read_bytes()
            assert entry.fqn in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize(("given", "asked"), [(None, 0), (5, 5)])
def test_write_threads_are_asked_for(
    shared_worker: RealWorker, tmp_path: pathlib.Path, given: int | None, asked: int
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, write_threads=given) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        memory = slots_of(checkpointer)[0].memory
        sealed = memory.control.read_request()
        assert decode_request(sealed.request, memory.nbytes - 4096).write_threads == asked


def test_a_config_object_and_single_fields_are_combined(shared_worker: RealWorker) -> None:
    config = CheckpointerConfig(slots=3)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, config=config, fsync=False) as checkpointer:
        assert (checkpointer.config.slots, checkpointer.config.fsync) == (3, False)
    with pytest.raises(ConfigError, match="unknown field"):
        AsyncCheckpointer(endpoint=shared_worker.endpoint, slot=3)


def test_endpoint_and_fields_come_from_the_environment(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", shared_worker.endpoint)
    monkeypatch.setenv("ASYNCCKPT_FSYNC", "0")
    with AsyncCheckpointer() as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        assert checkpointer._process.endpoint == shared_worker.endpoint  # type: ignore[attr-defined]
    assert manifest_of(tmp_path / "a")["fsync"] is False


def test_rank_info_lets_rank_zero_of_a_world_save_alone(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, rank_info=RankInfo(0, 1)) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))


@pytest.mark.parametrize("staging", ["auto", "blocking"])
def test_staging_is_done_when_save_returns(shared_worker: RealWorker, tmp_path: pathlib.Path, staging: str) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging=staging) as checkpointer:
        assert checkpointer.save(STATE, tmp_path / "a").staged.done()


def test_a_save_that_takes_longer_than_commit_timeout_s_fails_and_the_worker_goes_on(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, commit_timeout_s=0.2, slots=1) as checkpointer:
        wait_until(lambda: _quick_save(checkpointer, tmp_path), "a save within commit_timeout_s")
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "late")
            error = handle.written.exception(DEADLINE_S)
            assert isinstance(error, CommitTimeoutError)
            assert handle.durable.exception(0) is error
            assert handle.staged.exception(0) is None
            assert checkpointer.pending() == []
        wait_until((tmp_path / "late" / "manifest.json").exists, "the worker commits it nevertheless")
        wait_until(lambda: all(s.user is None for s in slots_of(checkpointer)), "its slot is free")
    states.assert_same(asyncckpt.load(tmp_path / "late"), STATE)


def _quick_save(checkpointer: AsyncCheckpointer, root: pathlib.Path) -> bool:
    return checkpointer.save(STATE, root / f"quick-{time.monotonic_ns()}").written.exception(DEADLINE_S) is None


def test_a_worker_that_is_silent_for_worker_timeout_s_is_lost(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, worker_timeout_s=1.0) as checkpointer:
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / name))
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            error = handle.written.exception(DEADLINE_S)
            assert isinstance(error, WorkerUnavailableError)
            assert "has not answered for 1 s" in str(error)
            assert slots_of(checkpointer) == []
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / "later" / name))
    wait_until((tmp_path / "1" / "manifest.json").exists, "what was sealed is committed when it wakes up")


def test_a_worker_that_hangs_holds_up_no_later_save(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(
        endpoint=worker.endpoint, worker_timeout_s=1.0, worker_start_timeout_s=600.0, worker_shutdown_timeout_s=1.0
    ) as checkpointer:
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / name))
        with worker.frozen():
            assert checkpointer.save(STATE, tmp_path / "1").written.exception(DEADLINE_S) is not None
            for n in range(2):
                began = time.monotonic()
                assert isinstance(checkpointer.save(STATE, tmp_path / str(n)).written.exception(0), AsyncCkptError)
                assert time.monotonic() - began < 60.0, "not the 600 s that a first connection may take"
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / "later" / name))


def test_a_save_that_failed_while_it_was_staged_is_not_taken_up_later(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = SlotImage.fill
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        pending = checkpointer._process._pending  # type: ignore[attr-defined]

        def fill_late(self: SlotImage, *arguments: Any) -> None:
            fill(self, *arguments)
            wait_until(lambda: pending.early_error(arguments[1]), "the worker has refused the directory")

        monkeypatch.setattr(SlotImage, "fill", fill_late)
        handle = checkpointer.save(STATE, tmp_path / "0")
        assert isinstance(handle.written.exception(DEADLINE_S), CheckpointExistsError)
        [slot] = slots_of(checkpointer)
        assert slot.memory.control.state == STATE_EMPTY


def test_on_error_raise_raises_what_nobody_fetched(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint, on_error="raise")
    written(checkpointer.save(STATE, tmp_path / "a"))
    for _ in range(2):
        refused = checkpointer.save(STATE, tmp_path / "a")
        wait_until(refused.written.done, "it has ended; to ask so is not to fetch its error")
    with pytest.raises(PendingSavesError) as caught:
        checkpointer.wait(DEADLINE_S)
    assert [type(e) for e in caught.value.errors] == [CheckpointExistsError] * 2
    checkpointer.save(STATE, tmp_path / "a").written.exception(DEADLINE_S)
    checkpointer.wait(DEADLINE_S)
    checkpointer.save(STATE, tmp_path / "a")
    with pytest.raises(PendingSavesError):
        checkpointer.close()
    checkpointer.close()
    assert shared_worker.status()["failures"]["checkpoint_exists"] >= 4, "the worker has counted them"


def test_on_error_warn_raises_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        checkpointer.save(STATE, tmp_path / "a")
        checkpointer.wait(DEADLINE_S)
    assert any("already holds a committed checkpoint" in m for m in caplog.messages)


# ---- starting a worker ----------------------------------------------------------------------------------------------


def test_the_first_checkpointer_starts_a_worker_and_the_next_one_finds_it(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    pids = []
    for n in range(2):
        with AsyncCheckpointer() as checkpointer:
            written(checkpointer.save(STATE, tmp_path / str(n)))
            pids.append(checkpointer._process.connect().worker.pid)  # type: ignore[attr-defined]
    assert pids[0] == pids[1]
    assert os.getpgid(pids[0]) != os.getpgid(0)
    assert os.getsid(pids[0]) == pids[0] or os.getsid(pids[0]) != os.getsid(0)
    assert cli.main(["worker", "stop"]) == 0


def test_two_jobs_have_two_workers(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    pids = []
    for job in ("a", "b"):
        monkeypatch.setenv("ASYNCCKPT_JOB", job)
        with AsyncCheckpointer() as checkpointer:
            written(checkpointer.save(STATE, tmp_path / job))
            pids.append(checkpointer._process.connect().worker.pid)  # type: ignore[attr-defined]
            stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]
    assert pids[0] != pids[1]


def test_a_checkpointer_that_is_closed_at_once_leaves_a_worker_at_most(
    endpoint_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    checkpointer = AsyncCheckpointer()
    endpoint = checkpointer._process.endpoint  # type: ignore[attr-defined]
    checkpointer.close()
    wait_until(lambda: not _is_starting(endpoint_dir), "the start command has ended")
    stop_whoever_serves(endpoint)


def _is_starting(directory: pathlib.Path) -> bool:
    import psutil

    return any("asyncckpt_worker" in " ".join(p.cmdline()) for p in psutil.Process().children())


# ---- own parts ------------------------------------------------------------------------------------------------------


class Stager(asyncckpt.CheckpointStager):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.closed = 0

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        self.given.append(kw)
        if kw.get("fail_stage"):
            raise OSError("stage")
        return dict(state_dict)

    def close(self) -> None:
        self.closed += 1


class Process(asyncckpt.CheckpointProcess):
    """Writes nothing; its futures are the test's."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, str, dict[str, Any]]] = []
        self.futures: list[Future[Any]] = []
        self.closed = 0

    def write(self, staging_result: Any, path: str, **kw: Any) -> Any:
        self.given.append((staging_result, path, kw))
        if kw.get("fail_write"):
            raise OSError("write")
        if kw.get("no_future"):
            return None
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.closed += 1


class Reader(asyncckpt.CheckpointReader):
    """Returns what it was given."""

    def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any) -> tuple[Any, list[str]]:
        return {"path": path, "state_dict": state_dict, "map_location": map_location, **kw}, []


def test_own_parts_get_the_extra_arguments_of_save_and_load(tmp_path: pathlib.Path) -> None:
    stager, process = Stager(), Process()
    with AsyncCheckpointer(checkpoint_stager=stager, checkpoint_process=process, reader=Reader()) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a", step=4, metadata={"m": 1}, tag="mine", number=5)
        process.futures[0].set_result("done")
        assert handle.written.result(0) == "done"  # type: ignore[comparison-overlap]
        assert handle.staged.done()
        found = checkpointer.load(tmp_path / "a", {"x": 1}, default_map_location="cpu", strict=True, tag="yours")
    expected = {"step": 4, "metadata": {"m": 1}, "tag": "mine", "number": 5}
    path = str(tmp_path / "a")
    save_id = stager.given[0].pop("save_id")
    assert isinstance(save_id, SaveId)
    assert stager.given == [{**expected, "path": path}]
    result, given_path, kw = process.given[0]
    assert (result, given_path) == (STATE, path)
    assert kw.pop("save_id") == save_id
    assert kw == expected
    assert found == {
        "path": path, "state_dict": {"x": 1}, "map_location": "cpu", "strict": True, "tag": "yours"
    }  # fmt: skip
    assert (stager.closed, process.closed) == (1, 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_an_own_process_gets_a_host_copy_of_the_state(tmp_path: pathlib.Path) -> None:
    process, state = Process(), states.every_leaf()
    with AsyncCheckpointer(checkpoint_process=process) as checkpointer:
        checkpointer.save(state, tmp_path / "a")
        result = process.given[0][0]
        states.assert_same(result, state)
        pointers = {t.data_ptr() for t in states.every_tensor().values()}
        state["tied"]["first"].fill_(-1)
        assert result["tied"]["first"].data_ptr() not in pointers
        assert not (result["tied"]["first"] == -1).all()
        process.futures[0].set_result(None)


@pytest.mark.parametrize("where", ["fail_stage", "fail_write", "no_future", "in the future", "cancelled"])
def test_errors_of_own_parts_reach_the_futures_and_the_next_save_works(tmp_path: pathlib.Path, where: str) -> None:
    process = Process()
    with AsyncCheckpointer(checkpoint_stager=Stager(), checkpoint_process=process) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a", **{where: True})
        if where == "in the future":
            process.futures[0].set_exception(OSError("later"))
        if where == "cancelled":
            process.futures[0].cancel()
            process.futures[0].set_running_or_notify_cancel()
        error = handle.written.exception(0)
        assert error is not None
        assert handle.durable.exception(0) is not None
        assert (handle.staged.exception(0) is None) == (where not in ("fail_stage", "fail_write"))
        if where not in ("cancelled", "no_future"):
            assert type(error) is OSError
        assert checkpointer.pending() == []
        again = checkpointer.save(STATE, tmp_path / "b")
        process.futures[-1].set_result(None)
        assert again.written.exception(0) is None


def test_closing_completes_the_futures_of_an_own_process(tmp_path: pathlib.Path) -> None:
    process = Process()
    checkpointer = AsyncCheckpointer(checkpoint_process=process)
    handle = checkpointer.save({"a": 1}, tmp_path / "a")
    checkpointer.close(0.01)
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    process.futures[0].set_result(None)


def test_an_own_stager_with_the_worker_must_return_sealed_slots(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, checkpoint_stager=Stager()) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a")
        assert isinstance(handle.written.exception(DEADLINE_S), ConfigError)
        assert "checkpoint_process" in str(handle.written.exception(0))
