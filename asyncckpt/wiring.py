"""The default parts of an `AsyncCheckpointer`, put together."""

from __future__ import annotations

import os
import sys

from asyncckpt import __version__
from asyncckpt.client import WorkerProcess
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.coordination import Coordination
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.hooks import HookRunner
from asyncckpt.process_group import find_exchange
from asyncckpt.protocol.endpoint import default_endpoint, socket_path


def reach_worker(
    config: CheckpointerConfig, rank: RankInfo, named: str | None, hooks: HookRunner
) -> tuple[WorkerProcess, Coordination]:
    """Return the worker, as this rank sees it, and what its ranks agree on.

    Args:
        config: Settings.
        rank: Of this process.
        named: The endpoint that the user named: it must answer now. None: this user's worker of this job, which is
            looked for, and started where there is none, in the background.
        hooks: The user's commit hooks.

    Raises:
        ConfigError: The endpoint is malformed.
        WorkerUnavailableError: Nobody answers at `named`.
    """
    endpoint = named or default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    socket_path(endpoint)
    ranks = Coordination(
        rank,
        config,
        lambda: find_exchange(rank) or process.board(),
        package=__version__,
        place=lambda: _place_of(process),
    )
    process = WorkerProcess(config, ranks, endpoint=endpoint, named=named is not None, package=__version__, hooks=hooks)
    if named is not None:
        process.connect(start=False)
    else:
        process.connect_soon()
    return process, ranks


def _place_of(process: WorkerProcess) -> str:
    """Return what tells this worker from others; "" while none can be reached."""
    try:
        return f"{process.endpoint} ({process.connect().worker.instance})"
    except WorkerUnavailableError:
        return ""
