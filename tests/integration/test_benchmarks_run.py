"""Benchmarks that nobody could run whole here, at their smallest: that they run, and what is in their files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import real_worker
import torch

pytest.importorskip("numpy")  # torch.distributed.checkpoint

from asyncckpt.staging import deferred
from benchmarks import gpu, kept, overlap, pace, quiet, ring, save_load, states, stock_saves, training
from benchmarks.gpu_training import Loop

HEAD = {"rounds_asked": 2, "budget_s": 600.0, "saves": 1}


@pytest.fixture(autouse=True)
def _no_thread_of_torch_waits_for_another() -> Iterator[None]:
    """On a busy machine two that meet after each operation take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoints(endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Where checkpoints go, and a worker for them; nothing is left there."""
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    monkeypatch.setattr(quiet, "until_idle", lambda: {"busy_before": 0.0, "idle_wait_s": 0.0})
    monkeypatch.setattr(quiet, "until_discarded", lambda directory: 0.0)
    found = tmp_path / "checkpoints"
    found.mkdir()
    with real_worker.running(endpoint):
        yield found
    assert not list(found.iterdir())


def told(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what `async_save` says of one process
def test_what_is_measured_on_a_gpu_runs_and_every_figure_is_kept(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "QUIET_STEPS", 1)
    loop = Loop("cpu", lambda: training.GPT(width=16, layers=1, heads=1), (1, 4))
    file = kept.Kept(tmp_path / "gpu.json", HEAD)
    file.end(gpu.measure(loop, checkpoints, file, kept.Budget(600.0)))
    found = told(tmp_path / "gpu.json")
    assert found["ended"] == "done" and len(found["rounds"]) == 2
    names = ("stall_overlap_s", "stall_device_s", "d2h_over_pinned", "step_ratio", "dcp_async_stall_s")
    assert all(len(found["figures"][name]["values"]) == 2 for name in names)
    assert min(found["figures"]["d2h_over_pinned"]["values"]) > 0 and min(found["figures"]["step_ratio"]["values"]) > 0


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")  # what `async_save` says of one process
def test_every_writer_of_stock_saves_saves_and_is_reported(
    checkpoints: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = stock_saves.STATES["tiny"]()
    row = {name: stock_saves.save_with(name, state, checkpoints) for name in stock_saves.WRITERS}
    for found in row.values():
        assert [len(values) for values in found.values()] == [stock_saves.SAVES] * 3
        assert all(a <= b for a, b in zip(found["async_call_s"], found["async_written_s"], strict=True))
    stock_saves.report({"nbytes": states.nbytes(state), "rounds": [{"writers": row}]})
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("stock, 2 threads", "ours, in process"))


def test_states_go_through_rings_smaller_than_a_quarter_and_than_their_largest_tensor(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    file = kept.Kept(tmp_path / "ring.json", HEAD | {"state": "tiny"})
    file.end(ring.measure(ring.STATES["tiny"](), checkpoints, file, kept.Budget(600.0)))
    found = told(tmp_path / "ring.json")
    for row in found["rounds"]:
        assert row["limits"]["write_s"] > 0
        for name, limit in found["arena_limits"].items():
            (save,) = row["saves"][name]
            went_through = save["ring_nbytes"]
            assert went_through is None if limit is None else 0 < went_through <= limit
    ring.report(found)


def test_saves_of_a_process_that_does_nothing_else_are_loaded_into_the_state_itself(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_load, "_worker_start", lambda directory: {"ready_s": 0.0, "rss_nbytes": 0})
    monkeypatch.setattr(save_load, "_memory", lambda *_: {"over_state": 1.0, "worker_own_nbytes": 0})
    state = states.small(count=3)
    before = [tensor.clone() for tensor in states.tensors(state)]
    file = kept.Kept(tmp_path / "save_load.json", HEAD | {"state": "large", "saves": 2})
    file.end(save_load.measure(state, checkpoints, file, kept.Budget(600.0), in_place=True))
    found = told(tmp_path / "save_load.json")
    assert [len(row["saves"]) for row in found["rounds"]] == [2, 2] and found["ended"] == "done"
    assert all(torch.equal(a, b) for a, b in zip(states.tensors(state), before, strict=True))
    save_load.report(found)


def test_kinds_with_another_pace_and_with_a_worker_of_limited_bandwidth_are_measured_beside_the_usual_ones(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "QUIET_STEPS", 1)
    behind = deferred.BEHIND
    more = ("threads=1", "bandwidth=500M")
    kinds = {"overlap": overlap.Kind(), "blocking": overlap.Kind("blocking"), **{t: overlap.kind_of(t) for t in more}}
    file = kept.Kept(tmp_path / "overlap.json", HEAD | {"kinds": list(kinds), "rounds_asked": 1})
    file.end(overlap.measure(training.make("tiny"), checkpoints, file, kept.Budget(600.0), kinds))
    found = told(tmp_path / "overlap.json")
    assert all(len(row[name]) == 1 for row in found["rounds"] for name in kinds) and len(found["rounds"]) == 1
    assert behind == deferred.BEHIND
    overlap.report(found)


def test_what_is_learnt_of_a_device_is_kept_beside_the_fixed_default(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    file = kept.Kept(tmp_path / "pace.json", HEAD)
    file.end(pace.measure(states.small(count=3), checkpoints, file, kept.Budget(600.0)))
    found = told(tmp_path / "pace.json")
    names = [f"{what} {name}" for what in ("save", "load") for name in ("fixed", "learnt")]
    assert found["nbytes"] == 3 * 16 * 1024 and len(found["rounds"]) == 2
    assert all(row[name] > 0 for row in found["rounds"] for name in names)
    pace.report(found)
