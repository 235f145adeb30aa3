"""What is computed once per structure of a state dict: layout, headers, encoded structure. Values only; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncckpt.format.layout import PAGE_NBYTES, BoxSpec, Layout
from asyncckpt.format.state_tree import Node
from asyncckpt.planning.sample_schedule import Turn
from asyncckpt.planning.write_agreement import Agreement
from asyncckpt.protocol.request import PartRange

Signature = tuple[Node, tuple[Any, ...], tuple[Any, ...]]
"""A structure's fingerprint: its tree, dtype and shape of every tensor, and by tensor number what is a shard of what
(empty without shards). Two equal ones share a plan."""


class TensorBox(NamedTuple):
    """What goes into one chunk: `sizes` elements from `offsets` on of the state's tensor at `number`, one run of a
    contiguous one. Of a shard, offsets count in the part that is here."""

    number: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SharedTensor(NamedTuple):
    """A tensor that other ranks claim to hold too, and when they compare it; `split`: several of them write it."""

    fqn: str
    number: int
    split: bool
    turn: Turn
    n_elements: int
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavePlan:
    """The plan of one rank for one structure.

    Attributes:
        signature: What the plan was made for.
        layout: Parts and chunks.
        boxes: Aligned with the layout's chunks: what goes where.
        specs: Aligned with `boxes`: what each is of the stored tensor.
        names: Of every tensor, as it is stored.
        structure: `format.structure.encode_structure`'s bytes.
        n_tensors: Tensors whose first element this rank writes, for reports: over all ranks, every stored tensor once.
        tensor_nbytes: What this rank writes.
        agreement: With the other ranks; None where there are none.
        news: Numbers of the tensors that are not agreed upon yet; the other ranks are to be told.
        shared: By turn: what is compared with other ranks', some of it at each save.
    """

    signature: Signature
    layout: Layout
    boxes: tuple[TensorBox, ...]
    specs: tuple[BoxSpec, ...]
    names: tuple[str, ...]
    structure: bytes
    n_tensors: int
    tensor_nbytes: int
    agreement: Agreement | None = None
    news: tuple[int, ...] = ()
    shared: Mapping[Turn, tuple[SharedTensor, ...]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The agreement's 16 hex digits, which all ranks of a save must share; "" where there is none."""
        return "" if self.agreement is None else self.agreement.fingerprint

    @property
    def body_nbytes(self) -> int:
        """Bytes of the parts in the slot, each padded to whole pages."""
        return sum(p.padded_nbytes for p in self.layout.parts)

    @property
    def file_nbytes(self) -> int:
        """Exact bytes of the shard files."""
        return sum(p.nbytes for p in self.layout.parts)

    def part_ranges(self) -> tuple[PartRange, ...]:
        """Where each part lies in a slot: one after the other behind the head page."""
        ranges, offset = [], PAGE_NBYTES
        for part in self.layout.parts:
            ranges.append(PartRange(offset=offset, nbytes=part.nbytes))
            offset += part.padded_nbytes
        return tuple(ranges)
