"""A user's path becomes the absolute path of a directory, or is refused."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from asyncckpt.basics.paths import absolute_path
from asyncckpt.errors import UnsupportedPathError


def test_relative_paths_are_of_this_process_s_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_path("runs/../a//b/") == f"{tmp_path}/a/b"
    assert absolute_path(pathlib.Path("x")) == f"{tmp_path}/x"
    assert absolute_path(".") == str(tmp_path)


def test_a_relative_path_is_refused_if_the_working_directory_was_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "removed"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    with pytest.raises(UnsupportedPathError, match="working directory was removed"):
        absolute_path("runs/a")
    assert absolute_path("/runs/a") == "/runs/a"


def test_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert absolute_path("~/runs") == "/home/somebody/runs"
    assert absolute_path("a/~") == os.path.abspath("a/~")


@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://b", "HTTP://x/y", "file:///tmp/x", "a+b.c-1://x"])
def test_urls_are_refused(path: str) -> None:
    with pytest.raises(UnsupportedPathError, match="URL") as caught:
        absolute_path(path)
    assert caught.value.path == path


@pytest.mark.parametrize("path", ["", "a\0b", b"/bytes", None, 5, ["x"], "\ud800"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UnsupportedPathError) as caught:
        absolute_path(path)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("path", ["/a:b", "/x//y", "1://x", "/s3:/x", "/grüße"])
def test_unusual_names_are_accepted(path: str) -> None:
    assert absolute_path(path) == os.path.abspath(path)
