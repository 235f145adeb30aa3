"""Leaves of the source that were not read: no target can hold them."""

from __future__ import annotations

from dataclasses import replace

from asyncckpt.conversion.outline import Outline, pruned
from asyncckpt.storage.unread import Unread


def unread_of(outline: Outline) -> dict[str, Unread]:
    """Return the leaves of an outline that were not read, by FQN."""
    named = ((fqn, outline.objects[node[1]]) for fqn, node in outline.leaves() if node[0] == "O")
    return {fqn: found for fqn, found in named if isinstance(found, Unread)}


def readable(outline: Outline) -> Outline:
    """Return the outline without the leaves that were not read; numbers stay."""
    unread = unread_of(outline)
    if not unread:
        return outline
    objects = [None if isinstance(raw, Unread) else raw for raw in outline.objects]
    return replace(pruned(outline, lambda fqn: fqn not in unread), objects=objects)
