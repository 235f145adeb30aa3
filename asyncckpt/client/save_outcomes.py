"""The outcomes of a run's saves: which have ended on all ranks, and whether the ranks meet again after them.

Also the interface of the run itself, as the client needs it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from asyncckpt.client.worker_links import WorkerLinks
from asyncckpt.config import RankInfo
from asyncckpt.protocol import messages
from asyncckpt.protocol.fields import MAX_OUTCOMES

MAX_KNOWN = 1024
"""How many outcomes are remembered, the latest. Chosen: many times the saves that can be in flight."""

OUTCOME_TIMEOUT_S = 5.0
"""How long to wait for the outcome of a save that has ended, after a worker was lost, before it is assumed (the save
was committed) or counted as lost (it has failed). A worker that knows the outcome reports it within this time. Chosen:
what a follower waits for a leader that may know (`follower.FOUND_S`), and the start of a worker. While no worker is
lost, the wait ends with `slot_timeout_s` (`SlotStager._await_outcome`)."""

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id; None when there is no session."""


class SaveOutcomes:
    """The outcomes of one run's saves, as its worker reports them in every `Saves` message. Thread-safe.

    The *outcome* of a save is whether all ranks meet again after it. Two things can keep this rank from learning it:
    the worker forgot it before this rank was told, or every worker that knew it may have died. Then:

    - It is *lost* if the worker forgot it, or if the save was reported as failed.
    - It is *assumed* if the save was reported as committed: this rank does not meet the others after it. If they do
      meet, it refuses; see `at_loss`.

    Attributes:
        losses: How often a worker was lost.
        at_loss: The latest save whose outcome was known when a worker was last lost; None: no worker was lost. Of saves
            near it, that worker may have reported one outcome to some ranks, and its successor another one to others.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # `with self._changed` could leave it taken: see `SlotPool`
        self._changed = threading.Condition(self._lock)
        self._run = ""
        self._meet: dict[int, bool] = {}
        self._lost_below = -1
        self.losses = 0
        self._ended: dict[int, tuple[float, bool]] = {}
        self._lost: set[int] = set()
        self._first_report_at: float | None = None  # of the worker that there is now
        self.at_loss: int | None = None

    def update(self, run: str, outcomes: Sequence[tuple[int, bool]]) -> None:
        """Add outcomes that a worker reports: [sequence, whether all ranks meet again after it]. The first report wins.

        Args:
            run: ID of the run; "": the worker does not know yet in which run the session saves.
            outcomes: The outcomes, by sequence.
        """
        with self._lock:
            if not run:
                return
            if run != self._run:
                self._run, self._meet, self._ended, self._lost, self._lost_below = run, {}, {}, set(), -1
            if self._first_report_at is None:
                self._first_report_at = time.monotonic()
            if len(outcomes) == MAX_OUTCOMES and outcomes[0][0] not in self._meet:
                # A full list whose oldest outcome is new here: the worker may have forgotten older ones.
                self._lost_below = max(sequence for sequence, _ in outcomes)
            for sequence, meet in outcomes:
                self._meet.setdefault(sequence, meet)
            for old in list(self._meet)[:-MAX_KNOWN]:
                del self._meet[old]
            self._changed.notify_all()

    def note_worker_lost(self) -> None:
        """Note that the worker is lost."""
        with self._lock:
            self.losses, self._first_report_at = self.losses + 1, None
            self.at_loss = max(self._meet, default=-1)
            self._changed.notify_all()

    def note_ended(self, run: str, sequence: int, *, committed: bool) -> None:
        """Note that a worker has reported a save as committed or failed; its outcome may come with that, or later."""
        with self._lock:
            if run == self._run:
                self._ended.setdefault(sequence, (time.monotonic(), committed))
                for old in list(self._ended)[:-MAX_KNOWN]:
                    del self._ended[old]
                    self._lost.discard(old)

    def resolve_after_timeout(self, run: str, sequence: int) -> float:
        """Assume the outcome of a committed save, or count that of a failed one as lost, if its time is up.

        Returns:
            Seconds until then; infinite if the outcome is still to come, as far as is known now.
        """
        with self._lock:
            ended = self._ended.get(sequence) if run == self._run else None
            if ended is None or self.at_loss is None or self._first_report_at is None:
                return math.inf
            at, committed = ended
            left = max(at, self._first_report_at) + OUTCOME_TIMEOUT_S - time.monotonic()
            if left <= 0 and committed:
                self._meet.setdefault(sequence, False)
            elif left <= 0 and sequence not in self._meet:
                self._lost.add(sequence)
            return max(0.0, left)

    def meets_after(self, run: str, sequence: int) -> bool | None:
        """Return whether all ranks meet again after a save; None: its outcome is not known yet, or lost."""
        with self._lock:
            return self._meet.get(sequence) if run == self._run else None

    def is_lost(self, run: str, sequence: int) -> bool:
        """Return whether the outcome of a save is lost."""
        with self._lock:
            return run == self._run and sequence not in self._meet and self._is_forgotten(sequence)

    def _is_forgotten(self, sequence: int) -> bool:
        return sequence < self._lost_below or sequence in self._lost

    def wait(self, run: str, sequence: int, losses: int, timeout_s: float) -> None:
        """Wait until the outcome of a save is known or lost, or a worker is lost, at most `timeout_s`.

        Args:
            run, sequence: Run and sequence of the save.
            losses: `self.losses` when the caller last had a worker. If it has grown, that worker reports nothing more.
            timeout_s: In seconds.
        """

        def has_come() -> bool:
            known = run == self._run and (sequence in self._meet or self._is_forgotten(sequence))
            return known or self.losses != losses

        with self._lock:
            self._changed.wait_for(has_come, timeout_s)


class Run(Protocol):
    """The run of this checkpointer's ranks. `distributed.run_agreement.Coordination` implements it with torch."""

    rank: RankInfo
    run_id: str
    links: WorkerLinks
    outcomes: SaveOutcomes

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""

    @property
    def knows_run(self) -> bool:
        """Whether all ranks have this `run_id`: they have met."""

    @property
    def must_meet(self) -> bool:
        """Whether this rank must meet the others before it takes part in a save."""

    def aligned(self, own: int) -> int:
        """Return the sequence that all ranks give the save which this rank counts as its `own`."""

    def refuse(self, sequence: int, path: str, reason: str) -> None:
        """Tell ranks that meet in a save not to wait for this one."""

    def differs(self, fqn: str) -> None:
        """Note that a tensor that was taken for a replica differs between ranks."""
