"""What lies beside the weights of a Hugging Face model: none of it goes without a word when they are replaced."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import Workdir

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
def hub(work: Workdir) -> Path:
    """`hub` is a sharded model with what people put beside it; `a` is to replace it."""
    work.torch({"old": torch.ones(3), "older": torch.zeros(9)}, "old.pt")
    work.convert("hf", "old.pt", "hub", max_shard_bytes=1)
    (work / "old.pt").unlink()
    for name, text in BESIDE.items():
        (work / "hub" / name).write_text(text)
    work.torch({"w": torch.arange(1000.0), "v": torch.arange(500.0)})
    return work / "hub"


def everything(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def test_what_lies_beside_the_weights_is_carried_over_and_said(
    hub: Path, work: Workdir, capsys: pytest.CaptureFixture[str]
) -> None:
    (hub / "LICENSE").symlink_to("../license-of-all")
    report = work.convert("hf", target="hub", overwrite=True)
    assert report.carried_over == tuple(sorted([*BESIDE, "LICENSE"]))
    assert sorted(os.listdir(hub)) == sorted([*BESIDE, "LICENSE", "model.safetensors"])
    assert {name: (hub / name).read_text() for name in BESIDE} == BESIDE
    assert os.readlink(hub / "LICENSE") == "../license-of-all"
    assert list(work.load("hub")) == ["w", "v"] and work.names() == ["a", "hub"]
    arguments = ["convert", str(work / "a"), str(hub), "--to", "hf", "--overwrite"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert all(f"carried over: {name}\n" in said for name in BESIDE)
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carried_over"] == sorted([*BESIDE, "LICENSE"])


def test_what_the_source_brings_along_takes_the_place_of_what_is_there(hub: Path, work: Workdir) -> None:
    work.convert("hf", target="other")
    (work / "other" / "config.json").write_text("new")
    report = work.convert("hf", "other", "hub", overwrite=True)
    assert report.copied == ("config.json",)
    assert report.carried_over == tuple(sorted(set(BESIDE) - {"config.json"}))
    assert (hub / "config.json").read_text() == "new" and (hub / "train.py").read_text() == "print()"


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")], ids="+".join)
def test_a_copied_config_says_the_dtype_to_which_the_weights_were_cast(
    keys: tuple[str, ...], hub: Path, work: Workdir
) -> None:
    (hub / "config.json").write_text(json.dumps({"model_type": "x", **dict.fromkeys(keys, "float32")}))
    work.convert("hf", "hub", "cast", dtype="bfloat16")
    assert {tensor.dtype for tensor in work.load("cast").values()} == {torch.bfloat16}
    cast = json.loads((work / "cast" / "config.json").read_text())
    assert cast == {"model_type": "x", **dict.fromkeys(keys, "bfloat16")}
    work.convert("hf", "hub", "same")
    assert (work / "same" / "config.json").read_bytes() == (hub / "config.json").read_bytes()


@pytest.mark.parametrize("text", ['{"model_type": "x"}', '{"dtype": null}', "[1]", "{"])
def test_a_copied_config_that_says_no_dtype_stays_as_it_is(text: str, hub: Path, work: Workdir) -> None:
    (hub / "config.json").write_text(text)
    work.convert("hf", "hub", "cast", dtype="bfloat16")
    assert (work / "cast" / "config.json").read_text() == text


def add(hub: Path, name: str) -> None:
    """Add what may be somebody's."""
    if name == "1_Pooling":
        (hub / name).mkdir()
        (hub / name / "config.json").write_text("x")
    elif name == "pipe.txt":
        os.mkfifo(hub / name)
    elif name.startswith("model-"):
        (hub / "model.safetensors.index.json").write_text("{")  # the files that it named are anybody's now
    else:
        (hub / name).write_bytes(b"x")


@pytest.mark.parametrize(
    ("to", "name"),
    [
        *((kind, ".gitattributes") for kind in ("asyncckpt", "dcp", "torch", "safetensors")),
        *(("hf", name) for name in ("pytorch_model.bin", "adapter.safetensors", "optimizer.pt", "pipe.txt")),
        *(("hf", name) for name in ("1_Pooling", "model-00001-of-00002.safetensors")),
    ],
)
def test_what_may_be_somebody_s_is_refused_and_named(to: str, name: str, hub: Path, work: Workdir) -> None:
    if to == "hf":
        add(hub, name)
    before = everything(hub)
    with pytest.raises(CheckpointExistsError, match=name):
        work.convert(to, target="hub", overwrite=True)
    assert everything(hub) == before and work.names() == ["a", "hub"]


def test_what_of_a_source_is_not_copied_is_named(hub: Path, work: Workdir, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1_Pooling", "pytorch_model.bin", "adapter.safetensors"):
        add(hub, name)
    report = work.convert("hf", "hub", "x")
    assert report.not_copied == (".gitattributes", "1_Pooling", "adapter.safetensors", "pytorch_model.bin")
    assert report.copied == tuple(sorted(set(BESIDE) - {".gitattributes"}))
    assert cli.main(["convert", str(hub), str(work / "y"), "--to", "hf"]) == 0
    out = capsys.readouterr().out
    assert "not copied: 1_Pooling\n" in out
    assert all(f"  copied: {name}\n" in out for name in report.copied)
    assert work.convert("dcp", "hub", "z").not_copied == tuple(sorted([*report.copied, *report.not_copied]))


def test_a_source_that_goes_away_once_its_target_is_in_place_is_no_error(
    hub: Path, work: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub / "unread.safetensors").write_bytes(b"")
    real = convert.put_into_place

    def put(*arguments: Any, **kw: Any) -> Any:
        found = real(*arguments, **kw)
        shutil.rmtree(hub)
        return found

    monkeypatch.setattr(convert, "put_into_place", put)
    report = work.convert("dcp", "hub", "x")
    assert any("unread.safetensors" in one for one in report.changed)
    assert sorted(work.load("x")) == ["old", "older"] and not hub.exists()
