"""A target's file as windows of bounded size: what of it is known, and which runs of elements are yet to be read. Pure.

The writer gives every window page-aligned memory, so that what is read into it goes to the disk as it lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncckpt.conversion.pieces import OutputFile, length_of
from asyncckpt.format.archive import Payload, TextPayload

WINDOW_NBYTES = 12 << 20
"""Whole blocks of checksums. Measured on two cores: 16 MiB take as long, 8 MiB a twentieth more (ADR 0039)."""


class Run(NamedTuple):
    """Consecutive bytes of a tensor's row-major elements in a window.

    Attributes:
        piece: Number of their payload among the file's pieces.
        tensor: Number of the tensor.
        start: Of the first byte among the tensor's.
        nbytes: How many.
        at: Offset in the file.
        is_last: Whether the tensor ends here.
        text: Its payload, where it is a text: `start` and `nbytes` are of that.
    """

    piece: int
    tensor: int
    start: int
    nbytes: int
    at: int
    is_last: bool
    text: TextPayload | None = None


class Window(NamedTuple):
    """Bytes `start` to `end` of a file: `texts` are known, as (offset in the file, bytes), and `runs` are read."""

    start: int
    end: int
    texts: list[tuple[int, memoryview]]
    runs: list[Run]


def windows_of(file: OutputFile, nbytes: int) -> Iterator[Window]:
    """Cut a file into windows of `nbytes`, but for the last; every byte is in one text or run. Empty payloads: none."""
    window, at = Window(0, nbytes, [], []), 0
    for number, piece in enumerate(file.pieces):
        length = length_of(piece)
        done = 0
        while done < length:
            if at == window.end:
                yield window
                window = Window(at, at + nbytes, [], [])
            count = min(length - done, window.end - at)
            if isinstance(piece, Payload):
                text = piece if isinstance(piece, TextPayload) else None
                window.runs.append(Run(number, piece.tensor, done, count, at, done + count == length, text))
            else:
                window.texts.append((at, memoryview(piece)[done : done + count]))
            at += count
            done += count
    yield window._replace(end=at)


def payload_places(file: OutputFile) -> Iterator[tuple[Payload, int]]:
    """Yield every payload that is elements as they are, with its offset in the file."""
    at = 0
    for piece in file.pieces:
        if type(piece) is Payload:
            yield piece, at
        at += length_of(piece)
