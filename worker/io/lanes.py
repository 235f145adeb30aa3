"""Lanes: the thread pools of the worker's jobs.

Jobs that touch files have separate lanes for each file system, so that one that hangs blocks only its own threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from asyncckpt.storage.rank_writer import DEFAULT_THREADS
from asyncckpt_worker.core.events import Event
from asyncckpt_worker.io.mount_table import MountTable

LANES: dict[str, int] = {"memory": 1, "populate": 1, "free": 1}
"""Lane -> number of threads, for jobs that touch no files. `free` has its own lane: unmapping a large slot takes
seconds, and reading the slots of a dead trainer must not wait for it."""

MOUNT_LANES: dict[str, int] = {"prepare": 4, "write": 4, "stream": 64, "commit": 4, "mirror": 4}
"""Lane -> number of threads for each file system, for jobs that touch files. `write`: concurrent writes of ranks'
files, each with helper threads. `stream`: writes while the slots are filled; these threads mostly wait for their
trainers, any of which may have stopped. `mirror`: copies to that file system."""

HELP = "help"
"""The lane of each file system for helper threads of writes."""

MAX_HELPERS = 64
"""Maximum threads of that lane."""

MAX_THREADS = 384
"""Maximum threads of all file systems; at most half are helpers. Chosen: enough if four file systems hang."""

IDLE_S = 20.0
"""How long a thread waits for its next job before it exits; less than `THREAD_WAIT_S`. Chosen, not measured."""

THREAD_WAIT_S = 30.0
"""How long a job waits for the first thread of its lane while other file systems hold all threads. Chosen."""

JOB_WAIT_S = 1800.0
"""How long a job waits for a thread: the default of `commit_timeout_s`, after which its save has failed anyway."""

CHECK_INTERVAL_S = 1.0
MAX_NAMED = 4
MAX_HOPS = 8
"""Maximum number of times that a job moves to another file system's lane, because of symbolic links."""

P = ParamSpec("P")
T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.worker")

Work = Callable[[Executor], "Event | None"]


class NoThreadError(Exception):
    """A job has waited too long for a thread; the text names the file systems that hold the threads."""


@dataclass(eq=False, slots=True)
class Job:
    """A job outside the control loop.

    Attributes:
        work: Called in a thread, with an executor for helper threads; returns the result, or None.
        refused: Returns the result if the job cannot run, or its `work` raises.
        path: Path that it touches; "" for none.
        since: When it was first added to a lane.
        hops: How often it has moved to the lane of another file system.
    """

    work: Work
    refused: Callable[[Exception], Event | None] = lambda error: None
    path: str = ""
    since: float = 0.0
    hops: int = 0


@dataclass(eq=False, slots=True)
class _Lane:
    """The jobs of one kind and one file system, and the number of their threads."""

    name: str
    device: str
    limit: int
    ready: threading.Condition
    helpers: Executor
    jobs: deque[Job] = field(default_factory=deque)
    threads: int = 0
    idle: int = 0


