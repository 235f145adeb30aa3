"""Save policies: save every N steps or seconds, at given steps, or when a function of the user returns true."""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.manager.noticeboard import Noticeboard
from asyncckpt.training_step import checked_step


class LocalClock:
    """Tells whether `save_interval_s` seconds have passed since the last save, for one rank.

    Args:
        interval_s: Seconds from one save to the next.
        now: Clock to read.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._now = interval_s, now
        self._last = now()

    def save_begun(self) -> None:
        """Start a new interval, because a save has begun, for any reason."""
        self._last = self._now()

    def is_due(self, step: int) -> bool:
        """Return whether it is time to save."""
        return self._now() - self._last >= self._interval_s


class SavePolicy:
    """Decides at which steps to save: those for which any of the arguments says so, or all if none is given.

    Args:
        interval_steps: Save at multiples of this.
        on_steps: Save at these steps.
        when: Save at steps for which this returns true; must return the same on all ranks.
        clock: A `LocalClock` or `SharedClock`, or None.

    Raises:
        ConfigError: An impossible value.
    """

    def __init__(
        self,
        interval_steps: int | None,
        on_steps: Collection[int] | None,
        when: Callable[[int], bool] | None,
        clock: Any | None,
    ) -> None:
        if interval_steps is not None:
            interval_steps = checked_step(interval_steps, "save_interval_steps")
            if interval_steps == 0:
                raise ConfigError(
                    "save_interval_steps=0: expected None or an int from 1", field="save_interval_steps", value="0"
                )
        if when is not None and not callable(when):
            raise ConfigError(f"save_when={when!r}: expected a function that takes a step", field="save_when")
        if on_steps is not None and not isinstance(on_steps, Collection):  # a generator could be read once only
            raise ConfigError(f"save_on_steps={on_steps!r}: expected a list or set of steps", field="save_on_steps")
        self._interval_steps, self._when, self._clock = interval_steps, when, clock
        self._on_steps = (
            None if on_steps is None else frozenset(checked_step(step, "save_on_steps") for step in on_steps)
        )
        self._is_free = interval_steps is None and on_steps is None and when is None and clock is None

    def is_due(self, step: int) -> bool:
        """Return whether to save at `step`.

        Blocks: as the clock does.
        """
        # Call the clock in any case: a SharedClock must see each step.
        due = self._clock is not None and self._clock.is_due(step)
        due |= self._interval_steps is not None and step % self._interval_steps == 0
        due |= self._on_steps is not None and step in self._on_steps
        return bool(due or self._is_free or (self._when is not None and self._when(step)))


def check_seconds(name: str, value: float | None) -> None:
    """Check that `value` is None or a positive, finite number of seconds.

    Raises:
        ConfigError: It is not.
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if value is not None and not fits:
        raise ConfigError(f"{name}={value!r}: expected None or seconds above 0", field=name, value=repr(value))


