"""AsyncCheckpointer with a real worker: what is saved, when, and what may happen around it."""

from __future__ import annotations

import copy
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointerConfig, RankInfo, SaveHandle, cli
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    CheckpointExistsError,
    CommitTimeoutError,
    ConfigError,
    DuplicateNameError,
    ForkedError,
    PendingSavesError,
    ReentrantCallError,
    SaveSkippedError,
    SlotBusyError,
    SlotTimeoutError,
    UnsupportedLeafError,
    UnsupportedPathError,
    WaitTimeoutError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import STATE_EMPTY
from asyncckpt.protocol.request import decode_request
from asyncckpt.staging.copy_cpu import SlotImage

STATE = {"w": torch.arange(100_000.0), "n": {"lr": 0.1}}


@pytest.fixture
def checkpointer(shared_worker: RealWorker) -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as found:
        yield found


def manifest_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pathlib.Path(path) / "manifest.json").read_text())
    return found


def written(handle: SaveHandle) -> Any:
    return handle.written.result(DEADLINE_S)


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
    assert steps == [70, 1, 2, 3, 4]
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
        ({"path": "s3://bucket/x"}, UnsupportedPathError),
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


def slots_of(checkpointer: AsyncCheckpointer) -> list[Any]:
    return list(checkpointer._process.pool._slots)  # type: ignore[attr-defined]


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
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            first = checkpointer.save(STATE, tmp_path / "1")
            assert first.phase == "staged"
            assert len(slots_of(checkpointer)) == 1
            thaw = threading.Timer(0.1, worker.signal, (signal.SIGCONT,))
            thaw.start()
            second = checkpointer.save(STATE, tmp_path / "2")  # asks the worker for another slot
            thaw.join()
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


# ---- settings -------------------------------------------------------------------------------------------------------


def test_without_fsync_the_manifest_says_so(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, fsync=False) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
    assert manifest_of(tmp_path / "a")["fsync"] is False


def test_files_per_rank_spreads_the_tensors(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    state = {f"t{n}": torch.full((1000,), float(n)) for n in range(9)}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, files_per_rank=3) as checkpointer:
        written(checkpointer.save(state, tmp_path / "a"))
    sizes = [p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 1000
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


@pytest.mark.parametrize(("given", "asked"), [(None, 0), (5, 5)])
def test_write_threads_are_asked_for(
    shared_worker: RealWorker, tmp_path: pathlib.Path, given: int | None, asked: int
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, write_threads=given) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        memory = slots_of(checkpointer)[0].memory
        sealed = memory.control.read_request()
        assert decode_request(sealed.request, memory.nbytes - 4096).write_threads == asked


def test_a_config_object_and_single_fields_are_combined(shared_worker: RealWorker) -> None:
    config = CheckpointerConfig(slots=3)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, config=config, fsync=False) as checkpointer:
        assert (checkpointer.config.slots, checkpointer.config.fsync) == (3, False)
    with pytest.raises(ConfigError, match="unknown field"):
        AsyncCheckpointer(endpoint=shared_worker.endpoint, slot=3)


def test_endpoint_and_fields_come_from_the_environment(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", shared_worker.endpoint)
    monkeypatch.setenv("ASYNCCKPT_FSYNC", "0")
    with AsyncCheckpointer() as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        assert checkpointer._process.endpoint == shared_worker.endpoint  # type: ignore[attr-defined]
    assert manifest_of(tmp_path / "a")["fsync"] is False


def test_rank_info_lets_rank_zero_of_a_world_save_alone(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="rank_info"):
        AsyncCheckpointer(endpoint=shared_worker.endpoint)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, rank_info=RankInfo(0, 1)) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))


@pytest.mark.parametrize("staging", ["auto", "blocking"])
def test_staging_is_done_when_save_returns(shared_worker: RealWorker, tmp_path: pathlib.Path, staging: str) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging=staging) as checkpointer:
        assert checkpointer.save(STATE, tmp_path / "a").staged.done()


