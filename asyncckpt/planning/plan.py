"""What is computed once per structure of a state dict: layout, headers, encoded structure. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncckpt.format.layout import PAGE_NBYTES, Layout
from asyncckpt.format.tree import Node
from asyncckpt.protocol.request import PartRange

Signature = tuple[Node, tuple[Any, ...]]
"""A structure's fingerprint: its tree, and dtype and shape of every tensor. Two equal ones share a plan."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavePlan:
    """The plan of one rank for one structure.

    Attributes:
        signature: What the plan was made for.
        layout: Parts and, per tensor number, its chunk.
        structure: `format.structure.encode_structure`'s bytes.
        n_tensors, tensor_nbytes: For reports.
    """

    signature: Signature
    layout: Layout
    structure: bytes
    n_tensors: int
    tensor_nbytes: int

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
