"""Snapshots that are loaded from the worker's memory: the same bits, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import real_worker
import torch
import zmq
from real_worker import slots_of, wait_until, written
from states import assert_same, every_leaf
from worker_here import DEADLINE_S, Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    MissingKeysError,
    SaveFailedError,
    SnapshotUnavailableError,
    WorkerUnavailableError,
)
from asyncckpt.loading import read_source
from asyncckpt.loading.read_source import read_from_source
from asyncckpt.protocol import codec, messages
from asyncckpt.recall.session import RecallSession
from asyncckpt.storage.files import Files
from asyncckpt_worker.service import memory_pressure


@pytest.fixture
def saver(here: Here) -> Iterator[AsyncCheckpointer]:
    """A trainer of that worker."""
    with AsyncCheckpointer() as found:
        yield found
        here.storage.flows.set()


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(3000, 400, generator=generator), "b": torch.full((7,), float(step)), "step": step}


def is_state(found: Any, step: int) -> bool:
    wanted = state_of(step)
    return all(torch.equal(found[name], wanted[name]) for name in ("w", "b")) and found["step"] == step


def is_held(handle: asyncckpt.SaveHandle) -> None:
    """Wait until the worker has heard of what was staged."""
    handle.staged.result(DEADLINE_S)
    wait_until(lambda: asyncckpt.held_snapshots(handle.path), "the worker has taken it up")


def without_shards(path: pathlib.Path) -> None:
    for shard in [*path.glob("*.safetensors"), *path.glob("*.objects.json")]:
        shard.unlink()


# ---- committed, and still in memory


@pytest.mark.parametrize(
    "options", [{}, {"low_memory": False}, {"verify": False}, {"threads": 1}, {"source": "memory"}]
)
def test_what_is_committed_and_in_memory_is_read_from_there(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, options: dict[str, Any]
) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    without_shards(tmp_path / "a")
    assert is_state(asyncckpt.load(tmp_path / "a", **options), 1)
    target = {"w": torch.zeros(3000, 400), "step": 0}
    assert saver.load(tmp_path / "a", target, **options) is target
    assert torch.equal(target["w"], state_of(1)["w"]) and target["step"] == 1
    with pytest.raises(CorruptCheckpointError, match="missing"):
        asyncckpt.load(tmp_path / "a", source="disk")


def test_every_kind_of_leaf_comes_back_from_memory(saver: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    written(saver.save({"all": every_leaf()}, tmp_path / "a"))
    from_disk = asyncckpt.load(tmp_path / "a", source="disk")
    without_shards(tmp_path / "a")
    for source in ("auto", "memory"):
        assert_same(asyncckpt.load(tmp_path / "a", source=source), from_disk)


def test_damage_on_disk_does_not_matter_while_memory_has_it(saver: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert is_state(asyncckpt.load(tmp_path / "a"), 1)
    with pytest.raises(CorruptCheckpointError, match="differ from their checksum"):
        asyncckpt.load(tmp_path / "a", source="disk")


def test_damage_in_memory_is_found_and_the_disk_is_read(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    (slot,) = slots_of(saver)
    view = slot.memory.mapping.view()
    view[1 << 20] ^= 1
    view.release()
    with caplog.at_level(logging.INFO):
        assert is_state(asyncckpt.load(tmp_path / "a"), 1)
    assert "is read from disk, since its snapshot in memory cannot be read" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="differ from their checksum"):
        asyncckpt.load(tmp_path / "a", source="memory")


def test_checkpoint_whose_memory_was_used_again_is_read_from_disk(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    for step in (1, 2):
        written(saver.save(state_of(step), tmp_path / str(step)))
    assert [s.step for s in asyncckpt.held_snapshots(tmp_path)] == [2]
    assert is_state(asyncckpt.load(tmp_path / "1"), 1)
    with pytest.raises(SnapshotUnavailableError, match="holds no snapshot of this path"):
        asyncckpt.load(tmp_path / "1", source="memory")


def test_memory_that_is_used_again_while_it_is_read_is_read_from_disk(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, here: Here
) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    files: list[Files] = []

    def use(found: read_source.ReadSource) -> str:
        files.append(found.files)
        if len(files) == 1:
            written(saver.save(state_of(2), tmp_path / "b"))
        return str(found.contents.manifest.step)

    plain = Files()
    assert read_from_source(str(tmp_path / "a"), "auto", here.endpoint, plain, use) == "1"
    assert files[0] is not plain and files[1] is plain


def test_error_of_the_targets_is_not_tried_twice(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    without_shards(tmp_path / "a")
    with pytest.raises(MissingKeysError):
        asyncckpt.load(tmp_path / "a", {"other": torch.zeros(2)}, strict=True)
    assert "from disk" not in caplog.text


# ---- not committed


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("source", ["auto", "memory"])
def test_snapshot_is_loaded_while_the_disk_is_slow(
    here: Here, tmp_path: pathlib.Path, source: str, layout: str
) -> None:
    with AsyncCheckpointer(layout=layout) as saver:
        here.storage.flows.clear()
        handle = saver.save(state_of(1), tmp_path / "a", metadata={"loss": 0.5})
        is_held(handle)
        assert is_state(asyncckpt.load(tmp_path / "a", source=source), 1)
        wait_until((tmp_path / "a").exists, "its directory is made")
        with pytest.raises(CheckpointNotCommittedError, match=r"holds it in memory, as save .* of step 1"):
            asyncckpt.load(tmp_path / "a", source="disk")
        assert not handle.written.done()
        here.storage.flows.set()
        written(handle)


@pytest.mark.parametrize("source", ["auto", "memory"])
def test_snapshot_is_opened_and_planned_for_while_the_disk_is_slow(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path, source: str
) -> None:
    here.storage.flows.clear()
    handle = saver.save(state_of(1), tmp_path / "a", metadata={"loss": 0.5})
    is_held(handle)
    with asyncckpt.open_checkpoint(tmp_path / "a", source=source) as opened:
        assert opened.step == 1 and opened.metadata == {"loss": 0.5} and opened.objects["step"] == 1
        for mmap in (False, True):
            assert torch.equal(opened.tensor("w", (slice(5, 9), slice(None)), mmap=mmap), state_of(1)["w"][5:9])
    opened.close()
    with pytest.raises(SnapshotUnavailableError, match="was closed"):
        opened.tensor("w")
    assert asyncckpt.plan_load(tmp_path / "a", state_of(1), source=source).fits
    wait_until((tmp_path / "a").exists, "its directory is made")
    for call in (asyncckpt.open_checkpoint, lambda path, source: asyncckpt.plan_load(path, {}, source=source)):
        with pytest.raises(CheckpointNotCommittedError, match="holds it in memory"):
            call(tmp_path / "a", source="disk")
        with pytest.raises(SnapshotUnavailableError):
            call(tmp_path / "none", source="memory")
    here.storage.flows.set()
    written(handle)


def test_opened_snapshot_whose_memory_is_used_again_gives_nothing_more(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path
) -> None:
    here.storage.broken = True
    with pytest.raises(SaveFailedError):
        written(saver.save(state_of(1), tmp_path / "a"))
    opened = asyncckpt.open_checkpoint(tmp_path / "a")
    assert torch.equal(opened.tensor("b"), state_of(1)["b"])
    here.storage.broken = False
    written(saver.save(state_of(2), tmp_path / "b"))
    with pytest.raises(SnapshotUnavailableError, match="another save"):
        opened.tensor("b")
    opened.close()


def test_snapshot_that_could_not_be_written_is_loaded_and_is_the_newest(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path
) -> None:
    written(saver.save(state_of(1), tmp_path / "1"))
    here.storage.broken = True
    with pytest.raises(SaveFailedError):
        written(saver.save(state_of(2), tmp_path / "2"))
    (held,) = asyncckpt.held_snapshots(tmp_path)
    assert (held.path, held.step, held.ranks, held.world_size) == (str(tmp_path / "2"), 2, (0,), 1)
    assert held.complete and not held.committed
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "1")
    assert saver.latest_checkpoint(tmp_path, source="disk") == str(tmp_path / "1")
    for source in ("auto", "memory"):
        assert saver.latest_checkpoint(tmp_path, source=source) == str(tmp_path / "2")
    assert is_state(saver.load(tmp_path / "2"), 2)


@pytest.mark.parametrize("named", [False, True])
def test_restoring_tries_what_is_in_memory_only_first(
    here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delenv("ASYNCCKPT_ENDPOINT")
    with AsyncCheckpointer(endpoint=here.endpoint if named else None) as saver:
        for step in (1, 2, 3):
            here.storage.broken = step == 3
            with contextlib.suppress(SaveFailedError):
                written(saver.save(state_of(step), tmp_path / str(step)))
        for options, step in (({}, 3), ({"source": "disk"}, 2), ({"source": "memory"}, 3)):
            found = saver.restore_latest(tmp_path, **options)
            assert (found.path, found.step, found.skipped) == (str(tmp_path / str(step)), step, ())
            assert is_state(found.state_dict, step)
        if not named:
            assert asyncckpt.restore_latest(tmp_path).step == 3


def test_restoring_passes_over_a_snapshot_that_is_gone_from_memory_meanwhile(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(saver.save(state_of(1), tmp_path / "1"))
    here.storage.broken = True
    with contextlib.suppress(SaveFailedError):
        written(saver.save(state_of(2), tmp_path / "2"))

    monkeypatch.setattr(read_source, "snapshots_of", lambda rows: [])
    found = saver.restore_latest(tmp_path, quarantine=True)
    assert found.step == 1 and [one.path for one in found.skipped] == [str(tmp_path / "2")]
    assert found.skipped[0].moved_to is None
    with pytest.raises(SnapshotUnavailableError):
        saver.restore_latest(tmp_path, source="memory")


@pytest.mark.parametrize("by", ["asyncckpt.restore_latest", "a checkpointer", "a manager"])
def test_what_is_in_memory_only_is_restored_where_a_look_at_the_disk_finds_nothing(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path, by: str
) -> None:
    here.storage.broken = True
    with contextlib.suppress(SaveFailedError):
        written(saver.save(state_of(1), tmp_path / "step-00000001"))
    assert asyncckpt.latest_checkpoint(tmp_path) is None
    target = state_of(0)
    if by == "a manager":
        with asyncckpt.CheckpointManager(tmp_path, checkpointer=saver, preemption_signal=()) as managed:
            found = managed.restore(target)
    else:
        found = (asyncckpt if by == "asyncckpt.restore_latest" else saver).restore_latest(tmp_path, target)
    assert found is not None and found.step == 1 and is_state(target, 1)


def test_checkpoint_that_was_committed_and_removed_is_not_the_newest_again(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    written(saver.save(state_of(1), tmp_path / "1"))
    written(saver.save(state_of(2), tmp_path / "2"))
    assert [held.step for held in asyncckpt.held_snapshots(tmp_path)] == [2]
    shutil.rmtree(tmp_path / "2")  # to go on from the one before
    assert saver.latest_checkpoint(tmp_path) == str(tmp_path / "1")
    assert saver.restore_latest(tmp_path).step == 1


@pytest.mark.parametrize("removed", ["the root", "its own directory"])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "made anew"])
def test_snapshot_whose_directory_was_removed_since_is_not_resumed_from_unless_asked_for(
    saver: AsyncCheckpointer,
    here: Here,
    tmp_path: pathlib.Path,
    removed: str,
    again: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "runs" / "a"
    here.storage.broken = True
    with contextlib.suppress(SaveFailedError):
        written(saver.save(state_of(1), root / "1"))
    assert saver.latest_checkpoint(root) == str(root / "1")
    doomed = root if removed == "the root" else root / "1"
    shutil.rmtree(doomed)  # to start anew
    if again:
        doomed.mkdir()
    assert saver.latest_checkpoint(root) is None
    assert f"a snapshot of step 1 of {root / '1'}, which is skipped" in caplog.text
    assert saver.restore_latest(root) is None
    assert saver.latest_checkpoint(root, source="memory") == str(root / "1")
    assert saver.restore_latest(root, source="memory").step == 1
    assert is_state(saver.load(root / "1"), 1), "by its own name it is asked for"


def test_snapshot_that_could_not_even_get_a_directory_is_resumed_from_until_the_root_is_removed(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    root.mkdir()
    staged = threading.Event()

    def refuse(path: str, mode: int = 0o777) -> None:
        assert staged.wait(DEADLINE_S)  # what fails before it is staged is nobody's
        raise OSError(errno.EROFS, "simulated", path)

    monkeypatch.setattr(here.storage, "mkdir", refuse)
    handle = saver.save(state_of(1), root / "1")
    is_held(handle)
    staged.set()
    with pytest.raises(SaveFailedError):
        written(handle)
    assert not (root / "1").exists()
    assert saver.latest_checkpoint(root) == str(root / "1")
    root.rmdir()
    assert saver.latest_checkpoint(root) is None


def test_snapshot_whose_commit_was_never_finished_is_loaded(here: Here, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(layout="dcp") as saver:
        written(saver.save(state_of(1), tmp_path / "a"))
        (tmp_path / "a" / ".metadata").unlink()
        with pytest.raises(CheckpointNotCommittedError):
            saver.load(tmp_path / "a", source="disk")
        assert is_state(saver.load(tmp_path / "a"), 1)


def test_committed_checkpoint_is_not_hidden_by_a_newer_snapshot_of_its_path(here: Here, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(overwrite=True) as saver:
        written(saver.save(state_of(1), tmp_path / "a"))
        here.storage.broken = True
        with pytest.raises(SaveFailedError):
            written(saver.save(state_of(2), tmp_path / "a"))
        assert is_state(asyncckpt.load(tmp_path / "a"), 1)
        assert is_state(asyncckpt.load(tmp_path / "a", source="memory"), 2)
        assert saver.latest_checkpoint(tmp_path) == str(tmp_path / "a"), "which loads as what is committed"


def test_snapshot_of_a_trainer_that_left_is_loaded_for_as_long_as_it_is_kept(
    here: Here, tmp_path: pathlib.Path
) -> None:
    here.storage.broken = True
    with AsyncCheckpointer() as saver, contextlib.suppress(SaveFailedError):
        written(saver.save(state_of(1), tmp_path / "a"))
    wait_until(lambda: real_worker.status_of(here.endpoint)["kept"], "it is kept")
    assert is_state(asyncckpt.load(tmp_path / "a"), 1)
    wait_until(lambda: real_worker.status_of(here.endpoint)["kept"][0]["readers"] == 0, "and nobody reads it any more")


def test_worker_is_asked_at_the_endpoint_that_is_named(
    saver: AsyncCheckpointer, here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(saver.save(state_of(1), tmp_path / "a"))
    monkeypatch.delenv("ASYNCCKPT_ENDPOINT")
    assert asyncckpt.held_snapshots(tmp_path) == []
    assert [s.step for s in asyncckpt.held_snapshots(tmp_path, endpoint=here.endpoint)] == [1]
    with pytest.raises(SnapshotUnavailableError):
        asyncckpt.load(tmp_path / "a", source="memory")
    with AsyncCheckpointer(endpoint=here.endpoint) as other:
        assert is_state(other.load(tmp_path / "a", source="memory"), 1)


def test_worker_that_is_told_so_keeps_nothing(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    here = Here(endpoint, keep_snapshots_s=0)
    try:
        with AsyncCheckpointer() as saver:
            written(saver.save(state_of(1), tmp_path / "a"))
        wait_until(lambda: not real_worker.status_of(endpoint)["slots"], "the slot is freed")
        assert not real_worker.status_of(endpoint)["kept"]
    finally:
        here.close()


def test_what_is_kept_goes_when_the_machine_is_short_of_memory(
    here: Here, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncCheckpointer() as saver:
        written(saver.save(state_of(1), tmp_path / "a"))
    wait_until(lambda: real_worker.status_of(here.endpoint)["kept"], "it is kept")
    monkeypatch.setattr(memory_pressure, "is_short", lambda total, available: True)
    wait_until(lambda: not real_worker.status_of(here.endpoint)["kept"], "it is given up")
    assert is_state(asyncckpt.load(tmp_path / "a"), 1)


# ---- no worker, or one that does not answer


def test_load_beside_no_worker_starts_none_and_waits_for_none(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    with SyncCheckpointer() as saver:
        saver.save(state_of(1), tmp_path / "a")
    began = time.monotonic()
    assert is_state(asyncckpt.load(tmp_path / "a"), 1)
    assert asyncckpt.held_snapshots(tmp_path) == []
    with pytest.raises(SnapshotUnavailableError, match="no worker listens") as caught:
        asyncckpt.load(tmp_path / "a", source="memory")
    assert caught.value.path == str(tmp_path / "a") and isinstance(caught.value, LookupError)
    with pytest.raises(CheckpointNotFoundError):
        asyncckpt.load(tmp_path / "none")
    assert time.monotonic() - began < 60
    assert not os.path.exists(endpoint.removeprefix("ipc://"))


def test_socket_that_a_dead_worker_left_is_not_waited_for(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    with real_worker.running(endpoint) as worker, AsyncCheckpointer(on_error="warn") as saver:
        written(saver.save(state_of(1), tmp_path / "a"))
        worker.kill()
        assert os.path.exists(endpoint.removeprefix("ipc://"))
        with pytest.raises(SnapshotUnavailableError, match="no worker listens"):
            asyncckpt.load(tmp_path / "a", source="memory")
        assert is_state(asyncckpt.load(tmp_path / "a"), 1)


def test_worker_that_is_ending_when_it_is_asked_is_not_waited_for(endpoint: str) -> None:
    """Its socket takes connections until the last of its threads is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(endpoint.removeprefix("ipc://"))
        listener.listen(8)

        def end() -> None:
            for _ in range(3):  # two looks whether it is there, and the question
                listener.accept()[0].close()
            listener.close()

        ending = threading.Thread(target=end)
        ending.start()
        try:
            with pytest.raises(WorkerUnavailableError, match="no worker listens"):
                RecallSession(endpoint, "0", 3600.0)
        finally:
            ending.join()
    os.unlink(endpoint.removeprefix("ipc://"))


