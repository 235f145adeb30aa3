"""`StorageWriter`: what stock `dcp.save` and `dcp.async_save` write, as a checkpoint of asyncckpt's."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncckpt.dcp import tickets
from asyncckpt.dcp.committing import commit_all
from asyncckpt.dcp.items import sorted_out
from asyncckpt.dcp.laid_out import WriteOptions
from asyncckpt.dcp.rank_part import Unfinished, write_part
from asyncckpt.dcp.results import StoredChunk
from asyncckpt.dcp.stager import Stager
from asyncckpt.dcp.tickets import Ticket
from asyncckpt.errors import AsyncCkptError, CommitUnknownError, ConfigError, UnsupportedPathError
from asyncckpt.format.names import SaveId
from asyncckpt.paths import absolute_path
from asyncckpt.staging.umask import current_umask
from asyncckpt.storage import catalog, commit
from asyncckpt.storage.directory import prepare_directory, remove_made
from asyncckpt.storage.failures import save_failure
from asyncckpt.storage.files import Files

_log = logging.getLogger("asyncckpt.dcp")


class StorageWriter(TorchStorageWriter, Stager):
    """Writes with stock `torch.distributed.checkpoint`: files of asyncckpt's format, committed at once by a manifest.

    The checkpoint also loads with `asyncckpt.load`, `StorageReader` and torch's `HuggingFaceStorageReader`. Every rank
    writes in the process that calls `dcp.save`, with a buffer of 16 MiB for each of three threads beside the state.
    Until the manifest stands, an older checkpoint at the path is whole; a save that fails leaves it so. The files of
    one that failed elsewhere go when the coordinator's writer is reset, used again or let go.

    Each save is a run of its own: its save id is new, its epoch above all that were begun beside its path.

    Args:
        path: The checkpoint's directory; `checkpoint_id` of `dcp.save` takes its place.
        single_file_per_rank: One shard file per rank; False: one per tensor, at most 1000.
        sync_files: Whether files and directories are fsynced.
        thread_count: Threads of each rank that call the planner for tensors, and write. With one, that is the thread
            that calls `dcp.save`, which goes through the files in order. Three write in any case.
        per_thread_copy_ahead: Of tensors on a CUDA device, so many bytes per thread are fetched ahead of being written.
        cache_staged_state_dict: Whether `stage` keeps its copies, pinned where there is a device, for the next
            `dcp.async_save` with this writer, which has to come after the end of this one.
        overwrite: Whether an older checkpoint at the path is replaced, in one step; else it is refused.

    Raises:
        ConfigError: A number below its minimum.
        UnsupportedPathError: A URL, or no path at all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
    ) -> None:
        for name, value, least in (
            ("thread_count", thread_count, 1),
            ("per_thread_copy_ahead", per_thread_copy_ahead, 0),
        ):
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name}={value!r}: an integer from {least} on is wanted", field=name, value=repr(value)
                )
        Stager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self.path = absolute_path(path)
        self.single_file_per_rank, self.sync_files = single_file_per_rank, sync_files
        self.thread_count, self.per_thread_copy_ahead = thread_count, per_thread_copy_ahead
        self.overwrite = overwrite
        self._files = Files()
        self._forget_save()

    def _forget_save(self) -> None:
        self._is_coordinator = False
        self._ticket: Ticket | None = None
        self._unfinished: Unfinished | None = None
        self._abandoned: weakref.finalize[Any, StorageWriter] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: neither staged tensors nor a save that is under way here."""
        own = ("_is_coordinator", "_ticket", "_unfinished", "_abandoned")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**state, "state_dict_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_save()

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at `checkpoint_id` if one is given.

        Raises:
            UnsupportedPathError: A URL, or no path at all.
        """
        self._abandon()
        if checkpoint_id is not None:
            self.path = absolute_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save.

        Raises:
            ConfigError: `use_collectives=False`: ranks that do not meet have no common commit.
        """
        self._abandon()
        tickets.forget()
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "dcp.save(use_collectives=False) makes a checkpoint of each rank, with no common commit; "
                "asyncckpt.dcp.StorageWriter needs the collectives",
                field="use_collectives",
                value=repr(False),
            )
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what cannot be stored, before anything is written.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Naming the tensor.
        """
        sorted_out(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the save its id, and each rank's plan a ticket with it.

        Raises:
            CheckpointExistsError: A checkpoint is at the path that is not to be replaced.
            SaveFailedError: The directory beside it cannot be looked at.
        """
        run = SaveId(0, 0, secrets.token_hex(6))
        with self._failures(run):
            save_id = run._replace(epoch=catalog.next_epoch_beside(self.path, files=self._files))
            made = self._prepare_directory(save_id)
        # It takes along whatever ranks have written, should this save come to nothing.
        self._abandoned = weakref.finalize(self, _remove, self.path, save_id, self._files, made, os.getpid())
        given = [Ticket(save_id=save_id, rank=rank, world_size=len(plans)) for rank in range(len(plans))]
        self._ticket = given[0]
        return [dataclasses.replace(plan, storage_data=ticket) for plan, ticket in zip(plans, given, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
            CheckpointExistsError, SaveFailedError: Storage. What this call created is removed.
            Exception: Whatever the planner raises.

        Blocks: for the writes.
        """
        ticket = tickets.received() or self._ticket or plan.storage_data
        assert isinstance(ticket, Ticket), "the coordinator's prepare_global_plan gives every plan a ticket"
        options = WriteOptions(
            path=self.path,
            fsync=self.sync_files,
            threads=self.thread_count,
            one_file=self.single_file_per_rank,
            copy_ahead_nbytes=self.per_thread_copy_ahead * self.thread_count,
            overwrite=self.overwrite,
            umask=current_umask(),
        )
        with self._failures(ticket.save_id, ticket.rank):
            if not self._is_coordinator:
                self._prepare_directory(ticket.save_id)
            try:
                results, self._unfinished = write_part(
                    plan, planner, ticket, options, self._files, keep_open=self._is_coordinator
                )
            except BaseException:
                if ticket.world_size == 1:  # else others may still be writing
                    self._abandon()
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit.

        Raises:
            SaveFailedError: Code `coverage`: a tensor would not be stored exactly once; or an errno's name.
            CheckpointExistsError: Another save has committed there meanwhile, which is not to be replaced.
            CommitUnknownError: Nobody knows whether the manifest is there; nothing was deleted.

        Blocks: for fsync; with `overwrite` for another save that is being published there.
        """
        unfinished = self._unfinished
        assert unfinished is not None, "finish comes after this writer's write_data"
        try:
            with self._failures(unfinished.job.save_id, unfinished.job.rank):
                commit_all(unfinished, metadata, results, self._files)
        except CommitUnknownError:
            self._committed()
            raise
        except BaseException:
            self._abandon()
            raise
        self._committed()
        try:
            commit.remove_leftovers(self.path, keep=unfinished.job.save_id, files=self._files)
        except OSError as error:
            _log.warning("leftovers stay in %s: %s", self.path, error)
        metadata.storage_data = _chunks(results)
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        """Return where the checkpoint goes, and its save id once it has one."""
        return StorageMeta(checkpoint_id=self.path, save_id=str(self._ticket.save_id) if self._ticket else None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this machine's file systems."""
        return is_local_path(checkpoint_id)

    def _prepare_directory(self, save_id: SaveId) -> list[str]:
        return prepare_directory(
            self.path,
            save_id=save_id,
            files=self._files,
            umask=current_umask(),
            fsync=self.sync_files,
            overwrite=self.overwrite,
        )

    def _committed(self) -> None:
        """The files are the checkpoint's now, or may be: never remove them."""
        if self._abandoned is not None:
            self._abandoned.detach()
        self._abandoned = self._unfinished = None

    def _abandon(self) -> None:
        """Remove what is there of a save that this writer has begun and will not commit."""
        if self._abandoned is not None:
            self._abandoned()
        self._abandoned = self._unfinished = self._ticket = None

    @contextlib.contextmanager
    def _failures(self, save_id: SaveId, rank: int = 0) -> Iterator[None]:
        try:
            yield
        except AsyncCkptError:
            raise
        except OSError as error:
            raise save_failure(error, save_id=str(save_id), rank=rank, step=None, path=self.path) from error


def is_local_path(checkpoint_id: Any) -> bool:
    """Whether `checkpoint_id` is what a writer or reader takes as its path."""
    try:
        absolute_path(checkpoint_id)
    except UnsupportedPathError:
        return False
    return True


def _remove(path: str, save_id: SaveId, files: Files, made: Sequence[str], pid: int) -> None:
    """Remove the files of a save that was never committed.

    IMPORTANT: only its coordinator, which alone could commit it, may; any other rank might take away what is being
    published.
    """
    if os.getpid() != pid:  # a forked child lets its copy of the writer go
        return
    with contextlib.suppress(OSError):
        commit.remove_files_of(path, save_id, files=files)
        remove_made(made, files)


def _chunks(results: Sequence[Sequence[WriteResult]]) -> dict[Any, Any]:
    return {r.index: r.storage_data for part in results for r in part if isinstance(r.storage_data, StoredChunk)}
