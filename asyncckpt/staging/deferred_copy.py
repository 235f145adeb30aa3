"""Copies that run behind the training, after `save()` has returned, and the thread that runs them.

A `DeferredCopy` is what is left of one save. `BackgroundCopier` runs one after another, in the order of the saves.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, SnapshotTornError, StagingError
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.staging.mutation_check import MutationCheck

OnEnd = Callable[[AsyncCkptError | None], None]
"""Called with None when the slot is sealed, else with the error of a save that was rolled back. Whatever it raises
itself, it must have completed the save's futures."""

_log = logging.getLogger("asyncckpt")


WAIT_STEP_S = 1.0
"""How often who waits looks up, since copies go on or do not."""


class CopyJob(Protocol):
    """What the host has still to copy into the slot of one save."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to copy."""

    def run(self, careful: bool = False) -> None:
        """Copy all of it. Blocks until that is done, or until `cancel` is called.

        Args:
            careful: If the memory of a tensor goes away meanwhile, that is an OSError and no SIGSEGV.

        Raises:
            RuntimeError: torch cannot copy a tensor.
            OSError: A careful copy found that the memory of a tensor has gone.
            AsyncCkptError: The slot is not written any more.
        """

    def cancel(self) -> None:
        """Make `run` in another thread end early; what it has copied is worth nothing."""

    def extended_deadline(self) -> float:
        """Return until when (`time.monotonic()`) the end of the copy is waited for beyond any other deadline."""


