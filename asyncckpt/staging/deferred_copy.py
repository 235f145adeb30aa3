"""Copies that run behind the training, after `save()` has returned, and the thread that runs them.

A `DeferredCopy` is the deferred part of one save's copy. `BackgroundCopier` runs one after another, in the order of the
saves.
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
"""Called with None when the slot is sealed, else with the error of a save that was rolled back. It must complete the
save's futures, even if it raises."""

_log = logging.getLogger("asyncckpt")


WAIT_STEP_S = 1.0
"""How often a wait for copies computes its deadline anew: copies through a ring may extend it."""


class CopyJob(Protocol):
    """What the host has still to copy into the slot of one save."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to copy."""

    def run(self, fault_safe: bool = False) -> None:
        """Copy all of it. Blocks until that is done, or until `cancel` is called.

        Args:
            fault_safe: Raise OSError, not SIGSEGV, if the memory of a tensor is unmapped meanwhile.

        Raises:
            RuntimeError: torch cannot copy a tensor.
            OSError: `fault_safe`, and the memory of a tensor was unmapped.
            AsyncCkptError: The slot is not written any more.
        """

    def cancel(self) -> None:
        """Make `run` in another thread end early. What it has copied is not used."""

    def extended_deadline(self) -> float:
        """Return the `time.monotonic()` until which to wait for the copy even if another deadline is over."""


class DeferredCopy:
    """The part of one save that is copied behind the training. Made by the training thread, run once by the copier's.

        queued ----> copying ----> checking ----> sealing ----> ended, on_end(None)
           |            |             |              |
           +------------+-------------+--------------+----> draining ----> rolled back ----> ended, on_end(error)

        An error of the copy, of the check or of the seal leads to the lower line; so does `cancel`, before the seal.
        draining: until no device writes to the slot; rolled back: the save is withdrawn, and its slot is free again.

    Args:
        job: What the host has still to copy.
        check: Checks that the tensors have not changed.
        transfer: The copies by devices, which have been started, and are enqueued here; None: there are none.
        seal: Seals the slot.
        roll_back_save: Withdraws the save, so that its slot is free, and returns the error for its futures.
        take_over_rollback: Called when this object, not `save()`, becomes responsible for rolling the save back.
        give_back_rollback: Makes `save()` responsible again; may be called without `take_over_rollback`.
        seconds: Durations of the save in seconds; those of this copy are added to "copy" and "seal".

    Attributes:
        staged: The save's future that completes when its tensors may be changed.
        ended: Whether the copy has ended.
    """

    def __init__(
        self,
        job: CopyJob,
        check: MutationCheck,
        transfer: Transfer | None = None,
        *,
        seal: Callable[[], None],
        roll_back_save: Callable[[BaseException], AsyncCkptError],
        take_over_rollback: Callable[[], None],
        give_back_rollback: Callable[[], None],
        seconds: dict[str, float],
    ) -> None:
        self.take_over_rollback, self.give_back_rollback = take_over_rollback, give_back_rollback
        self._seal, self._roll_back_save = seal, roll_back_save
        self._work: tuple[CopyJob, MutationCheck] | None = (job, check)
        self._seconds = seconds
        self._lock = threading.RLock()  # a signal handler may call `cancel` in a thread that holds the lock
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
            if self._work is not None:  # under the lock: once `_work` is None, the next save may use the image
                self._work[0].cancel()

    def order_before_next_write(self, deadline: float) -> bool:
        """Order the calling thread's next work on the sources behind their copies, if streams can order it.

        Only the host's part of the copy is waited for: streams order the devices' part. The sources are checked now,
        since the next work may increment their version counters before the devices have finished.

        Args:
            deadline: `time.monotonic()`.

        Returns:
            False if the caller must wait for `staged` before it changes the sources.
        """
        transfer, work = self._transfer, self._work
        if transfer is None or work is None or not transfer.can_order_in_stream or work[1].digests_sources:
            return False
        if not self._host_copied.wait(max(0.0, deadline - time.monotonic())):
            return False
        try:
            # IMPORTANT: also if the copies have ended meanwhile. After this call version counters may change, and a
            # later check would take that for a torn snapshot.
            self._check_once(work[1])
            transfer.make_current_stream_wait(max(0.0, deadline - time.monotonic()))
        except SnapshotTornError as error:
            self.cancel(error)
        except RuntimeError:  # the device refuses to order its streams: wait on the CPU
            return False
        return True

    def _check_once(self, check: MutationCheck) -> None:
        """Check the sources once: at the end of the copies, or before the first later change, whichever is first."""
        with self._lock:
            if not self._is_checked:
                check.check()
                self._is_checked = True

    def extended_deadline(self) -> float:
        """As `CopyJob.extended_deadline`; 0 once the copy has ended."""
        work = self._work
        return 0.0 if work is None else work[0].extended_deadline()

    def source_storage_ptrs(self) -> set[int]:
        """Return the addresses of the storages that are copied from; none once the copy has ended."""
        work = self._work
        return set() if work is None else work[1].source_storage_ptrs()

    def run(self) -> BaseException | None:
        """Copy, check and seal; on an error roll the save back. Then call `on_end`.

        Returns:
            An interrupt (an error that is no `Exception`, such as KeyboardInterrupt) that came meanwhile.
        """
        error: BaseException | None = None
        interrupt: BaseException | None = None
        try:
            self._copy_and_seal()
        except BaseException as caught:
            # If it was cancelled, any other error may follow from that: tensors were changed without waiting for it.
            error = self._cancelled_by or caught
            if not isinstance(caught, Exception) and caught is not self._cancelled_by:
                interrupt = caught
        self._host_copied.set()
        if error is not None and self._transfer is not None:
            # IMPORTANT: before the save is rolled back and another save gets its slot. If this times out, the pool
            # does not reuse the slot while devices write to it.
            interrupt = self._drain(self._transfer) or interrupt
        self._transfer = None
        with self._lock:
            self._work = None  # drop the state and the views of the slot
        self.ended = True
        try:
            self.on_end(None if error is None else self._roll_back(error))
        except BaseException as caught:
            _log.exception("the callback at the end of a copy behind the training failed")
            interrupt = interrupt if isinstance(caught, Exception) else caught
        finally:  # break the reference cycle: they refer to the save, which refers to this object
            self._seal = self.take_over_rollback = self.give_back_rollback = _nothing
            self.on_end = lambda error: None
            del self._roll_back_save
        return interrupt

    def _drain(self, transfer: Transfer) -> BaseException | None:
        """Wait for copies by devices; return an interrupt that came meanwhile."""
        try:
            transfer.settle()
        except BaseException as caught:
            return caught
        return None

    def _roll_back(self, error: BaseException) -> AsyncCkptError:
        """Roll the save back. IMPORTANT: must not raise, or the save's futures would stay pending for ever."""
        try:
            return self._roll_back_save(error)
        except BaseException as caught:
            _log.exception("a save could not be withdrawn after its copy had failed")
            found = StagingError(
                f"copying the state into memory failed: {error!r}; withdrawing the save failed too: {caught!r}"
            )
            found.__cause__ = error
            return found

    def _copy_and_seal(self) -> None:
        assert self._work is not None
        job, check = self._work
        began = time.perf_counter()
        if self._cancelled_by is None:
            try:
                if job.has_work or self._transfer is not None:
                    # First, since torch crashes if a storage has become smaller than its tensor.
                    with self._lock:
                        if not self._is_checked:
                            check.check_counters()
                if self._transfer is not None:  # before the host's part, so that both run at once
                    self._transfer.enqueue(lambda: self._cancelled_by is not None)
                job.run(fault_safe=True)
            except OSError:
                check.check_counters()  # names the tensor
                raise
            self._host_copied.set()
            if self._transfer is not None:
                self._transfer.finish(lambda: self._cancelled_by is not None)
            # IMPORTANT: check before `staged` completes. A step that waits for it then changes the version counters,
            # and a later check would take that for a torn snapshot.
            if self._cancelled_by is None:
                self._check_once(check)
                if self._transfer is not None:
                    check.check_device_samples(self._transfer.fetch_torn_check_windows())
        copied = time.perf_counter()
        with self._lock:
            # IMPORTANT: after `cancel` the training changes the tensors, so the slot must not be sealed.
            if self._cancelled_by is not None:
                raise self._cancelled_by
            self._is_sealing = True
        self._seal()
        self._seconds["copy"] += copied - began
        self._seconds["seal"] = time.perf_counter() - copied


