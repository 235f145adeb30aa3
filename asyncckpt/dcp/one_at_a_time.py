"""One save of a `StorageWriter` at a time, by one thread: the memory of one that goes on must not become another's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from asyncckpt.errors import ReentrantCallError
from asyncckpt.uninterrupted import uninterrupted


class OneAtATime:
    """See the module. One per writer."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._at_work = threading.Lock()
        self._owner: int | None = None
        self._pid = os.getpid()

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Surround what ends the save before; from here the save is this thread's.

        Raises:
            ReentrantCallError: A step of that is under way.
        """
        with self._step():
            self._owner = threading.get_ident()
            yield

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Surround a step of the save.

        Raises:
            ReentrantCallError: Another thread has begun another one, or closed the writer; or is in a step.
        """
        self._leave_parents_save()
        if self._owner not in (None, threading.get_ident()):
            raise ReentrantCallError(
                "another thread has begun a save with this StorageWriter, or closed it, before this one was over; this "
                "one has ended, and nothing of it was published. Use a writer for each save that overlaps another"
            )
        with self._step():
            yield

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._leave_parents_save()
        taken = False
        try:
            with uninterrupted():  # a signal between the two halves of it would leave the lock taken for ever
                taken = self._at_work.acquire(blocking=False)
            if not taken:
                raise ReentrantCallError(
                    "a save with this StorageWriter is being staged or committed: wait for its end (of "
                    "`dcp.async_save`, for its future), or use another writer; that save goes on"
                )
            yield
        finally:
            if taken:
                self._at_work.release()

    def _leave_parents_save(self) -> None:
        """In a forked child nobody goes on with the save that was under way."""
        if os.getpid() != self._pid:
            self._forget()
