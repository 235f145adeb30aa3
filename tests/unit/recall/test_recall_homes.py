"""Which snapshots count as removed: those of whose directories, as the ranks found them, none is there any more."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from asyncckpt.protocol import messages
from asyncckpt.recall import newest
from asyncckpt.recall.snapshots import snapshots_of
from asyncckpt.storage.checkpoint_dir import home_of, is_at_home
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import DirectoryIdentity

SAVE = "000001-00000001-0123456789ab"


def row(path: str, rank: int, home: DirectoryIdentity) -> dict[str, Any]:
    where = {"path": path, "save_id": SAVE, "step": 1, "rank": rank, "world_size": 2}
    part = {"slot": rank, "fd": 3, "nbytes": 4096, "generation": 1, "token": b"t" * 16, "whole": True}
    return {**where, **part, "committed": False, "inode": home.inode, "birth_ns": home.birth_ns}


def offered(path: pathlib.Path, homes: list[DirectoryIdentity], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = snapshots_of([row(str(path), rank, home) for rank, home in enumerate(homes)])
    monkeypatch.setattr(newest, "_newest_in", lambda root, endpoint: iter(found))
    return [candidate.path for candidate in newest.newest_candidates(str(path.parent), None, "auto", None)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_directory_that_one_rank_took_away_again_for_want_of_room_was_not_removed(
    order: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1"
    path.mkdir()
    homes = [home_of(str(path), LocalStore())]  # of the rank that found what the other had made
    path.rmdir()
    homes.append(home_of(str(path), LocalStore()))
    assert homes[0] != homes[1]
    assert offered(path, homes[::order], monkeypatch) == [str(path)]


def test_a_directory_that_both_ranks_found_and_is_gone_was_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1"
    path.mkdir()
    homes = [home_of(str(path), LocalStore())] * 2
    assert offered(path, homes, monkeypatch) == [str(path)]
    path.rmdir()
    assert offered(path, homes, monkeypatch) == []


def test_what_no_rank_has_seen_is_not_missed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(tmp_path / "1", [DirectoryIdentity(), DirectoryIdentity()], monkeypatch) == [str(tmp_path / "1")]


def test_an_inode_of_all_64_bits_can_be_told(tmp_path: pathlib.Path) -> None:
    class Wide(Files):
        def stat(self, path: str) -> os.stat_result:
            found = super().stat(path)
            return os.stat_result((found.st_mode, (1 << 64) - 5, *found[2:]))

    home = home_of(str(tmp_path), LocalStore(Wide()))
    assert is_at_home(str(tmp_path), home, LocalStore(Wide()))
    messages.Recalled(id=1, parts=(row(str(tmp_path), 0, home),))
