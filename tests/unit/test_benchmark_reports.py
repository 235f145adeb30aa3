"""The comparing part of the benchmarks: what a failing peer looks like, tables and pictures."""

from __future__ import annotations

import json
import pathlib
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import chart, contest_results, contest_tables, cpu, rounds, table, trace

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "CPU",
    "cores": 2,
    "memory_nbytes": 1 << 34,
    "kernel": "6.1",
    "file_system": "ext4",
    "versions": {"torch": "2"},
}
LIMITS = {"write_s": 0.4, "read_s": 0.7, "copy_s": 0.1}


def figures(scale: float = 1.0, *, fsyncs: bool = True, **more: Any) -> dict[str, Any]:
    """Return what a contender's process prints."""
    save = {"stall_s": 0.0061 * scale, "lost_s": 0.12 * scale, "durable_s": 0.5 * scale, "steps": 1}
    return {
        "fsyncs": fsyncs,
        "verifies": fsyncs,
        "outlives": False,
        "cold": save,
        "warm": [save, save],
        "memory_over_state": 1.01,
        "load_cold_s": 0.8 * scale,
        "load_warm_s": 0.2 * scale,
        **more,
    }


def compared(state: str = "gpt", *, asked: int = 2) -> dict[str, Any]:
    """Return a result with a contender of ours, two peers, and one that fails."""
    contenders = {
        "asyncckpt": figures(),
        "torch.save": figures(7, fsyncs=False, other_loads={"mmap": {"cold_s": 0.98, "warm_s": 0.17}}),
        "dcp.save": figures(9),
        "torch _experimental": {"error": "OSError: [Errno 24] Too many | open *files*\nsecond line"},
    }
    rounds = [{"limits": LIMITS, "contenders": contenders} for _ in range(2)]
    return {
        "benchmark": "compare",
        "state": state,
        "machine": MACHINE,
        "saves": 3,
        "rounds_asked": asked,
        "budget_s": 60.0,
        "deadline_s": 30.0,
        "took_s": 50.0,
        "rounds": rounds,
    }


# ---- how a contender ends


@pytest.mark.parametrize(
    ("output", "stderr", "code", "late_s", "found"),
    [
        ('save 1\n{"a": 1}\n', "", 0, None, {"a": 1}),
        ('save 1\n{"a": 1}\n', "hangs at its exit", -9, 5.0, {"a": 1}),
        ("save 1\nsave 2\n", "", -9, 5.0, {"error": "not ended after 5 s (save 2)"}),
        ("", "", -9, 5.0, {"error": "not ended after 5 s"}),
        ("making the state\n", "x\nToo many open files\n\n", -6, None, None),
        ("", "", 1, None, {"error": "ended with 1"}),
    ],
)
def test_what_a_contender_leaves_is_its_figures_or_why_there_are_none(
    tmp_path: pathlib.Path, output: str, stderr: str, code: int, late_s: float | None, found: Any
) -> None:
    (tmp_path / "log").write_text(stderr)
    found = found or {"error": "ended with -6 (making the state): Too many open files"}
    assert rounds.outcome(output, tmp_path / "log", code, late_s) == found


# ---- tables and pictures


def test_the_table_shows_medians_failures_and_who_does_not_fsync() -> None:
    lines = contest_tables.compare_table(compared()).splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    mine = "| 0.006 | 0.12 | 0.12 (0.12 to 0.12) | 0.50 | 0.50 (0.50 to 0.50) | 1.01 | memory 0.80 | memory 0.20 |"
    assert f"{mine} yes | no |" in rows["asyncckpt"]
    assert "3.50*" in rows["torch.save"] and "5.60 (mmap 0.98)" in rows["torch.save"]
    assert "fails: OSError: [Errno 24] Too many / open files" in rows["torch _experimental"]
    assert len({line.count("|") for line in rows.values()}) == 1, "every row has every column"
    assert not any("left out" in line for line in lines)


def test_rounds_that_the_budget_left_out_are_told() -> None:
    assert "3 of 5 rounds were left out: 60 s were up." in contest_tables.compare_table(compared(asked=5))
    interrupted = compared(asked=5) | {"ended": "not"}
    assert "3 of 5 rounds were left out: the run was interrupted." in contest_tables.compare_table(interrupted)


