"""A flat range of a row-major tensor as boxes. Pure; no torch."""

from __future__ import annotations

import math

from asyncckpt.planning.sharding.grid import Box


def boxes_of_range(shape: tuple[int, ...], start: int, numel: int) -> list[tuple[Box, int]]:
    """Return the boxes that elements [start, start + numel) of a tensor of `shape` make, in order.

    Returns:
        (box, where its elements begin in the range): each is one run of the range; at most 2 * dimensions - 1.
    """
    if not numel:
        return []
    if not shape:
        return [(((), ()), 0)]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(start + numel, row)
    if first == last:  # inside one row
        return [_within(first, box, at) for box, at in boxes_of_range(shape[1:], head, numel)]
    found: list[tuple[Box, int]] = []
    at = 0
    if head:
        found += [_within(first, box, n) for box, n in boxes_of_range(shape[1:], head, row - head)]
        first, at = first + 1, row - head
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        found.append((((first, *zeros), (last - first, *shape[1:])), at))
        at += (last - first) * row
    if tail:
        found += [_within(last, box, at + n) for box, n in boxes_of_range(shape[1:], 0, tail)]
    return found


def _within(row: int, box: Box, at: int) -> tuple[Box, int]:
    offsets, sizes = box
    return ((row, *offsets), (1, *sizes)), at
