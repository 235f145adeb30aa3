"""The leaves of a checkpoint that are not tensors, read rank by rank when they are first wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncckpt.errors import AsyncCkptError, PickledLeafError
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf, unread_error, unread_leaves
from asyncckpt.state_dict.flatten import object_fqn
from asyncckpt.state_dict.leaf_codecs import decode_leaf
from asyncckpt.state_dict.pickling import unpickle
from asyncckpt.storage.contents import Contents, corrupt, read_objects
from asyncckpt.storage.files import Files


class SavedObjects:
    """See the module. Keeps what it read.

    Args:
        contents: The checkpoint.
        files: The storage seam.
        allow_pickle: Whether leaves that were pickled are unpickled, which runs whatever they say; else refused.
    """

    def __init__(self, contents: Contents, files: Files, *, allow_pickle: bool = False) -> None:
        self._contents, self._files, self._allow_pickle = contents, files, allow_pickle
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
            PickledLeafError: It was pickled, and may not be unpickled, or cannot.
            UnsupportedFormatError: As `raw`; or as `refuse_unread`.
            OSError: As `raw`.
        """
        self.refuse_unread([(rank, number)])
        raw = self.raw(rank)[number]

        def from_pickle(kind: str, data: bytes) -> Any:
            if not self._allow_pickle:
                raise self._refusal(rank, number, kind)
            try:
                return unpickle(data)
            except Exception as error:
                raise self._refusal(rank, number, kind, f"{type(error).__name__}: {error}") from error

        try:
            return decode_leaf(raw, from_pickle)
        except AsyncCkptError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            name = self._contents.ranks[rank].index.objects.name
            raise corrupt(self._contents.path, name, f"object {number} does not decode: {error}") from error

    def refuse_unread(self, numbers: Iterable[tuple[int, int]]) -> None:
        """Raise what is to be raised for leaves that are wanted and of another format, and were not read.

        Args:
            numbers: (rank, the rank's own number) of objects that are wanted.

        Raises:
            UnsupportedFormatError: Some were not read; names all of them.
        """
        if self._contents.source is None:
            return
        wanted = {number for rank, number in numbers if isinstance(self.raw(rank)[number], UnreadLeaf)}
        if wanted:
            raise unread_error(self._contents.path, unread_leaves(self._contents, wanted))

    def _refusal(self, rank: int, number: int, kind: str, failure: str | None = None) -> PickledLeafError:
        path, fqn = self._contents.path, object_fqn(self._contents.ranks[rank].structure.tree, number)
        if failure is None:
            why = "and unpickling runs code. Pass allow_pickle=True if you trust who wrote it, or leave it out by keys"
        else:
            why = f"and unpickling it failed: {failure}"
        return PickledLeafError(
            f"{path}: {fqn!r} was stored as a pickle of {kind}, {why}; nothing was changed",
            path=path,
            fqn=fqn,
            type_name=kind,
            detail=failure,
        )
