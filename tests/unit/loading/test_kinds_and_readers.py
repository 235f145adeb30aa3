"""Checkpoints of every kind by our readers: cells of docs/formats.md that are about one process.

What stock `dcp.save` wrote through our plug-in, what a conversion made, and what was saved with `layout="dcp"` are
kinds of their own here: all are checkpoints of ours.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import dcp_calls
import foreign_samples
import pytest
import states
import torch
from in_process_writer import StorageWriter

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.dcp import StorageReader
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files

for _module in ("numpy", "safetensors"):
    pytest.importorskip(_module)

TARGETS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")


def weights() -> dict[str, torch.Tensor]:
    """No two elements of one tensor are alike, but for `flags`; `odd` holds NaNs and a zero that is negative."""
    return {
        "large": torch.arange(150_000.0).reshape(300, 500),
        "half": torch.arange(35, dtype=torch.bfloat16).reshape(5, 7),
        "turned": torch.arange(48, dtype=torch.int16).reshape(6, 8).t(),
        "odd": torch.tensor([0x7FC00001, -0x00400000, -0x80000000, 0x00000001], dtype=torch.int32).view(torch.float32),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }


def training_state() -> dict[str, Any]:
    return {
        "model": weights(),
        "optim": {
            "state": {"large": {"moment": torch.linspace(0, 1, 91, dtype=torch.float64)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "step": 7,
        "name": "grüße\n",
    }


def write_hub(path: pathlib.Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """As `save_pretrained` does it: with an index if there are several files."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "none"}')
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards):
        name = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        foreign_samples.save_safetensors(shard, path / name)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_shards(path: pathlib.Path) -> None:
    whole = weights()
    first = {name: whole.pop(name) for name in ("half", "empty", "odd")}
    write_hub(path, [first, whole])


def save_by_checkpointer(path: pathlib.Path, layout: str = "safetensors") -> None:
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1), fsync=False, layout=layout) as checkpointer:
        checkpointer.save(training_state(), path)


def convert_to_ours(path: pathlib.Path) -> None:
    source = path.with_name("source.pt")
    torch.save(training_state(), source)
    asyncckpt.convert(source, path, to="asyncckpt")
    source.unlink()


