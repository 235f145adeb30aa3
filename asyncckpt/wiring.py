"""The default parts of an `AsyncCheckpointer`, put together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from asyncckpt import __version__
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.client.worker_links import Build, Worker
from asyncckpt.config import CheckpointerConfig
from asyncckpt.coordination import Coordination
from asyncckpt.errors import ConfigError, WorkerUnavailableError
from asyncckpt.hooks import HookRunner
from asyncckpt.process_group import Membership, find_exchange
from asyncckpt.protocol import messages
from asyncckpt.protocol.endpoint import default_endpoint, socket_path

_STAGER_FIELDS = frozenset(
    {"staging", "overlap_check", "layout", "files_per_rank", "max_shard_bytes", "fsync", "write_threads"}
)
_KEPT_FIELDS = frozenset({"allow_pickle", "on_error", "worker_shutdown_timeout_s", "rank_info"})
"""What an own process leaves to the checkpointer, its reader, and the stager that copies for it."""


def refuse_misplaced(given: Iterable[str], *, own_stager: bool, own_process: bool) -> None:
    """Refuse fields, given by name, of parts that were replaced: nobody would heed them.

    Raises:
        ConfigError: Naming the first.
    """
    for name in sorted(given):
        if own_process and name not in _KEPT_FIELDS:
            raise ConfigError(f"{name} is about the worker, which checkpoint_process replaces", field=name)
        if own_stager and name in _STAGER_FIELDS:
            raise ConfigError(f"{name} is about the default stager, which checkpoint_stager replaces", field=name)


def reach_worker(
    config: CheckpointerConfig, member: Membership, named: str | None, hooks: HookRunner, *, at_once: bool
) -> tuple[WorkerClient, Coordination]:
    """Return the worker, as this rank sees it, and what its ranks agree on.

    Args:
        config: Settings.
        member: Rank of this process.
        named: The endpoint that the user named. None: this user's worker of this job, which is started where there is
            none.
        hooks: The user's commit hooks.
        at_once: What was named must answer now; else the worker is looked for in the background.

    Raises:
        ConfigError: The endpoint is malformed.
        WorkerUnavailableError: `at_once`, and nobody answers at `named`.
    """
    endpoint = named or default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    socket_path(endpoint)
    worker, rank = _Reached(), member.rank
    ranks = Coordination(
        rank,
        config,
        lambda: find_exchange(rank) or process.board(),
        package=__version__,
        name=member.name,
        worker=worker,
    )
    worker.process = process = WorkerClient(
        config, ranks, endpoint=endpoint, named=named is not None, package=__version__, hooks=hooks
    )
    if named is not None and at_once:
        process.connect(start=False)
    else:
        process.connect_soon()
    return process, ranks


class _Reached(Worker):
    """The worker of `process`, which is made after this."""

    process: WorkerClient

    def instance(self) -> str:
        try:
            return self.process.connect().worker.instance
        except WorkerUnavailableError:
            return ""

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        return self.process.call(build, timeout_s)
