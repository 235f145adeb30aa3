"""Returns the store of a path or URL: files of this machine, or an object store."""

from __future__ import annotations

import threading

from asyncckpt.basics.urls import is_object_url, location_of
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import DEFAULT_UMASK, store_over
from asyncckpt.storage.store import Store

_lock = threading.Lock()
_stores: dict[str, ObjectStore] = {}
"""Stores by bucket. They are kept so that their connections are reused."""


def files_at(path: str, files: Files | None = None) -> Files:
    """Return the `Files` with which the checkpoint at `path` is read.

    Args:
        path: An absolute path, or a URL as `checkpoint_path` returns it.
        files: The `Files` for paths of this machine; None: a new `Files`.

    Raises:
        UnsupportedPathError: `path` is a URL, and obstore is not installed, or the environment lacks the settings with
            which to reach the store.
    """
    if not is_object_url(path):
        return files or Files()
    root = location_of(path).root
    with _lock:
        store = _stores.get(root)
        if store is None:
            store = _stores[root] = ObjectStore(root)
    return store.as_files()


def store_at(path: str, *, umask: int = DEFAULT_UMASK) -> Store:
    """Return the store that holds `path`.

    Args:
        path: As of `files_at`.
        umask: As of `LocalStore`.

    Raises:
        UnsupportedPathError: As `files_at`.
    """
    return store_over(files_at(path), umask=umask)
