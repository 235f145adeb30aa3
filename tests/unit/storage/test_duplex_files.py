"""A disk that is read and written at once: who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncckpt.interop.copy_pipeline import DuplexFiles
from asyncckpt.storage.files import Files

DEADLINE_S = 60
LARGE = memoryview(bytearray(1 << 20))
SMALL = memoryview(bytearray(100))


class Disk:
    """Calls that are held until they may go on; `under_way` counts those of each sort."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go, self.changed = threading.Event(), threading.Condition()
        self.under_way = {"read": 0, "write": 0}
        monkeypatch.setattr(Files, "preadv", lambda *arguments: self._held("read"))
        monkeypatch.setattr(Files, "pwrite", lambda *arguments: self._held("write"))

    def _held(self, sort: str) -> int:
        with self.changed:
            self.under_way[sort] += 1
            self.changed.notify_all()
        assert self.may_go.wait(DEADLINE_S)
        return 0

    def wait_for(self, **counts: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.under_way == counts, DEADLINE_S), self.under_way


def _started(calls: Sequence[Callable[[], Any]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize(("threads", "each"), [(1, 1), (2, 1), (4, 2), (7, 3)])
def test_half_of_the_threads_read_and_half_of_them_write(
    threads: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, files = Disk(monkeypatch), DuplexFiles(threads)
    reads = [lambda: files.preadv(3, [LARGE], 0)] * (each + 2)
    writes = [lambda: files.pwrite(3, LARGE, 0)] * (each + 2)
    started = _started([*reads, *writes])
    try:
        disk.wait_for(read=each, write=each)
        with disk.changed:
            assert not disk.changed.wait_for(lambda: max(disk.under_way.values()) > each, 0.01)
    finally:
        disk.may_go.set()
        for thread in started:
            thread.join(DEADLINE_S)
    assert disk.under_way == {"read": each + 2, "write": each + 2}, "those that waited came next"


def test_what_is_short_or_cached_waits_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, files = Disk(monkeypatch), DuplexFiles(2)
    started = _started([lambda: files.preadv(3, [LARGE], 0), lambda: files.pwrite(3, LARGE, 0)])
    try:
        disk.wait_for(read=1, write=1)
        started += _started([lambda: files.preadv(3, [SMALL], 0), lambda: files.preadv(3, [LARGE], 0, 8)])
        started += _started([lambda: files.pwrite(3, SMALL, 0)])
        disk.wait_for(read=3, write=2)
    finally:
        disk.may_go.set()
        for thread in started:
            thread.join(DEADLINE_S)


def test_a_call_that_fails_gives_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(5, "bad")

    files = DuplexFiles(2)
    monkeypatch.setattr(Files, "preadv", failing)
    monkeypatch.setattr(Files, "pwrite", failing)
    for _ in range(3):
        with pytest.raises(OSError, match="bad"):
            files.preadv(3, [LARGE], 0)
        with pytest.raises(OSError, match="bad"):
            files.pwrite(3, LARGE, 0)
