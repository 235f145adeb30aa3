"""Ranks that are known late, or change: a checkpointer takes the rank that its process has at each save and load."""

from __future__ import annotations

import os
import pathlib
import threading
from datetime import timedelta
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S, RealWorker, manifest_of

import asyncckpt
import asyncckpt.dcp
from asyncckpt import AsyncCheckpointer, CheckpointManager, PerRank, RankInfo, SyncCheckpointer
from asyncckpt.errors import ConfigError

KINDS = {"async": AsyncCheckpointer, "sync": SyncCheckpointer}


def run(worker: RealWorker, function: Any, *arguments: Any, world_size: int = 2) -> Any:
    """Run ranks that know of no process group, and nothing from torchrun."""
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    return rank_processes.run(world_size, _without_torchrun, function, *arguments, environ=environ, group=False)


def _without_torchrun(rank: int, function: Any, *arguments: Any) -> Any:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    return function(rank, *arguments)


def join(rank: int, world_size: int, where: str) -> None:
    """Make the default process group of so many ranks; `where`: a file that is used once."""
    store = dist.FileStore(where, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=DEADLINE_S)
    )
    dist.barrier()  # a rank that ends while another one is still connecting ends that, too


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"common": torch.full((300, 300), float(step)), "rng": PerRank({"rank": rank, "step": step})}


def save(checkpointer: Any, rank: int, step: int, root: str) -> None:
    handle = checkpointer.save(state_of(rank, step), f"{root}/{step}", step=step)
    if handle is not None:
        handle.written.result(DEADLINE_S)


