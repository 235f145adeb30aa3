"""Where a tensor is not covered, for people: which boxes are missing or stored twice, and whose lie beside. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncckpt.storage.coverage import Box, coverage_fault, is_affordable, overlapping

MAX_BOXES = 3
"""Missing boxes that a text names."""

MAX_BESIDE = 4
"""Ranks beside a missing box that a text names, and ranks that store nothing."""

MAX_PIECES = 256
"""Pieces that are looked at while what is missing is cut out. Chosen, not measured: holes of meshes are few boxes."""

MAX_DIMS = 8
"""Dimensions of a box that a text shows."""


def located_fault(
    global_shape: tuple[int, ...], boxes: Sequence[Box], ranks: Sequence[int], idle: Sequence[int] = ()
) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor, where, and whose they are; None when nothing is.

    Args:
        global_shape: Of the tensor.
        boxes: What is stored of it; they lie inside the shape.
        ranks: Whose each box is.
        idle: Ranks that name the tensor, and store nothing of it.
    """
    fault = coverage_fault(global_shape, boxes)
    if fault is None:
        return None
    filled = [(rank, box) for rank, box in zip(ranks, boxes, strict=True) if 0 not in box[1]]
    stored = [box for _, box in filled]
    may_look = len(stored) > 1 and is_affordable(stored, len(global_shape))
    twice = overlapping(stored, len(global_shape)) if may_look else None
    if twice is not None:
        (one, first), (other, second) = filled[twice[0]], filled[twice[1]]
        return f"rank {one} stores {shown(first)} and rank {other} {shown(second)}: elements of both are stored twice"
    missing = missing_boxes(global_shape, stored)
    if not missing:
        return fault
    parts = [f"{shown(box)} is missing{_beside(box, filled)}" for box in missing[:MAX_BOXES]]
    if len(missing) > MAX_BOXES:
        parts.append(f"and {len(missing) - MAX_BOXES} more boxes")
    nothing = f"; {_naming(idle)} it without storing any of it" if idle else ""
    return f"{fault}: {', '.join(parts)}{nothing}"


def shown(box: Box) -> str:
    """Return a box as text: `[first:end,first:end]`."""
    runs = [f"{offset}:{offset + size}" for offset, size in zip(*box, strict=True)]
    return f"[{','.join(runs[:MAX_DIMS])}{',...' if len(runs) > MAX_DIMS else ''}]"


def missing_boxes(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Box]:
    """Return boxes that hold every element that `boxes` do not; none when there are too many of them to tell."""
    missing: list[Box] = [((0,) * len(global_shape), global_shape)] if 0 not in global_shape else []
    for box in sorted(boxes):
        missing = [piece for old in missing for piece in _without(old, box)]
        if len(missing) > MAX_PIECES:
            return []
    return _joined(missing)


def _without(box: Box, cut: Box) -> list[Box]:
    """Return what is left of `box`, in at most two pieces for each dimension."""
    low = [max(o, p) for o, p in zip(box[0], cut[0], strict=True)]
    high = [min(o + s, p + t) for o, s, p, t in zip(*box, *cut, strict=True)]
    if any(start >= end for start, end in zip(low, high, strict=True)):
        return [box]
    left: list[Box] = []
    offsets, sizes = list(box[0]), list(box[1])
    for d, (start, end) in enumerate(zip(low, high, strict=True)):
        for first, last in ((offsets[d], start), (end, offsets[d] + sizes[d])):
            if last > first:
                before, after = tuple(offsets[:d]), tuple(offsets[d + 1 :])
                left.append(((*before, first, *after), (*sizes[:d], last - first, *sizes[d + 1 :])))
        offsets[d], sizes[d] = start, end - start
    return left


def _joined(boxes: list[Box]) -> list[Box]:
    """Join boxes that make one together: cutting takes holes apart along the boxes around them."""
    for d in range(len(boxes[0][0]) if boxes else 0):
        joined: list[Box] = []
        for offsets, sizes in sorted(boxes, key=lambda b, d=d: (_others(b, d), b[0][d])):  # type: ignore[misc]
            last = joined[-1] if joined else None
            is_alike = last is not None and _others(last, d) == _others((offsets, sizes), d)
            if last is not None and is_alike and last[0][d] + last[1][d] == offsets[d]:
                joined[-1] = (last[0], (*sizes[:d], last[1][d] + sizes[d], *sizes[d + 1 :]))
            else:
                joined.append((offsets, sizes))
        boxes = joined
    return sorted(boxes, key=lambda box: -math.prod(box[1]))


def _others(box: Box, d: int) -> tuple[tuple[int, ...], ...]:
    return box[0][:d], box[0][d + 1 :], box[1][:d], box[1][d + 1 :]


def _beside(hole: Box, filled: Sequence[tuple[int, Box]]) -> str:
    """Name those who hold what lies next to a hole."""
    found = [(rank, box) for rank, box in filled if _touch(hole, box)]
    shown_ = [f"rank {rank} holds {shown(box)}" for rank, box in found[:MAX_BESIDE]]
    if len(found) > MAX_BESIDE:
        shown_.append(f"{len(found) - MAX_BESIDE} more boxes are")
    return f" ({' and '.join(shown_)} beside it)" if shown_ else ""


def _touch(a: Box, b: Box) -> bool:
    """Whether two boxes that have no element in common share a face."""
    gaps = [max(o, p) - min(o + s, p + t) for o, s, p, t in zip(*a, *b, strict=True)]
    return gaps.count(0) == 1 and max(gaps, default=1) == 0


def _naming(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} names"
    text = ", ".join(map(str, ranks[:MAX_BESIDE]))
    more = f" and {len(ranks) - MAX_BESIDE} more" if len(ranks) > MAX_BESIDE else ""
    return f"ranks {text}{more} name"
