"""Agreement of all ranks on the step at which they stop, once one of them was asked to stop.

No rank waits for another before that. A rank that was asked to stop, by a signal or because another rank has posted
that it was, posts the last step that it has passed, and waits. All ranks stop at the first step after the posted ones.
No rank is beyond that step, and ranks that are behind can reach it, since the others still take part in all collectives
before it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import Exchange
from asyncckpt.errors import AsyncCkptError, ConfigError, PlanTimeoutError
from asyncckpt.manager.noticeboard import Noticeboard, noticeboard_of
from asyncckpt.manager.save_policy import SharedClock

STOP, PASSED, ENDED = "stop", "passed", "ended"
BEFORE_ALL = -(1 << 63)
POLL_S = 0.02
_log = logging.getLogger("asyncckpt")


class StopAgreement:
    """Takes part in the agreement for this rank. The training thread calls `stops_at`, the poller's thread `poll`.

    Args:
        world_size: Number of ranks.
        signalled_at: Returns the `time.monotonic()` at which this rank was asked to stop; None: it was not.
        poll_often: Makes the poller poll at once, and often; called while the training thread waits.
        timeout_s: Seconds for which the training thread waits for the other ranks.

    Attributes:
        stop_step: First step at which the ranks stop; None: not decided.
        stop_seen_at: `time.monotonic()` when this rank saw that some rank was asked to stop; None: it has not.
    """

    def __init__(
        self,
        world_size: int,
        signalled_at: Callable[[], float | None],
        poll_often: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._world_size = world_size
        self._signalled_at, self._poll_often, self._timeout_s = signalled_at, poll_often, timeout_s
        self._changed = threading.Condition()
        self._passed = BEFORE_ALL
        self._has_posted_stop = self._has_posted_passed = self._has_seen_stop = self._has_posted_ended = False
        self._missing: list[int] = []
        self.stop_step: int | None = None
        self.stop_seen_at: float | None = None

    @property
    def is_deciding(self) -> bool:
        """Whether the ranks are deciding where to stop: the poller must poll often."""
        return (self._signalled_at() is not None or self._has_seen_stop) and self.stop_step is None

    def stops_at(self, step: int) -> bool:
        """Whether the ranks stop at `step`, or have stopped before it.

        Raises:
            PlanTimeoutError: A rank was asked to stop, and others did not report their step in time.

        Blocks: while the ranks decide, at most `timeout_s`; never before one was asked to stop.
        """
        with self._changed:
            if self.stop_step is None and not self._must_wait(step):
                self._passed = max(self._passed, step)
                return False
            deadline = time.monotonic() + self._timeout_s
            while self.stop_step is None and self._must_wait(step):
                self._poll_often()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PlanTimeoutError(
                        f"preemption: this rank waited {self._timeout_s:.0f} s at step {step} for ranks "
                        f"{self._missing[:20]}, which did not report the step that they are at",
                        missing_ranks=self._missing,
                        timeout_s=self._timeout_s,
                    )
                self._changed.wait(min(left, 1.0))
            return self.stop_step is not None and step >= self.stop_step

    def _must_wait(self, step: int) -> bool:
        """Whether `step` has to wait for the decision. A step that was passed before may be passed again."""
        return (self._signalled_at() is not None or self._has_seen_stop) and step > self._passed

    def poll(self, board: Noticeboard) -> None:
        """Read the noticeboard, and post the values of this rank that the others need now.

        Raises:
            AsyncCkptError: The noticeboard cannot be reached.
        """
        if self.stop_step is not None:
            return
        if self._signalled_at() is not None and not self._has_posted_stop:
            board.post(STOP, b"")
            self._has_posted_stop = True
        if not self._has_seen_stop and not self._has_posted_stop and not board.has_any(STOP):
            return
        with self._changed:
            # IMPORTANT: from now on `stops_at` waits, because no step may be passed after the one that is posted below.
            self._has_seen_stop = True
            if self.stop_seen_at is None:
                self.stop_seen_at = time.monotonic()
        self.post_passed(board)
        if not board.is_complete(PASSED):
            self._missing = board.missing(PASSED)
            return
        self._decide(board)

    def post_passed(self, board: Noticeboard) -> None:
        """Post the last step that this rank has passed, once. At the end of a training it is posted in any case.

        Raises:
            AsyncCkptError: The board cannot be reached.
        """
        if not self._has_posted_passed:
            board.post(PASSED, json.dumps(self._passed).encode())
            self._has_posted_passed = True

    def post_ended(self, board: Noticeboard, step: int | None) -> None:
        """Post that this rank ends at `step`, or has nothing to save (None), once. Raises as `post_passed`."""
        if not self._has_posted_ended:
            board.post(ENDED, json.dumps(step).encode())
            self._has_posted_ended = True

    def why_no_common_end(self, board: Noticeboard, step: int | None, within_s: float) -> str:
        """Post that this rank ends at `step`, or has nothing to save (None), and compare with the other ranks.

        Returns:
            Why the ranks do not end at one step; empty: all end at `step`.

        Raises:
            AsyncCkptError: The board cannot be reached.

        Blocks: until all ranks have posted, at most `within_s`.
        """
        self.post_ended(board, step)
        deadline = time.monotonic() + within_s
        while not board.is_complete(ENDED):
            if time.monotonic() >= deadline:
                return f"ranks {board.missing(ENDED)[:20]} have not ended within {within_s:.0f} s"
            time.sleep(POLL_S)
        posted = [json.loads(board.value_of(ENDED, rank)) for rank in range(self._world_size)]
        ended = {one for one in posted if one is not None}
        if len(ended) == 1 and None not in posted:
            return ""
        return f"the ranks end at different steps, or have nothing to save (None): {posted[:20]}"

    def _decide(self, board: Noticeboard) -> None:
        posted = [int(json.loads(board.value_of(PASSED, rank))) for rank in range(self._world_size)]
        with self._changed:
            self.stop_step = max(posted) + 1
            self._changed.notify_all()
        _log.warning("preemption: all ranks stop at the first step after %d", max(posted))


IDLE_POLL_S = 0.5
"""Seconds between polls while there is nothing to decide. A rank notices so late that another was asked to stop. The
grace time of most schedulers is 30 s. Chosen; a poll costs a message to the store or worker."""

URGENT_POLL_S = 0.01
"""Seconds between polls while the training waits."""

URGENT_FOR_S = 2.0
WARN_AFTER = 3
"""Consecutive failed polls before a warning: at the end of a training, the rank that hosts the store may end first."""


class NoticeboardPoller:
    """A thread that polls the noticeboard while the training runs.

    Args:
        find: Returns the noticeboard; called by the first poll.
        polls: Functions that every poll calls with the noticeboard.
        is_urgent: Returns whether to poll often.
    """

    def __init__(
        self,
        find: Callable[[], Noticeboard],
        polls: Sequence[Callable[[Noticeboard], None]],
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._find, self._polls, self._is_urgent = find, polls, is_urgent
        self._board: Noticeboard | None = None
        self._wake_event = threading.Event()
        self._urgent_until = float("-inf")
        self._ended = False
        self._failed = 0
        self._thread: threading.Thread | None = None
        self._lacks_thread = False

    def start(self) -> None:
        """Start the thread, once. If none can be started, that is logged once, and the next call tries again."""
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

    def poll_now(self) -> None:
        """Poll at once."""
        self._wake_event.set()

    def poll_often(self) -> None:
        """Poll at once, and often for the next 2 s."""
        self._urgent_until = time.monotonic() + URGENT_FOR_S
        self._wake_event.set()

    def _run(self) -> None:
        while not self._ended:
            self._look()
            often = self._is_urgent() or time.monotonic() < self._urgent_until
            self._wake_event.wait(URGENT_POLL_S if often else IDLE_POLL_S)
            self._wake_event.clear()

    def _look(self) -> None:
        try:
            if self._board is None:
                self._board = self._find()
            for poll in self._polls:
                poll(self._board)
            self._failed = 0
        except AsyncCkptError as error:
            self._failed += 1
            if self._failed == WARN_AFTER and not self._ended:
                _log.warning("the ranks cannot agree on when to save or to stop for now: %s", error)
            self._urgent_until = float("-inf")
        except Exception:
            _log.exception("the ranks can no longer agree on when to save or to stop")
            self._ended = True

    def _end(self) -> None:
        self._ended = True
        self._wake_event.set()

    def close(self, last: Callable[[Noticeboard], None], timeout_s: float) -> None:
        """Stop polling. Idempotent.

        Args:
            last: Called with the noticeboard after the last poll, if there was one.
            timeout_s: Seconds to wait for a poll that is running.
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
                _log.debug("cannot post for the other ranks that this one has ended: %s", error)


