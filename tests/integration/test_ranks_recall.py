"""Two ranks die, and their successors load from the worker's memory what all of them had staged: P5."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from typing import Any

import pytest
import rank_processes
import torch
from real_worker import RealWorker, status_of, wait_until
from worker_here import DEADLINE_S, Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, RankInfo, ShardedSlice
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    SaveFailedError,
    SnapshotUnavailableError,
)
from asyncckpt.format.names import SaveId
from tests.torch_free_client import Client, Snapshot, new_save_id

ROWS = 600


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Replicated, sharded, and a rank's own."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(2 * ROWS, 300, generator=generator)
    shard = whole[rank * ROWS : (rank + 1) * ROWS].clone()
    return {
        "sharded": ShardedSlice(shard, whole.shape, (rank * ROWS, 0)),
        "replica": torch.randn(500, 700, generator=generator),
        "own": PerRank(torch.full((50,), float(100 * step + rank))),
        "step": step,
    }


def is_state(found: dict[str, Any], rank: int, step: int) -> bool:
    wanted = state_of(rank, step)
    same = torch.equal(found["sharded"].tensor, wanted["sharded"].tensor)
    same = same and torch.equal(found["replica"], wanted["replica"])
    return same and torch.equal(found["own"].value, wanted["own"].value) and found["step"] == step


def trains(rank: int, root: str, stages: bool) -> None:
    checkpointer = AsyncCheckpointer()
    checkpointer.save(state_of(rank, 0), f"{root}/step-0").written.result(DEADLINE_S)
    rank_processes.talk().say("trains")
    rank_processes.talk().hear()
    if stages:
        handle = checkpointer.save(state_of(rank, 1), f"{root}/step-1")
        handle.staged.result(DEADLINE_S)
        assert not handle.written.done()
    rank_processes.talk().say("staged")
    time.sleep(60)


def resumes(rank: int, root: str) -> tuple[str, bool, str, float]:
    """What it goes on from, whether the values are right, what was logged, and how long the first save stalls."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncckpt.loading").addHandler(handler)
    logging.getLogger("asyncckpt.loading").setLevel(logging.INFO)
    with AsyncCheckpointer() as checkpointer:
        newest = str(checkpointer.latest_checkpoint(root, timeout_s=4.0))
        target = state_of(rank, 7)
        checkpointer.load(newest, target)
        step = int(newest[-1])
        right = is_state(target, rank, step)
        rank_processes.talk().say("loaded")
        rank_processes.talk().hear()
        began = time.perf_counter()
        handle = checkpointer.save(state_of(rank, 2), f"{root}/step-2")
        stall_s = time.perf_counter() - began
        handle.written.result(DEADLINE_S)
    return newest, right, "\n".join(lines), stall_s


def dead_between_staged_and_written(here: Here, root: pathlib.Path, *, stages: tuple[bool, bool]) -> None:
    """Two trainers save, stage again while the disk is slow, and are killed."""
    environ = {"ASYNCCKPT_ENDPOINT": here.endpoint}
    with rank_processes.running(2, trains, str(root), True, environ=environ) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["trains"] * 2
        here.storage.flows.clear()
        for r in (0, 1):
            if stages[r]:
                ranks.send(r, "go")
                assert ranks.receive(r) == "staged"
        ranks.kill()
        for process in ranks.processes:
            process.join(60)
    wait_until(lambda: not status_of(here.endpoint)["sessions"], "the deaths are noticed")


