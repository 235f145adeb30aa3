"""Preemption: stops a training at one step on all ranks, after a signal or a call of `request` on any rank."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import Exchange
from asyncckpt.distributed.process_group import find_exchange, find_rank_info, has_other_ranks
from asyncckpt.errors import ConfigError, SaveFailedError, SignalHandlerError
from asyncckpt.manager.save_policy import check_seconds
from asyncckpt.manager.step_agreement import BEFORE_ALL, StepCoordinator, StopAgreement
from asyncckpt.save_handle import SaveHandle

_TEXTS = ("DataLoader worker (pid", "Pin memory thread exited unexpectedly", "unable to open shared memory object")
"""First words of torch's RuntimeErrors about dead DataLoader workers."""

_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)
"""Errors of reading a batch that a DataLoader worker had sent only in part when it died."""

_DATASET_ERROR = "in DataLoader worker process"
"""Text in the message of an error that a live DataLoader worker has raised and sent: a mistake in the data set."""

_TORCH_HANDLER = "torch.utils.data._utils.signal_handling"


def had_dataloader_workers() -> bool:
    """Return whether a DataLoader of this process has started workers. Cheap."""
    handling = sys.modules.get(_TORCH_HANDLER)
    return handling is not None and bool(getattr(handling, "_SIGCHLD_handler_set", True))


def is_from_killed_dataloader_workers(error: BaseException) -> bool:
    """Return whether `error` was raised while a batch was fetched, because workers of that DataLoader have died."""
    iterators = [found for code, frame in _frames_of(error) if (found := _iterator_at(code, frame)) is not None]
    if not iterators or _DATASET_ERROR in str(error):
        return False
    is_known = isinstance(error, _CUT_OFF) or (type(error) is RuntimeError and str(error).startswith(_TEXTS))
    return is_known and any(not one.is_alive() for iterator in iterators for one in getattr(iterator, "_workers", ()))


def _frames_of(error: BaseException) -> Iterator[tuple[CodeType, FrameType]]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_code, frame


def _iterator_at(code: CodeType, frame: FrameType) -> Any:
    """Return the DataLoader's iterator if `frame` runs its `__next__`, else None. Also for torchdata's classes."""
    if code.co_name != "__next__":
        return None
    found = frame.f_locals.get("self")
    return found if any(one.__name__ == "_BaseDataLoaderIter" for one in type(found).__mro__) else None


def _is_fetching(frame: FrameType | None) -> bool:
    while frame is not None:
        if _iterator_at(frame.f_code, frame) is not None:
            return True
        frame = frame.f_back
    return False


class DataLoaderDeathFilter:
    """Suppresses errors of torch's SIGCHLD handler about dead DataLoader workers, unless a batch is being fetched.

    No error is lost: fetching the next batch raises one for the same workers. Used in the main thread and in signal
    handlers.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def install(self) -> None:
        """Replace torch's handler, if there is one. Takes no lock. Idempotent."""
        found = signal.getsignal(signal.SIGCHLD)
        if self._before is None and callable(found) and getattr(found, "__module__", "") == _TORCH_HANDLER:
            self._before = found
            signal.signal(signal.SIGCHLD, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before
        if before is None:
            return
        try:
            before(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_TEXTS) or _is_fetching(frame):
                raise

    def uninstall(self) -> None:
        """Put torch's handler back, unless another one was installed since. Idempotent."""
        before = self._before
        if before is not None and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, before)
        self._before = None


_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_log = logging.getLogger("asyncckpt")


def checked_signals(given: int | Iterable[int] | None) -> tuple[signal.Signals, ...]:
    """Return `given`, a signal or several, as a tuple without duplicates; None gives an empty one.

    Raises:
        ConfigError: Not a signal, or one that no process can handle.
    """
    listed = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    try:
        found = tuple(dict.fromkeys(signal.Signals(one) for one in listed))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"preemption_signal={given!r}: {error}", field="preemption_signal") from error
    for one in found:
        if one in _UNCATCHABLE:
            raise ConfigError(f"{one.name} cannot be handled by any process", field="preemption_signal", value=one.name)
    return found


