"""Being told to stop: by a signal, by another rank, or by the program itself."""

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
from asyncckpt.distributed.process_group import find_exchange, find_rank_info, has_other_ranks
from asyncckpt.distributed.rendezvous import Exchange
from asyncckpt.errors import ConfigError, SaveFailedError, SignalHandlerError
from asyncckpt.manager.save_policy import check_seconds
from asyncckpt.manager.step_agreement import BEFORE_ALL, Rendezvous, Stopping
from asyncckpt.save_handle import SaveHandle

_TEXTS = ("DataLoader worker (pid", "Pin memory thread exited unexpectedly", "unable to open shared memory object")
"""How torch's RuntimeErrors for dead workers begin."""

_CUT_OFF = (ConnectionError, EOFError, FileNotFoundError)
"""What reading a batch raises that a worker had only partly sent when it died."""

_OF_A_DATASET = "in DataLoader worker process"
"""In the message of an error that a worker raised itself and sent here: a mistake in the user's data set."""

_TORCH_HANDLER = "torch.utils.data._utils.signal_handling"


def have_been_started() -> bool:
    """Whether a DataLoader of this process has had workers. Takes no time."""
    handling = sys.modules.get(_TORCH_HANDLER)
    return handling is not None and bool(getattr(handling, "_SIGCHLD_handler_set", True))


def is_of_killed_workers(error: BaseException) -> bool:
    """Whether `error` was raised while a batch was fetched, because workers of that DataLoader are dead."""
    iterators = [found for code, frame in _frames_of(error) if (found := _iterator_at(code, frame)) is not None]
    if not iterators or _OF_A_DATASET in str(error):
        return False
    is_known = isinstance(error, _CUT_OFF) or (type(error) is RuntimeError and str(error).startswith(_TEXTS))
    return is_known and any(not one.is_alive() for iterator in iterators for one in getattr(iterator, "_workers", ()))


def _frames_of(error: BaseException) -> Iterator[tuple[CodeType, FrameType]]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame.f_code, frame


def _iterator_at(code: CodeType, frame: FrameType) -> Any:
    """Return the DataLoader's iterator of which `frame` is the `__next__`; torchdata has classes of the same names."""
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


class DeferredDeaths:
    """Suppresses what torch's SIGCHLD handler raises while no batch is fetched. Used in the main thread and handlers.

    Nothing is lost by that: fetching the next batch raises for the same dead workers.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def begin(self) -> None:
        """Replace torch's handler, if it is installed. Takes no lock. Twice is fine."""
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

    def end(self) -> None:
        """Put torch's handler back, unless another one was installed meanwhile. Twice is fine."""
        before = self._before
        if before is not None and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, before)
        self._before = None


_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_log = logging.getLogger("asyncckpt")


def signals_of(given: int | Iterable[int] | None) -> tuple[signal.Signals, ...]:
    """Return what a user means by a signal, or several.

    Raises:
        ConfigError: No signal, or one that nobody can handle.
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


class SignalNote:
    """Notes when the first of some signals came. The handlers are in place from `install` to `restore`.

    The handler that was there before is called as well, unless it is one that ends the process: that is what is put
    off. In a forked child (of a pool, say, that ends its children by SIGTERM) nothing is put off: it does what was
    there before; and so it does where `restore` could not take it away, since another note was made later, or was not
    in the main thread. IMPORTANT: the handler takes no lock and writes no log: it may interrupt whoever holds one.

    Attributes:
        at: `time.monotonic()` when it came; None: it has not.
    """

    def __init__(self) -> None:
        self.at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._is_over = False
        self._deaths = DeferredDeaths()

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals.

        Raises:
            SignalHandlerError: Not in the main thread, where alone Python sets handlers.
        """
        wanted = list(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            names = ", ".join(one.name for one in wanted)
            raise SignalHandlerError(
                f"a handler for {names} can be set in the main thread only, and this is "
                f"{threading.current_thread().name!r}; make the manager there, or call its preempt() from a handler "
                "of your own",
                signal=names,
            )
        for one in wanted:
            self._before[one] = signal.getsignal(one)
            signal.signal(one, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        # A note that was made later and still counts calls this one, too: then nothing ends the process.
        if os.getpid() != self._pid or (self._is_over and self._is_in_place(number)):
            self._leave_to(before, number, frame)
            return
        if self.at is None and not self._is_over:
            self.at = time.monotonic()
            self._deaths.begin()
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_in_place(self, number: int) -> bool:
        return signal.getsignal(number) == self._handle  # a bound method is another object each time it is asked for

    @staticmethod
    def _leave_to(before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Put back what was there before, where this is still what is there. Twice is fine."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            self._deaths.end()
        for one, before in list(self._before.items()):
            if self._is_in_place(one) and before is not None:
                with contextlib.suppress(ValueError):  # not the main thread: it goes on passing them on
                    signal.signal(one, before)
                    del self._before[one]
            else:
                _log.debug("the handler of %s has been replaced since; it stays", one.name)


GRACE_S = 25.0
"""How long ranks of a `RunPreemption` wait for each other once they are told to stop; as `CheckpointManager` has it."""

_NUMBERS = itertools.count()
"""Of the `RunPreemption`s of several ranks in this process; all ranks make them in the same order."""


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
