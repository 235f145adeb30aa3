"""Files that each rank of a training has written for itself with torch.save, read together at any number of ranks."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch

import asyncckpt
from asyncckpt.cli import main
from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.interop.sources import rank_files, torch_file
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage.files import Files
from tests.warm_python import WarmPython


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 1)
        self.tied = torch.nn.Linear(7, 1, bias=False)
        self.tied.weight = self.second.weight


def sharded(kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = Model()
    if kind == "fsdp":
        mesh: Any = init_device_mesh("cpu", (2,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model.first, whole["tp"], ColwiseParallel())
        mesh = whole["dp"]
    return fully_shard(model, mesh=mesh)


def write(rank: int, kind: str, directory: str) -> dict[str, Any]:
    """Train one step, write the files of this rank, and return the whole state."""
    from torch.distributed.checkpoint import state_dict as whole_or_sharded

    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = {}
    for full in (False, True):
        options = whole_or_sharded.StateDictOptions(full_state_dict=full)
        found["model"] = whole_or_sharded.get_model_state_dict(model, options=options)
        found["optimizer"] = whole_or_sharded.get_optimizer_state_dict(model, optimizer, options=options)
        if not full:
            os.makedirs(directory, exist_ok=True)
            for name, key in (("pytorch_model_fsdp", "model"), ("optimizer", "optimizer")):
                torch.save(found[key], os.path.join(directory, f"{name}_0_rank{rank}.bin"))
    return found if rank == 0 else {}


def same(a: Any, b: Any, path: str = "") -> None:
    """Compare two states; texts and numbers by `==`."""
    if isinstance(b, dict):
        assert a.keys() == b.keys(), path
        for key in b:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), path
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{path}.{n}")
    elif isinstance(b, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b, path


def loads(rank: int, directory: str) -> Any:
    model = sharded("fsdp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    asyncckpt.load(directory, {"model": model.state_dict()})
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("kind", "n_ranks"), [("fsdp", 2), ("hsdp", 4), ("fsdp and tp", 4)])
def test_the_files_together_are_the_whole_state_and_any_number_of_ranks_loads_it(
    kind: str, n_ranks: int, tmp_path: Path
) -> None:
    whole = rank_processes.run(n_ranks, write, kind, str(tmp_path / "a"))[0]
    found = asyncckpt.load(tmp_path / "a")
    same(found, whole)
    assert found["model"]["tied.weight"] is found["model"]["second.weight"]
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")
    assert report.kind == "fsdp" and any("lowest rank" in line for line in report.changed)
    same(asyncckpt.load(tmp_path / "b"), whole)
    assert main(["verify", str(tmp_path / "a")]) == 0
    if kind == "hsdp":
        for one in rank_processes.run(2, loads, str(tmp_path / "a")):
            same(one, whole["model"])
    sliced = asyncckpt.open_checkpoint(tmp_path / "a").tensor("model.first.weight", (slice(3, 5), slice(1, 2)))
    assert torch.equal(sliced, whole["model"]["first.weight"][3:5, 1:2])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rank-files") / "a"
    rank_processes.run(2, write, "fsdp", str(path))
    return path


def copied(two_ranks: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's files."""
    (tmp_path / "a").mkdir()
    for rank in range(2):
        name = f"pytorch_model_fsdp_0_rank{rank}.bin"
        (tmp_path / "a" / name).write_bytes((two_ranks / name).read_bytes())
    return tmp_path / "a"


def refused(path: Path, kind: type[AsyncCkptError], said: str) -> None:
    with pytest.raises(kind, match=said):
        asyncckpt.load(path)


def test_a_missing_file_is_named_or_the_tensor_that_lacks_elements(two_ranks: Path, tmp_path: Path) -> None:
    path = copied(two_ranks, tmp_path)
    first, last = (path / f"pytorch_model_fsdp_0_rank{rank}.bin" for rank in range(2))
    kept = last.read_bytes()
    last.unlink()
    refused(path, CorruptCheckpointError, r"tensor 'model\.first\.weight'")
    last.write_bytes(kept)
    first.unlink()
    refused(path, CorruptCheckpointError, "lacks the file of rank 0")