def test_the_table_says_what_was_measured_otherwise_than_the_rest() -> None:
    result = compared() | {"peer_saves_s": 15.0}
    assert not contest_results.notes(compared()), "nothing, where all have done the same"
    ours = figures(other_loads={"disk": {"cold_s": 0.42, "warm_s": 0.13}})
    slow = figures(9)
    slow["warm"] = slow["warm"][:1]
    saves_only = {key: value for key, value in slow.items() if "load" not in key and "memory" not in key}
    for number in range(4):
        contenders = {"asyncckpt": ours, "asyncckpt, prepared": ours | {"prepare_s": 0.5 + number}}
        contenders["dcp.save"] = slow if number < rounds.ROUNDS_OF_LOADS else saves_only
        result["rounds"][number:] = [{"limits": LIMITS, "contenders": contenders}]
    shown = contest_tables.compare_table(result)
    assert "`prepare()` took 2.00 s, before the training." in shown
    assert "0.42 (memory 0.80) | 0.13 (memory 0.20)" in shown
    assert "Our loads: from the disk, in brackets from the worker's memory." in shown
    assert "Fewer saves in a round, since they take long: dcp.save 2." in shown
    assert "Memory and loads of the others are of 2 rounds." in shown
    found = contest_results.values(result, "dcp.save")
    assert isinstance(found, dict)
    assert {measure: len(found[measure]) for measure in ("lost cold", "lost warm", "load cold", "memory")} == {
        "lost cold": 4,
        "lost warm": 4,
        "load cold": 2,
        "memory": 2,
    }


def test_a_load_costs_its_call_and_what_it_leaves_to_the_training() -> None:
    result = compared()
    mapped = {"mmap": {"cold_s": 0.5, "cold_late_s": 1.0, "warm_s": 0.125, "warm_late_s": 0.75}}
    for row in result["rounds"]:
        row["contenders"]["torch.save"] |= {"load_cold_late_s": 0.5, "load_warm_late_s": 0.0, "other_loads": mapped}
    assert "Loads: the call, and what it leaves to the training" in contest_tables.compare_table(result)
    assert "Loads: the call, and what it leaves to the training" not in contest_tables.compare_table(compared())
    found = contest_results.values(result, "torch.save")
    assert isinstance(found, dict)
    assert found["load cold"] == pytest.approx([0.8 * 7 + 0.5] * 2)
    assert found["load warm"] == pytest.approx([0.2 * 7] * 2)
    shown = contest_tables.compare_table(result)
    assert "| 5.60 + 0.50 (mmap 0.50 + 1.00) | 1.40 (mmap 0.12 + 0.75) |" in shown
    ours = contest_results.values(result, "asyncckpt")
    assert isinstance(ours, dict) and ours["load cold"] == [0.8] * 2, "of an older result the call alone"
    assert (found["load cold, mmap"], found["load warm, mmap"]) == ([1.5] * 2, [0.875] * 2)


def test_the_picture_shows_our_loads_from_the_disk_whose_limit_it_draws() -> None:
    result = compared()
    for row in result["rounds"]:
        row["contenders"]["asyncckpt"] = figures(other_loads={"disk": {"cold_s": 0.42, "warm_s": 0.13}})
    assert "asyncckpt: 0.420 s, quartiles" in chart.draw(result)


def test_documents_get_what_was_measured_and_keep_the_rest(tmp_path: pathlib.Path) -> None:
    (tmp_path / "compare-gpt.json").write_text(json.dumps(compared()))
    text = f"a\n<!-- compare -->\nold\n{table.END}\nb\n<!-- compare-small -->\nnone yet\n{table.END}\nc\n"
    made = table.rendered(text, tmp_path)
    assert made.startswith("a\n<!-- compare -->\n![gpt") and "(images/compare-gpt.svg)" in made
    assert "\n| seconds |" in made and "\nold\n" not in made
    assert made.endswith(f"\nb\n<!-- compare-small -->\nnone yet\n{table.END}\nc\n")
    assert table.rendered(made, tmp_path) == made


def test_pictures_are_made_of_every_result_that_is_there_and_always_the_same(tmp_path: pathlib.Path) -> None:
    (tmp_path / "compare-small.json").write_text(json.dumps(compared("small")))
    (tmp_path / "trace-tiny.json").write_text(json.dumps(traced()))
    table.draw(tmp_path, tmp_path / "images")
    made = {path.name: path.read_text() for path in (tmp_path / "images").iterdir()}
    assert set(made) == {"compare-small.svg", "trace-tiny.svg"}
    table.draw(tmp_path, tmp_path / "images")
    assert made == {path.name: path.read_text() for path in (tmp_path / "images").iterdir()}
    for text in made.values():
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text


