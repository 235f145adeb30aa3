"""The limit of `max_shard_bytes`: what the files of a conversion really hold."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

import asyncckpt
from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.errors import ConfigError

KINDS = ("asyncckpt", "dcp", "hf")


def write(path: Path, sizes: Sequence[int]) -> Path:
    torch.save({f"t{n}": torch.full((size,), n % 251, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
    return path


def tensors_of(path: Path) -> list[list[int]]:
    """Lengths of the tensors in each file of a directory, as its bytes say."""
    found = []
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            data = (path / name).read_bytes()
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            places = [entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"]
            assert 8 + int.from_bytes(data[:8], "little") + max((end for _, end in places), default=0) == len(data)
            found.append([end - begin for begin, end in places])
        elif name.endswith(".distcp"):
            found.append(_in_archives((path / name).read_bytes()))
    return found


def _in_archives(data: bytes) -> list[int]:
    """Lengths of the storages in archives of `torch.save` that lie one behind the other."""
    found = []
    while data:
        end = data.index(b"PK\x05\x06") + 22
        with zipfile.ZipFile(io.BytesIO(data[:end])) as archive:
            found += [one.file_size for one in archive.infolist() if "/data/" in one.filename]
        data = data[end:]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [[60_000] * 3, [90_000, 10_000, 50_000, 50_001], [100_000, 250_000, 1, 0], [0, 0], None], ids=str
)
def test_no_file_holds_more_than_the_limit_but_one_larger_tensor(
    kind: str, sizes: list[int] | None, tmp_path: Path, rng: Random
) -> None:
    limit = 100_000 if sizes else rng.randrange(20_000, 50_000)
    sizes = sizes or [rng.choice([0, 1, rng.randrange(1, 9_000), rng.randrange(1, 60_000)]) for _ in range(40)]
    asyncckpt.convert(write(tmp_path / "a.pt", sizes), tmp_path / "x", to=kind, max_shard_bytes=limit)
    held = tensors_of(tmp_path / "x")
    assert sorted(n for file in held for n in file) == sorted(sizes)
    assert all(sum(file) <= limit or len([n for n in file if n]) == 1 for file in held), (limit, held)
    loaded = asyncckpt.load(tmp_path / "x")
    assert all(torch.equal(loaded[f"t{n}"], torch.full((s,), n, dtype=torch.uint8)) for n, s in enumerate(sizes))


@pytest.mark.parametrize(("size", "limit", "n_files"), [(6, 10, 3), (60_000, 128_000, 2)])
def test_a_file_of_ours_keeps_the_limit_with_its_header(size: int, limit: int, n_files: int, tmp_path: Path) -> None:
    """As the same limit of a save."""
    asyncckpt.convert(write(tmp_path / "a.pt", [size] * 3), tmp_path / "x", to="asyncckpt", max_shard_bytes=limit)
    files = list((tmp_path / "x").glob("*.safetensors"))
    assert len(files) == n_files
    assert size == 6 or all(file.stat().st_size <= limit for file in files)


def test_tensors_within_a_tuple_count_in_a_dcp_directory(tmp_path: Path) -> None:
    torch.save({f"p{n}": (torch.zeros(60_000, dtype=torch.uint8), n) for n in range(3)}, tmp_path / "a.pt")
    asyncckpt.convert(tmp_path / "a.pt", tmp_path / "x", to="dcp", max_shard_bytes=100_000)
    assert tensors_of(tmp_path / "x") == [[60_000]] * 3


def test_more_files_than_a_checkpoint_of_ours_has_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.pt", [5] * (MAX_PARTS + 1))
    with pytest.raises(ConfigError, match="too small") as caught:
        asyncckpt.convert(source, tmp_path / "x", to="asyncckpt", max_shard_bytes=5)
    assert caught.value.field == "max_shard_bytes"
    assert os.listdir(tmp_path) == ["a.pt"]
