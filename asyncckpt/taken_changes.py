"""Changes of the run that this rank has heard of, until they hold; and which of them a meeting has overtaken.

They are applied in their order: one that holds early makes those before it hold as early.

Ranks hear of a change at different times. When they meet and agree from the beginning, those that some have heard of by
then are dropped by all: by those that have not heard of them yet, too, when they do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

EXPECT_S = 1.0
"""How long a save waits for a change that was announced; it comes within milliseconds. Chosen, not measured."""

MAX_MISSED = 16
"""More saves than one rank begins while another one hears of a change. Chosen, not measured."""

_log = logging.getLogger("asyncckpt")


class _Taken(NamedTuple):
    leader: str
    number: int
    effective: int
    raw: bytes


class TakenChanges:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._expected: dict[str, int] = {}
        self._announced: dict[str, int] = {}
        self._reached = -1
        self._waiting: list[_Taken] = []
        self._heard: dict[str, int] = {}
        self._overtaken: dict[str, int] = {}

    def take(self, leader: str, number: int, effective: int, raw: bytes) -> range:
        """Keep a change for the saves from sequence `effective` on.

        Args:
            leader: Instance of the worker that has published it.
            number: Which of that worker's it is, from 1.
            effective: See above.
            raw: What it says.

        Returns:
            The saves that were taken without it, and for which it holds: the last `MAX_MISSED` of them.
        """
        with self._lock:
            self._heard[leader] = max(number, self._heard.get(leader, 0))
            self._waiting.append(_Taken(leader, number, effective, raw))
            self._drop()
            self._lock.notify_all()
            return range(0) if number <= self._overtaken.get(leader, 0) else self._since(effective)

    def taken_since(self, sequence: int) -> range:
        """Return the saves from `sequence` on that were taken: the last `MAX_MISSED` of them."""
        with self._lock:
            return self._since(sequence)

    def _since(self, sequence: int) -> range:
        return range(max(sequence, self._reached - MAX_MISSED + 1), self._reached + 1)

    def expect(self, leader: str, number: int) -> None:
        """The worker `leader` has published so many changes, which are being fetched."""
        with self._lock:
            if number > self._announced.get(leader, 0):
                self._announced[leader] = self._expected[leader] = number

    def heard(self) -> dict[str, int]:
        """Return the number of the last change that was heard of, by worker."""
        with self._lock:
            return dict(self._heard)

    def overtake(self, heard: Iterable[Mapping[str, int]]) -> None:
        """Drop all changes of which any rank had heard, now and when this one does; `heard`: of all ranks."""
        with self._lock:
            for one in heard:
                for leader, number in one.items():
                    self._overtaken[leader] = max(number, self._overtaken.get(leader, 0))
            self._drop()

    def due(self, sequence: int) -> list[bytes]:
        """Take out the changes that hold from save `sequence` on, first to last.

        Blocks: for those that are expected, at most `EXPECT_S`, and for each once.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._is_expecting(), EXPECT_S)
            self._expected.clear()
            self._reached = max(sequence, self._reached)
            n_due = 1 + max((n for n, change in enumerate(self._waiting) if change.effective <= sequence), default=-1)
            found, self._waiting = self._waiting[:n_due], self._waiting[n_due:]
        return [change.raw for change in found]

    def clear(self) -> None:
        """Drop those that wait: their worker decides no more."""
        with self._lock:
            self._waiting.clear()
            self._expected.clear()
            self._lock.notify_all()

    def _is_expecting(self) -> bool:
        return any(self._heard.get(leader, 0) < number for leader, number in self._expected.items())

    def _drop(self) -> None:
        self._waiting = [c for c in self._waiting if c.number > self._overtaken.get(c.leader, 0)]


def say_per_rank(names: Sequence[str]) -> None:
    """Warn of tensors that each rank stores its own of from now on, if there are any."""
    if names:
        _log.warning(
            "from this save on each rank stores its own of %d tensors that were found to differ between ranks, or "
            "whose writer lost them: %s",
            len(names),
            ", ".join(names[:8]),
        )
