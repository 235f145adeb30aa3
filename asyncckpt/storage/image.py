"""What shard files are written from: memory that has all their bytes, or what makes them as they are written."""

from __future__ import annotations

import ctypes
from typing import Protocol

from asyncckpt.format.layout import PAGE_NBYTES


class MadeImage(Protocol):
    """Makes the bytes of an image piece by piece; from several threads.

    Attributes:
        is_page_aligned: Whether each piece lies in memory as it does in the image, relative to pages.
    """

    is_page_aligned: bool

    def __len__(self) -> int:
        """Return the image's length in bytes."""

    def __getitem__(self, piece: slice, /) -> memoryview:
        """Return the bytes of `piece`, good until the calling thread asks for others."""


Image = memoryview | MadeImage


def is_page_aligned(image: Image) -> bool:
    """Whether O_DIRECT can write from `image` at whole pages of it."""
    if not isinstance(image, memoryview):
        return image.is_page_aligned
    if image.readonly or not len(image):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(image)) % PAGE_NBYTES == 0