CLOSE_TIMEOUT_S = 5.0
"""Seconds to wait at the end for a poll that is running: as long as interpreter exit may take."""


class StepCoordinator:
    """Runs the agreements of the ranks of one training on steps, with one poller. Does nothing if there is one rank.

    Args:
        rank: Rank of this process, and the number of ranks.
        find: Returns the exchange through which the ranks communicate; called by the first poll. None: there is none.
        name: Name of the noticeboard, as for `noticeboard_of`.
    """

    def __init__(self, rank: RankInfo, find: Callable[[], Exchange] | None, name: str) -> None:
        self._rank, self._exchange, self._name = rank, find, name
        self._stopping: StopAgreement | None = None
        self._poller: NoticeboardPoller | None = None

    def prepare(self, stopping: StopAgreement | None, plan: SharedClock | None) -> None:
        """Set the agreements: on the step at which to stop, and on save_interval_s.

        Raises:
            ConfigError: The ranks have no exchange, since the checkpointer is made of the user's own parts.
        """
        polls = [one.poll for one in (stopping, plan) if one is not None]
        if not polls:
            return
        if self._exchange is None:
            raise ConfigError(
                "on several ranks, preemption_signal and save_interval_s need the checkpointer's own worker or the "
                "process group, and this checkpointer was made with a checkpoint_process of yours; leave out either",
                field="checkpointer",
            )
        self._stopping = stopping
        is_urgent = (lambda: stopping.is_deciding) if stopping is not None else (lambda: False)
        self._poller = NoticeboardPoller(self._find, polls, is_urgent)

    def _find(self) -> Noticeboard:
        assert self._exchange is not None
        return noticeboard_of(self._rank, self._exchange(), self._name)

    def start(self) -> None:
        """Start polling. Called at the first step, when the process group has surely been initialized."""
        if self._poller is not None:
            self._poller.start()

    def poll_now(self) -> None:
        """Poll at once."""
        if self._poller is not None:
            self._poller.poll_now()

    def poll_often(self) -> None:
        """Poll at once, and often for the next 2 s."""
        if self._poller is not None:
            self._poller.poll_often()

    def why_no_common_end(self, step: int | None, within_s: float) -> str:
        """Stop polling, and return why not all ranks end at `step`, as `StopAgreement.why_no_common_end` does.

        Blocks: as `StopAgreement.why_no_common_end`, and for a poll that is running.
        """
        answer = ["the ranks cannot communicate"]
        stopping = self._stopping
        if stopping is None or self._poller is None:
            return ""

        def ask(board: Noticeboard) -> None:
            stopping.post_passed(board)
            answer[0] = stopping.why_no_common_end(board, step, within_s)

        self._poller.close(ask, CLOSE_TIMEOUT_S)
        return answer[0]

    def close(self) -> None:
        """Stop polling, and post the last step of this rank, so that no other rank waits for it. Idempotent."""
        if self._poller is None:
            return
        stopping = self._stopping

        def say(board: Noticeboard) -> None:
            if stopping is not None:
                stopping.post_passed(board)
                stopping.post_ended(board, None)

        self._poller.close(say, CLOSE_TIMEOUT_S)
