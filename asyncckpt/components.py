"""The parts that a checkpointer is wired from; each can be replaced by the user's own.

`**kw` of `save()` and `load()` reaches every part, so own parts take what they need from it.
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
            The staging result that is handed to `CheckpointProcess.write`.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the stager holds. May be called twice."""


class CheckpointProcess(ABC):
    """Writes staging results behind the training."""

    @abstractmethod
    def write(self, staging_result: Any, path: str, **kw: Any) -> Future[Any]:
        """Begin to write; must not block.

        Returns:
            A future that is done when the checkpoint is committed. If it has an attribute `durable`, that is a future
            for this rank's files being safe.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the process holds. May be called twice."""


class CheckpointWriter(ABC):
    """Writes a state dict at once, for `SyncCheckpointer`."""

    @abstractmethod
    def write(self, state_dict: Mapping[str, Any], path: str, **kw: Any) -> Any:
        """Write and commit; blocks until that is done. Raises on any failure."""

    @abstractmethod
    def close(self) -> None:
        """Free what the writer holds. May be called twice."""


class CheckpointReader(ABC):
    """Reads checkpoints."""

    @abstractmethod
    def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any) -> tuple[Any, list[str]]:
        """Read the checkpoint at `path`.

        Args:
            path: Its directory.
            state_dict: Filled in place; None builds a new one.
            map_location: Where tensors go, as `torch.load` has it.
            **kw: The extra arguments of `load()`.

        Returns:
            The state dict, and the keys of `state_dict` that the checkpoint lacks.
        """


class CommitHook:
    """Called in the trainer around the commit of each save. Subclass it and override what is needed.

    Both run in the thread that completes futures, not in the training thread: they must not block for long, and cannot
    call `save()`. `SyncCheckpointer` calls them in the caller's thread. A hook with a `pre_commit` of its own is asked
    before every commit: the worker waits for it up to `hook_timeout_s`, and a save whose rank dies before it has
    answered is not committed.
    """

    def pre_commit(self, path: str, **kw: Any) -> None:
        """This rank's files at `path` are durable; the checkpoint is not committed yet.

        Args:
            path: The checkpoint's directory.
            **kw: The extra arguments of `save()`.

        Raises:
            Exception: Any, to veto: the save fails on all ranks, and nothing is published.
        """

    def post_commit(self, path: str, **kw: Any) -> None:
        """The checkpoint at `path` is committed; arguments as in `pre_commit`. What this raises is logged."""
