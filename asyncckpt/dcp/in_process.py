"""A save that the process that calls `dcp.save` writes: its files, its commit, and what becomes of failed ones."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.dcp.committing import commit_all
from asyncckpt.dcp.laid_out import WriteOptions
from asyncckpt.dcp.rank_part import Unfinished, write_part
from asyncckpt.dcp.tickets import Ticket
from asyncckpt.errors import CommitUnknownError
from asyncckpt.format.names import SaveId
from asyncckpt.paths import current_umask
from asyncckpt.storage import commit
from asyncckpt.storage.checkpoint_dir import prepare_directory, remove_made
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

_log = logging.getLogger("asyncckpt.dcp")


class InProcess:
    """See the module. For one save of one rank.

    Args:
        path: The checkpoint's directory.
        fsync, overwrite: As `StorageWriter` has them.
        files: The storage seam.
    """

    def __init__(self, path: str, *, fsync: bool, overwrite: bool, files: Files) -> None:
        self._path, self._fsync, self._overwrite, self._files = path, fsync, overwrite, files
        self._unfinished: Unfinished | None = None
        self._abandoned: weakref.finalize[Any, InProcess] | None = None

    def begin(self, epoch: int, world_size: int) -> list[Ticket]:
        """Make the directory, and the tickets of all ranks; the coordinator calls it.

        Raises:
            CheckpointExistsError: A checkpoint is at the path that is not to be replaced.
            OSError: The directory cannot be made.
        """
        save_id = SaveId(epoch, 0, secrets.token_hex(6))
        made = self._prepare_directory(save_id)
        # It takes along whatever ranks have written, should this save come to nothing.
        self._abandoned = weakref.finalize(self, _remove, self._path, save_id, self._files, made, os.getpid())
        return [Ticket(save_id=save_id, rank=rank, world_size=world_size) for rank in range(world_size)]

    def write(
        self, plan: SavePlan, planner: SavePlanner, ticket: Ticket, options: WriteOptions, *, is_coordinator: bool
    ) -> list[WriteResult]:
        """Write this rank's files.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
            CheckpointExistsError, OSError: Storage. What this call created is removed.
            Exception: Whatever the planner raises.

        Blocks: for the writes.
        """
        if not is_coordinator:
            self._prepare_directory(ticket.save_id)
        try:
            results, self._unfinished = write_part(
                plan, planner, ticket, options, self._files, keep_open=is_coordinator
            )
        except BaseException:
            if ticket.world_size == 1:  # else others may still be writing
                self.abandon()
            raise
        return results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Commit; of the coordinator.

        Raises:
            SaveFailedError, CheckpointExistsError, CommitUnknownError, OSError: As `commit_all`.

        Blocks: for fsync; with `overwrite` for another save that is being published there.
        """
        unfinished = self._unfinished
        assert unfinished is not None, "finish comes after this writer's write_data"
        try:
            commit_all(unfinished, metadata, results, self._files)
        except CommitUnknownError:
            self._committed()
            raise
        except BaseException:
            self.abandon()
            raise
        self._committed()
        try:
            commit.remove_leftovers(self._path, keep=unfinished.job.save_id, store=LocalStore(self._files))
        except OSError as error:
            _log.warning("leftovers stay in %s: %s", self._path, error)

    def abandon(self) -> None:
        """Remove what is there of the save, if it was not committed."""
        if self._abandoned is not None:
            self._abandoned()
        self._abandoned = self._unfinished = None

    def _prepare_directory(self, save_id: SaveId) -> list[str]:
        return prepare_directory(
            self._path,
            save_id=save_id,
            store=LocalStore(self._files, umask=current_umask()),
            fsync=self._fsync,
            overwrite=self._overwrite,
        )

    def _committed(self) -> None:
        """The files are the checkpoint's now, or may be: never remove them."""
        if self._abandoned is not None:
            self._abandoned.detach()
        self._abandoned = self._unfinished = None


def _remove(path: str, save_id: SaveId, files: Files, made: Sequence[str], pid: int) -> None:
    """Remove the files of a save that was never committed.

    IMPORTANT: only its coordinator, which alone could commit it, may; any other rank might take away what is being
    published.
    """
    if os.getpid() != pid:  # a forked child lets its copy of the writer go
        return
    with contextlib.suppress(OSError):
        commit.remove_files_of(path, save_id, store=LocalStore(files))
        remove_made(made, LocalStore(files))
