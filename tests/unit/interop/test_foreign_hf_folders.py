"""Folders as the hub has them: variants, copies, adapters, several models; what is read, what is to be chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.errors import CheckpointExistsError, CorruptCheckpointError, UnsupportedFormatError

D = "diffusion_pytorch_model"


def write(path: Path, **tensors: torch.Tensor) -> None:
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().untyped_storage().tolist())
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def index(path: Path, **where: str) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def fill(folder: Path, names: dict[str, dict[str, float]]) -> None:
    """Write files: the values of their tensors by name; of fp16 variants as such; an index names them by `files`."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, held in names.items():
        if name.endswith(".json"):
            index(folder / name, **held)  # type: ignore[arg-type]
        elif name.endswith(".safetensors"):
            dtype = torch.float16 if "fp16" in name else torch.float32
            write(folder / name, **{k: torch.full((2,), v, dtype=dtype) for k, v in held.items()})
        else:
            torch.save(held, folder / name)


def shards(stem: str, suffix: str, a: float, index_name: str = "") -> dict[str, Any]:
    names = [f"{stem}-{n:05d}-of-00002{suffix}.safetensors" for n in (1, 2)]
    found: dict[str, Any] = {names[0]: {"a": a}, names[1]: {"b": a}}
    return {**found, **({index_name: {"a": names[0], "b": names[1]}} if index_name else {})}


READ: dict[str, dict[str, Any]] = {
    "two variants": {f"{D}.safetensors": {"a": 1.0, "b": 1}, f"{D}.fp16.safetensors": {"a": 2, "b": 2}},
    "several variants": {f"{D}{v}.safetensors": {"a": n, "b": n} for n, v in enumerate((".bf16", "", ".fp16"))},
    "variants of a variant": {f"m{v}.safetensors": {"a": n, "b": n} for n, v in enumerate((".x.fp16", "", ".x"))},
    "sharded variants": {
        **shards("model", "", 1, "model.safetensors.index.json"),
        **shards("model.fp16", "", 2, "model.safetensors.index.fp16.json"),
    },
    "sharded variants of diffusers": {
        **shards(D, "", 1, f"{D}.safetensors.index.json"),
        **shards(D, ".fp16", 2, f"{D}.safetensors.index.fp16.json"),
    },
    "a sharded model and a variant in one file": {
        **shards("model", "", 1, "model.safetensors.index.json"),
        "model.fp16.safetensors": {"a": 2, "b": 2},
    },
    "a model in one file and a sharded variant": {
        "model.safetensors": {"a": 1, "b": 1},
        **shards("model.fp16", "", 2, "model.safetensors.index.fp16.json"),
    },
    "another model in one file and a sharded variant": {
        f"{D}.safetensors": {"a": 1, "b": 1},
        **shards(f"{D}.fp16", "", 2, f"{D}.safetensors.index.fp16.json"),
    },
    "variants without indexes": {**shards("model", "", 1), **shards("model.fp16", "", 2)},
    "a pickle beside it": {"model.safetensors": {"a": 1, "b": 1}, "pytorch_model.bin": {"a": 3}},
    "an adapter beside it": {"model.safetensors": {"a": 1, "b": 1}, "adapter_model.safetensors": {"a": 3, "lora": 3}},
    "an adapter beside shards": {
        **shards("model", "", 1, "model.safetensors.index.json"),
        "adapter_model.safetensors": {"lora": 3},
    },
    "only an adapter": {"adapter_model.safetensors": {"a": 1, "b": 1}},
    "only a variant": {"model.x1.safetensors": {"a": 1, "b": 1}},
    "only a sharded variant": shards("model.x1", "", 1, "model.safetensors.index.x1.json"),
    "Mistral's copy, with an index": {
        **shards("model", "", 1, "model.safetensors.index.json"),
        "consolidated.safetensors": {"layers.a": 3},
    },
    "Mistral's copy, without": {**shards("model", "", 1), "consolidated.safetensors": {"layers.a": 3}},
    "Mistral's copy alone": {"consolidated.safetensors": {"a": 1, "b": 1}},
    "a name with dots": {"qwen2.5-7b.safetensors": {"a": 1, "b": 1}},
}


