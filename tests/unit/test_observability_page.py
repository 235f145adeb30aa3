"""docs/observability.md is what the code does: metrics, events, options, the line for TensorBoard."""

from __future__ import annotations

import pathlib
import re
from concurrent.futures import Future

import pytest
from worker_bench import Bench

from asyncckpt.maintenance import event_log
from asyncckpt.protocol.options import _OPTIONS
from asyncckpt.save_handle import SaveReport

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "observability.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_metric_is_named_with_its_labels() -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")
    prometheus = pytest.importorskip("asyncckpt_worker.service.prometheus")
    report = {
        **Bench().core.report(),
        "process": dict.fromkeys(("private_nbytes", "write_nbytes"), 1),
        "counters": {},
        "failures": {"x": 1},
        "runs": [{"run": "r", "committed_step": 1, "committed_age_s": 1.0, "in_flight": 0}],
    }
    exporter = prometheus.Exporter("127.0.0.1:0")
    try:
        exporter.show(report, 0.0)
        text = prometheus_client.generate_latest(exporter.registry).decode()
    finally:
        exporter.close()
    made = {name: set() for name in re.findall(r"^# TYPE (\S+)", text, re.M)}
    for name, labels in re.findall(r"^(\w+?)(?:_bucket|_sum|_count)?(\{.*\})? \S+$", text, re.M):
        if name in made:
            made[name] |= set(re.findall(r"(\w+)=", labels)) - {"le"}
    table = section("Prometheus").partition("| name | type |")[2].partition("\n\n")[0]
    named = {name: set(filter(None, [label])) for name, label in re.findall(r"`(\w+)(?:\{(\w+)\})?`", table)}
    assert named == made


def test_names_and_limits_of_the_events_are_the_codes() -> None:
    text = section("`events.jsonl`")
    assert event_log.EVENTS_NAME in text and event_log.ROTATED_NAME in text
    assert event_log.MAX_EVENTS_NBYTES == 64 << 20 and "64 MB" in text
    sources = [REPOSITORY / "worker" / name for name in ("service/observers.py", "core/status.py")]
    told = "".join(path.read_text() for path in [*sources, REPOSITORY / "asyncckpt" / "save_events.py"])
    rows = [row for row in re.findall(r"^\| (.*?) \| (?:worker|trainer) \| (.*) \|$", text, re.M)]
    assert len(rows) == 6
    for field in re.findall(r"`(\w+)`", " ".join(row[1] for row in rows)):
        known = ("write", "fsync", "index", "commit", "written", "failed", "skipped")
        assert f'"{field}"' in told or field in known, field


def test_options_that_are_named_exist() -> None:
    for option in re.findall(r"(--[a-z][a-z-]*)", PAGE):
        assert option in {*_OPTIONS, "--json", "--once"}, option


@pytest.mark.parametrize("error", [None, RuntimeError("disk full")])
def test_the_line_for_tensorboard_runs(error: Exception | None) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", section("TensorBoard, Weights & Biases"), re.M | re.S)[0]
    added: list[tuple[str, float, int]] = []

    class Handle:
        written: Future[SaveReport] = Future()

    class Checkpointer:
        def save(self, state: object, path: str) -> Handle:
            return Handle()

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            added.append((name, value, step))

    exec(code, {"checkpointer": Checkpointer(), "state": {}, "step": 7, "writer": Writer()})
    if error is None:
        Handle.written.set_result(SaveReport(save_id="s", nbytes=1, seconds={"total": 0.5}))
    else:
        Handle.written.set_exception(error)
    assert added == ([("checkpoint/total_s", 0.5, 7)] if error is None else [])
