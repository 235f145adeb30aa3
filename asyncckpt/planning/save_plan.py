"""The plan of one rank's saves, which is computed once per structure of a state dict. Values only; no torch.

From the agreement of the ranks to bytes: `write_agreement` and `shard_ownership` give a rank an *assignment* for each
tensor (which rows it writes, under which name). `planner` turns it into a *tensor write* with *tensor boxes*, which
staging copies, one for each chunk of the shard files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncckpt.format.layout import PAGE_NBYTES, BoxSpec, Layout
from asyncckpt.format.state_tree import Node
from asyncckpt.planning.sample_schedule import SampleSchedule
from asyncckpt.planning.write_agreement import Agreement
from asyncckpt.protocol.request import PartRange

Signature = tuple[Node, tuple[Any, ...], tuple[Any, ...]]
"""A structure's fingerprint: (tree, (dtype, shape) of every tensor, `ShardLeaf` or None by tensor number). The last is
empty without shards. States with equal signatures share a plan."""


class TensorBox(NamedTuple):
    """The box of a tensor that is copied into one chunk; one run of bytes if the tensor is contiguous.

    Attributes:
        number: Index into `Flattened.tensors`.
        offsets: Offsets of the box in that tensor, in elements. For a shard, in the part that this rank holds.
        sizes: Shape of the box, in elements.
    """

    number: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SharedTensor(NamedTuple):
    """A tensor, or a box of one, that other ranks claim to hold too.

    Attributes:
        fqn: Name under which the ranks compare it.
        number: Index into `Flattened.tensors`.
        split: Whether several ranks write rows of it.
        schedule: The saves at which it is compared.
        n_elements: Number of its elements.
        itemsize: Bytes of one element.
    """

    fqn: str
    number: int
    split: bool
    schedule: SampleSchedule
    n_elements: int
    itemsize: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavePlan:
    """The plan of one rank for one structure.

    Attributes:
        signature: Signature of the structure that the plan was made for.
        layout: Parts and chunks of the shard files.
        boxes: Aligned with the layout's chunks: the box that is copied into each.
        specs: Aligned with `boxes`: the stored tensor, and the box's offsets and sizes in it.
        names: By tensor number, the name under which the tensor is stored.
        structure: Result of `format.structure.encode_structure`.
        n_tensors: Number of tensors whose first element this rank writes. Summed over all ranks, every stored tensor
            counts once.
        tensor_nbytes: Bytes of tensors that this rank writes.
        agreement: Agreement of the ranks; None for a single process.
        unagreed: Numbers of the tensors on which the ranks have not agreed yet, so that they must meet.
        shared: By schedule, the tensors that this rank compares with other ranks.
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
    unagreed: tuple[int, ...] = ()
    shared: Mapping[SampleSchedule, tuple[SharedTensor, ...]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the agreement, which must be equal on all ranks of a save; "" without one."""
        return "" if self.agreement is None else self.agreement.fingerprint

    @property
    def body_nbytes(self) -> int:
        """Bytes of the parts in the slot, each padded to whole pages."""
        return sum(p.padded_nbytes for p in self.layout.parts)

    @property
    def file_nbytes(self) -> int:
        """Total bytes of the shard files, without padding."""
        return sum(p.nbytes for p in self.layout.parts)

    def part_ranges(self) -> tuple[PartRange, ...]:
        """Range of each part in a slot: one after the other, behind the head page."""
        ranges, offset = [], PAGE_NBYTES
        for part in self.layout.parts:
            ranges.append(PartRange(offset=offset, nbytes=part.nbytes))
            offset += part.padded_nbytes
        return tuple(ranges)
