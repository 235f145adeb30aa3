"""Where a load reads from: the worker's memory if that holds the requested checkpoint, else the disk.

A checkpoint is requested by its path. The committed manifest at that path determines the save. Only if nothing is
committed there, the newest snapshot that all ranks have staged for the path is used. So all ranks choose the same save
without communication: path and save ID identify the content.

A checkpoint may be overwritten while it is read. Then the load starts again with the new one, so that all that is read
belongs to one save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from asyncckpt import __version__
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    PlanTimeoutError,
    SnapshotUnavailableError,
)
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import owner_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.recall.mapped_snapshot import MappedSnapshot
from asyncckpt.recall.memory_overlay import OverlaidFiles, staged_contents
from asyncckpt.recall.session import RecallSession, is_served
from asyncckpt.recall.snapshots import ANSWER_S, HeldSnapshot, endpoint_of, held_snapshots, snapshots_of
from asyncckpt.storage.checkpoint_dir import manifest_if_readable
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over

SOURCES = ("auto", "memory", "disk")

LONG_ANSWER_S = 10.0
"""How long to wait for the worker's answer if the checkpoint is not on disk. Chosen: the limit that docs/guarantees.md
(P6) promises for a worker that hangs."""

MAX_ATTEMPTS = 10
"""A read gives up after this many saves in a row have overwritten what it was reading. Chosen, not measured."""

ABSENT = (CheckpointNotFoundError, CheckpointNotCommittedError)
T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.loading")


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A checkpoint, and where its bytes are.

    Attributes:
        contents: Manifest, indexes and structures of the checkpoint.
        files: The storage seam, through which its files are read.
        has_checksums: Whether there are checksums of the bytes.
    """

    contents: Contents
    files: Files
    has_checksums: bool = True


Use = Callable[[ReadSource], T]


@dataclass(slots=True)
class RetryState:
    """State of several reads into one target, of which the earlier ones may have failed.

    Attributes:
        touched: FQNs of the target that have been filled, at least in part, by one of these reads.
        manifest: Manifest of the checkpoint that was read last.
        undo_growth: Functions that give containers of the target the members of before these reads, the oldest first.
    """

    touched: set[str] = field(default_factory=set)
    manifest: Manifest | None = None
    undo_growth: list[Callable[[], None]] = field(default_factory=list)

    def shrink_containers(self) -> None:
        """Give containers of the target the members of before these reads.

        IMPORTANT: call it before the target is matched again. Otherwise members that an abandoned read has put into an
        empty container are members of the target, and stay if the next checkpoint lacks them.
        """
        while self.undo_growth:
            self.undo_growth.pop()()


class NotInMemory(Exception):
    """No worker holds the checkpoint in its memory; the text says why.

    Attributes:
        snapshot: The snapshot that was found and cannot be used, if any.
    """

    def __init__(self, why: str, snapshot: HeldSnapshot | None = None) -> None:
        super().__init__(why)
        self.snapshot = snapshot


def check_source(source: str) -> str:
    """Return `source`.

    Raises:
        ConfigError: It is none of `SOURCES`.
    """
    if source not in SOURCES:
        raise ConfigError(f"source={source!r}: expected one of {SOURCES}", field="source", value=repr(source))
    return source


def read_from_source(
    path: str,
    source: str,
    endpoint: str | None,
    files: Files,
    use: Use[T],
    *,
    once: bool = False,
) -> T:
    """Call `use` with the checkpoint at `path`, and return its result.

    Args:
        path: Absolute path of the checkpoint.
        source: One of `SOURCES`.
        endpoint: The worker's endpoint; None: of this user's worker of this job.
        files: The storage seam.
        use: Reads the checkpoint. It is called again with another source if the first one turns out to be incomplete.
        once: Whether `use` must not be called again. A committed checkpoint is then read from disk.

    Raises:
        SnapshotUnavailableError: `source` is "memory", and the worker does not hold the checkpoint.
        AsyncCkptError, OSError: Reading or `use` failed.

    Blocks: for the worker's answer, if there is a worker: at most `ANSWER_S` for each of two answers, or
        `LONG_ANSWER_S` if the checkpoint is not on disk; and for `use`.
    """
    if source == "memory":
        return _read_uncommitted(path, source, endpoint, files, use, None)
    if source == "auto" and not once and is_served(endpoint_of(endpoint)):
        committed_save = manifest_if_readable(path, store_over(files))
        if committed_save is not None:
            with contextlib.suppress(NotInMemory):
                return _read_committed(path, str(committed_save.save_id), endpoint, files, use)
    try:
        if once:
            return use(ReadSource(read_any(path, files), files))
        return read_consistent(path, files, lambda contents: use(ReadSource(contents, files)))
    except ABSENT as error:
        if source == "disk":
            raise _with_memory_hint(error, path, endpoint) from error.__cause__
        return _read_uncommitted(path, source, endpoint, files, use, error)


