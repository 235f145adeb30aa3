"""Workers of a torch DataLoader that a signal to the whole process group kills before this process has stopped.

SLURM, `timeout` and a terminal send the signal to the group. The workers die at once; this process is to continue to
the end of a step. torch raises for dead workers in two places: where a batch is fetched, and from its handler of
SIGCHLD, between any two bytecodes, also in the middle of an optimizer's step. After the signal the handler's errors are
suppressed except while a batch is fetched, where the training is between two steps. Imports no torch: where torch is
not loaded, there are no workers.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

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
