"""Snapshots in the worker's memory, as a load reads them: found, held, mapped, and told about where they are not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from asyncckpt import __version__
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    SnapshotUnavailableError,
)
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.recall.conversation import Conversation
from asyncckpt.recall.held import MappedSnapshot
from asyncckpt.recall.memory_overlay import OverlaidFiles, staged_contents
from asyncckpt.recall.snapshots import HeldSnapshot, endpoint_of, held_snapshots, snapshots_of
from asyncckpt.storage.checkpoint_dir import standing_at
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

PATIENT_S = 10.0
"""For the worker's answer where the disk does not have it. Chosen: the promise for a worker that hangs (P6)."""

ABSENT = (CheckpointNotFoundError, CheckpointNotCommittedError)
_logger = logging.getLogger("asyncckpt.loading")


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a load reads: its contents, the files that give the bytes, and whether they have checksums."""

    contents: Contents
    files: Files
    has_checksums: bool = True


class NotHere(Exception):
    """Memory does not have it; says why. `snapshot`: what there is."""

    def __init__(self, why: str, snapshot: HeldSnapshot | None = None) -> None:
        super().__init__(why)
        self.snapshot = snapshot


@contextlib.contextmanager
def held_at(path: str, endpoint: str | None, answer_s: float) -> Iterator[tuple[Conversation, list[HeldSnapshot]]]:
    """Ask the worker, and have it hold what it has, for the time of a `with` block.

    Raises:
        NotHere: There is no worker, or it does not answer, or it holds nothing of this path.
    """
    with contextlib.ExitStack() as stack:
        try:
            worker = stack.enter_context(Conversation(endpoint_of(endpoint), __version__, answer_s))
            found = [s for s in snapshots_of(worker.recall(path, hold=True).parts) if s.path == path]
        except AsyncCkptError as error:
            raise NotHere(str(error)) from error
        if not found:
            raise NotHere("it holds nothing of this path")
        yield worker, found


@contextlib.contextmanager
def staged_bytes(path: str, source: str, endpoint: str | None, files: Files) -> Iterator[tuple[Bytes, MappedSnapshot]]:
    """Map the newest snapshot of a path that all ranks have staged, wherever its save has got to.

    Raises:
        NotHere: There is none, or not all of it.
    """
    with held_at(path, endpoint, PATIENT_S) as (worker, found), contextlib.ExitStack() as stack:
        newest = next((s for s in found if s.complete), found[0])
        if not newest.complete:
            raise NotHere(f"it lacks ranks {newest.missing[:20]} of save {newest.save_id}", newest)
        standing = standing_at(path, LocalStore(files))
        is_same = standing is not None and standing.save_id == newest.save_id
        if source == "auto" and standing is not None and not is_same:
            raise NotHere(f"save {standing.save_id} was committed meanwhile")
        try:
            mapped = stack.enter_context(MappedSnapshot(newest, worker.worker.pid))
        except SnapshotUnavailableError as error:
            raise NotHere(str(error), newest) from error
        state = "committed" if is_same else "not committed yet, or never"
        _logger.info("%s: save %s, %s, is loaded from the worker's memory", path, newest.save_id, state)
        yield _bytes_of(mapped, files, committed=is_same), mapped


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


def unavailable(path: str, why: NotHere) -> SnapshotUnavailableError:
    return SnapshotUnavailableError(
        f"{path}: it is not in the memory of a worker: {why}; load it with source='auto', or 'disk'",
        path=path,
        save_id=None if why.snapshot is None else str(why.snapshot.save_id),
        missing_ranks=None if why.snapshot is None else why.snapshot.missing,
        detail=str(why),
    )


def with_hint(error: AsyncCkptError, path: str, endpoint: str | None) -> AsyncCkptError:
    """Return an error that says that nothing is on disk, and what is in memory."""
    found = [s for s in held_snapshots(path, endpoint=endpoint) if s.path == path and s.complete]
    if not found:
        return error
    text = (
        f"{error.message}. The worker holds it in memory, as save {found[0].save_id} of step {found[0].step}: load it "
    )
    return type(error)(text + "with source='auto' or 'memory'", **error.facts())