def made_before(rank: int, kind: str, root: str) -> Any:
    with KINDS[kind](plan_timeout_s=DEADLINE_S) as checkpointer:
        before = checkpointer.rank_info
        join(rank, 2, f"{root}/group")
        save(checkpointer, rank, 1, root)
        save(checkpointer, rank, 2, root)
        mine = checkpointer.load(f"{root}/2")["rng"]
        newest = checkpointer.latest_checkpoint(root)
        return before, checkpointer.rank_info, mine, newest


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointer_made_before_the_process_group_saves_with_the_ranks_of_the_group(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    found = run(shared_worker, made_before, kind, str(tmp_path))
    for rank, (before, after, mine, newest) in enumerate(found):
        assert before == (0, 1)
        assert after == (rank, 2)
        assert mine == {"rank": rank, "step": 2}
        assert newest == str(tmp_path / "2")


def loads_first(rank: int, kind: str, root: str) -> Any:
    with KINDS[kind]() as checkpointer:
        join(rank, 2, f"{root}/group")
        with KINDS[kind]() as other:
            save(other, rank, 1, root)
        target: dict[str, Any] = {"rng": PerRank({"rank": -1, "step": -1})}
        checkpointer.load(f"{root}/1", target, strict=False)
        restored: dict[str, Any] = {"rng": PerRank({"rank": -1, "step": -1})}
        checkpointer.restore_latest(root, restored)
        return checkpointer.load(f"{root}/1")["rng"]["rank"], _value(target["rng"]), _value(restored["rng"])


def _value(found: Any) -> Any:
    return found.value if isinstance(found, PerRank) else found


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointer_made_before_the_process_group_loads_what_belongs_to_its_rank(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    for rank, (read, filled, restored) in enumerate(run(shared_worker, loads_first, kind, str(tmp_path))):
        assert read == rank
        assert filled == {"rank": rank, "step": 1}
        assert restored == {"rank": rank, "step": 1}


def prepares_first(rank: int, root: str) -> Any:
    with AsyncCheckpointer(plan_timeout_s=DEADLINE_S) as checkpointer:
        checkpointer.prepare(state_of(rank, 1))
        join(rank, 2, f"{root}/group")
        checkpointer.prepare(state_of(rank, 1))
        save(checkpointer, rank, 1, root)
        return checkpointer.load(f"{root}/1")["rng"]


def test_what_was_prepared_as_another_rank_is_prepared_anew(tmp_path: pathlib.Path, shared_worker: RealWorker) -> None:
    assert [one["rank"] for one in run(shared_worker, prepares_first, str(tmp_path))] == [0, 1]


def changes_places(rank: int, kind: str, root: str) -> Any:
    """Ranks 0 and 1 of two; then in the other order; then three of them, as after an elastic restart."""
    found = []
    with KINDS[kind](plan_timeout_s=DEADLINE_S) as checkpointer:
        for step, (place, world_size) in enumerate([(rank, 2), (1 - rank, 2), (1 - rank, 2)]):
            if rank < world_size:
                join(place, world_size, f"{root}/group-{step}")
                save(checkpointer, place, 2 * step, root)
                save(checkpointer, place, 2 * step + 1, root)
                found.append((checkpointer.rank_info, checkpointer.load(f"{root}/{2 * step + 1}")["rng"]))
                dist.barrier()
                dist.destroy_process_group()
        return found, checkpointer.rank_changes


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointer_kept_over_process_groups_saves_with_the_ranks_of_each(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    for rank, (found, n_changes) in enumerate(run(shared_worker, changes_places, kind, str(tmp_path))):
        places = [rank, 1 - rank, 1 - rank]
        assert [info for info, _ in found] == [(place, 2) for place in places]
        assert [mine["rank"] for _, mine in found] == places
        assert n_changes == 3
    runs = {manifest_of(tmp_path / str(n))["save_id"][-12:] for n in (0, 2, 4)}
    assert len(runs) == 3, "the ranks of each process group are a run of their own"


def is_joined_by_another(rank: int, kind: str, root: str) -> Any:
    """Rank 0 of a world of one; then of two, with a process that is new: it has saved nothing."""
    with KINDS[kind](plan_timeout_s=DEADLINE_S) as checkpointer:
        if rank == 0:
            join(0, 1, f"{root}/group-alone")
            for step in (1, 2):
                save(checkpointer, 0, step, root)
            dist.destroy_process_group()
        join(rank, 2, f"{root}/group-both")
        save(checkpointer, rank, 3, root)
        both = checkpointer.load(f"{root}/3")["rng"]
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            join(0, 1, f"{root}/group-again")
            save(checkpointer, 0, 4, root)
            dist.destroy_process_group()
        return both


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_may_grow_and_shrink_under_a_checkpointer(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    assert [one["rank"] for one in run(shared_worker, is_joined_by_another, kind, str(tmp_path))] == [0, 1]
    worlds = [manifest_of(tmp_path / str(n))["world_size"] for n in (1, 2, 3, 4)]
    assert worlds == [1, 1, 2, 1]


def saves_after_the_group(rank: int, root: str) -> Any:
    join(rank, 2, f"{root}/group")
    with AsyncCheckpointer(plan_timeout_s=DEADLINE_S) as checkpointer:
        save(checkpointer, rank, 1, root)
        dist.barrier()
        dist.destroy_process_group()
        save(checkpointer, rank, 2, root)
        return checkpointer.rank_info, checkpointer.load(f"{root}/2")["rng"]


def test_a_process_group_that_was_destroyed_leaves_the_ranks_that_it_gave(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    for rank, (info, mine) in enumerate(run(shared_worker, saves_after_the_group, str(tmp_path))):
        assert info == (rank, 2)
        assert mine == {"rank": rank, "step": 2}


def closes_after_the_group(rank: int, kind: str, root: str) -> bool:
    join(rank, 2, f"{root}/group")
    checkpointer = KINDS[kind]()
    checkpointer.save(state_of(rank, 1), f"{root}/1", step=1)
    dist.barrier()
    dist.destroy_process_group()
    checkpointer.close()
    return not (kind == "async" and checkpointer.pending())


@pytest.mark.parametrize("kind", KINDS)
def test_close_works_after_the_process_group_was_destroyed(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    assert run(shared_worker, closes_after_the_group, kind, str(tmp_path)) == [True, True]
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "1")


def keeps_what_was_given(rank: int, kind: str, root: str) -> Any:
    with KINDS[kind](rank_info=RankInfo(0, 1)) as checkpointer:
        for number in (1, 2):
            join(rank, 2, f"{root}/group-{number}")
            save(checkpointer, 0, number, f"{root}/{rank}")
            dist.destroy_process_group()
        return checkpointer.rank_info, checkpointer.rank_changes


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_was_given_stays_whatever_process_group_there_is(
    tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str
) -> None:
    assert run(shared_worker, keeps_what_was_given, kind, str(tmp_path)) == [((0, 1), 0)] * 2


def subgroups(rank: int, kind: str, root: str) -> Any:
    join(rank, 2, f"{root}/group")
    with KINDS[kind](plan_timeout_s=DEADLINE_S) as checkpointer:
        save(checkpointer, rank, 1, root)
        group = dist.new_group([0])
        save(checkpointer, rank, 2, root)
        if rank == 0:
            dist.destroy_process_group(group)
        save(checkpointer, rank, 3, root)
        return checkpointer.rank_changes


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_some_ranks_change_nothing(tmp_path: pathlib.Path, shared_worker: RealWorker, kind: str) -> None:
    assert run(shared_worker, subgroups, kind, str(tmp_path)) == [0, 0]


def is_attached(rank: int, root: str) -> Any:
    model = torch.nn.Linear(400, 400)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with AsyncCheckpointer(staging="overlap", plan_timeout_s=DEADLINE_S) as checkpointer:
        checkpointer.attach(optimizer)
        join(rank, 2, f"{root}/group")
        handle = checkpointer.save({"w": model.weight}, f"{root}/1", step=1)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()  # waits for the copy
        was_staged = handle.staged.done()
        handle.written.result(DEADLINE_S)
        return was_staged, float(checkpointer.load(f"{root}/1")["w"].max())


def test_optimizers_stay_attached_when_the_ranks_change(tmp_path: pathlib.Path, shared_worker: RealWorker) -> None:
    assert run(shared_worker, is_attached, str(tmp_path)) == [(True, 1.0)] * 2


def test_torchrun_s_environment_that_is_set_late_counts_and_makes_no_change_twice(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointer() as checkpointer:
        assert checkpointer.rank_info == (0, 1)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert checkpointer.rank_info == (1, 3)
        assert checkpointer.rank_info == (1, 3)
        assert checkpointer.rank_changes == 1
        with pytest.raises(ConfigError, match="process group"):
            checkpointer.save({"w": 1}, tmp_path / "1")
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
        checkpointer.save({"w": 1}, tmp_path / "1")
    assert asyncckpt.load(tmp_path / "1") == {"w": 1}


def leaves_the_other(rank: int, root: str) -> Any:
    """Rank 0 goes on alone while a save of both is pending; then rank 1 stages its part of that."""
    join(rank, 2, f"{root}/group")
    with AsyncCheckpointer(plan_timeout_s=DEADLINE_S) as checkpointer:
        save(checkpointer, rank, 1, root)
        if rank == 1:
            rank_processes.talk().hear()
        handle = checkpointer.save(state_of(rank, 2), f"{root}/2", step=2)
        handle.staged.result(DEADLINE_S)
        if rank == 0:
            dist.destroy_process_group()
            join(0, 1, f"{root}/group-alone")
            save(checkpointer, 0, 3, f"{root}/alone")
            rank_processes.talk().say((handle.written.done(), checkpointer.pending() == [handle]))
        return handle.written.result(DEADLINE_S).save_id


def test_a_save_that_is_pending_when_the_ranks_change_ends_as_what_it_was(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    arguments = (leaves_the_other, str(tmp_path))
    with rank_processes.running(2, _without_torchrun, *arguments, environ=environ, group=False) as ranks:
        assert ranks.receive(0) == (False, True)
        ranks.send(1, "go on")
        first, second = ranks.results()
    assert first == second
    assert manifest_of(tmp_path / "2")["world_size"] == 2
    assert manifest_of(tmp_path / "alone" / "3")["world_size"] == 1


def manages(rank: int, root: str) -> list[str]:
    manager = CheckpointManager(f"{root}/{rank}", save_interval_steps=1)
    join(rank, 2, f"{root}/group")
    said = []
    for call in (
        lambda: manager.save(1, {"w": torch.ones(3)}),
        lambda: manager.restore({"w": torch.ones(3)}),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    manager.close()
    return said


def test_a_manager_made_before_the_process_group_refuses_by_name_on_every_rank(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    for rank, said in enumerate(run(shared_worker, manages, str(tmp_path))):
        for text in said:
            assert "process group" in text
            assert "rank 0 of 1" in text
            assert f"rank {rank} of 2" in text
            assert "after init_process_group()" in text


def manages_after(rank: int, root: str) -> Any:
    checkpointer = AsyncCheckpointer(plan_timeout_s=DEADLINE_S)
    join(rank, 2, f"{root}/group")
    with checkpointer, CheckpointManager(f"{root}/runs", checkpointer=checkpointer) as manager:
        handle = manager.save(1, state_of(rank, 1))
        assert handle is not None
        handle.written.result(DEADLINE_S)
        target: dict[str, Any] = {"rng": PerRank({"rank": -1, "step": -1})}
        manager.restore(target)
        return _value(target["rng"])["rank"]


def test_a_manager_takes_a_checkpointer_made_before_the_process_group(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    assert run(shared_worker, manages_after, str(tmp_path)) == [0, 1]


def writes_by_stock_calls(rank: int, root: str) -> Any:
    import torch.distributed.checkpoint as dcp

    writer = asyncckpt.dcp.StorageWriter(f"{root}/0")
    for number, place in enumerate((rank, 1 - rank)):
        join(place, 2, f"{root}/group-{number}")
        state = {"common": torch.arange(1000.0), f"own-{place}": torch.full((5,), float(place))}
        writer.reset(f"{root}/{number}")
        dcp.save(state, storage_writer=writer)
        dist.barrier()
        dist.destroy_process_group()
    writer.close()
    return [sorted(asyncckpt.load(f"{root}/{number}")) for number in (0, 1)]


def test_a_storage_writer_made_before_the_process_group_and_kept_over_it_writes_as_the_ranks_of_each(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    for found in run(shared_worker, writes_by_stock_calls, str(tmp_path)):
        assert found == [["common", "own-0", "own-1"]] * 2


def test_looking_at_the_rank_in_another_thread_refuses_no_save(tmp_path: pathlib.Path, checkpointer: Any) -> None:
    stop, failed = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            if checkpointer.rank_info != (0, 1) or checkpointer.rank_changes:
                failed.append(checkpointer.rank_info)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for step in range(200):
            handle = checkpointer.save({"w": torch.ones(3)}, tmp_path / str(step), step=step)
        handle.written.result(DEADLINE_S)
    finally:
        stop.set()
        thread.join()
    assert not failed
