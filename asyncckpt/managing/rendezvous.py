"""Where a manager's ranks agree behind the training: the noticeboard, and the thread that looks at it."""

from __future__ import annotations

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import ConfigError
from asyncckpt.managing.noticeboard import Noticeboard, noticeboard_of
from asyncckpt.managing.stopping import Stopping
from asyncckpt.managing.time_plan import TimePlan
from asyncckpt.managing.watch import Watch

CLOSE_TIMEOUT_S = 5.0
"""For a look at the noticeboard that is under way at the end: as long as interpreter exit may take."""


class Rendezvous:
    """See the module. Does nothing where nothing has to be agreed on.

    Args:
        checkpointer: Whose ranks they are.
        number: Of the manager; all ranks make them in the same order.
    """

    def __init__(self, checkpointer: Checkpointer, number: int) -> None:
        self._checkpointer, self._number = checkpointer, number
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
        if self._checkpointer.exchange is None:
            raise ConfigError(
                "several ranks agree on preemption_signal and save_interval_s by way of the checkpointer's own worker "
                "or the process group; this one is made of other parts",
                field="checkpointer",
            )
        self._stopping = stopping
        is_urgent = (lambda: stopping.is_agreeing) if stopping is not None else (lambda: False)
        self._watch = Watch(self._find, turns, is_urgent)

    def _find(self) -> Noticeboard:
        find = self._checkpointer.exchange
        assert find is not None
        return noticeboard_of(self._checkpointer.rank_info, find(), self._number)

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

    def close(self) -> None:
        """End, and say how far this rank has come, so that no other one waits for it. Twice is fine."""
        if self._watch is not None:
            stopping = self._stopping
            self._watch.close(lambda board: stopping.say(board) if stopping is not None else None, CLOSE_TIMEOUT_S)
