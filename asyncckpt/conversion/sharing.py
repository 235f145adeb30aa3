"""Which tensors of a `torch.save` file are different views of the same elements: no target keeps that."""

from __future__ import annotations

from asyncckpt.conversion.outline import Outline
from asyncckpt.storage.files import Files
from asyncckpt.storage.source import Inline, Strided


def sharing(outline: Outline, files: Files) -> list[str]:
    """Return the names of the tensors whose elements are others' as well; tied ones, which are the same, not.

    Raises:
        OSError: The source cannot be read.
    """
    source = outline.contents.source
    if source is None or source.kind != "torch":
        return []
    extents: list[tuple[int, int, int]] = []
    for number in {node[1] for _, node in outline.leaves() if node[0] != "O"}:
        for _, chunk in outline.tensors[number].chunks:
            place = source.place(chunk.part, files)
            if isinstance(place, Inline) or not chunk.nbytes:
                continue
            start = place.offset + chunk.offset_bytes
            extents.append((start, start + (place.nbytes if isinstance(place, Strided) else chunk.nbytes), number))
    found: set[int] = set()
    end, last = -1, -1
    for start, stop, number in sorted(extents):
        if start < end:
            found |= {last, number}
        if stop > end:
            end, last = stop, number
    return sorted(outline.names[number] for number in found)