def test_a_picture_names_every_contender_and_its_failure() -> None:
    text = "".join(ElementTree.fromstring(chart.draw(compared())).itertext())
    for name in ("asyncckpt", "torch.save", "dcp.save", "torch _experimental", "Too many", "the disk's limit 0.40"):
        assert name in text


def traced() -> dict[str, Any]:
    events = [
        ("MainThread", "stage", 0.0, 0.005),
        ("MainThread", "train", 0.005, 2.0),
        ("asyncckpt-overlap", "copy", 0.006, 0.1),
        ("worker asyncckpt-write-0", "hash", 0.11, 0.12),
        ("worker asyncckpt-io_0", "write", 0.12, 0.4),
        ("worker asyncckpt-prepare-0", "prepare", 0.01, 0.02),
        ("worker asyncckpt-commit-0", "commit", 0.45, 0.5),
    ]
    return {
        "machine": MACHINE,
        "state": "tiny",
        "staging": "overlap",
        "nbytes": 10**9,
        "until_s": 0.5,
        "events": events,
    }


def test_a_trace_has_a_row_for_every_thread() -> None:
    text = "".join(ElementTree.fromstring(trace.draw(traced())).itertext())
    for name in ("training thread", "copier 1", "worker: directory, commit", "worker: writer 1", "worker: writer 2"):
        assert name in text


def test_events_of_one_kind_that_follow_at_once_are_one() -> None:
    events = [("a", "hash", n * 1e-4, n * 1e-4 + 5e-5) for n in range(4)] + [("a", "write", 4e-4, 5e-4)]
    events += [("b", "hash", 0.0, 1e-4), ("b", "hash", 0.1, 0.2)]
    assert trace.joined(events) == [
        ("a", "hash", 0.0, 0.00035),
        ("b", "hash", 0.0, 0.0001),
        ("a", "write", 0.0004, 0.0005),
        ("b", "hash", 0.1, 0.2),
    ]


def test_cpu_beyond_the_copy_is_what_the_trainer_used_less_the_copy() -> None:
    rows = [{"save_s": 0.004, "trainer_s": 0.11, "copy_s": 0.1, "worker_s": 0.09}] * 3
    result = {
        "machine": MACHINE,
        "states": {"gpt": {"nbytes": 10**9, "tensors": 444, "overlap": rows, "blocking": rows}},
    }
    assert cpu.summary(result, "gpt", "overlap") == pytest.approx(
        {"save()": 4.0, "copy": 100.0, "beyond": 10.0, "worker": 90.0}
    )
    assert "| gpt: 444 tensors, 1.00 GB | overlap | 4 | 100 | 10 | 20 | 90 |" in table.cpu_table(result)


def test_a_single_value_stands_alone_in_the_table() -> None:
    result = compared(asked=1)
    result["rounds"] = result["rounds"][:1]
    one = result["rounds"][0]["contenders"]
    one["asyncckpt"]["warm"] = one["asyncckpt"]["warm"][:1]
    assert "| 0.006 | 0.12 | 0.12 | 0.50 | 0.50 |" in contest_tables.compare_table(result)


def test_tables_say_how_quiet_the_machine_was_as_far_as_the_result_does() -> None:
    result = compared()
    assert "2 rounds of 3 saves each; not told how busy it was;" in contest_tables.compare_table(result)
    for share, row in zip((0.01, 0.3), result["rounds"], strict=True):
        row["busy_before"] = share
    assert "the processors at most 30 % busy before every round: not a quiet machine;" in contest_tables.compare_table(
        result
    )


def test_the_limits_of_first_and_later_reads_are_told_apart() -> None:
    result = compared()
    assert "O_DIRECT write 0.40 s, read 0.70 s, copy" in contest_tables.compare_table(result)
    for row in result["rounds"]:
        row["limits"] = {"write_s": 0.4, "read_fresh_s": 0.45, "read_again_s": 0.25, "copy_s": 0.1}
    assert "O_DIRECT write 0.40 s, first read 0.45 s, later ones 0.25 s, copy" in contest_tables.compare_table(result)
    assert "the disk's limit 0.45" in "".join(ElementTree.fromstring(chart.draw(result)).itertext())
