"""Loads without a number of threads go at the pace of the device, and are learnt from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.loading import fetching
from asyncckpt.storage import pace_file
from asyncckpt.storage.files import Files
from asyncckpt.storage.pace import Pace, Sample

FEW = Pace(3, 1 << 20)


class Seen(pace_file.DevicePaces):
    """Keeps what it was told."""

    took_: list[tuple[Any, ...]]

    def choose(self, path: str) -> Pace:
        return FEW

    def took(self, *args: Any) -> None:
        self.took_.append(args)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    paces = Seen(None, "read", (FEW,))
    paces.took_ = []
    monkeypatch.setattr(fetching, "read_paces", lambda: paces)
    return paces


@pytest.fixture
def path(tmp_path: Path) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"w": torch.randn(1 << 20)}, tmp_path / "c")
    return str(tmp_path / "c")


@pytest.fixture
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "resident", lambda *args: False)


@pytest.mark.usefixtures("_cold")
def test_a_load_from_the_device_goes_at_its_pace_and_is_learnt_from(
    path: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    real = fetching.read_shards

    def noted(*args: Any, **kw: Any) -> Any:
        given.append((kw["threads"], kw["extent_nbytes"]))
        return real(*args, **kw)

    monkeypatch.setattr(fetching, "read_shards", noted)
    asyncckpt.load(path)
    assert given == [FEW]
    ((where, pace, nbytes, seconds),) = seen.took_
    assert (where, pace) == (path, FEW) and nbytes >= 4 << 20 and seconds > 0


@pytest.mark.usefixtures("_cold")
def test_a_number_of_threads_is_taken_as_it_is_and_teaches_nothing(path: str, seen: Seen) -> None:
    asyncckpt.load(path, threads=2)
    assert seen.took_ == []


def test_a_load_from_the_page_cache_teaches_nothing(path: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "resident", lambda *args: True)
    for file in Path(path).iterdir():
        file.read_bytes()
    asyncckpt.load(path)
    assert seen.took_ == []


def test_what_is_known_lies_in_the_users_own_directory(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(pace_file, "SAMPLE_NBYTES", 1)
    paces = fetching.read_paces()
    paces.took(path, fetching.READ_PACES[0], 1 << 20, 1.0)
    (found,) = paces.samples(path)
    assert isinstance(found, Sample) and found.bytes_per_s == 1 << 20
    assert [file.name.startswith("pace-read-") for file in (tmp_path / "asyncckpt").iterdir()] == [True]
