"""Which directory a path means: the one that it was, or another in its place."""

from __future__ import annotations

import os
import pathlib

import pytest

from asyncckpt.storage import home
from asyncckpt.storage.files import Files
from asyncckpt.storage.home import NO_HOME, Home, home_of, is_at_home

FILES = Files()


def test_the_directory_itself_is_taken_once_it_is_there_and_else_the_one_that_is_to_hold_it(
    tmp_path: pathlib.Path,
) -> None:
    path = str(tmp_path / "a" / "b")
    assert home_of(path, FILES) == NO_HOME
    os.mkdir(tmp_path / "a")
    assert home_of(path, FILES).inode == os.stat(tmp_path / "a").st_ino
    os.mkdir(path)
    assert home_of(path, FILES).inode == os.stat(path).st_ino


def test_it_is_there_until_it_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a" / "b"
    path.mkdir(parents=True)
    found = home_of(str(path), FILES)
    assert is_at_home(str(path), found, FILES)
    path.rmdir()
    assert not is_at_home(str(path), found, FILES)


def test_the_holder_counts_while_nothing_was_made_in_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "b"
    found = home_of(str(path), FILES)
    assert is_at_home(str(path), found, FILES)
    path.mkdir()
    assert is_at_home(str(path), found, FILES), "made since"


def test_one_made_anew_with_the_number_of_the_old_one_is_another(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.mkdir()
    found = home_of(str(path), FILES)
    old = Home(found.inode, found.birth_ns - 1 if found.birth_ns else 0)
    monkeypatch.setattr(home, "birth_ns", lambda _: 7)
    assert not is_at_home(str(path), Home(found.inode, 8), FILES)
    assert is_at_home(str(path), Home(found.inode, 0), FILES), "who cannot know does not doubt"
    monkeypatch.setattr(home, "birth_ns", lambda _: 0)
    assert is_at_home(str(path), old, FILES)


def test_what_nobody_has_seen_is_not_missed(tmp_path: pathlib.Path) -> None:
    assert is_at_home(str(tmp_path / "nothing"), NO_HOME, FILES)


def test_a_birth_is_known_or_nought(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    born = home.birth_ns(str(path))
    assert born == 0 or abs(born - os.stat(path).st_mtime_ns) < 10**9
    assert home.birth_ns(str(tmp_path / "nothing")) == 0


def test_storage_that_does_not_answer_is_no_home(tmp_path: pathlib.Path) -> None:
    class Broken(Files):
        def stat(self, path: str) -> os.stat_result:
            raise OSError(5, "simulated")

    assert home_of(str(tmp_path), Broken()) == NO_HOME
