"""Ranks in the benchmarks, and the table of targets: whose figure counts, and what is called missed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import contest_tables, figures, ranks, targets

MACHINE = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "CPU",
    "cores": 2,
    "memory_nbytes": 1 << 34,
    "kernel": "6.1",
    "file_system": "ext4",
    "versions": {"torch": "2"},
}


def rank(*, slower_s: float, fds: int = 7) -> dict[str, Any]:
    """Return what one rank measured: steps of a second, a first save and one more."""
    saves = [
        {"stall_s": 0.5, "durable_s": 2.0, "until_s": 3.5 + slower_s, "steps": 3},
        {"stall_s": 0.05 + slower_s, "durable_s": 0.9, "until_s": 1.1 + slower_s, "steps": 1},
    ]
    return {
        "nbytes": 1000,
        "fsyncs": True,
        "quiet_step_s": [1.0, 1.0],
        "saves": saves,
        "added_fds": fds,
        "worker_fds": [19],
    }


def of_ranks() -> dict[str, Any]:
    """Return a result with two ranks, of which the second is slower, and a peer that fails when sharded."""
    both = {"ranks": [rank(slower_s=0.0), rank(slower_s=0.25, fds=9)]}
    row = {
        "limits": {"write_s": 0.4, "read_s": 0.4, "copy_s": 0.1},
        "ddp": {"asyncckpt": both, "dcp.save": both},
        "fsdp2": {"asyncckpt": both, "dcp.save": {"error": "ended with 1: no | good"}},
    }
    return {"benchmark": "ranks", "machine": MACHINE, "saves": 2, "rounds": [row], "took_s": 1.0}


def test_the_slower_rank_counts() -> None:
    found = ranks.values(of_ranks(), "ddp", "asyncckpt")
    assert isinstance(found, dict)
    assert {measure: [round(v, 6) for v in values] for measure, values in found.items()} == {
        "stall cold": [0.5],
        "stall": [0.3],
        "lost cold": [0.75],
        "lost warm": [0.35],
        "durable cold": [2.0],
        "durable warm": [0.9],
    }
    assert ranks.fds(of_ranks()) == {"fds added, per rank": [7, 9] * 2, "fds of the worker": [19] * 4}


def test_a_checkpoint_of_shards_has_the_bytes_of_all_ranks() -> None:
    assert ranks.written_nbytes(of_ranks(), "ddp") == 1000
    assert ranks.written_nbytes(of_ranks(), "fsdp2") == 2000


def test_the_table_of_ranks_has_every_contender_and_why_one_failed() -> None:
    text = contest_tables.ranks_table(of_ranks())
    assert "| ddp: asyncckpt | 0.30 | 0.75 | 0.35 | 2.00 | 0.90 |" in text
    assert "| fsdp2: dcp.save | *fails: ended with 1: no / good* |" in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "not measured"),
        ([0.9, 1.0, 1.4], "reached"),
        ([1.0], "one value: reached"),
        ([0.8, 0.9, 1.1, 1.2, 1.3], "within the spread"),
        ([1.05, 1.1, 1.2], "missed"),
        ([1.2], "one value: missed"),
    ],
)
def test_a_target_is_missed_only_if_the_interval_excludes_it(values: list[float], said: str) -> None:
    target = targets.Target("a figure", "file", 1.0, lambda result: [])
    assert targets.verdict(target, values) == said


@pytest.mark.parametrize(
    ("values", "said"), [([1.0], "reached"), ([0.5, 0.5, 0.6, 1.1], "missed"), ([], "not measured")]
)
def test_of_some_figures_the_most_counts(values: list[float], said: str) -> None:
    target = targets.Target("a figure", "file", 1.0, lambda result: [], most=True)
    assert targets.verdict(target, values) == said


def test_every_target_is_in_the_table_and_one_without_a_file_is_not_measured(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ranks.json").write_text(json.dumps(of_ranks()))
    lines = targets.table(tmp_path).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == len(targets.TARGETS) + 1
    assert (
        "| fds added, per rank | 16 fds | 9 fds | the most of 4 | [reached](../benchmarks/results/ranks.json) |"
        in lines
    )
    assert all(line.endswith("| not measured |") for line in lines[2:-1] if line and "ranks.json" not in line)


NEW = {
    *("the same, by who only loads", "the same, `small`, by who only loads", "the same, `large`, by who only loads"),
    *("the same, one rank", "the same, one rank, `small`"),
}
"""What older result files do not have."""


def test_every_target_finds_its_figures_in_the_result_files_that_are_kept() -> None:
    assert any(values for _, values in targets.rows()), "no result file is there"
    for target, values in targets.rows():
        file = targets.file_of(target)
        if target.file.startswith("compare-") and "code" not in json.loads(file.read_text()):
            continue  # of an older kind: without a prepared contender, and without our loads from the disk
        assert bool(values) == file.exists() or target.name in NEW, target
        assert all(value == value and value >= -10 for value in values)


def test_the_newest_result_of_a_gpu_counts_whatever_it_is_called(tmp_path: pathlib.Path) -> None:
    for name, day, stall in (("gpu-b", "2026-01-02", 0.001), ("gpu-a", "2026-01-03", 0.004)):
        figures = {"stall_overlap_s": {"values": [stall] * 3}, "d2h_over_pinned": {"values": [0.5]}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {"date": day}, "figures": figures}))
    lines = targets.table(tmp_path).splitlines()
    found = [line for line in lines if "GPU: stall" in line or "to the host" in line]
    link = "(../benchmarks/results/gpu-a.json) |"
    assert found == [
        f"| GPU: stall, behind the training | 5.00 ms | 4.00 ms | 4.00 to 4.00 ms | [reached]{link}",
        f"| GPU: time to the host over a pinned copy | 1.11 x | 2.00 x |  | [one value: missed]{link}",
    ]


def test_planning_that_takes_as_many_times_longer_as_there_are_chunks_grows_by_one() -> None:
    sizes = [(256, 1000, 1.0), (1024, 1000, 2.0), (4096, 1000, 8.0), (4096, 250, 4.0), (4096, 4000, 64.0)]
    result = {"planning": [{"layout": "a", "ranks": r, "tensors": t, "plan_s": s} for r, t, s in sizes]}
    assert figures.growth(result) == [0.5, 1.0, 0.5, 2.0]


def test_older_results_have_one_limit_of_reading_for_all_loads() -> None:
    for limits in ({"read_s": 0.5}, {"read_fresh_s": 0.5, "read_again_s": 0.1}):
        assert figures.cold({"rounds": [{"load_cold_s": 1.0, "limits": limits}]}) == [2.0]


def _compared() -> dict[str, object]:
    """Return a result of `benchmarks.compare`: a first save, a later one, loads; ours half as slow as the peers."""

    def figures(scale: float, **more: object) -> dict[str, object]:
        save = {"stall_s": 0.1 * scale, "lost_s": 0.2 * scale, "durable_s": 0.4 * scale, "steps": 1}
        loads = {"load_cold_s": scale, "load_warm_s": scale, "memory_over_state": 1.0}
        return {"fsyncs": True, "cold": save, "warm": [save], **loads, **more}

    disk = {"disk": {"cold_s": 1.5, "warm_s": 0.5}}
    contenders = {
        "asyncckpt": figures(2, other_loads=disk),
        "asyncckpt, prepared": figures(1, prepare_s=3.0, other_loads=disk),
        "asyncckpt, overlap": figures(1, other_loads=disk),
        "safetensors": figures(4),
        "torch.save": figures(5),
    }
    limits = {"write_s": 0.4, "read_s": 0.5, "copy_s": 0.05}
    return {"state": "gpt", "saves": 2, "rounds": [{"limits": limits, "contenders": contenders}]}


def test_first_saves_have_a_row_with_and_one_without_prepare_and_loads_are_those_from_the_disk(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "compare-gpt.json").write_text(json.dumps(_compared()))
    found = [(t.name, values) for t, values in targets.rows(tmp_path) if t.file == "compare-gpt"]
    expected = [
        ("first save after `prepare()`, training on, over a warm copy", 2.0),
        ("the same, first save after `prepare()`", 0.2),
        ("the same, first save without it", 0.4),
        ("the same, first save after `prepare()`", 0.25),
        ("the same, first save without it", 0.5),
        ("the same, first save after `prepare()`", 1.0),
    ]
    first = [(name, values) for name, values in found if "first save" in name]
    assert first == [(name, [pytest.approx(value)]) for name, value in expected]
    beside = [values for name, values in found if "beside the other" in name]
    assert beside == [[pytest.approx(3.0)], [pytest.approx(0.125)]], "cold over the limit, warm over safetensors"


def test_a_target_of_a_contender_that_is_not_in_the_file_is_not_measured(tmp_path: pathlib.Path) -> None:
    result = _compared()
    del result["rounds"][0]["contenders"]["asyncckpt, prepared"]  # type: ignore[index]
    (tmp_path / "compare-gpt.json").write_text(json.dumps(result))
    assert "| the same, first save after `prepare()` | 0.15 s |  |  | not measured |" in targets.table(tmp_path)
