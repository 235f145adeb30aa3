"""The part of a snapshot that is copied after `save()` has returned: copied, checked, sealed, or given up."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, SnapshotTornError, StagingError
from asyncckpt.staging.cpu_copy import Share
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.staging.memcopy import FULL, Pace
from asyncckpt.staging.mutation_check import SourceWatch

OnEnd = Callable[[AsyncCkptError | None], None]
"""Called with None when the slot is sealed, else with what went wrong, after the save has been withdrawn. Whatever it
raises itself, it must have completed the save's futures."""

BEHIND = Pace(careful=True)
"""How copies behind the training work; `python -m benchmarks overlap` measures what they cost."""

_log = logging.getLogger("asyncckpt")


class Copies(Protocol):
    """Copies a state into a slot."""

    def copy(self, tensors: Sequence[torch.Tensor], share: Share, pace: Pace = FULL) -> None:
        """As `SlotImage.copy`."""

    def drop_moves(self) -> None:
        """As `SlotImage.drop_moves`."""

    def patience(self) -> float:
        """Return until when (`time.monotonic()`) who needs the end of the copy waits for it, however long that is."""


class DeferredCopy:
    """One save's rest. Made by the training thread, run by the copier's, once.

    Args:
        image: The slot's image.
        share: What of it is left to copy.
        tensors: The state's, by number.
        watch: Proves that they have not changed.
        transfer: The copies of devices, which have been started; None where there are none.
        seal: Seals the slot.
        withdraw: Takes the save back, so that its slot is free, and returns the error for its futures.
        entrust: Tells who would otherwise take the save back, when `save()` fails, that this object does.
        disown: Undoes that; may be called without it.
        seconds: Takes up how long copy and seal took.
    """

    def __init__(
        self,
        image: Copies,
        share: Share,
        tensors: Sequence[torch.Tensor],
        watch: SourceWatch,
        transfer: Transfer | None = None,
        *,
        seal: Callable[[], None],
        withdraw: Callable[[BaseException], AsyncCkptError],
        entrust: Callable[[], None],
        disown: Callable[[], None],
        seconds: dict[str, float],
    ) -> None:
        self.entrust, self.disown, self._seal, self._withdraw = entrust, disown, seal, withdraw
        self._work: tuple[Copies, Share, Sequence[torch.Tensor], SourceWatch] | None = (image, share, tensors, watch)
        self._seconds = seconds
        self._lock = threading.RLock()  # a signal handler may give up what its thread is about to
        self._given_up: BaseException | None = None
        self._decided = self.ended = self._checked = False
        self._transfer = transfer
        self._host_copied = threading.Event()
        if not any(share):
            self._host_copied.set()
        self.staged: Future[Any] = Future()
        self.on_end: OnEnd = lambda error: None

    def give_up(self, error: BaseException) -> None:
        """Let the save fail with `error`, unless it is being sealed already. Does not wait: a piece may still move."""
        with self._lock:
            if self._decided or self._given_up is not None:
                return
            self._given_up = error
            if self._work is not None:  # under the lock: afterwards the image may be filled by the next save
                self._work[0].drop_moves()

    def release(self, deadline: float) -> bool:
        """Let what the calling thread does next to the sources come after their copies, if that needs no wait for them.

        What devices copy is ordered by their streams, so only the host's own part is waited for. The sources are
        checked now: what comes next may change them while they are, on the host's clock, still being copied.

        Args:
            deadline: `time.monotonic()`.

        Returns:
            False when whoever wants to change the sources must wait for `staged`.
        """
        transfer, work = self._transfer, self._work
        if transfer is None or work is None or not transfer.orders or work[3].digests_sources:
            return False
        if not self._host_copied.wait(max(0.0, deadline - time.monotonic())):
            return False
        try:
            # IMPORTANT: also when the copies have ended meanwhile, and before anybody changes a counter.
            self._check(work[3])
            transfer.order()
        except SnapshotTornError as error:
            self.give_up(error)
        except RuntimeError:  # a device does not wait for the other stream: the CPU does
            return False
        return True

    def _check(self, watch: SourceWatch) -> None:
        """Check the sources, once, by whoever comes first: the end of the copies, or what may change them after."""
        with self._lock:
            if not self._checked:
                watch.check()
                self._checked = True

    def patience(self) -> float:
        """As `Copies.patience`; 0 once it has ended."""
        work = self._work
        return 0.0 if work is None else work[0].patience()

    def places(self) -> set[int]:
        """Return the addresses of the storages that it copies from; none once it has ended."""
        work = self._work
        return set() if work is None else work[3].places()

    def run(self) -> BaseException | None:
        """Copy, check, seal, and tell; whatever goes wrong ends in `on_end`.

        Returns:
            What came and was no `Exception`: an interrupt, or an exit.
        """
        error: BaseException | None = None
        interrupt: BaseException | None = None
        try:
            self._copy_and_seal()
        except BaseException as caught:
            error = self._given_up or caught  # given up: what was waiting for the copy may have torn it since
            if not isinstance(caught, Exception) and caught is not self._given_up:
                interrupt = caught
        self._host_copied.set()
        if error is not None and self._transfer is not None:
            # IMPORTANT: before the save is taken back and its slot is another's. The pool looks again by itself.
            interrupt = self._settled(self._transfer) or interrupt
        self._transfer = None
        with self._lock:
            self._work = None  # neither the state nor views of the slot's memory outlive the copy
        self.ended = True
        try:
            self.on_end(None if error is None else self._taken_back(error))
        except BaseException as caught:
            _log.exception("the end of a copy could not be told")
            interrupt = interrupt if isinstance(caught, Exception) else caught
        finally:  # they refer to the save, and the save to this
            self._seal = self.entrust = self.disown = _nothing
            self.on_end = lambda error: None
            del self._withdraw
        return interrupt

    def _settled(self, transfer: Transfer) -> BaseException | None:
        """Wait for what devices still copy; returns an interrupt that came meanwhile."""
        try:
            transfer.settle()
        except BaseException as caught:
            return caught
        return None

    def _taken_back(self, error: BaseException) -> AsyncCkptError:
        """Withdraw the save. IMPORTANT: never raises, or its futures would stay pending for ever."""
        try:
            return self._withdraw(error)
        except BaseException as caught:
            _log.exception("a save whose copy has failed could not be withdrawn")
            found = StagingError(f"copying the state into memory failed: {error!r}; so did its withdrawal: {caught!r}")
            found.__cause__ = error
            return found

    def _copy_and_seal(self) -> None:
        assert self._work is not None
        image, share, tensors, watch = self._work
        began = time.perf_counter()
        if self._given_up is None:
            try:
                if not self._host_copied.is_set():
                    watch.check_cheaply()  # before: torch crashes where a storage has become smaller than its tensor
                image.copy(tensors, share, BEHIND)
            except OSError:
                watch.check_cheaply()  # names the tensor
                raise
            self._host_copied.set()
            if self._transfer is not None:
                self._transfer.finish(lambda: self._given_up is not None)
            # IMPORTANT: before anybody is told that the copy has ended. A step that waits for it would change the
            # counters, and a snapshot checked after it would count as torn.
            if self._given_up is None:
                self._check(watch)
                if self._transfer is not None:
                    watch.check_on_devices(self._transfer.fetch_watched())
        copied = time.perf_counter()
        with self._lock:
            # IMPORTANT: whoever gives up goes on and changes the tensors, so nothing may be sealed from here on.
            if self._given_up is not None:
                raise self._given_up
            self._decided = True
        self._seal()
        self._seconds["copy"] += copied - began
        self._seconds["seal"] = time.perf_counter() - copied


