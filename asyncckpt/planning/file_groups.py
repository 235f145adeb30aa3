"""Puts tensors that are likely to change together into files of their own, so that files of unchanged ones are linked.

Which tensors change is not known at the first save. `requires_grad` does not tell either: it is gone from state dicts,
and a tensor that requires it may stay the same. But tensors of one role usually change together. A role: tensors of one
size whose FQNs differ only in numbers, such as `layers.3.q_proj.weight` and `layers.7.q_proj.weight`. In the files of a
role, tensors lie in the order of the state dict, so that if only the first layers are frozen, few files have both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.format.layout import PAGE_NBYTES, SMALL_HEADER_UNIT, BoxSpec, Layout, PartLayout
from asyncckpt.format.structure import Chunk

MAX_ROLES = 256
"""Maximum number of roles with files of their own. If more reach `SMALL_NBYTES`, the limit is `SMALL_NBYTES_OF_MANY`.
If still more reach that, tensors of one size share files, whatever their names; then those of about one size. Chosen:
a model with its optimizer's state has 20 to 100."""

SMALL_NBYTES = 4 << 10
SMALL_NBYTES_OF_MANY = 64 << 10
"""Roles that have fewer bytes in all share one file. Chosen: norms of a frozen base, often less than 64 KiB, are not
written with an adapter (ADR 0067)."""

MIN_FILE_NBYTES = 16 << 20
MAX_FILES_BY_NBYTES = 64
MAX_FILE_NBYTES = 1 << 30
"""The tensors of one role are divided over files of `MIN_FILE_NBYTES`, or larger ones if all tensors would take more
than `MAX_FILES_BY_NBYTES` of them, up to `MAX_FILE_NBYTES`: larger objects are not copied by object stores. Chosen."""

PAGES_FROM_NBYTES = 1 << 20
"""Files with fewer bytes have headers of whole `SMALL_HEADER_UNIT`, others of whole pages."""

_NUMBER = re.compile(r"\d+")

Build = Callable[[Sequence[BoxSpec], int], Layout]
"""Returns the layout of boxes in one file, or in a few. Second argument: `header_unit` of `format.layout`."""


def group_by_role(boxes: Sequence[tuple[str, int]], n_files: int = 1) -> list[list[int]]:
    """Divide boxes into groups that get files of their own. Depends on nothing but the arguments.

    Args:
        boxes: FQN and bytes of each, in the order of the state dict.
        n_files: Desired number of files: a group has at most 1 / `n_files` of all bytes, unless it is one larger box,
            or that of the small roles.

    Returns:
        The groups, as positions in `boxes`; each position once.
    """
    ways: list[tuple[Callable[[str, int], Hashable], int]] = [
        (_role_of, SMALL_NBYTES),
        (_role_of, SMALL_NBYTES_OF_MANY),
        (lambda fqn, nbytes: nbytes, SMALL_NBYTES_OF_MANY),
        (lambda fqn, nbytes: nbytes.bit_length(), SMALL_NBYTES_OF_MANY),  # always enough
    ]
    for key_of, small_nbytes in ways:
        small, roles = _small_and_others(boxes, key_of, small_nbytes)
        if len(roles) <= MAX_ROLES:
            break
    total = sum(nbytes for _, nbytes in boxes)
    max_group_nbytes = min(max(MIN_FILE_NBYTES, -(-total // MAX_FILES_BY_NBYTES)), MAX_FILE_NBYTES)
    if n_files > 1:
        max_group_nbytes = min(max_group_nbytes, -(-total // n_files))
    groups = [small] if small else []
    for members in roles:
        filled = max_group_nbytes
        for n in members:
            if filled + boxes[n][1] > max_group_nbytes:
                groups.append([])
                filled = 0
            groups[-1].append(n)
            filled += boxes[n][1]
    return groups


def _role_of(fqn: str, nbytes: int) -> Hashable:
    return _NUMBER.sub("#", fqn), nbytes


def _small_and_others(
    boxes: Sequence[tuple[str, int]], key_of: Callable[[str, int], Hashable], small_nbytes: int
) -> tuple[list[int], list[list[int]]]:
    """Return the positions of the boxes whose keys have less than `small_nbytes`, and those of each other key."""
    by_key: dict[Hashable, list[int]] = {}
    for n, (fqn, nbytes) in enumerate(boxes):
        by_key.setdefault(key_of(fqn, nbytes), []).append(n)
    small: list[int] = []
    others: list[list[int]] = []
    for members in by_key.values():
        if sum(boxes[n][1] for n in members) < small_nbytes:
            small += members
        else:
            others.append(members)
    return sorted(small), others


def grouped_layout(specs: Sequence[BoxSpec], build: Build, n_files: int) -> Layout | None:
    """Return a layout in which each group of `group_by_role` has files of its own.

    Args:
        specs: The boxes, in the order of the state dict.
        build: Makes the layout of one group.
        n_files: As of `group_by_role`.

    Returns:
        The layout; None: it takes more than `MAX_PARTS` files.

    Raises:
        AsyncCkptError: As `build`.
    """
    parts: list[PartLayout] = []
    chunks: dict[int, Chunk] = {}
    for group in group_by_role([(spec.fqn, spec.nbytes) for spec in specs], n_files):
        members = [specs[n] for n in group]
        is_small = sum(spec.nbytes for spec in members) < PAGES_FROM_NBYTES
        placed = build(members, SMALL_HEADER_UNIT if is_small else PAGE_NBYTES)
        for n, chunk in zip(group, placed.chunks, strict=True):
            chunks[n] = chunk._replace(part=len(parts) + chunk.part)
        parts += placed.parts
    if len(parts) > MAX_PARTS:
        return None
    return Layout(parts=tuple(parts), chunks=tuple(chunks[n] for n in range(len(specs))))
