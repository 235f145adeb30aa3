"""`benchmarks.convert`: what its figures are compared with, and rounds that are added to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")  # torch.distributed.tensor, which the loads are cut by

from benchmarks import convert, dcp_loads, kept
from benchmarks.spread import quartiles, text_of


def a_round(first: int, copy_s: list[float], took_s: list[float]) -> dict[str, list[Any]]:
    choices = [(first + n) % 3 for n in range(3)]
    return {"choices": choices, "copy_s": copy_s, "read_s": [1.0] * 3, "once_s": took_s, "read_back_s": took_s}


def test_every_try_is_compared_with_its_rounds_limit_by_the_choice_that_is_fastest_over_all_rounds() -> None:
    rounds = [a_round(0, [2.0, 3.0, 1.0], [4.0, 4.0, 8.0]), a_round(1, [9.0, 9.0, 2.0], [4.0, 5.0, 2.0])]
    once, both = convert.shares(rounds)  # choice 0 took 2 and 2, 1 took 3 and 9, 2 took 1 and 9
    assert once == [0.5, 0.5, 0.25, 0.5, 0.4, 1.0]
    assert both == [0.75, 0.75, 0.375, 0.75, 0.6, 1.5]


def test_quartiles_lie_within_what_was_measured() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert text_of([1.0, 2.0, 3.0, 4.0, 5.0], 1) == "3.0 (2.0 to 4.0)"


def test_rounds_are_added_until_there_are_as_many_as_asked_and_none_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_write_source", lambda kind, path, n: path.write_bytes(b"x"))
    monkeypatch.setattr(convert, "_round", lambda *arguments: {"number": [arguments[-1]]})
    found: list[dict[str, Any]] = []
    written: list[int] = []

    def run(rounds: int, deadline_s: float) -> dict[str, int]:
        pairs = [("dcp", "torch"), ("dcp", "hf"), ("torch", "dcp")]
        convert.conversions(tmp_path, 1, rounds, pairs, deadline_s, found, lambda: written.append(len(found)))
        assert not list(tmp_path.iterdir())
        return {f"{row['from']}:{row['to']}": len(row["rounds"]) for row in found}

    assert run(2, 0.0) == {"dcp:torch": 1}
    assert run(2, 0.0) == {"dcp:torch": 1}
    assert run(2, 1e18) == {"dcp:torch": 2, "dcp:hf": 2, "torch:dcp": 2}
    assert run(2, 1e18) == {"dcp:torch": 2, "dcp:hf": 2, "torch:dcp": 2}
    assert len(written) == 6 and found[0]["rounds"] == [{"number": [0]}, {"number": [1]}]


def test_loads_come_a_few_rounds_at_a_time_and_only_of_the_cases_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def on_ranks(world_size: int, function: Any, directory: Path, path: str, *arguments: Any) -> list[Any]:
        if function is not dcp_loads._load:
            return []
        counts.append(arguments[-1])
        return [[{"ours_warm_s": float(rank), "ours_warm_cpu_s": 1.0}] * arguments[-1] for rank in range(world_size)]

    monkeypatch.setattr(dcp_loads, "_on_ranks", on_ranks)
    found: list[dict[str, Any]] = []
    for rounds in (7, 8):
        dcp_loads.loads(tmp_path, 1, rounds, 1e18, found, lambda: None, [1])
    assert counts == [5, 2, 1] and len(found) == 1
    assert found[0]["rounds"] == [{"ours_warm_s": 3.0, "ours_warm_cpu_s": 4.0}] * 8


def test_a_file_of_other_sizes_is_not_added_to(tmp_path: Path) -> None:
    path, mine = tmp_path / "r.json", {"benchmark": "convert", "nbytes": 5}
    assert kept.earlier(path, mine) is None
    kept.write(path, {**mine, "conversions": [1], "dcp_load": [2]})
    assert kept.earlier(path, mine) == {**mine, "conversions": [1], "dcp_load": [2]}
    with pytest.raises(kept.NotTheSameError, match="nbytes was 5 and is 6"):
        kept.earlier(path, {**mine, "nbytes": 6})
