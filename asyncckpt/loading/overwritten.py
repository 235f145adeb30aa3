"""Reading a checkpoint that may be overwritten meanwhile: all of what is read is of one save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import owner_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage.checkpoint_dir import standing_at
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

MAX_ATTEMPTS = 10
"""A read that is slower than so many saves in a row gives up. Chosen, not measured."""

T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.loading")


@dataclass(slots=True)
class Attempts:
    """What several reads have made of one target.

    Attributes:
        touched: FQNs of it that hold values of one of these reads, or parts of them.
        manifest: Of the checkpoint that was read last.
    """

    touched: set[str] = field(default_factory=set)
    manifest: Manifest | None = None


def read_of_one_save(path: str, files: Files, use: Callable[[Contents], T]) -> T:
    """Return what `use` makes of the checkpoint at `path`; begin again when another has taken its place meanwhile.

    Raises:
        AsyncCkptError, OSError: From `read_any` and `use`.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return use(read_any(path, files))
        except CorruptCheckpointError as error:
            owner = owner_of(error.file or "")
            standing = standing_at(path, LocalStore(files)) if owner is not None else None
            # A file that is missing or damaged, of the checkpoint that stands, is what it looks like.
            if owner is None or standing is None or standing.save_id == owner or attempt == MAX_ATTEMPTS:
                raise
            _logger.info("%s was overwritten by save %s while it was read: reading that one", path, standing.save_id)
    raise AssertionError("the last attempt returns or raises")
