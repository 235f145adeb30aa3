"""Which tensors of pickles are different views of the same elements, and are not so in the target."""

from __future__ import annotations

from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.torch_views import overlapping, pickles, saved_tensors


def sharing(outline: Outline, to: str) -> list[str]:
    """Return the names of the tensors whose elements are others' as well; tied ones, which are the same, not.

    Args:
        outline: What is written.
        to: The target's kind: within one pickle views stay what they are.
    """
    within = {
        fqn: number
        for number, (path, node) in enumerate(pickles(outline, to))
        for fqn, _, _ in saved_tensors(outline, node, path)
    }
    found: set[int] = set()
    for group in overlapping(saved_tensors(outline, outline.tree)):
        numbers = {number for _, number, _ in group}
        places = {within.get(fqn) for fqn, _, _ in group}
        if len(numbers) > 1 and (None in places or len(places) > 1):
            found |= numbers
    return sorted(outline.names[number] for number in found)
