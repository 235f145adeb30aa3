"""The metrics: names with units, no path in them. Whoever asks for them, and how badly, others are answered."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.errors import ConfigError
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.observers import Observers

prometheus_client = pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
parser = pytest.importorskip("prometheus_client.parser")
prometheus = pytest.importorskip("asyncckpt_worker.service.prometheus")
DEADLINE_S = 60.0

REPORT: dict[str, Any] = {
    "package": '1.0"\\x\n',
    "uptime_s": 12.5,
    "draining": False,
    "counters": {"saves_committed": 3, "saves_failed": 1, "written_nbytes": 10**12, "events_dropped": 0},
    "failures": {"ENOSPC": 1},
    "sessions": [{}, {}],
    "slots": [{"nbytes": 100}, {"nbytes": 28}],
    "kept": [{"nbytes": 7}],
    "ranks": [{"phase": "writing"}, {"phase": "committed"}],
    "runs": [
        {"run": "a" * 12, "committed_step": 40, "committed_age_s": 2.0, "in_flight": 1, "committed_path": "/secret/x"},
        {"run": "b" * 12, "committed_step": None, "committed_age_s": None, "in_flight": 0, "committed_path": None},
    ],
    "mirrors": [
        {"phase": "copying", "nbytes": 100, "copied_nbytes": 60, "age_s": 30.0},
        {"phase": "waiting", "nbytes": 50, "copied_nbytes": None, "age_s": 20.0},
        {"phase": "failed", "nbytes": 7, "copied_nbytes": None, "age_s": 90.0},
    ],
    "process": {"rss_nbytes": 5, "private_nbytes": 4, "cpu_seconds": 1.5, "fds": 9, "write_nbytes": 77},
}
UNITS = ("_seconds", "_bytes", "_total", "_info", "_step", "_fds")
COUNTS = {"asyncckpt_draining", "asyncckpt_sessions", "asyncckpt_ranks", "asyncckpt_slots", "asyncckpt_saves_in_flight"}
COUNTS |= {"asyncckpt_mirrors_behind"}
"""Gauges that count things, or say yes or no: they have no unit."""


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One that has seen a report, and four saves; requests have a short deadline."""
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_S", 1.0)
    found = prometheus.Exporter("127.0.0.1:0")
    found.show(REPORT, 1000.0)
    for seconds in (0.05, 0.1, 3.0, 1e6):
        found.observe("save", seconds)
    yield found
    found.close()
    found.close()


