"""What a killed `convert` leaves: nobody takes it for a checkpoint, and `gc` removes it if it is ours and old."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer, cli
from asyncckpt.conversion.leftovers import CONVERSIONS
from asyncckpt.conversion.publishing import beside
from asyncckpt.format.names import LOCK_NAME, is_converting
from asyncckpt.retention.pins import pin
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import Rules
from asyncckpt.storage.temporaries import remove_temporary, temporaries_in

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
        f"{NAME}.old",
        f"{NAME}.kept",
        f"x{NAME}",
    ):
        assert not is_converting(name)


def test_a_complete_conversion_under_its_temporary_name_is_no_checkpoint_to_anybody(root: Path) -> None:
    leave(root, "asyncckpt")
    assert asyncckpt.latest_checkpoint(root) == str(root / "good")
    assert asyncckpt.restore_latest(root).path == str(root / "good")
    assert [one.path for one in scan(str(root), Files())] == [str(root / "good")]


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


def test_a_checkpoint_that_was_being_replaced_is_found_and_what_would_have_replaced_it_stays(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between two renames, where names cannot be exchanged: `.old` is all that stood there."""
    left = leave(root, "asyncckpt")
    os.rename(root / "good", root / f"{NAME}.old")
    assert asyncckpt.latest_checkpoint(root) == str(root / f"{NAME}.old")
    _, (row, aside) = gc(root, capsys, "--delete")
    assert row["action"] == "kept" and f"{NAME}.old" in row["why"] and left.is_dir()
    assert aside["action"] == "kept" and aside["path"] == str(root / f"{NAME}.old")
    assert list(asyncckpt.load(aside["path"])) == ["w"]
    asyncckpt.convert(root / f"{NAME}.old", root / "out", to="asyncckpt")
    assert [row["action"] for row in gc(root, capsys, "--delete")[1]] == ["kept", "kept"]


def set_aside(root: Path, kind: str) -> Path:
    """Leave what was replaced beside what replaced it, as a kill between two renames does."""
    old = leave(root, kind).rename(root / f"{NAME}.old")
    asyncckpt.convert(root / "good", root / "out", to=kind)
    return old


@pytest.mark.parametrize("kind", ["asyncckpt", "dcp", "torch", "safetensors", "hf"])
def test_gc_removes_what_was_set_aside_where_its_successor_stands(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    old = set_aside(root, kind)
    if kind == "asyncckpt":
        (old / LOCK_NAME).touch()
        age(old)
    code, (row,) = gc(root, capsys)
    assert (code, row["action"], row["path"]) == (0, "would go", str(old)) and os.path.lexists(old)
    code, (row,) = gc(root, capsys, "--delete")
    assert (code, row["action"]) == (0, "removed")
    assert sorted(os.listdir(root)) == ["good", "out"]


@pytest.mark.parametrize(
    "why",
    ["nothing", "an empty directory", "somebody else's file", "a damaged one", "a cut name", "young", "not put back"],
)
@pytest.mark.parametrize("kind", ["asyncckpt", "torch"])
def test_what_was_set_aside_and_may_be_the_only_copy_is_named_and_stays(
    root: Path, capsys: pytest.CaptureFixture[str], why: str, kind: str
) -> None:
    old, final = set_aside(root, kind), root / "out"
    if why == "a cut name":
        old = old.rename(root / f".{'x' * 200}.0123456789ab.converting.old")
        final.rename(root / ("x" * 200))
    elif why == "a damaged one":
        for one in final.iterdir() if final.is_dir() else (final,):
            one.write_bytes(b"")
    elif why == "young":
        age(old, 3600)
    elif why == "not put back":
        old = old.rename(root / f"{NAME}.kept")
    else:
        shutil.rmtree(final) if final.is_dir() else final.unlink()
        if why == "an empty directory":
            final.mkdir()
        elif why == "somebody else's file":
            final.write_text("mine")
    code, (row,) = gc(root, capsys, "--delete")
    assert (code, row["action"], row["removed"], row["path"]) == (0, "kept", [], str(old)) and row["why"]
    assert list(asyncckpt.load(old)) == ["w"]


@pytest.mark.parametrize("name", ["notes.txt", "rank-00000-part-000.000900-00000000-0123456789ab.safetensors", "pin"])
def test_what_was_set_aside_with_something_else_in_it_stays(root: Path, name: str) -> None:
    old = set_aside(root, "asyncckpt")
    if name == "pin":
        pin(str(old), Files(), umask=0o22)
    else:
        (old / name).write_text("mine")
    age(old)
    (found,) = temporaries_in(str(root), Files(), Rules(now=time.time(), older_than_s=60), [CONVERSIONS])
    assert found.path == str(old) and str(root / "out") in found.kept


def test_deeper_ones_are_found_if_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(root, "torch")
    (root / "a" / "b").mkdir(parents=True)
    os.rename(root / NAME, root / "a" / "b" / NAME)
    assert gc(root, capsys)[1] == []
    assert gc(root, capsys, "-r", "--delete")[1][0]["action"] == "removed"
    assert not os.listdir(root / "a" / "b")


def test_a_file_that_came_meanwhile_stays(root: Path) -> None:
    left = leave(root, "dcp")
    (found,) = temporaries_in(str(root), Files(), Rules(now=time.time(), older_than_s=60), [CONVERSIONS])
    (left / "late").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        remove_temporary(found, Files())
    assert os.listdir(left) == ["late"]
