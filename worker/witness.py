"""Whoever looks on: the service manager, `events.jsonl`, Prometheus. Nothing here decides, waits, or is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, COMMITTED, DURABLE
from asyncckpt_worker import logs
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.exposition import Histogram, page
from asyncckpt_worker.moves import Moved
from asyncckpt_worker.scraping import Scraped
from asyncckpt_worker.supervisor import Supervisor
from asyncckpt_worker.telling import Teller, is_seal

REFRESH_S = 1.0
"""How old a page of metrics may be. Prometheus asks every 15 s as a rule."""


class Witness:
    """See the module. Used from the control loop's thread.

    Args:
        config: Says who looks on.
        count: Counts bugs of our own, which cost nobody a save.
        environ: Of the process; without the service manager's where that is not ours.

    Raises:
        ConfigError, EndpointError: The address of the metrics.
    """

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str], count: Callable[[str], None]) -> None:
        self._count_bug = count
        self._supervisor = Supervisor(environ if config.supervised else {}, os.getpid())
        self._scraped = Scraped(config.metrics) if config.metrics else None
        self._teller = Teller(config.roots) if config.events else None
        self._histograms = {name: Histogram() for name in ("save", "stage", "write", "commit")}
        self._refreshed = float("-inf")
        self._drains = False

    @property
    def wait_s(self) -> float:
        """The longest time that the loop may sleep."""
        return self._supervisor.interval_s or float("inf")

    @property
    def metrics_port(self) -> int:
        """Where the metrics are; 0: nowhere."""
        return self._scraped.port if self._scraped else 0

    @property
    def events_dropped(self) -> int:
        """Lines that were not written."""
        return self._teller.log.dropped if self._teller else 0

    def ready(self, endpoint: str) -> None:
        """Trainers can connect."""
        self._supervisor.ready(endpoint)
        if self._scraped is not None:
            logs.write("info", f"metrics at port {self._scraped.port} of this machine, /metrics")

    def saw(self, moves: Sequence[Moved]) -> None:
        """Something has moved."""
        if moves:
            self._guarded(lambda: self._saw(moves))

    def _saw(self, moves: Sequence[Moved]) -> None:
        for moved in moves:
            self._count(moved)
        if self._teller is not None:
            self._teller.tell(moves)

    def _count(self, moved: Moved) -> None:
        if is_seal(moved) and moved.was == BEGUN and moved.local:
            self._histograms["stage"].add(moved.was_s)
        if moved.phase == DURABLE and moved.local:
            self._histograms["write"].add(moved.report.get("seconds_write", moved.was_s))
        if moved.ends and moved.phase == COMMITTED and not moved.followed:
            self._histograms["save"].add(moved.begun_s)
            self._histograms["commit"].add(moved.report.get("seconds_commit", 0.0))

    def turned(self, monotonic: float, wall: float, report: Callable[[], Mapping[str, Any]], *, drains: bool) -> None:
        """The control loop has turned once more."""
        self._supervisor.alive(monotonic)
        if drains and not self._drains:
            self._drains = True
            self._supervisor.stopping("draining")
        if self._scraped is not None and monotonic - self._refreshed >= REFRESH_S:
            self._refreshed = monotonic
            self._guarded(lambda: self._refresh(page(report(), self._histograms, wall)))

    def _refresh(self, text: str) -> None:
        assert self._scraped is not None
        self._scraped.page = text

    def _guarded(self, call: Callable[[], None]) -> None:
        """IMPORTANT: nothing is raised. Who looks on must never cost anybody a save."""
        try:
            call()
        except Exception as error:
            self._count_bug("internal_errors")
            logs.write("error", f"our own bug, in what is told of saves: {error!r}", exc_info=True)

    def close(self, reason: str) -> None:
        """Say goodbye. Twice is fine. Blocks: at most a few seconds."""
        self._supervisor.stopping(reason)
        if self._teller is not None:
            self._teller.close()
        if self._scraped is not None:
            self._scraped.close()
