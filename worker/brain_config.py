"""What the brain is told of a worker's settings, and of the process that it runs in."""

from __future__ import annotations

import os
import secrets

from asyncckpt import __version__
from asyncckpt.protocol.identity import start_ticks
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.core.shutdown import BrainConfig


def brain_config(config: WorkerConfig) -> BrainConfig:
    """Return the brain's settings, with a random identity of this incarnation."""
    return BrainConfig(
        package=__version__,
        pid=os.getpid(),
        pid_start=start_ticks(os.getpid()) or 0,
        instance=secrets.token_hex(8),
        heartbeat_s=config.heartbeat_s,
        idle_exit_s=config.idle_exit_s,
        drain_timeout_s=config.drain_timeout_s,
        staging_grace_s=config.staging_grace_s,
        keep_snapshots_s=config.keep_snapshots_s,
    )
