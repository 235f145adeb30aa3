"""`SyncCheckpointer` on several ranks: a collective, in the same format, with no worker."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import rank_processes
import torch

import asyncckpt
from asyncckpt import CommitHook, PerRank, RankInfo, SyncCheckpointer
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    ConfigError,
    PlanTimeoutError,
    RanksDisagreeError,
    ReplicaMismatchError,
    SaveFailedError,
    UnsupportedLeafError,
)


def state_of(rank: int, step: int = 1) -> dict[str, Any]:
    """Replicas large enough to be split and small ones, one tensor of its own, objects common and per rank."""
    generator = torch.Generator().manual_seed(step)
    return {
        "large": torch.randn(10_000, 600, generator=generator),
        "small": torch.randn(7, generator=generator),
        "statistics": torch.full((3,), float(rank)),
        f"only{rank}": torch.arange(5) + rank,
        "step": step,
        "rng": PerRank({"state": torch.tensor([rank]), "name": f"rank {rank}"}),
    }


def saves_twice(rank: int, root: str) -> list[str]:
    with SyncCheckpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(rank, step), f"{root}/step-{step}")
        newest = checkpointer.latest_checkpoint(root)
        loaded = checkpointer.load(f"{root}/step-2")
    expected = state_of(rank, 2)
    assert torch.equal(loaded["large"], expected["large"])
    assert torch.equal(loaded["statistics"], expected["statistics"])
    assert loaded["rng"]["name"] == f"rank {rank}"
    return [str(newest), *loaded]


def test_two_ranks_save_one_checkpoint_that_any_reader_loads(tmp_path: pathlib.Path) -> None:
    found = rank_processes.run(2, saves_twice, str(tmp_path))
    assert {newest for newest, *_ in found} == {str(tmp_path / "step-2")}
    keys = [k for k in (*state_of(0), "only1") if k != "rng"]
    loaded = asyncckpt.load(tmp_path / "step-2", keys=keys)
    assert set(loaded) == set(keys)
    assert torch.equal(loaded["large"], state_of(0, 2)["large"])
    assert torch.equal(loaded["only1"], state_of(1, 2)["only1"])
    shards = sorted(p.stat().st_size for p in (tmp_path / "step-2").glob("*.safetensors"))
    assert len(shards) == 2
    assert shards[1] - shards[0] < 1_100_000, "replicas are spread evenly"
    assert sum(shards) < 24_000_000 + 100_000, "replicas are written once"


def expect(kind: type[Exception], rank: int, root: str, what: Any, **config: Any) -> tuple[str, Any]:
    """Save `what` on this rank: it must fail with `kind`; then a plain save must work."""
    with SyncCheckpointer(**config) as checkpointer:
        with pytest.raises(kind) as caught:
            checkpointer.save(what, f"{root}/bad")
        checkpointer.save(state_of(rank), f"{root}/good")
    return str(caught.value), getattr(caught.value, "rank", None)


def one_cannot_store(rank: int, root: str) -> tuple[str, Any]:
    if rank == 1:
        return expect(UnsupportedLeafError, rank, root, {**state_of(rank), "bad": object()})
    return expect(SaveFailedError, rank, root, state_of(rank))


def test_a_rank_that_cannot_store_its_state_fails_the_save_on_all(tmp_path: pathlib.Path) -> None:
    (told, culprit), _ = rank_processes.run(2, one_cannot_store, str(tmp_path))
    assert culprit == 1
    assert "'bad'" in told
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "good")


def one_passes_nonsense(rank: int, root: str) -> tuple[str, float]:
    with SyncCheckpointer(plan_timeout_s=600.0) as checkpointer:
        began = time.monotonic()
        with pytest.raises((ConfigError, SaveFailedError)) as caught:
            checkpointer.save(state_of(rank), f"{root}/bad", **({"metadata": {"x": {1}}} if rank == 1 else {}))
        waited = time.monotonic() - began
        checkpointer.save(state_of(rank), f"{root}/good")
    return type(caught.value).__name__, waited


def test_wrong_arguments_on_one_rank_hold_up_no_other(tmp_path: pathlib.Path) -> None:
    (told, waited), (raised, _) = rank_processes.run(2, one_passes_nonsense, str(tmp_path))
    assert (told, raised) == ("SaveFailedError", "ConfigError")
    assert waited < 60


class Veto(CommitHook):
    """Vetoes on rank 1, once; remembers what it was given."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[Any]()

    def pre_commit(self, path: str, **kw: Any) -> None:
        self.calls.append(("pre", pathlib.Path(path).name, kw))
        if self.rank == 1 and path.endswith("bad"):
            raise ValueError("not this one")

    def post_commit(self, path: str, **kw: Any) -> None:
        assert (pathlib.Path(path) / "manifest.json").exists()
        self.calls.append(("post", pathlib.Path(path).name, kw))


def vetoes(rank: int, root: str) -> Any:
    hook = Veto(rank)
    with asyncckpt.make_sync_checkpointer(commit_hook=hook) as checkpointer:
        with pytest.raises(SaveFailedError) as caught:
            checkpointer.save(state_of(rank), f"{root}/bad", note="a")
        checkpointer.save(state_of(rank), f"{root}/good", note="b")
    return caught.value.rank, caught.value.code, hook.calls


def test_a_veto_of_one_rank_publishes_nothing_and_hooks_get_the_extra_arguments(tmp_path: pathlib.Path) -> None:
    expected = [("pre", "bad", {"note": "a"}), ("pre", "good", {"note": "b"}), ("post", "good", {"note": "b"})]
    for rank, code, calls in rank_processes.run(2, vetoes, str(tmp_path)):
        assert (rank, code) == (1, "vetoed")
        assert calls == expected
    with pytest.raises(CheckpointNotCommittedError):
        asyncckpt.load(tmp_path / "bad")


def disagree(rank: int, root: str) -> str:
    with SyncCheckpointer() as checkpointer:
        with pytest.raises(RanksDisagreeError) as caught:
            checkpointer.save(state_of(0), f"{root}/step-1", step=rank)
        checkpointer.save(state_of(rank), f"{root}/good")
    return str(caught.value.detail)


def test_ranks_that_save_different_steps_are_told_so(tmp_path: pathlib.Path) -> None:
    assert rank_processes.run(2, disagree, str(tmp_path)) == ["step", "step"]


def rank_zero_alone(rank: int, root: str) -> list[int] | None:
    if rank == 1:
        rank_processes.talk().hear()
        return None
    with SyncCheckpointer(plan_timeout_s=0.3) as checkpointer, pytest.raises(PlanTimeoutError) as caught:
        checkpointer.save(state_of(0), f"{root}/step-1")
    return list(caught.value.missing_ranks)


def test_a_rank_that_does_not_save_is_named(tmp_path: pathlib.Path) -> None:
    with rank_processes.running(2, rank_zero_alone, str(tmp_path)) as ranks:
        assert ranks.receive(0) == [1]
        ranks.send(1, "go")


def diverges(rank: int, root: str) -> list[Any]:
    outcome: list[Any] = []
    state = {"large": torch.arange(6e6).view(10_000, 600), "small": torch.arange(4.0)}
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{root}/equal")
        for name in ("small", "large"):
            state[name] = state[name] + rank
            with pytest.raises(ReplicaMismatchError) as caught:
                checkpointer.save(state, f"{root}/{name}")
            outcome.append((caught.value.fqn, caught.value.ranks))
            checkpointer.save(state, f"{root}/after-{name}")
            loaded = checkpointer.load(f"{root}/after-{name}")
            outcome.append(all(torch.equal(loaded[n], value) for n, value in state.items()))
    return outcome


def test_replicas_that_diverge_are_noticed_and_stored_for_each_rank_from_then_on(tmp_path: pathlib.Path) -> None:
    found = rank_processes.run(2, diverges, str(tmp_path))
    assert found == [[("small", [0, 1]), True, ("large", [0, 1]), True]] * 2


def changes_structure(rank: int, root: str) -> list[Any]:
    outcome: list[Any] = []
    with SyncCheckpointer() as checkpointer:
        state = state_of(rank)
        checkpointer.save(state, f"{root}/a")
        state["new"] = torch.arange(1.0, 4.0)
        if rank == 1:
            state["mine"] = torch.ones(2)
        checkpointer.save(state, f"{root}/b")
        outcome.append(sorted(checkpointer.load(f"{root}/b")))
        if rank == 1:
            del state["large"]
        with pytest.raises(SaveFailedError) as caught:
            checkpointer.save(state, f"{root}/c")
        outcome.append((caught.value.code, "large" in caught.value.detail))
        checkpointer.save(state, f"{root}/d")
        outcome.append(torch.equal(checkpointer.load(f"{root}/d")["large"], state_of(0)["large"]))
    return outcome


def test_structures_may_change_and_what_nobody_writes_any_more_fails_one_save(tmp_path: pathlib.Path) -> None:
    keys = sorted([*state_of(0), "only1", "new", "mine"])
    assert rank_processes.run(2, changes_structure, str(tmp_path)) == [[keys, ("coverage", True), True]] * 2
    alone = asyncckpt.load(tmp_path / "b", keys=["new", "mine"])
    assert (alone["new"].tolist(), alone["mine"].tolist()) == ([1, 2, 3], [1, 1])


def test_several_ranks_need_a_process_group(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 2)) as checkpointer, pytest.raises(ConfigError, match="process group"):
        checkpointer.save(state_of(0), tmp_path / "x")
