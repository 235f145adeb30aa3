"""Which bytes of a tensor `overlap_check="sample"` compares at one save: a window, another one at the next save.

A window is up to 2 pieces that lie evenly over the tensor, together 1 KiB at most, so that looking at one costs the
same for every tensor, however large. Every window touches a contiguous half of a row-major tensor, give or take a
piece. A piece is contiguous in memory and read as it lies: transposed and channels_last tensors are not gathered.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncckpt.planning.replica_checks import bits_of
from asyncckpt.planning.sample_schedule import stride_of
from asyncckpt.staging.moving import careful_gather

WINDOW_NBYTES = 1024
"""The most that a window covers, and what is kept of a tensor until its copy has ended. With it each of the layouts in
`python -m benchmarks sampling` costs `save()` less than 3 us a tensor that no cache holds."""

PIECES = 2
"""The most pieces of a window. More would find shorter writes at once; but after the copy the kernel looks for each
piece in the page tables, since the memory may have gone (`staging/moving.py`): 1.1 us each."""

FRACTION = 128
"""A window is at most this part of its tensor, or one element."""

SMALL_SAVES = 256
"""Every byte of a row-major tensor is in one of `max(SMALL_SAVES, nbytes / WINDOW_NBYTES + 2)` successive windows. Of
another one, whose pieces may be shorter, in `Windows.count`."""


Place = tuple[int, int, int]
"""Where a window lies: how many pieces it has, the first element of the first one in the tensor's memory, and in the
tensor's row-major copy."""


class _Dimension(NamedTuple):
    size: int
    stride: int
    copied_stride: int


_ONE = _Dimension(1, 1, 1)


