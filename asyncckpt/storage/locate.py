"""Which storage a path or URL means: files of this machine, or an object store."""

from __future__ import annotations

import threading

from asyncckpt.basics.urls import is_object_url, location_of
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import DEFAULT_UMASK, store_over
from asyncckpt.storage.store import Store

_lock = threading.Lock()
_stores: dict[str, ObjectStore] = {}
"""By bucket: connections are kept from one use to the next."""


def files_at(path: str, files: Files | None = None) -> Files:
    """Return the calls by which the checkpoint at `path` is read.

    Args:
        path: An absolute path, or a URL as `checkpoint_path` returns it.
        files: The seam to this machine's files; None: as the kernel has them.

    Raises:
        UnsupportedPathError: A URL, and obstore is not installed, or the environment does not say how to reach it.
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
    """Return the store that holds `path`; arguments and errors as of `files_at`."""
    return store_over(files_at(path), umask=umask)