def test_worker_that_hangs_costs_a_load_a_second_at_most(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", worker.endpoint)
    monkeypatch.setattr(read_source, "LONG_ANSWER_S", 0.3)
    with SyncCheckpointer() as saver:
        saver.save(state_of(1), tmp_path / "a")
    with worker.frozen():
        began = time.monotonic()
        assert is_state(asyncckpt.load(tmp_path / "a"), 1)
        assert 0.5 < time.monotonic() - began < 60
        with pytest.raises(SnapshotUnavailableError, match="did not answer"):
            asyncckpt.load(tmp_path / "a", source="memory")


def test_reader_that_gets_its_answer_too_late_says_goodbye(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoint)
        with pytest.raises(WorkerUnavailableError, match="did not answer"):
            RecallSession(endpoint, "0", 0.1)
        said: list[Any] = []
        while not said or not isinstance(said[-1], messages.Goodbye):
            assert router.poll(2000), said
            said.append(codec.decode(router.recv_multipart()[1:], messages.REQUESTS))
        assert isinstance(said[0], messages.Hello)
    os.unlink(endpoint.removeprefix("ipc://"))


def test_worker_that_dies_under_a_load_takes_no_memory_away(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    read: list[Any] = []

    def use(found: read_source.ReadSource) -> bytes:
        worker.kill()
        read.append(type(found.files).__name__)
        shard = next(shard for rank in found.contents.ranks for shard in rank.index.shards)
        fd = found.files.open(os.path.join(found.contents.path, shard.name), os.O_RDONLY)
        data = bytearray(shard.nbytes)
        assert found.files.preadv(fd, [data], 0) == shard.nbytes
        found.files.close(fd)
        return bytes(data)

    with AsyncCheckpointer(endpoint=worker.endpoint, on_error="warn") as saver:
        written(saver.save(state_of(1), tmp_path / "a"))
        data = read_from_source(str(tmp_path / "a"), "auto", worker.endpoint, Files(), use)
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    assert data == shard.read_bytes() and read == ["OverlaidFiles"]


@pytest.mark.parametrize("source", ["ram", "", None, True])
def test_unknown_source_is_refused(saver: AsyncCheckpointer, tmp_path: pathlib.Path, source: Any) -> None:
    for call in (lambda: asyncckpt.load(tmp_path, source=source), lambda: saver.latest_checkpoint("/x", source=source)):
        with pytest.raises(ConfigError, match="source"):
            call()
