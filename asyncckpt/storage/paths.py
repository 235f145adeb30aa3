"""What users may pass as a path, made absolute."""

from __future__ import annotations

import os
import re

from asyncckpt.errors import UnsupportedPathError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def directory_path(path: str | os.PathLike[str]) -> str:
    """Return `path` absolute and normalised, `~` expanded; links are left as they are.

    Raises:
        UnsupportedPathError: Empty, a URL, with a NUL byte, or of another type than str or PathLike.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise UnsupportedPathError(
            f"{path!r} is no path: pass a str or os.PathLike that names a directory", path=str(path)
        )
    if _SCHEME.match(text):
        raise UnsupportedPathError(
            f"{text} is a URL; only directories of a mounted file system are supported", path=text
        )
    return os.path.abspath(os.path.expanduser(text))
