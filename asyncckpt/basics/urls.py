"""URLs of checkpoints in object stores, such as `s3://bucket/runs/a/step-100`."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from asyncckpt.errors import UnsupportedPathError

SCHEMES = {"s3": "Amazon S3 and compatible stores", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}

MAX_URL_BYTES = 900
"""Keys of S3 and GCS have at most 1,024 bytes of UTF-8; the rest is for our file names."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


class Location(NamedTuple):
    """A place in an object store.

    Attributes:
        root: Scheme and bucket, such as `s3://bucket`.
        key: What follows, without a slash at either end; empty: the bucket itself.
    """

    root: str
    key: str


def is_object_url(path: str) -> bool:
    """Return whether `path` begins with the scheme of an object store."""
    found = _SCHEME.match(path)
    return found is not None and found[1] in SCHEMES


def normalized_url(url: str) -> str:
    """Return `url` without a slash at its end.

    Raises:
        UnsupportedPathError: Another scheme, no bucket, credentials, a query, or a key that not all stores take.
    """
    found = _SCHEME.match(url)
    scheme = "" if found is None else found[1]
    if scheme not in SCHEMES:
        listed = ", ".join(f"{name}:// ({what})" for name, what in SCHEMES.items())
        # IMPORTANT: not the URL itself, which may hold a password.
        raise UnsupportedPathError(
            f"path is a URL of scheme {scheme!r}; expected a directory or one of {listed}", path=f"{scheme}://"
        )
    bucket, _, key = url[len(scheme) + 3 :].partition("/")
    if "@" in bucket or "?" in url or "#" in url:
        raise UnsupportedPathError(
            f"a {scheme}:// URL has a part that is not a bucket or a key (a user, a query or a fragment); give "
            "credentials by the environment or by storage_options=",
            path=f"{scheme}://",
        )
    if _BUCKET.fullmatch(bucket) is None:
        raise UnsupportedPathError(f"path {url!r} names no bucket; expected {scheme}://BUCKET/KEY", path=url)
    key = key.rstrip("/")
    if any(part in ("", ".", "..") or not part.isprintable() for part in key.split("/")) and key:
        raise UnsupportedPathError(
            f"path {url!r} has an empty part, '.', '..' or a control character in its key", path=url
        )
    if scheme == "az" and "\\" in key:
        raise UnsupportedPathError(f"path {url!r} has a backslash in its key, which Azure takes for a slash", path=url)
    if len(key.encode()) > MAX_URL_BYTES:
        raise UnsupportedPathError(f"the key is longer than {MAX_URL_BYTES} bytes: {url[:80]}...", path=url)
    return f"{scheme}://{bucket}/{key}".rstrip("/")


def parent_of(path: str) -> str:
    """Return what holds `path`, a path or URL; the root of a file system and a bucket hold themselves."""
    return path if is_object_url(path) and not location_of(path).key else os.path.dirname(path)


def location_of(url: str) -> Location:
    """Return bucket and key of a URL that `normalized_url` has returned, or of what is below one."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return Location(f"{scheme}://{bucket}", key)
