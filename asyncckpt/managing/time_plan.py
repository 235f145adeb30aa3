"""Saving every so many seconds, at the same step on all ranks, without a collective.

Rank 0 has the clock. It says ahead, in records, at which steps nothing is saved and at which one something is: each
record covers the steps up to its fence, some seconds of training ahead at the pace of the last ones. A rank passes a
step only if a record covers it. The records reach the other ranks long before these get there; a rank waits only at
its very first steps, while nobody knows how long a step takes, or if the training has become a lot faster.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from asyncckpt.managing.noticeboard import Noticeboard

AHEAD_S = 10.0
"""How far ahead rank 0 decides: a save comes at most so much late if the steps become slower. Chosen."""

MAX_AHEAD = 1000
"""Steps that are decided at once, however fast they are. Chosen: minutes, if they become slow all at once."""

WAIT_S = 60.0
"""How long a rank waits for a record. Then it saves at no time any more, and goes on."""

_log = logging.getLogger("asyncckpt")


class TimePlan:
    """When to save, in the records of rank 0. The training thread calls `at` and `saved`, the watch's thread `turn`.

    What both threads use is changed under `_changed`.

    Args:
        interval_s: Seconds from one save to the next.
        is_leader: This is rank 0.
        wake: Called when there is something to say: the watch is to turn at once.
        hurry: Called when the training thread waits: the watch is to turn at once, and often.
        now: The clock.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        is_leader: bool,
        wake: Callable[[], None],
        hurry: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s, self._is_leader, self._now = interval_s, is_leader, now
        self._wake, self._hurry = wake, hurry
        self._changed = threading.Condition()
        self._fence: int | None = None
        self._due: list[int] = []
        self._fired: int | None = None
        self._last = now()
        self._mark: tuple[int, float] | None = None
        self._ahead = 1
        self._unsaid: deque[bytes] = deque()
        self._next = 0
        self._gave_up = False

    def saved(self) -> None:
        """A save has begun, for whatever reason: the seconds count from here."""
        with self._changed:
            self._last = self._now()

    def at(self, step: int) -> bool:
        """Whether it is time to save at `step`. Every rank asks at the same steps, in ascending order.

        Blocks: for rank 0's word, if it has not come in time; at most `WAIT_S`, once.
        """
        with self._changed:
            if self._is_leader and (self._fence is None or step + self._ahead // 2 >= self._fence):
                self._plan(step)
            deadline = time.monotonic() + WAIT_S
            while not self._is_covered(step) and not self._gave_up:
                self._hurry()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._gave_up = True
                    _log.error("rank 0 has not said for %.0f s when to save; no save for save_interval_s here", WAIT_S)
                else:
                    self._changed.wait(min(left_s, 1.0))
            if any(one <= step for one in self._due):
                self._due = [one for one in self._due if one > step]
                self._fired = step
            return self._fired == step

    def _is_covered(self, step: int) -> bool:
        return self._fence is not None and step < self._fence

    def _plan(self, step: int) -> None:
        """Rank 0: decide on the next steps."""
        now, begin = self._now(), step if self._fence is None else self._fence
        pace_s = None
        if self._mark is not None and step > self._mark[0]:
            pace_s = max((now - self._mark[1]) / (step - self._mark[0]), 1e-9)
            self._ahead = max(1, min(MAX_AHEAD, 2 * self._ahead, int(AHEAD_S / pace_s)))
        self._mark = step, now
        fence = max(begin, step) + self._ahead
        save = None
        left_s = self._last + self._interval_s - now
        if pace_s is not None and step + left_s / pace_s < fence:
            save = min(max(begin, step + math.ceil(left_s / pace_s)), fence - 1)
            self._last = now + max(0.0, (save - step) * pace_s)
        record = json.dumps([fence, save]).encode()
        self._unsaid.append(record)
        self._take(record)
        self._wake()

    def _take(self, record: bytes) -> None:
        self._fence, save = json.loads(record)
        if save is not None:
            self._due.append(save)
        self._changed.notify_all()

    def turn(self, board: Noticeboard) -> None:
        """Give the other ranks the records, or get them.

        Raises:
            AsyncCkptError: The board cannot be reached.
        """
        while self._post_next(board) if self._is_leader else self._hear_next(board):
            self._next += 1

    def _post_next(self, board: Noticeboard) -> bool:
        with self._changed:
            record = self._unsaid[0] if self._unsaid else None
        if record is None:
            return False
        board.post(f"plan/{self._next}", record)  # IMPORTANT: without the lock, for which the training would wait
        with self._changed:
            self._unsaid.popleft()  # only now: what could not be posted is tried again by the next turn
        return True

    def _hear_next(self, board: Noticeboard) -> bool:
        record = board.heard(f"plan/{self._next}")
        if record is None:
            return False
        with self._changed:
            self._take(record)
        return True
