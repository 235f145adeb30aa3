"""SyncCheckpointer: saves while the caller waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from asyncckpt import __version__
from asyncckpt.checkpointer import Checkpointer, refuse_unknown
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CheckpointReader, CheckpointWriter
from asyncckpt.config import CheckpointerConfig, RankInfo, refuse_positional
from asyncckpt.distributed.meetings import Exchange, Save
from asyncckpt.distributed.process_group import Membership, find_exchange
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import ConfigError
from asyncckpt.save_handle import SaveReport
from asyncckpt.sync.writer import SyncWriter

_WORKER_FIELDS = frozenset(
    {
        "staging",
        "overlap_check",
        "slots",
        "on_busy",
        "slot_timeout_s",
        "hook_timeout_s",
        "on_worker_loss",
        "keep_in_memory",
        "events",
        "on_error",
        "worker_timeout_s",
        "worker_start_timeout_s",
        "worker_shutdown_timeout_s",
    }
)
_log = logging.getLogger("asyncckpt")


class SyncCheckpointer(Checkpointer):
    """Saves while the caller waits, without a worker process or shared memory, in the same format.

    Args:
        writer, reader: Custom parts that replace the default ones.
        config: Settings; single fields may also be given as keywords.
        commit_hook: A `CommitHook`, or any object with one of its methods.
        **fields: Fields of `CheckpointerConfig`.

    Raises:
        ConfigError: An invalid setting.
    """

    def __init__(
        self,
        writer: CheckpointWriter | None = None,
        reader: CheckpointReader | None = None,
        *,
        config: CheckpointerConfig | None = None,
        commit_hook: Any | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(writer, CheckpointerConfig):
            refuse_positional([writer], "SyncCheckpointer")
        misplaced = sorted(set(fields) & _WORKER_FIELDS)
        if misplaced:
            raise ConfigError(
                f"{misplaced[0]} is about the worker, which SyncCheckpointer does not use", field=misplaced[0]
            )
        super().__init__(CheckpointerConfig.resolve(config, fields), reader)
        if writer is not None and commit_hook is not None:
            raise ConfigError("commit_hook belongs to the default writer, which was replaced", field="commit_hook")
        self._hooks = HookRunner(commit_hook)
        self._writer = writer or self._default_writer(self._member)
        self._takes_extra = commit_hook is not None or not isinstance(self._writer, SyncWriter)

    def _default_writer(self, member: Membership) -> SyncWriter:
        self._coordination = ranks = Coordination(
            member.rank, self.config, lambda: _exchange_of(member.rank), package=__version__
        )
        return SyncWriter(self.config, ranks, hooks=self._hooks)

    def _take_ranks(self, member: Membership) -> None:
        if isinstance(self._writer, SyncWriter):
            self._writer.close()
            self._writer = self._default_writer(member)
        super()._take_ranks(member)

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

        On several ranks it is a collective: all must call it, and it raises on all if it fails on one.

        Args:
            state_dict, path, step, metadata, **kw: As for `AsyncCheckpointer.save`.

        Raises:
            UnsupportedLeafError, DuplicateNameError, UnsupportedPathError, ConfigError: An argument is invalid.
            CheckpointExistsError, SaveFailedError, CommitUnknownError, InsufficientMemoryError: The save failed.
            PlanTimeoutError, RanksDisagreeError, ReplicaMismatchError: Ranks are missing or disagree.
            CheckpointerClosedError, ForkedError: The checkpointer cannot be used here.
        """
        self._check_usable()
        self._follow_ranks()
        save_id = self._next_save_id()
        try:
            arguments = self._arguments(state_dict, path, step, metadata, save_id)
            if "mirror" in kw:
                raise ConfigError("mirror= needs a worker, which copies: use AsyncCheckpointer", field="mirror")
            if not self._takes_extra:
                refuse_unknown(kw)
        except Exception as error:
            if (ranks := self._coordination) is not None:
                ranks.refuse_save(Save(self._path_if_any(path), self._number_of(save_id)), repr(error))
            raise
        path_text = arguments.pop("path")
        report = self._writer.write(state_dict, path_text, **arguments, **kw)
        if isinstance(report, SaveReport):
            _log.info("save of step %d to %s is committed: %s", arguments["step"], path_text, report)

    def close(self) -> None:
        """Free memory and threads. Idempotent; no-op in a forked child."""
        if not self._closed and os.getpid() == self._owner_pid:
            self._closed = True
            self._writer.close()


def _exchange_of(rank: RankInfo) -> Exchange:
    found = find_exchange(rank)
    if found is None:
        raise ConfigError(
            f"this is rank {rank.rank} of {rank.world_size}, and SyncCheckpointer needs an initialised process group "
            "of these ranks; if only rank 0 saves, pass rank_info=RankInfo(0, 1) there",
            field="rank_info",
            value=repr(rank),
        )
    return found


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None, rank_info: RankInfo | None = None, commit_hook: Any | None = None
) -> SyncCheckpointer:
    """Return a `SyncCheckpointer` with the default parts; arguments as `make_async_checkpointer`.

    Raises:
        ConfigError: An invalid setting.
        UnsupportedPlatformError: This is not Linux.
    """
    fields: dict[str, Any] = {} if rank_info is None else {"rank_info": rank_info}
    return SyncCheckpointer(config=config, commit_hook=commit_hook, **fields)
