"""Where in its bytes the interpreter of a pickle is."""

from __future__ import annotations

from asyncckpt.foreign.pickle_values import UnpicklingError


class Cursor:
    """Reads from `at` on. Raises `UnpicklingError`, or an error of Python's, where the bytes end too early."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self.at = self.at, self.at + nbytes
        if nbytes < 0 or self.at > len(self.data):
            raise UnpicklingError("it ends early")
        return self.data[start : self.at]

    def skip(self, nbytes: int) -> int:
        """Go on behind the next bytes; return where they begin."""
        start, self.at = self.at, self.at + nbytes
        if nbytes < 0 or self.at > len(self.data):  # not by `take`, which is called for every opcode
            raise UnpicklingError("it ends early")
        return start

    def number(self, width: int) -> int:
        """Return the next number of so many bytes."""
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        """Return the text up to the end of its line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()
