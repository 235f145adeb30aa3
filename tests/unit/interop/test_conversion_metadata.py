"""What formats keep beside their tensors: what becomes of it in a conversion."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_file(path: pathlib.Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata)


def write_directory(path: pathlib.Path, *headers: dict[str, str] | None) -> None:
    path.mkdir()
    for n, header in enumerate(headers):
        write_file(path / NAMES[n], {f"w{n}": torch.full((3,), float(n))}, header)


def headers_of(path: pathlib.Path) -> list[dict[str, str]]:
    from safetensors import safe_open

    found = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, framework="pt") as opened:
            found.append(opened.metadata())
    return found


def test_what_the_files_of_a_directory_have_in_common_is_the_checkpoints(tmp_path: pathlib.Path) -> None:
    write_directory(tmp_path / "a", {"format": "pt", "run": "7", "files": "x"}, {"format": "pt", "run": "7"})
    metadata = asyncckpt.open_checkpoint(tmp_path / "a").metadata
    assert metadata == {"format": "pt", "run": "7", "__metadata__.files": "x", "files": list(NAMES)}


def test_where_the_files_of_a_directory_differ_each_has_its_own(tmp_path: pathlib.Path) -> None:
    write_directory(tmp_path / "a", {"format": "pt", "part": "1"}, {"part": "2"})
    expected = {"format": "pt", "part": dict(zip(NAMES, "12", strict=True))}
    assert asyncckpt.open_checkpoint(tmp_path / "a").metadata == {**expected, "files": list(NAMES)}
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    (header,) = headers_of(tmp_path / "b")
    assert (header["format"], json.loads(header["asyncckpt_metadata"])) == ("pt", expected)


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_the_metadata_of_a_directory_are_kept(to: str, tmp_path: pathlib.Path) -> None:
    write_directory(tmp_path / "a", {"format": "pt", "run": "7"}, {"format": "pt", "run": "7"})
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to).changed == ()
    assert headers_of(tmp_path / "b") == [{"format": "pt", "run": "7"}]


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_the_metadata_of_a_directory_are_reported_where_they_are_lost(to: str, tmp_path: pathlib.Path) -> None:
    write_directory(tmp_path / "a", {"format": "pt", "run": "7"}, {"format": "pt", "run": "7"})
    (said,) = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to).changed
    assert said == "the checkpoint's metadata are not kept: format, run"


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("header", [None, {}, {"a": "b"}, {"format": "mlx"}], ids=["none", "empty", "other", "mlx"])
def test_the_format_is_always_torchs(header: dict[str, str] | None, to: str, tmp_path: pathlib.Path) -> None:
    write_file(tmp_path / "a", {"w": torch.ones(2)}, header)
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    assert headers_of(tmp_path / "b") == [{**(header or {}), "format": "pt"}]
    assert [said for said in report.changed if "format" in said] == (
        ["the metadata's format became 'pt'; it was 'mlx'"] if header and "format" in header else []
    )


@pytest.mark.parametrize("to", ["safetensors", "hf"])
@pytest.mark.parametrize("metadata", [None, {"run": 7}])
def test_the_format_of_what_was_ours_is_torchs(metadata: Any, to: str, tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"w": torch.ones(2)}, tmp_path / "a", metadata=metadata)
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    (header,) = headers_of(tmp_path / "b")
    assert header["format"] == "pt"


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
def test_one_shard_of_dcps_becomes_a_whole_and_it_is_said(to: str, tmp_path: pathlib.Path) -> None:
    whole = {"w": torch.arange(8.0).reshape(2, 4)}
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [6, 0]}}), "DCP_VERSION": "1.0"}
    write_file(tmp_path / "a", whole, info)
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    states.assert_same(asyncckpt.load(tmp_path / "b"), whole)
    assert to == "asyncckpt" or "DCP_SHARDING_INFO" in " ".join(report.changed)
    if to in ("safetensors", "hf"):
        assert headers_of(tmp_path / "b") == [{"format": "pt"}]


def test_weights_that_are_not_the_models_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("model", "adapter", "consolidated"):
        write_file(tmp_path / "a" / f"{name}.safetensors", {name: torch.ones(2)}, {"format": "pt"})
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    assert report.changed == (
        "files that are not of the model were not read: adapter.safetensors, consolidated.safetensors",
    )
