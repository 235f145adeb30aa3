"""Serves metrics to Prometheus at a loopback address, with `prometheus_client` (the extra `metrics`), in own threads.

The control loop passes its status report and does not wait for clients, nor do clients wait for the loop. No label
holds a path: a client that can reach the port gets figures, not names.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt.protocol.fields import FAILED
from asyncckpt_worker.core.model import ENDS
from asyncckpt_worker.core.status import OPEN_PHASES

REQUEST_TIMEOUT_S = 5.0
"""Deadline of a request and its answer. Chosen: Prometheus itself waits 10 s."""

MAX_REQUESTS = 32
"""Maximum concurrent requests; further connections are closed. Chosen."""

CLOSE_TIMEOUT_S = 2.0
ACCEPT_FAILED_S = 0.05
"""How long a failed accept waits: without a free file descriptor the next one fails at once too."""

PREFIX = "asyncckpt_"
MAX_RUNS_SHOWN = 20
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds of the histograms, in seconds. Chosen: a small model on one disk to terabytes on a busy file system."""

HISTOGRAMS = {
    "save": "From the first rank's begin to the commit, of committed saves.",
    "stage": "From a rank's begin to its seal: as long as the copy takes.",
    "write": "From a rank's seal until its files are durable.",
    "commit": "Publishing the manifest.",
}

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


def loopback_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; port 0 is any free port.

    Raises:
        ConfigError: The address is malformed, or other machines can reach it.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if not ipaddress.ip_address("127.0.0.1" if bare == "localhost" else bare).is_loopback:
            raise ConfigError(
                f"metrics is {text!r}: other machines could reach it; use 127.0.0.1:PORT or [::1]:PORT, and a proxy "
                "that authenticates clients",
                field="metrics",
                value=text,
            )
        number = int(port) if colon and port.isascii() and port.isdigit() else -1
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise ConfigError(f"metrics is {text!r}; expected 127.0.0.1:PORT", field="metrics", value=text)
    return ("127.0.0.1" if bare == "localhost" else bare), number


