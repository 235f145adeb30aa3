"""Arguments that say how many threads read or write: so many are at work at once, and never more."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import SyncCheckpointer  # noqa: E402
from asyncckpt.storage.files import Files  # noqa: E402

DEADLINE_S = 30.0


LARGE_NBYTES = 1 << 20
"""What is read at a time is more, of tensors; what is read ahead of them, by one thread, is less."""


class AtOnce:
    """Holds a call with a large buffer back until so many threads are in it, and keeps the largest number of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, expected: int) -> None:
        self.most = self._now = 0
        lock, call = threading.Condition(), getattr(Files, name)
        deadline = time.monotonic() + DEADLINE_S

        def counted(files: Files, fd: int, buffers: Any, *others: Any) -> Any:
            each = buffers if isinstance(buffers, (list, tuple)) else [buffers]
            if sum(memoryview(buffer).nbytes for buffer in each) < LARGE_NBYTES:
                return call(files, fd, buffers, *others)
            with lock:
                self._now += 1
                self.most = max(self.most, self._now)
                lock.notify_all()
                lock.wait_for(lambda: self.most >= expected, max(0.0, deadline - time.monotonic()))
            time.sleep(0.02)  # for one too many
            try:
                return call(files, fd, buffers, *others)
            finally:
                with lock:
                    self._now -= 1

        monkeypatch.setattr(Files, name, counted)


STATE = {f"t{n}": torch.full((2_000_000,), float(n)) for n in range(6)}


@pytest.mark.parametrize("threads", [2, 5])
def test_write_threads_write_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    counted = AtOnce(monkeypatch, "pwrite", threads)
    with SyncCheckpointer(write_threads=threads, fsync=False) as checkpointer:
        checkpointer.save(STATE, tmp_path / "a")
    assert counted.most == threads


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("how", ["load", "load of a checkpointer", "open_checkpoint"])
def test_threads_read_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, threads: int, how: str) -> None:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(STATE, tmp_path / "a")
        counted = AtOnce(monkeypatch, "preadv", threads)
        if how == "load":
            asyncckpt.load(tmp_path / "a", threads=threads)
        elif how == "load of a checkpointer":
            checkpointer.load(tmp_path / "a", threads=threads)
        else:
            with asyncckpt.open_checkpoint(tmp_path / "a") as opened:
                opened.tensor("t3", threads=threads)
    assert counted.most == threads
