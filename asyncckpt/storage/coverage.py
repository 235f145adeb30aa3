"""Do the chunks of a tensor cover it: every element exactly once? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.structure import Structure

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) in elements."""


def coverage_fault(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor of `global_shape`; None when nothing is.

    Boxes lie inside the shape (the index's decoder saw to it). Those without elements count for nothing.
    """
    if len(boxes) == 1 and boxes[0][1] == global_shape:
        return None
    filled = [box for box in boxes if math.prod(box[1])]
    wanted, found = math.prod(global_shape), sum(math.prod(sizes) for _, sizes in filled)
    if len(filled) > 1:
        twice = _overlapping(filled, len(global_shape))
        if twice is not None:
            return f"elements {twice[0]} and {twice[1]} (offsets, sizes) are stored twice"
    if found != wanted:
        return f"{found} of {wanted} elements are stored"
    return None


def _overlapping(boxes: Sequence[Box], n_dims: int) -> tuple[Box, Box] | None:
    """Return two boxes that share an element: a sweep along the dimension that tells most boxes apart."""
    if n_dims == 0:
        return boxes[0], boxes[1]
    sweep = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][sweep]):
        start = box[0][sweep]
        active = [a for a in active if a[0][sweep] + a[1][sweep] > start]
        for other in active:
            if all(o < p + t and p < o + s for o, s, p, t in zip(other[0], other[1], box[0], box[1], strict=True)):
                return other, box
        active.append(box)
    return None


def prove_coverage(path: str, structures: Sequence[Structure]) -> None:
    """Prove that the ranks together store every element of every tensor once.

    Args:
        path: For messages.
        structures: Of all ranks, in order.

    Raises:
        SaveFailedError: Code "coverage"; naming the first tensor that is not covered.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, structure in enumerate(structures):
        for entry in structure.tensors:
            known = shapes.setdefault(entry.fqn, (entry.dtype, entry.global_shape))
            if known != (entry.dtype, entry.global_shape):
                raise _uncovered(path, entry.fqn, f"rank {rank} stores another dtype or shape than an earlier rank")
            boxes.setdefault(entry.fqn, []).extend((c.offsets, c.sizes) for c in entry.chunks)
    for fqn, stored in boxes.items():
        fault = coverage_fault(shapes[fqn][1], stored)
        if fault is not None:
            raise _uncovered(path, fqn, fault)


def _uncovered(path: str, fqn: str, fault: str) -> SaveFailedError:
    return SaveFailedError(
        f"{path}: tensor {fqn!r}: {fault}; nothing was published", code="coverage", path=path, detail=f"{fqn}: {fault}"
    )
