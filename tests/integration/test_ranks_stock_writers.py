"""What stock writers of PyTorch wrote on several ranks, `dcp.save` and its writer for Hugging Face, read by us."""

from __future__ import annotations

import json
import pathlib
import shutil
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import rank_processes
import sharded_samples
import states
import torch
from sharded_samples import WHOLE

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files

for _module in ("numpy", "safetensors", "fsspec"):
    pytest.importorskip(_module)

WRITERS = ("dcp", "hf")
WORLD_SIZES = (2, 4)
Written = Callable[[str, int], pathlib.Path]
by_writers = pytest.mark.parametrize(("writer", "world_size"), [("dcp", 2), ("dcp", 4), ("hf", 4)])


def save_by_stock_writers(rank: int, path: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(sharded_samples.state(world_size), checkpoint_id=f"{path}/dcp-{world_size}")
        writer = dcp.HuggingFaceStorageWriter(f"{path}/hf-{world_size}", save_distributed=True)
        dcp.save(sharded_samples.state(world_size)["model"], storage_writer=writer)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return by writer and world size where it wrote; the ranks run once for each world size."""
    root = tmp_path_factory.mktemp("stock-writers")

    def path_of(writer: str, world_size: int) -> pathlib.Path:
        path = root / f"{writer}-{world_size}"
        if not path.exists():
            rank_processes.run(world_size, save_by_stock_writers, str(root), world_size)
        return path

    return path_of


def prefix(writer: str) -> str:
    return "model." if writer == "dcp" else ""


@by_writers
def test_what_several_ranks_wrote_is_put_together(writer: str, world_size: int, written: Written) -> None:
    path = written(writer, world_size)
    opened = asyncckpt.open_checkpoint(path)
    assert opened.kind == writer
    assert opened.tensors[f"{prefix(writer)}by_rows"].nbytes == 240
    found = asyncckpt.load(path)
    states.assert_same(found["model"] if writer == "dcp" else found, WHOLE)
    if writer == "dcp":
        states.assert_same(found["same"], torch.ones(3))
        assert found["step"] == 7


@by_writers
def test_slices_and_mapped_reads_of_what_lies_in_the_shards_of_several_ranks(
    writer: str, world_size: int, written: Written
) -> None:
    opened = asyncckpt.open_checkpoint(written(writer, world_size))
    found = opened.tensor(f"{prefix(writer)}by_rows", (slice(2, 8), slice(1, 6, 2)))
    states.assert_same(found, WHOLE["by_rows"][2:8, 1:6:2].contiguous())
    found = opened.tensor(f"{prefix(writer)}by_columns", (slice(1, 4), slice(2, 7)))
    states.assert_same(found, WHOLE["by_columns"][1:4, 2:7].contiguous())
    for name, whole in WHOLE.items():
        states.assert_same(opened.tensor(f"{prefix(writer)}{name}", mmap=True).contiguous(), whole)
        states.assert_same(opened.tensor(f"{prefix(writer)}{name}", (3, ...), mmap=True), whole[3].contiguous())


@by_writers
def test_a_shard_that_no_rank_held_and_whole_targets_are_filled(writer: str, world_size: int, written: Written) -> None:
    path = written(writer, world_size)
    rows = asyncckpt.ShardedSlice(torch.zeros(7, 3), (10, 6), (2, 2))
    columns = asyncckpt.ShardedSlice(torch.zeros(2, 5, dtype=torch.int32), (5, 7), (1, 1))
    asyncckpt.load(path, {f"{prefix(writer)}by_rows": rows, f"{prefix(writer)}by_columns": columns}, strict=True)
    states.assert_same(rows.tensor, WHOLE["by_rows"][2:9, 2:5].contiguous())
    states.assert_same(columns.tensor, WHOLE["by_columns"][1:3, 1:6].contiguous())
    target = {f"{prefix(writer)}{name}": torch.zeros_like(whole) for name, whole in WHOLE.items()}
    asyncckpt.load(path, target)
    states.assert_same(target, {f"{prefix(writer)}{name}": whole for name, whole in WHOLE.items()})


@by_writers
def test_the_verdict_on_the_shards_of_several_ranks(
    writer: str, world_size: int, written: Written, tmp_path: pathlib.Path
) -> None:
    verdict = verify_any(str(written(writer, world_size)), Files())
    assert (verdict.state, bool(verdict.unchecked)) == ("ok", writer == "hf")
    shutil.copytree(written(writer, world_size), tmp_path / "a")
    file = max((tmp_path / "a").glob("*.distcp" if writer == "dcp" else "*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert verify_any(str(tmp_path / "a"), Files()).state == "corrupt"


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@by_writers
def test_inspect_says_which_files_hold_which_boxes(
    writer: str, world_size: int, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_json(capsys, "inspect", written(writer, world_size), "--stats")
    assert (code, found["kind"]) == (0, writer)
    tensors = {tensor["fqn"]: tensor for tensor in found["tensors"]}
    for dim, (name, whole) in enumerate(WHOLE.items()):
        described = tensors.pop(f"{prefix(writer)}{name}")
        assert (described["dtype"], described["shape"]) == (str(whole.dtype).removeprefix("torch."), list(whole.shape))
        pieces = torch.chunk(whole, world_size, dim)
        assert sorted(piece["sizes"] for piece in described["pieces"]) == sorted(list(p.shape) for p in pieces)
        assert len(described["shards"]) == len(pieces)
        stats = described["stats"]
        assert (stats["minimum"], stats["maximum"], stats["zeros"]) == (0, whole.numel() - 1, 1)
    assert list(tensors) == (["same"] if writer == "dcp" else [])
    assert {o["fqn"]: o["value"] for o in found["objects"]} == ({"step": "7"} if writer == "dcp" else {})


@by_writers
def test_diff_names_one_bit_in_the_shards_of_several_ranks(
    writer: str, world_size: int, written: Written, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {name: whole.clone() for name, whole in WHOLE.items()}
    state = {"model": model, "same": torch.ones(3), "step": 7} if writer == "dcp" else model
    torch.save(state, tmp_path / "same.pt")
    code, found = run_json(capsys, "diff", written(writer, world_size), tmp_path / "same.pt")
    assert (code, found["differences"], found["leaves"]) == (0, [], 4 if writer == "dcp" else 2)
    model["by_columns"][4, 6] ^= 1
    torch.save(state, tmp_path / "other.pt")
    code, found = run_json(capsys, "diff", written(writer, world_size), tmp_path / "other.pt")
    (row,) = found["differences"]
    assert (code, row["fqn"], row["what"]) == (1, f"{prefix(writer)}by_columns", "value")
    assert row["max_abs_difference"] == 1


def load_by_our_reader(rank: int, root: str, world_size: int) -> None:
    import torch.distributed.checkpoint as dcp

    for writer in WRITERS:
        for saved_by in WORLD_SIZES:
            state = sharded_samples.state(world_size, fill=-1)
            target = state if writer == "dcp" else state["model"]
            dcp.load(target, storage_reader=asyncckpt.dcp.StorageReader(f"{root}/{writer}-{saved_by}"))
            for name, whole in WHOLE.items():
                states.assert_same(state["model"][name].full_tensor(), whole, f"{writer}-{saved_by} {name}")
            if writer == "dcp":
                states.assert_same(state["same"], torch.ones(3))
                assert state["step"] == 7


@pytest.mark.parametrize("world_size", [1, 3])
def test_stock_dcp_load_reshards_it_by_our_reader(world_size: int, written: Written) -> None:
    paths = [written(writer, saved_by) for writer in WRITERS for saved_by in WORLD_SIZES]
    rank_processes.run(world_size, load_by_our_reader, str(paths[0].parent), world_size)


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
@by_writers
def test_shards_of_several_ranks_become_one_of_any_kind_without_a_group(
    writer: str, world_size: int, to: str, written: Written, tmp_path: pathlib.Path
) -> None:
    keys = ["model"] if writer == "dcp" else None
    report = asyncckpt.convert(written(writer, world_size), tmp_path / "out", to=to, keys=keys)
    assert (report.kind, report.to, report.tensors) == (writer, to, 2)
    assert asyncckpt.open_checkpoint(tmp_path / "out").kind == to
    found = asyncckpt.load(tmp_path / "out")
    found = found.get("model", None) or {name.removeprefix("model."): tensor for name, tensor in found.items()}
    states.assert_same(found, WHOLE)


@pytest.mark.parametrize(("name", "world_size"), list(zip(WHOLE, WORLD_SIZES, strict=True)))
def test_a_flipped_bit_in_the_last_rank_s_shard_is_named_and_leaves_no_target(
    name: str, world_size: int, written: Written, tmp_path: pathlib.Path, rng: Random
) -> None:
    shutil.copytree(written("dcp", world_size), tmp_path / "a")
    shard = torch.chunk(WHOLE[name], world_size, list(WHOLE).index(name))[-1].contiguous().numpy().tobytes()
    (file,) = (file for file in (tmp_path / "a").glob("*.distcp") if shard in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.find(shard) + rng.randrange(len(shard))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="CRC-32") as caught:
        asyncckpt.convert(tmp_path / "a", tmp_path / "out", to="torch")
    assert (caught.value.file, caught.value.fqn) == (file.name, f"model.{name}")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
