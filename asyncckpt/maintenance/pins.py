"""Pins: marks of checkpoints that retention must not remove. They are files in the root, so they survive restarts.

Each pin is a file `<root>/.pins/<name of the checkpoint's directory>`, which is created and removed in one step, and
flushed. Pinning, removing and replacing a checkpoint all hold the lock of its directory. So once `pin` has returned,
the checkpoint stays.
"""

from __future__ import annotations

import contextlib
import os

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.checkpoint_dir import PINS_NAME, pin_of
from asyncckpt.storage.commit import LOCK_TIMEOUT_S
from asyncckpt.storage.store import Store


def pinned_in(root: str, store: Store) -> frozenset[str]:
    """Return the names of the directories in `root` that are pinned.

    Raises:
        OSError: The pins cannot be read; nothing may be removed then.
    """
    try:
        return frozenset(store.names(os.path.join(root, PINS_NAME)))
    except FileNotFoundError:
        return frozenset()


def pin(path: str, store: Store) -> None:
    """Pin the committed checkpoint at `path`, durably. Idempotent.

    If `path` is a symbolic link to another directory of the same root, that directory is pinned, as retention goes by
    the directory's own name.

    Args:
        path: Absolute path of the checkpoint's directory; the pin goes into the directory above it.
        store: Store that holds it.

    Raises:
        CheckpointNotFoundError, CheckpointNotCommittedError: There is no committed checkpoint at `path`.
        CorruptCheckpointError, UnsupportedFormatError: Its manifest cannot be read.
        OSError: A call failed; the checkpoint may be pinned or not.

    Blocks: for the lock of the directory, at most `commit.LOCK_TIMEOUT_S`.
    """
    path = _pinned_directory(path, store)
    read_manifest(path, store)
    root, directory = os.path.dirname(path), os.path.dirname(pin_of(path))
    try:
        # IMPORTANT: read the manifest under the lock: a checkpoint that is about to be removed must not be pinned.
        with store.lock(path, LOCK_TIMEOUT_S):
            read_manifest(path, store)
            store.make_prefix(directory, durable=False)
            store.sync(root)  # IMPORTANT: the process that made the directory may have died before flushing its name
            with contextlib.suppress(FileExistsError):
                store.put(pin_of(path), b"")
            store.sync(directory)
    except FileNotFoundError as error:
        read_manifest(path, store)  # raises if the checkpoint was removed
        raise CheckpointNotFoundError(f"{path} was removed while it was pinned", path=path) from error


def unpin(path: str, store: Store) -> bool:
    """Remove the pin of the checkpoint at `path`, which may be gone. Returns whether it was pinned.

    Raises:
        OSError: A call failed.
    """
    path = _pinned_directory(path, store)
    try:
        store.remove(pin_of(path))
    except FileNotFoundError:
        return False
    store.sync(os.path.dirname(pin_of(path)))
    return True


def _pinned_directory(path: str, store: Store) -> str:
    """Return `path`, or the directory beside it that it links to, as a link `latest` does."""
    found = store.resolve(path)
    is_beside = os.path.dirname(found) == store.resolve(os.path.dirname(path))
    return os.path.join(os.path.dirname(path), os.path.basename(found)) if is_beside else path
