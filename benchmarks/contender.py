"""What a way to checkpoint a training loop is made of, ours or another."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.training import Loop


class Saved(NamedTuple):
    """A save that has begun: `staged` is done when the state may change, `written` when its files are written."""

    staged: Future[Any]
    written: Future[Any]


class Contender:
    """One way. Made once in a process, before the loop's first save.

    Attributes:
        fsyncs: Whether what it reports as written has been flushed to the disk.
        verifies: Whether a load would notice a changed byte.
        outlives: Whether a save that has begun is finished when the trainer is killed.
        fresh: Which of `loads` is measured first, while the files have never been read: the one that reads them.
    """

    fsyncs = verifies = outlives = False
    fresh = ""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def save(self, path: Path, state: dict[str, Any]) -> Saved:
        """Begin to save the loop's state, which the caller has just asked it for."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Load into the loop's model and optimizer."""
        raise NotImplementedError

    def loads(self) -> dict[str, Callable[[Path], None]]:
        """Return ways to load what it saves, by name; its own has an empty one."""
        return {"": self.load}

    def prepare(self) -> float | None:
        """Do before the first save what it would do once; returns the seconds, None for one that has no such call."""
        return None

    def close(self) -> None:
        """End what it has started."""


def done() -> Future[Any]:
    """Return a future that has ended."""
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def remove(path: Path) -> None:
    """Remove a checkpoint, whatever it is made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.rmtree(path, ignore_errors=True)
