"""Which part of a tensor is wanted, and which byte ranges of its chunks hold it. Pure.

What is wanted of a row-major chunk is a set of runs of bytes. Runs whose distance is less than a unit of reading are
read as one range, since no unit lies between them; so their number is bounded by the length of the chunk in units.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from asyncckpt.errors import ConfigError
from asyncckpt.format.structure import Chunk

SLAB_NBYTES = 4 << 20
"""A range with gaps is gathered in a temporary of this size at most, but for one row. Chosen, not measured."""


class Region(NamedTuple):
    """What slices select: in each dimension `counts` elements from `offsets` on, `steps` apart.

    `shape`: of the result, which lacks the dimensions that an int selected from.
    """

    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a region within one chunk, in elements.

    `start` and `length`: the range of the chunk, gaps included. `strides`: of the wanted elements in that range.
    `offsets`, `sizes`: their box in what the region selects.
    """

    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def region_of(slices: Any, shape: tuple[int, ...], fqn: str) -> Region:
    """Return what `slices` select of a tensor of `shape`, as indexing it would.

    Args:
        slices: An int, a slice with a positive step, `...`, or a tuple or list of them; None selects everything.
        shape: Of the tensor, in elements.
        fqn: Its name, for messages.

    Raises:
        ConfigError: Too many dimensions, an int out of range, a step below 1, or anything else.
    """
    wanted = [] if slices is None else list(slices) if isinstance(slices, (tuple, list)) else [slices]
    n_ellipses = sum(item is Ellipsis for item in wanted)
    if n_ellipses > 1 or len(wanted) - n_ellipses > len(shape):
        raise _refused(slices, fqn, f"the tensor has {len(shape)} dimensions")
    at = next((n for n, item in enumerate(wanted) if item is Ellipsis), len(wanted))
    rest = [slice(None)] * (len(shape) - len(wanted) + n_ellipses)
    full = wanted[:at] + rest + wanted[at + n_ellipses :]
    offsets, counts, steps, result = [], [], [], []
    for dim, (item, n) in enumerate(zip(full, shape, strict=True)):
        if isinstance(item, slice):
            try:
                start, stop, step = item.indices(n)
            except (TypeError, ValueError) as error:
                raise _refused(slices, fqn, str(error)) from error
            if step < 1:
                raise _refused(slices, fqn, f"step {step} of dimension {dim} is not positive")
            count = len(range(start, stop, step))
            result.append(count)
        else:
            start, count, step = _position(item, n, dim, slices, fqn), 1, 1
        offsets.append(start)
        counts.append(count)
        steps.append(step)
    return Region(tuple(offsets), tuple(counts), tuple(steps), tuple(result))


def _position(item: Any, n: int, dim: int, slices: Any, fqn: str) -> int:
    try:
        position = operator.index(item) if not isinstance(item, bool) else None
    except TypeError:
        position = None
    if position is None:
        raise _refused(slices, fqn, f"{item!r} of dimension {dim} is no int, slice or ...")
    if not -n <= position < n:
        raise _refused(slices, fqn, f"index {position} is out of range for dimension {dim} of size {n}")
    return position + n if position < 0 else position


def _refused(slices: Any, fqn: str, why: str) -> ConfigError:
    return ConfigError(f"slices={slices!r} of tensor {fqn!r}: {why}", field="slices", value=repr(slices)[:200])


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def pieces_of(chunk: Chunk, region: Region, *, itemsize: int, unit: int) -> Iterator[Piece]:
    """Yield the pieces of `chunk` that make its part of a region.

    Args:
        chunk: Of the tensor.
        region: Of the same tensor.
        itemsize: Bytes of an element.
        unit: Runs whose distance in bytes is less go into one piece.

    Yields:
        Pieces that cover every wanted element of the chunk once. One that is a run of both the chunk and the result is
        as long as it comes; others are bounded by `SLAB_NBYTES`, or one row.
    """
    low = [max(0, -((o - c) // step)) for o, c, step in zip(region.offsets, chunk.offsets, region.steps, strict=True)]
    high = [
        min(count, -((o - c - size) // step))
        for o, count, step, c, size in zip(
            region.offsets, region.counts, region.steps, chunk.offsets, chunk.sizes, strict=True
        )
    ]
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return
    strides = row_major(chunk.sizes)
    first = sum(
        (o + lo * step - c) * stride
        for o, lo, step, c, stride in zip(region.offsets, low, region.steps, chunk.offsets, strides, strict=True)
    )
    apart = tuple(stride * step for stride, step in zip(strides, region.steps, strict=True))
    cutter = _Cutter(apart, row_major(region.counts), max(1, SLAB_NBYTES // itemsize), unit / itemsize)
    yield from cutter.cut(first, tuple(low), tuple(h - lo for lo, h in zip(low, high, strict=True)))


class _Cutter:
    """Cuts what is wanted of a chunk into pieces; lengths in elements.

    Args:
        strides: Of the wanted elements in the chunk.
        result_strides: Of the same in the result.
        limit: A longer piece is cut, unless it is one run of both.
        unit: A wider gap is not read.
    """

    def __init__(self, strides: tuple[int, ...], result_strides: tuple[int, ...], limit: int, unit: float) -> None:
        self._strides, self._result_strides, self._limit, self._unit = strides, result_strides, limit, unit

    def cut(self, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Piece]:
        length, filled = _span(sizes, self._strides), math.prod(sizes)
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        is_run = length == filled and _span(sizes, self._result_strides) == filled
        narrow = self._widest_gap(sizes) < self._unit
        if is_run or dim is None or (narrow and length <= self._limit):
            yield Piece(start, length, offsets, sizes, self._strides)
            return
        stride = self._strides[dim]
        step = max(1, self._limit // stride) if narrow else 1
        for at in range(0, sizes[dim], step):
            yield from self.cut(
                start + at * stride,
                (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
                (*sizes[:dim], min(step, sizes[dim] - at), *sizes[dim + 1 :]),
            )

    def _widest_gap(self, sizes: tuple[int, ...]) -> int:
        """Elements between two neighbours of any dimension."""
        widest, inner = 0, 1
        for size, stride in zip(sizes[::-1], self._strides[::-1], strict=True):
            if size > 1:
                widest = max(widest, stride - inner)
                inner += (size - 1) * stride
        return widest


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
