"""Reading a checkpoint that may be overwritten meanwhile: all of what is read is of one save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.foreign.kinds import read_any
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import owner_of
from asyncckpt.storage.contents import Contents, OnIndex
from asyncckpt.storage.files import Files
from asyncckpt.storage.standing import standing_at

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


def read_of_one_save(path: str, files: Files, use: Callable[[Contents], T], on_index: OnIndex | None = None) -> T:
    """Return what `use` makes of the checkpoint at `path`; begin again when another has taken its place meanwhile.

    Raises:
        AsyncCkptError, OSError: From `read_any` and `use`.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return use(read_any(path, files, on_index))
        except CorruptCheckpointError as error:
            owner = owner_of(error.file or "")
            standing = standing_at(path, files) if owner is not None else None
            # A file that is missing or damaged, of the checkpoint that stands, is what it looks like.
            if owner is None or standing is None or standing.save_id == owner or attempt == MAX_ATTEMPTS:
                raise
            _logger.info("%s was overwritten by save %s while it was read: reading that one", path, standing.save_id)
    raise AssertionError("the last attempt returns or raises")
