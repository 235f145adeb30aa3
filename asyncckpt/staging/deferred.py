"""The part of a snapshot that is copied after `save()` has returned: copied, checked, sealed, or given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from asyncckpt.errors import AsyncCkptError, StagingError
from asyncckpt.staging.copy_cpu import Pace, Share, SlotImage
from asyncckpt.staging.torn import SourceWatch

OnEnd = Callable[[AsyncCkptError | None], None]
"""Called with None when the slot is sealed, else with what went wrong, after the save has been withdrawn. Whatever it
raises itself, it must have completed the save's futures."""

BEHIND = Pace()
"""How copies behind the training work. Not measured yet on a quiet machine: see `benchmarks/overlap.py --behind`."""

_log = logging.getLogger("asyncckpt")


class DeferredCopy:
    """One save's rest. Made by the training thread, run by the copier's, once.

    Args:
        image: The slot's image.
        share: What of it is left to copy.
        tensors: The state's, by number.
        watch: Proves that they have not changed.
        seal: Seals the slot.
        withdraw: Takes the save back, so that its slot is free, and returns the error for its futures.
        entrust: Tells who would otherwise take the save back, when `save()` fails, that this object does.
        disown: Undoes that; may be called without it.
        seconds: Takes up how long copy and seal took.
    """

    def __init__(
        self,
        image: SlotImage,
        share: Share,
        tensors: Sequence[torch.Tensor],
        watch: SourceWatch,
        *,
        seal: Callable[[], None],
        withdraw: Callable[[BaseException], AsyncCkptError],
        entrust: Callable[[], None],
        disown: Callable[[], None],
        seconds: dict[str, float],
    ) -> None:
        self.entrust, self.disown, self._seal, self._withdraw = entrust, disown, seal, withdraw
        self._work: tuple[SlotImage, Share, Sequence[torch.Tensor], SourceWatch] | None = (image, share, tensors, watch)
        self._seconds = seconds
        self._lock = threading.RLock()  # a signal handler may give up what its thread is about to
        self._given_up: BaseException | None = None
        self._decided = self.ended = False
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
            image.copy(tensors, share, BEHIND)
            # IMPORTANT: before anybody is told that the copy has ended. A step that waits for it would change the
            # counters, and a snapshot checked after it would count as torn.
            watch.check()
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
