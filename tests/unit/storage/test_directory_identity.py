"""Which directory a path means: the one that it was, or another in its place."""

from __future__ import annotations

import os
import pathlib

import pytest

from asyncckpt.storage import local
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY, has_identity, identity_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import DirectoryIdentity

FILES = Files()
STORE = LocalStore()


def test_the_directory_itself_is_taken_once_it_is_there_and_else_the_one_that_is_to_hold_it(
    tmp_path: pathlib.Path,
) -> None:
    path = str(tmp_path / "a" / "b")
    assert identity_of(path, STORE) == NO_IDENTITY
    os.mkdir(tmp_path / "a")
    assert identity_of(path, STORE).inode == os.stat(tmp_path / "a").st_ino
    os.mkdir(path)
    assert identity_of(path, STORE).inode == os.stat(path).st_ino


def test_it_is_there_until_it_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a" / "b"
    path.mkdir(parents=True)
    found = identity_of(str(path), STORE)
    assert has_identity(str(path), found, STORE)
    path.rmdir()
    assert not has_identity(str(path), found, STORE)


def test_the_holder_counts_while_nothing_was_made_in_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "b"
    found = identity_of(str(path), STORE)
    assert has_identity(str(path), found, STORE)
    path.mkdir()
    assert has_identity(str(path), found, STORE), "made since"


def test_one_made_anew_with_the_number_of_the_old_one_is_another(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.mkdir()
    found = identity_of(str(path), STORE)
    old = DirectoryIdentity(found.inode, found.birth_ns - 1 if found.birth_ns else 0)
    monkeypatch.setattr(local, "birth_ns", lambda _: 7)
    assert not has_identity(str(path), DirectoryIdentity(found.inode, 8), STORE)
    assert has_identity(str(path), DirectoryIdentity(found.inode, 0), STORE), "who cannot know does not doubt"
    monkeypatch.setattr(local, "birth_ns", lambda _: 0)
    assert has_identity(str(path), old, STORE)


def test_what_nobody_has_seen_is_not_missed(tmp_path: pathlib.Path) -> None:
    assert has_identity(str(tmp_path / "nothing"), NO_IDENTITY, STORE)


def test_a_birth_is_known_or_nought(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    born = local.birth_ns(str(path))
    assert born == 0 or abs(born - os.stat(path).st_mtime_ns) < 10**9
    assert local.birth_ns(str(tmp_path / "nothing")) == 0


def test_storage_that_does_not_answer_is_no_home(tmp_path: pathlib.Path) -> None:
    class Broken(Files):
        def stat(self, path: str) -> os.stat_result:
            raise OSError(5, "simulated")

    assert identity_of(str(tmp_path), LocalStore(Broken())) == NO_IDENTITY
