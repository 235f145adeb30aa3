"""Jobs of the state machine's actions, and the lanes (thread pools) in which they run.

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
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CommitUnknownError, MirrorError, SaveFailedError, to_wire
from asyncckpt.memory.slot import PAGE_NBYTES, STATE_OPEN, STATE_STREAMED
from asyncckpt.protocol.request import decode_request
from asyncckpt.storage.locate import with_storage_options
from asyncckpt.storage.rank_writer import DEFAULT_THREADS
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core.events import Event
from asyncckpt_worker.io.content_digest import digests_of
from asyncckpt_worker.io.coverage_check import Prover, coverage_error
from asyncckpt_worker.io.mount_table import MountTable
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.writer import Writer
from asyncckpt_worker.mirrors.jobs import Mirrorer, cannot_succeed

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

FREE_TIMEOUT_S = 10.0
"""How long a freed slot may still be populated. Chosen: far above the time for POPULATE_NBYTES."""

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
        self._add(name, self._mounts.device_of(job.path) if job.path else "", job)

    def help(self, device: str, job: Job) -> None:
        """Run `job` in the helper lane of `device`, as soon as a thread is available. Does not wait."""
        self._add(HELP, device, job)

    def _add(self, name: str, device: str, job: Job) -> None:
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
        """Return the available results, including those of jobs that have waited too long."""
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
        self._add(lane.name, device, job)
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

        self._lanes.help(self._device, Job(work, refused))
        return future


class JobRunner:
    """Turns actions into jobs.

    Args:
        lanes: Run the jobs.
        slots: Slots of this worker.
        writer: Jobs that touch storage.
        mirrorer: Copies checkpoints to their mirrors.
        count: Adds a number to the named counter.
    """

    def __init__(
        self,
        lanes: Lanes,
        slots: SlotStore,
        writer: Writer,
        mirrorer: Mirrorer,
        count: Callable[[str, int], None],
    ) -> None:
        self._lanes, self._slots, self._writer, self._count = lanes, slots, writer, count
        self._mirrorer = mirrorer
        self._prover = Prover()

    def submit(self, action: ac.Action) -> None:
        """Submit the action's job to its lane.

        Raises:
            RuntimeError: The system cannot start a thread for it.
        """
        match action:
            case ac.ReadSlot():
                self._run("memory", action, lambda _: self._read_slot(action.slot))
            case ac.AdoptSlot():
                self._run("memory", action, lambda _: self._adopt(action))
            case ac.FreeSlot():
                self._run("free", action, lambda _: self._free(action.slot))
            case ac.Prepare():
                self._run("prepare", action, lambda _: self._prepare(action), action.path)
            case ac.Write():
                lane = "stream" if action.early or action.request.ring_segments else "write"
                self._run(lane, action, lambda pool: self._write(action, pool), action.request.path)
            case ac.CutOff():
                self._slots.cut_off(action.slot, action.generation)
            case ac.Commit():
                self._run("commit", action, lambda _: self._commit(action), action.requests[0].path)
            case ac.Remove():
                self._run("commit", action, lambda _: self._remove(action), action.path)
            case ac.ScanLineage():
                self._run("prepare", action, lambda _: self._lineage(action), action.path)
            case ac.CopyToMirror():
                # In the lane of the destination, so that a destination that hangs does not block other lanes.
                place = action.mirror if action.is_ours else action.path
                self._run("mirror", action, lambda _: self._copy(action), place)
            case ac.ScanUnmirrored():
                self._run("mirror", action, lambda _: self._unmirrored(action), action.root)
            case _:
                raise AssertionError(f"no job for {action}")

    def _run(self, lane: str, action: ac.Action, work: Work, path: str = "") -> None:
        def run(pool: Executor) -> Any:
            with with_storage_options(getattr(action, "storage", None)):
                return work(pool)

        self._lanes.submit(lane, Job(run, lambda error: failed_result(action, error), path))

    def populate(self, number: int) -> None:
        """Fault in the pages of a new slot.

        Raises:
            RuntimeError: The system cannot start a thread for it.
        """
        self._lanes.submit("populate", Job(lambda _: self._populate(number)))

    # ---- in the threads of the lanes

    def _read_slot(self, number: int) -> ev.SlotRead:
        opened = False
        try:
            with self._slots.use(number) as memory:
                opened = memory.control.state in (STATE_OPEN, STATE_STREAMED)
                (generation, data), streamed = memory.control.read_streamed()
                reach("worker: request found")
            request = decode_request(data, memory.nbytes - PAGE_NBYTES)
        except Exception as error:
            return ev.SlotRead(now=time.monotonic(), slot=number, reason=str(error), opened=opened)
        opened = opened and streamed  # the seal may have come between the two reads
        now = time.monotonic()
        return ev.SlotRead(
            now=now, slot=number, generation=generation, request=request, opened=opened, streamed=streamed
        )

    def _adopt(self, action: ac.AdoptSlot) -> ev.SlotAdopted:
        try:
            reach("worker: slot handed over")
            memory = self._slots.adopt(action.slot, action.nbytes, action.pid, action.fd, action.token)
        except Exception as error:
            text = f"the worker cannot open fd {action.fd} of process {action.pid}: {error}"
            wire = to_wire(SaveFailedError(text, code="slot", detail=str(error)))
            return ev.SlotAdopted(now=time.monotonic(), slot=action.slot, error=wire)
        return ev.SlotAdopted(now=time.monotonic(), slot=action.slot, fd=memory.fd, token=memory.token)

    def _free(self, number: int) -> ev.SlotFreed:
        error = _error_of(lambda: self._slots.free(number))
        if error is not None:
            _logger.error("slot %d was not freed: %r", number, error)
        else:
            self._slots.wait_freed(number, FREE_TIMEOUT_S)  # a populate job may still use the slot, and then closes it
        return ev.SlotFreed(now=time.monotonic(), slot=number)

    def _populate(self, number: int) -> None:
        try:
            reach("worker: filling pages")
            self._slots.populate(number)
        except OSError as error:  # the trainer's first write then faults in the pages, or fails
            _logger.warning("cannot fault in the pages of slot %d: %s", number, error)

    def _prepare(self, action: ac.Prepare) -> ev.Prepared:
        committed = checked = False
        try:
            committed = self._writer.was_committed(action)
            checked = action.resumed
            if not committed:
                self._writer.prepare(action)
        except BaseException as error:
            identity = self._writer.directory_identity(action.path)
            return ev.Prepared(
                now=time.monotonic(),
                key=action.key,
                error=to_wire(error),
                known_uncommitted=checked,
                directory_identity=identity,
            )
        identity = self._writer.directory_identity(action.path)
        return ev.Prepared(now=time.monotonic(), key=action.key, committed=committed, directory_identity=identity)

    def _write(self, action: ac.Write, pool: Executor) -> ev.Written:
        begun = time.perf_counter()
        try:
            tally = self._prover.check(action.request)
            written, kept = self._writer.write(action, pool, self._prover.check)
            # IMPORTANT: the tally must be that of the sealed structure, which may differ from the streamed one.
            result = written if written.tally is not None else replace(written, tally=tally)
        except BaseException as error:
            return ev.Written(now=time.monotonic(), key=action.key, error=to_wire(error))
        report: dict[str, Any] = {f"seconds_{name}": value for name, value in result.seconds.items()}
        report |= {
            "seconds_write": time.perf_counter() - begun,  # the whole write, not only the shards
            "nbytes": result.nbytes,
            "direct": result.direct,
        }
        if action.request.reuse:
            report["reused_nbytes"] = result.reused_nbytes
        if action.request.ring_segments:
            report["ring_nbytes"] = action.request.ring_segments * action.request.ring_segment_nbytes
        if action.resumed:
            report["kept"] = kept
        self._count("written_nbytes", 0 if kept else result.nbytes - result.reused_nbytes)
        return ev.Written(now=time.monotonic(), key=action.key, result=result, report=report)

    def _commit(self, action: ac.Commit) -> ev.Published:
        try:
            tallies = [result.tally for result in action.results]
            faults = self._prover.faults(action.requests, tallies, self._writer.structures(action))
            if faults:
                error_wire = to_wire(coverage_error(action.requests[0], faults))
                return ev.Published(now=time.monotonic(), save_id=action.save_id, error=error_wire)
            report = self._writer.commit(action)
        except BaseException as error:
            unknown = isinstance(error, CommitUnknownError)
            return ev.Published(now=time.monotonic(), save_id=action.save_id, error=to_wire(error), unknown=unknown)
        digests = None
        try:  # IMPORTANT: apart from the commit: whatever fails from here on, the save is committed
            digests = digests_of(action.requests, action.results)
        except Exception:
            text = "save to %s: it is not compared with the one before: a bug in the worker"
            _logger.exception(text, action.requests[0].path, extra={"save_id": action.save_id})
        return ev.Published(now=time.monotonic(), save_id=action.save_id, report=report, digests=digests)

    def _remove(self, action: ac.Remove) -> ev.Removed:
        _error_of(lambda: self._writer.remove(action.save_id, action.path))
        return ev.Removed(now=time.monotonic(), save_id=action.save_id)

    def _lineage(self, action: ac.ScanLineage) -> ev.LineageScanned:
        try:
            epoch, mirror_epoch = self._writer.lineage(action)
        except BaseException as error:
            return _scanned(action, error=to_wire(error))
        return _scanned(action, epoch=epoch, mirror_epoch=mirror_epoch)

    def _copy(self, action: ac.CopyToMirror) -> ev.Copied:
        try:
            report = self._mirrorer.copy(action) if action.is_ours else {}
            is_done = action.is_ours or self._mirrorer.is_copied(action)
        except Exception as error:
            return _not_copied(action, error)
        return ev.Copied(now=time.monotonic(), save_id=action.save_id, is_done=is_done, report=report)

    def _unmirrored(self, action: ac.ScanUnmirrored) -> ev.UnmirroredFound:
        try:
            found = self._mirrorer.unmirrored(action.root)
        except Exception as error:
            return ev.UnmirroredFound(now=time.monotonic(), root=action.root, error=to_wire(error))
        return ev.UnmirroredFound(now=time.monotonic(), root=action.root, found=tuple(found), storage=action.storage)


def _not_copied(action: ac.CopyToMirror, error: Exception) -> ev.Copied:
    wire = to_wire(
        MirrorError(
            f"{action.path} was not copied to its mirror {action.mirror}: {error}",
            save_id=str(action.save_id),
            path=action.path,
            mirror=action.mirror,
            detail=str(error),
        )
    )
    return ev.Copied(now=time.monotonic(), save_id=action.save_id, error=wire, is_final=cannot_succeed(error))


def _scanned(action: ac.ScanLineage, **found: Any) -> ev.LineageScanned:
    return ev.LineageScanned(now=time.monotonic(), run=action.run, path=action.path, mirror=action.mirror, **found)


def failed_result(action: ac.Action, error: Exception) -> ev.Event | None:
    """Return the result of an action whose job could not run, so that the core does not wait for it forever."""
    text, code = f"the worker failed: {error!r}", "internal"
    if isinstance(error, NoThreadError):
        text, code = f"{error}; nothing was published; check these file systems, or save to another one", "no_thread"
    now, wire = time.monotonic(), to_wire(SaveFailedError(text, code=code, detail=str(error)))
    match action:
        case ac.ReadSlot():
            return ev.SlotRead(now=now, slot=action.slot, reason=text)
        case ac.FreeSlot():
            return ev.SlotFreed(now=now, slot=action.slot)
        case ac.AdoptSlot():
            return ev.SlotAdopted(now=now, slot=action.slot, error=wire)
        case ac.Prepare():
            return ev.Prepared(now=now, key=action.key, error=wire)
        case ac.Write():
            return ev.Written(now=now, key=action.key, error=wire)
        case ac.Commit():
            return ev.Published(now=now, save_id=action.save_id, error=wire)
        case ac.Remove():
            return ev.Removed(now=now, save_id=action.save_id)
        case ac.ScanLineage():
            return _scanned(action, error=wire)
        case ac.CopyToMirror():
            return _not_copied(action, error)
        case ac.ScanUnmirrored():
            return ev.UnmirroredFound(now=now, root=action.root, error=wire)
    return None


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None
