"""What a test process holds: fds, threads, children, slots, sockets, workers, signals; and what more of it later."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pathlib
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

GRACE_S = 20.0
"""A closed thing may need a moment: threads to return, the kernel to drop a process. More, on a busy machine."""

_IGNORED_FDS = ("/dev/urandom", "/dev/nvidia", "/dev/null", "/proc/")
_IGNORED_CHILDREN = ("resource_tracker", "forkserver", "tests.warm_python")


class LeakGuard:
    """Remembers what the process holds, and names what it holds more of later."""

    def __init__(self, *directories: pathlib.Path) -> None:
        self._directories = list(directories)
        self._own: list[pathlib.Path] = []
        self._probes: dict[str, Callable[[], set[object]]] = {
            "fd": open_fds,
            "thread": lambda: set(threading.enumerate()),
            "child process": child_processes,
            "slot mapping": slot_mappings,
            "signal": lambda: {f"{one.name}: {how}" for one, how in handlers().items()},
            "blocked signal": blocked_signals,
            "socket": lambda: {name for d in self._directories for name in sockets(d)},
            "worker": lambda: {name for d in self._directories for name in held_locks(d)},
        }
        self._handlers, self._blocked = handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._before = {kind: probe() for kind, probe in self._probes.items()}

    def watch(self, directory: pathlib.Path) -> None:
        """Look for sockets and workers in `directory` too, and remove it at the end."""
        self._directories.append(directory)
        self._own.append(directory)

    def leaks(self) -> list[str]:
        """Return what is there now and was not before."""
        return sorted(
            f"{kind}: {thing}" for kind, probe in self._probes.items() for thing in probe() - self._before[kind]
        )

    def settled_leaks(self, grace_s: float = GRACE_S) -> list[str]:
        """Return the leaks that last longer than `grace_s`."""
        deadline = time.monotonic() + grace_s
        found = self.leaks()
        while found and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.02)
            found = self.leaks()
        return found

    def clean_up(self) -> None:
        """End what a failed test left, so that the next one is not blamed for it."""
        for one, before in self._handlers.items():
            if before is not None and signal.getsignal(one) is not before:
                signal.signal(one, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for directory in self._own:
            for process in psutil.process_iter(["cmdline"]):
                if any(str(directory) in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid():
                    process.kill()
            shutil.rmtree(directory, ignore_errors=True)


def open_fds() -> set[object]:
    """Return (fd, target) of every open file descriptor."""
    found: set[object] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if not target.startswith(_IGNORED_FDS) and "/mpl-data/fonts/" not in target:  # matplotlib keeps its fonts open
            found.add((int(name), target))
    return found


def fds_of(pid: int) -> dict[str, str]:
    """Return the targets of another process's file descriptors by number; without those that it closes meanwhile."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def child_processes() -> set[object]:
    """Return (pid, start, name) of every child, zombies included."""
    found: set[object] = set()
    for child in _children():
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            line = "zombie"
        if not any(word in line for word in _IGNORED_CHILDREN):
            found.add((child.pid, child.create_time(), line[:80]))
    return found


def _children() -> list[psutil.Process]:
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/self/task/{task}"):  # a kernel without CONFIG_PROC_CHILDREN: read every process
                return list(psutil.Process().children())
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def slot_mappings() -> set[object]:
    """Return the address ranges at which slots are mapped."""
    with open("/proc/self/maps") as maps:
        return {line.split()[0] for line in maps if "memfd:asyncckpt" in line}


def handlers() -> dict[signal.Signals, Any]:
    """Return what is done at each signal but pytest-timeout's; None: not Python's."""
    found = signal.valid_signals() - {signal.SIGALRM}
    return {one: signal.getsignal(one) for one in found if isinstance(one, signal.Signals)}


def blocked_signals() -> set[object]:
    """Return what this thread blocks."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def sockets(directory: pathlib.Path) -> set[str]:
    """Return the sockets in `directory` and one level below."""
    return {
        str(path) for pattern in ("*", "*/*") for path in directory.glob(pattern) if stat.S_ISSOCK(path.lstat().st_mode)
    }


def held_locks(directory: pathlib.Path) -> set[str]:
    """Return the lock files in `directory` that a living worker holds."""
    found = set()
    for pattern in ("*.lock", "*/*.lock"):
        for path in directory.glob(pattern):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(f"{path} is held")
            finally:
                os.close(fd)
    return found
