"""The run of this checkpointer's ranks as its client knows it, and which of the run's saves have ended on all ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from asyncckpt.client.worker_links import Links
from asyncckpt.config import RankInfo
from asyncckpt.protocol import messages
from asyncckpt.protocol.fields import MAX_OUTCOMES

MAX_KNOWN = 1024
"""Outcomes that are remembered, the latest. Many times the saves that can be in flight; chosen."""

ASSUMED_AFTER_S = 5.0
"""Workers that are left tell an outcome by then, if one of them knows it. Chosen: twice what a follower waits for a
decider that may know (`follower.FOUND_S`), and the start of a worker."""

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id; None when there is no session."""


class Outcomes:
    """The outcomes of one run's saves, as its worker tells them with every `Saves` message. Thread-safe.

    An outcome is *lost* if this rank cannot learn it any more: the worker has forgotten it before this rank was told,
    or all workers may have died that knew it, after one of them has told that the save failed. It is *assumed* if all
    workers may have died that knew it, after one of them has told that the save was committed: then the ranks do not
    meet after it, as far as this one is concerned. It refuses if others come; see `at_loss`.

    Attributes:
        losses: How often a worker was lost.
        at_loss: The latest save whose outcome was known when a worker was lost last; None: none was. Ranks may have
            been told different outcomes of the saves about that one: some by that worker, others by its successor.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._run = ""
        self._meet: dict[int, bool] = {}
        self._lost_below = -1
        self.losses = 0
        self._ended: dict[int, tuple[float, bool]] = {}
        self._lost: set[int] = set()
        self._heard_since: float | None = None
        self.at_loss: int | None = None

    def take(self, run: str, outcomes: Sequence[tuple[int, bool]]) -> None:
        """Add what a worker tells: [sequence, whether all ranks meet again after it]; what was told first stays."""
        with self._changed:
            if not run:
                return  # the worker does not know yet in which run the session saves
            if run != self._run:
                self._run, self._meet, self._ended, self._lost, self._lost_below = run, {}, {}, set(), -1
            if self._heard_since is None:
                self._heard_since = time.monotonic()
            if len(outcomes) == MAX_OUTCOMES and outcomes[0][0] not in self._meet:
                # Not even the oldest that it remembers was known here: it may have forgotten others before.
                self._lost_below = max(sequence for sequence, _ in outcomes)
            for sequence, meet in outcomes:
                self._meet.setdefault(sequence, meet)
            for old in list(self._meet)[:-MAX_KNOWN]:
                del self._meet[old]
            self._changed.notify_all()

    def worker_lost(self) -> None:
        """The worker is lost."""
        with self._changed:
            self.losses, self._heard_since = self.losses + 1, None
            self.at_loss = max(self._meet, default=-1)
            self._changed.notify_all()

    def ended(self, run: str, sequence: int, *, committed: bool) -> None:
        """A worker has told that a save was committed, or has failed; its outcome may come with that, or later."""
        with self._changed:
            if run == self._run:
                self._ended.setdefault(sequence, (time.monotonic(), committed))
                for old in list(self._ended)[:-MAX_KNOWN]:
                    del self._ended[old]
                    self._lost.discard(old)

    def given_up_in_s(self, run: str, sequence: int) -> float:
        """Assume the outcome of a committed save, or count that of a failed one as lost, if nobody tells it.

        Returns:
            Seconds until that is done; infinite if it is not to be done, by what is known now.
        """
        with self._changed:
            told = self._ended.get(sequence) if run == self._run else None
            if told is None or self.at_loss is None or self._heard_since is None:
                return math.inf
            at, committed = told
            left = max(at, self._heard_since) + ASSUMED_AFTER_S - time.monotonic()
            if left <= 0 and committed:
                self._meet.setdefault(sequence, False)
            elif left <= 0 and sequence not in self._meet:
                self._lost.add(sequence)
            return max(0.0, left)

    def get(self, run: str, sequence: int) -> bool | None:
        """Return whether all ranks meet again after a save; None: it is not known to have ended, or lost."""
        with self._changed:
            return self._meet.get(sequence) if run == self._run else None

    def is_lost(self, run: str, sequence: int) -> bool:
        """Return whether the outcome of a save is lost."""
        with self._changed:
            return run == self._run and sequence not in self._meet and self._is_forgotten(sequence)

    def _is_forgotten(self, sequence: int) -> bool:
        return sequence < self._lost_below or sequence in self._lost

    def wait(self, run: str, sequence: int, losses: int, timeout_s: float) -> None:
        """Wait until the outcome of a save is known, or lost, or a worker was, at most `timeout_s`.

        Args:
            run, sequence: Of the save.
            losses: How often workers had been lost when there was one that would tell. One that is lost since tells
                nothing any more.
            timeout_s: See above.
        """

        def has_come() -> bool:
            known = run == self._run and (sequence in self._meet or self._is_forgotten(sequence))
            return known or self.losses != losses

        with self._changed:
            self._changed.wait_for(has_come, timeout_s)


class Run(Protocol):
    """The run of this checkpointer's ranks; `distributed.run_agreement.Coordination` is one, which needs torch."""

    rank: RankInfo
    run_id: str
    links: Links
    outcomes: Outcomes

    @property
    def alone(self) -> bool:
        """Whether there is but one rank."""

    @property
    def knows_run(self) -> bool:
        """Whether `run_id` is that of all ranks."""

    @property
    def must_meet(self) -> bool:
        """Whether this rank takes part in no save before all ranks have met."""

    def aligned(self, own: int) -> int:
        """Return the number that all ranks give the save that is this one's `own`."""

    def refuse(self, sequence: int, path: str, reason: str) -> None:
        """This rank does not take part in a save: ranks that meet at it must not wait."""

    def differs(self, fqn: str) -> None:
        """A tensor that was taken for a replica was found to differ between the ranks."""
