"""`AsyncCheckpointer` on several ranks: one checkpoint, one commit, and ranks that need not be in step."""

from __future__ import annotations

import pathlib
import signal
import time
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist
from distributed_calls import DistributedCalls
from real_worker import DEADLINE_S, limit_commits, manifest_of, status_of, wait_until
from torch import nn

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, RankInfo, SaveHandle
from asyncckpt.errors import (
    CommitTimeoutError,
    PlanTimeoutError,
    RanksDisagreeError,
    ReplicaMismatchError,
    SaveFailedError,
    SaveSkippedError,
    UnsupportedLeafError,
)
from asyncckpt.format.names import SaveId


def replicated(step: int = 1) -> dict[str, Any]:
    """What every rank has alike: a tensor to be split, a small one, an object."""
    generator = torch.Generator().manual_seed(step)
    large = torch.randn(5000, 600, generator=generator)
    return {"large": large, "small": torch.randn(7, generator=generator), "step": step}


def ended(handle: SaveHandle, seconds: float = DEADLINE_S) -> Any:
    """Wait for the end of a save; returns its error, or None."""
    return handle.written.exception(seconds)


def run(worker: real_worker.RealWorker, function: Any, *arguments: Any, world_size: int = 2, **options: Any) -> Any:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    return rank_processes.run(world_size, function, *arguments, environ=environ, **options)


# ---- one checkpoint


def saves_ddp(rank: int, root: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(300, 2000), nn.Linear(2000, 300)))
    optimizer = torch.optim.AdamW(model.parameters())
    with AsyncCheckpointer() as checkpointer:
        for step in (1, 2, 3):
            model(torch.randn(4, 300) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.module.state_dict(), "optim": optimizer.state_dict(), "step": step}
            state["rng"] = PerRank(torch.get_rng_state())
            handle = checkpointer.save(state, f"{root}/step-{step}")
            assert ended(handle) is None
    return {"model": state["model"], "moment": state["optim"]["state"][0]["exp_avg"], "id": str(handle.save_id)}


def test_ddp_replicas_are_written_once_evenly_and_load_in_one_process(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    zero, one = run(shared_worker, saves_ddp, str(tmp_path))
    assert zero["id"] == one["id"]
    loaded = asyncckpt.load(tmp_path / "step-3", keys=["model", "optim", "step"])
    assert loaded["step"] == 3
    for name, tensor in zero["model"].items():
        assert torch.equal(loaded["model"][name], tensor)
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], zero["moment"])
    nbytes = [rank["nbytes"] for rank in manifest_of(tmp_path / "step-3")["ranks"]]
    total = 3 * sum(t.numel() * 4 for t in zero["model"].values())
    assert total <= sum(nbytes) < total + 200_000
    assert abs(nbytes[0] - nbytes[1]) < 1_200_000


def counts_calls(rank: int, root: str) -> tuple[dict[str, int], set[str]]:
    """Count what reaches torch.distributed, in any of our threads too, during three later saves."""
    calls = DistributedCalls()
    with AsyncCheckpointer() as checkpointer:
        assert ended(checkpointer.save(replicated(0), f"{root}/step-0")) is None
        with calls.counted():
            for step in (1, 2, 3):
                state = replicated(step)
                if step == 3:
                    state["new"] = torch.ones(5) * rank
                assert ended(checkpointer.save(state, f"{root}/step-{step}")) is None
    dist.destroy_process_group()
    return dict(calls.found), calls.threads


