"""A line on the terminal that says how far a long command is, drawn anew as it goes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from asyncckpt.errors import AsyncCkptError
from asyncckpt.sizes import human
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import Files

_BAR_WIDTH = 30
_REDRAW_S = 0.1


class Bar:
    """Called with (done, total) bytes; from several threads. A total of 0: nobody knows it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._drawn = 0.0
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._drawn < _REDRAW_S and (done < total or not total):
            return
        with self._lock:
            self._drawn = now
            line = f"{human(done)}, {human(done / max(now - self._started, 1e-6))}/s"
            if total:
                share = min(1.0, done / total)
                filled = int(share * _BAR_WIDTH)
                line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%} {line.partition(', ')[2]}"
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)

    def close(self) -> None:
        """Clear the line."""
        with self._lock:
            if self._width:
                sys.stderr.write("\r" + " " * self._width + "\r")
                sys.stderr.flush()
                self._width = 0


class CountingFiles(Files):
    """Files whose reads move a bar.

    Args:
        bar: Which one.

    Attributes:
        total: What will be read, bytes; 0: nobody knows.
    """

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self._bar, self._done, self._lock, self.total = bar, 0, threading.Lock(), 0

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read, and say so."""
        count = super().preadv(fd, buffers, offset, flags)
        with self._lock:
            self._done += count
        self._bar(self._done, self.total)
        return count


@contextlib.contextmanager
def reading(files: Files, *, quiet: bool) -> Iterator[Files]:
    """Yield files whose reads are shown on stderr, if that is a terminal; else, or if `quiet`, those given."""
    if quiet or not sys.stderr.isatty():
        yield files
        return
    bar = Bar()
    try:
        yield CountingFiles(bar)
    finally:
        bar.close()


def said_nbytes(path: str, files: Files) -> int:
    """Return what a checkpoint of ours says that it holds; 0: not known."""
    try:
        return read_manifest(path, files).nbytes
    except (AsyncCkptError, OSError):
        return 0


def expect(files: Files, nbytes: Callable[[], int]) -> None:
    """Say how much is going to be read, if somebody sees it."""
    if isinstance(files, CountingFiles):
        files.total += nbytes()
