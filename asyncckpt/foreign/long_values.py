"""Long bytes in a pickle, and where the pickle itself lies: nobody has to hold either as a whole.

Of a pickle in a file long bytes stay where they are: what stands for them says where, and tensors are read from there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from asyncckpt.foreign import refusals
from asyncckpt.foreign.refusals import TooLargeError
from asyncckpt.foreign.zip_directory import ReadAt
from asyncckpt.storage import latin1

LONG_NBYTES = 64 * 1024
"""Of bytes, as a pickle holds them: longer ones stay where they are. As many are a leaf that lies where tensors do."""


class Pickle(Protocol):
    """The bytes of one pickle, or of several behind one another."""

    nbytes: int

    def read(self, at: int, nbytes: int) -> bytes:
        """Return bytes from `at` on, all of which there are."""

    def hold(self, at: int, nbytes: int) -> bytes:
        """The same, to be held."""


class HeldPickle:
    """A pickle in memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes = data, len(data)

    def read(self, at: int, nbytes: int) -> bytes:
        """Return bytes from `at` on."""
        return self.data[at : at + nbytes]

    hold = read


class FilePickle:
    """A pickle in a file, read front to back; parts of it may be read again.

    Args:
        read_at: Reads from the file, or from the archive in it.
        start, nbytes: Where it lies there.

    Attributes:
        crc: CRC-32 of everything that was read, from the beginning on.
        held: Bytes of long values that are held after all.
    """

    def __init__(self, read_at: ReadAt, start: int, nbytes: int) -> None:
        self._read_at, self.start, self.nbytes = read_at, start, nbytes
        self.crc = self._summed = self.held = 0

    def read(self, at: int, nbytes: int) -> bytes:
        """Return bytes from `at` on; nothing may have been left out before them."""
        data = self._read_at(self.start + at, nbytes)
        assert at <= self._summed, "its CRC-32 is of everything, in order"
        if at + nbytes > self._summed:
            self.crc = zlib.crc32(memoryview(data)[self._summed - at :], self.crc)
            self._summed = at + nbytes
        return data

    def hold(self, at: int, nbytes: int) -> bytes:
        """Return bytes from `at` on that will be held.

        Raises:
            TooLargeError: With those that are they would be too many.
        """
        self.held += nbytes
        if self.held > refusals.MAX_NBYTES:
            raise TooLargeError(self.held)
        return self.read(at, nbytes)

    def read_up_to(self, end: int) -> None:
        """Read what nobody has read before byte `end`."""
        for _ in steps(self, self._summed, end - self._summed):
            pass


def steps(pickle: Pickle, at: int, nbytes: int) -> Iterator[bytes]:
    """Yield bytes from `at` on, a step at a time."""
    for done in range(0, nbytes, latin1.STEP_NBYTES):
        yield pickle.read(at + done, min(latin1.STEP_NBYTES, nbytes - done))


class LongBytes:
    """Bytes that lie in a file, as themselves or as a text of latin1.

    Args:
        pickle: That they are in.
        at, held_nbytes: Where in it they lie.
        nbytes, crc: How many they are, and their CRC-32.
        firsts: Of a text, as `latin1.Looked` has them; None: the bytes themselves.
        kind: `bytes`, or `bytearray`.

    Attributes:
        start: Where they lie in what the pickle was read from.
    """

    __slots__ = ("_at", "_pickle", "_whole", "crc", "firsts", "held_nbytes", "kind", "nbytes", "start", "step")

    def __init__(
        self,
        pickle: FilePickle,
        at: int,
        held_nbytes: int,
        nbytes: int,
        crc: int,
        firsts: tuple[int, ...] | None = None,
        kind: type[bytes | bytearray] = bytes,
    ) -> None:
        self._pickle, self._at, self.kind = pickle, at, kind
        self._whole: bytes | bytearray | None = None
        self.held_nbytes, self.nbytes, self.crc = held_nbytes, nbytes, crc
        self.start, self.firsts, self.step = pickle.start + at, firsts, latin1.STEP_NBYTES

    def __len__(self) -> int:
        return self.nbytes

    def whole(self) -> bytes | bytearray:
        """Return them: as long as the file is open, or once more.

        Raises:
            TooLargeError: Too many of them are held.
            ValueError: It is no such text any more.
            OSError: They cannot be read.
        """
        if self._whole is None:  # IMPORTANT: once. A pickle may name them over and over
            data = self._pickle.hold(self._at, self.held_nbytes)
            self._whole = self.kind(data) if self.firsts is None else latin1.decoded(data)
        return self._whole


class LongText:
    """A long text that is to be encoded, as pickles of protocol 2 hold bytes: it is looked at in steps.

    Args:
        pickle: That it is in.
        at, nbytes: Where its UTF-8 lies there.
    """

    __slots__ = ("_at", "_found", "_nbytes", "_pickle", "_text")

    def __init__(self, pickle: Pickle, at: int, nbytes: int) -> None:
        self._pickle, self._at, self._nbytes = pickle, at, nbytes
        self._found: bytes | LongBytes | ValueError | None = None
        self._text: str | None = None
        if isinstance(pickle, FilePickle):
            try:
                self._found = LongBytes(pickle, at, nbytes, *latin1.looked_through(steps(pickle, at, nbytes)))
            except ValueError as error:
                self._found = error
            pickle.read_up_to(at + nbytes)

    def __len__(self) -> int:
        return self._nbytes

    def latin1(self) -> bytes | LongBytes:
        """Return it encoded.

        Raises:
            ValueError: No UTF-8, or characters that are no bytes.
        """
        if self._found is None:
            self._found = self._pickle.read(self._at, self._nbytes).decode().encode("latin1")
        if isinstance(self._found, ValueError):
            raise self._found
        return self._found

    def text(self) -> str:
        """Return it as the text that it is: nothing encodes it.

        Raises:
            TooLargeError: As `LongBytes.whole`.
            ValueError: No UTF-8.
        """
        if self._text is None:
            self._text = self._pickle.hold(self._at, self._nbytes).decode("utf-8", "surrogatepass")
        return self._text


def skipped(pickle: FilePickle, at: int, nbytes: int, kind: type[bytes | bytearray]) -> LongBytes:
    """Return what stands for bytes of a pickle from `at` on."""
    crc = 0
    for piece in steps(pickle, at, nbytes):
        crc = zlib.crc32(piece, crc)
    return LongBytes(pickle, at, nbytes, nbytes, crc, kind=kind)


def held(key: Any) -> Any:
    """Return a key of bytes, tuples and frozensets with bytes in the place of what stands for them.

    Raises:
        TooLargeError, ValueError, OSError: As `LongBytes.whole`.
    """
    if type(key) in (tuple, frozenset):
        return type(key)(map(held, key))
    return key.whole() if type(key) is LongBytes else key