def read(text: str) -> tuple[dict[str, str], dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """Return types by name, and samples, as Prometheus's own parser has them."""
    types, samples = {}, {}
    for family in parser.text_string_to_metric_families(text):
        types[family.name + ("_total" if family.type == "counter" else "")] = family.type
        for sample in family.samples:
            samples[(sample.name, tuple(sorted(sample.labels.items())))] = sample.value
    return types, samples


def page_of(exporter: Any) -> str:
    text: str = prometheus_client.generate_latest(exporter.registry).decode()
    return text


def test_what_the_worker_reports_is_told(exporter: Any) -> None:
    types, samples = read(page_of(exporter))
    assert samples[("asyncckpt_saves_total", (("outcome", "committed"),))] == 3
    assert samples[("asyncckpt_save_failures_total", (("kind", "ENOSPC"),))] == 1
    assert samples[("asyncckpt_written_bytes_total", ())] == 10**12
    assert samples[("asyncckpt_slot_bytes", (("state", "lent"),))] == 128
    assert samples[("asyncckpt_ranks", (("phase", "writing"),))] == 1
    assert samples[("asyncckpt_private_memory_bytes", ())] == 4
    assert samples[("asyncckpt_last_committed_timestamp_seconds", (("run", "a" * 12),))] == 998.0
    assert not any(("run", "b" * 12) in labels for _, labels in samples), "a run that has committed nothing"
    assert samples[("asyncckpt_info", (("version", REPORT["package"]),))] == 1
    behind = [samples[(f"asyncckpt_mirrors_behind{unit}", ())] for unit in ("", "_bytes", "_seconds")]
    assert behind == [2, 40 + 50, 30.0], "what is left to copy, since when; without what was given up"
    assert types["asyncckpt_save_seconds"] == "histogram"
    assert samples[("process_open_fds", ())] > 0


def test_names_have_units_counters_end_in_total_and_no_label_holds_a_path(exporter: Any) -> None:
    assert "/secret" not in page_of(exporter)
    types, _ = read(page_of(exporter))
    for name, kind in types.items():
        assert name.endswith(UNITS) or name in COUNTS, name
        assert (kind == "counter") == name.endswith("_total"), name
        assert name.startswith(("asyncckpt_", "process_"))


def test_each_bucket_holds_those_below_it(exporter: Any) -> None:
    _, samples = read(page_of(exporter))
    counts = [samples[("asyncckpt_save_seconds_bucket", (("le", str(b)),))] for b in prometheus.BUCKETS_S]
    assert counts[0] == 2 and counts == sorted(counts) and counts[-1] == 3
    assert samples[("asyncckpt_save_seconds_count", ())] == 4
    assert math.isclose(samples[("asyncckpt_save_seconds_sum", ())], 1e6 + 3.15)


def test_before_the_first_report_there_is_a_page_too() -> None:
    empty = prometheus.Exporter("127.0.0.1:0")
    try:
        assert read(page_of(empty))[1][("asyncckpt_sessions", ())] == 0
    finally:
        empty.close()


def test_without_a_thread_nobody_is_answered_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        exporter = prometheus.Exporter("127.0.0.1:0")
        exporter.show(REPORT, 1000.0)
    try:
        exporter.show(REPORT, 1000.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=DEADLINE_S) as page:
            assert b"asyncckpt_sessions 2.0" in page.read()
    finally:
        exporter.close()


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncckpt_worker.service.prometheus", None)
    with pytest.raises(ConfigError, match=r"asyncckpt\[metrics\]") as caught:
        Observers(WorkerConfig(endpoint="ipc:///tmp/x.sock", metrics="127.0.0.1:0"), {}, lambda name: None)
    assert caught.value.field == "metrics"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9555", ("127.0.0.1", 9555)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("127.1.2.3:1", ("127.1.2.3", 1)),
        ("[::1]:65535", ("::1", 65535)),
        *((text, None) for text in ("0.0.0.0:9555", "10.0.0.1:1", "[::]:1", "host:1")),
        *((text, None) for text in ("9555", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", ":1", "")),
    ],
)
def test_only_loopback_addresses_are_taken(text: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert prometheus.loopback_address(text) == found
        return
    with pytest.raises(ConfigError, match="metrics"):
        prometheus.loopback_address(text)


# ---- who asks -------------------------------------------------------------------------------------------------------


def connected(exporter: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exporter.port), timeout=DEADLINE_S)


def answer_to(exporter: Any, request: bytes) -> bytes:
    """Return everything that is said to a request."""
    found = b""
    with connected(exporter) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(request)
        while piece := connection.recv(65536):
            found += piece
    return found


def is_answered(exporter: Any) -> bool:
    head, _, body = answer_to(exporter, b"GET /metrics HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.0 200 OK\r\n") and b"asyncckpt_uptime_seconds 12.5" in body


def test_connections_that_say_nothing_or_a_byte_now_and_then_are_closed_at_their_deadline(exporter: Any) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(exporter)) for _ in range(2 * prometheus.MAX_REQUESTS)]
        slow = silent.pop()
        slow.settimeout(0.1)
        deadline = time.monotonic() + DEADLINE_S
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < deadline:
                slow.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        assert time.monotonic() < deadline
        for connection in silent:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert is_answered(exporter)


def test_one_that_reads_nothing_holds_up_nobody(exporter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_S", DEADLINE_S)
    with connected(exporter) as idle:
        exporter.show({**REPORT, "failures": {f"{n:0500}": n for n in range(20_000)}}, 1000.0)
        idle.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert idle.recv(1) == b"H"
        exporter.show(REPORT, 1000.0)
        assert is_answered(exporter)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /metrics HTTP/1.0\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"\xff\xfe\0 \x80 x\r\n\r\n",
        b"\n\n",
        b"\0" * 100_000,
    ],
)
def test_strange_requests_get_no_metrics_and_the_next_is_answered(
    exporter: Any, request_: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert b" 200 " not in answer_to(exporter, request_)
    assert is_answered(exporter)
    assert capfd.readouterr() == ("", ""), "nothing goes to the worker's log"


def test_a_port_that_is_taken_is_an_error(exporter: Any) -> None:
    from asyncckpt.errors import EndpointError

    with pytest.raises(EndpointError, match="choose another port"):
        prometheus.Exporter(f"127.0.0.1:{exporter.port}")
