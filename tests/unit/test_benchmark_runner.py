"""The runner of the benchmarks: rounds, budgets, result files, other checkouts, figures and targets."""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import pathlib
import pkgutil
import random
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import CHECKOUT, RESULTS, figures, limits, machine, processes, runner, targets
from benchmarks.runner import Question, Run

DESCRIPTION = {"cpu": "CPU", "cores": 2, "date": "2026-01-02", "versions": {"torch": "2"}}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An idle machine, and a clock that only the rounds of a test move."""
    now = [100.0]
    monkeypatch.setattr(machine, "until_idle", lambda *_: {"busy_before": 0.0, "idle_wait_s": 0.0})
    monkeypatch.setattr(machine, "describe", lambda directory: DESCRIPTION)
    monkeypatch.setattr(machine, "commit", lambda checkout: f"commit of {checkout.name}")
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def options(**more: Any) -> argparse.Namespace:
    asked = {"rounds": 3, "budget_s": 1000.0, "quiet_wait_s": 0.0, "saves": 2}
    return argparse.Namespace(**asked | more)


def a_run(path: pathlib.Path, *others: pathlib.Path, **more: Any) -> Run:
    here = path.parent / "here"
    return Run("overlap", options(**more), path.parent, [here, *others], path)


def rounds_of(clock: list[float], seconds: Iterator[float]) -> Callable[[int, pathlib.Path], dict[str, Any]]:
    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        clock[0] += next(seconds)
        return {"number": number, "of": checkout.name}

    return one


# ---- rounds and the budget


def test_rounds_are_made_until_there_are_as_many_as_asked(tmp_path: pathlib.Path, clock: list[float]) -> None:
    run = a_run(tmp_path / "r.json")
    run.make(rounds_of(clock, itertools.repeat(2.0)))
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["number"] for row in found["rounds"]] == [0, 1, 2]
    assert found["ended"] == "done" and found["took_s"] == 6.0 and found["rounds"][0]["took_s"] == 2.0
    assert found["saves"] == 2 and found["code"] == {"commit": "commit of here"}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"], "nothing half written is left"


def test_a_round_that_cannot_end_within_the_budget_does_not_begin(tmp_path: pathlib.Path, clock: list[float]) -> None:
    run = a_run(tmp_path / "r.json", rounds=9, budget_s=25.0)
    run.make(rounds_of(clock, itertools.repeat(10.0)))
    assert len(run.result["rounds"]) == 2 and run.result["ended"] == "budget"


def test_the_first_round_is_made_whatever_the_budget(tmp_path: pathlib.Path, clock: list[float]) -> None:
    run = a_run(tmp_path / "r.json", budget_s=5.0)
    run.make(rounds_of(clock, itertools.repeat(10.0)))
    assert len(run.result["rounds"]) == 1


def test_a_round_that_fails_ends_the_run_and_those_before_are_kept(tmp_path: pathlib.Path, clock: list[float]) -> None:
    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        if number:
            raise processes.ProcessError("not ended after 5 s")
        return {}

    a_run(tmp_path / "r.json").make(one)
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["rounds"]) == 1 and found["ended"] == "not ended after 5 s"


def test_each_round_is_in_the_file_as_soon_as_it_is_made(tmp_path: pathlib.Path) -> None:
    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        if number:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path / "r.json").make(one)
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["rounds"]) == 1 and found["ended"] == "interrupted"


def test_without_a_round_the_old_result_file_stays(tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.json").write_text("old")

    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        raise processes.ProcessError("no")

    a_run(tmp_path / "r.json").make(one)
    assert (tmp_path / "r.json").read_text() == "old"


# ---- other checkouts


def test_checkouts_take_turns_in_each_round_and_another_one_begins_the_next(
    tmp_path: pathlib.Path, clock: list[float]
) -> None:
    made: list[str] = []

    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        made.append(checkout.name)
        return {"stall_s": [1.0, 3.0] if checkout.name == "here" else [number + 1.0]}

    run = a_run(tmp_path / "r.json", tmp_path / "old")
    run.make(one)
    assert made == ["here", "old", "old", "here", "here", "old"]
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["rounds"]) == 3 and len(found["against"]["old"]["rounds"]) == 3
    assert found["against"]["old"]["commit"] == "commit of old"
    shown = "\n".join(runner.report({"old": found["against"]["old"], "here": found}, ["stall_s"], "r"))
    assert "/ old: 1.000 (0.833 to 1.500)" in shown, "ratios are taken within a round"


def test_a_round_is_missing_in_both_if_one_checkout_fails(tmp_path: pathlib.Path) -> None:
    def one(number: int, checkout: pathlib.Path) -> dict[str, Any]:
        if number and checkout.name == "here":
            raise processes.ProcessError("no")
        return {}

    run = a_run(tmp_path / "r.json", tmp_path / "old")
    run.make(one)
    assert [len(run.rows[checkout]) for checkout in run.checkouts] == [1, 1]


def test_a_process_of_a_round_imports_the_package_of_its_checkout_and_the_benchmarks_of_this_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    other = tmp_path / "other"
    for package in ("asyncckpt", "worker"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").write_text(f"MARK = 'the other {package}'\n")
    with runner.workplace(tmp_path, [CHECKOUT, other]) as place:
        links = place / "links-1"
        how: dict[str, Any] = {"deadline_s": 60.0, "environment": {"PYTHONPATH": str(links)}, "cwd": links}
        assert processes.call(pkgutil.resolve_name, "asyncckpt:MARK", **how) == "the other asyncckpt"
        assert processes.call(pkgutil.resolve_name, "asyncckpt_worker:MARK", **how) == "the other worker"
        assert processes.call(pkgutil.resolve_name, "benchmarks.machine:OVER_S", **how) == machine.OVER_S


def test_what_is_no_checkout_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match="no checkout"), runner.workplace(tmp_path, [tmp_path]):
        pass
    assert not list(tmp_path.iterdir())


# ---- processes


def test_a_function_that_fails_or_takes_too_long_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(processes.ProcessError, match=r"^not ended after 1 s$"):
        processes.call(time.sleep, 600.0, deadline_s=1.0)
    with pytest.raises(processes.ProcessError, match="StatisticsError: "):
        processes.call(figures.quartiles, [], deadline_s=60.0)


def test_options_of_a_question_depend_on_the_state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    asked = Question(lambda context: {}, [], {"state": ("gpt", "large"), "saves": {"": 6, "large": 3}, "only": ["all"]})
    monkeypatch.setattr(runner, "question", lambda name: asked)
    monkeypatch.setattr(Run, "round", lambda run, *_: seen.append(run.options) or {})
    for arguments in ([], ["--state", "large"], ["--state", "large", "--saves", "7", "--only", "a", "b"]):
        given = [*arguments, "--rounds", "1", "--out", str(tmp_path / "r.json"), "--dir", str(tmp_path)]
        assert runner.main("overlap", given) == 0
    assert [(one.state, one.saves) for one in seen] == [("gpt", 6), ("large", 3), ("large", 7)]
    assert [one.only for one in seen] == [["all"], ["all"], ["a", "b"]]
    with pytest.raises(SystemExit, match="2"):
        runner.main("overlap", ["--state", "other"])


# ---- figures and targets


def test_figures_are_found_by_path_and_ratios_are_taken_within_a_round() -> None:
    rounds = [
        {"saves": [{"s": 2.0, "copy": 1.0}, {"s": 6.0, "copy": 2.0}], "limits": {"write": 2.0}, "ok": True},
        {"saves": [{"s": 4.0, "copy": 4.0}], "limits": {"write": 8.0}, "error": "none"},
    ]
    result = {"rounds": rounds}
    assert figures.values(result, "saves/s") == [2.0, 6.0, 4.0]
    assert figures.values(result, "saves/s / saves/copy") == [2.0, 3.0, 1.0]
    assert figures.values(result, "saves/s / limits/write") == [1.0, 3.0, 0.5]
    assert figures.values(result, "ok") == figures.values(result, "missing") == []


def test_of_several_matches_the_one_with_the_greatest_median_counts() -> None:
    result = {"rounds": [{"ways": {"a": {"s": [1.0, 9.0, 1.0]}, "b, c": {"s": [2.0, 2.0]}}}]}
    assert figures.matches(result, "ways/*/s") == {"a": [1.0, 9.0, 1.0], "b, c": [2.0, 2.0]}
    assert figures.values(result, "ways/*/s") == [2.0, 2.0]
    assert figures.matches(result, "ways/*/s / ways/*/s") == {"a": [1.0] * 3, "b, c": [1.0] * 2}


@pytest.mark.parametrize(
    ("values", "most", "said"),
    [
        ([0.9, 1.0, 1.4], False, "reached"),
        ([1.0], False, "one value: reached"),
        ([0.8, 0.9, 1.1, 1.2, 1.3], False, "within the spread"),
        ([1.05, 1.1, 1.2], False, "missed"),
        ([1.2], False, "one value: missed"),
        ([0.5, 0.5, 0.6, 1.1], True, "missed"),
        ([1.0], True, "reached"),
    ],
)
def test_a_target_is_missed_only_if_the_interval_excludes_it(values: list[float], most: bool, said: str) -> None:
    assert targets.verdict(values, 1.0, most) == said


def test_every_result_file_that_is_kept_has_the_figures_of_its_targets() -> None:
    missing = [name for name, *_, said, file in targets.rows() if said == "not measured" and (RESULTS / file).exists()]
    assert not missing


def test_a_limit_is_the_best_of_its_choices_and_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is the quickest on this machine: the limit of each kind is found by itself."""
    monkeypatch.setattr(machine, "until_discarded", lambda directory: None)
    read: list[tuple[int, int]] = []

    def move_s(memory: mmap.mmap, block: int, threads: int, **files: pathlib.Path) -> float:
        if "target" in files:
            files["target"].write_bytes(memory[:1])
            return 0.5 if (block, threads) == limits.CHOICES[-1] else 1.0
        assert files["source"].exists() and block * threads <= len(memory)
        read.append((block, threads))
        return 0.7 if (block, threads) == limits.CHOICES[0] else 1.0

    monkeypatch.setattr(limits, "move_s", move_s)
    found = limits.measure(str(tmp_path), 4096)
    assert (found["write_s"], found["read_fresh_s"], found["read_again_s"]) == (0.5, 0.7, 0.7) and found["copy_s"] > 0
    assert sorted(read[::2]) == sorted(read[1::2]) == sorted(limits.CHOICES), "each reads new files, and others again"
    assert all(one != two for one, two in zip(read[::2], read[1::2], strict=True)), "a file is read in two ways"
    assert not list(tmp_path.iterdir())


def test_limits_write_read_and_copy_every_byte(tmp_path: pathlib.Path) -> None:
    source, buffer, path = limits.memory(3 * limits.MIB), limits.memory(2 * limits.MIB), tmp_path / "file"
    source[:] = random.Random(1).randbytes(len(source))
    assert limits.move_s(source, limits.MIB, 2, target=path) > 0 and path.read_bytes() == source[:]
    assert limits.move_s(buffer, limits.MIB, 2, source=path, target=tmp_path / "copy") > 0
    assert (tmp_path / "copy").read_bytes() == source[:]
    assert limits.move_s(buffer, limits.MIB, 2, source=path) > 0
    last = {buffer[: limits.MIB], buffer[limits.MIB :]}  # the first thread has read the first and the third block
    assert last == {source[2 * limits.MIB :], source[limits.MIB : 2 * limits.MIB]}
    with pytest.raises(FileExistsError):
        limits.move_s(source, limits.MIB, 2, target=path)
    target = limits.memory(len(source), shared=True)
    assert limits.copy_s(target, source) > 0 and target[:] == source[:]