def read_consistent(path: str, files: Files, use: Callable[[Contents], T]) -> T:
    """Call `use` with the checkpoint at `path` on disk, and return its result. Retry if another save replaces it.

    Raises:
        AsyncCkptError, OSError: `read_any` or `use` failed.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return use(read_any(path, files))
        except CorruptCheckpointError as error:
            owner = owner_of(error.file or "")
            committed_save = manifest_if_readable(path, store_over(files)) if owner is not None else None
            # A file of the save that is committed now is not missing because of an overwrite: it is damaged.
            if owner is None or committed_save is None or committed_save.save_id == owner or attempt == MAX_ATTEMPTS:
                raise
            _logger.info(
                "%s was overwritten by save %s while it was read: reading the new one", path, committed_save.save_id
            )
    raise AssertionError("the last attempt returns or raises")


def _read_committed(path: str, save_id: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    """Read a committed checkpoint: from memory what the worker holds, else from disk. All blocks are verified.

    Raises:
        NotInMemory: The worker holds nothing of it, or its memory cannot be read.
    """
    with _hold_snapshots(path, endpoint, ANSWER_S) as (worker, found):
        mine = [s for s in found if str(s.save_id) == save_id]
        if not mine:
            raise NotInMemory(f"it holds save {found[0].save_id}")
        try:
            with MappedSnapshot(mine[0], worker.worker.pid) as mapped:
                overlaid = OverlaidFiles(files, mapped.staged)
                contents = read_any(path, overlaid)
                if str(contents.manifest.save_id) != save_id:
                    raise NotInMemory(f"{path} was overwritten meanwhile")
                overlaid.use_origins(contents)
                with mapped.reading():
                    result = use(ReadSource(contents, overlaid))
        except PlanTimeoutError:  # a subclass of OSError, but it means that another rank does not answer
            raise
        except (*ABSENT, CorruptCheckpointError, SnapshotUnavailableError, OSError) as error:
            _logger.info("%s is read from disk, since its snapshot in memory cannot be read: %s", path, error)
            raise NotInMemory(str(error)) from error
        _logger.info("%s was loaded from the worker's memory (ranks %s)", path, _ranks(mine[0]))
        return result


def _read_uncommitted(
    path: str, source: str, endpoint: str | None, files: Files, use: Use[T], absent: AsyncCkptError | None
) -> T:
    """Call `use` with the newest snapshot that all ranks have staged, and return its result.

    Args:
        path, source, endpoint, files, use: The arguments of `read_from_source`.
        absent: The error by which the checkpoint cannot be read from disk; None: the disk was not tried.

    Raises:
        AsyncCkptError: `absent`, if the worker does not hold the checkpoint either.
        SnapshotUnavailableError: The worker does not hold it, and `absent` is None; or its trainer has used the memory
            for another save during the read.
    """
    try:
        with _staged_source(path, source, endpoint, files) as (found, mapped), mapped.reading():
            return use(found)
    except NotInMemory as why:
        if absent is None:
            raise _not_in_memory_error(path, why) from why
        _logger.debug("%s: not in the memory of a worker either: %s", path, why)
        raise absent from absent.__cause__


class HeldSnapshotReader:
    """A snapshot in memory that stays open for many reads. Thread-safe: one read at a time."""

    def __init__(self, stack: contextlib.ExitStack, mapped: MappedSnapshot) -> None:
        self._mapped, self._lock = mapped, threading.RLock()
        self._end = weakref.finalize(self, stack.close)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context manager for one read.

        Raises:
            SnapshotUnavailableError: The snapshot's trainer has used the memory for another save; or this was closed.
        """
        with self._lock:
            if not self._end.alive:
                text = f"{self._mapped.snapshot.path}: the checkpoint in memory was closed"
                raise SnapshotUnavailableError(text, path=self._mapped.snapshot.path, detail="closed")
            with self._mapped.reading():
                yield

    def close(self) -> None:
        """Unmap the snapshot, and let the worker release it. May be called twice."""
        with self._lock:
            self._end()


