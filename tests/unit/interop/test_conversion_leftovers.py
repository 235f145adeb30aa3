"""What a killed `convert` leaves: nobody takes it for a checkpoint, and `gc` removes it if it is ours and old."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer, cli
from asyncckpt.format.names import is_converting
from asyncckpt.interop.publish import CONVERSIONS, beside
from asyncckpt.maintenance.gc import GarbageRules, remove_temporary, temporaries_in
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.local import LocalStore

NAME = ".out.0123456789ab.converting"
OLD_S = 2 * 86400


@pytest.fixture(autouse=True)
def no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", f"ipc://{tmp_path}/none.sock")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
        checkpointer.save({"w": torch.arange(100.0)}, tmp_path / "runs" / "good")
    return tmp_path / "runs"


def age(path: Path, by_s: float = OLD_S) -> None:
    for one in (*(path.iterdir() if path.is_dir() else ()), path):
        os.utime(one, (time.time() - by_s,) * 2, follow_symlinks=False)


def leave(root: Path, kind: str) -> Path:
    """Leave a complete conversion under its temporary name, as a kill right ahead of the rename does."""
    asyncckpt.convert(root / "good", root / NAME, to=kind)
    age(root / NAME)
    return root / NAME


def gc(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any]]:
    capsys.readouterr()
    code = cli.main(["gc", str(root), "--json", *arguments])
    return code, [row for row in json.loads(capsys.readouterr().out)["found"] if row["kind"] == "conversion"]


def test_the_temporary_name_is_known_however_the_target_is_called(tmp_path: Path) -> None:
    for name in ("out", "a b", ".hidden", "x" * 255, "line\nbreak", "model.safetensors"):
        with beside(str(tmp_path / name)) as temporary:
            assert is_converting(os.path.basename(temporary))
    for name in (
        "out",
        "out.converting",
        ".out.converting",
        ".out.0123456789AB.converting",
        f"{NAME}.kept",
        f"x{NAME}",
    ):
        assert not is_converting(name)


def test_a_complete_conversion_under_its_temporary_name_is_no_checkpoint_to_anybody(root: Path) -> None:
    leave(root, "asyncckpt")
    assert asyncckpt.latest_checkpoint(root) == str(root / "good")
    assert asyncckpt.restore_latest(root).path == str(root / "good")
    assert [one.path for one in scan(str(root), LocalStore())] == [str(root / "good")]


@pytest.mark.parametrize("kind", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
def test_gc_removes_what_every_kind_of_conversion_leaves(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    left = leave(root, kind)
    code, (row,) = gc(root, capsys)
    assert (code, row["action"], row["path"]) == (0, "would go", str(left)) and os.path.lexists(left)
    assert row["nbytes"] >= 400
    code, (row,) = gc(root, capsys, "--delete")
    assert (code, row["action"]) == (0, "removed")
    assert os.listdir(root) == ["good"]
    assert torch.equal(asyncckpt.load(root / "good")["w"], torch.arange(100.0))


@pytest.mark.parametrize(
    "why", ["young", "a young file", "a foreign file", "a directory", "a link in it", "a link", "a pipe"]
)
def test_what_may_be_under_way_or_is_not_provably_ours_stays(
    root: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    left = root / NAME if why in ("a link", "a pipe") else leave(root, "dcp")
    if why == "young":
        age(left, 3600)
    elif why == "a young file":
        (left / "__9_9.distcp").touch()
        os.utime(left, (time.time() - OLD_S,) * 2)
    elif why == "a foreign file":
        (left / "thesis.odt").write_text("mine")
    elif why == "a directory":
        (left / "README.md").mkdir()
    elif why == "a link in it":
        (left / "x.safetensors").symlink_to(root / "good" / "manifest.json")
    elif why == "a link":
        left.symlink_to(root / "good")
    else:
        os.mkfifo(left)
    if "young" not in why:
        age(left)
    before = sorted(os.listdir(root)), sorted(os.listdir(left)) if left.is_dir() else []
    code, (row,) = gc(root, capsys, "--delete")
    assert (code, row["action"], row["removed"]) == (0, "kept", []) and row["why"]
    assert (sorted(os.listdir(root)), sorted(os.listdir(left)) if left.is_dir() else []) == before


@pytest.mark.parametrize("kind", ["asyncckpt", "torch"])
def test_what_could_not_be_put_back_is_named_and_stays(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    kept = leave(root, kind).rename(root / f"{NAME}.kept")
    asyncckpt.convert(root / "good", root / "out", to=kind)
    code, (row,) = gc(root, capsys, "--delete")
    assert (code, row["action"], row["removed"], row["path"]) == (0, "kept", [], str(kept))
    assert "only copy" in row["why"] and list(asyncckpt.load(kept)) == ["w"]


def test_deeper_ones_are_found_if_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(root, "torch")
    (root / "a" / "b").mkdir(parents=True)
    os.rename(root / NAME, root / "a" / "b" / NAME)
    assert gc(root, capsys)[1] == []
    assert gc(root, capsys, "-r", "--delete")[1][0]["action"] == "removed"
    assert not os.listdir(root / "a" / "b")


def test_a_file_that_came_meanwhile_stays(root: Path) -> None:
    left = leave(root, "dcp")
    (found,) = temporaries_in(str(root), LocalStore(), GarbageRules(now=time.time(), older_than_s=60), [CONVERSIONS])
    (left / "late").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        remove_temporary(found, LocalStore())
    assert os.listdir(left) == ["late"]
