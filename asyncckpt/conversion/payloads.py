"""The elements of tensors, one bounded slab after the other, read ahead by a thread."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.layout import round_up
from asyncckpt.loading.fetching import read_ranges, tensor_for
from asyncckpt.loading.foreign_ranges import read_span
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import Wanted
from asyncckpt.storage.source import Strided

SLAB_NBYTES = 32 << 20
"""Two are in flight, in memory that is used again and again. With the readers' buffers that is less than 256 MB.
Chosen, not measured."""

_ALIGNMENT = 64
_SLACK_NBYTES = 4096
"""What a slab may have beyond: alignment, and a single element of the widest dtype."""

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By width: dtypes that torch can copy and slice, and whose copies keep every bit."""


class Slab(NamedTuple):
    """Consecutive elements of the outline's tensor `tensor`: their bytes, and whether they are the last."""

    tensor: int
    data: memoryview
    is_last: bool


class _Batch(NamedTuple):
    """Work of one read: whole small tensors, or a part of a large one."""

    tensors: list[int]
    slices: tuple[Any, ...] | None = None
    is_last: bool = True


def slabs(
    contents: Contents, tensors: Sequence[SavedTensor], order: Sequence[int], files: Files, *, threads: int
) -> Generator[Slab, None, None]:
    """Yield all bytes of the tensors numbered in `order`, row-major, while the next ones are read.

    What is yielded is gone when the next is asked for.

    Raises:
        CorruptCheckpointError: The files differ from what was saved.
        UnsupportedLeafError: This torch lacks a dtype.
        OSError: The files cannot be read.
    """
    rooms = [torch.empty(SLAB_NBYTES + _SLACK_NBYTES, dtype=torch.uint8) for _ in range(2)]

    def read(batch: _Batch, room: torch.Tensor) -> list[Slab]:
        return _read(contents, tensors, batch, files, threads, room)

    with ThreadPoolExecutor(1, "asyncckpt-convert") as pool:
        pending = None
        for batch in _batches(contents, tensors, order, files):
            if isinstance(batch, int):  # cannot be read in parts: nothing else is in flight meanwhile
                if pending is not None:
                    yield from pending.result()
                    pending = None
                yield from _strided(contents, tensors[batch], batch, files, threads)
                continue
            ahead = pool.submit(read, batch, rooms[0])
            rooms.reverse()
            try:
                if pending is not None:
                    yield from pending.result()
            except BaseException:
                ahead.cancel()
                raise
            pending = ahead
        if pending is not None:
            yield from pending.result()


def _batches(
    contents: Contents, tensors: Sequence[SavedTensor], order: Sequence[int], files: Files
) -> Iterator[_Batch | int]:
    gathered: list[int] = []
    held = 0
    for number in order:
        saved = tensors[number]
        nbytes = _nbytes(saved)
        if gathered and held + round_up(nbytes, _ALIGNMENT) > SLAB_NBYTES:
            yield _Batch(gathered)
            gathered, held = [], 0
        if nbytes <= SLAB_NBYTES:
            gathered.append(number)
            held += round_up(nbytes, _ALIGNMENT)
        elif _place(contents, saved, files) is not None:
            yield number
        else:
            parts = list(slab_slices(saved.global_shape, max(1, SLAB_NBYTES // DTYPES[saved.dtype].itemsize)))
            for n, slices in enumerate(parts):
                yield _Batch([number], slices, n == len(parts) - 1)
    if gathered:
        yield _Batch(gathered)


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


def _read(
    contents: Contents,
    tensors: Sequence[SavedTensor],
    batch: _Batch,
    files: Files,
    threads: int,
    room: torch.Tensor,
) -> list[Slab]:
    """Read a batch into `room`."""
    if batch.slices is not None:
        (number,) = batch.tensors
        part = read_tensor(contents, tensors[number], batch.slices, files, threads=threads, verify=True, room=room)
        return [Slab(number, _bytes_of(part), batch.is_last)]
    found: list[Slab] = []
    ranges: list[tuple[tuple[int, int], Wanted]] = []
    at = 0
    for number in batch.tensors:
        saved, nbytes = tensors[number], _nbytes(tensors[number])
        place = room[at : at + nbytes]
        at += round_up(nbytes, _ALIGNMENT)
        rank, chunk = saved.chunks[0] if saved.chunks else (0, None)
        if chunk is not None and chunk.sizes == saved.global_shape:
            ranges.append(((rank, chunk.part), Wanted(chunk.offset_bytes, nbytes, saved.fqn, place.data_ptr())))
        else:
            read_tensor(contents, saved, None, files, threads=threads, verify=True, room=place)
        found.append(Slab(number, _bytes_of(place), True))
    read_ranges(contents, ranges, files, threads=threads, verify=True)
    return found


def _nbytes(saved: SavedTensor) -> int:
    return math.prod(saved.global_shape) * DTYPES[saved.dtype].itemsize


def _place(contents: Contents, saved: SavedTensor, files: Files) -> Strided | None:
    """Return where the elements of a tensor lie that are not row-major in their file; None for any other."""
    if contents.source is None or len(saved.chunks) != 1:
        return None
    found = contents.source.place(saved.chunks[0][1].part, files)
    return found if isinstance(found, Strided) else None


def _strided(contents: Contents, saved: SavedTensor, number: int, files: Files, threads: int) -> Iterator[Slab]:
    """Yield a large tensor that is not row-major in its file: that range of the file is in memory once."""
    view = strided_view(contents, saved, files, threads=threads)
    assert view is not None
    parts = list(slab_slices(tuple(view.shape), max(1, SLAB_NBYTES // view.itemsize)))
    for n, slices in enumerate(parts):
        yield Slab(number, _bytes_of(view[slices].contiguous()), n == len(parts) - 1)


def strided_view(contents: Contents, saved: SavedTensor, files: Files, *, threads: int) -> torch.Tensor | None:
    """Return a tensor that is not row-major in its file, read whole, as integers or complex128 of its width.

    Returns:
        None for any other.

    Raises:
        CorruptCheckpointError: The file is not what the structure says.
        OSError: It cannot be read.
    """
    place = _place(contents, saved, files)
    if place is None:
        return None
    flat = tensor_for(saved, contents.path, shape=(place.nbytes // place.itemsize,), dtype=CARRIERS[place.itemsize])
    read_span(contents, place, flat.data_ptr(), saved.fqn, files, threads=threads)
    return flat.as_strided(place.sizes, place.strides)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a contiguous tensor; the view keeps it alive."""
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


Progress = Callable[[int, int], None]
"""(bytes that are done, bytes in all); the target's are counted twice, written and compared."""
