"""Interrupts, exits, second threads and stopped processes in the middle of a save: nothing is lost or stuck."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, saved_at_last, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.components import CheckpointReader
from asyncckpt.errors import ConfigError, MissingKeysError, ReentrantCallError
from asyncckpt.memory.slot import SlotControl
from asyncckpt.protocol.endpoint import acquire_lock, socket_path
from asyncckpt.save_tracker import SaveTracker
from asyncckpt.staging.cpu_copy import SlotImage
from tests.warm_python import WarmPython

EVERY_CALL = 2 if os.environ.get("ASYNCCKPT_TEST_KILLS") else 60
"""At most so many calls are between one at which a save is interrupted and the next."""

STATE = {"weight": torch.arange(1 << 20, dtype=torch.float32), "step": 1}


def saved(checkpointer: AsyncCheckpointer, path: pathlib.Path) -> None:
    checkpointer.save(STATE, path).written.result(DEADLINE_S)
    assert torch.equal(asyncckpt.load(path)["weight"], STATE["weight"])


@pytest.mark.parametrize(
    ("where", "name"),
    [(SlotImage, "fill"), (SlotControl, "open"), (SaveTracker, "add")],
    ids=["during the copy", "with the slot just taken", "between staging and the doorbell"],
)
def test_an_interrupted_save_gives_its_slot_back(
    where: type, name: str, shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, slot_timeout_s=DEADLINE_S) as checkpointer:
        saved(checkpointer, tmp_path / "before")
        for n, interrupt in enumerate((KeyboardInterrupt, SystemExit, KeyboardInterrupt)):

            def raise_interrupt(*_: Any, interrupt: type[BaseException] = interrupt) -> None:
                raise interrupt

            with monkeypatch.context() as patch:
                patch.setattr(where, name, raise_interrupt)
                with pytest.raises(interrupt):
                    checkpointer.save(STATE, tmp_path / f"interrupted-{n}")
        saved(checkpointer, tmp_path / "after")
        assert checkpointer.pending() == []
    assert [p.name for p in tmp_path.glob("interrupted-*/manifest.json")] == []


class AlarmError(BaseException):
    """What a handler of SIGALRM raises."""


def alarm_at(left: int) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that sends SIGALRM where a signal would be handled for the `left`-th time."""

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGALRM)

    return count


# What a handler raises while Python closes a generator that nobody needs any more is printed, and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"arena_limit_bytes": 1 << 20}], ids=["whole", "ring"])
def test_an_alarm_anywhere_in_a_save_leaves_the_checkpointer_as_it_was(
    options: dict[str, Any], shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, n, n_interrupted, has_rung = random.Random(seed), 0, 0, True

    def ring(*_: Any) -> None:
        nonlocal has_rung
        has_rung = True
        raise AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, slot_timeout_s=DEADLINE_S, **options) as one:
            saved(one, tmp_path / "before")
            while has_rung:
                n, has_rung, path = n + rng.randint(1, EVERY_CALL), False, tmp_path / f"interrupted-{n}"
                sys.setprofile(alarm_at(n))
                try:
                    one.save(STATE, path)
                except AlarmError:
                    n_interrupted += 1
                finally:
                    sys.setprofile(None)
                assert torch.is_grad_enabled()
                saved(one, tmp_path / f"next-{n}")
                if (path / "manifest.json").exists():
                    assert torch.equal(asyncckpt.load(path)["weight"], STATE["weight"])
                for directory in (path, tmp_path / f"next-{n}"):
                    shutil.rmtree(directory, ignore_errors=True)
            wait_until(lambda: one.pending() == [], "every save has ended")
            began = time.monotonic()
            one.close()
            assert time.monotonic() - began < DEADLINE_S / 2, "it waits for a save that never ends"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert n_interrupted > 5


def test_a_save_from_within_a_save_is_refused(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, refused = SlotImage.fill, []

    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1) as checkpointer:

        def fill_and_save(self: SlotImage, *arguments: Any) -> None:  # as a signal handler would
            with pytest.raises(ReentrantCallError) as caught:
                checkpointer.save(STATE, tmp_path / "inner")
            refused.append(caught.value)
            fill(self, *arguments)

        monkeypatch.setattr(SlotImage, "fill", fill_and_save)
        saved(checkpointer, tmp_path / "outer")
    assert len(refused) == 1


def test_closing_while_another_thread_stages_leaves_its_memory_mapped(
    shared_worker: RealWorker, tmp_path: pathlib.Path, warm_python: WarmPython
) -> None:
    program = """
        import pathlib, sys, threading, torch, asyncckpt
        from asyncckpt.staging.cpu_copy import SlotImage
        endpoint, directory, way = sys.argv[1:]
        begun, go_on, fill = threading.Event(), threading.Event(), SlotImage.fill
        def slow(self, *arguments):
            begun.set(); go_on.wait(60); fill(self, *arguments)
        checkpointer = asyncckpt.AsyncCheckpointer(endpoint=endpoint)
        state = {"weight": torch.zeros(1 << 20)}
        checkpointer.save(state, f"{directory}/first").written.result(60)
        SlotImage.fill = slow
        def train():
            handle = checkpointer.save(state, f"{directory}/second")
            print("ended", type(handle.written.exception(60)).__name__, flush=True)
        thread = threading.Thread(target=train, daemon=True)
        thread.start(); begun.wait(60)
        if way == "close":
            checkpointer.close(timeout_s=0.1); go_on.set(); thread.join(60)
        else:  # the exit itself closes; the copy goes on meanwhile
            threading.Timer(0.0, go_on.set).start()
    """
    for way in ("close", "exit"):
        done = warm_python.run(textwrap.dedent(program), shared_worker.endpoint, str(tmp_path / way), way)
        assert done.returncode == 0, f"{way}: {done.returncode} {done.stderr}"
        assert way == "exit" or "ended" in done.stdout


