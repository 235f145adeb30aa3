"""What a pickle of torch said of values that a checkpoint's structure has no words for: a target may have them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.pickle_values import Defaulting, Tally
from asyncckpt.foreign.torch_globals import TensorRef
from asyncckpt.format.tree import Path
from asyncckpt.storage.source import Strided

_MUTABLE = frozenset({list, dict, OrderedDict, Tally, Defaulting, set, bytearray})
"""Types of which it matters whether two are one object: who changes one changes both."""


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
        shared: Of dicts, lists and sets that stand at several paths of one pickle: path to the first of them.
        nested: Pairs of paths at which such a one stands, inside of the object leaf that is at the first of them.
    """

    tensors: dict[str, SavedView] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    shared: dict[Path, Path] = field(default_factory=dict)
    nested: set[tuple[Path, Path]] = field(default_factory=set)


class Met:
    """The dicts, lists and sets that were met in pickles so far. They are kept: each has its id alone.

    Args:
        saved: Gets those that are met again.
    """

    def __init__(self, saved: AsSaved) -> None:
        self._saved = saved
        self._met: dict[int, tuple[Any, Path, bool]] = {}

    def note(self, value: Any, path: Path, *, is_inside: bool = False) -> None:
        """Note a value at a path, or inside of the object leaf at one."""
        if type(value) not in _MUTABLE:
            return
        if id(value) not in self._met:
            self._met[id(value)] = (value, path, is_inside)
            return
        _, first, was_inside = self._met[id(value)]
        if is_inside or was_inside:
            self._saved.nested.add((path, first) if is_inside else (first, path))
        else:
            self._saved.shared[first] = self._saved.shared[path] = first


def view_of(ref: TensorRef, place: tuple[int, int] | Strided) -> SavedView:
    """Return the view that a tensor is, whose elements lie at `place`."""
    part, start = (place.part, place.offset) if isinstance(place, Strided) else place
    before = ref.offset * DTYPES[ref.dtype].itemsize
    return SavedView(ref, part, start - before, not isinstance(place, Strided))