class Exporter:
    """The metrics and their HTTP server. `show` and `observe` do not block; `close` is idempotent.

    Args:
        address: `HOST:PORT`.

    Raises:
        ConfigError: As `loopback_address`.
        EndpointError: The port is in use.

    Attributes:
        registry: All metrics.
        port: The port at which it listens.
    """

    def __init__(self, address: str) -> None:
        host, port = loopback_address(address)
        self.registry = CollectorRegistry()
        self._report = _ReportCollector()
        self.registry.register(self._report)
        ProcessCollector(registry=self.registry)
        self._histograms = {
            name: Histogram(f"{PREFIX}{name}_seconds", text, buckets=BUCKETS_S, registry=self.registry)
            for name, text in HISTOGRAMS.items()
        }
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise EndpointError(
                f"cannot listen at {address} for metrics: {error.strerror}; choose another port", endpoint=address
            ) from error
        self._server.set_app(make_wsgi_app(self.registry))
        self.port = self._server.server_port
        self._thread: threading.Thread | None = None
        self._serve()

    def _serve(self) -> None:
        """Start the server's thread; if the system gives no thread, the next `show` tries again."""
        thread = threading.Thread(target=self._server.serve_forever, name="asyncckpt-metrics", daemon=True)
        with contextlib.suppress(RuntimeError):  # can't start new thread
            thread.start()
            self._thread = thread

    def show(self, report: Mapping[str, Any], now: float) -> None:
        """Set the worker's status report of the time `now`, seconds since 1970."""
        self._report.latest = report, now
        if self._thread is None:
            self._serve()

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to one of `HISTOGRAMS`."""
        self._histograms[name].observe(seconds)

    def close(self) -> None:
        """Free the port. Blocks: at most `CLOSE_TIMEOUT_S`."""
        if self._thread is not None and self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        self._server.server_close()


class _ReportCollector(Collector):
    """Collects metrics from the last status report."""

    def __init__(self) -> None:
        self.latest: tuple[Mapping[str, Any], float] = {}, 0.0

    def collect(self) -> Iterable[Metric]:
        report, now = self.latest
        counters, slots, kept = report.get("counters") or {}, report.get("slots") or (), report.get("kept") or ()
        yield _gauge("info", "The worker; always 1.", {report.get("package", ""): 1}, "version")
        yield _gauge("uptime_seconds", "Since its start.", report.get("uptime_s", 0.0))
        yield _gauge("draining", "1 while it takes no new sessions.", float(bool(report.get("draining"))))
        ended = {name: counters.get(f"saves_{name}", 0) for name in ENDS}
        yield _counter("saves", "Saves that have ended, by outcome.", ended, "outcome")
        failures = report.get("failures") or {}
        yield _counter("save_failures", "Saves that were not committed, by the kind of error.", failures, "kind")
        for name, key, text in (
            ("unchanged_saves", "saves_unchanged", "Saves bit for bit like the one before."),
            ("written_bytes", "written_nbytes", "Bytes of files that were made durable."),
            ("sessions_died", "sessions_died", "Trainers that ended without a goodbye."),
            ("mirrored", "mirrored", "Checkpoints that were copied to their mirrors."),
            ("mirror_retries", "mirror_retries", "Copies to mirrors that failed, and are tried again."),
            ("mirrors_failed", "mirrors_failed", "Copies to mirrors that were given up."),
            ("internal_errors", "internal_errors", "Bugs of the worker's own."),
            ("events_dropped", "events_dropped", "Lines that events.jsonl lacks."),
        ):
            yield _counter(name, text, counters.get(key, 0))
        yield _gauge("sessions", "Trainers that are connected.", len(report.get("sessions") or ()))
        phases = [row["phase"] for row in report.get("ranks") or ()]
        under_way = {name: phases.count(name) for name in OPEN_PHASES}
        yield _gauge("ranks", "Ranks that have a save under way here, by its phase.", under_way, "phase")
        nbytes = {"lent": sum(s["nbytes"] for s in slots), "kept": sum(s["nbytes"] for s in kept)}
        text = "Memory of slots: lent to trainers, or kept for those that come back."
        yield _gauge("slot_bytes", text, nbytes, "state")
        yield _gauge("slots", "Slots.", {"lent": len(slots), "kept": len(kept)}, "state")
        yield from _of_mirrors([row for row in report.get("mirrors") or () if row["phase"] != FAILED])
        yield from _of_runs([run for run in report.get("runs") or () if run["committed_step"] is not None], now)
        process = report.get("process") or {}
        if "private_nbytes" in process:
            yield _gauge("private_memory_bytes", "Resident memory without slots.", process["private_nbytes"])
        if "write_nbytes" in process:
            text = "Bytes that the process gave to storage, as /proc counts."
            yield _counter("storage_written_bytes", text, process["write_nbytes"])


def _of_mirrors(behind: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    yield _gauge("mirrors_behind", "Checkpoints that are still to be copied to their mirrors.", len(behind))
    nbytes = sum((row["nbytes"] or 0) - (row["copied_nbytes"] or 0) for row in behind)
    yield _gauge("mirrors_behind_bytes", "What is left to copy of them.", max(0, nbytes))
    age_s = max((row["age_s"] for row in behind), default=0.0)
    yield _gauge("mirrors_behind_seconds", "For how long the oldest of them has waited.", age_s)


def _of_runs(runs: Sequence[Mapping[str, Any]], now: float) -> Iterable[Metric]:
    shown = {str(run["run"]): run for run in runs[-MAX_RUNS_SHOWN:]}
    steps = {name: run["committed_step"] for name, run in shown.items()}
    yield _gauge("last_committed_step", "Step of the run's newest checkpoint.", steps, "run")
    times = {name: round(now - run["committed_age_s"], 3) for name, run in shown.items()}
    yield _gauge("last_committed_timestamp_seconds", "When that was committed, since 1970.", times, "run")
    in_flight = {name: run["in_flight"] for name, run in shown.items()}
    yield _gauge("saves_in_flight", "Saves of the run that have not ended.", in_flight, "run")


def _gauge(name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=[label] if label else []), values)


def _counter(name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a counter; `prometheus_client` adds `_total` to its name."""
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=[label] if label else []), values)


def _filled(family: Any, values: float | Mapping[str, float]) -> Metric:
    rows = [([str(key)], value) for key, value in values.items()] if isinstance(values, Mapping) else [([], values)]
    for labels, value in rows:
        family.add_metric(labels, value)
    found: Metric = family
    return found


class _Handler(WSGIRequestHandler):
    """Does not log requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Serves at most `MAX_REQUESTS` at once, each with a deadline."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind as `HTTPServer` does, but without its DNS query, which may never be answered."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_FAILED_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(REQUEST_TIMEOUT_S, _shut, [request])
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected or missed the deadline."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
