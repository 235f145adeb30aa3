"""What a killed `doctor` leaves in a directory: `gc` removes it if it is ours and old."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import cli
from asyncckpt.doctor.directory import PROBE_FILE_NAMES, PROBES, directory_checks, probes
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

OLD_S = 2 * 86400


class Killed(Files):
    """Files of a process that does not get to removing any."""

    def unlink(self, path: str) -> None:
        """Do nothing."""

    def rmdir(self, path: str) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", f"ipc://{tmp_path}/none.sock")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "runs"
    made.mkdir()
    return made


@pytest.fixture
def corner(root: Path) -> Path:
    """Let a doctor look, and die before it has cleaned up; two days ago."""
    for _ in directory_checks(str(root), None, 1, Killed()):
        pass
    (found,) = root.iterdir()
    age(found)
    return found


def age(path: Path, by_s: float = OLD_S) -> None:
    for one in (*path.iterdir(), path):
        os.utime(one, (time.time() - by_s,) * 2)


def gc(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli.main(["gc", str(root), "--json", *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["found"]
    return found


def test_the_probes_leave_no_other_names_than_they_say(tmp_path: Path) -> None:
    for _ in probes(str(tmp_path), Files()):
        pass
    assert {*os.listdir(tmp_path)} <= PROBE_FILE_NAMES


def test_the_corner_is_known_by_its_name_and_is_no_checkpoint(root: Path, corner: Path) -> None:
    assert PROBES.is_named(corner.name)
    for name in (".asyncckpt-doctor-", corner.name[:-1], corner.name + "0", corner.name.upper(), "x" + corner.name):
        assert not PROBES.is_named(name)
    assert scan(str(root), LocalStore()) == []


def test_gc_lists_it_and_removes_it_when_asked_to(root: Path, corner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = gc(root, capsys)
    assert (row["kind"], row["action"], row["path"]) == ("probe", "would go", str(corner)) and corner.is_dir()
    assert {*row["files"]} == {*os.listdir(corner)} and row["nbytes"] > 4096
    (row,) = gc(root, capsys, "--delete")
    assert row["action"] == "removed" and not os.listdir(root)


def test_gc_looks_further_down_if_asked_to(root: Path, corner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "a" / "b").mkdir(parents=True)
    os.rename(corner, root / "a" / "b" / corner.name)
    assert gc(root, capsys) == []
    assert gc(root, capsys, "-r", "--delete")[0]["action"] == "removed"
    assert not os.listdir(root / "a" / "b")


@pytest.mark.parametrize("why", ["young", "a foreign file", "a directory", "a link"])
def test_what_may_be_under_way_or_is_not_provably_ours_stays(
    root: Path, corner: Path, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    if why == "young":
        age(corner, 3600)
    elif why == "a foreign file":
        (corner / "thesis.odt").write_text("mine")
    elif why == "a directory":
        (corner / "direct").unlink()
        (corner / "direct").mkdir()
    else:
        (corner / "case").unlink()
        (corner / "case").symlink_to(root)
    if why in ("a foreign file", "a directory"):
        age(corner)
    before = sorted(os.listdir(corner))
    (row,) = gc(root, capsys, "--delete")
    assert (row["action"], row["removed"]) == ("kept", []) and row["why"]
    assert sorted(os.listdir(corner)) == before
