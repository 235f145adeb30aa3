"""Do the chunks of a tensor cover it: every element exactly once? Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) in elements."""

MAX_CUTS = 64
"""One inside the other. A mesh has one for each dimension, a mesh of what a mesh has cut two. Chosen, not measured."""

MAX_PAIRS = 1_000_000
"""Boxes that are compared with each other, about a second. What a mesh has cut is compared with nothing."""


def coverage_fault(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor of `global_shape`; None when nothing is.

    Boxes lie inside the shape (the index's decoder saw to it). Those without elements count for nothing.
    """
    if len(boxes) == 1 and boxes[0][1] == global_shape:
        return None
    filled = [box for box in boxes if 0 not in box[1]]
    wanted, found = math.prod(global_shape), sum(math.prod(sizes) for _, sizes in filled)
    if found == wanted and _fits_together(filled, tuple((0, n) for n in global_shape)):
        return None
    if len(filled) > 1 and not is_affordable(filled, len(global_shape)):
        # IMPORTANT: refused, whoever is right: boxes that somebody has thought up would take hours.
        if found == wanted:
            return f"its {len(filled)} chunks lie in no order in which they could be compared"
    elif len(filled) > 1:
        twice = overlapping(filled, len(global_shape))
        if twice is not None:
            return f"elements {filled[twice[0]]} and {filled[twice[1]]} (offsets, sizes) are stored twice"
    if found != wanted:
        return f"{found} of {wanted} elements are stored"
    return None


def is_affordable(boxes: Sequence[Box], n_dims: int) -> bool:
    """Whether the sweep for boxes that overlap compares few enough of them."""
    if n_dims == 0:
        return True
    d = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    starts = sorted(offsets[d] for offsets, _ in boxes)
    ends = sorted(offsets[d] + sizes[d] for offsets, sizes in boxes)
    pairs = over = 0
    for begun, start in enumerate(starts):
        while ends[over] <= start:
            over += 1
        pairs += begun - over
    return pairs <= MAX_PAIRS


def _fits_together(boxes: list[Box], region: tuple[tuple[int, int], ...], cuts: int = 0) -> bool:
    """Whether `boxes` cover `region` ((start, end) in each dimension) exactly once. False may also mean: not obviously.

    Where no box lies on both sides of a cut through the region, both sides are looked at by themselves: sorting is all
    that thousands of boxes cost, which come from meshes, and from rows of what meshes have cut.
    """
    if cuts > MAX_CUTS:
        return False
    if len(boxes) < 2 or not region:
        return [tuple((o, o + s) for o, s in zip(*box, strict=True)) for box in boxes] == [region]
    others = (tuple(start for start, _ in region[1:]), tuple(end - start for start, end in region[1:]))
    if all((offsets[1:], sizes[1:]) == others for offsets, sizes in boxes):  # rows: by far the most
        return _are_joined(sorted((offsets[0], sizes[0]) for offsets, sizes in boxes), *region[0])
    for d, (start, end) in enumerate(region):
        slabs: list[list[Box]] = []
        bounds = [start]
        reached = start
        for box in sorted(boxes, key=lambda b: b[0][d]):
            first = box[0][d]
            if first >= reached and slabs:
                if first > reached:
                    return False
                bounds.append(first)
                slabs.append([box])
            elif slabs:
                slabs[-1].append(box)
            else:
                slabs.append([box])
            reached = max(reached, first + box[1][d])
        bounds.append(end)
        if len(slabs) > 1:
            parts = zip(slabs, itertools.pairwise(bounds), strict=True)
            return all(_fits_together(slab, (*region[:d], part, *region[d + 1 :]), cuts + 1) for slab, part in parts)
    return False


def _are_joined(runs: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    for first, n in runs:
        if first != start:
            return False
        start += n
    return start == end


def overlapping(boxes: Sequence[Box], n_dims: int) -> tuple[int, int] | None:
    """Return the positions of two boxes that share an element: a sweep along the dimension that tells most apart.

    All have elements, and there are two at least.
    """
    if n_dims == 0:
        return 0, 1
    sweep = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    active: list[int] = []
    for n in sorted(range(len(boxes)), key=lambda n: boxes[n][0][sweep]):
        box = boxes[n]
        start = box[0][sweep]
        active = [a for a in active if boxes[a][0][sweep] + boxes[a][1][sweep] > start]
        for a in active:
            other = boxes[a]
            if all(o < p + t and p < o + s for o, s, p, t in zip(*other, *box, strict=True)):
                return a, n
        active.append(n)
    return None