def test_a_save_that_takes_longer_than_commit_timeout_s_fails_and_the_worker_goes_on(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, commit_timeout_s=0.2, slots=1) as checkpointer:
        wait_until(lambda: _quick_save(checkpointer, tmp_path), "a save within commit_timeout_s")
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "late")
            error = handle.written.exception(DEADLINE_S)
            assert isinstance(error, CommitTimeoutError)
            assert handle.durable.exception(0) is error
            assert handle.staged.exception(0) is None
            assert checkpointer.pending() == []
        wait_until((tmp_path / "late" / "manifest.json").exists, "the worker commits it nevertheless")
        wait_until(lambda: all(s.user is None for s in slots_of(checkpointer)), "its slot is free")
    states.assert_same(asyncckpt.load(tmp_path / "late"), STATE)


def _quick_save(checkpointer: AsyncCheckpointer, root: pathlib.Path) -> bool:
    return checkpointer.save(STATE, root / f"quick-{time.monotonic_ns()}").written.exception(DEADLINE_S) is None


def test_a_worker_that_is_silent_for_worker_timeout_s_is_lost(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, worker_timeout_s=1.0) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            error = handle.written.exception(DEADLINE_S)
            assert isinstance(error, WorkerUnavailableError)
            assert "has not answered for 1 s" in str(error)
            assert slots_of(checkpointer) == []
        written(checkpointer.save(STATE, tmp_path / "2"))
    wait_until((tmp_path / "1" / "manifest.json").exists, "what was sealed is committed when it wakes up")


def test_a_worker_that_hangs_holds_up_no_later_save(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(
        endpoint=worker.endpoint, worker_timeout_s=1.0, worker_start_timeout_s=60.0, worker_shutdown_timeout_s=1.0
    ) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            assert checkpointer.save(STATE, tmp_path / "1").written.exception(DEADLINE_S) is not None
            for n in range(2):
                began = time.monotonic()
                assert isinstance(checkpointer.save(STATE, tmp_path / str(n)).written.exception(0), AsyncCkptError)
                assert time.monotonic() - began < 30.0, "not the 60 s that a first connection may take"
        written(checkpointer.save(STATE, tmp_path / "2"))


def test_a_save_that_failed_while_it_was_staged_is_not_taken_up_later(
    worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = SlotImage.fill
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        pending = checkpointer._process._pending  # type: ignore[attr-defined]

        def fill_late(self: SlotImage, *arguments: Any) -> None:
            fill(self, *arguments)
            wait_until(lambda: pending.early_error(arguments[1]), "the worker has refused the directory")

        monkeypatch.setattr(SlotImage, "fill", fill_late)
        handle = checkpointer.save(STATE, tmp_path / "0")
        assert isinstance(handle.written.exception(DEADLINE_S), CheckpointExistsError)
        [slot] = slots_of(checkpointer)
        assert slot.memory.control.state == STATE_EMPTY


def test_on_error_raise_raises_what_nobody_fetched(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint, on_error="raise")
    written(checkpointer.save(STATE, tmp_path / "a"))
    for _ in range(2):
        checkpointer.save(STATE, tmp_path / "a")
    with pytest.raises(PendingSavesError) as caught:
        checkpointer.wait(DEADLINE_S)
    assert [type(e) for e in caught.value.errors] == [CheckpointExistsError] * 2
    checkpointer.save(STATE, tmp_path / "a").written.exception(DEADLINE_S)
    checkpointer.wait(DEADLINE_S)
    checkpointer.save(STATE, tmp_path / "a")
    with pytest.raises(PendingSavesError):
        checkpointer.close()
    checkpointer.close()


def test_on_error_warn_raises_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "a"))
        checkpointer.save(STATE, tmp_path / "a")
        checkpointer.wait(DEADLINE_S)
    assert any("already holds a committed checkpoint" in m for m in caplog.messages)


# ---- waiting and closing --------------------------------------------------------------------------------------------