def open_source(
    path: str, source: str, endpoint: str | None, files: Files
) -> tuple[ReadSource, HeldSnapshotReader | None]:
    """Return a source for many small reads: the checkpoint on disk, else the snapshot in memory.

    Args:
        path, source, endpoint, files: The arguments of `read_from_source`.

    Returns:
        The source; and, if it is in memory, the reader that keeps it there.

    Raises:
        SnapshotUnavailableError, AsyncCkptError, OSError: The same as from `read_from_source`.
    """
    absent: AsyncCkptError | None = None
    if source != "memory":
        try:
            return read_consistent(path, files, lambda contents: ReadSource(contents, files)), None
        except ABSENT as error:
            if source == "disk":
                raise _with_memory_hint(error, path, endpoint) from error.__cause__
            absent = error
    with contextlib.ExitStack() as stack:
        try:
            found, mapped = stack.enter_context(_staged_source(path, source, endpoint, files))
        except NotInMemory as why:
            raise absent or _not_in_memory_error(path, why) from why
        return found, HeldSnapshotReader(stack.pop_all(), mapped)


@contextlib.contextmanager
def _hold_snapshots(
    path: str, endpoint: str | None, answer_s: float
) -> Iterator[tuple[RecallSession, list[HeldSnapshot]]]:
    """Ask the worker for snapshots of a path; it keeps them during the `with` block.

    Raises:
        NotInMemory: There is no worker, or it does not answer, or it holds no snapshot of this path.
    """
    with contextlib.ExitStack() as stack:
        try:
            worker = stack.enter_context(RecallSession(endpoint_of(endpoint), __version__, answer_s))
            found = [s for s in snapshots_of(worker.recall(path, hold=True).parts) if s.path == path]
        except AsyncCkptError as error:
            raise NotInMemory(str(error)) from error
        if not found:
            raise NotInMemory("it holds no snapshot of this path")
        yield worker, found


@contextlib.contextmanager
def _staged_source(
    path: str, source: str, endpoint: str | None, files: Files
) -> Iterator[tuple[ReadSource, MappedSnapshot]]:
    """Map the newest snapshot of a path that all ranks have staged, whether its save was committed or not.

    Raises:
        NotInMemory: There is none, or parts of it are missing.
    """
    with _hold_snapshots(path, endpoint, LONG_ANSWER_S) as (worker, found), contextlib.ExitStack() as stack:
        newest = next((s for s in found if s.complete), found[0])
        if not newest.complete:
            raise NotInMemory(f"it lacks ranks {newest.missing[:20]} of save {newest.save_id}", newest)
        committed_save = manifest_if_readable(path, store_over(files))
        is_same = committed_save is not None and committed_save.save_id == newest.save_id
        if source == "auto" and committed_save is not None and not is_same:
            raise NotInMemory(f"save {committed_save.save_id} was committed meanwhile")
        try:
            mapped = stack.enter_context(MappedSnapshot(newest, worker.worker.pid))
        except SnapshotUnavailableError as error:
            raise NotInMemory(str(error), newest) from error
        state = "committed" if is_same else "not committed"
        _logger.info("%s: save %s, %s, is loaded from the worker's memory", path, newest.save_id, state)
        yield _source_of(mapped, files, committed=is_same), mapped


def _source_of(mapped: MappedSnapshot, files: Files, *, committed: bool) -> ReadSource:
    """Return a staged snapshot as a source; with the checksums from the index on disk if it was committed."""
    overlaid = OverlaidFiles(files, mapped.staged)
    if committed:
        try:
            contents = read_any(mapped.staged.path, overlaid)
            if contents.manifest.save_id == mapped.staged.save_id:
                overlaid.use_origins(contents)
                return ReadSource(contents, overlaid)
        except (AsyncCkptError, OSError) as error:
            _logger.info("%s: its checksums are not compared, since they cannot be read: %s", mapped.staged.path, error)
    return ReadSource(staged_contents(mapped.staged), overlaid, has_checksums=False)


def _not_in_memory_error(path: str, why: NotInMemory) -> SnapshotUnavailableError:
    return SnapshotUnavailableError(
        f"{path} is not in the memory of a worker: {why}; load it with source='auto' or 'disk'",
        path=path,
        save_id=None if why.snapshot is None else str(why.snapshot.save_id),
        missing_ranks=None if why.snapshot is None else why.snapshot.missing,
        detail=str(why),
    )


def _with_memory_hint(error: AsyncCkptError, path: str, endpoint: str | None) -> AsyncCkptError:
    """Return the error for a checkpoint that is not on disk; it says if the worker's memory holds it."""
    found = [s for s in held_snapshots(path, endpoint=endpoint) if s.path == path and s.complete]
    if not found:
        return error
    text = (
        f"{error.message}. The worker holds it in memory, as save {found[0].save_id} of step {found[0].step}: load it "
    )
    return type(error)(text + "with source='auto' or 'memory'", **error.facts())


def _ranks(snapshot: HeldSnapshot) -> str:
    shown = ", ".join(map(str, snapshot.ranks[:20]))
    return shown if snapshot.complete else f"{shown}; the others from disk"