def test_restarted_ranks_load_what_all_had_staged_while_nothing_of_it_is_on_disk(
    here: Here, tmp_path: pathlib.Path
) -> None:
    dead_between_staged_and_written(here, tmp_path, stages=(True, True))
    held = asyncckpt.held_snapshots(tmp_path)[0]
    assert (held.path[-1], held.ranks, held.committed, held.step) == ("1", (0, 1), False, 1)
    assert not (tmp_path / "step-1" / "manifest.json").exists()
    with rank_processes.running(2, resumes, str(tmp_path), environ={"ASYNCCKPT_ENDPOINT": here.endpoint}) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["loaded"] * 2
        assert not (tmp_path / "step-1" / "manifest.json").exists()
        here.storage.flows.set()
        wait_until((tmp_path / "step-1" / "manifest.json").exists, "the worker commits it")
        wait_until(lambda: len(status_of(here.endpoint)["kept"]) == 2, "the snapshot is kept")
        lent = status_of(here.endpoint)["counters"]["slots_lent"]
        for r in (0, 1):
            ranks.send(r, "go")
        for newest, right, log, _ in ranks.results():
            assert newest == str(tmp_path / "step-1") and right
            assert "not committed, is loaded from the worker's memory" in log
    counters = status_of(here.endpoint)["counters"]
    assert (counters["slots_lent"], counters["slots_lent_again"]) == (lent, 2), "the first save makes no memory"
    found = asyncckpt.load(tmp_path / "step-2", keys=["replica", "step"], source="disk")
    assert torch.equal(found["replica"], state_of(0, 2)["replica"]) and found["step"] == 2


def test_reshard_gets_what_all_ranks_had_staged_while_nothing_of_it_is_on_disk(
    here: Here, tmp_path: pathlib.Path
) -> None:
    dead_between_staged_and_written(here, tmp_path, stages=(True, True))
    assert not (tmp_path / "step-1" / "manifest.json").exists()
    target: dict[str, Any] = {"own": PerRank(None, lambda values, *_: [v.tolist() for v in values]), "step": 0}
    asyncckpt.load(tmp_path / "step-1", target)
    assert target["own"].value == [[100.0] * 50, [101.0] * 50] and target["step"] == 1


def test_step_that_one_rank_had_not_staged_is_not_offered_and_the_one_before_is_loaded(
    here: Here, tmp_path: pathlib.Path
) -> None:
    dead_between_staged_and_written(here, tmp_path, stages=(True, False))
    here.storage.flows.set()
    wait_until(lambda: not status_of(here.endpoint)["jobs"], "the save has ended")
    held = {s.path[-1]: s.ranks for s in asyncckpt.held_snapshots(tmp_path)}
    assert held == {"0": (1,)}, "rank 0 has used its memory for the step that is lost"
    with pytest.raises((CheckpointNotCommittedError, CheckpointNotFoundError)):  # its directory may not have come to be
        asyncckpt.load(tmp_path / "step-1")
    with pytest.raises(SnapshotUnavailableError, match=r"it lacks ranks \[0\]") as caught:
        asyncckpt.load(tmp_path / "step-0", source="memory")
    assert caught.value.missing_ranks == [0]
    for shard in (tmp_path / "step-0").glob("rank-00001-part*"):
        shard.unlink()  # what rank 1 holds in memory is not read from disk
    with rank_processes.running(2, resumes, str(tmp_path), environ={"ASYNCCKPT_ENDPOINT": here.endpoint}) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["loaded"] * 2
        for r in (0, 1):
            ranks.send(r, "go")
        for newest, right, log, _ in ranks.results():
            assert newest == str(tmp_path / "step-0") and right
            assert "loaded from the worker's memory (ranks 1; the others from disk)" in log


