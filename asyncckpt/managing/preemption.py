"""Being told to stop: by a signal, by another rank, or by the program itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from asyncckpt.config import RankInfo
from asyncckpt.errors import ConfigError, SaveFailedError
from asyncckpt.exchange import Exchange
from asyncckpt.handle import SaveHandle
from asyncckpt.managing.rendezvous import Rendezvous
from asyncckpt.managing.save_policy import check_seconds
from asyncckpt.managing.signals import SignalNote, signals_of
from asyncckpt.managing.stopping import BEFORE_ALL, Stopping
from asyncckpt.process_group import find_exchange, find_rank_info, has_other_ranks

GRACE_S = 25.0
"""How long ranks of a `RunPreemption` wait for each other once they are told to stop; as `CheckpointManager` has it."""

_NUMBERS = itertools.count()
"""Of the `RunPreemption`s of several ranks in this process; all ranks make them in the same order."""

_log = logging.getLogger("asyncckpt")


class Preemption:
    """See the module. Used by the training thread.

    Args:
        signals: A signal or several; empty: only `tell` counts; None: nothing does.
        grace_s: How long after it a save must be staged.
        world_size: How many ranks there are.
        hurry: See `Stopping`.

    Attributes:
        stopping: How several ranks agree; None: there is one, or nothing counts.

    Raises:
        ConfigError: No signal, or no time.
        SignalHandlerError: Signals, and this is not the main thread.
    """

    def __init__(
        self, signals: int | Iterable[int] | None, grace_s: float, world_size: int, hurry: Callable[[], None]
    ) -> None:
        if grace_s is None:
            raise ConfigError("grace_s=None: expected seconds above 0", field="grace_s")
        check_seconds("grace_s", grace_s)
        self._is_on, self._grace_s = signals is not None, grace_s
        self._note, self._pid = SignalNote(), os.getpid()
        self.stopping: Stopping | None = None
        if self._is_on and world_size > 1:
            self.stopping = Stopping(world_size, lambda: self._note.at, hurry, grace_s)
        self._passed = BEFORE_ALL
        self._stopped_at: int | None = None
        self._late: int | None = None
        self._note.install(signals_of(signals))

    def tell(self) -> None:
        """Take it as if a signal had come. May be called in a signal handler, and in any thread.

        Raises:
            ConfigError: Nobody looks: `preemption_signal=None`.
        """
        if not self._is_on:
            raise ConfigError(
                "nobody looks for preemption: make the manager with preemption_signal=signal.SIGTERM, or () for none",
                field="preemption_signal",
            )
        if self._note.at is None:
            self._note.at = time.monotonic()

    def at(self, step: int) -> bool:
        """Whether the ranks stop at `step`, or have stopped before it; as `Stopping.at`."""
        if not self._is_on:
            return False
        if self.stopping is not None:
            return self.stopping.at(step)
        if self._stopped_at is None:
            # A step that was passed stays passed: whoever asked whether to save it may have been told that it is not.
            if self._note.at is None or step <= self._passed:
                self._passed = max(self._passed, step)
                return False
            self._stopped_at = step
        return step >= self._stopped_at

    @property
    def is_on(self) -> bool:
        """Whether anybody may be told to stop."""
        return self._is_on

    @property
    def left_s(self) -> float | None:
        """Seconds of grace that are left, at least 0; None: nobody was told to stop."""
        noticed = None if self.stopping is None else self.stopping.noticed_at
        since = self._note.at if self._note.at is not None else noticed
        return None if since is None else max(0.0, since + self._grace_s - time.monotonic())

    @contextlib.contextmanager
    def in_time(self, step: int) -> Iterator[None]:
        """Around a save after the signal: says it when the grace ends before the block does; the process may be killed.

        Blocks: not for that.
        """
        left_s = self.left_s
        if left_s is None:
            yield
            return
        timer = threading.Timer(left_s, self._say_late, (step,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # can't start new thread: the save counts, not what is said of it
            _log.warning("told to stop: nobody will say if step %d is not staged in time: %s", step, error)
            yield
            return
        try:
            yield
        finally:
            timer.cancel()
            timer.join(1.0)

    def _say_late(self, step: int) -> None:
        if self._late == step:
            return
        self._late = step
        _log.error(
            "told to stop: step %d is not staged within %g s of grace; it is lost if this process ends now",
            step,
            self._grace_s,
        )

    def see_staged(self, handle: SaveHandle) -> bool:
        """Wait until the last save is staged: the worker does the rest. Says so if it is not in time, or has failed.

        Returns:
            Whether it is staged.

        Blocks: at most for what is left of `grace_s`.
        """
        # IMPORTANT: `done` says whether it has ended, and not the class of an error: what a save fails with may be a
        # TimeoutError itself, and the one of Python 3.10's futures is another class.
        concurrent.futures.wait([handle.staged], self.left_s or 0.0)
        if not handle.staged.done():
            self._say_late(handle.step)
            return False
        error = handle.staged.exception(0)
        if error is not None:
            _log.error("told to stop: step %d could not be staged, an earlier one stays: %s", handle.step, error)
            return False
        _log.warning("told to stop: step %d is staged; the worker finishes it, also without this process", handle.step)
        return True

    def close(self) -> None:
        """Put the signal handlers back. Twice is fine; does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._note.restore()


class RunPreemption:
    """Preemption of a training that a framework runs: all ranks of the default process group stop after one step.

    A context manager around one training, in the main thread. No step has a collective, and none waits for another
    rank, before one is told.

    Args:
        signals: What tells.

    Raises:
        SignalHandlerError: This is not the main thread.
        ConfigError: No signal.
    """

    def __init__(self, signals: int | Iterable[int]) -> None:
        rank = find_rank_info(None) if has_other_ranks() else RankInfo(0, 1)

        def find() -> Exchange:
            found = find_exchange(rank)
            if found is None:
                raise SaveFailedError("the process group has no store to agree in", code="exchange")
            return found

        self._rendezvous = Rendezvous(rank, find, f"training-{next(_NUMBERS) if rank.world_size > 1 else 0}")
        self._preemption = Preemption(signals, GRACE_S, rank.world_size, self._rendezvous.hurry)
        self._rendezvous.prepare(self._preemption.stopping, None)

    def at(self, step: int) -> bool:
        """Whether the ranks stop after `step`, or have stopped before it. Every rank asks, after every step.

        Raises:
            PlanTimeoutError: A rank was told to stop, and others do not say how far they are.

        Blocks: as `CheckpointManager.reached_preemption`.
        """
        return self._preemption.at(step)

    def __enter__(self) -> RunPreemption:
        # Before the first step, which may take longer than the others wait: this rank can say that it has passed none.
        self._rendezvous.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._rendezvous.close()
        finally:
            self._preemption.close()
