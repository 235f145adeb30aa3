"""Which code a result was measured with, and which changes of it make a result another's."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from benchmarks import quiet, sources

BENCHMARKS = ("compare", *sources.USED)


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A copy of our package whose files may be changed."""
    copy = tmp_path / "asyncckpt"
    there = sources._package
    shutil.copytree(there("asyncckpt"), copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "_package", lambda name: copy if name == "asyncckpt" else there(name))
    sources.code_of.cache_clear()
    yield copy
    sources.code_of.cache_clear()


def _changed(path: pathlib.Path, benchmark: str) -> bool:
    before = sources.code_of(benchmark)
    path.write_text(path.read_text() + "# another\n")
    sources.code_of.cache_clear()
    return sources.code_of(benchmark)["asyncckpt"] != before["asyncckpt"]


def test_a_change_of_the_save_path_makes_other_code_of_every_benchmark(package: pathlib.Path) -> None:
    assert all(_changed(package / "staging" / "moving.py", benchmark) for benchmark in BENCHMARKS)


@pytest.mark.parametrize("part", sources.UNUSED)
def test_a_part_that_nothing_measured_runs_does_not_count_but_for_those_who_measure_it(
    package: pathlib.Path, part: str
) -> None:
    for benchmark in BENCHMARKS:
        assert _changed(package / part / "__init__.py", benchmark) == (part in sources.USED.get(benchmark, ()))


def test_files_of_one_name_in_two_places_are_two(package: pathlib.Path) -> None:
    before = sources.code_of("compare")
    (package / "staging" / "moving.py").rename(package / "storage" / "moving.py")
    sources.code_of.cache_clear()
    assert sources.code_of("compare")["asyncckpt"] != before["asyncckpt"]


@pytest.mark.parametrize(
    ("benchmark", "some"),
    [
        ("compare", {"compare", "contest", "contenders", "limits", "rounds", "ours", "training"}),
        ("ranks", {"ranks", "on_rank", "contest", "limits"}),
        ("trace", {"trace", "traced_worker", "training"}),
        ("adapters", {"adapters", "framework_trainings", "in_turn"}),
        ("scale", {"scale", "many_commits", "many_states"}),
        ("convert", {"convert", "dcp_loads", "limits"}),
    ],
)
def test_modules_that_are_imported_or_started_count_and_those_that_show_results_do_not(
    benchmark: str, some: set[str]
) -> None:
    found = set(sources.modules_of(benchmark))
    assert some <= found
    assert not found & {*sources.SHOWING, *sources.KEEPING}


def test_every_module_that_is_left_out_is_there() -> None:
    for name in (*sources.SHOWING, *sources.KEEPING):
        assert (sources.HERE / f"{name}.py").is_file()


def test_result_files_of_other_code_are_named_with_what_is_another(tmp_path: pathlib.Path) -> None:
    now = sources.code_of("compare")
    files = {
        "compare-gpt": {"code": now | {"commit": "another"}},
        "compare-small": {"code": now | {"asyncckpt_worker": "x", "benchmarks": "y"}},
        "cpu": {},
    }
    assert sources.footer(tmp_path) == []
    for name, result in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert sources.footer(tmp_path) == ["other code: compare-small (asyncckpt_worker, benchmarks); cpu (not told)"]
    (tmp_path / "another_machine").mkdir()
    shutil.copy(tmp_path / "cpu.json", tmp_path / "another_machine")
    assert list(sources.other_code(tmp_path)) == ["another_machine/cpu", "compare-small", "cpu"]


# ---- a quiet machine


def test_waiting_ends_when_the_machine_is_idle_and_tells_how_busy_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.9, 0.4, 0.05, 0.9])
    monkeypatch.setattr(quiet, "busy_share", lambda over_s: next(shares))
    assert quiet.until_idle()["busy_before"] == 0.05
    assert quiet.until_idle(wait_s=-1.0)["busy_before"] == 0.9, "whatever it is, when time is up"


@pytest.mark.parametrize(("busy", "share"), [(0, 0.0), (100, 0.5), (300, 0.75)])
def test_the_busy_share_counts_all_but_idle_time_and_waiting_for_disks(
    monkeypatch: pytest.MonkeyPatch, busy: int, share: float
) -> None:
    seen = iter([(1000, 5000), (1100, 5000 + 100 + busy)])
    monkeypatch.setattr(quiet, "_spent", lambda: next(seen))
    assert quiet.busy_share(0.0) == share


def test_a_disk_without_counters_is_waited_for_no_longer_than_its_file_system(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "_discards", lambda device: None)
    assert quiet.until_discarded(tmp_path) < 60.0
    counts = iter([(1,), (1,), (2,), *[(3,)] * 1000])
    monkeypatch.setattr(quiet, "_discards", lambda device: next(counts))
    quiet.until_discarded(tmp_path)
    assert next(counts) == (3,), "not before the counters have come to rest"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"machine": {}}, "not told how busy it was"),
        ({"machine": {"load_before": 1.52}, "rounds": [{}]}, "load average before: 1.5"),
        ({"machine": {"load_before": 1.5}, "busy_before": 0.021}, "the processors at most 2 % busy before"),
        (
            {"machine": {}, "rounds": [{"busy_before": 0.01}, {"busy_before": 0.034}]},
            "the processors at most 3 % busy before every round",
        ),
        (
            {"machine": {}, "rounds": [{"busy_before": 0.5}]},
            "the processors at most 50 % busy before every round: not a quiet machine",
        ),
    ],
)
def test_a_result_tells_how_busy_the_machine_was(result: dict[str, object], said: str) -> None:
    assert quiet.said(result) == said
