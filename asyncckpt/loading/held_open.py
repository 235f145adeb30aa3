"""A checkpoint that is read bit by bit: from disk where it is committed, else from memory that is held meanwhile."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from asyncckpt.errors import AsyncCkptError, SnapshotUnavailableError
from asyncckpt.loading.overwritten import read_of_one_save
from asyncckpt.loading.staged_bytes import ABSENT, Bytes, NotHere, staged_bytes, unavailable, with_hint
from asyncckpt.recall.held import MappedSnapshot
from asyncckpt.storage.files import Files


class Held:
    """A snapshot in memory that stays open for many reads. Safe to use from several threads: they take turns."""

    def __init__(self, stack: contextlib.ExitStack, mapped: MappedSnapshot) -> None:
        self._mapped, self._lock = mapped, threading.RLock()
        self._end = weakref.finalize(self, stack.close)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Surround a read.

        Raises:
            SnapshotUnavailableError: A living trainer has used its memory for another save; or it was closed.
        """
        with self._lock:
            if not self._end.alive:
                text = f"{self._mapped.snapshot.path}: the checkpoint in memory was closed"
                raise SnapshotUnavailableError(text, path=self._mapped.snapshot.path, detail="closed")
            with self._mapped.reading():
                yield

    def close(self) -> None:
        """Unmap it, and let the worker go. Twice is fine."""
        with self._lock:
            self._end()


def open_from(path: str, source: str, endpoint: str | None, files: Files) -> tuple[Bytes, Held | None]:
    """Return what is at `path`, to be read bit by bit: what is committed from disk, else what is staged from memory.

    Args:
        path, source, endpoint, files: As `read_from` has them.

    Returns:
        The bytes, and what keeps them there if they are in memory.

    Raises:
        SnapshotUnavailableError, AsyncCkptError, OSError: As `read_from`.
    """
    absent: AsyncCkptError | None = None
    if source != "memory":
        try:
            return read_of_one_save(path, files, lambda contents: Bytes(contents, files)), None
        except ABSENT as error:
            if source == "disk":
                raise with_hint(error, path, endpoint) from error.__cause__
            absent = error
    with contextlib.ExitStack() as stack:
        try:
            found, mapped = stack.enter_context(staged_bytes(path, source, endpoint, files))
        except NotHere as why:
            raise absent or unavailable(path, why) from why
        return found, Held(stack.pop_all(), mapped)
