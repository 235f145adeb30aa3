"""A conversion into an object store: complete there, or nothing of it."""

from __future__ import annotations

import errno
import pathlib
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedPathError,
)
from asyncckpt.storage import locate
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.locate import files_at
from asyncckpt.storage.verification import verify_checkpoint
from tests import object_servers

pytest.importorskip("obstore", reason="the extra cloud is not installed")
object_servers.start_runtime()

URL = "s3://simulated/runs/step-3"


class Failing(ObjectStore):
    """A store that refuses names with `refused` in them."""

    refused = ""

    def put(self, name: str, data: Any, **others: Any) -> None:
        self._check(name)
        super().put(name, data, **others)

    def put_if_absent(self, name: str, data: bytes, **others: Any) -> None:
        self._check(name)
        super().put_if_absent(name, data, **others)

    def shard_writer(self, name: str, *arguments: Any, **others: Any) -> Any:
        self._check(name)
        return super().shard_writer(name, *arguments, **others)

    def _check(self, name: str) -> None:
        if self.refused and self.refused in name:
            raise PermissionError(errno.EACCES, "refused by this test", name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Failing:
    found = Failing("s3://simulated", client=object_servers.memory_store())
    monkeypatch.setattr(locate, "_stores", {})
    monkeypatch.setattr(locate, "_opened", lambda *_: found)
    return found


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.save({"w": torch.arange(3_000_000.0), "n": 3}, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def names() -> list[str]:
    try:
        return sorted(locate.store_at(URL).names(URL))
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("read_back", [True, False])
def test_what_is_converted_is_committed_and_progress_counts_every_byte(
    store: Failing, source: pathlib.Path, read_back: bool
) -> None:
    seen: list[tuple[int, int]] = []
    report = asyncckpt.convert(
        source, URL, to="asyncckpt", read_back=read_back, progress=lambda *found: seen.append(found)
    )
    assert (report.kind, report.to, report.tensors) == ("torch", "asyncckpt", 1)
    found = asyncckpt.load(URL, source="disk")
    assert torch.equal(found["w"], torch.arange(3_000_000.0)) and found["n"] == 3
    assert seen == sorted(seen) and seen[-1] == ((3 if read_back else 2) * report.nbytes,) * 2
    assert not [name for name in names() if name.startswith("mirrored")]


def block_nbytes_at(path: str) -> int:
    contents = read_contents(path, files_at(path))
    return contents.ranks[0].index.block_nbytes


def test_its_checksums_are_of_small_blocks_and_those_of_what_is_converted_from_it_are_not(
    store: Failing, source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    asyncckpt.convert(source, URL, to="asyncckpt")
    asyncckpt.convert(URL, f"{URL}-again", to="asyncckpt")
    asyncckpt.convert(URL, tmp_path / "files", to="asyncckpt")
    for path, block_nbytes in ((URL, 32 << 10), (f"{URL}-again", 32 << 10), (str(tmp_path / "files"), 256 << 10)):
        assert block_nbytes_at(path) == block_nbytes
        assert verify_checkpoint(path, files_at(path)).state == "ok"
    for to in ("torch", "dcp", "safetensors"):
        asyncckpt.convert(URL, tmp_path / to, to=to, partial=True)
        assert torch.equal(asyncckpt.load(tmp_path / to)["w"], torch.arange(3_000_000.0))


@pytest.mark.parametrize("to", ["asyncckpt", "torch"])
def test_damage_in_a_small_block_is_found_when_it_is_converted(
    store: Failing, source: pathlib.Path, tmp_path: pathlib.Path, to: str
) -> None:
    asyncckpt.convert(source, URL, to="asyncckpt")
    (shard,) = (f"{URL}/{name}" for name in names() if name.endswith(".safetensors"))
    data = bytearray(store.read_whole(shard, 1 << 30))
    data[300_000] ^= 1
    store.put(shard, bytes(data), replace=True)
    with pytest.raises(CorruptCheckpointError) as caught:
        asyncckpt.convert(URL, tmp_path / "out", to=to)
    assert (caught.value.fqn, caught.value.offset) == ("w", 300_000 // (32 << 10) * (32 << 10))
    assert not (tmp_path / "out").exists()


def test_it_counts_as_newer_than_what_is_beside_it(store: Failing, source: pathlib.Path) -> None:
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"n": 1}, f"{URL}-before", step=9)
    asyncckpt.convert(source, URL, to="asyncckpt")
    assert asyncckpt.latest_checkpoint("s3://simulated/runs") == URL


@pytest.mark.parametrize("refused", [".safetensors", ".index", "manifest"])
def test_a_store_that_refuses_leaves_nothing(store: Failing, source: pathlib.Path, refused: str) -> None:
    store.refused = refused
    with pytest.raises(SaveFailedError, match="refused by this test") as raised:
        asyncckpt.convert(source, URL, to="asyncckpt")
    assert raised.value.path == URL and not names()
    store.refused = ""
    asyncckpt.convert(source, URL, to="asyncckpt")
    assert asyncckpt.load(URL, source="disk")["n"] == 3


def test_what_is_there_stays_and_is_told_before_anything_is_written(store: Failing, source: pathlib.Path) -> None:
    asyncckpt.convert(source, URL, to="asyncckpt")
    before = names()
    for path, overwrite, error in (
        (URL, False, CheckpointExistsError),
        (URL, True, ConfigError),
        (f"{URL}/inside", False, CheckpointExistsError),
    ):
        seen: list[int] = []
        with pytest.raises(error):
            asyncckpt.convert(
                source, path, to="asyncckpt", overwrite=overwrite, progress=lambda done, _, seen=seen: seen.append(done)
            )
        assert not seen and names() == before


@pytest.mark.parametrize("to", ["dcp", "hf", "torch", "safetensors"])
def test_files_of_others_are_not_written_to_a_store(store: Failing, source: pathlib.Path, to: str) -> None:
    with pytest.raises(UnsupportedPathError, match="only to='asyncckpt'"):
        asyncckpt.convert(source, URL, to=to)
