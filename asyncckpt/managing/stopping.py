"""All ranks stop at the same step: how they agree on it after one of them was told to.

No rank waits for another until then. Once a rank is told (by a signal, or by the notice of another rank), it says up
to which step it has gone on, and goes no further. The step to stop at is the first one that is later than what any
rank has said. So a rank that is behind gets there without the others' help but for what they have done already, and
none is beyond it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable

from asyncckpt.errors import PlanTimeoutError
from asyncckpt.managing.noticeboard import Noticeboard

NOTICE, PASSED, ENDED = "stop", "passed", "ended"
BEFORE_ALL = -(1 << 63)
POLL_S = 0.02
_log = logging.getLogger("asyncckpt")


class Stopping:
    """This rank's part in the agreement. The training thread calls `at`, the watch's thread `turn`.

    Args:
        world_size: How many ranks there are.
        told_at: Returns `time.monotonic()` when this rank was told to stop; None: it was not.
        hurry: Called when the training thread waits: the watch is to turn at once, and often.
        timeout_s: How long the training thread waits for the other ranks.
    """

    def __init__(
        self, world_size: int, told_at: Callable[[], float | None], hurry: Callable[[], None], timeout_s: float
    ) -> None:
        self._world_size = world_size
        self._told_at, self._hurry, self._timeout_s = told_at, hurry, timeout_s
        self._changed = threading.Condition()
        self._passed = BEFORE_ALL
        self._is_told = self._is_said = self._is_noticed = self._has_ended = False
        self._missing: list[int] = []
        self.stop_from: int | None = None
        self.noticed_at: float | None = None

    @property
    def is_agreeing(self) -> bool:
        """Whether the ranks are about to agree: the watch must turn often."""
        return (self._told_at() is not None or self._is_noticed) and self.stop_from is None

    def at(self, step: int) -> bool:
        """Whether the ranks stop at `step`, or have stopped before it.

        Raises:
            PlanTimeoutError: This rank was told to stop, and others have not said how far they are.

        Blocks: while the ranks agree, at most `timeout_s`; never before one was told to stop.
        """
        with self._changed:
            if self.stop_from is None and not self._must_wait(step):
                self._passed = max(self._passed, step)
                return False
            deadline = time.monotonic() + self._timeout_s
            while self.stop_from is None and self._must_wait(step):
                self._hurry()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PlanTimeoutError(
                        f"this rank was told to stop, and waited {self._timeout_s:.0f} s at step {step} for ranks "
                        f"{self._missing[:20]}, which have not said how far they are",
                        missing_ranks=self._missing,
                        timeout_s=self._timeout_s,
                    )
                self._changed.wait(min(left, 1.0))
            return self.stop_from is not None and step >= self.stop_from

    def _must_wait(self, step: int) -> bool:
        """A step that was passed before is passed again: what was said of it holds."""
        return (self._told_at() is not None or self._is_noticed) and step > self._passed

    def turn(self, board: Noticeboard) -> None:
        """Look at the board, and say what there is to say.

        Raises:
            AsyncCkptError: The board cannot be reached.
        """
        if self.stop_from is not None:
            return
        if self._told_at() is not None and not self._is_told:
            board.post(NOTICE, b"")
            self._is_told = True
        if not self._is_noticed and not self._is_told and not board.anybody(NOTICE):
            return
        with self._changed:
            # IMPORTANT: from here `at` waits. What is said below must stay true.
            self._is_noticed = True
            if self.noticed_at is None:
                self.noticed_at = time.monotonic()
        self.say(board)
        if not board.is_complete(PASSED):
            self._missing = board.missing(PASSED)
            return
        self._decide(board)

    def say(self, board: Noticeboard) -> None:
        """Say how far this rank has gone; once. At its end a rank says so without being asked.

        Raises:
            AsyncCkptError: The board cannot be reached.
        """
        if not self._is_said:
            board.post(PASSED, json.dumps(self._passed).encode())
            self._is_said = True

    def say_ended(self, board: Noticeboard, step: int | None) -> None:
        """Say that this rank goes no further than `step`, or has nothing to save (None); once. As `say`."""
        if not self._has_ended:
            board.post(ENDED, json.dumps(step).encode())
            self._has_ended = True

    def all_end_at(self, board: Noticeboard, step: int | None, within_s: float) -> str:
        """Say that this rank can go no further than `step`, or has nothing to save (None), and hear the others.

        Returns:
            Why the ranks do not end at one step; empty: all do.

        Raises:
            AsyncCkptError: The board cannot be reached.

        Blocks: until all have said it, at most `within_s`.
        """
        self.say_ended(board, step)
        deadline = time.monotonic() + within_s
        while not board.is_complete(ENDED):
            if time.monotonic() >= deadline:
                return f"ranks {board.missing(ENDED)[:20]} have not come to an end within {within_s:.0f} s"
            time.sleep(POLL_S)
        said = [json.loads(board.take(ENDED, rank)) for rank in range(self._world_size)]
        ended = {one for one in said if one is not None}
        if len(ended) == 1 and None not in said:
            return ""
        return f"the ranks end at different steps, or have none to save: {said[:20]}"

    def _decide(self, board: Noticeboard) -> None:
        said = [int(json.loads(board.take(PASSED, rank))) for rank in range(self._world_size)]
        with self._changed:
            self.stop_from = max(said) + 1
            self._changed.notify_all()
        _log.warning("told to stop: all ranks do so at the first step after %d", max(said))
