"""Checkpointer, SyncCheckpointer and AsyncCheckpointer: arguments checked, parts wired, ends reported."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    CheckpointerClosedError,
    ConfigError,
    ForkedError,
    MissingKeysError,
    UnsupportedPlatformError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.handle import SaveReport
from asyncckpt.loading.reader import DefaultReader
from asyncckpt.parts import CheckpointReader, CheckpointWriter
from asyncckpt.paths import absolute_path
from asyncckpt.process_group import find_only_rank
from asyncckpt.protocol.request import check_metadata
from asyncckpt.sync_writer import SyncWriter

MAX_STEP = (1 << 63) - 1
_log = logging.getLogger("asyncckpt")


_WORKER_FIELDS = frozenset(
    {
        "slots",
        "on_busy",
        "slot_timeout_s",
        "on_worker_loss",
        "on_error",
        "commit_timeout_s",
        "worker_timeout_s",
        "worker_start_timeout_s",
        "worker_shutdown_timeout_s",
    }
)


def refuse_unknown(kw: Mapping[str, Any]) -> None:
    """Refuse arguments of `save()` that no part takes: own parts get them, the default ones have no use for them.

    Raises:
        ConfigError: Naming the first.
    """
    if kw:
        raise ConfigError(f"save() has no argument called {min(kw)!r}", field=min(kw))


class Checkpointer(ABC):
    """Saves and loads state dicts. A context manager."""

    def __init__(self, config: CheckpointerConfig, reader: CheckpointReader | None) -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedPlatformError(f"asyncckpt needs Linux (memfd, pidfd, O_DIRECT); this is {sys.platform}")
        self.config = config
        self._reader = reader or DefaultReader(rank_info=config.rank_info)
        self._run_id = secrets.token_hex(6)
        self._sequence = 0
        self._owner_pid = os.getpid()
        self._closed = False

    @abstractmethod
    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kw: Any,
    ) -> Any:
        """Save `state_dict` at `path`; see the subclasses."""

    def load(
        self,
        path: str | os.PathLike[str],
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kw: Any,
    ) -> Any:
        """Load the checkpoint at `path`; as `asyncckpt.load`, through this checkpointer's reader.

        Args:
            path: The checkpoint's directory.
            state_dict: Filled in place and returned; None returns a new dict.
            default_map_location: Where new tensors go: device, string, dict or callable as in `torch.load`.
            strict: Raise when keys of `state_dict` are missing.
            **kw: Reaches the reader.

        Raises:
            CheckpointNotFoundError, CheckpointNotCommittedError, CorruptCheckpointError, MissingKeysError, ...: As
                `asyncckpt.load`.
        """
        self._check_usable()
        directory = absolute_path(path)
        found, missing = self._reader.read(
            directory, state_dict, map_location=default_map_location, strict=strict, **kw
        )
        if strict and missing:  # an own reader need not know `strict`
            raise MissingKeysError(
                f"{directory}: {len(missing)} keys are not in the checkpoint: {', '.join(map(str, missing))}",
                path=directory,
                keys=list(missing),
            )
        return found

    @abstractmethod
    def close(self) -> None:
        """Free everything. Twice is fine."""

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed:
            raise CheckpointerClosedError("the checkpointer is closed")

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ForkedError(
                f"this checkpointer was made by process {self._owner_pid}, this is its forked child {os.getpid()}; "
                "make a new one here"
            )

    def _next_save_id(self) -> SaveId:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return SaveId(0, sequence, self._run_id)

    def _arguments(
        self, state_dict: Any, path: Any, step: int | None, metadata: Mapping[str, Any] | None, save_id: SaveId
    ) -> dict[str, Any]:
        """Check what `save` was given; returns the keywords that every part receives."""
        if step is None:
            found = state_dict.get("step") if isinstance(state_dict, Mapping) else None
            step = found if type(found) is int else save_id.sequence
        if type(step) is not int or abs(step) > MAX_STEP:
            raise ConfigError(f"step={step!r}: expected an int of 63 bits", field="step", value=repr(step)[:80])
        try:
            text = json.dumps(dict(metadata or {}), allow_nan=False)
            check_metadata(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"metadata must be a dict of JSON values: {error}", field="metadata") from error
        metadata = json.loads(text)
        return {"path": absolute_path(path), "step": step, "metadata": metadata, "save_id": save_id}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class SyncCheckpointer(Checkpointer):
    """Saves in the caller's time, without a worker process or shared memory, in the same format.

    Args:
        writer, reader: Own parts in the place of the default ones.
        config: Settings; single fields may also be given as keywords.
        **fields: Fields of `CheckpointerConfig`.

    Raises:
        ConfigError: An impossible setting.
    """

    def __init__(
        self,
        writer: CheckpointWriter | None = None,
        reader: CheckpointReader | None = None,
        *,
        config: CheckpointerConfig | None = None,
        **fields: Any,
    ) -> None:
        misplaced = sorted(set(fields) & _WORKER_FIELDS)
        if misplaced:
            raise ConfigError(
                f"{misplaced[0]} is about the worker, which SyncCheckpointer does without", field=misplaced[0]
            )
        super().__init__(CheckpointerConfig.resolve(config, fields), reader)
        self._writer = writer or SyncWriter(self.config, find_only_rank(self.config.rank_info))

    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kw: Any,
    ) -> None:
        """Write `state_dict` to the directory `path`. Blocks until the checkpoint is committed.

        Raises:
            UnsupportedLeafError, DuplicateNameError, UnsupportedPathError, ConfigError: The arguments.
            CheckpointExistsError, SaveFailedError, CommitUnknownError, InsufficientMemoryError: The save.
            CheckpointerClosedError, ForkedError: The checkpointer.
        """
        self._check_usable()
        arguments = self._arguments(state_dict, path, step, metadata, self._next_save_id())
        if isinstance(self._writer, SyncWriter):
            refuse_unknown(kw)
        path_text = arguments.pop("path")
        report = self._writer.write(state_dict, path_text, **arguments, **kw)
        if isinstance(report, SaveReport):
            _log.info("saved step %d to %s: %s", arguments["step"], path_text, report)

    def close(self) -> None:
        """Free memory and threads. Twice is fine; does nothing in a forked child."""
        if not self._closed and os.getpid() == self._owner_pid:
            self._closed = True
            self._writer.close()
