"""Ranks whose workers are several, as on several nodes: one checkpoint, one commit, and one end for all of them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import types
from typing import Any

import msgpack
import pytest
import rank_processes
import real_worker
import torch
from rank_processes import talk
from real_worker import DEADLINE_S, RealWorker, limit_commits, manifest_of, wait_until
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worker_pair import Places, both_running, empty_places

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, SaveHandle
from asyncckpt.client.worker_links import WorkerLinks
from asyncckpt.errors import SaveFailedError


def checkpointer_of(rank: int, places: tuple[str, ...], **settings: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(endpoint=places[rank % 2], **settings)


def state_of(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    large = torch.randn(3000, 400, generator=generator)
    return {"large": large, "own": PerRank(torch.full((5,), float(rank + step))), "step": step}


def ended(handle: SaveHandle, seconds: float = DEADLINE_S) -> Any:
    """Wait for the end of a save; returns its error, or None."""
    return handle.written.exception(seconds)


def listeners(pid: int) -> list[str]:
    """Return the local addresses at which a process listens on TCP, as /proc/net has them."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return found


# ---- one checkpoint


def saves(rank: int, places: tuple[str, ...], root: str, first: int = 1) -> list[str]:
    with checkpointer_of(rank, places) as checkpointer:
        handles = []
        for step in range(first, 4):
            handles.append(checkpointer.save(state_of(rank, step), f"{root}/step-{step}"))
            assert ended(handles[-1]) is None
    return [str(handle.save_id) for handle in handles]


