"""The interfaces of a checkpointer's parts; each part can be replaced by a custom one.

`**kw` of `save()` and `load()` is passed to every part, so that custom parts can take arguments of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any


class CheckpointStager(ABC):
    """Takes the snapshot, in the training thread."""

    @abstractmethod
    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        """Copy `state_dict`; it may be changed as soon as this returns.

        Args:
            state_dict: As given to `save()`.
            **kw: `path`, `step`, `save_id`, `metadata`, and the extra arguments of `save()`.

        Returns:
            The staging result, which is passed to `CheckpointProcess.write`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free resources of the stager. Must be idempotent."""


class CheckpointProcess(ABC):
    """Writes staging results behind the training."""

    @abstractmethod
    def write(self, staging_result: Any, path: str, **kw: Any) -> Future[Any]:
        """Start to write; must not block.

        Returns:
            A future that is done when the checkpoint is committed. If it has an attribute `durable`, that is a future
            that is done when this rank's files are durable.
        """

    @abstractmethod
    def close(self) -> None:
        """Free resources of the process. Must be idempotent."""


class CheckpointWriter(ABC):
    """Writes a state dict while the caller waits, for `SyncCheckpointer`."""

    @abstractmethod
    def write(self, state_dict: Mapping[str, Any], path: str, **kw: Any) -> Any:
        """Write and commit. Blocks until the checkpoint is committed; must raise on any failure."""

    @abstractmethod
    def close(self) -> None:
        """Free resources of the writer. Must be idempotent."""


class CheckpointReader(ABC):
    """Reads checkpoints."""

    @abstractmethod
    def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: Its directory.
            state_dict: Filled in place; None builds a new one.
            map_location: Where to put tensors, as for `torch.load`.
            **kw: The extra arguments of `load()`.

        Returns:
            The state dict, and the keys of `state_dict` that the checkpoint lacks.
        """


class CommitHook:
    """Called in the trainer before and after the commit of each save. Subclass it and override one method or both.

    Both run in the thread that completes futures, not in the training thread: they must not block for long, and cannot
    call `save()`. `SyncCheckpointer` calls them in the caller's thread. If `pre_commit` is overridden, every commit
    waits for it, up to `hook_timeout_s`; if the rank dies before it has returned, the save is not committed.
    """

    def pre_commit(self, path: str, **kw: Any) -> None:
        """Run before the commit: this rank's files at `path` are durable.

        Args:
            path: The checkpoint's directory.
            **kw: The extra arguments of `save()`.

        Raises:
            Exception: Any error is a veto: the save fails on all ranks, and nothing is published.
        """

    def post_commit(self, path: str, **kw: Any) -> None:
        """Run after the commit of the checkpoint at `path`; arguments as for `pre_commit`. Its errors are logged."""
