"""Where ranks agree behind the training: the noticeboard, and the thread that looks at it."""

from __future__ import annotations

from collections.abc import Callable

from asyncckpt.config import RankInfo
from asyncckpt.errors import ConfigError
from asyncckpt.exchange import Exchange
from asyncckpt.managing.noticeboard import Noticeboard, noticeboard_of
from asyncckpt.managing.stopping import Stopping
from asyncckpt.managing.time_plan import TimePlan
from asyncckpt.managing.watch import Watch

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