def test_torn_staging_leaves_the_snapshot_before_it_to_load(here: Here, tmp_path: pathlib.Path) -> None:
    run = new_save_id()
    here.storage.flows.clear()
    snapshots = [Snapshot(seed=rank, shard=(rank, 2)) for rank in (0, 1)]
    clients = [Client(here.endpoint, rank=rank, world_size=2) for rank in (0, 1)]
    for client, snapshot in zip(clients, snapshots, strict=True):
        client.hello()
        slot = client.allocate(snapshot.slot_nbytes())
        client.stage(slot, snapshot, run, str(tmp_path / "a"), step=1)
        client.submit(slot, run)
    later = SaveId(run.epoch, 1, run.run_id)
    for client, snapshot in zip(clients, snapshots, strict=True):
        slot = client.allocate(snapshot.slot_nbytes())
        client.begin(slot, later, str(tmp_path / "b"), step=2, nbytes=snapshot.nbytes)
        snapshot.fill(slot.memory, later, fraction=1.0 if client.rank == 0 else 0.5)
        if client.rank == 0:
            client.seal(slot, snapshot, later, str(tmp_path / "b"), step=2)
            client.submit(slot, later)
            wait_until((tmp_path / "b").exists, "its directory is made")
        client.goodbye()
        client.close()
    wait_until(lambda: not status_of(here.endpoint)["sessions"], "both have left")
    assert [(s.path, s.ranks) for s in asyncckpt.held_snapshots(tmp_path)] == [(str(tmp_path / "a"), (0, 1))]
    found = asyncckpt.load(tmp_path / "a")
    for name, tensor in found.items():
        if name != "step":
            whole = b"".join(snapshot.tensors[name] for snapshot in snapshots)
            assert bytes(tensor.numpy().tobytes()) == whole
    assert found["step"] == 1
    with pytest.raises(CheckpointNotCommittedError):
        asyncckpt.load(tmp_path / "b")


def goes_on(rank: int, root: str, endpoints: list[str]) -> tuple[str, bool]:
    """What it goes on from, and whether it gets the values."""
    with AsyncCheckpointer(endpoint=endpoints[rank]) as checkpointer:
        newest = str(checkpointer.latest_checkpoint(root, timeout_s=20.0))
        found = checkpointer.load(newest)
        wanted = torch.full((300, 40), float(newest[-1]))
        return newest[-1], torch.equal(found["w"], wanted)


@pytest.mark.parametrize(
    ("elsewhere", "newest"), [(False, "2"), (True, "1")], ids=["all beside the worker", "one on another node"]
)
def test_after_a_change_of_the_number_of_ranks_they_go_on_from_what_each_of_them_can_load(
    here: Here, tmp_path: pathlib.Path, elsewhere: bool, newest: str
) -> None:
    other = f"{here.endpoint}.other" if elsewhere else here.endpoint
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(AsyncCheckpointer())
        if elsewhere:
            stack.callback(Here(other).close)
        for step in (1, 2):
            here.storage.broken = step == 2  # so that it is in memory only
            with contextlib.suppress(SaveFailedError):
                alone.save({"w": torch.full((300, 40), float(step))}, tmp_path / str(step)).written.result(DEADLINE_S)
        assert alone.latest_checkpoint(tmp_path) == str(tmp_path / "2")
        assert rank_processes.run(2, goes_on, str(tmp_path), [here.endpoint, other]) == [(newest, True)] * 2


def saves_once(rank: int, root: str, step: int) -> None:
    checkpointer = AsyncCheckpointer(rank_info=RankInfo(0, 1))
    state = {"replica": state_of(0, step)["replica"], "step": step}
    checkpointer.save(state, f"{root}/step-{step}").written.result(DEADLINE_S)
    rank_processes.talk().say(os.getpid())
    rank_processes.talk().hear()


def slots_in(pid: int) -> dict[int, int]:
    """Return the memory of a worker's slots: inode -> how many bytes of it are there."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:asyncckpt-slot"):
                there = os.stat(f"/proc/{pid}/fd/{fd}")
                found[there.st_ino] = there.st_blocks * 512
    return found


def test_memory_of_a_killed_trainer_is_lent_to_the_restarted_one_as_it_is(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    pids, memory = [], []
    for step in (0, 1):
        environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
        arguments = (saves_once, str(tmp_path), step)
        with rank_processes.running(1, *arguments, group=False, environ=environ) as ranks:
            pids.append(ranks.receive(0))
            memory.append(slots_in(worker.pid))
            ranks.kill()
        wait_until(lambda: not worker.status()["sessions"], "the worker knows that it is gone")
        memory.append(slots_in(worker.pid))
    assert pids[0] != pids[1]
    assert len(memory[0]) == 1 and memory == memory[:1] * 4, "the same memory, all of it there, with no trainer too"
    for step in (0, 1):
        found = asyncckpt.load(tmp_path / f"step-{step}", source="disk")
        assert torch.equal(found["replica"], state_of(0, step)["replica"])