class SignalRecorder:
    """Records when the first of some signals arrived. Its handlers are installed from `install` to `restore`.

    The handler that was installed before is called as well, unless it is a default one that ends the process, since
    preemption delays that end. In two cases only the earlier handler is called, and nothing is delayed: in a forked
    child (a pool may end its children by SIGTERM), and if `restore` could not remove this handler, because another one
    was installed later or `restore` ran outside of the main thread.

    IMPORTANT: the handler takes no lock and writes no log, as it may interrupt code that holds a lock.

    Attributes:
        received_at: `time.monotonic()` when the signal arrived; None: it has not.
    """

    def __init__(self) -> None:
        self.received_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._is_over = False
        self._death_filter = DataLoaderDeathFilter()

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals.

        Raises:
            SignalHandlerError: Called outside of the main thread, in which alone Python can install handlers.
        """
        wanted = list(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            names = ", ".join(one.name for one in wanted)
            raise SignalHandlerError(
                f"a handler for {names} can be installed in the main thread only, and this is thread "
                f"{threading.current_thread().name!r}; make the manager in the main thread, or call its preempt() from "
                "your own handler",
                signal=names,
            )
        for one in wanted:
            self._before[one] = signal.getsignal(one)
            signal.signal(one, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        # If a recorder that was installed later calls this handler, do not end the process.
        if os.getpid() != self._pid or (self._is_over and self._is_in_place(number)):
            self._call_earlier(before, number, frame)
            return
        if self.received_at is None and not self._is_over:
            self.received_at = time.monotonic()
            self._death_filter.install()
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_in_place(self, number: int) -> bool:
        return signal.getsignal(number) == self._handle  # not `is`: each access makes a new bound method

    @staticmethod
    def _call_earlier(before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Put the earlier handlers back, where this one is still installed. Idempotent."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            self._death_filter.uninstall()
        for one, before in list(self._before.items()):
            if self._is_in_place(one) and before is not None:
                with contextlib.suppress(
                    ValueError
                ):  # not the main thread: the handler stays, and calls the earlier one
                    signal.signal(one, before)
                    del self._before[one]
            else:
                _log.debug("the handler of %s has been replaced since; it stays", one.name)


GRACE_S = 25.0
"""Seconds for which the ranks of a `FrameworkPreemption` wait for each other; the default of `CheckpointManager`."""

_NUMBERS = itertools.count()
"""Numbers of the `FrameworkPreemption`s in this process; all ranks make them in the same order."""


class Preemption:
    """Records whether the training was asked to stop, and decides the step at which it stops. For the training thread.

    Args:
        signals: A signal, or several, that ask to stop; empty: only `request` does; None: preemption is off.
        grace_s: Seconds after the request within which a save must be staged.
        world_size: Number of ranks.
        poll_often: As for `StopAgreement`.

    Attributes:
        stopping: Agreement of several ranks on the step; None: there is one rank, or preemption is off.

    Raises:
        ConfigError: `signals` holds something else than signals, or `grace_s` is not positive.
        SignalHandlerError: There are signals, and this is not the main thread.
    """

    def __init__(
        self, signals: int | Iterable[int] | None, grace_s: float, world_size: int, poll_often: Callable[[], None]
    ) -> None:
        if grace_s is None:
            raise ConfigError("grace_s=None: expected seconds above 0", field="grace_s")
        check_seconds("grace_s", grace_s)
        self._is_on, self._grace_s = signals is not None, grace_s
        self._recorder, self._pid = SignalRecorder(), os.getpid()
        self.stopping: StopAgreement | None = None
        if self._is_on and world_size > 1:
            self.stopping = StopAgreement(world_size, lambda: self._recorder.received_at, poll_often, grace_s)
        self._passed = BEFORE_ALL
        self._stopped_at: int | None = None
        self._late: int | None = None
        self._recorder.install(checked_signals(signals))

    def request(self) -> None:
        """Ask to stop, as a signal does. May be called in a signal handler, and in any thread.

        Raises:
            ConfigError: Preemption is off (`preemption_signal=None`).
        """
        if not self._is_on:
            raise ConfigError(
                "preemption is off: make the manager with preemption_signal=signal.SIGTERM, or () for preempt() only",
                field="preemption_signal",
            )
        if self._recorder.received_at is None:
            self._recorder.received_at = time.monotonic()

    def stops_at(self, step: int) -> bool:
        """Whether the ranks stop at `step`, or have stopped before it; as `StopAgreement.stops_at`."""
        if not self._is_on:
            return False
        if self.stopping is not None:
            return self.stopping.stops_at(step)
        if self._stopped_at is None:
            # The answer for a step must not change from False to True: the training may have continued after it.
            if self._recorder.received_at is None or step <= self._passed:
                self._passed = max(self._passed, step)
                return False
            self._stopped_at = step
        return step >= self._stopped_at

    @property
    def is_on(self) -> bool:
        """Whether preemption is on."""
        return self._is_on

    @property
    def grace_left_s(self) -> float | None:
        """Seconds of grace that are left, at least 0; None: the training was not asked to stop."""
        noticed = None if self.stopping is None else self.stopping.stop_seen_at
        since = self._recorder.received_at if self._recorder.received_at is not None else noticed
        return None if since is None else max(0.0, since + self._grace_s - time.monotonic())

    @contextlib.contextmanager
    def log_if_late(self, step: int) -> Iterator[None]:
        """Log an error if the grace time ends before the `with` block does: the process may then be killed.

        Does nothing if the training was not asked to stop.
        """
        left_s = self.grace_left_s
        if left_s is None:
            yield
            return
        timer = threading.Timer(left_s, self._log_late, (step,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:  # can't start new thread: the save matters more than the message
            _log.warning(
                "preemption: no timer could be started that would log if step %d is not staged in time: %s",
                step,
                error,
            )
            yield
            return
        try:
            yield
        finally:
            timer.cancel()
            timer.join(1.0)

    def _log_late(self, step: int) -> None:
        if self._late == step:
            return
        self._late = step
        _log.error(
            "preemption: step %d was not staged within the grace time of %g s; it is lost if this process ends now",
            step,
            self._grace_s,
        )

    def await_staged(self, handle: SaveHandle) -> bool:
        """Wait until a save is staged: from then on the worker finishes it. Logs the outcome.

        Returns:
            Whether the save is staged.

        Blocks: at most for what is left of `grace_s`.
        """
        # IMPORTANT: use `done` to find out whether the wait timed out: a save may fail with a TimeoutError itself, and
        # in Python 3.10 the TimeoutError of futures is another class.
        concurrent.futures.wait([handle.staged], self.grace_left_s or 0.0)
        if not handle.staged.done():
            self._log_late(handle.step)
            return False
        error = handle.staged.exception(0)
        if error is not None:
            _log.error(
                "preemption: step %d could not be staged; the newest earlier checkpoint stays: %s",
                handle.step,
                error,
            )
            return False
        _log.warning("preemption: step %d is staged; the worker writes it even if this process ends", handle.step)
        return True

    def close(self) -> None:
        """Put the signal handlers back. Idempotent; does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._recorder.restore()


