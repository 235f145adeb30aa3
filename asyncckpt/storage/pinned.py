"""Where a pin lies that protects a checkpoint from retention and from being replaced; `retention.pins` makes them."""

from __future__ import annotations

import os

from asyncckpt.storage.files import Files

PINS_NAME = ".pins"
"""Of the directory beside the checkpoints."""


def pin_of(path: str) -> str:
    """Return the path of the pin of the checkpoint at `path`."""
    root, name = os.path.split(path)
    return os.path.join(root, PINS_NAME, name)


def is_pinned(path: str, files: Files) -> bool:
    """Whether the checkpoint at `path` is pinned.

    Raises:
        OSError: It cannot be known.
    """
    try:
        files.lstat(pin_of(path))
    except FileNotFoundError:
        return False
    return True
