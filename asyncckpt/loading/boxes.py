"""Which part of a tensor is wanted, and which byte ranges of its chunks hold it. Pure.

A box of a row-major chunk is a set of runs of bytes. Runs whose distance is less than a unit of reading are read as one
range, since the units between them are the same; so their number is bounded by the length of the chunk in units.
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
    """What slices select: a box (offsets, sizes, in elements), the steps inside it, and the shape of the result."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a box within one chunk, in elements.

    `start` and `length`: the range of the chunk, gaps included. `strides`: of the box in that range.
    `offsets`: where it lies in the box that was asked for.
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
    offsets, sizes, steps, result = [], [], [], []
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
            size = (count - 1) * step + 1 if count else 0
        else:
            start, size, step = _position(item, n, dim, slices, fqn), 1, 1
        offsets.append(start if size else 0)
        sizes.append(size)
        steps.append(step)
    return Region(tuple(offsets), tuple(sizes), tuple(steps), tuple(result))


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


def pieces_of(
    chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int], *, itemsize: int, unit: int
) -> Iterator[Piece]:
    """Yield the pieces of `chunk` that make its part of a box.

    Args:
        chunk: Of the tensor.
        offsets, sizes: The box, in elements of the global tensor.
        itemsize: Bytes of an element.
        unit: Runs whose distance in bytes is less go into one piece.

    Yields:
        Pieces that cover every wanted element of the chunk once. One without gaps is as long as it comes where the
        box is as wide as the chunk; others are bounded by `SLAB_NBYTES`, or one row.
    """
    low = tuple(map(max, chunk.offsets, offsets))
    high = tuple(min(c + cs, o + s) for c, cs, o, s in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return
    strides = row_major(chunk.sizes)
    cutter = _Cutter(strides, row_major(sizes), max(1, SLAB_NBYTES // itemsize), unit / itemsize)
    first = sum((lo - c) * stride for lo, c, stride in zip(low, chunk.offsets, strides, strict=True))
    inside = tuple(lo - o for lo, o in zip(low, offsets, strict=True))
    yield from cutter.cut(first, inside, tuple(h - lo for lo, h in zip(low, high, strict=True)))


class _Cutter:
    """Cuts a box of a chunk into pieces; lengths in elements."""

    def __init__(self, strides: tuple[int, ...], box_strides: tuple[int, ...], limit: int, unit: float) -> None:
        self._strides, self._box_strides, self._limit, self._unit = strides, box_strides, limit, unit

    def cut(self, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Piece]:
        strides = self._strides
        length, filled = _span(sizes, strides), math.prod(sizes)
        whole = length == filled and (length <= self._limit or _span(sizes, self._box_strides) == filled)
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        if whole or dim is None:
            yield Piece(start, length, offsets, sizes, strides)
            return
        gap = strides[dim] - _span(sizes[dim + 1 :], strides[dim + 1 :])
        step = 1
        if gap < self._unit:
            if length <= self._limit:
                yield Piece(start, length, offsets, sizes, strides)
                return
            step = max(1, self._limit // strides[dim])
        for at in range(0, sizes[dim], step):
            yield from self.cut(
                start + at * strides[dim],
                (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
                (*sizes[:dim], min(step, sizes[dim] - at), *sizes[dim + 1 :]),
            )


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
