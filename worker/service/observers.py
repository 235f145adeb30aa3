"""Observers: the service manager, `events.jsonl`, Prometheus. Nothing here decides, waits, or is waited for.

The service manager is told by sd_notify(3), by hand; without `$NOTIFY_SOCKET` nothing is said. Only a worker in the
foreground speaks: one that a trainer has started has inherited a socket that is the trainer's.
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
"""Fraction of `WATCHDOG_USEC` after which the manager gets a heartbeat: what sd_watchdog_enabled(3) advises."""

MIN_INTERVAL_S = 0.1

MAX_ERROR_CHARS = 1000
REFRESH_S = 1.0
"""How old the metrics may be. Prometheus asks every 15 s as a rule."""


class Supervisor:
    """The manager that started this process, or nobody.

    Args:
        environ: Has `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` where there is one.
        pid: Of this process.

    Attributes:
        interval_s: How often `alive` is to be called; None: the manager does not watch.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.interval_s = _interval(environ, pid) if self._address else None
        self._told_at = float("-inf")

    def ready(self, endpoint: str) -> None:
        """The socket is bound: trainers can connect."""
        self._tell(f"READY=1\nSTATUS=serving {endpoint}")

    def stopping(self, text: str) -> None:
        """It drains, or leaves."""
        self._tell(f"STOPPING=1\nSTATUS={text}")

    def alive(self, now: float) -> None:
        """The control loop turns: say so, if it is time for it."""
        if self.interval_s is not None and now - self._told_at >= self.interval_s:
            self._told_at = now
            self._tell("WATCHDOG=1")

    def _tell(self, text: str) -> None:
        """Send one datagram. Never waits: a full queue costs this message."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except (OSError, ValueError) as error:
            with contextlib.suppress(Exception):
                log.write("warning", f"the service manager was not told {text.split('=', maxsplit=1)[0]}: {error}")


def _interval(environ: Mapping[str, str], pid: int) -> float | None:
    try:
        period_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6
        watched = int(environ.get("WATCHDOG_PID", str(pid)))
    except ValueError:
        return None
    return max(MIN_INTERVAL_S, period_s * SHARE) if period_s > 0 and watched == pid else None


class EventWriter:
    """Writes events of the runs that this worker decides on; followers leave it to their leader.

    Args:
        roots: Directories below which it may write; empty allows every path.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.log = EventLog(check=partial(check_root, roots=tuple(roots)))

    def tell(self, moves: Sequence[PhaseChange]) -> None:
        """Put down what has moved. Does not wait."""
        for moved in moves:
            if moved.followed:
                continue
            name = _name(moved)
            if name:
                self._add(moved, name, _of_a_rank(moved))
            if moved.ends:
                self._add(moved, moved.phase, _of_a_save(moved))

    def _add(self, moved: PhaseChange, name: str, facts: dict[str, Any]) -> None:
        known: dict[str, Any] = {"save_id": moved.save_id, "name": os.path.basename(moved.path)}
        if moved.step is not None:  # else rank 0 has not said it yet
            known["step"] = moved.step
        self.log.add(os.path.dirname(moved.path), name, {**known, **facts}, umask=moved.umask)

    def close(self) -> None:
        """Write what is left; at most a second."""
        self.log.close()


def is_seal(moved: PhaseChange) -> bool:
    """Whether the snapshot of a rank has been taken up."""
    return moved.phase in (SEALED, WRITING) and moved.was in ("", OPEN, RECOVERING)


def _name(moved: PhaseChange) -> str:
    """`begun`, `sealed`, `durable`; "" for what no line is about."""
    if is_seal(moved):
        return "sealed"
    return {OPEN: "begun", DURABLE: "durable"}.get(moved.phase, "")


def _of_a_rank(moved: PhaseChange) -> dict[str, Any]:
    seconds = {k.removeprefix("seconds_"): round(v, 6) for k, v in moved.report.items() if k.startswith("seconds_")}
    facts: dict[str, Any] = {"rank": moved.rank, "nbytes": moved.nbytes}
    if moved.was:
        facts["seconds_before"] = round(moved.was_s, 6)
    if seconds:
        facts["seconds"] = seconds
    if "direct" in moved.report:
        facts["direct"] = bool(moved.report["direct"])
    return facts


def _of_a_save(moved: PhaseChange) -> dict[str, Any]:
    facts: dict[str, Any] = {"ranks": moved.world_size, "seconds_total": round(moved.begun_s, 6)}
    commit = moved.report.get("seconds_commit")
    if commit is not None:
        facts["seconds"] = {"commit": round(commit, 6)}
    if moved.error:
        facts["error"] = moved.error[:MAX_ERROR_CHARS]
    return facts


class Observers:
    """Sends what happens to saves to events.jsonl, Prometheus and the service manager.

    Used from the control loop's thread.

    Args:
        config: Says which observers there are.
        count: Counts internal errors of observers; they fail no save.
        environ: Environment of the process, used only if the worker is supervised.

    Raises:
        ConfigError, EndpointError: The address of the metrics.
    """

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str], count: Callable[[str], None]) -> None:
        self._count_bug = count
        self._supervisor = Supervisor(environ if config.supervised else {}, os.getpid())
        self._exporter = _exporter(config.metrics) if config.metrics else None
        self._event_writer = EventWriter(config.roots) if config.events else None
        self._refreshed = float("-inf")
        self._drains = False

    @property
    def wait_s(self) -> float:
        """The longest time that the loop may sleep."""
        return self._supervisor.interval_s or float("inf")

    @property
    def metrics_port(self) -> int:
        """Where the metrics are; 0: nowhere."""
        return self._exporter.port if self._exporter else 0

    @property
    def events_dropped(self) -> int:
        """Lines that were not written."""
        return self._event_writer.log.dropped if self._event_writer else 0

    def ready(self, endpoint: str) -> None:
        """Trainers can connect."""
        self._supervisor.ready(endpoint)
        if self._exporter is not None:
            log.write("info", f"metrics at port {self._exporter.port} of this machine, /metrics")

    def saw(self, moves: Sequence[PhaseChange]) -> None:
        """Something has moved."""
        exporter, event_writer = self._exporter, self._event_writer
        for moved in moves:  # each on its own: what one observer fails at costs neither the others nor the next
            if exporter is not None:
                self._guarded(lambda moved=moved: _observe(exporter, moved))  # type: ignore[misc]
            if event_writer is not None:
                self._guarded(lambda moved=moved: event_writer.tell([moved]))  # type: ignore[misc]

    def turned(self, monotonic: float, wall: float, report: Callable[[], Mapping[str, Any]], *, drains: bool) -> None:
        """The control loop has turned once more."""
        self._supervisor.alive(monotonic)
        if drains and not self._drains:
            self._drains = True
            self._supervisor.stopping("draining")
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
            log.write("error", f"our own bug, in what is told of saves: {error!r}", error=error)

    def close(self, reason: str) -> None:
        """Tell the service manager and close all observers. Idempotent. Blocks: at most a few seconds."""
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


def _observe(exporter: Exporter, moved: PhaseChange) -> None:
    if is_seal(moved) and moved.was == OPEN and moved.local:
        exporter.observe("stage", moved.was_s)
    if moved.phase == DURABLE and moved.local:
        exporter.observe("write", moved.report.get("seconds_write", moved.was_s))
    if moved.ends and moved.phase == COMMITTED and not moved.followed:
        exporter.observe("save", moved.begun_s)
        exporter.observe("commit", moved.report.get("seconds_commit", 0.0))
