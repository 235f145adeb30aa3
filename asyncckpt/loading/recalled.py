"""Where a load takes its bytes from: the worker's memory, where that holds the very checkpoint, else the disk.

A checkpoint is asked for by its path. What is committed there says which save that is; only while nothing is, the
newest snapshot that all ranks have staged for the path stands in for it. So the answer is the same whoever asks, and
nobody needs to agree with anybody: a path and a save id name one content.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    PlanTimeoutError,
    SnapshotUnavailableError,
)
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.loading.overwritten import read_of_one_save
from asyncckpt.loading.staged_bytes import ABSENT, Bytes, NotHere, held_at, staged_bytes, unavailable, with_hint
from asyncckpt.recall.conversation import is_served
from asyncckpt.recall.held import MappedSnapshot
from asyncckpt.recall.memory_overlay import OverlaidFiles
from asyncckpt.recall.snapshots import ANSWER_S, HeldSnapshot, endpoint_of
from asyncckpt.storage.checkpoint_dir import standing_at
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

SOURCES = ("auto", "memory", "disk")
T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.loading")


Use = Callable[[Bytes], T]


def check_source(source: str) -> str:
    """Return `source`.

    Raises:
        ConfigError: It is none of `SOURCES`.
    """
    if source not in SOURCES:
        raise ConfigError(f"source={source!r}: expected one of {SOURCES}", field="source", value=repr(source))
    return source


def read_from(
    path: str,
    source: str,
    endpoint: str | None,
    files: Files,
    use: Use[T],
    *,
    once: bool = False,
) -> T:
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
        standing = standing_at(path, LocalStore(files))
        if standing is not None:
            with contextlib.suppress(NotHere):
                return _committed(path, str(standing.save_id), endpoint, files, use)
    try:
        return use(Bytes(read_any(path, files), files)) if once else _from_disk(path, files, use)
    except ABSENT as error:
        if source == "disk":
            raise with_hint(error, path, endpoint) from error.__cause__
        try:
            return _staged(path, source, endpoint, files, use)
        except NotHere as why:
            _logger.debug("%s: not in the memory of a worker either: %s", path, why)
            raise error from error.__cause__


def _from_disk(path: str, files: Files, use: Use[T]) -> T:
    return read_of_one_save(path, files, lambda contents: use(Bytes(contents, files)))


def _committed(path: str, save_id: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    """Read what is committed, as much of it as can be from memory; every block is verified as on disk.

    Raises:
        NotHere: Nothing of it is there, or not what was promised.
    """
    with held_at(path, endpoint, ANSWER_S) as (worker, found):
        mine = [s for s in found if str(s.save_id) == save_id]
        if not mine:
            raise NotHere(f"it holds save {found[0].save_id}")
        try:
            with MappedSnapshot(mine[0], worker.worker.pid) as mapped:
                overlaid = OverlaidFiles(files, mapped.staged)
                contents = read_any(path, overlaid)
                if str(contents.manifest.save_id) != save_id:
                    raise NotHere(f"{path} was overwritten meanwhile")
                with mapped.reading():
                    result = use(Bytes(contents, overlaid))
        except PlanTimeoutError:  # an OSError too, but it says nothing of the snapshot: another rank does not answer
            raise
        except (*ABSENT, CorruptCheckpointError, SnapshotUnavailableError, OSError) as error:
            _logger.info("%s is read from disk: its snapshot in memory cannot be: %s", path, error)
            raise NotHere(str(error)) from error
        _logger.info("%s is loaded from the worker's memory (ranks %s)", path, _ranks(mine[0]))
        return result


def _staged(path: str, source: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    """Return what `use` makes of a staged snapshot.

    Raises:
        NotHere: As `staged_bytes`.
        SnapshotUnavailableError: A living trainer has used its memory for another save, while it was read.
    """
    with staged_bytes(path, source, endpoint, files) as (found, mapped), mapped.reading():
        return use(found)


def _from_memory(path: str, endpoint: str | None, files: Files, use: Use[T]) -> T:
    try:
        return _staged(path, "memory", endpoint, files, use)
    except NotHere as why:
        raise unavailable(path, why) from why


def _ranks(snapshot: HeldSnapshot) -> str:
    shown = ", ".join(map(str, snapshot.ranks[:20]))
    return shown if snapshot.complete else f"{shown}; the others from disk"
