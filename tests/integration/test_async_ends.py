"""AsyncCheckpointer with a real worker: waiting, closing, callbacks, forks and the end of the interpreter."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import states
import torch
from real_worker import RealWorker, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client.session import Session
from asyncckpt.errors import (
    CheckpointerClosedError,
    ForkedError,
    ReentrantCallError,
    WaitTimeoutError,
)
from tests.warm_python import WarmPython

STATE = {"w": torch.arange(100_000.0), "n": {"lr": 0.1}}


# ---- waiting and closing --------------------------------------------------------------------------------------------


def test_wait_and_pending(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        assert checkpointer.pending() == []
        checkpointer.wait(0.0)
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            assert checkpointer.pending() == [handle]
            with pytest.raises(WaitTimeoutError) as caught:
                checkpointer.wait(0.05)
            assert caught.value.save_ids == [str(handle.save_id)]
        checkpointer.wait()
        assert handle.written.done()
        assert checkpointer.pending() == []


def test_close_waits_for_what_is_pending(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    handles = [checkpointer.save(STATE, tmp_path / str(n)) for n in range(3)]
    checkpointer.close()
    assert all(h.written.exception(0) is None for h in handles)


def test_closing_twice_is_fine_and_everything_after_it_raises(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(STATE, tmp_path / "a"),
        lambda: checkpointer.load(tmp_path / "a"),
        checkpointer.wait,
    ):
        with pytest.raises(CheckpointerClosedError):
            call()
    assert checkpointer.pending() == []


def test_an_interrupt_while_it_says_goodbye_leaves_no_thread(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = AsyncCheckpointer(endpoint=worker.endpoint)
    checkpointer.save({"w": torch.ones(3)}, tmp_path / "a").written.result(60)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    assert not [one for one in threading.enumerate() if one.name == "asyncckpt-client"]
    checkpointer._process.pool.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["argument", "field"])
def test_close_leaves_to_the_worker_what_takes_too_long(
    worker: RealWorker, tmp_path: pathlib.Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"worker_shutdown_timeout_s": 0.1} if how == "field" else {}
    checkpointer = AsyncCheckpointer(endpoint=worker.endpoint, **fields)
    written(checkpointer.save(STATE, tmp_path / "0"))
    with worker.frozen():
        handle = checkpointer.save(STATE, tmp_path / "1")
        began = time.monotonic()
        checkpointer.close(*([0.1] if how == "argument" else []))
        assert time.monotonic() - began < 50.0
        assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    assert any("save of step 1" in m and "leaves it to the worker" in m for m in caplog.messages)
    wait_until((tmp_path / "1" / "manifest.json").exists, "the worker finishes it")
    states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)


def test_leaving_by_an_exception_waits_for_no_write_and_loses_nothing(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        AsyncCheckpointer(
            endpoint=worker.endpoint, worker_timeout_s=600.0, worker_shutdown_timeout_s=600.0
        ) as checkpointer,
    ):
        written(checkpointer.save(STATE, tmp_path / "0"))
        worker.signal(signal.SIGSTOP)
        handle = checkpointer.save(STATE, tmp_path / "1")
        began = time.monotonic()
        raise KeyError("mine")
    assert time.monotonic() - began < 50.0, "P13: at most 5 s; the worker would be waited for longer"
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    worker.signal(signal.SIGCONT)
    wait_until((tmp_path / "1" / "manifest.json").exists, "the worker finishes it")
    states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)


def test_a_checkpointer_that_is_dropped_without_close_frees_everything(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    handle = checkpointer.save(STATE, tmp_path / "a")
    with pytest.warns(ResourceWarning, match="close"):
        del checkpointer
        gc.collect()
    wait_until(handle.written.done, "the client thread has ended, and the handle's futures with it")
    wait_until((tmp_path / "a" / "manifest.json").exists, "what was staged is committed")


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_client_thread_where_waiting_calls_are_refused(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    found: dict[str, Any] = {}
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))

        def callback(done: Future[Any]) -> None:
            found["thread"] = threading.current_thread().name
            calls = {
                "save": lambda: checkpointer.save(STATE, tmp_path / "2"),
                "wait": lambda: checkpointer.wait(1.0),
                "close": checkpointer.close,
            }
            for name, call in calls.items():
                try:
                    found[name] = call()
                except BaseException as error:
                    found[name] = error

        with worker.frozen():  # so that the callback is there before the end
            handle = checkpointer.save(STATE, tmp_path / "1")
            handle.written.add_done_callback(callback)
        written(handle)
        wait_until(lambda: len(found) == 4, "the callback has returned")
        assert found.pop("thread") == "asyncckpt-client"
        assert {type(e) for e in found.values()} == {ReentrantCallError}
        written(checkpointer.save(STATE, tmp_path / "3"))


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_a_callback_that_raises_harms_nobody(
    worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def callback(done: Future[Any]) -> None:
        raise error

    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            handle.written.add_done_callback(callback)
        written(handle)
        thread = checkpointer._process._connection.session.thread  # type: ignore[attr-defined]
        written(checkpointer.save(STATE, tmp_path / "2"))
        assert thread.is_alive()
    assert any("callback" in m for m in caplog.messages)


# ---- fork and exit --------------------------------------------------------------------------------------------------


def in_child(work: Any) -> int:
    """Run `work` in a forked child; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_can_use_nothing_of_its_parent_s(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))

    def work() -> int:
        calls = [
            lambda: checkpointer.save(STATE, tmp_path / "child"),
            lambda: checkpointer.load(tmp_path / "0"),
            lambda: checkpointer.wait(1.0),
            checkpointer.pending,
        ]
        for n, call in enumerate(calls):
            try:
                call()
            except ForkedError:
                continue
            return n + 1
        checkpointer.close()
        checkpointer.leave()
        return 0

    assert in_child(work) == 0
    written(checkpointer.save(STATE, tmp_path / "1"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_checkpointer(
    checkpointer: AsyncCheckpointer, shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))

    def work() -> int:
        with AsyncCheckpointer(endpoint=shared_worker.endpoint) as own:
            written(own.save({"n": 1}, tmp_path / "child"))
        return 0

    assert in_child(work) == 0
    assert asyncckpt.load(tmp_path / "child") == {"n": 1}
    written(checkpointer.save(STATE, tmp_path / "1"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_lives_on_keeps_no_memory(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    ready, told = os.pipe()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        pid = os.fork()
        if pid == 0:
            os.write(told, b"x")
            signal.pause()
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [target for target in held if "memfd:asyncckpt" in target]
        assert "memfd:asyncckpt" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


EXITING = """
import sys, torch
from asyncckpt import AsyncCheckpointer
path, how = sys.argv[1:]
checkpointer = AsyncCheckpointer()
handle = checkpointer.save({"w": torch.arange(2_000_000.0), "step": 4}, path)
assert handle.staged.done()
if how == "drop":
    del checkpointer
if how == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 7), ("drop", 0)])
def test_interpreter_exit_right_after_save_loses_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path, warm_python: WarmPython, how: str, code: int
) -> None:
    environ = {**os.environ, "ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    done = warm_python.run(EXITING, str(tmp_path / "a"), how, env=environ)
    assert done.returncode == code, done.stderr
    wait_until((tmp_path / "a" / "manifest.json").exists, "the worker commits it")
    states.assert_same(asyncckpt.load(tmp_path / "a"), {"w": torch.arange(2_000_000.0), "step": 4})
