"""When to save: every so many steps or seconds, at given steps, or as a function of the user's says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.steps import checked_step


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