class _Lengths(dict[int, type[ctypes.Array[ctypes.Array[ctypes.c_char]]]]):
    """By number: the type of so many arrays of `nbytes` in a row. To make one takes longer than to read a window."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._of_one = ctypes.c_char * nbytes

    def __missing__(self, n: int) -> type[ctypes.Array[ctypes.Array[ctypes.c_char]]]:
        self[n] = made = self._of_one * n
        return made


class Windows:
    """The windows of tensors of one layout: `count` successive turns reach every element.

    The pieces of a window lie along one dimension, the elements of a piece along the dimension that is contiguous in
    memory, which may be the same. Where none is, as in `tensor[:, ::2]`, pieces are single elements.

    Args:
        shape: Of a tensor.
        strides: Of its dimensions, in elements; 0 where it is expanded.
        itemsize: In bytes.
        fraction: A window is at most this part of the tensor, or one element.
        n_pieces: At most so many pieces.

    Attributes:
        layout: The arguments.
        count: How many windows there are; 0 where there are no elements.
        run: The elements of a piece.
        step: From the begin of a piece to that of the next, in elements of the tensor's memory: a multiple of `run`.
        copied_step, copied_stride: In its row-major copy, from piece to piece, and from element to element of a piece.
    """

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], itemsize: int, fraction: int, n_pieces: int
    ) -> None:
        self.layout = shape, strides, itemsize, fraction, n_pieces
        self.count = 0
        if 0 in shape:
            return
        dimensions, copied_stride = list[_Dimension](), 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            inner = dimensions[-1] if dimensions else _ONE
            if (stride, copied_stride) == (inner.size * inner.stride, inner.size * inner.copied_stride) and dimensions:
                dimensions[-1] = inner._replace(size=inner.size * size)  # both are one dimension in either memory
            elif size > 1:
                dimensions.append(_Dimension(size, stride, copied_stride))
            copied_stride *= size
        n_elements = max(1, min(math.prod(shape) // fraction, WINDOW_NBYTES // itemsize))
        fast = next((d for d in dimensions if d.stride == 1), _ONE)
        others = [d for d in dimensions if d is not fast and d.stride]
        along = max(others, key=lambda d: d.size, default=fast)
        pieces = min(n_pieces, n_elements, along.size)
        self._fast, self._along = fast, along
        self._others = [d for d in dimensions if d is not fast and d is not along]
        if along is fast:
            self.run = min(fast.size, n_elements // pieces)
            self._n_blocks = fast.size // self.run
            self._n_steps = -(-self._n_blocks // pieces)
            step = self._n_steps * self.run
            # One more for the elements behind the last whole block.
            self._count = self._n_steps + (fast.size % self.run > 0)
        else:
            longest = min(fast.size, n_elements // pieces)
            runs = {1 << n for n in range(longest.bit_length())} | {longest}
            self.run = min(runs, key=lambda run: (self._counted(run, pieces), run))
            step = self._aligned(self.run, pieces)
            self._n_steps = min(step, along.size)
            self._count = self._counted(self.run, pieces)
        self.step, self.copied_step, self.copied_stride = (
            step * along.stride,
            step * along.copied_stride,
            fast.copied_stride,
        )
        self._step, self._itemsize = step, itemsize
        last = fast.size - self.run
        self._lattice = self._n_steps, step, last, along.size, along.stride, along.copied_stride, fast.copied_stride
        self.count = self._count * math.prod(d.size for d in self._others)
        self._stride = stride_of(self.count)
        self._apart = self.step // self.run
        self._lengths = _Lengths(self.run * itemsize)

    def _aligned(self, run: int, pieces: int) -> int:
        """Return the least step along `_along` with which pieces of `run` are whole multiples of `run` apart."""
        unit = run // math.gcd(run, self._along.stride)
        return -(-self._along.size // pieces // unit) * unit

    def _counted(self, run: int, pieces: int) -> int:
        return min(self._aligned(run, pieces), self._along.size) * -(-self._fast.size // run)

    def at(self, turn: int) -> Place:
        """Return the window of a turn; successive ones lie far from one another."""
        rest, number = divmod(turn * self._stride % self.count, self._count)
        run = self.run
        if self._along is self._fast:
            fast = self._fast
            if number < self._n_steps:
                at, n_pieces = number * run, -((number - self._n_blocks) // self._n_steps)
            else:  # up to the end
                n_pieces, at = divmod(fast.size - run, self._step)
                n_pieces += 1
            if not self._others:
                return n_pieces, at, at * fast.copied_stride
            start, copied_at = at, at * fast.copied_stride
        else:
            n_steps, step, last, size, stride, copied_stride, fast_copied_stride = self._lattice
            at_run, at = divmod(number, n_steps)
            n_pieces = -((at - size) // step)
            first = at_run * run
            first = min(first, last)
            start, copied_at = at * stride + first, at * copied_stride + first * fast_copied_stride
            if not self._others:
                return n_pieces, start, copied_at
        for size, stride, copied_stride in self._others:
            rest, at = divmod(rest, size)
            start += at * stride
            copied_at += at * copied_stride
        return n_pieces, start, copied_at

    def read(self, address: int, place: Place) -> bytes:
        """Return a window of the tensor at `address` in the host's memory.

        All pieces in one call: piece by piece, the waits for memory that no cache holds would add up.
        """
        n_pieces, start, _ = place
        lengths = self._lengths[(n_pieces - 1) * self._apart + 1].from_address(address + start * self._itemsize)
        return memoryview(lengths)[:: self._apart].tobytes()

    def read_carefully(self, address: int, place: Place) -> bytes:
        """As `read`; memory that has gone is an error and no crash.

        Raises:
            OSError: It has gone.
        """
        n_pieces, nbytes, apart = place[0], self.run * self._itemsize, self.step * self._itemsize
        first = address + place[1] * self._itemsize
        copied = (ctypes.c_char * (n_pieces * nbytes))()
        careful_gather(ctypes.addressof(copied), range(first, first + n_pieces * apart, apart), nbytes)
        return copied.raw

    def read_copied(self, copied: torch.Tensor, place: Place) -> bytes:
        """Return the same elements of a row-major copy of the tensor."""
        n_pieces, at = place[0], place[2]
        step = self.copied_step if n_pieces > 1 else self.run
        if step % self.run == 0 and (self.run == 1 or self.copied_stride == 1):
            apart = step // self.run
            lengths = self._lengths[(n_pieces - 1) * apart + 1].from_address(copied.data_ptr() + at * self._itemsize)
            return memoryview(lengths)[::apart].tobytes()
        strides = (self.copied_step, self.copied_stride)
        with torch.no_grad():
            bits = bits_of(copied)
            found = bits.as_strided((n_pieces, self.run), strides, bits.storage_offset() + at).contiguous()
        return ctypes.string_at(found.data_ptr(), found.nbytes)


windows_of = functools.lru_cache(maxsize=4096)(Windows)
"""The same windows for tensors of the same layout: to work them out takes some microseconds."""


def choose(n_tensors: int, turn: int, most: int) -> tuple[range, int, int]:
    """Return which tensors are looked at at a save: positions, the turn of their windows, and a window's `fraction`.

    Tensor `n` is looked at in turn `turn + n` of its windows, so that not all lie at the same place. A window of one
    that waits for its turn is larger, so that all together 1/`FRACTION` of the bytes are looked at, if it is not more
    than `WINDOW_NBYTES`.

    Args:
        n_tensors: How many tensors there are.
        turn: The number of the save; successive turns reach every byte.
        most: The most tensors that are looked at at one save.
    """
    period = max(1, -(-n_tensors // most))
    return range(turn % period, n_tensors, period), turn // period, -(-FRACTION // period)
