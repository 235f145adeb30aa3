"""Where a load takes its bytes from: the worker's memory, where that holds the very checkpoint, else the disk.

A checkpoint is asked for by its path. What is committed there says which save that is; only while nothing is, the
newest snapshot that all ranks have staged for the path stands in for it. So the answer is the same whoever asks, and
nobody needs to agree with anybody: a path and a save id name one content.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from asyncckpt import __version__
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    SnapshotUnavailableError,
)
from asyncckpt.foreign.kinds import read_any
from asyncckpt.loading.overwritten import read_of_one_save
from asyncckpt.recall.conversation import Conversation, is_served
from asyncckpt.recall.held import MappedSnapshot
from asyncckpt.recall.snapshots import ANSWER_S, HeldSnapshot, endpoint_of, held_snapshots, snapshots_of
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.staged_image import OverlaidFiles, staged_contents
from asyncckpt.storage.standing import standing_at

SOURCES = ("auto", "memory", "disk")
PATIENT_S = 10.0
"""For the worker's answer where the disk does not have it. Chosen: the promise for a worker that hangs (P6)."""

T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.loading")
_ABSENT = (CheckpointNotFoundError, CheckpointNotCommittedError)


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a load reads: its contents, the files that give the bytes, and whether they have checksums."""

    contents: Contents
    files: Files
    has_checksums: bool = True


Use = Callable[[Bytes], T]


def check_source(source: str) -> str:
    """Return `source`.

    Raises:
        ConfigError: It is none of `SOURCES`.
    """
    if source not in SOURCES:
        raise ConfigError(f"source={source!r}: expected one of {SOURCES}", field="source", value=repr(source))
    return source


def read_from(path: str, source: str, endpoint: str | None, files: Files, use: Use[T], *, once: bool = False) -> T:
    """Return what `use` makes of the checkpoint at `path`.

    Args:
        path: Absolute.
        source: One of `SOURCES`.
        endpoint: Of the worker; None: this user's of this job.
        files: The storage seam.
        use: Reads; called again, with other bytes, where the first ones turn out not to be there.
        once: `use` cannot be called again. Then what is committed is read from disk.

    Raises:
        SnapshotUnavailableError: `source` is "memory", and the worker does not hold it.
        AsyncCkptError, OSError: From reading and `use`.

    Blocks: for the worker's answer, where there is a worker: `ANSWER_S`, or `PATIENT_S` if the disk does not have it.
    """
    if source == "memory":
        return _from_memory(path, endpoint, files, use)
    if source == "auto" and not once and is_served(endpoint_of(endpoint)):
        standing = standing_at(path, files)
        if standing is not None:
            with contextlib.suppress(_NotHere):
                return _committed(path, str(standing.save_id), endpoint, files, use)
    try:
        return use(Bytes(read_any(path, files), files)) if once else _from_disk(path, files, use)
    except _ABSENT as error:
        if source == "disk":
            raise _with_hint(error, path, endpoint) from error.__cause__
        try:
            return _staged(path, source, endpoint, files, use)
        except _NotHere as why:
            _logger.debug("%s: not in the memory of a worker either: %s", path, why)
            raise error from None


class _NotHere(Exception):
    """Memory does not have it; says why. `snapshot`: what there is."""

    def __init__(self, why: str, snapshot: HeldSnapshot | None = None) -> None:
        super().__init__(why)
        self.snapshot = snapshot


def _from_disk(path: str, files: Files, use: Use[T]) -> T:
    return read_of_one_save(path, files, lambda contents: use(Bytes(contents, files)))


@contextlib.contextmanager
def _held(path: str, endpoint: str | None, answer_s: float) -> Iterator[tuple[Conversation, list[HeldSnapshot]]]:
    """Ask the worker, and have it hold what it has, for the time of a `with` block.

    Raises:
        _NotHere: There is no worker, or it does not answer, or it holds nothing of this path.
    """
    with contextlib.ExitStack() as stack:
        try:
            worker = stack.enter_context(Conversation(endpoint_of(endpoint), __version__, answer_s))
            found = [s for s in snapshots_of(worker.recall(path, hold=True).parts) if s.path == path]
        except AsyncCkptError as error:
            raise _NotHere(str(error)) from error
        if not found:
            raise _NotHere("it holds nothing of this path")
        yield worker, found


def _committed(path: str, save_id: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    """Read what is committed, as much of it as can be from memory; every block is verified as on disk.

    Raises:
        _NotHere: Nothing of it is there, or not what was promised.
    """
    with _held(path, endpoint, ANSWER_S) as (worker, found):
        mine = [s for s in found if str(s.save_id) == save_id]
        if not mine:
            raise _NotHere(f"it holds save {found[0].save_id}")
        try:
            with MappedSnapshot(mine[0], worker.worker.pid) as mapped:
                overlaid = OverlaidFiles(files, mapped.staged)
                contents = read_any(path, overlaid)
                if str(contents.manifest.save_id) != save_id:
                    raise _NotHere(f"{path} was overwritten meanwhile")
                result = use(Bytes(contents, overlaid))
                mapped.check()
        except (CorruptCheckpointError, SnapshotUnavailableError, OSError) as error:
            _logger.info("%s is read from disk: its snapshot in memory cannot be: %s", path, error)
            raise _NotHere(str(error)) from error
        _logger.info("%s: loaded from the worker's memory (ranks %s)", path, _ranks(mine[0]))
        return result


def _staged(path: str, source: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    """Read the newest snapshot of a path that all ranks have staged, wherever its save has got to.

    Raises:
        _NotHere: There is none, or not all of it.
        SnapshotUnavailableError: A living trainer has used its memory for another save, while it was read.
    """
    with _held(path, endpoint, PATIENT_S) as (worker, found):
        newest = found[0]
        if not newest.complete:
            raise _NotHere(f"it lacks ranks {newest.missing[:20]} of save {newest.save_id}", newest)
        standing = standing_at(path, files)
        is_same = standing is not None and standing.save_id == newest.save_id
        if source == "auto" and standing is not None and not is_same:
            raise _NotHere(f"save {standing.save_id} was committed meanwhile")
        with contextlib.ExitStack() as stack:
            try:
                mapped = stack.enter_context(MappedSnapshot(newest, worker.worker.pid))
            except SnapshotUnavailableError as error:
                raise _NotHere(str(error), newest) from error
            result = use(_bytes_of(mapped, files, committed=is_same))
            mapped.check()
        state = "committed" if is_same else "not committed yet, or never"
        _logger.info("%s: save %s, %s, was loaded from the worker's memory", path, newest.save_id, state)
        return result


def _bytes_of(mapped: MappedSnapshot, files: Files, *, committed: bool) -> Bytes:
    """Return what was staged; with the checksums that were taken of it, if these are on disk."""
    overlaid = OverlaidFiles(files, mapped.staged)
    if committed:
        try:
            contents = read_any(mapped.staged.path, overlaid)
            if contents.manifest.save_id == mapped.staged.save_id:
                return Bytes(contents, overlaid)
        except (AsyncCkptError, OSError) as error:
            _logger.info("%s: loaded without checksums: %s", mapped.staged.path, error)
    return Bytes(staged_contents(mapped.staged), overlaid, has_checksums=False)


def _from_memory(path: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    try:
        return _staged(path, "memory", endpoint, files, use)
    except _NotHere as why:
        raise SnapshotUnavailableError(
            f"{path}: it is not in the memory of a worker: {why}; load it with source='auto', or 'disk'",
            path=path,
            save_id=None if why.snapshot is None else str(why.snapshot.save_id),
            missing_ranks=None if why.snapshot is None else why.snapshot.missing,
            detail=str(why),
        ) from why


def _with_hint(error: AsyncCkptError, path: str, endpoint: str | None) -> AsyncCkptError:
    """Return an error that says that nothing is on disk, and what is in memory."""
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
