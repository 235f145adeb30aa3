"""Pins: checkpoints that retention must not remove, kept in the root so that they survive every restart.

One file for each, `<root>/.pins/<name of the checkpoint's directory>`: made and removed in one step, and flushed. Who
pins, who removes and who replaces hold the lock of the checkpoint's directory, so that one of them comes first: a pin
that has returned holds.
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
        OSError: It cannot be known; then nothing may be removed.
    """
    try:
        return frozenset(store.names(os.path.join(root, PINS_NAME)))
    except FileNotFoundError:
        return frozenset()


def pin(path: str, store: Store) -> None:
    """Pin the committed checkpoint at `path`; again is fine. It is durable when this returns.

    Args:
        path: Absolute path of its directory; the pin goes into the directory above it.
        store: Where it lies.

    A link to another directory of the same root stands for that one: what retention removes goes by its own name.

    Raises:
        CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
        CorruptCheckpointError, UnsupportedFormatError: Its manifest cannot be read.
        OSError: A call failed; it may be pinned or not.

    Blocks: for who commits or removes there, at most `commit.LOCK_TIMEOUT_S`.
    """
    path = _meant(path, store)
    read_manifest(path, store)
    root, directory = os.path.dirname(path), os.path.dirname(pin_of(path))
    try:
        # IMPORTANT: the lock, and then the look: a checkpoint that is about to be removed must not get a pin.
        with store.lock(path, LOCK_TIMEOUT_S):
            read_manifest(path, store)
            store.make_prefix(directory, durable=False)
            store.sync(root)  # IMPORTANT: who made the directory may have died before that
            with contextlib.suppress(FileExistsError):
                store.put(pin_of(path), b"")
            store.sync(directory)
    except FileNotFoundError as error:
        read_manifest(path, store)  # says that it is gone
        raise CheckpointNotFoundError(f"{path} was removed while it was pinned", path=path) from error


def unpin(path: str, store: Store) -> bool:
    """Take the pin off the checkpoint at `path`, which need not be there any more. Returns whether it was pinned.

    Raises:
        OSError: A call failed.
    """
    path = _meant(path, store)
    try:
        store.remove(pin_of(path))
    except FileNotFoundError:
        return False
    store.sync(os.path.dirname(pin_of(path)))
    return True


def _meant(path: str, store: Store) -> str:
    """Return the directory that a name like `latest` stands for, if that lies beside it."""
    found = store.resolve(path)
    is_beside = os.path.dirname(found) == store.resolve(os.path.dirname(path))
    return os.path.join(os.path.dirname(path), os.path.basename(found)) if is_beside else path
