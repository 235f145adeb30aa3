"""`events.jsonl`: the events of a run, one JSON object a line, for users, `asyncckpt report` and other tools.

The file is in the directory that holds the checkpoints. Lines are appended by one system call, so the leading worker of
a run and the trainer of rank 0, which share a machine, can write to one file. Saves never wait for it: each directory
has a thread that writes, and lines that cannot be written are dropped and counted.
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
from asyncckpt.basics.urls import is_object_url

EVENTS_NAME = "events.jsonl"
ROTATED_NAME = f"{EVENTS_NAME}.1"
MAX_EVENTS_NBYTES = 64 << 20
"""A longer file is renamed to `ROTATED_NAME`, which replaces the previous one, and a new file is begun."""

MAX_QUEUED = 4096
"""Most lines that wait for the thread of a directory; further ones are dropped. Chosen: minutes of a busy worker."""

MAX_DIRECTORIES = 32
"""Most directories that are written to at the same time. One that hangs delays only its own lines. Chosen."""

MAX_LINE_NBYTES = 64 * 1024
MAX_BEFORE_DIRECTORY = 64
"""Most lines that wait for their directory, which the first save makes. Chosen."""

RETRY_S = 30.0
"""Seconds for which lines are dropped after the file of a directory could not be written. Chosen."""

IDLE_EXIT_S = 5.0
"""Seconds after which an idle thread ends. Chosen."""

_log = logging.getLogger("asyncckpt")


class _DirectoryQueue:
    """Lines that wait for the file of one directory. `before_directory`: lines added before the directory was made."""

    __slots__ = ("before_directory", "busy", "lines", "refused_until", "thread", "warned")

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque()
        self.before_directory: list[str] = []
        self.thread: threading.Thread | None = None
        self.busy = self.warned = False
        self.refused_until = 0.0


class EventLog:
    """Queues events of any thread. `add` never waits for the disk and never raises; no file is kept open.

    Args:
        max_nbytes: Length at which a file is rotated; for tests.
        check: Called in a directory's thread before it is written to; raises if that is not allowed.

    Attributes:
        dropped: Number of lines that were not written.
    """

    def __init__(self, max_nbytes: int = MAX_EVENTS_NBYTES, check: Callable[[str], None] | None = None) -> None:
        self.dropped = 0
        self._max_nbytes, self._check = max_nbytes, check
        self._changed = threading.Condition(threading.Lock())
        self._queues: dict[str, _DirectoryQueue] = {}
        self._closed = False
        self._owner_pid = os.getpid()

    def add(self, directory: str, event: str, facts: Mapping[str, Any], *, umask: int = 0o022) -> None:
        """Queue one line for the file of `directory`.

        Args:
            directory: Directory of the checkpoints; it is not created here. For a URL nothing is written, since
                objects cannot be appended to.
            event: Name of the event.
            facts: Values for JSON. Values that JSON cannot represent are written as text.
            umask: Umask for a new file.
        """
        if os.getpid() != self._owner_pid or is_object_url(directory):  # a forked child has no thread
            return
        line = json.dumps({"t": round(time.time(), 6), "event": event, **facts}, default=str)
        with self._changed:
            entry = None if self._closed or len(line) > MAX_LINE_NBYTES else self._queue_of(directory)
            if entry is None or len(entry.lines) >= MAX_QUEUED:
                self.dropped += 1
                return
            entry.lines.append((umask, line))
            if entry.thread is None:
                self._start(directory, entry)
            self._changed.notify_all()

    def _queue_of(self, directory: str) -> _DirectoryQueue | None:
        """Return the queue of a directory, moved to the end; None: too many directories are being written."""
        entry = self._queues.pop(directory, None)
        if entry is None:
            if len(self._queues) >= MAX_DIRECTORIES:
                idle = next((name for name, other in self._queues.items() if other.thread is None), None)
                if idle is None:
                    return None
                self.dropped += len(self._queues.pop(idle).before_directory)
            entry = _DirectoryQueue()
        self._queues[directory] = entry
        return entry

    def _start(self, directory: str, entry: _DirectoryQueue) -> None:
        thread = BackgroundThread(self._run, "asyncckpt-events", (directory, entry), end=lambda: self.close(0.0))
        try:
            thread.start()
        except RuntimeError:  # can't start new thread
            self.dropped += len(entry.lines)
            entry.lines.clear()
            return
        entry.thread = thread

    def _run(self, directory: str, entry: _DirectoryQueue) -> None:
        dropped = 0
        while True:
            with self._changed:
                self.dropped += dropped
                entry.busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: entry.lines or self._closed, IDLE_EXIT_S)
                if not entry.lines:
                    entry.thread = None
                    return
                todo, entry.lines, entry.busy = entry.lines, deque(), True
            lines: dict[int, list[str]] = {}
            for umask, line in todo:
                lines.setdefault(umask, []).append(line)
            dropped = sum(self._write(directory, entry, umask, some) for umask, some in lines.items())

    def _write(self, directory: str, entry: _DirectoryQueue, umask: int, lines: list[str]) -> int:
        """Write lines, and return how many were dropped. IMPORTANT: raises nothing, which would end the thread."""
        now = time.monotonic()
        if now < entry.refused_until:
            return len(lines)
        lines, entry.before_directory = entry.before_directory + lines, []
        try:
            if self._check is not None:
                self._check(directory)
            append(os.path.join(directory, EVENTS_NAME), lines, umask=umask, max_nbytes=self._max_nbytes)
        except FileNotFoundError:  # the directory is being made
            entry.before_directory = lines[:MAX_BEFORE_DIRECTORY]
            return len(lines[MAX_BEFORE_DIRECTORY:])
        except Exception as error:
            if not entry.warned:
                _log.warning(
                    "events cannot be written to %s, and are dropped; saves are not affected: %s", directory, error
                )
            entry.warned, entry.refused_until = True, now + RETRY_S
            return len(lines)
        entry.warned = False
        return 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written or dropped. Returns whether they are.

        Blocks: at most `timeout_s`.
        """
        with self._changed:
            entries = self._queues.values()
            return self._changed.wait_for(lambda: not any(p.lines or p.busy for p in entries), timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the queued lines, and end the threads. Idempotent.

        Blocks: at most `timeout_s`, even if the disk hangs.
        """
        if os.getpid() != self._owner_pid:
            return
        with self._changed:
            self._closed = True
            threads = [entry.thread for entry in self._queues.values() if entry.thread is not None]
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def append(path: str, lines: list[str], *, umask: int, max_nbytes: int = MAX_EVENTS_NBYTES) -> None:
    """Append lines to a file, which is created if it is missing, and rotated if it is full.

    Raises:
        OSError: The file cannot be written, or is not a regular file.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    fd = _open_to_append(path, umask)
    try:
        if os.fstat(fd).st_size >= max_nbytes:
            _rotate(path, fd)
            os.close(fd)
            fd = -1
            fd = _open_to_append(path, umask)
        if os.write(fd, data) != len(data):  # a full disk: the file ends in a part of a line, which readers skip
            os.write(fd, b"\n")
    finally:
        if fd >= 0:
            os.close(fd)


def _open_to_append(path: str, umask: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666 & ~umask)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o666 & ~umask)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def _rotate(path: str, fd: int) -> None:
    """Rename the full file, unless another process has: only one gets the lock, and then checks the file again."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            os.rename(path, os.path.join(os.path.dirname(path), ROTATED_NAME))


def read_events(directory: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a directory, those of the rotated file first. Lines that are not events are skipped.

    Raises:
        OSError: A file exists and cannot be read.
    """
    for name in (ROTATED_NAME, EVENTS_NAME):
        try:
            fd = _open_to_read(os.path.join(directory, name))
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


def _open_to_read(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd
