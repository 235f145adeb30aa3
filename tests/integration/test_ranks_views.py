"""Several ranks: lazy views in shards that lie on several ranks, and targets that share memory on some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import views

import asyncckpt
from asyncckpt import RankInfo, ShardedSlice, SyncCheckpointer
from asyncckpt.errors import AsyncCkptError

Z = torch.randn(6, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(5))
LAZY = {name: view for name, view in views.LAZY.items() if "slice" not in name and "every" not in name}


def _save(rank: int, path: str, wrap: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))

    def sharded(whole: torch.Tensor) -> Any:
        rows = slice(3 * rank, 3 * rank + 3)
        if wrap == "slice":
            return ShardedSlice(whole[rows], tuple(whole.shape), (3 * rank, 0))
        return DTensor.from_local(whole[rows], mesh, [Shard(0)], run_check=False)

    with SyncCheckpointer(fsync=False) as checkpointer:
        for n in range(2):
            whole = Z + n
            state = {"z": sharded(whole), **{name: sharded(view(whole)) for name, view in LAZY.items()}}
            checkpointer.save(state, f"{path}/{n}")


@pytest.mark.parametrize("wrap", ["slice", "dtensor"])
def test_lazy_views_in_shards_of_several_ranks_have_their_own_values(tmp_path: Path, wrap: str) -> None:
    rank_processes.run(2, _save, str(tmp_path), wrap)
    for n in range(2):
        found = asyncckpt.load(tmp_path / str(n))
        whole = Z + n
        assert torch.equal(found["z"], whole)
        for name, view in LAZY.items():
            assert torch.equal(found[name], views.value_of(view(whole))), name


def _load(rank: int, path: str, tied: str, redundant_reads: str) -> tuple[str, str]:
    memory = torch.zeros(30, 20)
    target: dict[str, Any] = {"a": memory, "b": torch.zeros(30, 20), "t": torch.zeros(20, 30)}
    if rank == 1:
        target[tied] = memory.t() if tied == "t" else memory
    try:
        asyncckpt.load(path, target, redundant_reads=redundant_reads)
    except AsyncCkptError as error:
        return type(error).__name__, str(error)
    saved = asyncckpt.load(path)
    assert all(torch.equal(target[name], saved[name]) for name in target)
    return "loaded", ""


@pytest.mark.parametrize("redundant_reads", ["each", "broadcast"])
@pytest.mark.parametrize("tied", ["b", "t"])
@pytest.mark.parametrize("agrees", [True, False])
def test_memory_that_one_rank_s_target_shares_is_looked_at_there(
    tmp_path: Path, tied: str, agrees: bool, redundant_reads: str
) -> None:
    a = torch.randn(30, 20)
    state = {"a": a, "b": a.clone(), "t": a.t().contiguous()}
    state[tied] = state[tied] + (0 if agrees else 1)
    with SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, tmp_path / "c")
    found = rank_processes.run(2, _load, str(tmp_path / "c"), tied, redundant_reads)
    if agrees:
        assert found == [("loaded", "")] * 2
        return
    assert found[1][0] == "AliasMismatchError" and f"'a' and '{tied}'" in found[1][1]
    # What is compared before anything is read ends a load that the ranks share on all of them.
    others = "SharedLoadError" if redundant_reads == "broadcast" and tied == "b" else "loaded"
    assert found[0][0] == others