def _nothing() -> None:
    """Do nothing."""


class BackgroundCopier:
    """Runs deferred copies, one after another, in a thread that lives while there are any.

    It holds at most as many copies as there are slots, since each has taken one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call `close` in the middle of a save
        self._copies: list[DeferredCopy] = []
        self._queue: deque[DeferredCopy] = deque()
        self._thread: threading.Thread | None = None
        self._when_idle: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Whether there are copies that have not ended. Cheap: it is called in every step."""
        return bool(self._copies)

    def in_thread(self) -> bool:
        """Whether the caller runs in the copier's thread, as callbacks of `staged` do."""
        return threading.current_thread() is self._thread

    def submit(self, copy: DeferredCopy, staged: Future[Any], on_end: OnEnd) -> None:
        """Run `copy` after those before it. Does not wait; but if no thread can be started, the copy runs here.

        An interrupt during a copy that runs here fails its save, and is raised when the copy has ended.

        Args:
            copy: The deferred part of a save's copy.
            staged: Completed by `on_end`, when the tensors may be changed. `wait` waits for it.
            on_end: See `OnEnd`; called in the copier's thread.
        """
        copy.staged, copy.on_end = staged, on_end
        try:
            copy.take_over_rollback()
            self._enqueue(copy)
        except BaseException as error:  # an interrupt
            if copy in self._copies:
                copy.cancel(error)
            elif not copy.ended:
                copy.give_back_rollback()
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
            if thread.ident is None:  # else an interrupt came while it was starting, and the thread runs
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
        """Run what is queued; return the last interrupt that came meanwhile, for a caller that runs this itself."""
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
        """Call `call` once no copy runs: now, or later in the copier's thread. Does not wait."""
        with self._lock:
            if self._thread is not None:
                self._when_idle.append(call)
                return
        call()

    def source_storage_ptrs(self) -> set[int]:
        """Return the addresses of the storages that copies still read from."""
        return {ptr for copy in list(self._copies) for ptr in copy.source_storage_ptrs() if ptr}

    def wait(self, timeout_s: float, *, ordered: bool = False, extended: bool = False) -> list[DeferredCopy]:
        """Wait until all current copies have ended; return those that have not ended in time.

        Args:
            timeout_s: Time limit for all of them together.
            ordered: Do not wait for a copy that device streams order before the calling thread's next work.
            extended: Wait for a copy that waits for storage until its `CopyJob.extended_deadline`.
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
        """Fail every save whose copy has not ended with `error`. Does not wait."""
        for copy in list(self._copies):
            copy.cancel(error)

    def _abort(self) -> None:
        self.cancel_all(CheckpointerClosedError("the interpreter ended while the state was being copied"))

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; return whether it has."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread() or thread.ident is None:
            return True
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()
