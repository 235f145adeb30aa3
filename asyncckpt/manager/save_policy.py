"""When to save: every so many steps or seconds, at given steps, or as a function of the user's says."""

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
    """Saving every so many seconds on one rank.

    Args:
        interval_s: Seconds from one save to the next.
        now: The clock.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._now = interval_s, now
        self._last = now()

    def saved(self) -> None:
        """A save has begun, for whatever reason: the seconds count from here."""
        self._last = self._now()

    def at(self, step: int) -> bool:
        """Whether it is time to save."""
        return self._now() - self._last >= self._interval_s


class SavePolicy:
    """Says at which steps to save: those that any of the given reasons names; without any, all.

    Args:
        interval_steps: Steps that are a multiple of it.
        on_steps: These steps.
        when: Called with a step; must return the same on all ranks.
        clock: With `at(step)`, or None.

    Raises:
        ConfigError: A value that makes no sense.
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
            raise ConfigError(f"save_when={when!r}: expected a function of the step", field="save_when")
        self._interval_steps, self._when, self._clock = interval_steps, when, clock
        self._on_steps = (
            None if on_steps is None else frozenset(checked_step(step, "save_on_steps") for step in on_steps)
        )
        self._is_free = interval_steps is None and on_steps is None and when is None and clock is None

    def at(self, step: int) -> bool:
        """Whether to save at `step`.

        Blocks: as the clock does.
        """
        # Each is asked, whatever the others say: a clock of several ranks must see every step.
        due = self._clock is not None and self._clock.at(step)
        due |= self._interval_steps is not None and step % self._interval_steps == 0
        due |= self._on_steps is not None and step in self._on_steps
        return bool(due or self._is_free or (self._when is not None and self._when(step)))


def check_seconds(name: str, value: float | None) -> None:
    """Refuse what is no time.

    Raises:
        ConfigError: Not None, and not positive and finite.
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if value is not None and not fits:
        raise ConfigError(f"{name}={value!r}: expected None or seconds above 0", field=name, value=repr(value))


def optimal_interval(save_cost_s: float, mtbf_s: float) -> float:
    """Return after how many seconds of training to save again, so that saving and repeating cost least in all.

    Young's first-order answer, sqrt(2 * cost * mtbf) (J. W. Young, "A first order approximation to the optimum
    checkpoint interval", CACM 17(9), 1974), with the terms of higher order of J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006, equation 37:
    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d while d < 2M, else M.

    Args:
        save_cost_s: Seconds that the training loses by one save: of an asynchronous one only what `save()` takes and
            slows down, not what the worker takes to write.
        mtbf_s: Mean seconds between failures of the whole job: of one node, divided by the number of nodes.

    Returns:
        Seconds from the end of one save to the begin of the next. While a save takes longer to be written than that,
        saves follow one another as fast as storage lets them.

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
"""The first one prepares memory and agrees with other ranks, and does not count. Chosen."""

_log = logging.getLogger("asyncckpt")


class Advice:
    """See the module.

    Args:
        mtbf_s: Mean seconds between failures; None: it says nothing.

    Raises:
        ConfigError: No time.
    """

    def __init__(self, mtbf_s: float | None) -> None:
        check_seconds("mtbf_s", mtbf_s)
        self._mtbf_s = mtbf_s
        self._costs: list[float] = []

    def took(self, seconds: float) -> None:
        """A call of `save()` took so long."""
        if self._mtbf_s is None or len(self._costs) >= AFTER_SAVES:
            return
        self._costs.append(seconds)
        if len(self._costs) == AFTER_SAVES:
            cost_s = statistics.median(self._costs[1:])
            _log.info(
                "save() takes %.3f s of the training; with a failure every %.0f s on average, saving every %.0f s "
                "loses least in all (Young, Daly)",
                cost_s,
                self._mtbf_s,
                optimal_interval(cost_s, self._mtbf_s),
            )


AHEAD_S = 10.0
"""How far ahead rank 0 decides: a save comes at most so much late if the steps become slower. Chosen."""

MAX_AHEAD = 1000
"""Steps that are decided at once, however fast they are. Chosen: minutes, if they become slow all at once."""

WAIT_S = 60.0
"""How long a rank waits for a record. Then it saves at no time any more, and goes on."""


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
