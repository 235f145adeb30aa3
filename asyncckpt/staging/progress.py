"""How far a copy has come, for who looks on: a word in the slot's head page, stored by moves among the others."""

from __future__ import annotations

import ctypes

from asyncckpt.staging.moving import Moves

MARK_NBYTES = 32 << 20
"""How much is copied between two marks: some milliseconds. Chosen: below what anybody sees, and far above the cost of a
mark, a move of 8 bytes."""


class Progress:
    """See the module. Several threads move, so a mark may be stored before the last pieces that it counts.

    Args:
        address: Of the word; it must outlive the moves.
    """

    def __init__(self, address: int) -> None:
        self._word = ctypes.c_uint64.from_address(address)
        self._done = 0
        self._values: list[ctypes.c_uint64] = []

    def begin(self) -> None:
        """A copy begins, maybe the second one into the same snapshot. No move of the one before is left."""
        self._done = self._word.value
        self._values.clear()

    def mark(self, moves: Moves, nbytes: int) -> int:
        """Put a mark behind the moves that there are; returns 0: nothing has come after it.

        Args:
            moves: Of the copy.
            nbytes: What they move since the mark before.
        """
        self._done += nbytes
        value = ctypes.c_uint64(self._done)
        self._values.append(value)  # IMPORTANT: the move reads it, later
        moves.append((ctypes.addressof(self._word), ctypes.addressof(value), ctypes.sizeof(value)))
        return 0

    def come_to(self, nbytes: int) -> None:
        """So much is there at least; where moves are not in the order in which they were put."""
        self._word.value = max(self._word.value, nbytes)

    def end(self, nbytes: int) -> None:
        """Everything was moved, and `nbytes` of it after the last mark."""
        self._word.value = self._done + nbytes
