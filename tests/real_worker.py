"""A worker process of its own for tests: started as users start it, stopped, killed, frozen, and always ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch_free_client import MIN_TIMEOUT_S, Client

from asyncckpt.client import launcher
from asyncckpt.protocol import messages
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import start_ticks

if TYPE_CHECKING:  # this module runs without torch
    from asyncckpt import AsyncCheckpointer, SaveHandle

DEADLINE_S = 60.0
"""For whatever must happen, and has no bound of its own in the promises."""


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Poll `holds` until it is true, and return what it returned; fail at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def written(handle: SaveHandle) -> Any:
    """Wait until a save is written, and return its report."""
    return handle.written.result(DEADLINE_S)


def saved_at_last(save: Callable[[str], SaveHandle], times: int = 20) -> str:
    """Save under one name after the other until one save is written, and return its name.

    For limits that a test makes short: a machine on which others work may miss them at first.
    """
    errors = []
    for number in range(times):
        errors.append(save(f"at-last-{number}").written.exception(DEADLINE_S))
        if errors[-1] is None:
            return f"at-last-{number}"
    raise AssertionError(f"no save was written: {errors}")


def limit_commits(checkpointer: AsyncCheckpointer, timeout_s: float) -> None:
    """Give all ranks of a checkpointer's later saves `timeout_s` to seal; those before had its `commit_timeout_s`."""
    object.__setattr__(checkpointer.config, "commit_timeout_s", timeout_s)
    checkpointer._process._pending._timeout_s = timeout_s  # type: ignore[attr-defined]


def manifest_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`, as JSON."""
    found: dict[str, Any] = json.loads((pathlib.Path(path) / "manifest.json").read_text())
    return found


def slots_of(checkpointer: AsyncCheckpointer) -> list[Any]:
    """Return the slots that a checkpointer holds."""
    return list(checkpointer._process.pool._slots)  # type: ignore[attr-defined]


def status_of(endpoint: str, timeout_s: float = MIN_TIMEOUT_S) -> Mapping[str, Any]:
    """Return the status report of the worker at `endpoint`; waits until it answers."""
    with Client(endpoint, timeout_s=timeout_s) as client:
        report = client.call(messages.Status(id=client.next_id()), resend_s=0.05)
        assert isinstance(report, messages.StatusReport)
        return report.report


class RealWorker:
    """A worker that answers at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.pid = int(self.status()["pid"])
        self._started = start_ticks(self.pid)

    def status(self) -> Mapping[str, Any]:
        """Return its status report."""
        return status_of(self.endpoint)

    @property
    def alive(self) -> bool:
        """Whether the process is still there. A killed one is until its last thread has ended: it holds its lock."""
        found = start_ticks(self.pid)
        if found is not None:
            return found == self._started
        try:
            return len(os.listdir(f"/proc/{self.pid}/task")) > 1
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to it, if it is still the process that it was."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Wait until the process has ended."""
        wait_until(lambda: not self.alive, f"the worker {self.pid} ends")

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP inside, SIGCONT after."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: _state(self.pid) == "T", "the worker is stopped")
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it in order; by force where that does not help."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.wait_gone()
        finally:
            self.signal(signal.SIGKILL)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


@contextlib.contextmanager
def running(endpoint: str, *options: str) -> Iterator[RealWorker]:
    """Start a worker at `endpoint`; ends it, or the one that has taken its place."""
    launcher.start_worker(endpoint, options=options)
    worker = RealWorker(endpoint)
    try:
        yield worker
    finally:
        stop_whoever_serves(endpoint, worker)


def stop_whoever_serves(endpoint: str, known: RealWorker | None = None) -> None:
    """End the worker at `endpoint`, `known` or another."""
    if known is not None and known.alive:
        known.stop()
    elif is_served(endpoint):  # taken before the socket is bound: it may be starting
        RealWorker(endpoint).stop()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket_path(endpoint))  # a killed worker leaves it


def is_served(endpoint: str) -> bool:
    """Whether a worker has the endpoint; it may be starting."""
    try:
        fd = os.open(f"{socket_path(endpoint)}.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
