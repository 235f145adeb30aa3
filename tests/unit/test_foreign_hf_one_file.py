"""A Hugging Face directory whose model is one file, without an index, as `save_pretrained` writes small ones."""

from __future__ import annotations

import pathlib
import warnings

import foreign_samples
import pytest
import states
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
pytest.importorskip("safetensors")


def weights() -> dict[str, torch.Tensor]:
    """Two dtypes, the widest first: so safetensors orders them in the file."""
    return {
        "model.norm.weight": torch.arange(11.0),
        "model.embed.weight": torch.arange(6000, dtype=torch.bfloat16).reshape(60, 100),
    }


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "hub"
    path.mkdir()
    foreign_samples.save_safetensors(weights(), path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "none"}')
    return path


def test_it_is_loaded_whole(hub: pathlib.Path) -> None:
    assert asyncckpt.open_checkpoint(hub).kind == "hf"
    states.assert_same(asyncckpt.load(hub), weights())


def test_slices_are_read_of_it(hub: pathlib.Path) -> None:
    found = asyncckpt.open_checkpoint(hub).tensor("model.embed.weight", (slice(5, 50), slice(0, 99, 3)))
    states.assert_same(found, weights()["model.embed.weight"][5:50, 0:99:3].contiguous())


def test_its_tensors_are_mapped(hub: pathlib.Path) -> None:
    mapped = asyncckpt.open_checkpoint(hub).tensor("model.embed.weight", mmap=True)
    states.assert_same(mapped, weights()["model.embed.weight"])
    mapped.zero_()
    states.assert_same(asyncckpt.load(hub), weights())


def test_sharded_targets_are_filled_from_it(hub: pathlib.Path) -> None:
    target = asyncckpt.ShardedSlice(torch.zeros(20, 50, dtype=torch.bfloat16), (60, 100), (30, 50))
    asyncckpt.load(hub, {"model.embed.weight": target})
    states.assert_same(target.tensor, weights()["model.embed.weight"][30:50, 50:].contiguous())


def test_verify_says_that_it_has_no_checksums(hub: pathlib.Path) -> None:
    verdict = verify_any(str(hub), Files())
    assert (verdict.state, "no checksums" in verdict.unchecked) == ("ok", True)
    file = hub / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert verify_any(str(hub), Files()).state == "corrupt"


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
def test_it_becomes_every_kind(to: str, hub: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = asyncckpt.convert(hub, tmp_path / "out", to=to)
    assert report.copied == (("config.json",) if to == "hf" else ())
    assert asyncckpt.open_checkpoint(tmp_path / "out").kind == to
    states.assert_same(asyncckpt.load(tmp_path / "out"), weights())


def test_stock_dcp_loads_it_by_our_reader(hub: pathlib.Path) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            target,
            checkpoint_id=str(hub),
            storage_reader=asyncckpt.dcp.BroadcastingTorchSaveReader(),
            planner=asyncckpt.dcp.DynamicMetaLoadPlanner(),
            no_dist=True,
        )
    states.assert_same(target, weights())
