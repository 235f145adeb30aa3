"""What reading a checkpoint of another format needs beyond `Contents`: where the elements of its chunks lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from asyncckpt.storage.files import Files


class Located(NamedTuple):
    """Row-major elements of a chunk, from byte `offset` of shard number `part` on."""

    part: int
    offset: int


class Strided(NamedTuple):
    """Elements of a chunk that are not row-major in their file.

    The range of `nbytes` at byte `offset` of shard `part` holds all of them: `itemsize` bytes each, `strides` apart, in
    elements.
    """

    part: int
    offset: int
    nbytes: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Latin1(NamedTuple):
    """Row-major elements of a chunk as a text of UTF-8, whose characters are their bytes: see `storage.latin1`.

    The text lies in the `nbytes` at byte `offset` of shard `part`; `firsts` are those of its steps of `step` bytes.
    """

    part: int
    offset: int
    nbytes: int
    step: int
    firsts: tuple[int, ...]


class Inline(NamedTuple):
    """Row-major elements that were read with the structure already."""

    data: bytes


Place = Located | Strided | Latin1 | Inline


class Source(Protocol):
    """The reading side of a foreign format.

    A chunk's `part` numbers either a file or something that `place` resolves; its offset counts from there.
    """

    @property
    def kind(self) -> str:
        """`dcp`, `torch`, `safetensors` or `hf`."""

    @property
    def directory(self) -> str:
        """Where the shards' names begin."""

    @property
    def objects(self) -> Sequence[Any]:
        """The JSON forms of the object leaves, by number."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What the format keeps beside the leaves, such as a safetensors file's `__metadata__`."""

    @property
    def archives(self) -> Sequence[tuple[str, int, int]]:
        """The zip archives that the data lie in, whose entries carry a CRC-32: (file name, offset, length)."""

    @property
    def in_pickles(self) -> Mapping[int, Mapping[int, tuple[int, int]]]:
        """Long bytes that lie in pickles, by part and where they begin there: length, and the CRC-32 that they had."""

    @property
    def stamps(self) -> Mapping[str, tuple[int, ...]]:
        """What tells, on this machine, that the files are those that the structure was read from: by file name."""

    @property
    def changed(self) -> Mapping[str, Mapping[str, str]]:
        """What is read in another form than it was written: by sentence, the FQNs and what is added to each."""

    def place(self, part: int, files: Files) -> Place:
        """Say where the elements of part `part` begin.

        Raises:
            CorruptCheckpointError: They are not there as the structure says.
            OSError: It cannot be read.
        """

    def check_unchanged(self, files: Files, names: Iterable[str] | None = None) -> None:
        """Look whether files are those that the structure was read from. The formats name no save in their data.

        Args:
            files: The storage seam.
            names: Of the files; None looks at all.

        Raises:
            CorruptCheckpointError: One was changed, replaced or removed since; names it.
            OSError: It cannot be known.
        """
