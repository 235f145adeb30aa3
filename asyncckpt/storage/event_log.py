"""`events.jsonl`: what happened in a run, one JSON object a line, for people, `asyncckpt report` and other tools.

It lies beside the checkpoints, in the directory that holds them. Lines are put at its end in one call each time, so
the worker that leads a run and the trainer of rank 0, which share a machine, write to one file. Nothing depends on it:
it is written by a thread of its own, and where it cannot be, lines are dropped and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asyncckpt.ends import BackgroundThread
from asyncckpt.errors import AsyncCkptError

EVENTS_NAME = "events.jsonl"
ROTATED_NAME = f"{EVENTS_NAME}.1"
MAX_EVENTS_NBYTES = 64 << 20
"""A file that is longer is renamed to `ROTATED_NAME`, in the place of the one before, and another one begun."""

MAX_QUEUED = 4096
"""Lines that wait for the thread; further ones are dropped. Chosen: minutes of a busy worker."""

MAX_LINE_NBYTES = 64 * 1024
MAX_EARLY = 64
"""Lines that wait for their directory, which the first save makes. Chosen."""

RETRY_S = 30.0
"""For how long nothing is tried with a directory whose file could not be written. Chosen."""

LINGER_S = 5.0
"""How long the thread waits for more before it ends. Chosen."""

_log = logging.getLogger("asyncckpt")


class EventLog:
    """Takes events from any thread and never waits, raises, or holds a file open. See the module.

    Args:
        max_nbytes: When a file is put aside; for tests.
        check: Called with a directory in the thread, before it is written to; raises where that is not allowed.

    Attributes:
        dropped: Lines that were not written.
    """

    def __init__(self, max_nbytes: int = MAX_EVENTS_NBYTES, check: Callable[[str], None] | None = None) -> None:
        self.dropped = 0
        self._max_nbytes, self._check = max_nbytes, check
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[tuple[str, int, str]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = self._busy = False
        self._refused: dict[str, float] = {}
        self._early: dict[str, list[str]] = {}
        self._owner_pid = os.getpid()

    def add(self, directory: str, event: str, facts: Mapping[str, Any], *, umask: int = 0o022) -> None:
        """Put one line at the end of the file of `directory`, soon.

        Args:
            directory: Where the checkpoints lie; it is not made.
            event: Its name.
            facts: Whatever JSON has a form for; the rest as text.
            umask: Of a file that is made.
        """
        if os.getpid() != self._owner_pid:  # a forked child has no thread
            return
        line = json.dumps({"t": round(time.time(), 6), "event": event, **facts}, default=str)
        with self._changed:
            if self._closed or len(self._queue) >= MAX_QUEUED or len(line) > MAX_LINE_NBYTES:
                self.dropped += 1
                return
            self._queue.append((directory, umask, line))
            if self._thread is None and not self._started():
                return
            self._changed.notify_all()

    def _started(self) -> bool:
        self._thread = BackgroundThread(self._run, "asyncckpt-events", end=lambda: self.close(0.0))
        try:
            self._thread.start()
        except RuntimeError:  # can't start new thread
            self._thread = None
            self.dropped += len(self._queue)
            self._queue.clear()
            return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if not self._queue and not self._closed:
                    self._changed.wait(LINGER_S)
                if not self._queue:
                    self._thread = None
                    return
                todo, self._queue, self._busy = self._queue, deque(), True
            files: dict[tuple[str, int], list[str]] = {}
            for directory, umask, line in todo:
                files.setdefault((directory, umask), []).append(line)
            for (directory, umask), lines in files.items():
                self._write(directory, umask, lines)

    def _write(self, directory: str, umask: int, lines: list[str]) -> None:
        now = time.monotonic()
        if now < self._refused.get(directory, now):
            self.dropped += len(lines)
            return
        lines = self._early.pop(directory, []) + lines
        try:
            if self._check is not None:
                self._check(directory)
            append(os.path.join(directory, EVENTS_NAME), lines, umask=umask, max_nbytes=self._max_nbytes)
            self._refused.pop(directory, None)
        except FileNotFoundError:  # the directory is being made
            self._early[directory] = lines[:MAX_EARLY]
            self.dropped += len(lines[MAX_EARLY:])
        except (OSError, AsyncCkptError) as error:
            self.dropped += len(lines)
            if directory not in self._refused:
                _log.warning("no events are written to %s, and saves go on without: %s", directory, error)
            self._refused[directory] = now + RETRY_S

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was written or dropped, at most `timeout_s`; says whether it was."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._queue or self._busy:
                left = deadline - time.monotonic()
                if left <= 0 or self._thread is None:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, end the thread. Twice is fine. Blocks: at most `timeout_s`, whatever the disk does."""
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)


def append(path: str, lines: list[str], *, umask: int, max_nbytes: int = MAX_EVENTS_NBYTES) -> None:
    """Put lines at the end of a file, which is made where it is missing and put aside where it is full.

    Raises:
        OSError: It cannot be written, or is no regular file.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    fd = _opened(path, umask)
    try:
        if os.fstat(fd).st_size >= max_nbytes:
            _put_aside(path, fd)
            os.close(fd)
            fd = -1
            fd = _opened(path, umask)
        if os.write(fd, data) != len(data):  # a full disk: what stands there ends in half a line, which readers skip
            os.write(fd, b"\n")
    finally:
        if fd >= 0:
            os.close(fd)


def _opened(path: str, umask: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666 & ~umask)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666 & ~umask)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no regular file")
    return fd


def _put_aside(path: str, fd: int) -> None:
    """Rename the full file, unless somebody else has done it: of two, one gets the lock, and looks again."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            os.rename(path, os.path.join(os.path.dirname(path), ROTATED_NAME))


def read_events(directory: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a directory, those that were put aside first. What is no event, half a line say, is skipped.

    Raises:
        OSError: A file is there and cannot be read.
    """
    for name in (ROTATED_NAME, EVENTS_NAME):
        try:
            fd = _reading(os.path.join(directory, name))
        except FileNotFoundError:
            continue
        with open(fd, "rb") as file:
            while line := file.readline(MAX_LINE_NBYTES + 1024):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and isinstance(event.get("event"), str) and _is_time(event.get("t")):
                    yield event


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e11


def _reading(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no regular file")
    return fd
