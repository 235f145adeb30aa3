"""Which snapshots count as removed: those of whose directories, as the ranks found them, none is there any more."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from asyncckpt.protocol import messages
from asyncckpt.recall import newest
from asyncckpt.recall.snapshots import snapshots_of
from asyncckpt.storage.checkpoint_dir import has_identity, identity_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import DirectoryIdentity

SAVE = "000001-00000001-0123456789ab"


def row(path: str, rank: int, identity: DirectoryIdentity) -> dict[str, Any]:
    where = {"path": path, "save_id": SAVE, "step": 1, "rank": rank, "world_size": 2}
    part = {"slot": rank, "fd": 3, "nbytes": 4096, "generation": 1, "token": b"t" * 16, "whole": True}
    return {**where, **part, "committed": False, "inode": identity.inode, "birth_ns": identity.birth_ns}


def offered(path: pathlib.Path, directories: list[DirectoryIdentity], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = snapshots_of([row(str(path), rank, identity) for rank, identity in enumerate(directories)])
    monkeypatch.setattr(newest, "_newest_in", lambda root, endpoint: iter(found))
    return [candidate.path for candidate in newest.newest_candidates(str(path.parent), None, "auto", None)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_directory_that_one_rank_took_away_again_for_want_of_room_was_not_removed(
    order: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1"
    path.mkdir()
    directories = [identity_of(str(path), LocalStore())]  # of the rank that found what the other had made
    path.rmdir()
    directories.append(identity_of(str(path), LocalStore()))
    assert directories[0] != directories[1]
    assert offered(path, directories[::order], monkeypatch) == [str(path)]


def test_a_directory_that_both_ranks_found_and_is_gone_was_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1"
    path.mkdir()
    directories = [identity_of(str(path), LocalStore())] * 2
    assert offered(path, directories, monkeypatch) == [str(path)]
    path.rmdir()
    assert offered(path, directories, monkeypatch) == []


def test_what_no_rank_has_seen_is_not_missed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(tmp_path / "1", [DirectoryIdentity(), DirectoryIdentity()], monkeypatch) == [str(tmp_path / "1")]


def test_an_inode_of_all_64_bits_can_be_told(tmp_path: pathlib.Path) -> None:
    class Wide(Files):
        def stat(self, path: str) -> os.stat_result:
            found = super().stat(path)
            return os.stat_result((found.st_mode, (1 << 64) - 5, *found[2:]))

    identity = identity_of(str(tmp_path), LocalStore(Wide()))
    assert has_identity(str(tmp_path), identity, LocalStore(Wide()))
    messages.Recalled(id=1, parts=(row(str(tmp_path), 0, identity),))
