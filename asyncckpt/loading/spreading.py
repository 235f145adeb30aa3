"""Boxes of a range that go into a tensor in host memory as they are: which runs of bytes go where. Pure."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator

import torch

from asyncckpt.storage.read_plan import Runs

MIN_RUN_NBYTES = 4096
"""Shorter runs take less time if the range is read and they are copied out of it: each takes 0.3 us here. On two cores
runs of 4 KiB of every 16 take a quarter less by this way, those of 2 KiB of every 4 two thirds more."""

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(place of the first element in the range, offsets in the tensor, sizes), as `sinks.boxes_within` has them."""


def runs_of(target: torch.Tensor, strides: tuple[int, ...], boxes: Iterable[Box], first: int) -> list[Runs] | None:
    """Return where the elements of boxes go; None where some of their runs are short, or the target is expanded.

    Args:
        target: Of the stored elements' dtype, in host memory.
        strides: Of the boxes in the range, in elements.
        boxes: What is taken.
        first: The number of the element that the piece begins with.
    """
    if any(size > 1 and not place for size, place in zip(target.shape, target.stride(), strict=True)):
        return None  # `Runs` has no places that are one; torch refuses the copy
    found: list[Runs] = []
    for box in boxes:
        for runs in _of_box(target, strides, *box, first):
            if runs.nbytes < MIN_RUN_NBYTES:
                return None
            found.append(runs)
    return found


def _of_box(
    target: torch.Tensor,
    strides: tuple[int, ...],
    start: int,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    first: int,
) -> Iterator[Runs]:
    places, itemsize = target.stride(), target.itemsize
    dims = [dim for dim in zip(sizes, strides, places, strict=True) if dim[0] > 1]
    run = 1
    while dims and dims[-1][1:] == (run, run):
        run *= dims.pop()[0]
    times, every, apart = dims.pop() if dims else (1, run, run)
    address = target.data_ptr() + sum(map(operator.mul, offsets, places)) * itemsize
    for at in itertools.product(*(range(size) for size, _, _ in dims)):
        before = sum(n * stride for n, (_, stride, _) in zip(at, dims, strict=True))
        moved = sum(n * place for n, (_, _, place) in zip(at, dims, strict=True))
        yield Runs(
            (start - first + before) * itemsize,
            run * itemsize,
            every * itemsize,
            times,
            address + moved * itemsize,
            apart * itemsize,
        )
