"""Several ranks and other formats: stock `dcp.load` reads what we converted; checkpoints of ours become one file."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import rank_processes
import sharded_samples
import states
import torch

import asyncckpt
from asyncckpt.errors import UnsupportedLeafError

pytest.importorskip("numpy")


def load_stock(rank: int, path: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    state = sharded_samples.state(world_size, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    check(state)


def check(state: dict[str, Any]) -> None:
    for name, whole in sharded_samples.WHOLE.items():
        states.assert_same(state["model"][name].full_tensor(), whole)
    assert state["step"] == 7
    states.assert_same(state["same"], torch.ones(3))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stock_dcp_load_reshards_a_converted_torch_file(world_size: int, tmp_path: pathlib.Path) -> None:
    torch.save({"model": sharded_samples.WHOLE, "same": torch.ones(3), "step": 7}, tmp_path / "a.pt")
    asyncckpt.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    rank_processes.run(world_size, load_stock, str(tmp_path / "dcp"), world_size)


def save_ours(rank: int, path: str) -> None:
    state = {
        "w": torch.arange(3_000_000.0),
        "rng": asyncckpt.PerRank(torch.tensor([rank])),
        "n": asyncckpt.PerRank(rank),
    }
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({**state, "step": 3}, path)


def test_a_checkpoint_of_ours_of_several_ranks_becomes_one_file_and_what_belongs_to_a_rank_is_named(
    tmp_path: pathlib.Path,
) -> None:
    rank_processes.run(2, save_ours, str(tmp_path / "ours"))
    opened = asyncckpt.open_checkpoint(tmp_path / "ours", rank_info=asyncckpt.RankInfo(0, 1))
    assert opened.world_size == 2
    with pytest.raises(UnsupportedLeafError, match="PerRank") as caught:
        asyncckpt.convert(tmp_path / "ours", tmp_path / "a.pt", to="torch")
    assert "rng: " in str(caught.value)
    assert "n: " in str(caught.value)
    report = asyncckpt.convert(tmp_path / "ours", tmp_path / "a.pt", to="torch", partial=True)
    assert set(report.left_out) == {"rng", "n"}
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    states.assert_same(found, {"w": torch.arange(3_000_000.0), "step": 3})


def save_unequal(rank: int, path: str) -> None:
    state = {
        "w": torch.arange(3.0),
        "mean": torch.tensor([float(rank)]),
        "lr": 0.5,
        "seed": rank,
        "seen": {"batches": rank + 10, "epoch": 2, "nan": float("nan")},
        "raw": bytes(100_000) if rank else bytes([1]) * 100_000,
    }
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save(state, path)


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch"])
def test_what_ranks_hold_unequal_is_the_lowest_one_s_and_all_of_it_is_named(to: str, tmp_path: pathlib.Path) -> None:
    rank_processes.run(3, save_unequal, str(tmp_path / "ours"))
    report = asyncckpt.convert(tmp_path / "ours", tmp_path / "b", to=to)
    said = "what was stored for each rank is taken from the lowest one: "
    assert [line for line in report.changed if "rank" in line] == [said + "mean, seed, seen.batches, raw"]
    found = asyncckpt.load(tmp_path / "b")
    assert (found["mean"].item(), found["seed"], found["seen"]["batches"], found["raw"][0]) == (0.0, 0, 10, 1)
    report = asyncckpt.convert(tmp_path / "ours", tmp_path / "c", to=to, keys=["w", "lr", "seen.epoch", "seed"])
    assert [line for line in report.changed if "rank" in line] == [said + "seed"]
    report = asyncckpt.convert(tmp_path / "ours", tmp_path / "d", to=to, keys=["w", "lr", "seen.nan"])
    assert not [line for line in report.changed if "rank" in line]
