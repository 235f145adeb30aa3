"""The trainer's end of a slot that the worker writes while it is being filled (memory/SPEC.md, section 5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from asyncckpt.basics.failpoints import reach
from asyncckpt.client.slot import Slot, describe_save
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import SlotTimeoutError, StagingError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.streaming import Counters, StreamLayout

MIN_STREAMED_NBYTES = 128 << 20
"""With fewer bytes left, streaming gains nothing: they are copied in about the time that the worker needs to begin."""

STEP_NBYTES = 16 << 20
"""The counter of filled bytes is moved in steps of so many: one write, as `storage.rank_writer.EXTENT_NBYTES`."""

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Pauses between two reads of the worker's counter: a disk takes some milliseconds for a segment. Chosen."""

MARGIN_S = 5.0
"""How much longer a caller waits for the copy than the copy itself waits for the worker. Chosen."""


def should_stream(nbytes: int) -> bool:
    """Whether the worker should begin to write a slot while the last `nbytes` are copied into it."""
    return nbytes >= MIN_STREAMED_NBYTES


class StreamingClient(Protocol):
    """The part of `WorkerClient` that a stream needs."""

    @property
    def config(self) -> CheckpointerConfig:
        """The settings; `slot_timeout_s` and `worker_start_timeout_s` are used."""

    def stream(self, save_id: SaveId, slot: Slot) -> Callable[[], bool]:
        """As `WorkerClient.stream`."""


class SlotStream:
    """Tells the worker how far a slot is filled, and waits for the cells of a ring. For one save.

    Args:
        process: The worker; it is told of the slot now.
        slot: The slot of the save, which is open.
        request: The request, encoded.
        offset: Offset of the request in the slot.
        ring: Layout of the ring; None: the slot has room for the whole state.
        save_id, step, path: ID, step and directory of the save; `step` is None if only rank 0 knows it.

    Attributes:
        waited_s: How long it has waited for the worker.

    Raises:
        WorkerUnavailableError: The slot is a ring, the worker was lost, and no other worker adopts its slots.
    """

    def __init__(
        self,
        process: StreamingClient,
        slot: Slot,
        request: bytes,
        offset: int,
        ring: StreamLayout | None = None,
        *,
        save_id: SaveId,
        step: int | None,
        path: str,
    ) -> None:
        self.ring, self._control = ring, slot.memory.control
        self._save_id, self._step, self._path = save_id, step, path
        self._timeout_s = process.config.slot_timeout_s
        self._handover_s = process.config.worker_start_timeout_s
        self._counters = Counters(slot.memory, slot.generation)
        self._is_between = self._dropped = False
        self._progressed_at = time.monotonic()
        self.waited_s = 0.0
        self._counters.reset()
        self._control.stream(request, offset)
        self._check = process.stream(save_id, slot)

    def has_filled(self, nbytes: int) -> None:
        """Publish that the first `nbytes` of the image, from the end of the head page on, are final."""
        # IMPORTANT: only after every one of these bytes is copied. The worker writes them once and never reads again.
        self._counters.filled = nbytes
        reach("stream: more filled")

    def note_staged(self, nbytes: int) -> None:
        """As `SlotControl.note_staged`."""
        self._control.note_staged(nbytes)

    def finish(self, request: bytes | None = None, offset: int = 0) -> None:
        """Seal the slot, which is filled; with another `request` at another `offset`, if one is given.

        Raises:
            SlotError: The request does not fit.
        """
        if request is not None:
            self._control.ask_again(request, offset)
            # IMPORTANT: set it again, since that is a system call, and so a barrier. The worker polls the state, and
            # must not see the seal before the request.
            self._counters.filled = self._counters.filled
        self._control.finish()

    def drop(self) -> None:
        """Cancel: `await_cell` in another thread raises. What was copied is not used."""
        self._dropped = True

    def extended_deadline(self) -> float:
        """Return the `time.monotonic()` by which the copy has ended by itself if no further cell becomes free."""
        return self._progressed_at + self._stall_timeout_s() + MARGIN_S

    def _stall_timeout_s(self) -> float:
        return self._timeout_s + (self._handover_s if self._is_between else 0.0)

    def await_cell(self, number: int) -> None:
        """Wait until the cell of a segment of the ring is free.

        Raises:
            SlotTimeoutError: The worker has written nothing for `slot_timeout_s`.
            StagingError: The copy was cancelled by `drop`.
            AsyncCkptError: The save has ended, or no worker will write the rest of it.
        """
        assert self.ring is not None
        began, before, pause_s = time.monotonic(), -1, FIRST_POLL_S
        while True:
            if self._dropped:
                raise StagingError(f"{describe_save(self._save_id, self._step)}: the copy was given up")
            # True: the worker is dead, another one is being found, which ends the save.
            was_between, self._is_between = self._is_between, self._check()
            freed, now = self.ring.count_in(self._counters.freed), time.monotonic()
            if freed > before or (was_between and not self._is_between):  # the next worker gets its own time to end it
                before, self._progressed_at = freed, now
            if freed > number - self.ring.n_cells:
                self.waited_s += now - began
                return
            if now - self._progressed_at > self._stall_timeout_s():
                why = "no other worker was found" if self._is_between else "storage hangs, or the worker is too busy"
                what = describe_save(self._save_id, self._step)
                raise SlotTimeoutError(
                    f"{what}: the state is larger than its slot, and the worker has written nothing of it for "
                    f"slot_timeout_s={self._timeout_s:g}; {why}",
                    timeout_s=self._timeout_s,
                    save_id=str(self._save_id),
                    step=self._step,
                    path=self._path,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)


class Watermark:
    """How far a slot is filled without a gap, while threads copy pieces of it in any order. For one copy.

    Args:
        start: Address of the first byte.
        end: Address behind the last byte.
        tell: Called, under a lock and in any thread, with the number of bytes from `start` on that are final.
    """

    def __init__(self, start: int, end: int, tell: Callable[[int], None]) -> None:
        self._start, self._end, self._tell = start, end, tell
        self._lock = threading.Lock()
        self._left: list[int] = []
        self._done: set[int] = set()
        self._told = 0

    def expect(self, addresses: Iterable[int]) -> None:
        """Set the addresses of the pieces that are still to be copied, each once; all other bytes are final."""
        with self._lock:
            self._left = sorted(addresses, reverse=True)
            self._advance()

    def done(self, address: int) -> None:
        """Note that the piece at `address` is copied, and final."""
        with self._lock:
            self._done.add(address)
            self._advance()

    def _advance(self) -> None:
        while self._left and self._left[-1] in self._done:
            self._done.remove(self._left.pop())
        filled = (self._left[-1] if self._left else self._end) - self._start
        if filled > self._told and (filled - self._told >= STEP_NBYTES or not self._left):
            self._told = filled
            self._tell(filled)
