"""Observers of saves: the service manager, `events.jsonl`, Prometheus. The control loop never waits for them.

The service manager is notified by the protocol of sd_notify(3), if `$NOTIFY_SOCKET` is set. Only a worker in the
foreground does that: a worker that a trainer has started inherits a variable that is meant for the trainer.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import ConfigError
from asyncckpt.maintenance.event_log import EventLog
from asyncckpt.protocol.save_phases import COMMITTED, DURABLE, OPEN, RECOVERING, SEALED, WRITING
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.core.status import PhaseChange
from asyncckpt_worker.io.writer import check_root
from asyncckpt_worker.service import log

if TYPE_CHECKING:
    from asyncckpt_worker.service.prometheus import Exporter

SHARE = 0.5
"""Interval of watchdog messages as a fraction of `WATCHDOG_USEC`, as sd_watchdog_enabled(3) advises."""

MIN_INTERVAL_S = 0.1

MAX_ERROR_CHARS = 1000
REFRESH_S = 1.0
"""Maximum age of the metrics. Prometheus usually scrapes every 15 s."""


class Supervisor:
    """Notifies the service manager that started this process, if there is one.

    Args:
        environ: Environment: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` are used.
        pid: PID of this process.

    Attributes:
        interval_s: How often `alive` must be called at least; None without a watchdog.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.interval_s = _interval(environ, pid) if self._address else None

    def ready(self, serving: str) -> None:
        """Notify that the start is complete. `serving`: what is served, and by which worker, for the status text."""
        self._notify(f"READY=1\nSTATUS=serving {serving}")

    def stopping(self, text: str) -> None:
        """Notify that the worker drains or exits."""
        self._notify(f"STOPPING=1\nSTATUS={text}")

    def alive(self) -> None:
        """Notify that the control loop is running, if there is a watchdog."""
        if self.interval_s is not None:
            self._notify("WATCHDOG=1")

    def _notify(self, text: str) -> None:
        """Send one datagram. Does not wait: if the queue is full, the message is lost."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except (OSError, ValueError) as error:
            with contextlib.suppress(Exception):
                log.write("warning", f"cannot notify the service manager of {text.split('=', maxsplit=1)[0]}: {error}")


def _interval(environ: Mapping[str, str], pid: int) -> float | None:
    try:
        period_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6
        watched = int(environ.get("WATCHDOG_PID", str(pid)))
    except ValueError:
        return None
    return max(MIN_INTERVAL_S, period_s * SHARE) if period_s > 0 and watched == pid else None


class EventWriter:
    """Writes `events.jsonl` for the runs that this worker leads; followers write nothing.

    Args:
        roots: Directories below which it may write; empty allows every path.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.log = EventLog(check=partial(check_root, roots=tuple(roots)))

    def write(self, changes: Sequence[PhaseChange]) -> None:
        """Queue the lines of phase changes. Does not wait."""
        for change in changes:
            if change.followed:
                continue
            name = _event_name(change)
            if name:
                self._add(change, name, _rank_fields(change))
            if change.ends:
                self._add(change, change.phase, _save_fields(change))

    def _add(self, change: PhaseChange, name: str, facts: dict[str, Any]) -> None:
        known: dict[str, Any] = {"save_id": change.save_id, "name": os.path.basename(change.path)}
        if change.step is not None:  # else rank 0 has not sealed it yet
            known["step"] = change.step
        self.log.add(os.path.dirname(change.path), name, {**known, **facts}, umask=change.umask)

    def close(self) -> None:
        """Write the queued lines. Blocks: at most a second."""
        self.log.close()


def is_seal(change: PhaseChange) -> bool:
    """Whether the rank's sealed snapshot was accepted."""
    return change.phase in (SEALED, WRITING) and change.was in ("", OPEN, RECOVERING)


def _event_name(change: PhaseChange) -> str:
    """Return `begun`, `sealed` or `durable`; "" if no line is written."""
    if is_seal(change):
        return "sealed"
    return {OPEN: "begun", DURABLE: "durable"}.get(change.phase, "")


def _rank_fields(change: PhaseChange) -> dict[str, Any]:
    seconds = {k.removeprefix("seconds_"): round(v, 6) for k, v in change.report.items() if k.startswith("seconds_")}
    facts: dict[str, Any] = {"rank": change.rank, "nbytes": change.nbytes}
    if change.was:
        facts["seconds_before"] = round(change.was_s, 6)
    if seconds:
        facts["seconds"] = seconds
    if "direct" in change.report:
        facts["direct"] = bool(change.report["direct"])
    return facts


def _save_fields(change: PhaseChange) -> dict[str, Any]:
    facts: dict[str, Any] = {"ranks": change.world_size, "seconds_total": round(change.begun_s, 6)}
    commit = change.report.get("seconds_commit")
    if commit is not None:
        facts["seconds"] = {"commit": round(commit, 6)}
    if change.error:
        facts["error"] = change.error[:MAX_ERROR_CHARS]
    return facts


class Observers:
    """Passes phase changes to events.jsonl and Prometheus, and notifies the service manager.

    Used from the control loop's thread.

    Args:
        config: Chooses the observers.
        count: Counts internal errors of observers; they fail no save.
        environ: Environment of the process, used only if the worker is supervised.

    Raises:
        ConfigError, EndpointError: The address of the metrics cannot be used.
    """

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str], count: Callable[[str], None]) -> None:
        self._count_bug = count
        self._supervisor = Supervisor(environ if config.supervised else {}, os.getpid())
        self._exporter = _exporter(config.metrics) if config.metrics else None
        self._event_writer = EventWriter(config.roots) if config.events else None
        self._refreshed = float("-inf")

    @property
    def wait_s(self) -> float:
        """Maximum time between two calls of `update`."""
        return self._supervisor.interval_s or float("inf")

    @property
    def metrics_port(self) -> int:
        """Port of the metrics; 0: none."""
        return self._exporter.port if self._exporter else 0

    @property
    def events_dropped(self) -> int:
        """Number of lines that were not written."""
        return self._event_writer.log.dropped if self._event_writer else 0

    def ready(self, endpoint: str) -> None:
        """Notify that trainers can connect."""
        self._supervisor.ready(endpoint)
        if self._exporter is not None:
            log.write("info", f"metrics are served at port {self._exporter.port} of this machine, path /metrics")

    def handle_phase_changes(self, changes: Sequence[PhaseChange]) -> None:
        """Pass phase changes to the observers."""
        exporter, event_writer = self._exporter, self._event_writer
        for change in changes:  # an observer that fails affects neither the others nor the next change
            if exporter is not None:
                self._guarded(lambda change=change: _observe(exporter, change))  # type: ignore[misc]
            if event_writer is not None:
                self._guarded(lambda change=change: event_writer.write([change]))  # type: ignore[misc]

    def draining(self) -> None:
        """Notify the service manager that a drain has begun."""
        self._supervisor.stopping("draining")

    def update(self, monotonic: float, wall: float, report: Callable[[], Mapping[str, Any]]) -> None:
        """Refresh watchdog and metrics; with every Tick."""
        self._supervisor.alive()
        exporter = self._exporter
        if exporter is not None and monotonic - self._refreshed >= REFRESH_S:
            self._refreshed = monotonic
            self._guarded(lambda: exporter.show(report(), wall))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call, and log an exception. IMPORTANT: nothing is raised: an observer's failure must never fail a save."""
        try:
            call()
        except Exception as error:
            self._count_bug("internal_errors")
            log.write("error", f"a bug in the worker, in an observer of saves: {error!r}", error=error)

    def close(self, reason: str) -> None:
        """Notify the service manager, and close all observers. Idempotent. Blocks: at most a few seconds."""
        self._supervisor.stopping(reason)
        if self._event_writer is not None:
            self._event_writer.close()
        if self._exporter is not None:
            self._exporter.close()


def _exporter(address: str) -> Exporter:
    try:
        from asyncckpt_worker.service.prometheus import Exporter
    except ImportError as error:
        raise ConfigError(
            f"metrics={address!r} needs prometheus_client: pip install 'asyncckpt[metrics]' ({error})",
            field="metrics",
            value=address,
        ) from error
    return Exporter(address)


def _observe(exporter: Exporter, change: PhaseChange) -> None:
    if is_seal(change) and change.was == OPEN and change.local:
        exporter.observe("stage", change.was_s)
    if change.phase == DURABLE and change.local:
        exporter.observe("write", change.report.get("seconds_write", change.was_s))
    if change.ends and change.phase == COMMITTED and not change.followed:
        exporter.observe("save", change.begun_s)
        exporter.observe("commit", change.report.get("seconds_commit", 0.0))
