"""AsyncCheckpointer with a real worker: what is saved, and how its futures, reports and slots tell of it."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import signal
from typing import Any

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, manifest_of, slots_of, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import slot_lender
from asyncckpt.errors import (
    CheckpointExistsError,
    ConfigError,
    DuplicateNameError,
    SaveSkippedError,
    SlotBusyError,
    SlotTimeoutError,
    UnsupportedLeafError,
    UnsupportedPathError,
)

STATE = {"w": torch.arange(100_000.0), "n": {"lr": 0.1}}


# ---- the round trip -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_everything_that_is_saved_is_loaded_bit_for_bit(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    state = states.every_leaf()
    staged, done = checkpointer.save(state, tmp_path / "a")
    assert staged.done()
    wait_until(done.done, "the save is written")
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    states.assert_same(checkpointer.load(tmp_path / "a"), state)


def test_random_states_are_loaded_bit_for_bit(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, rng: Any
) -> None:
    maker = states.StateMaker(rng)
    state: Any = maker.state()
    for n in range(12):
        written(checkpointer.save(state, tmp_path / str(n), step=n))
        states.assert_same(asyncckpt.load(tmp_path / str(n)), state)
        try:
            state = maker.mutated(state) if n % 2 else maker.state()
            copy.deepcopy(state)
        except (RuntimeError, TypeError):
            state = maker.state()


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"step": 3}, {"e": torch.empty(0)}, {"o": [1, None]}])
def test_states_without_data_are_checkpoints_too(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, state: dict[str, Any]
) -> None:
    written(checkpointer.save(state, tmp_path / "a"))
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


def test_a_model_and_its_optimizer_resume_where_they_were(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for n in range(steps):
            optimizer.zero_grad()
            model(torch.full((4, 3), float(n))).square().mean().backward()
            optimizer.step()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    train(model, optimizer, 3)
    written(
        checkpointer.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, tmp_path / "a")
    )
    train(model, optimizer, 3)
    other, other_optimizer = make()
    state = asyncckpt.load(tmp_path / "a")
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optim"])
    train(other, other_optimizer, 3)
    states.assert_same(other.state_dict(), model.state_dict())


def test_a_state_dict_is_filled_in_place(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    written(checkpointer.save(STATE, tmp_path / "a"))
    target = {"w": torch.zeros(100_000), "n": {"lr": 0.0}}
    tensor = target["w"]
    assert checkpointer.load(tmp_path / "a", target, strict=True) is target
    assert target["w"] is tensor
    states.assert_same(target, STATE)


def test_mutation_right_after_save_never_shows(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(500_000), "list": [0], "dict": {"n": 0}, "b": torch.zeros(3)}
    handles = []
    for n in range(8):
        state["w"].fill_(n)
        state["b"].fill_(n)
        state["list"][0] = state["dict"]["n"] = n
        handles.append(checkpointer.save(state, tmp_path / str(n)))
        state["w"].fill_(-1)
        state["b"].fill_(-1)
        state["list"][0] = state["dict"]["n"] = -1
        state["list"].append("later")
        state["list"].pop()
    for n, handle in enumerate(handles):
        written(handle)
        expected = {
            "w": torch.full((500_000,), float(n)),
            "list": [n],
            "dict": {"n": n},
            "b": torch.full((3,), float(n)),
        }
        states.assert_same(asyncckpt.load(tmp_path / str(n)), expected)


def test_saving_keeps_no_autograd_history(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.ones(10))
    written(checkpointer.save({"w": weight, "loss": (weight * 2).sum()}, tmp_path / "a"))
    pool = checkpointer._process.pool  # type: ignore[attr-defined]
    assert not any(t.requires_grad for s in pool._slots for t in s.views._targets)
    assert not asyncckpt.load(tmp_path / "a")["w"].requires_grad


# ---- futures and reports --------------------------------------------------------------------------------------------


def test_futures_complete_in_order_with_reports(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    checkpointer.save(STATE, tmp_path / "first")
    handle = checkpointer.save(STATE, tmp_path / "a", step=7)
    order: list[str] = []
    for name in ("written", "durable", "staged"):
        getattr(handle, name).add_done_callback(lambda done, name=name: order.append(name))
    written(handle)
    wait_until(lambda: len(order) == 3, "all callbacks ran")
    assert order[0] == "staged"
    assert order.index("durable") < order.index("written")
    staged, durable, done = (f.result(0) for f in handle.futures())
    assert {staged.save_id, durable.save_id, done.save_id} == {str(handle.save_id)}
    assert {"plan", "acquire", "copy", "seal"} <= set(staged.seconds)
    assert "write" in durable.seconds
    assert {"write", "total"} <= set(done.seconds)
    assert all(value >= 0 for value in done.seconds.values())
    files = sum(p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors"))
    assert staged.nbytes == files
    assert files <= done.nbytes < files + 100_000
    assert "direct" in done.details
    assert (handle.step, handle.path, handle.phase) == (7, str(tmp_path / "a"), "written")


def test_step_metadata_and_save_id_are_in_the_manifest(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    metadata = {"loss": 0.5, "tags": ["a", None], "nested": {"x": 1}}
    handle = checkpointer.save({**STATE, "step": 3}, tmp_path / "a", step=41, metadata=metadata)
    written(handle)
    manifest = manifest_of(tmp_path / "a")
    assert manifest["step"] == 41
    assert manifest["metadata"] == metadata
    assert manifest["save_id"] == str(handle.save_id)
    assert manifest["fsync"] is True
    assert manifest["writer"] == f"asyncckpt {asyncckpt.__version__}"


def test_step_is_the_state_s_own_else_the_number_of_the_save(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    steps = [
        checkpointer.save(state, tmp_path / str(n)).step
        for n, state in enumerate(
            [{"step": 70}, {"a": 1}, {"step": True}, {"step": torch.tensor(5)}, {"a": {"step": 9}}]
        )
    ]
    assert steps == [70, 1, 2, 5, 4]
    checkpointer.wait(DEADLINE_S)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "4"), "newest by lineage, not by step"


def test_a_later_run_is_newer_whatever_its_steps(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    for run, step in enumerate((100, 5)):
        with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
            written(checkpointer.save(STATE, tmp_path / f"run-{run}", step=step))
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "run-1")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"state_dict": {"f": print}}, UnsupportedLeafError),
        ({"state_dict": [1]}, UnsupportedLeafError),
        ({"state_dict": {"a.b": 1, "a": {"b": 1}}}, DuplicateNameError),
        ({"path": "ftp://host/x"}, UnsupportedPathError),
        ({"path": ""}, UnsupportedPathError),
        ({"step": 1.5}, ConfigError),
        ({"step": "7"}, ConfigError),
        ({"step": 1 << 63}, ConfigError),
        ({"metadata": {"x": object()}}, ConfigError),
        ({"metadata": {"x": float("nan")}}, ConfigError),
        ({"metadata": [1]}, ConfigError),
        ({"path": "/" + "x/" * 3000}, UnsupportedPathError),
    ],
)
def test_wrong_arguments_raise_at_once_and_the_next_save_works(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        checkpointer.save(**{"state_dict": STATE, "path": tmp_path / "bad", **arguments})
    assert checkpointer.pending() == []
    assert not (tmp_path / "bad").exists()
    written(checkpointer.save(STATE, tmp_path / "good"))


def test_metadata_is_a_snapshot(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    metadata = {"list": [1]}
    handle = checkpointer.save(STATE, tmp_path / "a", metadata=metadata)
    metadata["list"].append(2)
    written(handle)
    assert manifest_of(tmp_path / "a")["metadata"] == {"list": [1]}


def test_relative_paths_are_the_trainer_s(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handle = checkpointer.save(STATE, "runs/a")
    written(handle)
    assert handle.path == f"{tmp_path}/runs/a"
    states.assert_same(asyncckpt.load("runs/a"), STATE)


def test_files_have_the_trainer_s_umask(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    old = os.umask(0o027)
    try:
        written(checkpointer.save(STATE, tmp_path / "new" / "a"))
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "new" / "a").iterdir()} == {0o640}


# ---- slots ----------------------------------------------------------------------------------------------------------


def test_saves_in_turn_reuse_one_slot(
    checkpointer: AsyncCheckpointer, shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    for n in range(10):
        written(checkpointer.save({**STATE, "log": "x" * 300 * n}, tmp_path / str(n)))
        assert len(slots_of(checkpointer)) == 1
        if n == 0:
            first = slots_of(checkpointer)[0].memory
    assert slots_of(checkpointer)[0].memory is first
    assert len(shared_worker.status()["slots"]) == 1
    assert first.nbytes < 400_000 + 100_000


def test_a_larger_structure_takes_the_place_of_the_smaller(
    checkpointer: AsyncCheckpointer, shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    written(checkpointer.save({"w": torch.ones(10_000)}, tmp_path / "a"))
    written(checkpointer.save({"w": torch.ones(1_000_000)}, tmp_path / "b"))
    assert len(slots_of(checkpointer)) == 1
    wait_until(lambda: len(shared_worker.status()["slots"]) == 1, "the small slot is given back")
    states.assert_same(asyncckpt.load(tmp_path / "b"), {"w": torch.ones(1_000_000)})


def test_a_second_slot_comes_only_when_the_first_is_still_being_written(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await_grant = slot_lender.await_grant

    def thawed(*arguments: Any) -> bool:
        worker.signal(signal.SIGCONT)
        return await_grant(*arguments)

    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            first = checkpointer.save(STATE, tmp_path / "1")
            assert first.phase == "staged"
            assert len(slots_of(checkpointer)) == 1
            monkeypatch.setattr(slot_lender, "await_grant", thawed)  # not before: the first save would end meanwhile
            second = checkpointer.save(STATE, tmp_path / "2")  # asks the worker for another slot
        assert len(slots_of(checkpointer)) == 2
        for handle in (first, second):
            written(handle)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"on_busy": "skip"}, SaveSkippedError),
        ({"on_busy": "error"}, SlotBusyError),
        ({"on_busy": "wait", "slot_timeout_s": 0.1}, SlotTimeoutError),
    ],
)
def test_policy_when_the_only_slot_is_in_use(
    worker: RealWorker, tmp_path: pathlib.Path, fields: dict[str, Any], error: type[Exception]
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, slots=1, **fields) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            first = checkpointer.save(STATE, tmp_path / "1")
            refused = checkpointer.save(STATE, tmp_path / "2")
            assert [type(f.exception(0)) for f in refused.futures()] == [error] * 3
            assert checkpointer.pending() == [first]
        written(first)
        written(checkpointer.save(STATE, tmp_path / "3"))
    assert not (tmp_path / "2").exists()


def test_a_failed_save_does_not_keep_its_state_alive(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    import weakref

    with AsyncCheckpointer(endpoint=worker.endpoint, slots=1, on_busy="skip") as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        gc.disable()
        try:
            with worker.frozen():
                first = checkpointer.save(STATE, tmp_path / "1")
                tensor = torch.ones(1000)
                watched = weakref.ref(tensor)
                skipped = checkpointer.save({"w": tensor}, tmp_path / "2")
                del tensor
                assert watched() is None
        finally:
            gc.enable()
        assert isinstance(skipped.written.exception(0), SaveSkippedError)
        written(first)


def test_a_failed_save_does_not_poison_later_ones(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))
    for n in range(5):
        failed = checkpointer.save(STATE, tmp_path / "0")
        good = checkpointer.save(STATE, tmp_path / f"good-{n}")
        assert isinstance(failed.written.exception(DEADLINE_S), CheckpointExistsError)
        written(good)
    assert len(slots_of(checkpointer)) <= 2