class Lanes:
    """Runs jobs in daemon threads, so that the process can exit while a thread hangs on a disk.

    Threads start when they are needed and exit when they are idle, so that the limit leaves room for other file
    systems.

    Args:
        write_threads: Threads that write one rank's files.
        mounts: Finds the file system of a path.
        max_threads: Maximum threads of all file systems.

    Attributes:
        fd: An eventfd, readable while results wait.
    """

    def __init__(
        self, write_threads: int = DEFAULT_THREADS, mounts: MountTable | None = None, max_threads: int = MAX_THREADS
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._mounts = mounts or MountTable()
        n_helpers = min(MAX_HELPERS, MOUNT_LANES["write"] * write_threads)
        self._limits = {**LANES, **MOUNT_LANES, HELP: n_helpers}
        self._max_threads = max_threads
        self._results: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._threads: set[threading.Thread] = set()
        self._n_helpers = self._n_others = 0
        self._lock = threading.Lock()
        self._fd_lock = threading.RLock()  # reentrant: a signal handler may interrupt `wake` in the same thread
        self._checked_at = time.monotonic()
        self._closed = False

    def submit(self, name: str, job: Job) -> None:
        """Run `job` in lane `name`, of the file system of its path if it has one. Does not wait.

        Raises:
            RuntimeError: The lane has no thread, and the system cannot start one.
        """
        self.submit_on(name, self._mounts.device_of(job.path) if job.path else "", job)

    def submit_on(self, name: str, device: str, job: Job) -> None:
        """Run `job` in lane `name` of a file system, as soon as a thread is free. Does not wait.

        Args:
            name: The lane.
            device: The file system, as `MountTable.device_of` returns it; "": none.
            job: The job.

        Raises:
            RuntimeError: The lane has no thread, and the system cannot start one. Not in the lane of helpers: the
                thread that writes does their work itself.
        """
        job.since = job.since or time.monotonic()
        with self._lock:
            lane = self._lanes.get((name, device))
            if lane is None:
                lane = _Lane(name, device, self._limits[name], threading.Condition(self._lock), _Helpers(self, device))
                self._lanes[name, device] = lane
            lane.jobs.append(job)
            try:
                self._staff(lane)
            except RuntimeError:  # the system gives no thread: the existing threads of the lane do the job
                if lane.threads == 0 and name != HELP:
                    lane.jobs.remove(job)
                    raise
            lane.ready.notify()

    def _staff(self, lane: _Lane) -> None:
        """Start a thread if there are more jobs than idle threads, and the limits allow one more.

        Raises:
            RuntimeError: The system cannot start a thread.
        """
        if lane.idle >= len(lane.jobs) or lane.threads >= lane.limit or not self._may_start(lane):
            return
        thread = threading.Thread(target=self._run, args=(lane,), name=f"asyncckpt-{lane.name}", daemon=True)
        thread.start()
        self._threads.add(thread)
        self._count(lane, 1)

    def _may_start(self, lane: _Lane) -> bool:
        if not lane.device:
            return True
        full = self._n_helpers + self._n_others >= self._max_threads
        return not full and not (lane.name == HELP and 2 * self._n_helpers >= self._max_threads)

    def _count(self, lane: _Lane, by: int) -> None:
        lane.threads += by
        if lane.name == HELP:
            self._n_helpers += by
        elif lane.device:
            self._n_others += by

    def post(self, event: Event) -> None:
        """Add a result from any thread, and wake the control loop."""
        self._results.put(event)
        self.wake()

    def wake(self) -> None:
        """Wake the control loop; no effect after `close`. Safe in a signal handler."""
        with self._fd_lock, contextlib.suppress(BlockingIOError):
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def results(self) -> list[Event]:
        """Return the available results, including those of jobs that have waited too long.

        IMPORTANT: to be called about once a second even if `fd` is not readable, since late jobs are refused here.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found = []
        now = time.monotonic()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            found += self._refusals(now)
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
        return found

    def _refusals(self, now: float) -> list[Event]:
        """Remove the jobs that have waited too long, and return their results."""
        late: list[tuple[Job, str]] = []
        with self._lock:
            for lane in self._lanes.values():
                with contextlib.suppress(RuntimeError):  # the system gives no thread: the next check tries again
                    self._staff(lane)
                wait_s = JOB_WAIT_S if lane.threads else THREAD_WAIT_S
                while lane.device and lane.jobs and now - lane.jobs[0].since > wait_s:
                    late.append((lane.jobs.popleft(), self._holders(lane)))
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane.threads or lane.jobs}
        events = [_refused(job, NoThreadError(text)) for job, text in late]
        return [event for event in events if event is not None]

    def _holders(self, lane: _Lane) -> str:
        """Return a text with the file systems that hold the threads for which a job of `lane` waits."""
        holding = [lane] if lane.threads else [other for other in self._lanes.values() if other.device]
        counts = Counter[str]()
        for other in holding:
            counts[self._mounts.name_of(other.device)] += other.threads - other.idle
        listed = ", ".join(f"{name} ({n})" for name, n in counts.most_common(MAX_NAMED))
        return f"no thread was free for it; threads are waiting for these file systems (number of threads): {listed}"

    # ---- in the threads

    def _run(self, lane: _Lane) -> None:
        while (job := self._next(lane)) is not None:
            result = self._result(lane, job)
            del job
            if result is not None and not self._closed:
                self.post(result)

    def _next(self, lane: _Lane) -> Job | None:
        """Wait for a job; None: the thread must exit, and is no longer counted."""
        with self._lock:
            lane.idle += 1
            until = time.monotonic() + IDLE_S
            while not lane.jobs and not self._closed and (left := until - time.monotonic()) > 0:
                lane.ready.wait(left)
            lane.idle -= 1
            if lane.jobs:
                return lane.jobs.popleft()
            self._threads.discard(threading.current_thread())
            self._count(lane, -1)
            return None

    def _result(self, lane: _Lane, job: Job) -> Event | None:
        try:
            if job.path and self._redirected(lane, job):
                return None
            return job.work(lane.helpers)
        except BaseException as error:
            _logger.exception("a job of lane %s raised: a bug in the worker", lane.name)
            return _refused(job, error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _redirected(self, lane: _Lane, job: Job) -> bool:
        """Move the job to another file system's lane if links in its path lead there; return whether it was moved."""
        path, device = self._mounts.resolve(job.path)
        if device == lane.device or job.hops >= MAX_HOPS:
            return False
        job.path, job.hops = path, job.hops + 1
        self.submit_on(lane.name, device, job)
        return True

    def close(self, timeout_s: float) -> bool:
        """End the threads. Idempotent.

        Blocks: until they have ended, at most `timeout_s`.

        Returns:
            Whether all threads have ended; False if a job hangs.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            threads = list(self._threads)
            for lane in self._lanes.values():
                lane.ready.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in threads)
        if done:
            with self._fd_lock:
                os.close(self.fd)
                self.fd = -1
        return done


def _refused(job: Job, error: Exception) -> Event | None:
    """Return the result of a job that cannot run. IMPORTANT: must not raise: a thread of the lane would end."""
    try:
        return job.refused(error)
    except BaseException:
        _logger.exception("a job that cannot run has no result: a bug in the worker")
        return None


class _Helpers(Executor):
    """Runs functions in the helper lane of one file system. A function that waits too long is cancelled."""

    def __init__(self, lanes: Lanes, device: str) -> None:
        self._lanes, self._device = lanes, device

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do as `Executor.submit`; if no thread is available, the future waits for one."""
        future: Future[T] = Future()

        def work(_: Executor) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        def refused(_: Exception) -> None:
            future.cancel()

        self._lanes.submit_on(HELP, self._device, Job(work, refused))
        return future