@pytest.mark.parametrize("name", READ)
def test_the_variant_without_a_suffix_is_read_by_everything(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    fill(folder, READ[name])
    expected = {k: torch.ones(2) for k in "ab"}
    found = asyncckpt.load(folder)
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    with asyncckpt.open_checkpoint(folder) as opened:
        assert sorted(opened.keys()) == ["a", "b"] and torch.equal(opened.tensor("a"), expected["a"])
    for to in ("torch", "hf"):
        asyncckpt.convert(folder, tmp_path / to, to=to)
        assert all(torch.equal(v, expected[k]) for k, v in asyncckpt.load(tmp_path / to).items())
    assert main(["inspect", str(folder), "--json"]) == 0
    assert {row["fqn"] for row in json.loads(capsys.readouterr().out)["tensors"]} == {"a", "b"}
    assert main(["verify", str(folder)]) == 0
    assert main(["diff", str(folder), str(tmp_path / "hf")]) == 0


CHOOSE: dict[str, dict[str, Any]] = {
    "two variants of nothing": {"model.bf16.safetensors": {"a": 1, "b": 1}, "model.x1.safetensors": {"a": 2, "b": 2}},
    "two models": {"one.safetensors": {"a": 1, "b": 1}, "two.safetensors": {"a": 2, "b": 2}},
    "two sharded models": {
        **shards("one", "", 1, "one.safetensors.index.json"),
        **shards("two", "", 2, "two.safetensors.index.json"),
    },
    "shards of two models": {**shards("one", "", 1), **shards("two", "", 2)},
}


@pytest.mark.parametrize("name", CHOOSE)
def test_of_several_models_the_files_to_choose_from_are_listed_and_each_loads(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    fill(folder, CHOOSE[name])
    for read in (
        lambda: asyncckpt.load(folder),
        lambda: asyncckpt.open_checkpoint(folder),
        lambda: asyncckpt.convert(folder, tmp_path / "t", to="torch"),
    ):
        with pytest.raises(UnsupportedFormatError, match="give the path of one of these files") as caught:
            read()
    listed = str(caught.value.found).split(", ")
    assert len(listed) > 1 and all(one in str(caught.value) for one in listed)
    for command in (["inspect", str(folder)], ["verify", str(folder)], ["diff", str(folder), str(folder)]):
        assert main(command) == 1
        assert "give the path of one" in "".join(capsys.readouterr())
    for one in listed:
        assert asyncckpt.load(folder / one)


def test_the_index_of_a_variant_loads_as_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "f"
    fill(folder, READ["sharded variants"])
    path = folder / "model.safetensors.index.fp16.json"
    expected = {k: torch.full((2,), 2.0, dtype=torch.float16) for k in "ab"}
    assert all(torch.equal(v, expected[k]) for k, v in asyncckpt.load(path).items())
    target = {"a": torch.zeros(2)}
    assert torch.equal(asyncckpt.load(path, target)["a"], torch.full((2,), 2.0))
    report = asyncckpt.convert(path, tmp_path / "hf", to="hf")
    assert report.copied == ("config.json",) and (tmp_path / "hf" / "config.json").exists()
    assert all(torch.equal(v, expected[k]) for k, v in asyncckpt.load(tmp_path / "hf").items())
    for command in (["inspect"], ["verify"], ["diff", str(path)]):
        assert main([*command, str(path)]) == 0
    assert "a" in capsys.readouterr().out
    with pytest.raises(CheckpointExistsError):
        asyncckpt.convert(tmp_path / "hf", path, to="torch", overwrite=True)


def test_a_folder_whose_name_is_that_of_an_index_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model.safetensors.index.json"
    fill(folder, READ["sharded variants"])
    assert torch.equal(asyncckpt.load(folder)["a"], torch.full((2,), 1.0))


def test_a_shard_that_an_index_names_and_is_not_there_is_still_damage(tmp_path: Path) -> None:
    fill(tmp_path / "f", READ["sharded variants"])
    (tmp_path / "f" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="00002"):
        asyncckpt.load(tmp_path / "f")


@pytest.mark.parametrize("suffix", ["", ".fp16"])
def test_numbered_files_without_an_index_must_all_be_there(tmp_path: Path, suffix: str) -> None:
    fill(tmp_path / "f", shards("model", suffix, 1))
    assert sorted(asyncckpt.load(tmp_path / "f")) == ["a", "b"]
    (tmp_path / "f" / f"model-00002-of-00002{suffix}.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"of the 2 files of 'model.*' there are 1, and no index"):
        asyncckpt.load(tmp_path / "f")
    assert sorted(asyncckpt.load(tmp_path / "f" / f"model-00001-of-00002{suffix}.safetensors")) == ["a"]


def test_files_of_several_names_without_a_tensor_in_common_are_one_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path / "f", {"one.safetensors": {"a": 1}, "two.safetensors": {"b": 2}})
    assert sorted(asyncckpt.load(tmp_path / "f")) == ["a", "b"]
