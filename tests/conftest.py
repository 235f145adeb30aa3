"""What every test gets: a guard against leaks, a private endpoint, and seeds that replay.

A random test takes its numbers from the fixture `rng`. Its seed is printed with the failure; run the test again with
`ASYNCCKPT_TEST_SEED=<seed>` to get the same numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pathlib
import random
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # the run with nothing but the required packages
    pass
else:
    hypothesis.settings.register_profile(
        "bounded",
        deadline=None,
        print_blob=True,
        database=None,
        max_examples=int(os.environ.get("ASYNCCKPT_TEST_EXAMPLES", "200")),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("bounded")

SEED_VARIABLE = "ASYNCCKPT_TEST_SEED"
GRACE_S = 2.0
"""A closed thing may need a moment: threads to return, the kernel to drop a process."""

_SESSION_SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))
_IGNORED_FDS = ("/dev/urandom", "/dev/nvidia", "/dev/null", "/proc/")
_IGNORED_CHILDREN = ("resource_tracker", "forkserver")


def pytest_report_header() -> str:
    """Name the seed once, so that even a killed run can be replayed."""
    return f"asyncckpt: {SEED_VARIABLE}={_SESSION_SEED}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this session; the same for a test whether it runs alone or among others."""
    print(f"{request.node.nodeid}: replay with {SEED_VARIABLE}={_SESSION_SEED}")
    return _SESSION_SEED


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers from `seed`."""
    return random.Random(seed)


def _private_directory() -> pathlib.Path:
    """Make a directory of mode 0700 with a short name: a Unix socket's path holds 107 bytes."""
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"
    return pathlib.Path(tempfile.mkdtemp(prefix="ackpt-", dir=base))


@pytest.fixture(scope="session", autouse=True)
def _default_endpoint_is_private() -> Iterator[pathlib.Path]:
    """Keep tests from meeting a worker that this user really runs."""
    directory = _private_directory()
    patch = pytest.MonkeyPatch()
    for name in [n for n in os.environ if n.startswith("ASYNCCKPT_") and not n.startswith("ASYNCCKPT_TEST_")]:
        patch.delenv(name)
    patch.setenv("XDG_RUNTIME_DIR", str(directory))
    yield directory
    patch.undo()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def endpoint_dir(_leak_guard: LeakGuard) -> Iterator[pathlib.Path]:
    """A private directory for sockets; what is left in it, or a worker that still serves it, fails the test."""
    directory = _private_directory()
    _leak_guard.watch(directory)
    yield directory


@pytest.fixture
def endpoint(endpoint_dir: pathlib.Path) -> str:
    """An endpoint at which nobody listens yet."""
    return f"ipc://{endpoint_dir}/w.sock"


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
            "socket": lambda: {name for d in self._directories for name in sockets(d)},
            "worker": lambda: {name for d in self._directories for name in held_locks(d)},
        }
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
        for directory in self._own:
            for process in psutil.process_iter(["cmdline"]):
                if any(str(directory) in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid():
                    process.kill()
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def _leak_guard(_default_endpoint_is_private: pathlib.Path) -> Iterator[LeakGuard]:
    """Fail a test that leaves an fd, a thread, a child, a slot's mapping, a socket or a worker behind."""
    guard = LeakGuard(_default_endpoint_is_private)
    yield guard
    found = guard.settled_leaks()
    guard.clean_up()
    if found:
        pytest.fail("the test leaked " + "; ".join(found), pytrace=False)


def open_fds() -> set[object]:
    """Return (fd, target) of every open file descriptor."""
    found: set[object] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if not target.startswith(_IGNORED_FDS):
            found.add((int(name), target))
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
