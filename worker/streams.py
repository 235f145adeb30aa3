"""One side of a stream between two workers: records out, as pieces that are repeated; records in, each once, in order.

Pure: the caller has clock and network. A piece may be lost, doubled, or overtaken by another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from asyncckpt.protocol.fields import MAX_PIECE_NBYTES, MAX_RECORD_NBYTES
from asyncckpt.protocol.relay import Piece

WINDOW = 16
"""Pieces under way: 8 MiB at most, far below what the queues of a socket hold. Chosen, not measured."""

RESEND_S = 0.5
"""Pieces that nobody has acknowledged are sent again after this. Chosen: above any round trip in a cluster."""

BEAT_S = 1.0
"""Each side says so often that it lives."""

MAX_UNTAKEN_NBYTES = 512 << 20
"""Records that wait for the other side; beyond it the stream is given up. Two of the largest."""


@dataclass(slots=True)
class _Out:
    number: int
    more: bool
    data: bytes


class Stream:
    """See the module.

    Args:
        name: 16 hex digits, of both sides.
        sender: This worker's instance.
        opened: How many streams the follower has opened up to this one.
        quiet_until: Before, nothing is sent.
    """

    def __init__(self, name: str, sender: str, opened: int = 0, *, quiet_until: float = float("-inf")) -> None:
        self.name, self._sender, self.opened = name, sender, opened
        self._out: deque[_Out] = deque()
        self._quiet_until = quiet_until
        self._next = 1
        self._sent = 0
        self._progress_at = float("-inf")
        self._spoke_at = float("-inf")
        self._owes_answer = False
        self._begun = bytearray()
        """The record of which more pieces are to come. One buffer: a list would cost far more than what it holds."""

        self.taken = 0
        self.untaken_nbytes = 0

    # ---- out --------------------------------------------------------------------------------------------------------

    def post(self, record: bytes) -> None:
        """Add a record to what the other side is to take."""
        self.untaken_nbytes += len(record)
        for offset in range(0, max(1, len(record)), MAX_PIECE_NBYTES):
            more = offset + MAX_PIECE_NBYTES < len(record)
            self._out.append(_Out(self._next, more, record[offset : offset + MAX_PIECE_NBYTES]))
            self._next += 1

    @property
    def first(self) -> int:
        """The lowest number that is still here."""
        return self._out[0].number if self._out else self._next

    @property
    def overflows(self) -> bool:
        """Whether more waits than may."""
        return self.untaken_nbytes > MAX_UNTAKEN_NBYTES

    def due(self, now: float) -> Iterator[Piece]:
        """Yield what is to be sent now."""
        if now < self._quiet_until:
            return
        if self._out and self._sent >= self.first and now - self._progress_at >= RESEND_S:
            self._sent, self._progress_at = self.first - 1, now  # from the start: nothing has come since
        for out in self._out:
            if out.number >= self.first + WINDOW:
                break
            if out.number > self._sent:
                if self._sent < self.first:
                    self._progress_at = now
                self._sent = out.number
                yield self._spoken(now, out.number, out.more, out.data)
        if self._owes_answer or now - self._spoke_at >= BEAT_S:
            yield self._spoken(now, 0, False, b"")

    def _spoken(self, now: float, number: int, more: bool, data: bytes) -> Piece:
        self._spoke_at, self._owes_answer = now, False
        return Piece(
            stream=self.name,
            sender=self._sender,
            number=number,
            first=self.first,
            more=more,
            data=data,
            taken=self.taken,
        )

    @property
    def wakes_at(self) -> float:
        """When something is due at the latest."""
        due_at = min(self._spoke_at + BEAT_S, self._progress_at + RESEND_S if self._out else float("inf"))
        return max(due_at, self._quiet_until)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def has_sent(self, number: int) -> bool:
        """Whether the other side can have taken this piece from here, and not from a worker before this one."""
        return number < self._next

    def take(self, piece: Piece, now: float) -> bytes | None:
        """Take what the other side says.

        Returns:
            A record that is complete with this piece.

        Raises:
            ValueError: The other side breaks the rules: a record is too long, or it acknowledges what was never sent.
        """
        if not self.has_sent(piece.taken):
            raise ValueError(f"piece {piece.taken} is acknowledged, {self._next - 1} were sent")
        while self._out and self._out[0].number <= piece.taken:
            self.untaken_nbytes -= len(self._out.popleft().data)
            self._progress_at = now
        if piece.number == 0:
            return None
        self._owes_answer = True
        if piece.number != self.taken + 1:
            return None
        self.taken = piece.number
        self._begun += piece.data
        if len(self._begun) > MAX_RECORD_NBYTES:
            raise ValueError(f"a record of more than {MAX_RECORD_NBYTES} bytes")
        if piece.more:
            return None
        record = bytes(self._begun)
        self._begun = bytearray()
        return record