def _nothing() -> None:
    """Once everything has ended."""


WAIT_STEP_S = 1.0
"""How often who waits looks up, since copies go on or do not."""


class Copier:
    """See the module. It holds at most as many copies as there are slots, since each has taken one."""

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

    def take(self, copy: DeferredCopy, staged: Future[Any], on_end: OnEnd) -> None:
        """Run `copy` when those before it have ended. Does not wait; where no thread can be started, runs it here.

        An interrupt that comes to a copy that runs here fails its save, and is raised when it has ended.

        Args:
            copy: The rest of a save.
            staged: Done, by `on_end`, when the tensors may be changed: who waits for the copy waits for this.
            on_end: See `OnEnd`; called in the copier's thread.
        """
        copy.staged, copy.on_end = staged, on_end
        try:
            copy.entrust()
            self._take(copy)
        except BaseException as error:  # an interrupt
            if copy in self._copies:
                copy.give_up(error)
            elif not copy.ended:
                copy.disown()
            raise

    def _take(self, copy: DeferredCopy) -> None:
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

    def places(self) -> set[int]:
        """Return the addresses of the storages that copies still read from."""
        return {place for copy in list(self._copies) for place in copy.places() if place}

    def wait(self, timeout_s: float, *, ordered: bool = False, patient: bool = False) -> list[DeferredCopy]:
        """Wait until the copies that there are have ended; returns those that have not within `timeout_s`.

        Args:
            timeout_s: For all of them.
            patient: One that waits for storage is waited for as long as it goes on (`Copies.patience`).
            ordered: Those that streams of devices can put before what the calling thread does next need not have ended.
        """
        deadline = time.monotonic() + timeout_s
        copies = [copy for copy in list(self._copies) if not (ordered and copy.release(deadline))]
        while left := [copy for copy in copies if not copy.staged.done()]:
            until = max(deadline, *(copy.patience() for copy in left)) if patient else deadline
            if time.monotonic() >= until:
                break
            concurrent.futures.wait([copy.staged for copy in left], min(WAIT_STEP_S, until - time.monotonic()))
        return [copy for copy in copies if not copy.staged.done()]

    def give_up(self, error: BaseException) -> None:
        """Let every save whose copy has not ended fail with `error`. Does not wait."""
        for copy in list(self._copies):
            copy.give_up(error)

    def _abort(self) -> None:
        self.give_up(CheckpointerClosedError("the interpreter ended while the state was being copied"))

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; says whether it has."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread() or thread.ident is None:
            return True
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()
