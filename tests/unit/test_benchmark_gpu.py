"""`benchmarks.gpu`: what its figures are made of, and what it says of the tests."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

pytest.importorskip("numpy")  # torch.distributed.checkpoint

from benchmarks import gpu, gpu_tests, kept, training
from benchmarks.gpu_training import Loop


def save(took_s: float, *, steps: int = 10, save_s: float = 0.25, wait_s: float = 0.5) -> dict[str, Any]:
    return {"save_s": save_s, "wait_s": wait_s, "steps": steps, "took_s": took_s, "phases_s": None}


def a_round(took_s: float) -> dict[str, Any]:
    alone = [{"pinned_s": 0.75, "copy_s": 1.0}]
    return {"quiet_step_s": [0.5, 1.5], "alone": alone, **{kind: [save(took_s)] for kind in gpu.KINDS}}


def test_steps_and_lost_time_are_compared_with_as_many_quiet_steps_as_were_made_and_the_one_before_the_save() -> None:
    found = gpu.figures([a_round(11.0), a_round(12.0), a_round(13.0)])
    assert found["step_ratio"]["values"] == [1.1, 1.2, 1.3] and found["lost_overlap_s"]["values"] == [1.0, 2.0, 3.0]
    assert found["step_ratio"]["median"] == 1.2 and found["step_ratio"]["quartiles"] == pytest.approx([1.15, 1.25])
    assert found["d2h_over_pinned"]["values"] == [0.75] * 3
    for name in ("stall_overlap_s", "stall_device_s", "dcp_async_stall_s"):
        assert found[name]["values"] == [0.75] * 3, "the call, and what waits in front of the optimizer's step"


@pytest.mark.parametrize(
    ("name", "low", "median", "high", "said"),
    [
        ("d2h_over_pinned", 0.8, 0.9, 0.95, "reached"),
        ("d2h_over_pinned", 0.8, 0.85, 0.9, "within the spread"),
        ("d2h_over_pinned", 0.7, 0.8, 0.85, "missed"),
        ("step_ratio", 1.0, 1.03, 1.2, "reached"),
        ("step_ratio", 1.01, 1.04, 1.2, "within the spread"),
        ("stall_device_s", 0.006, 0.007, 0.008, "missed"),
        ("lost_overlap_s", 9.0, 9.0, 9.0, ""),
    ],
)
def test_the_copy_has_to_be_fast_and_all_else_short(
    name: str, low: float, median: float, high: float, said: str
) -> None:
    assert gpu.verdict(name, {"median": median, "quartiles": [low, high]}) == said


def test_what_became_of_the_tests_is_told_by_name() -> None:
    told = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
        <testcase classname="tests.gpu.test_a" name="test_good[x]"/>
        <testcase classname="tests.gpu.test_a" name="test_bad"><failure message="no"/></testcase>
        <testcase classname="tests.gpu.test_a" name="test_broken"><error message="no"/></testcase>
        <testcase classname="tests.gpu.test_b" name="test_two"><skipped message="one GPU"/></testcase>
    </testsuite></testsuites>"""
    found = gpu_tests.outcome(1, told)
    assert found == {
        "exit_code": 1,
        "passed": 1,
        "failed": ["tests/gpu/test_a.py::test_bad", "tests/gpu/test_a.py::test_broken"],
        "skipped": ["tests/gpu/test_b.py::test_two"],
    }
    assert gpu_tests.text_of(found) == "1 passed, 2 failed, 1 skipped"


@pytest.mark.parametrize(("exit_code", "ended_with"), [(0, 0), (1, 1), (None, 1)])
def test_a_test_that_fails_stops_no_measurement_and_is_told_by_the_exit_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, exit_code: int | None, ended_with: int
) -> None:
    tests = {"exit_code": exit_code, "passed": 3, "failed": ["a test"] * bool(exit_code), "skipped": []}
    monkeypatch.setattr(gpu_tests, "run", lambda: tests)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "A GPU 9000")
    monkeypatch.setattr(gpu, "Loop", lambda device: None)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *arguments, **more: None)  # no worker was started
    monkeypatch.setattr(gpu.sources, "code_of", lambda name: {"benchmarks": name})
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("ASYNCCKPT_JOB", "a test")

    def measure(loop: None, directory: pathlib.Path, file: kept.Kept, budget: kept.Budget) -> str:
        file.result |= {"nbytes": 10**9, "warnings": ["no room"], "figures": gpu.figures([a_round(11.0)])}
        return "done"

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["gpu", "--tests", "--dir", str(tmp_path)])
    assert gpu.main() == ended_with
    found = json.loads((tmp_path / "results" / "gpu-a-gpu-9000.json").read_text())
    assert found["tests"] == tests and found["code"] == {"benchmarks": "gpu"} and found["ended"] == "done"


def test_tests_that_have_not_ended_are_an_outcome_too() -> None:
    assert gpu_tests.outcome(None, "") == {"exit_code": None, "passed": 0, "failed": [], "skipped": []}
    assert "not ended" in gpu_tests.text_of(gpu_tests.outcome(None, ""))


def test_a_wait_of_a_hook_and_one_in_front_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("cpu", lambda: training.GPT(width=16, layers=1, heads=1), (1, 4))
    now_s = 0.0

    def later(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr("benchmarks.gpu_training.time.perf_counter", lambda: now_s)
    loop.attach(lambda optimizer: optimizer.register_step_pre_hook(lambda *_: later(2.0)) and None)
    loop.before_step = lambda: later(0.5)
    loop.waited_s = 0.0
    loop.step()
    assert loop.waited_s == 2.5
