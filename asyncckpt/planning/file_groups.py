"""Puts tensors that are likely to change together into files of their own, so that files of unchanged ones are linked.

Which tensors change is not known at the first save, and `requires_grad` does not tell: it is gone from state dicts, and
a tensor that requires it may stay the same. But tensors of one size have as a rule one role: the matrices of a base
model, its norms, the matrices of an adapter. So each size has its files. In these, the tensors lie in the order of the
state dict, so that a model whose first layers are frozen has most of them in files without trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.format.layout import PAGE_NBYTES, SMALL_HEADER_UNIT, BoxSpec, Layout, PartLayout
from asyncckpt.format.structure import Chunk

MAX_SIZES = 64
"""If there are more sizes, those between two powers of two share files. Chosen: a file costs about a millisecond."""

SMALL_NBYTES = 64 << 10
"""Sizes of which there are fewer bytes in all share one file, as a header takes a page. Chosen."""

MIN_FILE_NBYTES = 16 << 20
MAX_FILES_BY_SIZE = 64
"""The tensors of one size are divided over files of this many bytes, or larger ones if it would take more than this
many files for all tensors. Chosen."""

PAGES_FROM_NBYTES = 1 << 20
"""Groups with fewer bytes have headers of whole `SMALL_HEADER_UNIT`, others of whole pages."""

Build = Callable[[Sequence[BoxSpec], int], Layout]
"""Returns the layout of boxes in one file, or in a few. Second argument: `header_unit` of `format.layout`."""


def group_by_size(sizes: Sequence[int], n_files: int = 1) -> list[list[int]]:
    """Divide boxes into groups that get files of their own.

    Args:
        sizes: Bytes of each box, in the order of the state dict.
        n_files: A group has at most this part of all bytes, or one box.

    Returns:
        The groups, as positions in `sizes`; each position once. The order does not depend on anything else.
    """
    by_size: dict[int, list[int]] = {}
    by_class = len(set(sizes)) > MAX_SIZES
    for n, nbytes in enumerate(sizes):
        by_size.setdefault(nbytes.bit_length() if by_class else nbytes, []).append(n)
    small = {key for key, members in by_size.items() if sum(sizes[n] for n in members) < SMALL_NBYTES}
    groups = [sorted(n for key in small for n in by_size[key])] if small else []
    most = max(MIN_FILE_NBYTES, -(-sum(sizes) // MAX_FILES_BY_SIZE))
    if n_files > 1:
        most = min(most, -(-sum(sizes) // n_files))
    for key in sorted(by_size.keys() - small):
        nbytes = most
        for n in by_size[key]:
            if nbytes + sizes[n] > most:
                groups.append([])
                nbytes = 0
            groups[-1].append(n)
            nbytes += sizes[n]
    return groups


def grouped_layout(specs: Sequence[BoxSpec], build: Build, n_files: int) -> Layout | None:
    """Return a layout in which each group of `group_by_size` has files of its own.

    Args:
        specs: The boxes, in the order of the state dict.
        build: Makes the layout of one group.
        n_files: As of `group_by_size`.

    Returns:
        The layout; None: it takes more than `MAX_PARTS` files.

    Raises:
        AsyncCkptError: As `build`.
    """
    parts: list[PartLayout] = []
    chunks: dict[int, Chunk] = {}
    for group in group_by_size([spec.nbytes for spec in specs], n_files):
        members = [specs[n] for n in group]
        is_small = sum(spec.nbytes for spec in members) < PAGES_FROM_NBYTES
        placed = build(members, SMALL_HEADER_UNIT if is_small else PAGE_NBYTES)
        for n, chunk in zip(group, placed.chunks, strict=True):
            chunks[n] = chunk._replace(part=len(parts) + chunk.part)
        parts += placed.parts
    if len(parts) > MAX_PARTS:
        return None
    return Layout(parts=tuple(parts), chunks=tuple(chunks[n] for n in range(len(specs))))
