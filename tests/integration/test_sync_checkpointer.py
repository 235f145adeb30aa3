"""SyncCheckpointer: the same checkpoints, in the caller's time, with no worker and no shared memory."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import pytest
import states
import torch

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.errors import (
    CheckpointerClosedError,
    CheckpointExistsError,
    ConfigError,
    ForkedError,
    InsufficientMemoryError,
    SaveFailedError,
    UnsupportedLeafError,
)

STATE = {"w": torch.arange(100_000.0), "n": {"lr": 0.1}}


@pytest.fixture
def checkpointer() -> Iterator[SyncCheckpointer]:
    with SyncCheckpointer() as found:
        yield found


def manifest_of(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_everything_that_is_saved_is_loaded_bit_for_bit(checkpointer: SyncCheckpointer, tmp_path: pathlib.Path) -> None:
    state = states.every_leaf()
    assert checkpointer.save(state, tmp_path / "a") is None  # type: ignore[func-returns-value]
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    states.assert_same(checkpointer.load(tmp_path / "a"), state)


def test_saves_of_other_structures_share_the_memory(checkpointer: SyncCheckpointer, tmp_path: pathlib.Path) -> None:
    for n, size in enumerate((10, 100_000, 7, 100_000, 200_000)):
        checkpointer.save({"w": torch.full((size,), float(n))}, tmp_path / str(n))
    for n, size in enumerate((10, 100_000, 7, 100_000, 200_000)):
        states.assert_same(asyncckpt.load(tmp_path / str(n)), {"w": torch.full((size,), float(n))})


def test_no_process_is_started_and_no_shared_memory_made(
    checkpointer: SyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    before = psutil.Process().children()
    checkpointer.save(STATE, tmp_path / "a")
    assert psutil.Process().children() == before
    assert "memfd:" not in pathlib.Path("/proc/self/maps").read_text()


def test_step_metadata_and_lineage_are_as_of_the_asynchronous_one(
    checkpointer: SyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    checkpointer.save({"step": 30}, tmp_path / "a", metadata={"loss": 0.5})
    checkpointer.save({"x": 1}, tmp_path / "b")
    checkpointer.save({"step": 1}, tmp_path / "c", step=2)
    assert [manifest_of(tmp_path / name)["step"] for name in "abc"] == [30, 1, 2]
    assert manifest_of(tmp_path / "a")["metadata"] == {"loss": 0.5}
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "c")
    with SyncCheckpointer() as later:
        later.save({"step": 0}, tmp_path / "d")
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "d")


def test_settings_change_what_is_written(tmp_path: pathlib.Path) -> None:
    state = {f"t{n}": torch.full((1000,), float(n)) for n in range(6)}
    with SyncCheckpointer(fsync=False, files_per_rank=2, write_threads=3) as checkpointer:
        checkpointer.save(state, tmp_path / "a")
    assert manifest_of(tmp_path / "a")["fsync"] is False
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


def test_max_shard_bytes_limits_every_file(tmp_path: pathlib.Path) -> None:
    state = {f"t{n}": torch.full((30_000,), float(n)) for n in range(6)}
    with SyncCheckpointer(fsync=False, max_shard_bytes=65_536) as checkpointer:
        checkpointer.save(state, tmp_path / "a")
    sizes = [p.stat().st_size for p in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) >= 12 and max(sizes) <= 65_536
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


def test_errors_raise_and_the_next_save_works(checkpointer: SyncCheckpointer, tmp_path: pathlib.Path) -> None:
    checkpointer.save(STATE, tmp_path / "a")
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointExistsError) as exists:
        checkpointer.save({"other": 1}, tmp_path / "a")
    assert exists.value.path == str(tmp_path / "a")
    with pytest.raises(SaveFailedError) as failed:
        checkpointer.save(STATE, tmp_path / "file" / "a")
    assert (failed.value.code, failed.value.rank) == ("ENOTDIR", 0)
    with pytest.raises(UnsupportedLeafError):
        checkpointer.save({"f": print}, tmp_path / "b")
    with pytest.raises(ConfigError):
        checkpointer.save(STATE, tmp_path / "b", metadata={"x": object()})
    checkpointer.save(STATE, tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    states.assert_same(asyncckpt.load(tmp_path / "b"), STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "file"]


def test_a_state_larger_than_limit_or_memory_is_refused(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(arena_limit_bytes=100_000) as checkpointer:
        with pytest.raises(InsufficientMemoryError, match="arena_limit_bytes") as limited:
            checkpointer.save(STATE, tmp_path / "a")
        assert limited.value.limit == 100_000
        checkpointer.save({"w": torch.ones(100)}, tmp_path / "b")
    total = psutil.virtual_memory().total
    with SyncCheckpointer() as checkpointer:
        for nbytes in (total + (1 << 30), 1 << 44):
            with pytest.raises(InsufficientMemoryError) as refused:
                checkpointer.save({"w": torch.zeros(1).expand(nbytes // 4)}, tmp_path / "c")
            assert (refused.value.nbytes or 0) >= nbytes
        checkpointer.save(STATE, tmp_path / "d")
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "d")


def test_an_own_writer_gets_the_extra_arguments_and_its_exceptions_raise(tmp_path: pathlib.Path) -> None:
    class Writer(asyncckpt.CheckpointWriter):
        def __init__(self) -> None:
            self.given: list[tuple[Any, str, dict[str, Any]]] = []
            self.closed = 0

        def write(self, state_dict: Mapping[str, Any], path: str, **kw: Any) -> Any:
            self.given.append((state_dict, path, kw))
            if kw.get("fail"):
                raise OSError("mine")

        def close(self) -> None:
            self.closed += 1

    writer = Writer()
    with SyncCheckpointer(writer) as checkpointer:
        checkpointer.save(STATE, tmp_path / "a", step=3, tag="x")
        with pytest.raises(OSError, match="mine"):
            checkpointer.save(STATE, tmp_path / "a", fail=True)
        checkpointer.save(STATE, tmp_path / "a")
    state, path, kw = writer.given[0]
    assert (state, path, kw["step"], kw["tag"], kw["metadata"]) == (STATE, str(tmp_path / "a"), 3, "x", {})
    assert len(writer.given) == 3
    assert writer.closed == 1


def test_an_own_reader_gets_the_extra_arguments(tmp_path: pathlib.Path) -> None:
    class Reader(asyncckpt.CheckpointReader):
        def read(
            self, path: str, state_dict: Any = None, *, map_location: Any = None, **kw: Any
        ) -> tuple[Any, list[str]]:
            return (path, state_dict, map_location, kw), ["missing"]

    with SyncCheckpointer(reader=Reader()) as checkpointer:
        found = checkpointer.load(tmp_path, {"a": 1}, default_map_location="cpu", strict=False, tag=5)
    assert found == (str(tmp_path), {"a": 1}, "cpu", {"strict": False, "tag": 5})


def test_closing_twice_is_fine_and_saves_after_it_raise(tmp_path: pathlib.Path) -> None:
    checkpointer = SyncCheckpointer()
    checkpointer.save(STATE, tmp_path / "a")
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointerClosedError):
        checkpointer.save(STATE, tmp_path / "b")
    with pytest.raises(CheckpointerClosedError):
        checkpointer.load(tmp_path / "a")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_harms_nothing(checkpointer: SyncCheckpointer, tmp_path: pathlib.Path) -> None:
    checkpointer.save(STATE, tmp_path / "a")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            checkpointer.save(STATE, tmp_path / "b")
        except ForkedError:
            checkpointer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    checkpointer.save(STATE, tmp_path / "c")


def test_a_failed_save_leaves_no_directory_that_it_made_and_every_other(tmp_path: pathlib.Path) -> None:
    class Veto:
        def pre_commit(self, path: str, **kw: Any) -> None:
            raise RuntimeError("no")

    (tmp_path / "there").mkdir()
    with SyncCheckpointer(commit_hook=Veto()) as checkpointer:
        for path in ("new/deep", "there"):
            with pytest.raises(SaveFailedError, match="vetoed"):
                checkpointer.save(STATE, tmp_path / path)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
