"""`overwrite=True` as users meet it: alone, with a worker, and on two ranks."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
from real_worker import DEADLINE_S, manifest_of, written
from storage_samples import RecordingFiles

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    MissingKeysError,
    RanksDisagreeError,
    SaveFailedError,
)
from asyncckpt.format.names import SaveId, owner_of
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.read_source import MAX_ATTEMPTS

N = 50_000


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((N,), float(step)), "b": {"c": torch.full((N,), float(step)), "step": step}}


def step_of(state: dict[str, Any]) -> int:
    """Return the step of a state, all of which must be of one step."""
    steps = {float(x) for x in (*state["a"].unique(), *state["b"]["c"].unique(), state["b"]["step"])}
    assert len(steps) == 1, f"a mix of steps {steps}"
    return int(steps.pop())


def owners(path: pathlib.Path) -> set[SaveId]:
    return {owner for name in os.listdir(path) if (owner := owner_of(name)) is not None}


# ---- without a worker


def test_sync_saves_replace_one_another_at_one_path_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "last"
    with SyncCheckpointer(overwrite=True, fsync=False) as checkpointer:
        for step in range(3):
            checkpointer.save(state_of(step), path)
            assert step_of(asyncckpt.load(path)) == step and len(owners(path)) == 1
            (path / "notes.txt").write_text("mine")
        checkpointer.save(state_of(5), tmp_path / "other")
    assert (path / "notes.txt").read_text() == "mine"
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "other")
    with SyncCheckpointer(overwrite=True, fsync=False) as checkpointer:
        checkpointer.save(state_of(1), path)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(path), "by lineage, not by step"


def test_a_run_that_was_overtaken_by_a_later_one_replaces_nothing_of_it(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(overwrite=True, fsync=False) as first, SyncCheckpointer(overwrite=True, fsync=False) as later:
        first.save(state_of(1), tmp_path / "a")
        later.save(state_of(2), tmp_path / "a")
        with pytest.raises(CheckpointExistsError, match="newer"):
            first.save(state_of(3), tmp_path / "a")
        first.save(state_of(3), tmp_path / "b")
    assert step_of(asyncckpt.load(tmp_path / "a")) == 2 and len(owners(tmp_path / "a")) == 1


# ---- with one


@pytest.mark.parametrize("by", ["keyword", "environment"])
def test_async_saves_replace_one_another_at_one_path(
    shared_worker: real_worker.RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("ASYNCCKPT_OVERWRITE", "1")
    fields = {"overwrite": True} if by == "keyword" else {}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, **fields) as checkpointer:
        for step in range(3):
            written(checkpointer.save(state_of(step), tmp_path / "last"))
            assert step_of(asyncckpt.load(tmp_path / "last")) == step and len(owners(tmp_path / "last")) == 1
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, overwrite=False) as checkpointer:
        refused = checkpointer.save(state_of(9), tmp_path / "last")
        assert isinstance(refused.written.exception(DEADLINE_S), CheckpointExistsError)
    assert step_of(asyncckpt.load(tmp_path / "last")) == 2


def test_saves_that_follow_too_closely_fail_by_name_and_never_run_at_once(
    shared_worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, overwrite=True) as checkpointer:
        handles = [checkpointer.save(state_of(step), tmp_path / "last") for step in range(6)]
        ends = [handle.written.exception(DEADLINE_S) for handle in handles]
    for error in ends:
        assert error is None or (isinstance(error, SaveFailedError) and error.code == "path_in_use")
    best = max(step for step, error in enumerate(ends) if error is None)
    assert step_of(asyncckpt.load(tmp_path / "last")) == best


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_path_inside_a_checkpoint_is_refused(
    shared_worker: real_worker.RealWorker, tmp_path: pathlib.Path, overwrite: bool
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, overwrite=overwrite) as checkpointer:
        written(checkpointer.save(state_of(1), tmp_path / "a"))
        refused = checkpointer.save(state_of(2), tmp_path / "a" / "deep" / "b").written.exception(DEADLINE_S)
    assert isinstance(refused, CheckpointExistsError) and "inside" in str(refused)
    assert not (tmp_path / "a" / "deep").exists()


def test_loading_in_a_loop_while_a_path_is_overwritten_sees_one_save_or_another(
    shared_worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    path, done, seen, errors = tmp_path / "last", threading.Event(), [], []

    def load() -> None:
        try:
            while not done.is_set():
                seen.append(step_of(asyncckpt.load(path)))
        except BaseException as error:
            errors.append(error)

    with AsyncCheckpointer(endpoint=shared_worker.endpoint, overwrite=True, fsync=False) as checkpointer:
        written(checkpointer.save(state_of(0), path))
        thread = threading.Thread(target=load)
        thread.start()
        try:
            for step in range(1, 40):
                written(checkpointer.save(state_of(step), path))
        finally:
            done.set()
            thread.join(DEADLINE_S)
    assert errors == []
    assert seen == sorted(seen) and len(set(seen)) > 3


class Overwriting(RecordingFiles):
    """Lets `checkpointer` save to `path` ahead of the calls of `open` that `when` names, of shards or of all files."""

    def __init__(self, checkpointer: SyncCheckpointer, path: pathlib.Path, when: Sequence[int], suffix: str) -> None:
        super().__init__()
        self._checkpointer, self._path, self._when, self._suffix = checkpointer, path, when, suffix
        self.opened, self.step = 0, 0

    def before(self, name: str, args: Sequence[Any]) -> None:
        if name == "open" and args[0].endswith(self._suffix):
            self.opened += 1
            if self.opened in self._when:
                self.step += 1
                self._checkpointer.save(state_of(self.step), self._path)


@pytest.mark.parametrize("suffix", [".index", ".objects.json", ".safetensors"])
@pytest.mark.parametrize("into", [True, False])
def test_a_load_during_which_the_checkpoint_is_replaced_begins_again(
    tmp_path: pathlib.Path, suffix: str, into: bool
) -> None:
    with SyncCheckpointer(overwrite=True, fsync=False, files_per_rank=2) as checkpointer:
        checkpointer.save(state_of(0), tmp_path / "last")
        files = Overwriting(checkpointer, tmp_path / "last", [1, 3], suffix)
        found, missing = DefaultReader(files).read(tmp_path / "last", state_of(-1) if into else None, threads=1)
    assert step_of(found) == files.step >= 1 and missing == []


def test_a_target_that_the_new_checkpoint_would_fill_in_part_only_is_an_error(tmp_path: pathlib.Path) -> None:
    class Replacing(RecordingFiles):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == "open" and args[0].endswith(".safetensors") and not done:
                done.append(True)
                checkpointer.save({"a": torch.ones(N)}, tmp_path / "last")

    done: list[bool] = []
    with SyncCheckpointer(overwrite=True, fsync=False) as checkpointer:
        checkpointer.save({"a": torch.zeros(N), "b": torch.zeros(N)}, tmp_path / "last")
        with pytest.raises(MissingKeysError, match="overwritten while it was read") as caught:
            DefaultReader(Replacing()).read(tmp_path / "last", {"a": torch.ones(N), "b": torch.ones(N)}, threads=1)
    assert caught.value.keys == ["b"]


def test_a_load_that_is_overtaken_for_ever_gives_up(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(overwrite=True, fsync=False) as checkpointer:
        checkpointer.save(state_of(0), tmp_path / "last")
        files = Overwriting(checkpointer, tmp_path / "last", range(1000), ".index")
        with pytest.raises(CorruptCheckpointError, match="missing"):
            DefaultReader(files).read(tmp_path / "last")
    assert files.step == MAX_ATTEMPTS


def test_a_missing_file_of_the_checkpoint_that_stands_is_an_error_at_once(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state_of(0), tmp_path / "a")
    next((tmp_path / "a").glob("*.safetensors")).unlink()
    files = RecordingFiles()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        DefaultReader(files).read(tmp_path / "a")
    assert sum(str(where).endswith(".index") for name, where in files.calls if name == "open") == 1


# ---- several ranks


def overwrites(rank: int, root: str, kind: str) -> list[int]:
    loaded = []
    checkpointer = SyncCheckpointer(overwrite=True) if kind == "sync" else AsyncCheckpointer(overwrite=True)
    with checkpointer:
        for step in (1, 2, 3):
            handle = checkpointer.save({**state_of(step), f"only{rank}": torch.ones(3)}, f"{root}/last")
            if handle is not None:
                assert handle.written.exception(DEADLINE_S) is None
            torch.distributed.barrier()
            loaded.append(step_of(asyncckpt.load(f"{root}/last", keys=["a", "b"])))
            torch.distributed.barrier()
    return loaded


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_two_ranks_replace_their_checkpoint(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, kind: str
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    assert rank_processes.run(2, overwrites, str(tmp_path), kind, environ=environ) == [[1, 2, 3]] * 2
    assert len(owners(tmp_path / "last")) == 1 and len(manifest_of(tmp_path / "last")["ranks"]) == 2


def one_overwrites(rank: int, root: str, kind: str) -> str:
    maker = SyncCheckpointer if kind == "sync" else AsyncCheckpointer
    with maker(overwrite=rank == 1) as checkpointer:
        try:
            handle = checkpointer.save(state_of(1), f"{root}/last")
            error = handle.written.exception(DEADLINE_S) if handle is not None else None
        except Exception as raised:
            error = raised
    assert isinstance(error, RanksDisagreeError)
    return str(error)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_ranks_that_do_not_agree_on_overwriting_are_told_so(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, kind: str
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    for text in rank_processes.run(2, one_overwrites, str(tmp_path), kind, environ=environ):
        assert "overwrite" in text
    assert not (tmp_path / "last" / "manifest.json").exists()