def test_after_the_first_save_nothing_calls_torch_distributed(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for found, threads in run(shared_worker, counts_calls, str(tmp_path)):
        assert found == {} and {"MainThread", "asyncckpt-client"} <= threads


def out_of_step(rank: int, root: str) -> list[int]:
    handles = []
    with AsyncCheckpointer(slots=4) as checkpointer:
        assert ended(checkpointer.save(replicated(0), f"{root}/step-0")) is None
        if rank == 1:
            rank_processes.talk().hear()
        handles = [checkpointer.save(replicated(step), f"{root}/step-{step}") for step in (1, 2, 3)]
        if rank == 0:
            assert all(h.staged.done() and not h.written.done() for h in handles)
            rank_processes.talk().say("ahead by three saves")
        assert [ended(h) for h in handles] == [None, None, None]
    return [h.step for h in handles]


def test_a_rank_may_be_several_saves_ahead(tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    with rank_processes.running(2, out_of_step, str(tmp_path), environ=environ) as ranks:
        assert ranks.receive(0) == "ahead by three saves"
        assert not (tmp_path / "step-1" / "manifest.json").exists()
        ranks.send(1, "go")
        assert ranks.results() == [[1, 2, 3], [1, 2, 3]]
    assert asyncckpt.load(tmp_path / "step-3")["step"] == 3


def without_group(rank: int, root: str) -> str:
    with AsyncCheckpointer() as checkpointer:
        assert not dist.is_initialized()
        handle = checkpointer.save({**replicated(), "own": PerRank(torch.tensor([rank]))}, f"{root}/step-1")
        assert ended(handle) is None
        assert not dist.is_initialized(), "the default group is never initialised for the user"
        assert checkpointer.load(f"{root}/step-1")["own"].tolist() == [rank]
        return str(checkpointer.latest_checkpoint(root))


def test_ranks_without_a_process_group_agree_through_their_worker(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    found = run(shared_worker, without_group, str(tmp_path), group=False, world_size=3)
    assert found == [str(tmp_path / "step-1")] * 3
    nbytes = [rank["nbytes"] for rank in manifest_of(tmp_path / "step-1")["ranks"]]
    assert sum(nbytes) < 12_000_000 + 100_000


# ---- different values under one name


class Stage(nn.Module):
    """A stage of a pipeline: parameters numbered alike on both, of different shapes on one of them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.second = nn.Linear(30, 20 + rank)


def unlike(rank: int, root: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model(torch.randn(16, 8) * (rank + 1)).sum().backward()
    stage = Stage(rank)
    optimizer = torch.optim.AdamW(stage.parameters())
    stage.second(stage.first(torch.randn(4, 20))).sum().backward()
    optimizer.step()
    half = torch.randn(600, 700)  # a column of a weight that both ranks call by the same name
    state = {
        "ddp": model.module.state_dict(),
        "optim": optimizer.state_dict(),
        "half": half,
        "uneven": torch.randn(5 + rank),
        "equal": torch.arange(1000.0),
        "seed": rank,
    }
    with AsyncCheckpointer() as checkpointer:
        for step in (1, 2):
            assert ended(checkpointer.save(state, f"{root}/step-{step}", step=step)) is None
        loaded = checkpointer.load(f"{root}/step-2")
    assert str(loaded) == str(state), "every rank gets its own back"
    return state


def test_different_values_under_one_name_are_kept_for_each_rank(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    states = run(shared_worker, unlike, str(tmp_path))
    opened = asyncckpt.open_checkpoint(tmp_path / "step-2")
    for rank, state in enumerate(states):
        assert torch.equal(opened.tensor(f"half@rank{rank}"), state["half"])
        assert torch.equal(opened.tensor(f"uneven@rank{rank}"), state["uneven"])
        mean = opened.tensor(f"ddp.1.running_mean@rank{rank}")
        assert torch.equal(mean, state["ddp"]["1.running_mean"])
        moments = state["optim"]["state"]
        assert torch.equal(opened.tensor(f"optim.state.0.exp_avg@rank{rank}"), moments[0]["exp_avg"])
        assert torch.equal(opened.tensor(f"optim.state.2.exp_avg@rank{rank}"), moments[2]["exp_avg"])
        assert opened.objects_of(rank)["seed"] == rank
    assert torch.equal(opened.tensor("equal"), states[0]["equal"])
    assert torch.equal(opened.tensor("ddp.0.weight"), states[0]["ddp"]["0.weight"])
    lowest = asyncckpt.load(tmp_path / "step-2")
    assert torch.equal(lowest["half"], states[0]["half"])
    assert lowest["seed"] == 0


def diverges(rank: int, root: str) -> list[Any]:
    state = {"large": torch.arange(3e6).view(5000, 600), "small": torch.arange(4.0), "other": torch.arange(4.0)}
    outcome: list[Any] = []
    with AsyncCheckpointer() as checkpointer:
        for step in range(8):
            if step == 2:
                state["small"] += rank + 1
            if step == 5:
                state["large"] += rank + 1
            handle = checkpointer.save(state, f"{root}/step-{step}", step=step)
            error = ended(handle)
            dist.barrier()
            outcome.append(type(error).__name__ if error else None)
            if isinstance(error, ReplicaMismatchError):
                outcome[-1] = error.fqn
        loaded = checkpointer.load(f"{root}/step-7")
        return [outcome, float(loaded["large"][0, 0]), float(loaded["small"][0])]


def test_replicas_that_diverge_are_noticed_at_once_and_kept_for_each_rank_from_then_on(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    found = run(shared_worker, diverges, str(tmp_path))
    outcome = found[0][0]
    assert found == [[outcome, 1.0, 1.0], [outcome, 2.0, 2.0]]
    assert (outcome[:2], outcome[4], outcome[7]) == ([None, None], None, None)
    assert (outcome[2], outcome[5]) == ("small", "large"), "whoever writes it"
    assert outcome[3] in ("small", None), "until all ranks have heard of it"
    assert outcome[6] in ("large", None)


def statistics_at_step_zero(rank: int, root: str) -> list[Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    staged: dict[int, Any] = {}
    with AsyncCheckpointer() as checkpointer:
        for step in range(7):
            state = {name: value.clone() for name, value in model.module.state_dict().items()}
            staged[step] = state
            assert ended(checkpointer.save({"model": state}, f"{root}/step-{step}", step=step)) is None
            dist.barrier()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(16, 8) * (rank + 1)).square().mean().backward()
        for step, state in staged.items():
            loaded = checkpointer.load(f"{root}/step-{step}")["model"]
            assert all(torch.equal(loaded[name], value) for name, value in state.items()), step
    return []


def test_batch_statistics_that_are_equal_at_step_zero_only_are_each_ranks_own_in_every_save(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    run(shared_worker, statistics_at_step_zero, str(tmp_path))
    weight = asyncckpt.open_checkpoint(tmp_path / "step-6").stored_tensors
    assert "model.0.weight" in weight
    assert "model.1.running_mean@rank1" in weight


# ---- structures that change


def changes(rank: int, root: str) -> list[Any]:
    outcome = []
    state = replicated()
    with AsyncCheckpointer() as checkpointer:
        for step in range(7):
            if step == 2:  # on both, alike
                state["momentum"] = torch.full((5000, 600), 3.0)
            if step == 3 and rank == 1:  # on one
                state["extra"] = torch.full((9,), 3.0)
            handle = checkpointer.save(dict(state), f"{root}/step-{step}", step=step)
            outcome.append((ended(handle), handle.durable.result().nbytes))
            dist.barrier()
    return outcome


def test_new_tensors_are_kept_at_once_and_written_once_a_few_saves_later(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    found = run(shared_worker, changes, str(tmp_path))
    assert [error for outcome in found for error, _ in outcome] == [None] * 14
    sums = [sum(outcome[step][1] for outcome in found) for step in range(7)]
    assert sums[2] > 12_000_000 + 2 * 12_000_000, "each rank stored the new one"
    assert sums[6] < 2 * 12_000_000 + 200_000, "now it is a replica"
    for step in (2, 6):
        loaded = asyncckpt.load(tmp_path / f"step-{step}")
        assert bool((loaded["momentum"] == 3).all())
    assert asyncckpt.load(tmp_path / "step-3")["extra"].tolist() == [3.0] * 9


def loses_a_tensor(rank: int, root: str) -> list[Any]:
    outcome = []
    state = replicated()
    with AsyncCheckpointer() as checkpointer:
        for step in range(5):
            if step == 1 and rank == 1:
                del state["large"]
            error = ended(checkpointer.save(dict(state), f"{root}/step-{step}", step=step))
            dist.barrier()
            outcome.append(error if error is None else (error.code, "large" in error.detail))
    return outcome


def test_a_tensor_whose_writer_lost_it_fails_a_save_by_name_and_is_whole_again_later(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for outcome in run(shared_worker, loses_a_tensor, str(tmp_path)):
        assert outcome[0] is None
        assert outcome[1] == ("coverage", True)
        assert outcome[4] is None
    assert torch.equal(asyncckpt.load(tmp_path / "step-4")["large"], replicated()["large"])


# ---- one rank fails, all hear of it


def one_cannot_store(rank: int, root: str) -> list[Any]:
    outcome: list[Any] = []
    with AsyncCheckpointer() as checkpointer:
        for step, bad in enumerate((True, False, True, False)):
            state = replicated(step)
            if bad and rank == 1:
                with pytest.raises(UnsupportedLeafError):
                    checkpointer.save({**state, "bad": object()}, f"{root}/step-{step}")
                outcome.append("raised")
                continue
            error = ended(checkpointer.save(state, f"{root}/step-{step}"), 10)
            outcome.append(error if error is None else (type(error).__name__, error.rank, "bad" in str(error)))
    return outcome


@pytest.mark.parametrize("group", [True, False])
def test_a_rank_whose_state_cannot_be_stored_ends_that_save_on_all_at_once(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, group: bool
) -> None:
    zero, one = run(shared_worker, one_cannot_store, str(tmp_path), group=group)
    assert one == ["raised", None, "raised", None]
    assert zero == [("SaveFailedError", 1, True), None, ("SaveFailedError", 1, True), None]


def one_skips(rank: int, root: str) -> list[str]:
    outcome = []
    with AsyncCheckpointer(slots=1, on_busy="skip" if rank == 1 else "wait", on_error="raise") as checkpointer:
        assert ended(checkpointer.save(replicated(0), f"{root}/step-0")) is None
        if rank == 1:  # its only slot is in use
            pool: Any = checkpointer._process.pool  # type: ignore[attr-defined]
            holder = pool._slots[0]
            holder.user = "somebody"
        error = ended(checkpointer.save(replicated(1), f"{root}/step-1"), 10)
        outcome.append(type(error).__name__)
        if rank == 1:
            holder.user = None
        assert ended(checkpointer.save(replicated(2), f"{root}/step-2")) is None
    return outcome


def test_a_save_that_one_rank_skips_is_skipped_on_all(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    assert run(shared_worker, one_skips, str(tmp_path)) == [[SaveSkippedError.__name__]] * 2


def disagree(rank: int, root: str) -> list[Any]:
    outcome: list[Any] = []
    with AsyncCheckpointer() as checkpointer:
        for step, path in ((rank, "first"), (1, f"of-{rank}"), (rank, "same"), (1, "good")):
            error = ended(checkpointer.save(replicated(), f"{root}/{path}", step=step))
            outcome.append(type(error).__name__ if error else None)
    return outcome


def test_ranks_that_disagree_on_step_or_path_are_told_so_and_the_next_save_works(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    name = RanksDisagreeError.__name__
    assert run(shared_worker, disagree, str(tmp_path)) == [[name, name, name, None]] * 2
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "good")


def only_rank_zero(rank: int, root: str) -> Any:
    if rank == 1:
        rank_processes.talk().hear()
        return None
    with AsyncCheckpointer(plan_timeout_s=0.4) as checkpointer:
        began = time.monotonic()
        handle = checkpointer.save(replicated(), f"{root}/step-1")
        waited = time.monotonic() - began
        error = ended(handle, 0.1)
    assert isinstance(error, PlanTimeoutError)
    assert "rank_info=RankInfo(0, 1)" in str(error)
    return list(error.missing_ranks), waited < 50


def test_saving_on_rank_zero_only_gets_a_clear_error_not_a_hang(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    with rank_processes.running(2, only_rank_zero, str(tmp_path), environ=environ) as ranks:
        assert ranks.receive(0) == ([1], True)
        ranks.send(1, "go")


def late_rank(rank: int, root: str) -> Any:
    with AsyncCheckpointer() as checkpointer:
        assert ended(checkpointer.save(replicated(0), f"{root}/step-0")) is None
        limit_commits(checkpointer, 0.7)
        if rank == 1:
            rank_processes.talk().hear()
        error = ended(checkpointer.save(replicated(1), f"{root}/step-1"))
        if rank == 0:
            rank_processes.talk().say("over")
        limit_commits(checkpointer, DEADLINE_S)
        assert ended(checkpointer.save(replicated(2), f"{root}/step-2")) is None
    return type(error).__name__, list(error.missing_ranks or ())


def test_a_rank_that_does_not_stage_in_time_is_named_on_every_rank(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    with rank_processes.running(2, late_rank, str(tmp_path), environ=environ) as ranks:
        assert ranks.receive(0) == "over"
        ranks.send(1, "go")
        assert ranks.results() == [(CommitTimeoutError.__name__, [1])] * 2
    assert not (tmp_path / "step-1" / "manifest.json").exists()


# ---- commit hooks


class Hook:
    """Both methods; vetoes where it is told to."""

    def __init__(self, veto: bool) -> None:
        self.veto, self.calls = veto, list[Any]()

    def pre_commit(self, path: str, **kw: Any) -> None:
        assert not (pathlib.Path(path) / "manifest.json").exists()
        assert list(pathlib.Path(path).glob("*.index")), "this rank's files are there"
        self.calls.append(("pre", pathlib.Path(path).name, kw))
        if self.veto and path.endswith("step-1"):
            raise ValueError("not this one")

    def post_commit(self, path: str, **kw: Any) -> None:
        assert (pathlib.Path(path) / "manifest.json").exists()
        self.calls.append(("post", pathlib.Path(path).name, kw))
        raise RuntimeError("is logged")


def with_hooks(rank: int, root: str) -> Any:
    hook = Hook(veto=rank == 1)
    with asyncckpt.make_async_checkpointer(commit_hook=hook) as checkpointer:
        errors = [ended(checkpointer.save(replicated(s), f"{root}/step-{s}", note=s)) for s in (0, 1, 2)]
    return [e if e is None else (type(e).__name__, e.code, e.rank) for e in errors], hook.calls


def test_hooks_of_all_ranks_are_asked_and_one_veto_ends_the_save_on_all(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for errors, calls in run(shared_worker, with_hooks, str(tmp_path)):
        assert errors == [None, (SaveFailedError.__name__, "vetoed", 1), None]
        names = [(what, path, kw["note"]) for what, path, kw in calls]
        assert names[:2] == [("pre", "step-0", 0), ("post", "step-0", 0)]
        assert names[-2:] == [("pre", "step-2", 2), ("post", "step-2", 2)]
        assert ("post", "step-1", 1) not in names
    assert not (tmp_path / "step-1" / "manifest.json").exists()


class Slow:
    """Takes longer than it may: until the worker has given the save up."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def pre_commit(self, path: str, **kw: Any) -> None:
        wait_until(lambda: status_of(self.endpoint)["saves"][-1]["phase"] == "failed", "the hook is not waited for")


def test_a_hook_is_waited_for_hook_timeout_s(tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker) -> None:
    with AsyncCheckpointer(
        endpoint=shared_worker.endpoint, commit_hook=Slow(shared_worker.endpoint), hook_timeout_s=0.3
    ) as checkpointer:
        error = ended(checkpointer.save(replicated(), tmp_path / "step-1"))
        assert isinstance(error, SaveFailedError)
        assert (error.code, error.rank) == ("vetoed", 0)


class Saving:
    """Calls save() where it must not."""

    def __init__(self) -> None:
        self.checkpointer: Any = None
        self.raised: list[str] = []

    def pre_commit(self, path: str, **kw: Any) -> None:
        for call in (lambda: self.checkpointer.save({}, path), self.checkpointer.wait, self.checkpointer.close):
            try:
                call()
            except asyncckpt.AsyncCkptError as error:
                self.raised.append(type(error).__name__)


def test_saving_from_a_hook_raises(tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker) -> None:
    hook = Saving()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, commit_hook=hook) as checkpointer:
        hook.checkpointer = checkpointer
        assert ended(checkpointer.save(replicated(), tmp_path / "step-1")) is None
    assert hook.raised == ["ReentrantCallError"] * 3


# ---- going on after a crash


def save_and_die(rank: int, root: str) -> None:
    checkpointer = AsyncCheckpointer()
    assert ended(checkpointer.save(replicated(0), f"{root}/step-0")) is None
    rank_processes.talk().say("first")
    rank_processes.talk().hear()
    handle = checkpointer.save(replicated(1), f"{root}/step-1")
    assert handle.staged.done()
    assert not handle.written.done()
    rank_processes.talk().say("staged")
    time.sleep(DEADLINE_S)


def resume(rank: int, root: str) -> list[Any]:
    with AsyncCheckpointer() as checkpointer:
        newest = checkpointer.latest_checkpoint(root)
        step = checkpointer.load(str(newest))["step"]
        handle = checkpointer.save(replicated(2), f"{root}/step-2")
        assert ended(handle) is None
        before = SaveId.parse(asyncckpt.open_checkpoint(str(newest)).save_id)
    return [pathlib.Path(str(newest)).name, step, handle.save_id.epoch - before.epoch]


def test_all_ranks_go_on_from_the_save_that_was_in_flight_when_their_predecessors_died(
    tmp_path: pathlib.Path, worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    with rank_processes.running(2, save_and_die, str(tmp_path), environ=environ) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["first", "first"]
        with worker.frozen():
            for r in (0, 1):
                ranks.send(r, "go")
            assert [ranks.receive(r) for r in (0, 1)] == ["staged", "staged"]
            ranks.kill()
            for process in ranks.processes:
                process.join(60)
            assert not (tmp_path / "step-1" / "manifest.json").exists()
            with rank_processes.running(2, resume, str(tmp_path), environ=environ) as successors:
                time.sleep(0.3)
                worker.signal(signal.SIGCONT)
                assert successors.results() == [["step-1", 1, 1]] * 2


def test_rank_info_for_rank_zero_saves_alone_whatever_the_environment_says(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", shared_worker.endpoint)
    with asyncckpt.make_async_checkpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        handle = checkpointer.save(replicated(), tmp_path / "step-1")
        assert ended(handle) is None
    assert manifest_of(tmp_path / "step-1")["world_size"] == 1


# ---- the worker dies


def outlives_workers(rank: int, root: str, on_worker_loss: str) -> list[Any]:
    outcome: list[Any] = []
    state = replicated()
    with AsyncCheckpointer(commit_timeout_s=600, on_worker_loss=on_worker_loss) as checkpointer:
        for step in range(4):
            if step == 1:
                state["new"] = torch.ones(6)
            assert ended(checkpointer.save(dict(state), f"{root}/step-{step}", step=step)) is None
            dist.barrier()
        rank_processes.talk().say("saved")
        rank_processes.talk().hear()  # the worker is frozen, to be killed
        if rank == 0:  # only this rank has handed its part of this save to the old worker
            handle = checkpointer.save(dict(state), f"{root}/in-flight", step=4)
            assert handle.staged.done()
        rank_processes.talk().say("in flight")
        rank_processes.talk().hear()  # the worker is dead, another one serves
        if rank == 1:
            handle = checkpointer.save(dict(state), f"{root}/in-flight", step=4)
        else:
            outcome.append(type(ended(handle)).__name__)
        began = time.monotonic()
        again = checkpointer.save(dict(state), f"{root}/again", step=5)
        if rank == 1:
            outcome.append(type(ended(handle)).__name__)
        outcome += [ended(again), time.monotonic() - began < 50]
    return outcome


@pytest.mark.parametrize(
    ("on_worker_loss", "ends"),
    [("fail", ("WorkerUnavailableError", "SaveFailedError")), ("resubmit", ("NoneType", "NoneType"))],
)
def test_a_worker_that_dies_between_the_stagings_of_two_ranks_and_the_ranks_agree_with_the_next_one(
    on_worker_loss: str, ends: tuple[str, str], tmp_path: pathlib.Path, worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    with rank_processes.running(2, outlives_workers, str(tmp_path), on_worker_loss, environ=environ) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["saved", "saved"]
        with worker.frozen():
            for r in (0, 1):
                ranks.send(r, "frozen")
            assert [ranks.receive(r) for r in (0, 1)] == ["in flight", "in flight"]
            worker.kill()
        with real_worker.running(worker.endpoint):
            for r in (0, 1):
                ranks.send(r, "dead")
            assert ranks.results() == [[end, None, True] for end in ends]
    assert asyncckpt.load(tmp_path / "again", keys=["step"])["step"] == 1
