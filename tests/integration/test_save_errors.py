"""What goes wrong around a save: a typed error in its place, the next save works, nothing else is harmed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import states
import torch
import zmq
from real_worker import DEADLINE_S, RealWorker, running, wait_until
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.client import connection, launcher
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    EndpointError,
    InsufficientMemoryError,
    ProtocolVersionError,
    SaveFailedError,
    WorkerUnavailableError,
)
from asyncckpt.protocol import codec
from asyncckpt.protocol.codec import MAGIC
from asyncckpt.protocol.endpoint import default_endpoint, socket_path
from asyncckpt.protocol.messages import PROTOCOL_VERSION
from tests.failing_process import At

STATE = {"w": torch.arange(100_000.0)}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def files_of(path: pathlib.Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def error_of(checkpointer: AsyncCheckpointer, path: pathlib.Path, state: object = STATE) -> AsyncCkptError:
    """Save, and return the error that is on all futures that could not complete."""
    handle = checkpointer.save(state, path)  # type: ignore[arg-type]
    error = handle.written.exception(DEADLINE_S)
    assert isinstance(error, AsyncCkptError), error
    assert handle.durable.exception(0) is error
    return error


def assert_goes_on(checkpointer: AsyncCheckpointer, path: pathlib.Path) -> None:
    checkpointer.save(STATE, path).written.result(DEADLINE_S)
    states.assert_same(asyncckpt.load(path), STATE)


@contextlib.contextmanager
def mounted(path: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# ---- disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.root
@needs_root
def test_a_full_file_system_fails_the_save_and_no_other(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with (
        mounted(tmp_path / "small", "size=1m") as small,
        AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer,
    ):
        assert_goes_on(checkpointer, small / "fits")
        before = files_of(small / "fits")
        for n in range(2):
            error = error_of(checkpointer, small / f"a{n}", {"w": torch.ones(1_000_000)})
            assert isinstance(error, SaveFailedError)
            assert (error.code, error.rank, error.path) == ("ENOSPC", 0, str(small / f"a{n}"))
            assert isinstance(error, OSError)
            assert not (small / f"a{n}" / "manifest.json").exists()
            assert not (small / f"a{n}").exists() or files_of(small / f"a{n}") == {}, (
                "what was written is removed: the space is needed"
            )
        assert_goes_on(checkpointer, tmp_path / "elsewhere")
        assert files_of(small / "fits") == before
        states.assert_same(asyncckpt.load(small / "fits"), STATE)


@pytest.mark.root
@needs_root
def test_a_full_file_system_fails_a_synchronous_save(tmp_path: pathlib.Path) -> None:
    with mounted(tmp_path / "small", "size=1m") as small, SyncCheckpointer() as checkpointer:
        with pytest.raises(SaveFailedError) as caught:
            checkpointer.save({"w": torch.ones(1_000_000)}, small / "a")
        assert caught.value.code == "ENOSPC"
        checkpointer.save({"w": torch.ones(1000)}, small / "b")
        assert asyncckpt.latest_checkpoint(small) == str(small / "b")


@pytest.mark.root
@needs_root
def test_a_read_only_file_system_fails_the_save_and_no_other(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with (
        mounted(tmp_path / "mount", "size=4m") as mount,
        AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer,
    ):
        assert_goes_on(checkpointer, mount / "before")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        error = error_of(checkpointer, mount / "a")
        assert isinstance(error, SaveFailedError)
        assert error.code == "EROFS"
        states.assert_same(asyncckpt.load(mount / "before"), STATE)
        subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
        assert_goes_on(checkpointer, mount / "a")


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_path_that_is_a_file_fails_the_save(shared_worker: RealWorker, tmp_path: pathlib.Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        error = error_of(checkpointer, tmp_path / where)
        assert isinstance(error, SaveFailedError)
        assert error.code == "ENOTDIR"
        assert str(tmp_path / where) in str(error)
        assert_goes_on(checkpointer, tmp_path / "a")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_existing_checkpoint_is_left_untouched(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a")
        handle.written.result(DEADLINE_S)
        before = files_of(tmp_path / "a")
        error = error_of(checkpointer, tmp_path / "a", {"other": torch.ones(3)})
        assert isinstance(error, CheckpointExistsError)
        assert isinstance(error, FileExistsError)
        assert (error.path, error.existing_save_id) == (str(tmp_path / "a"), str(handle.save_id))
        assert_goes_on(checkpointer, tmp_path / "b")
    assert files_of(tmp_path / "a") == before


def test_two_saves_to_one_path_at_once_commit_one_of_them(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        handles = [checkpointer.save({"n": n, **STATE}, tmp_path / "a") for n in range(2)]
        errors = [h.written.exception(DEADLINE_S) for h in handles]
    (error,) = [e for e in errors if e]
    # The later one may find its files gone: leftovers of others are removed once a manifest stands.
    assert isinstance(error, (CheckpointExistsError, SaveFailedError))
    assert asyncckpt.load(tmp_path / "a")["n"] == errors.index(None)


def test_foreign_files_in_the_directory_stay(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        assert_goes_on(checkpointer, tmp_path / "a")
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_a_worker_with_a_root_writes_nowhere_else(endpoint: str, tmp_path: pathlib.Path) -> None:
    with (
        running(endpoint, "--root", str(tmp_path / "allowed")),
        AsyncCheckpointer(endpoint=endpoint) as checkpointer,
    ):
        error = error_of(checkpointer, tmp_path / "elsewhere")
        assert isinstance(error, SaveFailedError)
        assert error.code == "EPERM"
        assert "--root" in str(error)
        assert not (tmp_path / "elsewhere").exists()
        assert_goes_on(checkpointer, tmp_path / "allowed" / "a")


def test_loading_what_is_not_there_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        asyncckpt.load(tmp_path / "nothing")


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_limit_that_is_too_small_even_for_segments_fails_the_save_and_a_smaller_state_is_saved(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, arena_limit_bytes=500_000) as checkpointer:
        assert_goes_on(checkpointer, tmp_path / "a")
        error = error_of(checkpointer, tmp_path / "b", {"w": torch.ones(1_000_000)})
        assert isinstance(error, InsufficientMemoryError)
        assert isinstance(error, MemoryError)
        assert error.limit == 500_000
        assert "arena_limit_bytes" in str(error)
        assert_goes_on(checkpointer, tmp_path / "c")
    assert not (tmp_path / "b").exists()


def test_a_state_larger_than_memory_fails_and_a_smaller_one_is_saved(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    total = psutil.virtual_memory().total
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        for nbytes in (total + (1 << 30), 1 << 44):
            error = error_of(checkpointer, tmp_path / "b", {"w": torch.zeros(1).expand(nbytes // 4)})
            assert isinstance(error, InsufficientMemoryError)
            assert (error.nbytes or 0) >= nbytes
            assert (error.available or 0) < total
        assert_goes_on(checkpointer, tmp_path / "c")


# ---- no worker ------------------------------------------------------------------------------------------------------


def test_a_directory_that_is_listed_too_slowly_is_named_and_the_next_save_is_made(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    listed = threading.Event()
    with (
        contextlib.closing(Here(endpoint)),
        observed(At("worker: lineage asked for", lambda: wait_until(listed.is_set, "the test lets the listing go on"))),
        AsyncCheckpointer(endpoint=endpoint, worker_timeout_s=0.5) as checkpointer,
    ):
        failed = checkpointer.save({"n": 1}, tmp_path / "1").written.exception(DEADLINE_S)
        assert isinstance(failed, WorkerUnavailableError)
        assert f"the checkpoints beside {tmp_path / '1'} were not listed within 0.5 s" in str(failed)
        listed.set()
        checkpointer.save({"n": 2}, tmp_path / "2").written.result(DEADLINE_S)


def test_an_endpoint_that_nobody_serves_fails_the_constructor(endpoint: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerUnavailableError, match="asyncckpt-worker --endpoint") as caught:
        AsyncCheckpointer(endpoint=endpoint, worker_start_timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began < DEADLINE_S
    assert caught.value.endpoint == endpoint
    assert isinstance(caught.value, ConnectionError)


def test_an_unreachable_endpoint_of_the_environment_fails_the_constructor(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    with pytest.raises(WorkerUnavailableError):
        AsyncCheckpointer(worker_start_timeout_s=0.2)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "ipc://relative", "/tmp/x", f"ipc:///{'x' * 200}"])
def test_a_malformed_endpoint_fails_the_constructor(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncCheckpointer(endpoint=endpoint)
    assert caught.value.field == "endpoint"


@pytest.mark.parametrize("interpreter", ["/bin/false", "/bin/true", "/nonexistent"])
def test_when_no_worker_can_be_started_saves_fail_and_training_goes_on(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, interpreter: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    monkeypatch.setattr(sys, "executable", interpreter)
    with AsyncCheckpointer(worker_start_timeout_s=0.5) as checkpointer:
        began = time.monotonic()
        for n in range(3):
            handle = checkpointer.save(STATE, tmp_path / str(n))
            assert [type(f.exception(0)) for f in handle.futures()] == [WorkerUnavailableError] * 3
        assert time.monotonic() - began < DEADLINE_S
        assert checkpointer.pending() == []
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_directory_that_is_open_to_others_is_refused(
    endpoint_dir: pathlib.Path,
) -> None:
    (endpoint_dir / "open").mkdir()
    (endpoint_dir / "open").chmod(0o777)
    with pytest.raises(EndpointError, match="0700"):
        AsyncCheckpointer(endpoint=f"ipc://{endpoint_dir}/open/w.sock", worker_start_timeout_s=0.5)


def test_a_default_directory_that_is_open_to_others_is_passed_over(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (endpoint_dir / "asyncckpt").mkdir()
    (endpoint_dir / "asyncckpt").chmod(0o777)
    (endpoint_dir / "t").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    monkeypatch.setenv("TMPDIR", str(endpoint_dir / "t"))
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(STATE, tmp_path / "a").written.result(DEADLINE_S)
    assert not list((endpoint_dir / "asyncckpt").iterdir())
    stop = [sys.executable, "-m", "asyncckpt", "worker", "stop"]
    subprocess.run(stop, check=True, capture_output=True, timeout=60)


def test_closing_waits_for_no_worker_that_never_comes(
    endpoint_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    checkpointer = AsyncCheckpointer(worker_start_timeout_s=600.0)
    began = time.monotonic()
    checkpointer.leave()
    assert time.monotonic() - began < 60.0, "P13: 5 s; on a busy machine far less than the 600 s that a start may take"


# ---- a worker of another version ------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_version(endpoint: str, version: int) -> Iterator[None]:
    """Answer whatever comes with a message of another protocol version."""
    stop = threading.Event()
    pathlib.Path(socket_path(endpoint)).parent.mkdir(mode=0o700, exist_ok=True)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)

        def serve() -> None:
            while not stop.is_set():
                if socket.poll(20):
                    peer, *_ = socket.recv_multipart()
                    socket.send_multipart([peer, struct.pack("<4sH", MAGIC, version), b"\xc1 another language"])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
    pathlib.Path(socket_path(endpoint)).unlink(missing_ok=True)


def test_a_worker_of_another_version_fails_the_constructor(endpoint: str) -> None:
    with other_version(endpoint, PROTOCOL_VERSION + 1), pytest.raises(ProtocolVersionError) as caught:
        AsyncCheckpointer(endpoint=endpoint, worker_start_timeout_s=60.0)
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    assert endpoint in str(caught.value)
    assert isinstance(caught.value, WorkerUnavailableError)


def test_a_trainer_of_another_version_is_refused_by_a_worker_at_once(
    worker: RealWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    with monkeypatch.context() as other:
        other.setattr(codec, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        with pytest.raises(ProtocolVersionError, match="same asyncckpt on both sides") as caught:
            AsyncCheckpointer(endpoint=worker.endpoint, worker_start_timeout_s=600.0)
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL_VERSION + 1, PROTOCOL_VERSION)
    assert time.monotonic() - begun < 60


def test_a_worker_of_another_version_in_the_place_of_the_first_fails_saves_at_once(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, worker_start_timeout_s=600.0) as checkpointer:
        assert_goes_on(checkpointer, tmp_path / "a")
        worker.kill()
        with other_version(worker.endpoint, PROTOCOL_VERSION + 1):
            begun = time.monotonic()
            errors = [error_of(checkpointer, tmp_path / name) for name in "bc"]  # the first may see the death only
            assert isinstance(errors[1], ProtocolVersionError), errors
            assert time.monotonic() - begun < 60


def test_a_default_worker_of_another_version_fails_the_save_and_the_next_one_starts_ours(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    package = asyncckpt.__version__
    endpoint = default_endpoint(os.environ, uid=os.geteuid(), package=package, interpreter=sys.prefix)
    start = launcher.start_worker

    def start_late(*arguments: Any, **options: Any) -> Any:
        time.sleep(2 * connection.RETRY_BUDGET_S)  # as on a busy machine
        return start(*arguments, **options)

    monkeypatch.setattr(launcher, "start_worker", start_late)
    with contextlib.ExitStack() as stack:
        with other_version(endpoint, PROTOCOL_VERSION + 1):
            checkpointer = stack.enter_context(AsyncCheckpointer(worker_start_timeout_s=60.0))
            error = error_of(checkpointer, tmp_path / "a")
            assert isinstance(error, ProtocolVersionError)
        checkpointer.save(STATE, tmp_path / "b").written.result(DEADLINE_S)
        states.assert_same(asyncckpt.load(tmp_path / "b"), STATE)
        RealWorker(endpoint).stop()
    wait_until(lambda: not pathlib.Path(socket_path(endpoint)).exists(), "the worker has left")
