"""Tells the worker which saves this rank will not stage, until it has heard: other ranks wait for each of them.

A worker that follows a dead one is told of the latest again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.outcomes import Send
from asyncckpt.protocol import messages

MAX_OPEN = 64
"""Withdrawals that are kept until the worker has answered. More than saves are in flight at once."""


class Withdrawals:
    """See the module. Thread-safe.

    Args:
        send: Sends a request.
        alone: There is but one rank: what cannot be sent at once is dropped, since nobody waits.
    """

    def __init__(self, send: Send, *, alone: bool) -> None:
        self._send, self._alone = send, alone
        self._lock = threading.RLock()  # a signal handler may save in the middle of a save
        self._open: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._told: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Those that a worker has answered, the latest: it may die before the other ranks hear of them."""

        self._without_run: list[tuple[int, str]] = []

    def add(self, save: str, reason: str, *, skipped: bool = False) -> None:
        """Withdraw a save, by its id; its epoch may be 0, unknown."""
        reason = reason[:200].encode(errors="replace").decode()  # torch's message may hold anything
        with self._lock:
            if not self._alone:
                self._open[save] = reason, skipped
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
        self._tell(save, reason, skipped)

    def lost(self, saves: Sequence[str]) -> None:
        """These were with a worker that is lost: a part of them may be with the next one, and wait for ours."""
        for save in saves:
            self.add(save, "the worker that had it was lost")

    def resend(self) -> None:
        """There is another session: say everything again that was not answered."""
        with self._lock:
            still = list(self._open.items())
        for save, (reason, skipped) in still:
            self._tell(save, reason, skipped)

    def again(self) -> None:
        """There is another worker: what the one before has answered may have died with it."""
        with self._lock:
            told, self._told = self._told, OrderedDict()
        for save, (reason, skipped) in told.items():
            self.add(save, reason, skipped=skipped)

    def before_the_run(self, sequence: int, reason: str) -> None:
        """A save was declined before this rank knew its run."""
        with self._lock:
            self._without_run = [*self._without_run, (sequence, reason)][-MAX_OPEN:]

    def run_is_known(self, run_id: str) -> None:
        """Withdraw what was declined before."""
        with self._lock:
            declined, self._without_run = self._without_run, []
        for sequence, reason in declined:
            self.add(str(SaveId(0, sequence, run_id)), reason)

    def _tell(self, save: str, reason: str, skipped: bool) -> None:
        build: Callable[[int], messages.Message] = lambda n: messages.Withdraw(  # noqa: E731
            id=n, save_id=save, reason=reason, skipped=skipped
        )
        asked = self._send(build)
        if asked is not None and not self._alone:
            asked.add_done_callback(lambda done: self._answered(save, done))

    def _answered(self, save: str, done: Future[messages.Message]) -> None:
        if not isinstance(done.exception(), WorkerUnavailableError):
            with self._lock:
                told = self._open.pop(save, None)
                if told is not None:
                    self._told[save] = told
                while len(self._told) > MAX_OPEN:
                    self._told.popitem(last=False)
