"""Tensors that are too large to be read at once: in slabs, or as they lie in their file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from asyncckpt.loading.fetching import tensor_for
from asyncckpt.loading.foreign_ranges import read_span
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.source import Strided

SLAB_NBYTES = 32 << 20
"""What is compared, or sent, at a time. Chosen, not measured."""

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By width: dtypes that torch can copy and slice, and whose copies keep every bit."""


def slab_slices(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Any, ...]]:
    """Yield slices that cut a tensor into runs of its row-major order, of at most `limit` elements each."""
    row = math.prod(shape[1:])
    if not shape or row * shape[0] <= limit:
        yield (...,)
    elif row <= limit:
        step = limit // row
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)
    else:
        for n in range(shape[0]):
            for inner in slab_slices(shape[1:], limit):
                yield (slice(n, n + 1), *inner)


def strided_view(contents: Contents, saved: SavedTensor, files: Files, *, threads: int) -> torch.Tensor | None:
    """Return a tensor that is not row-major in its file, read whole, as integers or complex128 of its width.

    Returns:
        None for any other.

    Raises:
        CorruptCheckpointError: The file is not what the structure says.
        OSError: It cannot be read.
    """
    if contents.source is None or len(saved.chunks) != 1:
        return None
    place = contents.source.place(saved.chunks[0][1].part, files)
    if not isinstance(place, Strided):
        return None
    flat = tensor_for(saved, contents.path, shape=(place.nbytes // place.itemsize,), dtype=CARRIERS[place.itemsize])
    read_span(contents, place, flat.data_ptr(), saved.fqn, files, threads=threads)
    return flat.as_strided(place.sizes, place.strides)


Progress = Callable[[int, int], None]
"""(bytes that are done, bytes in all); the target's are counted twice, written and compared."""
