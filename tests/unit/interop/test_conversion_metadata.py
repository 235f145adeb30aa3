"""What formats keep beside their tensors, the step and the metadata: what becomes of it in a conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import foreign_samples
import pytest
import states
import torch
from conversions import KINDS, Workdir

import asyncckpt

pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FOREIGN = KINDS[1:]
KEPT = ("safetensors", "hf")


def write_directory(path: Path, *headers: dict[str, str] | None) -> None:
    path.mkdir()
    for n, header in enumerate(headers):
        safetensors_torch.save_file({f"w{n}": torch.full((3,), float(n))}, path / NAMES[n], header)


def headers_of(path: Path) -> list[dict[str, str]]:
    found = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with safetensors.safe_open(file, framework="pt") as opened:
            found.append(opened.metadata())
    return found


# ---- of checkpoints of ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FOREIGN)
def test_a_step_that_only_the_manifest_has_is_said_to_be_lost(to: str, work: Workdir) -> None:
    said = "the checkpoint's step, 300, is not kept"
    work.ours({"w": torch.ones(1)}, step=300)
    assert said in work.convert(to).changed
    work.ours({"w": torch.ones(1), "step": 300}, "c", step=300)
    report = work.convert(to, "c", "d", keys=["w"] if to in KEPT else None)
    assert (said in report.changed) is (to in KEPT)


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize(
    "metadata",
    [{"loss": 0.5, "run": {"name": "grüße"}, "epochs": [1, 2]}, {"files": ["a", "b"], "note": "x"}, {}],
    ids=["no texts", "a list called files", "none"],
)
def test_metadata_come_back_or_are_said_to_be_lost(metadata: dict[str, Any], to: str, work: Workdir) -> None:
    work.ours({"w": torch.ones(1)}, step=41, metadata=metadata)
    changed = work.convert(to).changed
    if to in ("dcp", "torch"):
        said = f"the checkpoint's metadata are not kept: {', '.join(sorted(metadata))}"
        assert (said in changed) == bool(metadata)
        return
    work.convert("asyncckpt", "b", "c")
    found = json.loads((work / "c" / "manifest.json").read_text())["metadata"]
    assert found == metadata or not metadata
    if to == "asyncckpt":
        assert asyncckpt.open_checkpoint(work / "c").step == 41
    else:
        (header,) = headers_of(work / "b")
        assert header["format"] == "pt"


# ---- of safetensors files -------------------------------------------------------------------------------------------


def test_what_the_files_of_a_directory_have_in_common_is_the_checkpoints(work: Workdir) -> None:
    write_directory(work / "a", {"format": "pt", "run": "7", "files": "x"}, {"format": "pt", "run": "7"})
    metadata = asyncckpt.open_checkpoint(work / "a").metadata
    assert metadata == {"format": "pt", "run": "7", "__metadata__.files": "x", "files": list(NAMES)}


def test_where_the_files_of_a_directory_differ_each_has_its_own(work: Workdir) -> None:
    write_directory(work / "a", {"format": "pt", "part": "1"}, {"part": "2"})
    expected = {"format": "pt", "part": dict(zip(NAMES, "12", strict=True))}
    assert asyncckpt.open_checkpoint(work / "a").metadata == {**expected, "files": list(NAMES)}
    work.convert("safetensors")
    (header,) = headers_of(work / "b")
    assert (header["format"], json.loads(header["asyncckpt_metadata"])) == ("pt", expected)


@pytest.mark.parametrize("to", FOREIGN)
def test_the_metadata_of_a_directory_are_kept_or_reported(to: str, work: Workdir) -> None:
    write_directory(work / "a", {"format": "pt", "run": "7"}, {"format": "pt", "run": "7"})
    changed = work.convert(to).changed
    if to in KEPT:
        assert changed == () and headers_of(work / "b") == [{"format": "pt", "run": "7"}]
    else:
        assert changed == ("the checkpoint's metadata are not kept: format, run",)


@pytest.mark.parametrize("to", KEPT)
@pytest.mark.parametrize("header", [None, {}, {"a": "b"}, {"format": "mlx"}], ids=["none", "empty", "other", "mlx"])
def test_the_format_is_always_torchs(header: dict[str, str] | None, to: str, work: Workdir) -> None:
    safetensors_torch.save_file({"w": torch.ones(2)}, work / "a", header)
    changed = work.convert(to).changed
    assert headers_of(work / "b") == [{**(header or {}), "format": "pt"}]
    was_other = bool(header) and "format" in (header or {})
    assert [said for said in changed if "format" in said] == (
        ["the metadata's format became 'pt'; it was 'mlx'"] if was_other else []
    )


@pytest.mark.parametrize("to", KINDS)
def test_one_shard_of_dcps_becomes_a_whole_and_it_is_said(to: str, work: Workdir) -> None:
    whole = {"w": torch.arange(8.0).reshape(2, 4)}
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [6, 0]}}), "DCP_VERSION": "1.0"}
    safetensors_torch.save_file(whole, work / "a", info)
    report = work.convert(to)
    states.assert_same(work.load(), whole)
    assert to == "asyncckpt" or "DCP_SHARDING_INFO" in " ".join(report.changed)
    if to in KEPT:
        assert headers_of(work / "b") == [{"format": "pt"}]


@pytest.mark.parametrize("to", KINDS)
def test_what_a_hub_directory_has_beside_its_weights_is_said(to: str, work: Workdir) -> None:
    (work / "a" / "1_Pooling").mkdir(parents=True)
    (work / "a" / "config.json").write_text("{}")
    name = "model-00001-of-00001.safetensors"
    for file, key in ((name, "w"), ("adapter.safetensors", "x"), ("consolidated.safetensors", "y")):
        foreign_samples.save_safetensors({key: torch.ones(2)}, work / "a" / file)
    index = {"metadata": {"total_size": 8, "total_parameters": 2, "custom": "x"}, "weight_map": {"w": name}}
    (work / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    report = work.convert(to)
    others = ("adapter.safetensors", "consolidated.safetensors")
    assert {
        "metadata of the index of the files are not kept: the top level (custom, total_parameters)",
        "files that are not of the model were not read: " + ", ".join(others),
    } <= set(report.changed)
    copied, not_copied = (("config.json",), ("1_Pooling",)) if to == "hf" else ((), ("1_Pooling", "config.json"))
    assert (report.copied, report.not_copied) == (copied, tuple(sorted([*not_copied, *others])))
    if to == "asyncckpt":
        assert "files" not in json.loads((work / "b" / "manifest.json").read_text())["metadata"]
