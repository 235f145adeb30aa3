"""Where in its bytes the interpreter of a pickle is."""

from __future__ import annotations

from asyncckpt.foreign import refusals
from asyncckpt.foreign.long_values import LONG_NBYTES, FilePickle, HeldPickle, LongBytes, LongText, skipped
from asyncckpt.foreign.refusals import TooLargeError, UnpicklingError

WINDOW_NBYTES = 1 << 20
"""Of a file, read at once. Chosen."""


class Cursor:
    """Reads on from `place`.

    Raises `UnpicklingError`, or an error of Python's, where the bytes end too early.

    Args:
        pickle: To be read.
        place: Where to begin.

    Attributes:
        data: Some of its bytes.
        at: Where in them it reads on.
    """

    def __init__(self, pickle: HeldPickle | FilePickle, place: int) -> None:
        self.pickle, self._left_out = pickle, place
        self.data, self._base, self.at = (pickle.data, 0, place) if type(pickle) is HeldPickle else (b"", place, 0)
        if len(self.data) > refusals.MAX_NBYTES:
            raise TooLargeError(len(self.data))

    @property
    def place(self) -> int:
        """Where in the pickle it reads on."""
        return self._base + self.at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        end = self.at + nbytes
        if nbytes < 0 or end > len(self.data):
            self.bring(nbytes)
            end = self.at + nbytes
        start, self.at = self.at, end
        return self.data[start:end]

    def bring(self, nbytes: int) -> None:
        """See to it that `data` has the next bytes."""
        place, rest = self.place, self.data[self.at :]
        left = self.pickle.nbytes - place
        if not 0 <= nbytes <= left:
            raise UnpicklingError("it ends early")
        if (taken := place + nbytes - self._left_out) > refusals.MAX_NBYTES:
            raise TooLargeError(taken)
        more = min(max(nbytes, WINDOW_NBYTES), left) - len(rest)
        self.data, self._base, self.at = rest + self.pickle.read(place + len(rest), more), place, 0

    def bytes_of(self, width: int, kind: type[bytes | bytearray] = bytes) -> LongBytes | bytes | bytearray:
        """Return the next bytes, behind their number, which has so many; of long ones what stands for them."""
        nbytes, pickle = self.number(width), self.pickle
        if nbytes < LONG_NBYTES or not isinstance(pickle, FilePickle):
            return kind(self.take(nbytes))
        return skipped(pickle, self._skip(nbytes), nbytes, kind)

    def long_text(self, nbytes: int) -> LongText:
        """Go on behind a text that is to be encoded."""
        return LongText(self.pickle, self._skip(nbytes), nbytes)

    def _skip(self, nbytes: int) -> int:
        place = self.place
        if not 0 <= nbytes <= self.pickle.nbytes - place:
            raise UnpicklingError("it ends early")
        self._left_out += nbytes
        self.at += nbytes
        if self.at > len(self.data):
            self.data, self._base, self.at = b"", place + nbytes, 0
        return place

    def number(self, width: int) -> int:
        """Return the next number of so many bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Return the text up to the end of its line."""
        while (end := self.data.find(b"\n", self.at)) < 0:
            had = len(self.data) - self.at
            left = self.pickle.nbytes - self.place
            self.bring(max(had + 1, min(2 * had, left)))  # in few steps, if it is long
        return self.take(end + 1 - self.at)[:-1].decode()
