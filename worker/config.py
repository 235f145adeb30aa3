"""The worker's settings: one frozen dataclass, checked when built."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass

from asyncckpt import __version__
from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import ConfigError
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.fields import address, port
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.protocol.options import (
    DRAIN_TIMEOUT_S,
    IDLE_EXIT_S,
    KEEP_SNAPSHOTS_S,
    LOG_FORMATS,
    LOOPBACK,
    MAX_THREADS,
    MIN_BANDWIDTH,
)
from asyncckpt_worker.core.machine import CoreConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Settings of a worker.

    Attributes:
        endpoint: `ipc:///absolute/path` at which it listens.
        roots: Directories below which it may write; empty allows every absolute path.
        idle_exit_s: It exits after this time without sessions and saves; 0: never.
        while_pid: While this process runs, the worker does not exit when idle; 0: no process.
        keep_snapshots_s: How long snapshots of trainers that have exited stay in memory, for the restarted trainers to
            load; 0 frees them at once.
        drain_timeout_s: How long a drain waits for submitted saves.
        staging_grace_s: How long a drain waits for saves that are still being staged. Chosen, not measured: staging
            takes seconds at most.
        threads: Threads that write one rank's files, unless its save asks for a number; 0:
            `rank_writer.DEFAULT_THREADS`.
        max_write_bandwidth: Maximum bytes per second that all saves together write; 0: no limit.
        max_mirror_bandwidth: Maximum bytes per second that all copies to mirrors together send; 0: no limit.
        mirror_roots: Directories whose checkpoints are copied to their mirrors, if an earlier worker has not done so.
        heartbeat_s: Interval at which trainers send heartbeats, by which a trainer learns of lost messages within a
            second. The worker takes no silence for a death.
        advertise, port: Address and port by which workers of other nodes reach this one if it leads them; 0: any port.
        events: Whether it writes `events.jsonl` beside the checkpoints.
        metrics: `127.0.0.1:PORT` at which it serves metrics to Prometheus; None: no metrics.
        supervised: Whether `$NOTIFY_SOCKET` is meant for this process.
        log_format: "human" or "json".
        log_file: Path of the log; None: stderr.

    Raises:
        ConfigError: A value is not valid.
    """

    endpoint: str
    roots: tuple[str, ...] = ()
    idle_exit_s: float = IDLE_EXIT_S
    while_pid: int = 0
    keep_snapshots_s: float = KEEP_SNAPSHOTS_S
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    staging_grace_s: float = 10.0
    threads: int = 0
    max_write_bandwidth: int = 0
    max_mirror_bandwidth: int = 0
    mirror_roots: tuple[str, ...] = ()
    heartbeat_s: float = 0.5
    advertise: str = LOOPBACK
    port: int = 0
    events: bool = False
    metrics: str | None = None
    supervised: bool = False
    log_format: str = "human"
    log_file: str | None = None

    def __post_init__(self) -> None:
        socket_path(self.endpoint)
        for name in ("idle_exit_s", "keep_snapshots_s", "drain_timeout_s", "staging_grace_s", "heartbeat_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; expected seconds, 0 or more", field=name, value=value)
        if type(self.threads) is not int or self.threads == 1 or not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(
                f"threads is {self.threads!r}; expected 2 to {MAX_THREADS}, or 0 for the default",
                field="threads",
                value=self.threads,
            )
        for name in ("max_write_bandwidth", "max_mirror_bandwidth"):
            rate = getattr(self, name)
            if type(rate) is not int or (rate and rate < MIN_BANDWIDTH):
                raise ConfigError(
                    f"{name} is {rate!r}; expected {MIN_BANDWIDTH} or more bytes per second, or 0: no limit",
                    field=name,
                    value=rate,
                )
        if type(self.while_pid) is not int or self.while_pid < 0:
            raise ConfigError(
                f"while_pid is {self.while_pid!r}; expected a process id", field="while_pid", value=self.while_pid
            )
        if not address(f"tcp://{self.advertise}:{self.port}") or not port(self.port):
            raise ConfigError(
                f"advertise is {self.advertise!r}, port {self.port!r}; expected a host name or address, and 0 to 65535",
                field="advertise",
                value=self.advertise,
            )
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                f"log_format is {self.log_format!r}; expected one of {LOG_FORMATS}",
                field="log_format",
                value=self.log_format,
            )
        for root in self.roots:
            if not root.startswith("/") and not is_object_url(root):
                raise ConfigError(f"root {root!r} is not absolute", field="roots", value=root)


def core_config(config: WorkerConfig) -> CoreConfig:
    """Return the settings of the core, with a new random instance ID."""
    return CoreConfig(
        package=__version__,
        pid=os.getpid(),
        pid_start=start_ticks(os.getpid()) or 0,
        instance=secrets.token_hex(8),
        heartbeat_s=config.heartbeat_s,
        idle_exit_s=config.idle_exit_s,
        drain_timeout_s=config.drain_timeout_s,
        staging_grace_s=config.staging_grace_s,
        keep_snapshots_s=config.keep_snapshots_s,
        mirror_roots=config.mirror_roots,
    )
