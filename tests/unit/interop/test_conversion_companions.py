"""What lies beside the weights of a Hugging Face model: none of it goes without a word when they are replaced."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import cli
from asyncckpt.errors import CheckpointExistsError
from asyncckpt.interop import convert

BESIDE = {
    "config.json": '{"model_type": "x"}',
    "tokenizer.json": "{}",
    "README.md": "mine",
    "train.py": "print()",
    "notes.txt": "dear",
    ".gitattributes": "*",
}


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.save({"w": torch.arange(1000.0), "v": torch.arange(500.0)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.fixture
def hub(tmp_path: pathlib.Path) -> pathlib.Path:
    """A sharded model with what people put beside it."""
    torch.save({"old": torch.ones(3), "older": torch.zeros(9)}, tmp_path / "old.pt")
    asyncckpt.convert(tmp_path / "old.pt", tmp_path / "hub", to="hf", max_shard_bytes=1)
    (tmp_path / "old.pt").unlink()
    for name, text in BESIDE.items():
        (tmp_path / "hub" / name).write_text(text)
    return tmp_path / "hub"


def everything(path: pathlib.Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def test_what_lies_beside_the_weights_is_carried_over_and_said(
    source: pathlib.Path, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (hub / "LICENSE").symlink_to("../license-of-all")
    report = asyncckpt.convert(source, hub, to="hf", overwrite=True)
    assert report.carried_over == tuple(sorted([*BESIDE, "LICENSE"]))
    assert sorted(os.listdir(hub)) == sorted([*BESIDE, "LICENSE", "model.safetensors"])
    assert {name: (hub / name).read_text() for name in BESIDE} == BESIDE
    assert os.readlink(hub / "LICENSE") == "../license-of-all"
    assert list(asyncckpt.load(hub)) == ["w", "v"] and sorted(os.listdir(tmp_path)) == ["a.pt", "hub"]


def test_what_the_source_brings_along_takes_the_place_of_what_is_there(
    source: pathlib.Path, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    asyncckpt.convert(source, tmp_path / "other", to="hf")
    (tmp_path / "other" / "config.json").write_text("new")
    report = asyncckpt.convert(tmp_path / "other", hub, to="hf", overwrite=True)
    assert report.copied == ("config.json",)
    assert report.carried_over == tuple(sorted(set(BESIDE) - {"config.json"}))
    assert (hub / "config.json").read_text() == "new" and (hub / "train.py").read_text() == "print()"


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors"])
def test_a_target_of_another_kind_that_cannot_take_it_is_refused(
    to: str, source: pathlib.Path, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before = everything(hub)
    with pytest.raises(CheckpointExistsError, match=r"\.gitattributes"):
        asyncckpt.convert(source, hub, to=to, overwrite=True)
    assert everything(hub) == before and sorted(os.listdir(tmp_path)) == ["a.pt", "hub"]


def _pickle(hub: pathlib.Path) -> str:
    (hub / "pytorch_model.bin").write_bytes(b"x")
    return "pytorch_model.bin"


def _second_model(hub: pathlib.Path) -> str:
    (hub / "adapter.safetensors").write_bytes(b"x")
    return "adapter.safetensors"


def _damaged_index(hub: pathlib.Path) -> str:
    (hub / "model.safetensors.index.json").write_text("{")
    return "model-00001-of-00002.safetensors"


def _directory(hub: pathlib.Path) -> str:
    (hub / "1_Pooling").mkdir()
    (hub / "1_Pooling" / "config.json").write_text("x")
    return "1_Pooling"


def _optimizer(hub: pathlib.Path) -> str:
    (hub / "optimizer.pt").write_bytes(b"x")
    return "optimizer.pt"


def _pipe(hub: pathlib.Path) -> str:
    os.mkfifo(hub / "pipe.txt")
    return "pipe.txt"


@pytest.mark.parametrize("add", [_pickle, _second_model, _damaged_index, _directory, _optimizer, _pipe])
def test_what_may_be_somebody_s_is_refused_and_named(
    add: Callable[[pathlib.Path], str], source: pathlib.Path, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    name = add(hub)
    before = everything(hub)
    with pytest.raises(CheckpointExistsError, match=name):
        asyncckpt.convert(source, hub, to="hf", overwrite=True)
    assert everything(hub) == before and sorted(os.listdir(tmp_path)) == ["a.pt", "hub"]


def test_the_command_names_what_it_carried_over(
    source: pathlib.Path, hub: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(source), str(hub), "--to", "hf", "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert all(f"carried over: {name}\n" in said for name in BESIDE)
    assert cli.main(["convert", str(source), str(hub), "--to", "hf", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carried_over"] == sorted(BESIDE)


def test_what_of_a_source_is_not_copied_is_named(
    hub: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _directory(hub), _pickle(hub), _second_model(hub)
    report: Any = asyncckpt.convert(hub, tmp_path / "x", to="hf")
    assert report.not_copied == (".gitattributes", "1_Pooling", "adapter.safetensors", "pytorch_model.bin")
    assert report.copied == tuple(sorted(set(BESIDE) - {".gitattributes"}))
    assert cli.main(["convert", str(hub), str(tmp_path / "y"), "--to", "hf"]) == 0
    out = capsys.readouterr().out
    assert "not copied: 1_Pooling\n" in out
    assert all(f"  copied: {name}\n" in out for name in report.copied)
    assert asyncckpt.convert(hub, tmp_path / "z", to="dcp").not_copied == tuple(
        sorted([*report.copied, *report.not_copied])
    )


def test_a_source_that_goes_away_once_its_target_is_in_place_is_no_error(
    hub: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "unread.safetensors").write_bytes(b"")
    real = convert.put_into_place

    def put(*arguments: Any, **kw: Any) -> Any:
        found = real(*arguments, **kw)
        shutil.rmtree(hub)
        return found

    monkeypatch.setattr(convert, "put_into_place", put)
    report = asyncckpt.convert(hub, tmp_path / "x", to="dcp")
    assert any("unread.safetensors" in one for one in report.changed)
    assert sorted(asyncckpt.load(tmp_path / "x")) == ["old", "older"] and not hub.exists()
