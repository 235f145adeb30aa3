"""The leaves of a checkpoint that are not tensors, read rank by rank when they are first wanted."""

from __future__ import annotations

from typing import Any

from asyncckpt.planning.torch_types import decode_object
from asyncckpt.storage.contents import Contents, corrupt, read_objects
from asyncckpt.storage.files import Files


class SavedObjects:
    """See the module. Keeps what it read."""

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents, self._files = contents, files
        self._read: dict[int, list[Any]] = {}

    def raw(self, rank: int) -> list[Any]:
        """Return the JSON forms of `rank`'s objects, by its own numbers.

        Raises:
            CorruptCheckpointError: The file is damaged or missing.
            UnsupportedFormatError: Written by a newer version.
            OSError: It cannot be read.
        """
        if rank not in self._read:
            self._read[rank] = read_objects(self._contents, rank, self._files)
        return self._read[rank]

    def value(self, rank: int, number: int) -> Any:
        """Return the value of `rank`'s object `number`, a new one each time.

        Raises:
            CorruptCheckpointError: As `raw`; or it does not decode.
            UnsupportedFormatError, OSError: As `raw`.
        """
        raw = self.raw(rank)[number]
        try:
            return decode_object(raw)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            name = self._contents.ranks[rank].index.objects.name
            raise corrupt(self._contents.path, name, f"object {number} does not decode: {error}") from error