def test_wait_and_pending(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        assert checkpointer.pending() == []
        checkpointer.wait(0.0)
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            assert checkpointer.pending() == [handle]
            with pytest.raises(WaitTimeoutError) as caught:
                checkpointer.wait(0.05)
            assert caught.value.save_ids == [str(handle.save_id)]
        checkpointer.wait()
        assert handle.written.done()
        assert checkpointer.pending() == []


def test_close_waits_for_what_is_pending(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    handles = [checkpointer.save(STATE, tmp_path / str(n)) for n in range(3)]
    checkpointer.close()
    assert all(h.written.exception(0) is None for h in handles)


def test_closing_twice_is_fine_and_everything_after_it_raises(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(STATE, tmp_path / "a"),
        lambda: checkpointer.load(tmp_path / "a"),
        checkpointer.wait,
    ):
        with pytest.raises(CheckpointerClosedError):
            call()
    assert checkpointer.pending() == []


@pytest.mark.parametrize("how", ["argument", "field"])
def test_close_leaves_to_the_worker_what_takes_too_long(
    worker: RealWorker, tmp_path: pathlib.Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"worker_shutdown_timeout_s": 0.1} if how == "field" else {}
    checkpointer = AsyncCheckpointer(endpoint=worker.endpoint, **fields)
    written(checkpointer.save(STATE, tmp_path / "0"))
    with worker.frozen():
        handle = checkpointer.save(STATE, tmp_path / "1")
        began = time.monotonic()
        checkpointer.close(*([0.1] if how == "argument" else []))
        assert time.monotonic() - began < 10.0
        assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    assert any("leaves the save of step 1" in m for m in caplog.messages)
    wait_until((tmp_path / "1" / "manifest.json").exists, "the worker finishes it")
    states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)


def test_leaving_by_an_exception_waits_for_no_write_and_loses_nothing(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(KeyError, match="mine"), AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        worker.signal(signal.SIGSTOP)
        handle = checkpointer.save(STATE, tmp_path / "1")
        began = time.monotonic()
        raise KeyError("mine")
    assert time.monotonic() - began < 6.0, "P13: at most 5 s"
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    worker.signal(signal.SIGCONT)
    wait_until((tmp_path / "1" / "manifest.json").exists, "the worker finishes it")
    states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)


def test_a_checkpointer_that_is_dropped_without_close_frees_everything(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    checkpointer = AsyncCheckpointer(endpoint=shared_worker.endpoint)
    handle = checkpointer.save(STATE, tmp_path / "a")
    with pytest.warns(ResourceWarning, match="close"):
        del checkpointer
        gc.collect()
    assert handle.written.done()
    wait_until((tmp_path / "a" / "manifest.json").exists, "what was staged is committed")


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_the_client_thread_where_waiting_calls_are_refused(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    found: dict[str, Any] = {}
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))

        def callback(done: Future[Any]) -> None:
            found["thread"] = threading.current_thread().name
            calls = {
                "save": lambda: checkpointer.save(STATE, tmp_path / "2"),
                "wait": lambda: checkpointer.wait(1.0),
                "close": checkpointer.close,
            }
            for name, call in calls.items():
                try:
                    found[name] = call()
                except BaseException as error:
                    found[name] = error

        with worker.frozen():  # so that the callback is there before the end
            handle = checkpointer.save(STATE, tmp_path / "1")
            handle.written.add_done_callback(callback)
        written(handle)
        wait_until(lambda: len(found) == 4, "the callback has returned")
        assert found.pop("thread") == "asyncckpt-client"
        assert {type(e) for e in found.values()} == {ReentrantCallError}
        written(checkpointer.save(STATE, tmp_path / "3"))


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_a_callback_that_raises_harms_nobody(
    worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def callback(done: Future[Any]) -> None:
        raise error

    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            handle.written.add_done_callback(callback)
        written(handle)
        thread = checkpointer._process._connection.session.thread  # type: ignore[attr-defined]
        written(checkpointer.save(STATE, tmp_path / "2"))
        assert thread.is_alive()
    assert any("callback" in m for m in caplog.messages)


# ---- fork and exit --------------------------------------------------------------------------------------------------


def in_child(work: Any) -> int:
    """Run `work` in a forked child; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_can_use_nothing_of_its_parent_s(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))

    def work() -> int:
        calls = [
            lambda: checkpointer.save(STATE, tmp_path / "child"),
            lambda: checkpointer.load(tmp_path / "0"),
            lambda: checkpointer.wait(1.0),
            checkpointer.pending,
        ]
        for n, call in enumerate(calls):
            try:
                call()
            except ForkedError:
                continue
            return n + 1
        checkpointer.close()
        checkpointer.leave()
        return 0

    assert in_child(work) == 0
    written(checkpointer.save(STATE, tmp_path / "1"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_checkpointer(
    checkpointer: AsyncCheckpointer, shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))

    def work() -> int:
        with AsyncCheckpointer(endpoint=shared_worker.endpoint) as own:
            written(own.save({"n": 1}, tmp_path / "child"))
        return 0

    assert in_child(work) == 0
    assert asyncckpt.load(tmp_path / "child") == {"n": 1}
    written(checkpointer.save(STATE, tmp_path / "1"))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_lives_on_keeps_no_memory(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    ready, told = os.pipe()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        written(checkpointer.save(STATE, tmp_path / "0"))
        pid = os.fork()
        if pid == 0:
            os.write(told, b"x")
            signal.pause()
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        held = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path)]
        assert not [target for target in held if "memfd:asyncckpt" in target]
        assert "memfd:asyncckpt" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


EXITING = """
import sys, torch
from asyncckpt import AsyncCheckpointer
path, how = sys.argv[1:]
checkpointer = AsyncCheckpointer()
handle = checkpointer.save({"w": torch.arange(2_000_000.0), "step": 4}, path)
assert handle.staged.done()
if how == "drop":
    del checkpointer
if how == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 7), ("drop", 0)])
def test_interpreter_exit_right_after_save_loses_nothing(
    shared_worker: RealWorker, tmp_path: pathlib.Path, how: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING, str(tmp_path / "a"), how],
        env={**os.environ, "ASYNCCKPT_ENDPOINT": shared_worker.endpoint},
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    wait_until((tmp_path / "a" / "manifest.json").exists, "the worker commits it")
    states.assert_same(asyncckpt.load(tmp_path / "a"), {"w": torch.arange(2_000_000.0), "step": 4})