def test_ranks_of_two_workers_make_one_checkpoint_and_all_of_them_hear_of_it(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    found = rank_processes.run(3, saves, places, str(tmp_path))
    assert found[0] == found[1] == found[2]
    for step in (1, 2, 3):
        loaded = asyncckpt.load(tmp_path / f"step-{step}", keys=["large", "step"])
        assert torch.equal(loaded["large"], state_of(0, step)["large"]) and loaded["step"] == step
        ranks = manifest_of(tmp_path / f"step-{step}")["ranks"]
        assert [row["nbytes"] > 0 for row in ranks] == [True] * 3
    first, second = (worker.status() for worker in workers)
    assert first["counters"]["followers_linked"] == 1 and second["counters"]["runs_followed"] == 1
    assert first["saves"][-1]["ranks"] == {"0": "committed", "1": "committed", "2": "committed"}
    assert second["saves"][-1]["ranks"] == {"1": "committed"}


def saves_a_ring(rank: int, places: tuple[str, ...], path: str) -> int:
    with checkpointer_of(rank, places, arena_limit_bytes=1_500_000 if rank == 1 else None) as checkpointer:
        state = {"own": PerRank(torch.arange(700_000.0) + rank), "step": 1}
        report = checkpointer.save(state, path).written.result(DEADLINE_S)
        assert torch.equal(checkpointer.load(path)["own"], state["own"].value)
    return int(report.details.get("ring_nbytes", 0))


def test_a_ring_that_a_follower_writes_is_part_of_the_checkpoint(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    rings = rank_processes.run(2, saves_a_ring, places, str(tmp_path / "c"))
    assert rings[0] == 0 and 0 < rings[1] < 1_500_000
    first, second = (worker.status()["counters"] for worker in workers)
    assert second["saves_ringed"] == 1
    assert first.get("protocol_errors", 0) == second.get("protocol_errors", 0) == 0


def test_one_worker_listens_nowhere_and_of_two_the_first_on_the_loopback_only(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    first, second = workers
    rank_processes.run(2, saves, (first.endpoint, first.endpoint), str(tmp_path / "one"))
    assert listeners(first.pid) == []
    rank_processes.run(2, saves, places, str(tmp_path / "two"))
    (address,) = listeners(first.pid)
    assert address.startswith("0100007F:") and listeners(second.pid) == []


def changes_and_hooks(rank: int, places: tuple[str, ...], root: str) -> list[str]:
    spoke: list[str] = []
    hook = types.SimpleNamespace(pre_commit=lambda path, **_: spoke.append(path))
    with checkpointer_of(rank, places, commit_hook=hook) as checkpointer:
        for step in range(12):
            state = {**state_of(rank, step), **({"more": torch.ones(10) * step} if step > 3 else {})}
            assert ended(checkpointer.save(state, f"{root}/step-{step}")) is None
    return spoke


def test_hooks_and_changes_of_the_state_reach_the_ranks_of_both_workers(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    for spoke in rank_processes.run(2, changes_and_hooks, places, str(tmp_path)):
        assert len(spoke) == 12
    for step, names in ((4, {"more@rank0", "more@rank1"}), (11, {"more"})):
        with asyncckpt.open_checkpoint(tmp_path / f"step-{step}") as checkpoint:
            assert {name for name in checkpoint.stored_tensors if name.startswith("more")} == names
    assert torch.equal(asyncckpt.load(tmp_path / "step-11", keys=["more"])["more"], torch.ones(10) * 11)


def mirrors(rank: int, places: tuple[str, ...], root: str) -> tuple[str, int]:
    with checkpointer_of(rank, places) as checkpointer:
        fails, succeeds = (
            checkpointer.save(state_of(rank, step), f"{root}/runs/{step}", mirror=f"{root}/mirror/{step}")
            for step in (1, 2)
        )
        assert ended(fails) is None and fails.mirrored is not None and succeeds.mirrored is not None
        error = fails.mirrored.exception(DEADLINE_S)
        return f"{type(error).__name__}: {error}", succeeds.mirrored.result(DEADLINE_S).nbytes


def test_the_end_of_a_copy_to_a_mirror_reaches_the_ranks_of_both_workers(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    with asyncckpt.SyncCheckpointer() as other:
        other.save({"x": 1}, tmp_path / "mirror" / "1")
    (first, nbytes), (second, _) = rank_processes.run(2, mirrors, places, str(tmp_path))
    assert first == second and first.startswith("MirrorError") and "already holds a committed checkpoint" in first
    assert nbytes > 4_000_000 and asyncckpt.load(tmp_path / "mirror" / "2", keys=["step"]) == {"step": 2}


# ---- losses


def stages_and_says_so(rank: int, places: tuple[str, ...], root: str) -> None:
    with checkpointer_of(rank, places) as checkpointer:
        assert ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1")) is None
        limit_commits(checkpointer, 60.0)
        talk().say("ready")
        talk().hear()
        handle = checkpointer.save(state_of(rank, 2), f"{root}/step-2")
        handle.staged.result(DEADLINE_S)
        talk().say("staged")
        ended(handle)


def stages_and_stays(rank: int, places: tuple[str, ...], root: str, stages: bool) -> Any:
    checkpointer = checkpointer_of(rank, places)
    assert ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1")) is None
    talk().say("ready")
    talk().hear()
    if rank == 0 or stages:
        handle = checkpointer.save(state_of(rank, 2), f"{root}/step-2")
        handle.staged.result(DEADLINE_S)
    talk().say("staged")
    if rank:
        time.sleep(60)
    error = ended(handle)
    return None if error is None else (type(error).__name__, error.facts())


@pytest.mark.parametrize("stages", [True, False])
def test_a_rank_of_a_follower_that_is_killed_costs_only_what_it_has_not_staged(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker], stages: bool
) -> None:
    with rank_processes.running(2, stages_and_stays, places, str(tmp_path), stages) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["ready"] * 2
        with workers[1].frozen():
            for r in (0, 1):
                ranks.send(r, "save")
            assert [ranks.receive(r) for r in (0, 1)] == ["staged"] * 2
            ranks.kill(1)
            ranks.processes[1].join(60)
        found = ranks.receive(0)
    if stages:
        assert found is None
        assert torch.equal(asyncckpt.load(tmp_path / "step-2", keys=["large"])["large"], state_of(0, 2)["large"])
    else:
        assert found[0] == "SaveFailedError" and (found[1]["code"], found[1]["rank"]) == ("not_sealed", 1)


DEATH_S = 5.0
"""A trainer that dies ends its saves on all ranks within this time."""


def saves_until_another_dies(rank: int, places: tuple[str, ...], root: str, dies: int) -> Any:
    checkpointer = checkpointer_of(rank, places)
    assert ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1")) is None
    talk().say("ready")
    talk().hear()
    if rank == dies:
        talk().hear()  # for ever
    handle = checkpointer.save(state_of(rank, 2), f"{root}/step-2")
    handle.durable.result(DEADLINE_S)
    talk().say("durable")
    error = ended(handle)
    assert error is not None
    return type(error).__name__, error.facts()


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_trainer_that_dies_ends_its_save_on_the_other_rank_at_once_and_is_named(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker], n_workers: int, dies: int
) -> None:
    used = places if n_workers == 2 else (places[0], places[0])
    with rank_processes.running(2, saves_until_another_dies, used, str(tmp_path), dies) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["ready"] * 2
        ranks.send(1 - dies, "save")
        assert ranks.receive(1 - dies) == "durable"
        killed_at = time.monotonic()
        ranks.kill(dies)
        name, facts = ranks.receive(1 - dies)
        took_s = time.monotonic() - killed_at
    assert (name, facts["code"], facts["rank"]) == ("SaveFailedError", "not_sealed", dies)
    assert "died" in facts["detail"] and took_s < DEATH_S, f"{took_s:.1f} s"
    assert not (tmp_path / "step-2" / "manifest.json").exists()


def one_rank_misses(rank: int, places: tuple[str, ...], root: str, missing: int) -> Any:
    with checkpointer_of(rank, places) as checkpointer:
        assert ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1")) is None
        limit_commits(checkpointer, 2.0)
        if rank == missing:
            talk().hear()
            return None
        error = ended(checkpointer.save(state_of(rank, 2), f"{root}/step-2"))
        talk().say((type(error).__name__, error.facts()["missing_ranks"]))
        talk().hear()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_save_is_named_on_every_other_rank(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker], missing: int
) -> None:
    with rank_processes.running(3, one_rank_misses, places, str(tmp_path), missing) as ranks:
        for rank in {0, 1, 2} - {missing}:
            assert ranks.receive(rank) == ("CommitTimeoutError", [missing])
        for rank in range(3):
            ranks.send(rank, "end")
        ranks.results()


def withdraws(rank: int, places: tuple[str, ...], root: str) -> Any:
    with checkpointer_of(rank, places) as checkpointer:
        assert ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1")) is None
        state = {**state_of(rank, 2), **({"bad": object()} if rank == 1 else {})}
        try:
            error = ended(checkpointer.save(state, f"{root}/step-2"))
        except asyncckpt.errors.UnsupportedLeafError:
            error = None
        assert ended(checkpointer.save(state_of(rank, 3), f"{root}/step-3")) is None
        return error and (type(error).__name__, error.facts()["code"], error.facts()["rank"])


def test_a_rank_that_withdraws_ends_the_save_beside_the_other_worker(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    found = rank_processes.run(2, withdraws, places, str(tmp_path))
    assert found == [("SaveFailedError", "withdrawn", 1), None]


# ---- the first save


def first_save(rank: int, places: tuple[str, ...], root: str, lie: bool) -> tuple[str, str, Any]:
    if lie:  # what rank 0 says of its address leads nowhere
        from asyncckpt.client import worker_links as links

        links.FOLLOW_TIMEOUT_S = 1.5
        tell = WorkerLinks._lead

        def elsewhere(self: WorkerLinks, run_id: str) -> bytes:
            _, *keys = msgpack.unpackb(tell(self, run_id))
            return bytes(msgpack.packb(["tcp://127.0.0.1:9", *keys]))

        WorkerLinks._lead = elsewhere  # type: ignore[method-assign]
    with checkpointer_of(rank, places) as checkpointer:
        try:
            error: Any = ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1"))
        except asyncckpt.AsyncCkptError as caught:
            error = caught
        return type(error).__name__, str(error), None if error is None else error.facts().get("rank")


def test_a_port_that_is_taken_is_said_at_the_first_save(tmp_path: pathlib.Path, places: Places) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with both_running(places, "--port", str(port)):
            zero, one = rank_processes.run(2, first_save, places, str(tmp_path), False)
    assert zero[0] == "EndpointError" and str(port) in zero[1]
    assert one[0] == "SaveFailedError" and one[2] == 0 and str(port) in one[1]


def test_a_leader_that_cannot_be_reached_is_said_at_the_first_save(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    zero, one = rank_processes.run(2, first_save, places, str(tmp_path), True)
    assert one[0] == "WorkerUnavailableError" and "--advertise" in one[1] and "127.0.0.1:9" in one[1]
    assert zero[0] == "SaveFailedError" and zero[2] == 1


def test_a_directory_that_is_not_shared_is_said_at_the_first_save(tmp_path: pathlib.Path, places: Places) -> None:
    root = tmp_path / "local"
    root.mkdir()
    script = f"mount -t tmpfs none {root} && exec {sys.executable} -m asyncckpt_worker --endpoint {places[1]}"
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("needs root and unshare(1) for a mount of its own")
    node = subprocess.Popen(["unshare", "--mount", "sh", "-c", script])
    try:
        with real_worker.running(places[0]):
            real_worker.status_of(places[1])
            zero, one = rank_processes.run(2, first_save, places, str(root), False)
        assert zero[0] == one[0] == "SaveFailedError"
        assert zero[2] == one[2] == 1 and "not shared" in zero[1] and str(root) in zero[1]
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait(DEADLINE_S)


def test_a_leader_that_was_frozen_over_a_restart_publishes_nothing_over_the_new_run(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    with empty_places() as new_places, both_running(new_places):
        with rank_processes.running(2, stages_and_says_so, places, str(tmp_path), together=True) as ranks:
            assert [ranks.receive(r) for r in (0, 1)] == ["ready"] * 2
            with workers[0].frozen():
                for r in (0, 1):
                    ranks.send(r, "save")
                assert [ranks.receive(r) for r in (0, 1)] == ["staged"] * 2
                wait_until(lambda: list((tmp_path / "step-2").glob("rank-00001*.index")), "rank 1 is durable")
                ranks.kill()
                ids = rank_processes.run(2, saves, new_places, str(tmp_path), 2)[0]
            rows = wait_until(
                lambda: [s for s in workers[0].status()["saves"] if s["path"].endswith("step-2") and "error" in s],
                "the old leader gives up",
            )
        assert rows[0]["phase"] == "failed" and "already holds" in rows[0]["error"]
        manifest = manifest_of(tmp_path / "step-2")
        assert manifest["save_id"] in ids and int(manifest["save_id"][:6]) > 1
        assert torch.equal(asyncckpt.load(tmp_path / "step-2", keys=["large"])["large"], state_of(0, 2)["large"])


def without_a_group(rank: int, places: tuple[str, ...], root: str) -> str:
    with checkpointer_of(rank, places) as checkpointer:
        error = ended(checkpointer.save(state_of(rank, 1), f"{root}/step-1"))
        assert isinstance(error, SaveFailedError) and error.facts()["code"] == "several_machines"
        return str(error)


def test_ranks_of_several_nodes_without_a_process_group_are_told_to_make_one(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    environ = {"LOCAL_WORLD_SIZE": "1"}
    arguments = places, str(tmp_path)
    for text in rank_processes.run(2, without_a_group, *arguments, group=False, environ=environ):
        assert "init_process_group" in text


def shards(rank: int, places: tuple[str, ...], path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(7 * 300, dtype=torch.float32).reshape(7, 300)
    with checkpointer_of(rank, places, overwrite=True) as checkpointer:
        for factor in (1, 2):
            state = {"w": distribute_tensor(whole * factor, mesh, [Shard(0)])}
            assert ended(checkpointer.save(state, path)) is None


def test_shards_of_two_workers_are_one_tensor_and_a_newer_save_replaces_an_older_one(
    tmp_path: pathlib.Path, places: Places, workers: list[RealWorker]
) -> None:
    path = tmp_path / "newest"
    rank_processes.run(2, shards, places, str(path))
    assert torch.equal(asyncckpt.load(path)["w"], torch.arange(7 * 300, dtype=torch.float32).reshape(7, 300) * 2)
    assert len({name.split(".")[1] for name in os.listdir(path) if name.startswith("rank-")}) == 1, "one save's files"
