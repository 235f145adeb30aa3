"""Changes of the run that this rank has heard of, until they hold; and which of them a meeting has overtaken.

Ranks hear of a change at different times. When they meet and agree from the beginning, those that some have heard of by
then are dropped by all: by those that have not heard of them yet, too, when they do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _Taken(NamedTuple):
    leader: str
    number: int
    effective: int
    raw: bytes


class TakenChanges:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Taken] = []
        self._heard: dict[str, int] = {}
        self._overtaken: dict[str, int] = {}

    def take(self, leader: str, number: int, effective: int, raw: bytes) -> None:
        """Keep a change for the saves from sequence `effective` on.

        Args:
            leader: Instance of the worker that has published it.
            number: Which of that worker's it is, from 1.
            effective: See above.
            raw: What it says.
        """
        with self._lock:
            self._heard[leader] = max(number, self._heard.get(leader, 0))
            self._waiting.append(_Taken(leader, number, effective, raw))
            self._drop()

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
        """Take out the changes that hold from save `sequence` on, first to last."""
        with self._lock:
            found = [change.raw for change in self._waiting if change.effective <= sequence]
            self._waiting = [change for change in self._waiting if change.effective > sequence]
        return found

    def clear(self) -> None:
        """Drop those that wait: their worker decides no more."""
        with self._lock:
            self._waiting.clear()

    def _drop(self) -> None:
        self._waiting = [c for c in self._waiting if c.number > self._overtaken.get(c.leader, 0)]