# ---- starting a worker ----------------------------------------------------------------------------------------------


def test_the_first_checkpointer_starts_a_worker_and_the_next_one_finds_it(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    pids = []
    for n in range(2):
        with AsyncCheckpointer() as checkpointer:
            written(checkpointer.save(STATE, tmp_path / str(n)))
            pids.append(checkpointer._process.connect().worker.pid)  # type: ignore[attr-defined]
    assert pids[0] == pids[1]
    assert os.getpgid(pids[0]) != os.getpgid(0)
    assert os.getsid(pids[0]) == pids[0] or os.getsid(pids[0]) != os.getsid(0)
    assert cli.main(["worker", "stop"]) == 0


def test_two_jobs_have_two_workers(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    pids = []
    for job in ("a", "b"):
        monkeypatch.setenv("ASYNCCKPT_JOB", job)
        with AsyncCheckpointer() as checkpointer:
            written(checkpointer.save(STATE, tmp_path / job))
            pids.append(checkpointer._process.connect().worker.pid)  # type: ignore[attr-defined]
            stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]
    assert pids[0] != pids[1]


def test_a_checkpointer_that_is_closed_at_once_leaves_a_worker_at_most(
    endpoint_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    checkpointer = AsyncCheckpointer()
    endpoint = checkpointer._process.endpoint  # type: ignore[attr-defined]
    checkpointer.close()
    wait_until(lambda: not _is_starting(endpoint_dir), "the start command has ended")
    stop_whoever_serves(endpoint)


def _is_starting(directory: pathlib.Path) -> bool:
    import psutil

    return any("asyncckpt_worker" in " ".join(p.cmdline()) for p in psutil.Process().children())


# ---- own parts ------------------------------------------------------------------------------------------------------


class Stager(asyncckpt.CheckpointStager):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.closed = 0

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        self.given.append(kw)
        if kw.get("fail_stage"):
            raise OSError("stage")
        return dict(state_dict)

    def close(self) -> None:
        self.closed += 1


class Process(asyncckpt.CheckpointProcess):
    """Writes nothing; its futures are the test's."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, str, dict[str, Any]]] = []
        self.futures: list[Future[Any]] = []
        self.closed = 0

    def write(self, staging_result: Any, path: str, **kw: Any) -> Any:
        self.given.append((staging_result, path, kw))
        if kw.get("fail_write"):
            raise OSError("write")
        if kw.get("no_future"):
            return None
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.closed += 1


class Reader(asyncckpt.CheckpointReader):
    """Returns what it was given."""

    def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any) -> tuple[Any, list[str]]:
        return {"path": path, "state_dict": state_dict, "map_location": map_location, **kw}, []


def test_own_parts_get_the_extra_arguments_of_save_and_load(tmp_path: pathlib.Path) -> None:
    stager, process = Stager(), Process()
    with AsyncCheckpointer(checkpoint_stager=stager, checkpoint_process=process, reader=Reader()) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a", step=4, metadata={"m": 1}, tag="mine", number=5)
        process.futures[0].set_result("done")
        assert handle.written.result(0) == "done"  # type: ignore[comparison-overlap]
        assert handle.staged.done()
        found = checkpointer.load(tmp_path / "a", {"x": 1}, default_map_location="cpu", strict=True, tag="yours")
    expected = {"step": 4, "metadata": {"m": 1}, "tag": "mine", "number": 5}
    path = str(tmp_path / "a")
    save_id = stager.given[0].pop("save_id")
    assert isinstance(save_id, SaveId)
    assert stager.given == [{**expected, "path": path}]
    result, given_path, kw = process.given[0]
    assert (result, given_path) == (STATE, path)
    assert kw.pop("save_id") == save_id
    assert kw == expected
    assert found == {
        "path": path, "state_dict": {"x": 1}, "map_location": "cpu", "strict": True, "tag": "yours"
    }  # fmt: skip
    assert (stager.closed, process.closed) == (1, 1)


def test_an_own_process_gets_a_host_copy_of_the_state(tmp_path: pathlib.Path) -> None:
    process, state = Process(), states.every_leaf()
    with AsyncCheckpointer(checkpoint_process=process) as checkpointer:
        checkpointer.save(state, tmp_path / "a")
        result = process.given[0][0]
        states.assert_same(result, state)
        pointers = {t.data_ptr() for t in states.every_tensor().values()}
        state["tied"]["first"].fill_(-1)
        assert result["tied"]["first"].data_ptr() not in pointers
        assert not (result["tied"]["first"] == -1).all()
        process.futures[0].set_result(None)


@pytest.mark.parametrize("where", ["fail_stage", "fail_write", "no_future", "in the future", "cancelled"])
def test_errors_of_own_parts_reach_the_futures_and_the_next_save_works(tmp_path: pathlib.Path, where: str) -> None:
    process = Process()
    with AsyncCheckpointer(checkpoint_stager=Stager(), checkpoint_process=process) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a", **{where: True})
        if where == "in the future":
            process.futures[0].set_exception(OSError("later"))
        if where == "cancelled":
            process.futures[0].cancel()
            process.futures[0].set_running_or_notify_cancel()
        error = handle.written.exception(0)
        assert error is not None
        assert handle.durable.exception(0) is not None
        assert (handle.staged.exception(0) is None) == (where not in ("fail_stage", "fail_write"))
        if where not in ("cancelled", "no_future"):
            assert type(error) is OSError
        assert checkpointer.pending() == []
        again = checkpointer.save(STATE, tmp_path / "b")
        process.futures[-1].set_result(None)
        assert again.written.exception(0) is None


def test_closing_completes_the_futures_of_an_own_process(tmp_path: pathlib.Path) -> None:
    process = Process()
    checkpointer = AsyncCheckpointer(checkpoint_process=process)
    handle = checkpointer.save({"a": 1}, tmp_path / "a")
    checkpointer.close(0.01)
    assert isinstance(handle.written.exception(0), CheckpointerClosedError)
    process.futures[0].set_result(None)


def test_an_own_stager_with_the_worker_must_return_sealed_slots(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, checkpoint_stager=Stager()) as checkpointer:
        handle = checkpointer.save(STATE, tmp_path / "a")
        assert isinstance(handle.written.exception(DEADLINE_S), ConfigError)
        assert "checkpoint_process" in str(handle.written.exception(0))


def test_a_failed_save_does_not_poison_later_ones(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    written(checkpointer.save(STATE, tmp_path / "0"))
    for n in range(5):
        failed = checkpointer.save(STATE, tmp_path / "0")
        good = checkpointer.save(STATE, tmp_path / f"good-{n}")
        assert isinstance(failed.written.exception(DEADLINE_S), CheckpointExistsError)
        written(good)
    assert len(slots_of(checkpointer)) <= 2
