"""A large index is decoded while its shards are read; a small one, and everybody else's, is not waited with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.loading.reader import DefaultReader
from asyncckpt.storage import read_ahead
from asyncckpt.storage.files import Files

ALONE = asyncckpt.RankInfo(0, 1)


class Noting(Files):
    """Notes reads into one buffer many times over, which only the thread that reads ahead does."""

    def __init__(self, *, fails: bool = False) -> None:
        self.ahead: list[str] = []
        self._fails = fails

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        thread = threading.current_thread().name
        if thread == "asyncckpt-read-ahead" and memoryview(buffers[0]).nbytes > 4096:
            self.ahead.append(thread)
            if self._fails:
                raise OSError(5, "no such luck")
        return super().preadv(fd, buffers, offset, flags)

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        return False


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=ALONE) as checkpointer:
        checkpointer.save({"a": torch.arange(50_000), "b": torch.ones(3)}, tmp_path / "c")
    return tmp_path / "c"


def loaded(path: Path, files: Files, rank: asyncckpt.RankInfo = ALONE, **options: Any) -> Any:
    target = {"a": torch.zeros(50_000, dtype=torch.int64), "b": torch.zeros(3)}
    DefaultReader(files, rank).read(path, target, source="disk", **options)
    return target


def test_a_large_index_has_its_shards_read_meanwhile(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_STRUCTURE_NBYTES", 1)
    monkeypatch.setattr(read_ahead.ReadAhead, "stop", lambda self: None)  # or the load may be over before it begins
    files = Noting()
    assert torch.equal(loaded(saved, files)["a"], torch.arange(50_000))
    assert files.ahead


@pytest.mark.parametrize("case", ["small", "keys", "unverified", "another world"])
def test_what_is_small_or_wanted_in_part_is_not_read_ahead(
    saved: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case != "small":
        monkeypatch.setattr(read_ahead, "MIN_STRUCTURE_NBYTES", 1)
    monkeypatch.setattr(read_ahead.ReadAhead, "stop", lambda self: None)
    options: dict[str, Any] = {"keys": {"keys": "a"}, "unverified": {"verify": False}}.get(case, {})
    files = Noting()
    loaded(saved, files, asyncckpt.RankInfo(0, 2) if case == "another world" else ALONE, **options)
    assert not files.ahead


def test_what_cannot_be_read_ahead_is_read_later(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_STRUCTURE_NBYTES", 1)
    monkeypatch.setattr(read_ahead.ReadAhead, "stop", lambda self: None)
    files = Noting(fails=True)
    assert torch.equal(loaded(saved, files)["a"], torch.arange(50_000))
    assert files.ahead


def test_damage_is_found_in_what_was_read_ahead(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_STRUCTURE_NBYTES", 1)
    (shard,) = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="differ from their checksum"):
        loaded(saved, Files())


def test_a_missing_shard_is_told_by_the_load(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MIN_STRUCTURE_NBYTES", 1)
    (shard,) = saved.glob("*.safetensors")
    shard.unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        loaded(saved, Files())
