"""Loading into modules, optimizers and tensors that are sharded, in a process group; and what a lacking file means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist
from storage_samples import RecordingFiles, shard_paths

import asyncckpt
from asyncckpt.config import RankInfo
from asyncckpt.errors import CorruptCheckpointError, ShapeMismatchError
from asyncckpt.loading.load import DefaultReader
from tests.arrangements import LOADED, SAVED, job, state_of, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:DeprecationWarning")


def sharded_job(world_size: int, rank: int, seed: int) -> Any:
    return job(LOADED[f"fsdp{world_size}"], rank, seed)


def _save_objects(rank: int, path: str) -> None:
    made = job(SAVED["fsdp2"], rank, seed=1)
    train(made, 2)
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"model": made.model, "optim": made.optimizer}, path)


def _resume_objects(rank: int, path: str) -> dict[str, Any]:
    made = sharded_job(dist.get_world_size(), rank, seed=5 + rank)
    asyncckpt.load(path, {"model": made.model, "optim": made.optimizer}, strict=True)
    for parameter in made.model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = made.optimizer.state[parameter][name]
            assert type(moment) is type(parameter.data) and moment.placements == parameter.placements
            assert moment.to_local().shape == parameter.to_local().shape
    addresses = [made.optimizer.state[p]["exp_avg"].to_local().data_ptr() for p in made.model.parameters()]
    asyncckpt.load(path, {"model": made.model, "optim": made.optimizer}, strict=True)  # it has a state now
    assert addresses == [made.optimizer.state[p]["exp_avg"].to_local().data_ptr() for p in made.model.parameters()]
    train(made, 1)
    return dict(whole(state_of(made, 3)))


def _uninterrupted(rank: int) -> dict[str, Any]:
    made = sharded_job(3, rank, seed=1)
    train(made, 2)
    train(made, 1)
    return dict(whole(state_of(made, 3)))


def test_a_fresh_optimizer_of_sharded_parameters_gets_a_sharded_state_and_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_objects, path)
    resumed = rank_processes.run(3, _resume_objects, path)
    expected = rank_processes.run(3, _uninterrupted)[0]
    for found in resumed:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # sums of 2 and of 3 ranks
            else:
                assert found[name] == value


def _write_plain(path: Path, state: dict[str, Any]) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def _into_types(rank: int, path: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    value = torch.arange(35.0).view(7, 5)
    mesh = init_device_mesh("cpu", (2,))
    zeros = [distribute_tensor(torch.zeros(7, 5), mesh, [kind]) for kind in (Shard(0), Shard(1), Replicate())]
    local = torch.zeros(4 - rank, 5)
    metadata = sharded_tensor.ShardMetadata(
        shard_offsets=[4 * rank, 0], shard_sizes=[4 - rank, 5], placement=f"rank:{rank}/cpu"
    )
    legacy = sharded_tensor.init_from_local_shards([sharded_tensor.Shard(local, metadata)], 7, 5)
    versions = [z._version for z in zeros]
    for redundant_reads in ("each", "broadcast"):
        for target in (*zeros, legacy):
            asyncckpt.load(path, {"w": target}, strict=True, redundant_reads=redundant_reads)
        assert all(torch.equal(z.full_tensor(), value) for z in zeros)
        assert torch.equal(local, value[4 * rank : 7 if rank else 4])
        for z in zeros:
            z.to_local().zero_()
        local.zero_()
    assert all(z._version >= version for z, version in zip(zeros, versions, strict=True))
    with pytest.raises(ShapeMismatchError, match=r"global shape \[7, 5\].*\[8, 5\]"):
        asyncckpt.load(path, {"w": distribute_tensor(torch.zeros(8, 5), mesh, [Shard(0)])})


def test_dtensors_and_legacy_sharded_tensors_are_filled_in_place(tmp_path: Path) -> None:
    path = _write_plain(tmp_path / "c", {"w": torch.arange(35.0).view(7, 5)})
    rank_processes.run(2, _into_types, path)


def _save_rows(rank: int, path: str) -> None:
    rows = asyncckpt.ShardedSlice(torch.full((10, 300), float(rank)), (40, 300), (10 * rank, 0))
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"w": rows, "common": torch.ones(3)}, path)


def test_only_files_with_overlapping_shards_are_read_and_a_missing_one_is_named_before_anything_changes(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(4, _save_rows, path)
    mine, files = torch.full((12, 300), -1.0), RecordingFiles()
    target = {"w": asyncckpt.ShardedSlice(mine, (40, 300), (9, 0))}
    DefaultReader(files, RankInfo(0, 1)).read(path, target)
    assert mine[:, 0].tolist() == [0.0] + [1.0] * 10 + [2.0]
    read = {os.path.basename(str(at)) for name, at in files.calls if name == "preadv" and ".safetensors" in str(at)}
    assert sorted(int(name.split("-")[1].split(".")[0]) for name in read) == [0, 1, 2]
    lost = shard_paths(path)[2]
    os.rename(lost, lost + ".away")
    mine.fill_(-1.0)
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        asyncckpt.load(path, target)
    assert caught.value.file == os.path.basename(lost) and bool((mine == -1).all())
