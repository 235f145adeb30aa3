"""Stock `dcp.save` into a directory that holds a checkpoint of ours: neither is taken for the other."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import foreign_samples
import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.cli import main
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.catalog import CORRUPT, scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

pytest.importorskip("numpy")

READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "load": asyncckpt.load,
    "open": asyncckpt.open_checkpoint,
    "plan": lambda path: asyncckpt.plan_load(path, {"w": torch.zeros(3)}),
    "convert": lambda path: asyncckpt.convert(path, path.parent / "out.pt", to="torch"),
}


def save(value: float, path: pathlib.Path, layout: str = "safetensors") -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1), layout=layout) as checkpointer:
        checkpointer.save({"w": torch.full((3,), value)}, path)


def later(path: pathlib.Path, than: pathlib.Path) -> None:
    """File systems with coarse clocks give two files of one test the same time."""
    newest = than.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(newest, newest))


@pytest.fixture(params=["safetensors", "dcp"])
def replaced(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint of ours, and a stock one that was saved to the same path after it."""
    path = tmp_path / "step-1"
    save(1.0, path, request.param)
    foreign_samples.save_dcp({"w": torch.full((3,), 2.0)}, path)
    later(path / ".metadata", path / "manifest.json")
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_stock_checkpoint_saved_over_ours_is_an_error_that_names_both(reader: str, replaced: pathlib.Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="two checkpoints were saved to this path") as caught:
        READERS[reader](replaced)
    assert caught.value.file == ".metadata"  # type: ignore[attr-defined]


def test_it_is_neither_listed_as_committed_nor_verified(
    replaced: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(0.0, replaced.parent / "step-0")
    assert {os.path.basename(f.path): f.state for f in scan(str(replaced.parent), LocalStore())}["step-1"] == CORRUPT
    assert str(asyncckpt.latest_checkpoint(replaced.parent)).endswith("step-0")
    assert verify_any(str(replaced), Files()).state == CORRUPT
    assert main(["verify", str(replaced)]) == 3
    assert main(["ls", str(replaced.parent)]) == 0
    assert "corrupt" in capsys.readouterr().out


def test_what_is_moved_away_decides_which_is_meant(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step-1"
    save(1.0, path)
    foreign_samples.save_dcp({"w": torch.full((3,), 2.0)}, path)
    later(path / ".metadata", path / "manifest.json")
    shutil.copytree(path, tmp_path / "b")
    (path / ".metadata").unlink()
    assert asyncckpt.load(path)["w"][0] == 1.0
    for file in (tmp_path / "b").iterdir():
        if file.name == "manifest.json" or file.name.startswith("rank-"):
            file.unlink()
    assert asyncckpt.load(tmp_path / "b")["w"][0] == 2.0


def test_ours_saved_beside_an_older_stock_checkpoint_is_read_as_ours(tmp_path: pathlib.Path) -> None:
    foreign_samples.save_dcp({"w": torch.full((3,), 2.0)}, tmp_path / "a")
    save(1.0, tmp_path / "a")
    later(tmp_path / "a" / "manifest.json", tmp_path / "a" / ".metadata")
    assert asyncckpt.load(tmp_path / "a")["w"][0] == 1.0
    assert verify_any(str(tmp_path / "a"), Files()).state == "ok"