class DeferredCopy:
    """The part of one save that is copied behind the training. Made by the training thread, run once by the copier's.

        queued ----> copying ----> checking ----> sealing ----> ended, on_end(None)
           |            |             |              |
           +------------+-------------+--------------+----> draining ----> rolled back ----> ended, on_end(error)

        An error of the copy, of the check or of the seal leads to the lower line, `cancel` until sealing begins.
        draining: until no device writes to the slot; rolled back: the save is withdrawn, and its slot is free again.

    Args:
        job: What the host has still to copy.
        check: Proves that the tensors have not changed.
        transfer: The copies of devices, which have been started; None: there are none.
        seal: Seals the slot.
        roll_back_save: Withdraws the save, so that its slot is free, and returns the error for its futures.
        transfer_cleanup: Called when this object takes over to roll the save back if `save()` fails from here on.
        reclaim_cleanup: Undoes that; may be called without it.
        seconds: Durations of the save; those of copy and seal, in seconds, are added to "copy" and "seal".

    Attributes:
        staged: The future of the save that completes when its tensors may be changed.
        ended: Whether it has ended.
    """

    def __init__(
        self,
        job: CopyJob,
        check: MutationCheck,
        transfer: Transfer | None = None,
        *,
        seal: Callable[[], None],
        roll_back_save: Callable[[BaseException], AsyncCkptError],
        transfer_cleanup: Callable[[], None],
        reclaim_cleanup: Callable[[], None],
        seconds: dict[str, float],
    ) -> None:
        self.transfer_cleanup, self.reclaim_cleanup = transfer_cleanup, reclaim_cleanup
        self._seal, self._roll_back_save = seal, roll_back_save
        self._work: tuple[CopyJob, MutationCheck] | None = (job, check)
        self._seconds = seconds
        self._lock = threading.RLock()  # a signal handler may cancel what its thread is about to
        self._cancelled_by: BaseException | None = None
        self._is_sealing = self.ended = self._is_checked = False
        self._transfer = transfer
        self._host_copied = threading.Event()
        if not job.has_work:
            self._host_copied.set()
        self.staged: Future[Any] = Future()
        self.on_end: OnEnd = lambda error: None

    def cancel(self, error: BaseException) -> None:
        """Make the save fail with `error`, unless it is being sealed already.

        Does not wait: a piece may still be copied.
        """
        with self._lock:
            if self._is_sealing or self._cancelled_by is not None:
                return
            self._cancelled_by = error
            if self._work is not None:  # under the lock: afterwards the image may be filled by the next save
                self._work[0].cancel()

    def order_before_next_write(self, deadline: float) -> bool:
        """Make what the calling thread does next to the sources come after their copies, if streams can order that.

        What devices copy is ordered by their streams, so only the host's own part is waited for. The sources are
        checked now: what comes next may change them while they are, on the host's clock, still being copied.

        Args:
            deadline: `time.monotonic()`.

        Returns:
            False when whoever wants to change the sources must wait for `staged`.
        """
        transfer, work = self._transfer, self._work
        if transfer is None or work is None or not transfer.can_order_in_stream or work[1].digests_sources:
            return False
        if not self._host_copied.wait(max(0.0, deadline - time.monotonic())):
            return False
        try:
            # IMPORTANT: also when the copies have ended meanwhile, and before anybody changes a counter.
            self._check_once(work[1])
            transfer.make_current_stream_wait()
        except SnapshotTornError as error:
            self.cancel(error)
        except RuntimeError:  # a device does not wait for the other stream: the CPU does
            return False
        return True

    def _check_once(self, check: MutationCheck) -> None:
        """Check the sources, once, by whoever comes first: the end of the copies, or what may change them after."""
        with self._lock:
            if not self._is_checked:
                check.check()
                self._is_checked = True

    def extended_deadline(self) -> float:
        """As `CopyJob.extended_deadline`; 0 once it has ended."""
        work = self._work
        return 0.0 if work is None else work[0].extended_deadline()

    def source_storage_ptrs(self) -> set[int]:
        """Return the addresses of the storages that it copies from; none once it has ended."""
        work = self._work
        return set() if work is None else work[1].source_storage_ptrs()

    def run(self) -> BaseException | None:
        """Copy, check and seal, then call `on_end`, also with what went wrong.

        Returns:
            What was raised and is no `Exception`: an interrupt, or an exit.
        """
        error: BaseException | None = None
        interrupt: BaseException | None = None
        try:
            self._copy_and_seal()
        except BaseException as caught:
            error = self._cancelled_by or caught  # cancelled: what was waiting for the copy may have torn it since
            if not isinstance(caught, Exception) and caught is not self._cancelled_by:
                interrupt = caught
        self._host_copied.set()
        if error is not None and self._transfer is not None:
            # IMPORTANT: before the save is taken back and its slot is another's. The pool looks again by itself.
            interrupt = self._drain(self._transfer) or interrupt
        self._transfer = None
        with self._lock:
            self._work = None  # neither the state nor views of the slot's memory outlive the copy
        self.ended = True
        try:
            self.on_end(None if error is None else self._roll_back(error))
        except BaseException as caught:
            _log.exception("the end of a copy could not be told")
            interrupt = interrupt if isinstance(caught, Exception) else caught
        finally:  # they refer to the save, and the save to this
            self._seal = self.transfer_cleanup = self.reclaim_cleanup = _nothing
            self.on_end = lambda error: None
            del self._roll_back_save
        return interrupt

    def _drain(self, transfer: Transfer) -> BaseException | None:
        """Wait for what devices still copy; returns an interrupt that came meanwhile."""
        try:
            transfer.settle()
        except BaseException as caught:
            return caught
        return None

    def _roll_back(self, error: BaseException) -> AsyncCkptError:
        """Roll the save back. IMPORTANT: never raises, or its futures would stay pending for ever."""
        try:
            return self._roll_back_save(error)
        except BaseException as caught:
            _log.exception("a save whose copy has failed could not be withdrawn")
            found = StagingError(f"copying the state into memory failed: {error!r}; so did its withdrawal: {caught!r}")
            found.__cause__ = error
            return found

    def _copy_and_seal(self) -> None:
        assert self._work is not None
        job, check = self._work
        began = time.perf_counter()
        if self._cancelled_by is None:
            try:
                if not self._host_copied.is_set():
                    check.check_counters()  # before: torch crashes where a storage has become smaller than its tensor
                job.run(careful=True)
            except OSError:
                check.check_counters()  # names the tensor
                raise
            self._host_copied.set()
            if self._transfer is not None:
                self._transfer.finish(lambda: self._cancelled_by is not None)
            # IMPORTANT: before anybody is told that the copy has ended. A step that waits for it would change the
            # counters, and a snapshot checked after it would count as torn.
            if self._cancelled_by is None:
                self._check_once(check)
                if self._transfer is not None:
                    check.check_device_samples(self._transfer.fetch_torn_check_windows())
        copied = time.perf_counter()
        with self._lock:
            # IMPORTANT: whoever cancels goes on and changes the tensors, so nothing may be sealed from here on.
            if self._cancelled_by is not None:
                raise self._cancelled_by
            self._is_sealing = True
        self._seal()
        self._seconds["copy"] += copied - began
        self._seconds["seal"] = time.perf_counter() - copied


