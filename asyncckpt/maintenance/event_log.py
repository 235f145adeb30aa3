"""`events.jsonl`: what happened in a run, one JSON object a line, for people, `asyncckpt report` and other tools.

It lies beside the checkpoints, in the directory that holds them. Lines are put at its end in one call each time, so
the worker that leads a run and the trainer of rank 0, which share a machine, write to one file. Nothing depends on it:
it is written by a thread of its own for each directory, and where it cannot be, lines are dropped and counted.
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

from asyncckpt.basics.process_lifecycle import BackgroundThread

EVENTS_NAME = "events.jsonl"
ROTATED_NAME = f"{EVENTS_NAME}.1"
MAX_EVENTS_NBYTES = 64 << 20
"""A file that is longer is renamed to `ROTATED_NAME`, in the place of the one before, and another one begun."""

MAX_QUEUED = 4096
"""Lines that wait for the thread of a directory; further ones are dropped. Chosen: minutes of a busy worker."""

MAX_DIRECTORIES = 32
"""Directories that are remembered, and written to at once: one that hangs holds up its own lines only. Chosen."""

MAX_LINE_NBYTES = 64 * 1024
MAX_EARLY = 64
"""Lines that wait for their directory, which the first save makes. Chosen."""

RETRY_S = 30.0
"""For how long nothing is tried with a directory whose file could not be written. Chosen."""

LINGER_S = 5.0
"""How long a thread waits for more before it ends. Chosen."""

_log = logging.getLogger("asyncckpt")


class _Place:
    """What waits for the file of one directory, and how that was found last. `early`: the directory is being made."""

    __slots__ = ("busy", "early", "queue", "refused_until", "thread", "warned")

    def __init__(self) -> None:
        self.queue: deque[tuple[int, str]] = deque()
        self.early: list[str] = []
        self.thread: threading.Thread | None = None
        self.busy = self.warned = False
        self.refused_until = 0.0


class EventLog:
    """Takes events from any thread and never waits, raises, or holds a file open.

    Args:
        max_nbytes: When a file is put aside; for tests.
        check: Called with a directory in its thread, before it is written to; raises where that is not allowed.

    Attributes:
        dropped: Lines that were not written.
    """

    def __init__(self, max_nbytes: int = MAX_EVENTS_NBYTES, check: Callable[[str], None] | None = None) -> None:
        self.dropped = 0
        self._max_nbytes, self._check = max_nbytes, check
        self._changed = threading.Condition(threading.Lock())
        self._places: dict[str, _Place] = {}
        self._closed = False
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
            place = None if self._closed or len(line) > MAX_LINE_NBYTES else self._place_of(directory)
            if place is None or len(place.queue) >= MAX_QUEUED:
                self.dropped += 1
                return
            place.queue.append((umask, line))
            if place.thread is None:
                self._start(directory, place)
            self._changed.notify_all()

    def _place_of(self, directory: str) -> _Place | None:
        """Return the place of a directory, which is then the last one; None: there are too many that are written."""
        place = self._places.pop(directory, None)
        if place is None:
            if len(self._places) >= MAX_DIRECTORIES:
                idle = next((name for name, other in self._places.items() if other.thread is None), None)
                if idle is None:
                    return None
                self.dropped += len(self._places.pop(idle).early)
            place = _Place()
        self._places[directory] = place
        return place

    def _start(self, directory: str, place: _Place) -> None:
        thread = BackgroundThread(self._run, "asyncckpt-events", (directory, place), end=lambda: self.close(0.0))
        try:
            thread.start()
        except RuntimeError:  # can't start new thread
            self.dropped += len(place.queue)
            place.queue.clear()
            return
        place.thread = thread

    def _run(self, directory: str, place: _Place) -> None:
        dropped = 0
        while True:
            with self._changed:
                self.dropped += dropped
                place.busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: place.queue or self._closed, LINGER_S)
                if not place.queue:
                    place.thread = None
                    return
                todo, place.queue, place.busy = place.queue, deque(), True
            lines: dict[int, list[str]] = {}
            for umask, line in todo:
                lines.setdefault(umask, []).append(line)
            dropped = sum(self._write(directory, place, umask, some) for umask, some in lines.items())

    def _write(self, directory: str, place: _Place, umask: int, lines: list[str]) -> int:
        """Write lines, and return how many were dropped. IMPORTANT: nothing is raised, which would end the thread."""
        now = time.monotonic()
        if now < place.refused_until:
            return len(lines)
        lines, place.early = place.early + lines, []
        try:
            if self._check is not None:
                self._check(directory)
            append(os.path.join(directory, EVENTS_NAME), lines, umask=umask, max_nbytes=self._max_nbytes)
        except FileNotFoundError:  # the directory is being made
            place.early = lines[:MAX_EARLY]
            return len(lines[MAX_EARLY:])
        except Exception as error:
            if not place.warned:
                _log.warning("no events are written to %s, and saves go on without: %s", directory, error)
            place.warned, place.refused_until = True, now + RETRY_S
            return len(lines)
        place.warned = False
        return 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was written or dropped, at most `timeout_s`; says whether it was."""
        with self._changed:
            places = self._places.values()
            return self._changed.wait_for(lambda: not any(p.queue or p.busy for p in places), timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, end the threads. Twice is fine. Blocks: at most `timeout_s`, whatever the disk does."""
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            self._closed = True
            threads = [place.thread for place in self._places.values() if place.thread is not None]
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


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
