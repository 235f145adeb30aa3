"""What this process makes of the paths that a user gives: absolute ones, and the umask of what is made there."""

from __future__ import annotations

import os
import re
from typing import Any

from asyncckpt.errors import UnsupportedPathError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

MAX_PATH_BYTES = 4000
"""Of UTF-8. Linux takes 4096 with the terminating zero (PATH_MAX); the rest is for our file names."""


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return `path` with `~` expanded and made absolute against this process's working directory.

    Raises:
        UnsupportedPathError: Empty, a URL, not text, or with a NUL byte.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise UnsupportedPathError(
            f"path is a {type(path).__name__}, expected str or PathLike", path=repr(path)
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UnsupportedPathError(f"path {text!r} is no directory path", path=repr(text))
    if _SCHEME.match(text):
        raise UnsupportedPathError(
            f"path {text!r} is a URL; only directories of a mounted file system are supported", path=text
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedPathError(f"path {text!r} is not valid text", path=repr(text)) from None
    absolute = os.path.abspath(os.path.expanduser(text))
    if len(absolute.encode()) > MAX_PATH_BYTES:
        raise UnsupportedPathError(f"the path is longer than {MAX_PATH_BYTES} bytes: {absolute[:80]}...", path=absolute)
    return absolute


def is_local_path(path: Any) -> bool:
    """Whether `path` is one of this machine's file systems, as `absolute_path` takes it."""
    try:
        absolute_path(path)
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