class FrameworkPreemption:
    """Preemption of a training loop that a framework runs: all ranks of the default process group stop after one step.

    A context manager around one training, in the main thread. Until a rank is asked to stop, no step runs a collective
    or waits for another rank.

    Args:
        signals: A signal, or several, that ask to stop.

    Raises:
        SignalHandlerError: This is not the main thread.
        ConfigError: `signals` holds something else than signals.
    """

    def __init__(self, signals: int | Iterable[int]) -> None:
        rank = find_rank_info(None) if has_other_ranks() else RankInfo(0, 1)

        def find() -> Exchange:
            found = find_exchange(rank)
            if found is None:
                raise SaveFailedError(
                    "preemption: the ranks cannot agree on a step, since the process group has no store",
                    code="exchange",
                )
            return found

        self._coordinator = StepCoordinator(rank, find, f"training-{next(_NUMBERS) if rank.world_size > 1 else 0}")
        self._preemption = Preemption(signals, GRACE_S, rank.world_size, self._coordinator.poll_often)
        self._coordinator.prepare(self._preemption.stopping, None)

    def stops_at(self, step: int) -> bool:
        """Return whether the ranks stop after `step`, or an earlier one. Call it on every rank, after every step.

        Raises:
            PlanTimeoutError: A rank was asked to stop, and other ranks did not report their step in time.

        Blocks: as `CheckpointManager.reached_preemption`.
        """
        return self._preemption.stops_at(step)

    def __enter__(self) -> FrameworkPreemption:
        # Start before the first step, which may take longer than other ranks wait: the poller reports that it has not
        # ended.
        self._coordinator.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._coordinator.close()
        finally:
            self._preemption.close()
