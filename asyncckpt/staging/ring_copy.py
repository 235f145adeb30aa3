"""The copy of a state through a ring: each segment when its cell is free, announced to the worker that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from asyncckpt.errors import SlotTimeoutError, StagingError
from asyncckpt.failpoints import reach
from asyncckpt.format.names import SaveId
from asyncckpt.memory.ring import Counters, Ring
from asyncckpt.staging.copy_cpu import Share
from asyncckpt.staging.engine import Engine
from asyncckpt.staging.lent_slot import what_is_saved
from asyncckpt.staging.moving import FULL, Pace
from asyncckpt.staging.segmented import SegmentedImage

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Between two looks at the worker's counter: a segment takes a disk some milliseconds. Chosen, not measured."""

MARGIN_S = 5.0
"""Beyond its own deadline, who waits for such a copy waits for its end. Chosen."""


ALL = Share([], [])
"""Not looked at: segments follow one another in the files' order."""


class Cells:
    """Waits for the cells of a ring, on the trainer's side. For one save.

    Args:
        ring: The segments.
        counters: Of the ring's generation.
        check: Raises when no worker will write what comes next; whether another one is being found for that.
        save_id, step, path: Of the save; `step` is None where only rank 0 knows it.
        timeout_s: For a cell to become free.
        handover_s: So much longer while another worker is being found.

    Attributes:
        waited_s: How long it has waited for the worker.
    """

    def __init__(
        self,
        ring: Ring,
        counters: Counters,
        check: Callable[[], bool],
        *,
        save_id: SaveId,
        step: int | None,
        path: str,
        timeout_s: float,
        handover_s: float,
    ) -> None:
        self.ring, self._counters, self._check = ring, counters, check
        self._save_id, self._step, self._path = save_id, step, path
        self._timeout_s, self._handover_s = timeout_s, handover_s
        self._is_between = False
        self._dropped = False
        self._progressed_at = time.monotonic()
        self.waited_s = 0.0

    def _patience_s(self) -> float:
        return self._timeout_s + (self._handover_s if self._is_between else 0.0)

    def _await_cell(self, number: int) -> None:
        began, before, pause_s = time.monotonic(), -1, FIRST_POLL_S
        while True:
            if self._dropped:
                raise StagingError(f"{what_is_saved(self._save_id, self._step)}: the copy was given up")
            was_between, self._is_between = self._is_between, self._check()
            freed, now = self._counters.freed, time.monotonic()
            if freed > before or (was_between and not self._is_between):  # the next worker has its own time
                before, self._progressed_at = freed, now
            if freed > number - self.ring.n_cells:
                self.waited_s += now - began
                return
            if now - self._progressed_at > self._patience_s():
                why = "no other worker was found" if self._is_between else "storage hangs, or the worker is too busy"
                what = what_is_saved(self._save_id, self._step)
                raise SlotTimeoutError(
                    f"{what}: the state is larger than its memory, and nothing of it was written for "
                    f"slot_timeout_s={self._timeout_s:g}; {why}",
                    timeout_s=self._timeout_s,
                    save_id=str(self._save_id),
                    step=self._step,
                    path=self._path,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)


class RingCopy(Cells):
    """See the module. For one save; does what `SlotImage.copy` does for one that fits.

    Args:
        image: Of the slot.
        counters: Of the ring's generation.
        places: Which device each tensor lies on, or None.
        engine: Copies from devices.
        check: As for `Cells`, and all that follows.
    """

    def __init__(
        self,
        image: SegmentedImage,
        counters: Counters,
        places: Sequence[int | None],
        engine: Engine,
        check: Callable[[], bool],
        *,
        save_id: SaveId,
        step: int,
        path: str,
        timeout_s: float,
        handover_s: float,
    ) -> None:
        super().__init__(
            image.ring,
            counters,
            check,
            save_id=save_id,
            step=step,
            path=path,
            timeout_s=timeout_s,
            handover_s=handover_s,
        )
        self._image, self._places, self._engine = image, places, engine

    def patience(self) -> float:
        """Return until when the copy ends by itself if nothing becomes free (`time.monotonic()`)."""
        return self._progressed_at + self._patience_s() + MARGIN_S

    def copy(self, tensors: Sequence[torch.Tensor], share: Share = ALL, pace: Pace = FULL) -> None:
        """Copy everything.

        Args:
            tensors: The state's, by number.
            share: See `ALL`.
            pace: As for `SlotImage.copy`; the calling thread moves.

        Raises:
            SlotTimeoutError: The worker has freed nothing for too long.
            StagingError: The copy was dropped.
            AsyncCkptError: Whatever `check` raises.
            RuntimeError: From torch, or a device.
            OSError: As for `SlotImage.copy`.

        Blocks: for all but the last segments to be written.
        """
        self._progressed_at = time.monotonic()
        done_nbytes = 0
        for number, segment in enumerate(self._image.ring.segments):
            self._await_cell(number)
            left = self._image.fill(number, tensors, self._places, self._save_id, pace)
            for index, (targets, sources) in left.items():
                self._engine.copy_here(index, targets, sources)
            # IMPORTANT: after every byte of it. The worker writes, and never looks again.
            self._counters.filled = number + 1
            reach("ring: segment filled")
            done_nbytes += segment.end - segment.start
            self._counters.note_staged(done_nbytes)

    def drop_moves(self) -> None:
        """Let a `copy` that another thread runs end early; what it has copied is worth nothing."""
        self._dropped = True