def test_a_trainer_that_was_stopped_keeps_its_worker(
    shared_worker: RealWorker, warm_python: WarmPython, tmp_path: pathlib.Path
) -> None:
    program = """
        import os, sys, time, torch, asyncckpt
        endpoint, directory = sys.argv[1:]
        with asyncckpt.AsyncCheckpointer(endpoint=endpoint, worker_timeout_s=3.0) as checkpointer:
            name = checkpointer._process._connection.session.name
            os.mkdir(f"{directory}/ready")
            while not os.path.exists(f"{directory}/go on"):
                time.sleep(0.01)
            checkpointer.save({"x": torch.ones(3)}, f"{directory}/a").written.result(60)
            assert checkpointer._process._connection.session.name == name, "the session was given up"
    """
    trainer = warm_python.start(textwrap.dedent(program), shared_worker.endpoint, str(tmp_path))
    try:
        wait_until((tmp_path / "ready").exists, "it has its worker")
        trainer.send_signal(signal.SIGSTOP)
        threading.Event().wait(4.0)  # longer than worker_timeout_s: that is the case
        trainer.send_signal(signal.SIGCONT)
        (tmp_path / "go on").mkdir()
        assert trainer.wait(60) == 0
    finally:
        trainer.close()


def test_a_worker_that_was_given_up_and_woke_keeps_no_session_of_before(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, worker_timeout_s=1.0) as checkpointer:
        for n in range(3):
            saved_at_last(lambda name, n=n: checkpointer.save(STATE, tmp_path / f"{n}-before" / name))  # type: ignore[misc]
            with worker.frozen():
                handle = checkpointer.save(STATE, tmp_path / f"{n}-frozen")
                assert handle.written.exception(DEADLINE_S) is not None
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / "after" / name))
        wait_until(lambda: len(worker.status()["sessions"]) == 1, "the sessions that were given up have ended")
        wait_until(lambda: len(worker.status()["slots"]) == 1, "and their slots are freed")


def test_a_worker_on_its_way_out_holds_the_first_save_up_no_longer_than_it_takes(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pathlib.Path(socket_path(endpoint))
    lock = acquire_lock(str(path))
    assert lock is not None
    monkeypatch.setattr("asyncckpt.async_checkpointer.default_endpoint", lambda *_, **__: endpoint)
    timer = threading.Timer(1.5, os.close, (lock,))
    timer.start()
    try:
        with AsyncCheckpointer(worker_start_timeout_s=600.0) as checkpointer:
            began = time.monotonic()
            saved(checkpointer, tmp_path / "a")
            assert time.monotonic() - began < 100.0, "not the 600 s that the start may take"
    finally:
        timer.join()
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop", "--endpoint", endpoint], check=True)


def test_an_exit_waits_for_no_callback_that_blocks(
    shared_worker: RealWorker, tmp_path: pathlib.Path, warm_python: WarmPython
) -> None:
    program = """
        import sys, threading, time, torch, asyncckpt
        endpoint, directory = sys.argv[1:]
        blocked = threading.Event()
        def block(_):
            blocked.set(); threading.Event().wait(600)
        made = [asyncckpt.AsyncCheckpointer(endpoint=endpoint) for _ in range(3)]
        for n, checkpointer in enumerate(made):
            checkpointer.save({"x": torch.ones(3)}, f"{directory}/{n}").written.add_done_callback(block)
        blocked.wait(60)
        print(time.monotonic(), flush=True)
    """
    done = warm_python.run(textwrap.dedent(program), shared_worker.endpoint, str(tmp_path), timeout_s=200.0)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout) < 100.0, (
        "5 s for all checkpointers together, and the interpreter's own end on a busy machine"
    )


def test_arguments_that_no_part_takes_are_refused(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        with pytest.raises(ConfigError, match="overwrite"):
            checkpointer.save(STATE, tmp_path / "a", overwrite=True)
        saved(checkpointer, tmp_path / "a")
    with asyncckpt.SyncCheckpointer() as checkpointer, pytest.raises(ConfigError, match="meta_data"):
        checkpointer.save(STATE, tmp_path / "b", meta_data={})
    with pytest.raises(ConfigError, match="slots is about the worker"):
        asyncckpt.SyncCheckpointer(slots=1)


def test_strict_holds_for_an_own_reader_too() -> None:
    class Reader(CheckpointReader):
        def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any) -> Any:
            return state_dict, ["gone"]

    with asyncckpt.SyncCheckpointer(reader=Reader()) as checkpointer:
        assert checkpointer.load("/x", {"a": 1}, strict=False) == {"a": 1}
        with pytest.raises(MissingKeysError, match="gone"):
            checkpointer.load("/x", {"a": 1})
