"""Reading exact ranges of an open file, or of an archive inside of one."""

from __future__ import annotations

from collections.abc import Callable

from asyncckpt.storage.files import Files


def read_exactly(files: Files, fd: int, nbytes: int, start: int = 0) -> Callable[[int, int], bytes]:
    """Return a reader of the window of `nbytes` at byte `start` of a file: (offset, length) -> exactly these bytes.

    It raises ValueError for a range outside of the window, or that the file ends within, and OSError.
    """

    def read_at(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > nbytes:
            raise ValueError(f"bytes {offset} to {offset + length} lie outside of {nbytes}: it was cut short")
        data = bytearray(length)
        done = 0
        with memoryview(data) as view:
            while done < length:
                count = files.preadv(fd, [view[done:]], start + offset + done)
                if count <= 0:
                    raise ValueError(f"it ends early, at byte {offset + done}")
                done += count
        return bytes(data)

    return read_at
