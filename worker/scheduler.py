"""Jobs off the control loop: lanes of threads, a bounded queue each, results by queue and eventfd.

The lanes keep what may hang (a wedged disk) from what must not (reading a dead trainer's slot).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from asyncckpt_worker.events import Event

LANES: dict[str, int] = {
    "memory": 1,
    "populate": 1,
    "gather": 1,
    "free": 1,
    "prepare": 4,
    "write": 4,
    "stream": 64,
    "commit": 4,
}
"""Lane -> threads. `free` has its own: to unmap a large slot takes seconds, and reading a dead trainer's must not wait.
`gather`: memory is put on huge pages while nobody wants anything. `write`: saves that are written at the same time,
each by at least two threads more. `stream`: those that are written while they are staged; most of the time they wait
for their trainers, one of which may have stopped."""

MAX_QUEUED = 8192
"""Jobs that wait in one lane: more than `records.MAX_JOBS`, so that the brain refuses before a queue is full."""

_logger = logging.getLogger("asyncckpt.worker")
Job = Callable[[], "Event | None"]


class Scheduler:
    """Runs jobs in daemon threads, which a wedged disk may hold for ever without keeping the process from its exit.

    Attributes:
        fd: An eventfd, readable while results wait.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._results: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._queues: dict[str, queue.Queue[Job | None]] = {lane: queue.Queue(MAX_QUEUED) for lane in LANES}
        self._threads: dict[str, list[threading.Thread]] = {lane: [] for lane in LANES}
        self._idle: dict[str, int] = dict.fromkeys(LANES, 0)
        self._lock = threading.Lock()
        self._fd_lock = threading.RLock()  # reentrant: a signal's handler may interrupt its own thread in `wake`
        self._closed = False

    def submit(self, lane: str, job: Job) -> None:
        """Run `job` in `lane`; what it returns, if anything, becomes a result. It must not raise.

        Raises:
            queue.Full: Our own bug: the brain bounds the jobs.
            RuntimeError: The lane has no thread, and the system gives none.
        """
        with self._lock:
            if self._idle[lane] <= self._queues[lane].qsize() and len(self._threads[lane]) < LANES[lane]:
                name = f"asyncckpt-{lane}-{len(self._threads[lane])}"
                thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread to be had: those that the lane has do the job
                    if not self._threads[lane]:
                        raise
                else:
                    self._threads[lane].append(thread)
            self._queues[lane].put_nowait(job)

    def post(self, event: Event) -> None:
        """Add a result from any thread, and wake the control loop."""
        self._results.put(event)
        self.wake()

    def wake(self) -> None:
        """Wake the control loop; nothing after `close`. Safe in a signal handler."""
        with self._fd_lock, contextlib.suppress(BlockingIOError):
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def results(self) -> list[Event]:
        """Return the results that are there."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
        return found

    def _run(self, lane: str) -> None:
        while True:
            with self._lock:
                self._idle[lane] += 1
            job = self._queues[lane].get()
            with self._lock:
                self._idle[lane] -= 1
            if job is None:
                return
            try:
                result = job()
            except BaseException:
                _logger.exception("a job of lane %s raised: our own bug", lane)
                continue
            del job
            if result is not None and not self._closed:
                self.post(result)

    def close(self, timeout_s: float) -> bool:
        """End the threads; later calls do nothing.

        Blocks until they have ended, at most `timeout_s`.

        Returns:
            Whether all have: False when a job hangs.
        """
        if self._closed:
            return True
        self._closed = True
        deadline = time.monotonic() + timeout_s
        for lane, threads in self._threads.items():
            for _ in threads:
                with contextlib.suppress(queue.Full):
                    self._queues[lane].put_nowait(None)
        for thread in [t for threads in self._threads.values() for t in threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(t.is_alive() for threads in self._threads.values() for t in threads)
        if done:
            with self._fd_lock:
                os.close(self.fd)
                self.fd = -1
        return done
