"""Returns the store of a path or URL: files of this machine, or an object store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from asyncckpt.basics.storage_options import FIELD, NO_OPTIONS, StorageOptions
from asyncckpt.basics.urls import is_object_url, location_of
from asyncckpt.errors import ConfigError, UnsupportedPathError
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import DEFAULT_UMASK, LocalStore
from asyncckpt.storage.store import Store

MAX_STORES = 64
"""Whose connections are kept at the same time: by bucket, options and `brief`."""

_lock = threading.Lock()
_stores: dict[tuple[str, StorageOptions, bool], ObjectStore] = {}
"""Stores by bucket, options and `brief`. They are kept so that their connections are reused."""

_options: ContextVar[StorageOptions] = ContextVar("asyncckpt storage options", default=NO_OPTIONS)
"""Options of the call or job that is running in this thread."""


@contextlib.contextmanager
def with_storage_options(options: Mapping[str, str] | None) -> Iterator[None]:
    """Let `files_at` and `store_at` open object stores with these options, in this thread until the block ends.

    Args:
        options: Options by obstore's names. None or empty: those of the enclosing block, or none.

    Raises:
        ConfigError: They are not a map of text to text.
    """
    if not options:
        yield
        return
    token = _options.set(options if isinstance(options, StorageOptions) else StorageOptions(options))
    try:
        yield
    finally:
        _options.reset(token)


def files_at(path: str, files: Files | None = None) -> Files:
    """Return the `Files` with which the checkpoint at `path` is read.

    Args, Raises: as `store_at`.
    """
    return _object_store(path, False).as_files() if is_object_url(path) else files or Files()


def store_at(path: str, files: Files | None = None, *, umask: int = DEFAULT_UMASK, brief: bool = False) -> Store:
    """Return the store that holds `path`.

    Args:
        path: An absolute path, or a URL as `checkpoint_path` returns it.
        files: The `Files` for paths of this machine; None: a new `Files`.
        umask: As of `LocalStore`.
        brief: As of `ObjectStore`.

    Raises:
        UnsupportedPathError: `path` is a URL, and obstore is not installed, or the environment lacks the settings with
            which to reach the store.
        ConfigError: An option is unknown to this kind of store, or has a value that it cannot have.
    """
    return _object_store(path, brief) if is_object_url(path) else LocalStore(files, umask=umask)


def _object_store(url: str, brief: bool) -> ObjectStore:
    """Return the store of a URL's bucket, with the options of the block."""
    root, options = location_of(url).root, _options.get()
    with _lock:
        store = _stores.get((root, options, brief))
        if store is None:
            while len(_stores) >= MAX_STORES:
                del _stores[next(iter(_stores))]
            store = _stores[root, options, brief] = _opened(root, options, brief)
    return store


def _opened(root: str, options: StorageOptions, brief: bool) -> ObjectStore:
    try:
        return ObjectStore(root, options, brief=brief)
    except UnsupportedPathError as error:
        if not options or isinstance(error.__cause__, ImportError):
            raise
        text = f"{FIELD} with {', '.join(sorted(options))}: {error}; the values are not shown"
        raise ConfigError(text, field=FIELD) from None
