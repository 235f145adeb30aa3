"""The benchmarks themselves, with a model that is as good as nothing: every contender's save can be loaded again."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import states
import torch
from real_worker import RealWorker

from benchmarks import contest, contest_results, contest_tables, loads, pss, quick, training
from benchmarks.contenders import CONTENDERS

HERE = ["asyncckpt", "asyncckpt, prepared", "asyncckpt, overlap", "torch.save", "safetensors"]
"""Those that need no process group of their own and no other package."""


@pytest.fixture
def _endpoint(shared_worker: RealWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", shared_worker.endpoint)


@pytest.mark.usefixtures("_endpoint")
@pytest.mark.parametrize("name", HERE)
def test_what_a_contender_saves_it_loads_into_a_loop_that_has_gone_on(name: str, tmp_path: pathlib.Path) -> None:
    loop = training.make("tiny")
    loop.step()
    contender = CONTENDERS[name](loop)
    assert (contender.prepare() is None) == (name != "asyncckpt, prepared")
    try:
        expected = {key: value for key, value in _flat(loop.state()).items()}
        saved = contender.save(tmp_path / "a", loop.state())
        saved.written.result(60)
        for load in contender.loads().values():
            loop.step()
            assert any(not torch.equal(v, expected[k]) for k, v in _flat(loop.state()).items())
            load(tmp_path / "a")
            states.assert_same(_flat(loop.state()), expected)
    finally:
        contender.close()


def _own(pid: int) -> int:
    """As `pss._of`, but for mapped files: of libraries a process has less as soon as another test maps them too."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value.clone()}
    members = value.items() if isinstance(value, dict) else ()
    return {k: t for key, member in members for k, t in _flat(member, f"{name}.{key}").items()}


@pytest.mark.usefixtures("_endpoint")
def test_a_contest_of_saves_only_measures_neither_memory_nor_loads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "QUIET_STEPS", 1)
    extent = contest.Extent(9, saves_s=0.0, saves_only=True)
    one = contest.measure("torch.save", "tiny", extent, tmp_path)
    assert "load_cold_s" not in one and "memory_over_state" not in one
    assert len(one["warm"]) == contest.FEWEST_SAVES - 1, "a slow one makes as many as there must be"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_endpoint")
def test_a_contest_measures_everything_that_the_table_shows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "QUIET_STEPS", 1)
    monkeypatch.setattr(pss, "_of", _own)
    extent = contest.Extent(2, when_gone=tmp_path / "gone")
    one = json.loads(json.dumps(contest.measure("asyncckpt, prepared", "tiny", extent, tmp_path)))
    assert one["fsyncs"] and one["cold"]["durable_s"] > 0 and len(one["warm"]) == 1
    assert all(
        save["lost_s"] + one["quiet_step_s"][0] * 99 > save["state_s"] > 0 for save in [one["cold"], *one["warm"]]
    )
    assert one["prepare_s"] > 0 and set(one["other_loads"]) == {"disk"}
    of_loads = {"cold_s", "cold_late_s", "warm_s", "warm_late_s"}
    assert set(one["other_loads"]["disk"]) == of_loads and {f"load_{name}" for name in of_loads} <= set(one)
    assert len(one["quiet_step_s"]) == 1 + 1 + 2, "one more after `prepare()`, and one after each save"
    assert one["verifies"] and one["outlives"] and one["fresh_load"] == "disk"
    assert one["memory_noise"] >= 0 and one["memory_over_state"] > 0
    assert {"making the state", "saving", "loading"} <= set(one["phases_s"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "removed when the next one makes its state"
    limits = {"write_s": 0.5, "read_s": 0.25, "copy_s": 0.125}
    machine = json.loads((contest_results.RESULTS / "save_load-gpt.json").read_text())["machine"]
    broken = {"error": "OSError: it does not work here\nTraceback"}
    contenders = {"asyncckpt": one, "torch.save": one | {"fsyncs": False}, "safetensors": broken}
    result = {
        "state": "gpt",
        "machine": machine,
        "saves": 2,
        "rounds_asked": 1,
        "budget_s": 9,
        "rounds": [{"limits": limits, "contenders": contenders}],
    }
    assert contest_results.limits(result) == limits and contest_results.names(result) == [
        "asyncckpt",
        "torch.save",
        "safetensors",
    ]
    shown = contest_tables.compare_table(result)
    assert "| safetensors | *fails: OSError: it does not work here* |" in shown
    assert "does not fsync; the benchmark did" in shown and "O_DIRECT write 0.50 s" in shown
    (mine,) = [line for line in shown.splitlines() if line.startswith("| torch.save |")]
    assert f"{one['cold']['durable_s']:.2f}*" in mine


def test_looking_for_what_a_load_left_to_do_changes_no_value() -> None:
    tensors = [torch.randn(3), torch.tensor([-0.0, float("inf")], dtype=torch.bfloat16), torch.arange(3)]
    before = [tensor.clone() for tensor in tensors]
    assert loads.late_s(tensors) < 60.0
    for tensor, same in zip(tensors, before, strict=True):
        assert torch.equal(tensor, same) and torch.equal(torch.signbit(tensor), torch.signbit(same))
    assert tensors[0]._version and not tensors[2]._version, "what an optimizer changes was written to"


def test_the_quick_table_compares_with_the_last_result() -> None:
    last = json.loads((contest_results.RESULTS / "save_load-gpt.json").read_text())
    now = json.loads(json.dumps(last))
    for row in now["rounds"]:
        for save in row["saves"]:
            save["written_s"] *= 2
    shown = {line[:26].strip(): line.split() for line in quick.lines(now, last)}
    assert shown["written / write limit"][-1] == "100%" and shown["stall / warm copy"][-1] == "0%"
