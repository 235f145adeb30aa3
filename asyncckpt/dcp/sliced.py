"""`SlicedBufferedReader`: a range of a file as a file of its own."""

from __future__ import annotations

import io
import os
from typing import Any


class _Slice(io.RawIOBase):
    """Reads `nbytes` from `offset` on of another stream, whose position it moves and which it never closes."""

    def __init__(self, stream: Any, offset: int, nbytes: int) -> None:
        self._stream, self._offset, self._nbytes, self._at = stream, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer).cast("B") as whole, whole[: max(0, self._nbytes - self._at)] as view:
            self._stream.seek(self._offset + self._at)
            count = self._stream.readinto(view) if len(view) else 0
        self._at += count or 0
        return count or 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset} lies before the slice")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


class SlicedBufferedReader(io.BufferedReader):
    """A range of a binary stream, read as if there were nothing else: its positions count from the range's start.

    The stream stays open when this is closed. Several may share a stream, though not from several threads.

    Args:
        base_stream: Readable and seekable.
        offset: Where the range begins, in bytes.
        len: How long it is, in bytes.

    Raises:
        ValueError: A negative offset or length.
    """

    def __init__(self, base_stream: Any, offset: int, len: int) -> None:
        if offset < 0 or len < 0:
            raise ValueError(f"bytes {offset} to {offset + len} are no range of a file")
        super().__init__(_Slice(base_stream, offset, len))