def _nothing() -> None:
    """Once everything has ended."""


class BackgroundCopier:
    """Runs deferred copies, one after another, in a thread that lives while there are any.

    It holds at most as many copies as there are slots, since each has taken one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close in the middle of a save
        self._copies: list[DeferredCopy] = []
        self._queue: deque[DeferredCopy] = deque()
        self._thread: threading.Thread | None = None
        self._when_idle: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Whether there are copies that have not ended. Costs nothing: it is asked in every step."""
        return bool(self._copies)

    def in_thread(self) -> bool:
        """Whether the caller runs in the copier's thread: a callback of `staged`."""
        return threading.current_thread() is self._thread

    def submit(self, copy: DeferredCopy, staged: Future[Any], on_end: OnEnd) -> None:
        """Run `copy` when those before it have ended. Does not wait; where no thread can be started, runs it here.

        An interrupt that comes to a copy that runs here fails its save, and is raised when it has ended.

        Args:
            copy: What is left to copy of a save.
            staged: Completed by `on_end` when the tensors may be changed: who waits for the copy waits for this.
            on_end: See `OnEnd`; called in the copier's thread.
        """
        copy.staged, copy.on_end = staged, on_end
        try:
            copy.transfer_cleanup()
            self._enqueue(copy)
        except BaseException as error:  # an interrupt
            if copy in self._copies:
                copy.cancel(error)
            elif not copy.ended:
                copy.reclaim_cleanup()
            raise

    def _enqueue(self, copy: DeferredCopy) -> None:
        with self._lock:
            self._copies.append(copy)
            self._queue.append(copy)
            if self._thread is not None:
                return
            self._thread = thread = BackgroundThread(self._run, "asyncckpt-overlap", give_up=self._abort)
        try:
            thread.start()
        except BaseException as error:
            if thread.ident is None:  # else an interrupt came while it was starting: it runs
                with self._lock:
                    self._thread = None
                    if not isinstance(error, RuntimeError):
                        self._copies.remove(copy)
                        self._queue.remove(copy)
                if isinstance(error, RuntimeError):  # can't start new thread
                    interrupt = self._run()
                    if interrupt is not None:
                        raise interrupt from None
                    return
            raise

    def _run(self) -> BaseException | None:
        """Run what is queued; returns the last interrupt that came meanwhile. A thread has nobody to raise it to."""
        interrupt: BaseException | None = None
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    calls, self._when_idle = self._when_idle, []
                    break
                copy = self._queue.popleft()
            try:
                interrupt = copy.run() or interrupt
            finally:
                with self._lock:
                    self._copies.remove(copy)

        for call in calls:
            call()
        return interrupt

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` once no copy runs: now, or in the copier's thread. Does not wait."""
        with self._lock:
            if self._thread is not None:
                self._when_idle.append(call)
                return
        call()

    def source_storage_ptrs(self) -> set[int]:
        """Return the addresses of the storages that copies still read from."""
        return {ptr for copy in list(self._copies) for ptr in copy.source_storage_ptrs() if ptr}

    def wait(self, timeout_s: float, *, ordered: bool = False, extended: bool = False) -> list[DeferredCopy]:
        """Wait until the copies that there are have ended; returns those that have not in time.

        Args:
            timeout_s: Time limit for all of them together.
            ordered: A copy need not have ended if streams of devices put it before what the calling thread does next.
            extended: A copy that waits for storage may take until its `CopyJob.extended_deadline`.
        """
        deadline = time.monotonic() + timeout_s
        copies = [copy for copy in list(self._copies) if not (ordered and copy.order_before_next_write(deadline))]
        while left := [copy for copy in copies if not copy.staged.done()]:
            until = max(deadline, *(copy.extended_deadline() for copy in left)) if extended else deadline
            if time.monotonic() >= until:
                break
            concurrent.futures.wait([copy.staged for copy in left], min(WAIT_STEP_S, until - time.monotonic()))
        return [copy for copy in copies if not copy.staged.done()]

    def cancel_all(self, error: BaseException) -> None:
        """Make every save whose copy has not ended fail with `error`. Does not wait."""
        for copy in list(self._copies):
            copy.cancel(error)

    def _abort(self) -> None:
        self.cancel_all(CheckpointerClosedError("the interpreter ended while the state was being copied"))

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; says whether it has."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread() or thread.ident is None:
            return True
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()
