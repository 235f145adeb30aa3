"""Checks paths that a user gives and makes them absolute; reads this process's umask."""

from __future__ import annotations

import os
import re
from typing import Any

from asyncckpt.basics.urls import SCHEMES, normalized_url
from asyncckpt.errors import UnsupportedPathError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_PATHLIB_URL = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)")
"""Begins a URL of an object store that pathlib has normalized: it keeps one of two slashes."""

MAX_PATH_BYTES = 4000
"""Longest path of a directory, in UTF-8. Linux allows 4096 with the terminating zero (PATH_MAX); the rest is for our
file names."""


def is_url(path: str) -> bool:
    """Return whether `path` has the form of a URL, of whatever scheme."""
    return _SCHEME.match(path) is not None


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Return `path` as `absolute_path` does, or the URL of an object store without a slash at its end.

    Raises:
        UnsupportedPathError: As `absolute_path`, but URLs are refused only if they name no place in an object store.
    """
    text = _text(path)
    return normalized_url(text) if is_url(text) else _absolute(text)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return `path` with `~` expanded and made absolute against this process's working directory.

    Raises:
        UnsupportedPathError: It is empty, a URL, also one that `pathlib` has made a path, too long, not text, or has a
            NUL byte; or it is relative, and the working directory was removed.
    """
    text = _text(path)
    if is_url(text):
        raise UnsupportedPathError(
            f"path {text.partition('?')[0]!r} is a URL; only directories of a mounted file system are supported here",
            path=text.partition("?")[0],
        )
    return _absolute(text)


def _absolute(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedPathError(f"path {text!r} is not valid text", path=repr(text)) from None
    try:
        absolute = os.path.abspath(os.path.expanduser(text))
    except FileNotFoundError:
        raise UnsupportedPathError(
            f"path {text!r} is relative, and this process's working directory was removed; give an absolute path",
            path=text,
        ) from None
    if len(absolute.encode()) > MAX_PATH_BYTES:
        raise UnsupportedPathError(f"the path is longer than {MAX_PATH_BYTES} bytes: {absolute[:80]}...", path=absolute)
    return absolute


def _text(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise UnsupportedPathError(
            f"path is a {type(path).__name__}, expected str or PathLike", path=repr(path)
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UnsupportedPathError(f"path {text!r} is not the path of a directory", path=repr(text))
    collapsed = _PATHLIB_URL.match(text)
    if collapsed is not None:
        scheme = collapsed[1]
        # IMPORTANT: not the path itself, which may hold a password.
        raise UnsupportedPathError(
            f"path begins with '{scheme}:/', expected '{scheme}://': pathlib removes a slash of a URL; give the URL as "
            "a str, not as a Path",
            path=f"{scheme}:/",
        )
    return text


def is_local_path(path: Any) -> bool:
    """Whether `absolute_path` accepts `path`: it is a path in this machine's file systems."""
    try:
        absolute_path(path)
    except UnsupportedPathError:
        return False
    return True


def is_checkpoint_path(path: Any) -> bool:
    """Whether `checkpoint_path` accepts `path`."""
    try:
        checkpoint_path(path)
    except UnsupportedPathError:
        return False
    return True


def current_umask() -> int:
    """Return this process's umask without changing it (proc(5): Umask in status, since Linux 4.7)."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
