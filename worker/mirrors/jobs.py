"""Jobs that copy committed checkpoints to their mirrors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedFormatError,
    UnsupportedPathError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.mirroring import (
    Unmirrored,
    copy_to_mirror,
    is_mirrored,
    mirrored_manifest,
    umask_of,
    unmirrored_in,
)
from asyncckpt.storage.checkpoint_dir import manifest_or_error
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import DEFAULT_UMASK
from asyncckpt.storage.locate import store_at
from asyncckpt_worker.core.actions import CheckMirrored, CopyToMirror
from asyncckpt_worker.io.writer import check_root

_FINAL = (
    CheckpointNotFoundError,
    CheckpointNotCommittedError,
    CheckpointExistsError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UnsupportedPathError,
    SaveFailedError,
)
"""Errors after which a copy is not tried again: the same would happen."""


def cannot_succeed(error: Exception) -> bool:
    """Return whether trying a copy again cannot help."""
    return isinstance(error, _FINAL)


class Mirrorer:
    """Performs the jobs that copy to mirrors. Every method may be called from several threads.

    Args:
        files: The seam to this machine's files.
        roots: Directories below which the worker may write; empty allows every path.
        pace: Called before so many bytes are sent; waits where the bandwidth is limited.
    """

    def __init__(self, files: Files, roots: Sequence[str], pace: Callable[[int], None]) -> None:
        self._files, self._roots, self._pace = files, tuple(roots), pace
        self._copied: dict[SaveId, int] = {}

    def copy(self, job: CopyToMirror) -> Mapping[str, Any]:
        """Copy a checkpoint, and return the report's figures.

        Raises:
            SaveFailedError: The mirror lies outside the roots.
            AsyncCkptError, OSError: As `copy_to_mirror`.

        Blocks: for the copy.
        """
        check_root(job.mirror, self._roots)
        source = store_at(job.path, self._files)
        try:
            umask = umask_of(job.path, source.as_files())
        except FileNotFoundError:
            umask = DEFAULT_UMASK  # the checkpoint is gone, which `copy_to_mirror` says
        target = store_at(job.mirror, self._files, umask=umask)
        self._copied[job.save_id] = 0

        def progress(nbytes: int) -> None:
            self._copied[job.save_id] += nbytes

        try:
            report = copy_to_mirror(
                job.path,
                job.save_id,
                job.mirror,
                source=source,
                target=target,
                pace=self._pace,
                progress=progress,
            )
        finally:
            self._copied.pop(job.save_id, None)
        return {
            "nbytes": report.nbytes,
            "copied_nbytes": report.copied_nbytes,
            "seconds_mirror": report.seconds,
        }

    def is_copied(self, job: CheckMirrored) -> bool:
        """Return whether another worker has copied a checkpoint.

        Raises:
            CheckpointNotCommittedError: It is gone, and not in the mirror.
            AsyncCkptError, OSError: It cannot be known.
        """
        store = store_at(job.path, self._files)
        if is_mirrored(job.path, job.save_id, store):
            return True
        local = manifest_or_error(job.path, store)
        if local is not None and local.save_id == job.save_id:
            return False
        # It was removed or replaced, which may have been after it was copied.
        if mirrored_manifest(job.mirror, job.save_id, store_at(job.mirror, self._files)) is not None:
            return True
        raise CheckpointNotCommittedError(f"{job.path} was removed before it was copied to its mirror", path=job.path)

    def unmirrored(self, root: str) -> list[Unmirrored]:
        """Return what is still to be copied of a directory.

        Raises:
            AsyncCkptError, OSError: As `unmirrored_in`.
        """
        return unmirrored_in(root, store_at(root, self._files))

    def copied(self) -> dict[SaveId, int]:
        """Return how many bytes of each checkpoint are in its mirror, of the copies that are under way."""
        return dict(self._copied)