WRITERS: dict[str, Callable[[pathlib.Path], None]] = {
    "dcp": lambda path: foreign_samples.save_dcp(training_state(), path),
    "torch": lambda path: torch.save(training_state(), path),
    "legacy": lambda path: torch.save(training_state(), path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: foreign_samples.save_safetensors(weights(), path),
    "hf": write_shards,
    "hf_one_file": lambda path: write_hub(path, [weights()]),
    "asyncckpt": save_by_checkpointer,
    "by_dcp_save": lambda path: dcp_calls.save(training_state(), StorageWriter(path, sync_files=False)),
    "converted": convert_to_ours,
    "layout_dcp": lambda path: save_by_checkpointer(path, "dcp"),
}
OURS_OTHERWISE = ("by_dcp_save", "converted", "layout_dcp")
OTHERWISE = (*OURS_OTHERWISE, "hf_one_file")
SAID = {"legacy": "torch", "hf_one_file": "hf", **dict.fromkeys(OURS_OTHERWISE, "asyncckpt")}
"""What `inspect` calls those that are no kinds of their own."""

every_kind = pytest.mark.parametrize("kind", WRITERS)
ours_otherwise = pytest.mark.parametrize("kind", OURS_OTHERWISE)
otherwise = pytest.mark.parametrize("kind", OTHERWISE)
Written = Callable[[str], pathlib.Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return by kind where a checkpoint of it lies; each is written once, by its own tool."""
    root = tmp_path_factory.mktemp("kinds")

    def path_of(kind: str) -> pathlib.Path:
        path = root / kind / "checkpoint"
        if not path.exists():
            path.parent.mkdir()
            WRITERS[kind](path)
        return path

    return path_of


def contents(kind: str) -> dict[str, Any]:
    return weights() if kind in ("safetensors", "hf", "hf_one_file") else training_state()


def listed(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state by name where its file has another order: safetensors stores the widest dtype first."""
    return dict(sorted(state.items())) if kind == "hf_one_file" else state


def prefix_of(kind: str) -> str:
    return "model." if "model" in contents(kind) else ""


def named_tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= named_tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return found


OBJECTS = {"optim.groups.0.lr": "0.1", "optim.groups.0.betas": "(0.9, 0.99)", "step": "7", "name": r"'grüße\n'"}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---- every kind -----------------------------------------------------------------------------------------------------


@every_kind
def test_inspect_says_what_it_holds(kind: str, written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "inspect", written(kind), "--stats")
    assert (code, found["kind"]) == (0, SAID.get(kind, kind))
    expected = named_tensors(contents(kind))
    assert {t["fqn"]: (t["dtype"], t["shape"], t["nbytes"]) for t in found["tensors"]} == {
        name: (str(t.dtype).removeprefix("torch."), list(t.shape), t.numel() * t.itemsize)
        for name, t in expected.items()
    }
    objects = {o["fqn"]: o["value"] for o in found["objects"]}
    assert objects == (OBJECTS if "step" in contents(kind) else {})
    stats = {t["fqn"].removeprefix("model."): t["stats"] for t in found["tensors"]}
    assert [stats["large"][name] for name in ("minimum", "maximum", "zeros", "nans")] == [0, 149_999, 1, 0]
    assert [stats["odd"][name] for name in ("zeros", "nans")] == [1, 2]
    assert main(["inspect", str(written(kind))]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [next(iter(expected))])
    assert row.split()[1:4] == ["float32", "[300,", "500]"]


@every_kind
def test_diff_finds_it_equal_and_names_one_bit_that_is_not(
    kind: str, written: Written, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = contents(kind)
    torch.save(state, tmp_path / "same.pt")
    code, found = run_json(capsys, "diff", written(kind), tmp_path / "same.pt")
    n_leaves = len(named_tensors(state)) + (len(OBJECTS) if "step" in state else 0)
    assert (code, found["differences"], found["leaves"]) == (0, [], n_leaves)
    large = named_tensors(state)["model.large" if "step" in state else "large"]
    large.view(torch.int32)[299, 1] ^= 1
    expected = {"model.large": "value", "step": "value"} if "step" in state else {"large": "value"}
    if "step" in state:
        state["step"] = 8
    torch.save(state, tmp_path / "other.pt")
    for pair in ((written(kind), tmp_path / "other.pt"), (tmp_path / "other.pt", written(kind))):
        code, found = run_json(capsys, "diff", *pair)
        assert (code, {row["fqn"]: row["what"] for row in found["differences"]}) == (1, expected)


@every_kind
def test_stock_dcp_load_fills_a_state_by_our_reader(kind: str, written: Written) -> None:
    target = dcp_calls.erased(contents(kind))
    dcp_calls.load(target, StorageReader(written(kind)))
    states.assert_same(target, contents(kind))


# ---- checkpoints of ours, written otherwise, and Hugging Face's without an index -------------------------------------


@otherwise
def test_it_is_loaded_whole(kind: str, written: Written) -> None:
    assert asyncckpt.open_checkpoint(written(kind)).kind == SAID[kind]
    states.assert_same(listed(kind, asyncckpt.load(written(kind))), listed(kind, contents(kind)))


@otherwise
def test_slices_are_read_of_it(kind: str, written: Written) -> None:
    opened, prefix = asyncckpt.open_checkpoint(written(kind)), prefix_of(kind)
    found = opened.tensor(f"{prefix}large", (slice(5, 290, 7), slice(3, 499)))
    states.assert_same(found, weights()["large"][5:290:7, 3:499].contiguous())
    states.assert_same(opened.tensor(f"{prefix}turned", 2), weights()["turned"][2].contiguous())


@otherwise
def test_its_tensors_are_mapped_and_writes_stay_private(kind: str, written: Written) -> None:
    opened, prefix = asyncckpt.open_checkpoint(written(kind)), prefix_of(kind)
    for name, tensor in weights().items():
        states.assert_same(opened.tensor(f"{prefix}{name}", mmap=True), tensor)
    mapped = opened.tensor(f"{prefix}large", mmap=True)
    assert str(written(kind)) in pathlib.Path("/proc/self/maps").read_text()
    mapped.zero_()
    states.assert_same(opened.tensor(f"{prefix}large"), weights()["large"])


@otherwise
def test_sharded_targets_are_filled_from_it(kind: str, written: Written) -> None:
    box = asyncckpt.ShardedSlice(torch.zeros(100, 450), (300, 500), (150, 50))
    flat = asyncckpt.FlatShard(torch.zeros(11, dtype=torch.bfloat16), (5, 7), 5)
    target: dict[str, Any] = {"large": box, "half": flat}
    asyncckpt.load(written(kind), {"model": target} if prefix_of(kind) else target, strict=bool(prefix_of(kind)))
    states.assert_same(box.tensor, weights()["large"][150:250, 50:].contiguous())
    states.assert_same(flat.tensor, weights()["half"].flatten()[5:16])


def test_verify_says_that_a_hugging_face_file_has_no_checksums(tmp_path: pathlib.Path) -> None:
    WRITERS["hf_one_file"](tmp_path / "hub")
    verdict = verify_any(str(tmp_path / "hub"), Files())
    assert (verdict.state, "no checksums" in verdict.unchecked) == ("ok", True)
    file = tmp_path / "hub" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert verify_any(str(tmp_path / "hub"), Files()).state == "corrupt"


def test_stock_dcp_load_fills_a_state_by_our_reader_of_one_file(written: Written) -> None:
    target = dcp_calls.erased(weights())
    planner = asyncckpt.dcp.DynamicMetaLoadPlanner()
    reader = asyncckpt.dcp.BroadcastingTorchSaveReader()
    dcp_calls.load(target, reader, checkpoint_id=str(written("hf_one_file")), planner=planner)
    states.assert_same(target, weights())


@ours_otherwise
def test_verify_accepts_it_and_names_the_file_and_the_tensor_of_a_flipped_bit(
    kind: str, tmp_path: pathlib.Path
) -> None:
    WRITERS[kind](tmp_path / "a")
    verdict = verify_any(str(tmp_path / "a"), Files())
    assert (verdict.state, verdict.unchecked) == ("ok", "")
    large = weights()["large"].numpy().tobytes()
    (file,) = (file for file in (tmp_path / "a").iterdir() if large in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.find(large) + 400_001] ^= 4
    file.write_bytes(data)
    verdict = verify_any(str(tmp_path / "a"), Files())
    assert verdict.state == "corrupt"
    assert [(fault.file, fault.fqn) for fault in verdict.faults] == [(file.name, "model.large")]  # type: ignore[union-attr]


@pytest.mark.parametrize("to", TARGETS)
@otherwise
def test_stock_tools_read_what_it_becomes(kind: str, to: str, written: Written, tmp_path: pathlib.Path) -> None:
    weights_only = to in ("safetensors", "hf") or kind == "hf_one_file"
    keys = {"keys": ["model"], "key_map": lambda fqn: fqn.removeprefix("model.")}
    given = keys if weights_only and kind != "hf_one_file" else {}
    report = asyncckpt.convert(written(kind), tmp_path / "out", to=to, **given)  # type: ignore[arg-type]
    assert (report.kind, report.to, report.tensors) == (SAID[kind], to, 7 if weights_only else 8)
    assert report.copied == (("config.json",) if (kind, to) == ("hf_one_file", "hf") else ())
    expected = weights() if weights_only else training_state()
    found = read_by_stock_tools(to, tmp_path / "out", expected)
    states.assert_same(listed(kind, found), listed(kind, expected))


def read_by_stock_tools(to: str, path: pathlib.Path, expected: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    if to == "torch":
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    if to == "dcp":
        target = dcp_calls.erased(expected)
        foreign_samples.load_dcp(target, path)
        return target  # type: ignore[no-any-return]
    if to == "asyncckpt":
        return asyncckpt.load(path)
    files = [path] if to == "safetensors" else sorted(path.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: found[name] for name in weights()} if set(found) == set(weights()) else found