def optimal_interval(save_cost_s: float, mtbf_s: float) -> float:
    """Return the save interval at which saving, and repeating lost steps after failures, cost the least time together.

    Young's first-order formula, sqrt(2 * cost * mtbf) (J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17(9), 1974), with the terms of higher order of J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37:
    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d while d < 2M, else M.

    Args:
        save_cost_s: Seconds that the training loses by one save. Of an asynchronous save that is what `save()` takes,
            and what it slows down, but not the time of writing.
        mtbf_s: Mean seconds between failures of the whole job: those of one node, divided by the number of nodes.

    Returns:
        Seconds from the end of one save to the start of the next. If a save takes longer to be written, save as often
        as storage allows.

    Raises:
        ConfigError: A value that is not positive and finite; `save_cost_s` may be 0.
    """
    _check("save_cost_s", save_cost_s, save_cost_s >= 0)
    _check("mtbf_s", mtbf_s, mtbf_s > 0)
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_cost_s / (2 * mtbf_s)
    return math.sqrt(2 * save_cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - save_cost_s


def _check(name: str, value: float, fits: bool) -> None:
    if not (fits and math.isfinite(value)):
        raise ConfigError(f"{name}={value!r}: expected seconds, finite and positive", field=name, value=repr(value))


AFTER_SAVES = 4
"""Saves after which the interval is logged. The first one does not count, since it sets up memory. Chosen."""

_log = logging.getLogger("asyncckpt")


class IntervalAdvisor:
    """Logs the optimal save interval, once it has measured what a few saves cost.

    Args:
        mtbf_s: Mean seconds between failures of the job; None: nothing is logged.

    Raises:
        ConfigError: `mtbf_s` is not positive.
    """

    def __init__(self, mtbf_s: float | None) -> None:
        check_seconds("mtbf_s", mtbf_s)
        self._mtbf_s = mtbf_s
        self._costs: list[float] = []

    def record_cost(self, seconds: float) -> None:
        """Record what one call of `save()` took, in seconds."""
        if self._mtbf_s is None or len(self._costs) >= AFTER_SAVES:
            return
        self._costs.append(seconds)
        if len(self._costs) == AFTER_SAVES:
            cost_s = statistics.median(self._costs[1:])
            _log.info(
                "one save() costs the training %.3f s; with a failure every %.0f s on average, saving every %.0f s "
                "loses the least time (formula of Young and Daly)",
                cost_s,
                self._mtbf_s,
                optimal_interval(cost_s, self._mtbf_s),
            )


AHEAD_S = 10.0
"""Seconds for which rank 0 decides ahead. If steps become slower, a save is late by at most this. Chosen."""

MAX_AHEAD = 1000
"""Most steps for which rank 0 decides at once. Chosen: if fast steps become slow, these take minutes."""

WAIT_S = 60.0
"""Seconds that a rank waits for a decision of rank 0. After that it ignores save_interval_s."""


class SharedClock:
    """Tells whether `save_interval_s` has passed by the clock of rank 0, which decides some steps ahead for all ranks.

    Rank 0 posts its decisions as records on the noticeboard, and the other ranks follow them. The training thread calls
    `is_due` and `save_begun`, the poller's thread `poll`; what both use is changed under `_changed`.

    Args:
        interval_s: Seconds from one save to the next.
        is_leader: Whether this is rank 0.
        poll_now: Makes the poller poll at once; called when there is a record to post.
        poll_often: Makes the poller poll at once, and often; called while the training thread waits.
        now: Clock to read.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        is_leader: bool,
        poll_now: Callable[[], None],
        poll_often: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s, self._is_leader, self._now = interval_s, is_leader, now
        self._poll_now, self._poll_often = poll_now, poll_often
        self._changed = threading.Condition()
        self._decided_until: int | None = None
        self._due: list[int] = []
        self._due_step: int | None = None
        self._last = now()
        self._mark: tuple[int, float] | None = None
        self._ahead = 1
        self._unposted: deque[bytes] = deque()
        self._next = 0
        self._n_restores = 0
        self._early: list[bytes] = []  # records for the steps after a restore that this rank has still before it
        self._gave_up = False

    def restored(self) -> None:
        """Forget what was decided for steps that may come again. Called on all ranks, after the same restores."""
        with self._changed:
            self._n_restores += 1
            self._decided_until = self._due_step = self._mark = None
            self._ahead = 1
            self._due.clear()
            early, self._early = self._early, []
            for record in early:
                self._apply(record)

    def save_begun(self) -> None:
        """Start a new interval, because a save has begun, for any reason."""
        with self._changed:
            self._last = self._now()

    def is_due(self, step: int) -> bool:
        """Return whether it is time to save at `step`. Every rank asks at the same steps, in ascending order.

        Blocks: for the decision of rank 0, if it is late; at most `WAIT_S`, once.
        """
        with self._changed:
            if self._is_leader and (self._decided_until is None or step + self._ahead // 2 >= self._decided_until):
                self._plan(step)
            deadline = time.monotonic() + WAIT_S
            while not self._is_covered(step) and not self._gave_up:
                self._poll_often()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._gave_up = True
                    _log.error(
                        "rank 0 has not decided for %.0f s when to save; this rank now ignores save_interval_s",
                        WAIT_S,
                    )
                else:
                    self._changed.wait(min(left_s, 1.0))
            if any(one <= step for one in self._due):
                self._due = [one for one in self._due if one > step]
                self._due_step = step
            return self._due_step == step

    def _is_covered(self, step: int) -> bool:
        return self._decided_until is not None and step < self._decided_until

    def _plan(self, step: int) -> None:
        """Decide for the next steps; on rank 0 only."""
        now, begin = self._now(), step if self._decided_until is None else self._decided_until
        pace_s = None
        if self._mark is not None and step > self._mark[0]:
            pace_s = max((now - self._mark[1]) / (step - self._mark[0]), 1e-9)
            self._ahead = max(1, min(MAX_AHEAD, 2 * self._ahead, int(AHEAD_S / pace_s)))
        self._mark = step, now
        decided_until = max(begin, step) + self._ahead
        save = None
        left_s = self._last + self._interval_s - now
        if pace_s is not None and step + left_s / pace_s < decided_until:
            save = min(max(begin, step + math.ceil(left_s / pace_s)), decided_until - 1)
            self._last = now + max(0.0, (save - step) * pace_s)
        record = json.dumps([self._n_restores, decided_until, save]).encode()
        self._unposted.append(record)
        self._apply(record)
        self._poll_now()

    def _apply(self, record: bytes) -> None:
        n_restores, decided_until, save = json.loads(record)
        if n_restores > self._n_restores:
            self._early.append(record)
        if n_restores != self._n_restores:
            return
        self._decided_until = decided_until
        if save is not None:
            self._due.append(save)
        self._changed.notify_all()

    def poll(self, board: Noticeboard) -> None:
        """Post the records on rank 0; read them on other ranks.

        Raises:
            AsyncCkptError: The board cannot be reached.
        """
        while self._post_next(board) if self._is_leader else self._read_next(board):
            self._next += 1

    def _post_next(self, board: Noticeboard) -> bool:
        with self._changed:
            record = self._unposted[0] if self._unposted else None
        if record is None:
            return False
        board.post(f"plan/{self._next}", record)  # IMPORTANT: without the lock, else the training would wait
        with self._changed:
            self._unposted.popleft()  # not before: if posting fails, the next poll tries again
        return True

    def _read_next(self, board: Noticeboard) -> bool:
        record = board.from_rank_0(f"plan/{self._next}")
        if record is None:
            return False
        with self._changed:
            self._apply(record)
        return True
