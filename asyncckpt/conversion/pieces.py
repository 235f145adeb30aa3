"""What a target's files are made of: bytes that are known, and the elements of tensors that are yet to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncckpt.format.archive import Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """One file, front to back.

    Attributes:
        name: Below the target's directory; of a single file, anything.
        pieces: Its content in order.
        crc_at: (number of a payload among the pieces, offset in the file): where its CRC-32 is put afterwards.
        digest_blocks: Whether the file's blocks are digested, as an index of ours wants it.
    """

    name: str
    pieces: tuple[bytes | Payload, ...]
    crc_at: tuple[tuple[int, int], ...] = ()
    digest_blocks: bool = False

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return sum(map(length_of, self.pieces))


def length_of(piece: bytes | Payload) -> int:
    """Return the bytes of a piece."""
    return len(piece) if isinstance(piece, bytes) else piece.nbytes


@dataclass(slots=True)
class Target:
    """What a conversion writes.

    Attributes:
        files: In the order in which they are written. One without a directory: the file itself.
        is_directory: Whether the target is one.
        finish: Writes what depends on the digests of the files: (directory, digests by file name). None: nothing.
        keeps_nesting: Whether a reader finds the same containers, with keys of the same types, and the same ties.
    """

    files: Sequence[OutputFile]
    is_directory: bool
    finish: Callable[[str, dict[str, bytes]], None] | None = None
    keeps_nesting: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are known in advance."""
        return sum(file.nbytes for file in self.files)