def test_a_flipped_bit_is_found_and_a_file_that_was_cut_short(two_ranks: Path, tmp_path: Path) -> None:
    path = copied(two_ranks, tmp_path)
    file = path / "pytorch_model_fsdp_0_rank1.bin"
    data = file.read_bytes()
    at = data.index(bytes(asyncckpt.load(path)["model"]["first.weight"][4:].contiguous().view(-1).view(torch.uint8)))
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert main(["verify", str(path)]) == 3
    file.write_bytes(data[: len(data) // 2])
    refused(path, CorruptCheckpointError, "rank1")


def test_files_that_do_not_say_what_a_rank_holds_are_refused_by_name(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(3)}, tmp_path / f"pytorch_model_fsdp_rank{rank}.bin")
    refused(tmp_path, UnsupportedFormatError, "it holds no DTensors")
    assert torch.equal(asyncckpt.load(tmp_path / "pytorch_model_fsdp_rank1.bin")["w"], torch.ones(3))


def partial(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    summed = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    torch.save({"w": summed}, os.path.join(directory, f"optimizer_rank{rank}.bin"))


def test_a_placement_that_holds_no_elements_is_refused(tmp_path: Path) -> None:
    rank_processes.run(2, partial, str(tmp_path))
    refused(tmp_path, UnsupportedFormatError, "placement Partial")


def test_lists_that_refer_to_one_list_over_and_over_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled: list[Any] = [1.5]
    for _ in range(17):
        doubled = [doubled, doubled]
    torch.save({"x": doubled}, tmp_path / "pytorch_model_fsdp_rank0.bin")
    monkeypatch.setattr(rank_files, "MAX_TENSORS", 10_000)
    refused(tmp_path, UnsupportedFormatError, r"fsdp_rank0\.bin: more than 10000 values, at 'x\.")


SPLIT: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, int]]]] = {
    "parts": ((64, 64), (32, 32), [(0, 16), (1, 16)]),
    "steps": ((1 << 24,), (1 << 22,), [(0, 1 << 11), (0, 1 << 11)]),
    "another shape": ((1 << 21, 1 << 21), (1, 1), [(0, 1 << 20), (1, 1 << 20)]),
}
"""Shape of the tensor and of each rank's part, which is one byte in the file; (dimension, split factor)."""


def split(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    for name, (shape, local, splits) in SPLIT.items():
        os.makedirs(os.path.join(directory, name), exist_ok=True)
        placements = [_StridedShard(dim, split_factor=factor) for dim, factor in splits]
        part = torch.zeros((1,) * len(local), dtype=torch.bool).expand(local)
        whole = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[-1], 1)[-len(shape) :]
        )
        torch.save({"w": whole}, os.path.join(directory, name, f"pytorch_model_fsdp_rank{rank}.bin"))


@pytest.fixture(scope="module")
def split_into_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split")
    rank_processes.run(4, split, str(path))
    return path


def test_more_parts_than_the_rank_has_bytes_are_refused(split_into_parts: Path) -> None:
    said = r"'model\.w': the rank holds 256 parts of it in 1 bytes"
    refused(split_into_parts / "parts", CorruptCheckpointError, said)


def test_placements_that_take_too_many_steps_are_refused(split_into_parts: Path) -> None:
    refused(split_into_parts / "steps", UnsupportedFormatError, r"more than 4000000 parts, at 'model\.w'")


def test_parts_of_another_shape_than_the_rank_holds_are_refused_before_they_are_made(split_into_parts: Path) -> None:
    program = """
import resource, sys
from asyncckpt.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.exit(main(["inspect", sys.argv[1]]))
"""
    command = [sys.executable, "-c", program, str(split_into_parts / "another shape")]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert f"the rank holds [1, 1], and by its placements [{1 << 20}, {1 << 20}]" in done.stderr, done.stderr


def repeated(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    small = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
    large = torch.zeros(1, 1).expand(1 << 20, 1 << 20)
    shard = DTensor.from_local(large, mesh, [Replicate()], run_check=False)
    for name, state in {"shard": {"w": small, "x": shard}, "leaf": {"w": small, "x": large}}.items():
        os.makedirs(os.path.join(directory, name))
        torch.save(state, os.path.join(directory, name, "pytorch_model_fsdp_rank0.bin"))


def test_one_element_that_claims_to_be_terabytes_is_refused_as_a_shard_and_beside_one(tmp_path: Path) -> None:
    rank_processes.run(1, repeated, str(tmp_path))
    for name in ("shard", "leaf"):
        refused(tmp_path / name, UnsupportedFormatError, r"fsdp_rank0\.bin: .*repeats 4 of them")


def test_rank_files_are_no_target_of_a_conversion(two_ranks: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    path = copied(two_ranks, tmp_path)
    with pytest.raises(CheckpointExistsError, match="no checkpoint of a kind"):
        asyncckpt.convert(tmp_path / "c.pt", path, to="asyncckpt", overwrite=True)
    assert len(os.listdir(path)) == 2


def test_they_are_read_without_torch_and_nothing_that_they_name_is_imported(
    two_ranks: Path, warm_python: WarmPython
) -> None:
    program = "import sys; from asyncckpt.cli import main; sys.exit(main(['inspect', sys.argv[1]]))"
    done = warm_python.run(program, str(two_ranks))
    assert done.returncode == 0 and "model.first.weight" in done.stdout, done.stderr


def test_whatever_the_pickles_hold_is_read_or_refused_with_an_error_of_ours(
    two_ranks: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of = torch_file.TorchArchive._bytes_of

    def changed(archive: Any, entry: Any) -> bytes:
        data = bytearray(bytes_of(archive, entry))
        if entry.name.endswith("/data.pkl"):
            for _ in range(rng.randrange(3)):
                at = rng.randrange(len(data))
                if rng.random() < 0.5:
                    data[at] = rng.randrange(256)
                else:
                    data[at : at + rng.randrange(9)] = data[: rng.randrange(60)]
        return bytes(data)

    monkeypatch.setattr(torch_file.TorchArchive, "_bytes_of", changed)
    n_read = 0
    for _ in range(200):
        with contextlib.suppress(AsyncCkptError):
            read_any(str(two_ranks), Files())
            n_read += 1
    assert 0 < n_read < 200
