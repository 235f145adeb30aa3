"""The two factories: checkpointers with their default parts."""

from __future__ import annotations

from typing import Any

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.sync_checkpointer import SyncCheckpointer


def make_async_checkpointer(
    config: CheckpointerConfig | None = None, rank_info: RankInfo | None = None, commit_hook: Any | None = None
) -> AsyncCheckpointer:
    """Return an `AsyncCheckpointer` with the default parts.

    Args:
        config: Settings; None takes environment and defaults.
        rank_info: Which rank of how many this process is; None takes `config`'s, else torch.distributed's, else
            torchrun's environment, else 0 of 1.
        commit_hook: A `CommitHook`, or any object with one of its methods.

    Raises:
        WorkerUnavailableError: `$ASYNCCKPT_ENDPOINT` names a worker that cannot be reached.
        ConfigError: An impossible setting.
        UnsupportedPlatformError: Elsewhere than Linux.
    """
    fields: dict[str, Any] = {} if rank_info is None else {"rank_info": rank_info}
    return AsyncCheckpointer(config=config, commit_hook=commit_hook, **fields)


def make_sync_checkpointer(
    config: CheckpointerConfig | None = None, rank_info: RankInfo | None = None, commit_hook: Any | None = None
) -> SyncCheckpointer:
    """Return a `SyncCheckpointer` with the default parts; arguments as `make_async_checkpointer`.

    Raises:
        ConfigError: An impossible setting.
        UnsupportedPlatformError: Elsewhere than Linux.
    """
    fields: dict[str, Any] = {} if rank_info is None else {"rank_info": rank_info}
    return SyncCheckpointer(config=config, commit_hook=commit_hook, **fields)
