"""What a pickle of torch said of values that a checkpoint's structure has no words for: a target may have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.torch_globals import TensorRef
from asyncckpt.format.tree import Path
from asyncckpt.storage.source import Strided


class SavedView(NamedTuple):
    """A tensor as it was saved. Two leaves with the same `ref`, by identity, were the same object.

    Attributes:
        ref: Its geometry, and whether it was a Parameter or required gradients.
        part: Of the file that its storage lies in.
        storage_start: Where byte 0 of that storage lies in the file.
        is_row_major: Whether its elements are, in the file.
    """

    ref: TensorRef
    part: int
    storage_start: int
    is_row_major: bool

    @property
    def extent(self) -> tuple[int, int]:
        """First and one past the last byte of its elements in the file."""
        ref, itemsize = self.ref, DTYPES[self.ref.dtype].itemsize
        start = self.storage_start + ref.offset * itemsize
        if 0 in ref.size:
            return start, start
        span = 1 + sum((n - 1) * stride for n, stride in zip(ref.size, ref.stride, strict=True))
        return start, start + span * itemsize


@dataclass(slots=True)
class AsSaved:
    """See the module.

    Attributes:
        tensors: By FQN.
        values: By FQN: object leaves that hold something that plain values do not, as the interpreter made them.
        counters: Paths of the dicts that were Counters.
    """

    tensors: dict[str, SavedView] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    counters: set[Path] = field(default_factory=set)


def view_of(ref: TensorRef, place: tuple[int, int] | Strided) -> SavedView:
    """Return the view that a tensor is, whose elements lie at `place`."""
    part, start = (place.part, place.offset) if isinstance(place, Strided) else place
    before = ref.offset * DTYPES[ref.dtype].itemsize
    return SavedView(ref, part, start - before, not isinstance(place, Strided))
