"""Which checkpoints of a directory may be the one to go on from, and in which order they are tried. Reads no data."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass

from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from asyncckpt.format.names import SaveId, owner_of
from asyncckpt.format.steps import lineage_key
from asyncckpt.storage.catalog import ABANDONED, INCOMPLETE, QUARANTINED, Found, scan
from asyncckpt.storage.files import Files

_LOST = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What a file system answers that has lost the bytes, or finds that they are not what it wrote."""

_logger = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint to be tried.

    Attributes:
        path: Its directory.
        save_id: Of its manifest; by the names of its files where that is damaged; None: not even those can be read,
            or it is not on disk.
        step: Of its manifest; None where that cannot be read.
    """

    path: str
    save_id: SaveId | None
    step: int | None = None


def candidates_in(root: str, files: Files) -> list[Candidate]:
    """Return what may be loaded of `root`, the newest by lineage first.

    Also those whose manifest is damaged: they were committed once, and whoever goes on from an older one must be told.
    Not those that were never committed, and not those that were put aside as broken.

    Args:
        root: Absolute path of a directory whose children are checkpoints, or of a checkpoint.
        files: The storage seam.

    Raises:
        OSError: `root` cannot be listed.
    """
    found = [candidate for one in scan(root, files) if (candidate := _candidate(one, files)) is not None]
    return sorted(found, key=_order, reverse=True)


def _order(candidate: Candidate) -> tuple[int, tuple[int, int, str]]:
    """One that may be the newest goes first: else it would be passed over in silence."""
    if candidate.save_id is None:
        return 1, (0, 0, "")
    return 0, lineage_key(candidate.save_id)


def _candidate(found: Found, files: Files) -> Candidate | None:
    if found.manifest is not None:
        return Candidate(path=found.path, save_id=found.manifest.save_id, step=found.manifest.step)
    if found.state in (INCOMPLETE, ABANDONED, QUARANTINED):
        return None
    try:
        owners = [owner for name in files.listdir(found.path) if (owner := owner_of(name)) is not None]
    except OSError as error:
        if is_broken(error):
            return Candidate(path=found.path, save_id=None)
        _logger.warning("%s is passed over, it is %s: %s", found.path, found.state, found.error)
        return None  # closed to this user, who can load nothing there
    if not owners:  # what is called manifest.json is somebody else's
        _logger.warning("%s is passed over, no file of a checkpoint is in it: %s", found.path, found.error)
        return None
    return Candidate(path=found.path, save_id=max(owners, key=lineage_key))  # loading it says what is wrong


def is_broken(error: BaseException) -> bool:
    """Whether `error` says that a checkpoint is not what was written, and not that the caller made a mistake."""
    if isinstance(error, (CorruptCheckpointError, CheckpointNotCommittedError, CheckpointNotFoundError)):
        return True
    return isinstance(error, OSError) and error.errno in _LOST
