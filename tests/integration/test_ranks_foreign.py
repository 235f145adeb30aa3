"""DCP directories of several ranks: of stock `dcp.save`, read by us; converted by us, read by stock `dcp.load`."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import pytest
import rank_processes
import states
import torch

import asyncckpt
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.foreign.verification import verify_any
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")

WHOLE = {"by_rows": torch.arange(60.0).reshape(10, 6), "by_columns": torch.arange(35, dtype=torch.int32).reshape(5, 7)}


def sharded(world_size: int, fill: float | None = None) -> dict[str, Any]:
    """Return the state with DTensors over all ranks; the last ranks of an uneven split have less."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    found: dict[str, Any] = {}
    for n, (name, whole) in enumerate(WHOLE.items()):
        found[name] = distribute_tensor(
            whole.clone() if fill is None else torch.full_like(whole, fill), mesh, [Shard(n)]
        )
    return {"model": found, "same": torch.ones(3) if fill is None else torch.zeros(3), "step": 7 if fill is None else 0}


def save_stock(rank: int, path: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(sharded(world_size), checkpoint_id=path)


def load_stock(rank: int, path: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    state = sharded(world_size, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    check(state)


def check(state: dict[str, Any]) -> None:
    for name, whole in WHOLE.items():
        states.assert_same(state["model"][name].full_tensor(), whole)
    assert state["step"] == 7
    states.assert_same(state["same"], torch.ones(3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_stock_dcp_directory_of_several_ranks_is_put_together_and_sliced(
    world_size: int, tmp_path: pathlib.Path
) -> None:
    rank_processes.run(world_size, save_stock, str(tmp_path / "dcp"), world_size)
    found = asyncckpt.load(tmp_path / "dcp")
    states.assert_same(found["model"], WHOLE)
    states.assert_same(found["same"], torch.ones(3))
    opened = asyncckpt.open_checkpoint(tmp_path / "dcp")
    assert opened.tensors["model.by_rows"].nbytes == 240
    states.assert_same(
        opened.tensor("model.by_rows", (slice(2, 8), slice(1, 6, 2))), WHOLE["by_rows"][2:8, 1:6:2].contiguous()
    )
    states.assert_same(opened.tensor("model.by_columns", (3, ...), mmap=True), WHOLE["by_columns"][3].contiguous())
    target = {"model": {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}}
    asyncckpt.load(tmp_path / "dcp", target)
    states.assert_same(target["model"], WHOLE)
    check_part(tmp_path / "dcp", "model.")


def check_part(path: pathlib.Path, prefix: str) -> None:
    """A shard that no rank held, and the verdict."""
    part = asyncckpt.ShardedSlice(torch.zeros(7, 3), (10, 6), (2, 2))
    asyncckpt.load(path, {f"{prefix}by_rows": part}, strict=True)
    states.assert_same(part.tensor, WHOLE["by_rows"][2:9, 2:5].contiguous())
    assert verify_any(str(path), Files()).state == "ok"


def save_hugging_face(rank: int, path: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(sharded(world_size)["model"], storage_writer=writer)


def test_what_dcps_hugging_face_writer_wrote_on_two_ranks_is_put_together(tmp_path: pathlib.Path) -> None:
    for module in ("safetensors", "fsspec"):
        pytest.importorskip(module)
    path = tmp_path / "hf"
    rank_processes.run(2, save_hugging_face, str(path), 2)
    states.assert_same(asyncckpt.load(path), WHOLE)
    opened = asyncckpt.open_checkpoint(path)
    assert opened.kind == "hf"
    states.assert_same(opened.tensor("by_rows", (slice(3, 8), 2)), WHOLE["by_rows"][3:8, 2].contiguous())
    states.assert_same(opened.tensor("by_columns", mmap=True).contiguous(), WHOLE["by_columns"])
    check_part(path, "")
    for to in ("asyncckpt", "dcp", "torch", "safetensors", "hf"):
        asyncckpt.convert(path, tmp_path / f"to-{to}", to=to)
        states.assert_same(asyncckpt.load(tmp_path / f"to-{to}"), WHOLE)


@pytest.mark.parametrize("to", ["torch", "safetensors", "asyncckpt", "dcp"])
def test_shards_of_several_ranks_become_one_of_any_kind_without_a_group(to: str, tmp_path: pathlib.Path) -> None:
    rank_processes.run(2, save_stock, str(tmp_path / "dcp"), 2)
    asyncckpt.convert(tmp_path / "dcp", tmp_path / "out", to=to, keys=["model"])
    states.assert_same(asyncckpt.load(tmp_path / "out", keys=None).get("model", None) or named(tmp_path / "out"), WHOLE)


def named(path: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in asyncckpt.load(path).items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stock_dcp_load_reshards_a_converted_torch_file(world_size: int, tmp_path: pathlib.Path) -> None:
    torch.save({"model": WHOLE, "same": torch.ones(3), "step": 7}, tmp_path / "a.pt")
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
