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
from collections.abc import Callable, Sequence

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.config import RankInfo
from asyncckpt.distributed.rendezvous import Exchange
from asyncckpt.errors import AsyncCkptError, ConfigError, PlanTimeoutError
from asyncckpt.manager.noticeboard import Noticeboard, noticeboard_of
from asyncckpt.manager.save_policy import TimePlan

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


TURN_S = 0.5
"""How often it looks while there is nothing to agree on: how late a rank hears that another one was told to stop. The
grace time of most schedulers is 30 s. Chosen; a look costs a message to the store or worker."""

HURRIED_S = 0.01
"""How often while the training waits."""

HURRY_FOR_S = 2.0
WARN_AFTER = 3
"""Looks in vain, one after the other: where a training ends, the rank that has the store may end a moment earlier."""


class Watch:
    """See the module.

    Args:
        find: Returns the noticeboard, at the first look.
        turns: Each is called with the noticeboard, again and again.
        is_urgent: Whether to look often.
    """

    def __init__(
        self,
        find: Callable[[], Noticeboard],
        turns: Sequence[Callable[[Noticeboard], None]],
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._find, self._turns, self._is_urgent = find, turns, is_urgent
        self._board: Noticeboard | None = None
        self._wake = threading.Event()
        self._hurried_until = float("-inf")
        self._ended = False
        self._failed = 0
        self._thread: threading.Thread | None = None
        self._lacks_thread = False

    def start(self) -> None:
        """Begin, once. Without a thread for it, which is said once, the next call tries again."""
        if self._thread is None and not self._ended:
            thread = BackgroundThread(self._run, "asyncckpt-watch", end=self._end)
            try:
                thread.start()
            except RuntimeError as error:  # can't start new thread
                if not self._lacks_thread:
                    self._lacks_thread = True
                    _log.warning("the ranks cannot agree on when to save or to stop for now: %s", error)
                return
            self._thread = thread

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def hurry(self) -> None:
        """Look at once, and often for a while."""
        self._hurried_until = time.monotonic() + HURRY_FOR_S
        self._wake.set()

    def _run(self) -> None:
        while not self._ended:
            self._look()
            often = self._is_urgent() or time.monotonic() < self._hurried_until
            self._wake.wait(HURRIED_S if often else TURN_S)
            self._wake.clear()

    def _look(self) -> None:
        try:
            if self._board is None:
                self._board = self._find()
            for turn in self._turns:
                turn(self._board)
            self._failed = 0
        except AsyncCkptError as error:
            self._failed += 1
            if self._failed == WARN_AFTER and not self._ended:
                _log.warning("the ranks cannot agree on when to save or to stop for now: %s", error)
            self._hurried_until = float("-inf")
        except Exception:
            _log.exception("the ranks cannot agree on when to save or to stop any more")
            self._ended = True

    def _end(self) -> None:
        self._ended = True
        self._wake.set()

    def close(self, last: Callable[[Noticeboard], None], timeout_s: float) -> None:
        """End. Twice is fine.

        Args:
            last: Called with the noticeboard after the last look, if there was one.
            timeout_s: How long to wait for a look that is under way.
        """
        thread, self._thread = self._thread, None
        self._end()
        if thread is None:
            return
        thread.join(timeout_s)
        if not thread.is_alive() and self._board is not None:
            try:
                last(self._board)
            except AsyncCkptError as error:
                _log.debug("the other ranks are not told that this one has ended: %s", error)


CLOSE_TIMEOUT_S = 5.0
"""For a look at the noticeboard that is under way at the end: as long as interpreter exit may take."""


class Rendezvous:
    """See the module. Does nothing where nothing has to be agreed on.

    Args:
        rank: Which of the ranks this is.
        find: Returns where they meet, at the first look; None: nowhere.
        name: As of `noticeboard_of`.
    """

    def __init__(self, rank: RankInfo, find: Callable[[], Exchange] | None, name: str) -> None:
        self._rank, self._exchange, self._name = rank, find, name
        self._stopping: Stopping | None = None
        self._watch: Watch | None = None

    def prepare(self, stopping: Stopping | None, plan: TimePlan | None) -> None:
        """Say what there is to agree on.

        Raises:
            ConfigError: There is, and the checkpointer's ranks meet nowhere: it is made of own parts.
        """
        turns = [one.turn for one in (stopping, plan) if one is not None]
        if not turns:
            return
        if self._exchange is None:
            raise ConfigError(
                "several ranks agree on preemption_signal and save_interval_s by way of the checkpointer's own worker "
                "or the process group; this one is made of other parts",
                field="checkpointer",
            )
        self._stopping = stopping
        is_urgent = (lambda: stopping.is_agreeing) if stopping is not None else (lambda: False)
        self._watch = Watch(self._find, turns, is_urgent)

    def _find(self) -> Noticeboard:
        assert self._exchange is not None
        return noticeboard_of(self._rank, self._exchange(), self._name)

    def start(self) -> None:
        """Begin to look, at the first step: only then is it sure how the ranks meet."""
        if self._watch is not None:
            self._watch.start()

    def wake(self) -> None:
        """Look at once."""
        if self._watch is not None:
            self._watch.wake()

    def hurry(self) -> None:
        """Look at once, and often for a while."""
        if self._watch is not None:
            self._watch.hurry()

    def all_end_at(self, step: int | None, within_s: float) -> str:
        """End, and ask whether all ranks end at `step`: returns why not; empty: they do. As of `Stopping`.

        Blocks: as `Stopping.all_end_at`, and for a look at the noticeboard that is under way.
        """
        said = ["the ranks cannot reach each other"]
        stopping = self._stopping
        if stopping is None or self._watch is None:
            return ""

        def ask(board: Noticeboard) -> None:
            stopping.say(board)
            said[0] = stopping.all_end_at(board, step, within_s)

        self._watch.close(ask, CLOSE_TIMEOUT_S)
        return said[0]

    def close(self) -> None:
        """End, and say how far this rank has come, so that no other one waits for it. Twice is fine."""
        if self._watch is None:
            return
        stopping = self._stopping

        def say(board: Noticeboard) -> None:
            if stopping is not None:
                stopping.say(board)
                stopping.say_ended(board, None)

        self._watch.close(say, CLOSE_TIMEOUT_S)
