"""The part of a snapshot that is copied after `save()` has returned: copied, checked, sealed, or given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from asyncckpt.errors import AsyncCkptError, SnapshotTornError, StagingError
from asyncckpt.staging.copy_cpu import Share
from asyncckpt.staging.moving import FULL, Pace
from asyncckpt.staging.torn import SourceWatch
from asyncckpt.staging.transfer import Transfer

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
