"""What a killed `convert` or `doctor` leaves is no checkpoint to anybody; `gc` removes it if it is ours and old."""

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
from asyncckpt.doctor.directory import PROBES, directory_checks, probes
from asyncckpt.format.names import is_converting
from asyncckpt.interop.publish import CONVERSIONS, temporary_path
from asyncckpt.maintenance.gc import GarbageRules, remove_temporary, temporaries_in
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

NAME = ".out.0123456789ab.converting"
OLD_S = 2 * 86400
KINDS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")


class Killed(Files):
    """Files of a process that does not get to removing any."""

    def unlink(self, path: str) -> None:
        """Do nothing."""

    def rmdir(self, path: str) -> None:
        """Do nothing."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkpoint, and no worker."""
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", f"ipc://{tmp_path}/none.sock")
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
        checkpointer.save({"w": torch.arange(100.0)}, tmp_path / "runs" / "good")
    return tmp_path / "runs"


def age(path: Path, by_s: float = OLD_S) -> None:
    for one in (*(path.iterdir() if path.is_dir() else ()), path):
        os.utime(one, (time.time() - by_s,) * 2, follow_symlinks=False)


def leave(root: Path, kind: str) -> Path:
    """Leave what a kill right ahead of the rename of a conversion does, or of a probe; two days ago."""
    if kind != "probe":
        asyncckpt.convert(root / "good", root / NAME, to=kind)
    else:
        for _ in directory_checks(str(root), None, 1, Killed()):
            pass
    (left,) = (root / name for name in os.listdir(root) if name != "good")
    age(left)
    return left


def gc(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.main(["gc", str(root), "--json", *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["found"]
    return found


def test_the_temporary_name_of_a_conversion_is_known_however_the_target_is_called(tmp_path: Path) -> None:
    for name in ("out", "a b", ".hidden", "x" * 255, "line\nbreak", "model.safetensors"):
        with temporary_path(str(tmp_path / name)) as temporary:
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


def test_the_names_of_a_doctor_are_known(root: Path, tmp_path: Path) -> None:
    name = leave(root, "probe").name
    assert PROBES.is_named(name)
    for other in (".asyncckpt-doctor-", name[:-1], name + "0", name.upper(), "x" + name):
        assert not PROBES.is_named(other)
    (tmp_path / "probes").mkdir()
    for _ in probes(str(tmp_path / "probes"), Files()):
        pass
    assert os.listdir(tmp_path / "probes") != []
    assert all(PROBES.may_hold(name) for name in os.listdir(tmp_path / "probes"))


@pytest.mark.parametrize("kind", [*KINDS, "probe"])
def test_what_is_left_is_no_checkpoint_to_anybody_and_gc_removes_it_when_asked_to(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    left = leave(root, kind)
    assert asyncckpt.latest_checkpoint(root) == asyncckpt.restore_latest(root).path == str(root / "good")
    assert [one.path for one in scan(str(root), LocalStore())] == [str(root / "good")]
    (row,) = gc(root, capsys)
    expected = ("probe" if kind == "probe" else "conversion", "would go", str(left))
    assert (row["kind"], row["action"], row["path"]) == expected and os.path.lexists(left)
    assert row["nbytes"] >= 400 and (not left.is_dir() or {*row["files"]} == {*os.listdir(left)})
    (root / "a" / "b").mkdir(parents=True)
    os.rename(left, root / "a" / "b" / left.name)
    assert gc(root, capsys) == []
    assert [row["action"] for row in gc(root, capsys, "-r", "--delete")] == ["removed"]
    assert not os.listdir(root / "a" / "b")
    assert torch.equal(asyncckpt.load(root / "good")["w"], torch.arange(100.0))


@pytest.mark.parametrize(
    "why", ["young", "a young file", "a foreign file", "a directory", "a link in it", "a link", "a pipe"]
)
@pytest.mark.parametrize("kind", ["dcp", "probe"])
def test_what_may_be_under_way_or_is_not_provably_ours_stays(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str, why: str
) -> None:
    left = leave(root, kind)
    if why in ("a link", "a pipe"):
        left.rename(root.parent / "away")
        left.symlink_to(root / "good") if why == "a link" else os.mkfifo(left)
    elif why == "a young file":
        (left / ("__9_9.distcp" if kind == "dcp" else "direct")).touch()
        os.utime(left, (time.time() - OLD_S,) * 2)
    elif why == "a foreign file":
        (left / "thesis.odt").write_text("mine")
    elif why != "young":
        (left / "direct").unlink(missing_ok=True)
        file = left / ("direct" if kind == "probe" else "README.md" if why == "a directory" else "x.safetensors")
        file.mkdir() if why == "a directory" else file.symlink_to(root / "good" / "manifest.json")
    if "young" not in why:
        age(left)
    elif why == "young":
        age(left, 3600)
    before = sorted(root.rglob("*"))
    (row,) = gc(root, capsys, "--delete")
    assert (row["action"], row["removed"]) == ("kept", []) and row["why"]
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("kind", ["asyncckpt", "torch"])
def test_what_could_not_be_put_back_is_named_and_stays(
    root: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    kept = leave(root, kind).rename(root / f"{NAME}.kept")
    asyncckpt.convert(root / "good", root / "out", to=kind)
    (row,) = gc(root, capsys, "--delete")
    assert (row["action"], row["removed"], row["path"]) == ("kept", [], str(kept))
    assert "only copy" in row["why"] and list(asyncckpt.load(kept)) == ["w"]


def test_a_file_that_came_meanwhile_stays(root: Path) -> None:
    left = leave(root, "dcp")
    (found,) = temporaries_in(str(root), LocalStore(), GarbageRules(now=time.time(), older_than_s=60), [CONVERSIONS])
    (left / "late").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        remove_temporary(found, LocalStore())
    assert os.listdir(left) == ["late"]
