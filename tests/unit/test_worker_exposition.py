"""The page of metrics: what Prometheus's text format asks for, names with units, and no path in it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from asyncckpt.errors import ConfigError
from asyncckpt_worker.exposition import BUCKETS_S, Histogram, page
from asyncckpt_worker.scraping import loopback_address

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
    "process": {"rss_nbytes": 5, "private_nbytes": 4, "cpu_seconds": 1.5, "fds": 9, "write_nbytes": 77},
}
UNITS = ("_seconds", "_bytes", "_total", "_info", "_step", "_fds")
COUNTS = {"asyncckpt_draining", "asyncckpt_sessions", "asyncckpt_ranks", "asyncckpt_slots", "asyncckpt_saves_in_flight"}
"""Gauges that count things, or say yes or no: they have no unit."""

_NAME, _LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
_SAMPLE = re.compile(
    rf"({_NAME})(?:\{{({_LABEL}=\"(?:[^\"\\\n]|\\[\\\"n])*\"(?:,{_LABEL}=\"(?:[^\"\\\n]|\\[\\\"n])*\")*)\}})? (\S+)"
)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> tuple[dict[str, str], Samples]:
    """A strict reader of text format 0.0.4: types by name, and samples. Anything out of order fails."""
    types: dict[str, str] = {}
    samples: Samples = {}
    family = ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert re.fullmatch(_NAME, family) and family not in types, "one block for each name"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and kind in ("counter", "gauge", "histogram")
            types[name] = kind
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            allowed = (
                {family} if types[family] != "histogram" else {f"{family}{s}" for s in ("_bucket", "_sum", "_count")}
            )
            assert match[1] in allowed, "a sample stands in its family"
            labels = tuple(re.findall(rf'({_LABEL})="((?:[^"\\]|\\.)*)"', match[2] or ""))
            assert (match[1], labels) not in samples, "each sample once"
            samples[(match[1], labels)] = float(match[3])
    return types, samples


def made() -> str:
    histograms = {name: Histogram() for name in ("save", "stage", "write", "commit")}
    for seconds in (0.05, 0.1, 3.0, 1e6):
        histograms["save"].add(seconds)
    return page(REPORT, histograms, 1000.0)


def test_the_page_is_of_the_text_format() -> None:
    types, samples = parsed(made())
    assert samples[("asyncckpt_saves_total", (("outcome", "committed"),))] == 3
    assert samples[("asyncckpt_save_failures_total", (("kind", "ENOSPC"),))] == 1
    assert samples[("asyncckpt_written_bytes_total", ())] == 10**12
    assert samples[("asyncckpt_slot_bytes", (("state", "lent"),))] == 128
    assert samples[("asyncckpt_ranks", (("phase", "writing"),))] == 1
    assert samples[("asyncckpt_last_committed_timestamp_seconds", (("run", "a" * 12),))] == 998.0
    assert not any(("run", "b" * 12) in labels for _, labels in samples), "a run that has committed nothing"
    assert types["asyncckpt_save_seconds"] == "histogram"


def test_names_have_units_and_counters_end_in_total() -> None:
    types, _ = parsed(made())
    for name, kind in types.items():
        assert name.endswith(UNITS) or name in COUNTS, name
        assert (kind == "counter") == name.endswith("_total"), name
        assert name.startswith(("asyncckpt_", "process_"))


def test_no_label_holds_a_path() -> None:
    assert "/secret" not in made()


def test_strange_characters_in_labels_are_escaped() -> None:
    _, samples = parsed(made())
    assert ("asyncckpt_info", (("version", '1.0\\"\\\\x\\n'),)) in samples


def test_each_bucket_holds_those_below_it() -> None:
    _, samples = parsed(made())
    counts = [samples[("asyncckpt_save_seconds_bucket", (("le", f"{b:g}"),))] for b in BUCKETS_S]
    assert counts[0] == 2 and counts == sorted(counts) and counts[-1] == 3
    assert (
        samples[("asyncckpt_save_seconds_bucket", (("le", "+Inf"),))]
        == 4
        == samples[("asyncckpt_save_seconds_count", ())]
    )
    assert math.isclose(samples[("asyncckpt_save_seconds_sum", ())], 1e6 + 3.15)


def test_prometheus_own_parser_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is in the dev extra only")
    families = {family.name: family for family in parser.text_string_to_metric_families(made())}
    assert families["asyncckpt_saves"].type == "counter" and families["asyncckpt_save_seconds"].type == "histogram"


def test_a_page_of_an_empty_report_is_one_too() -> None:
    parsed(page({}, {}, 0.0))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9555", ("127.0.0.1", 9555)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("127.1.2.3:1", ("127.1.2.3", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_loopback_addresses_are_taken(text: str, found: tuple[str, int]) -> None:
    assert loopback_address(text) == found


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:9555", "10.0.0.1:1", "[::]:1", "9555", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "host:1", ":1", ""],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        loopback_address(text)
