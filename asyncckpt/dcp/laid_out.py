"""What a plan gives to one rank, laid out as files before a tensor is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.dcp.items import Items, bytes_of, sorted_out
from asyncckpt.dcp.leaf_values import encode_leaf
from asyncckpt.dcp.results import StoredChunk, StoredLeaf
from asyncckpt.dcp.written_tensor import Resolve
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.layout import BoxSpec, Layout, build_layout
from asyncckpt.format.names import MAX_PARTS, SaveId, shard_name
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How to write; `one_file`: a single one per rank, else one per tensor. `threads`: that call the planner."""

    path: str
    fsync: bool
    threads: int
    one_file: bool
    copy_ahead_nbytes: int
    overwrite: bool
    umask: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """See the module.

    Attributes:
        items: Of the plan.
        results: Of leaves, and of boxes without elements: they are not in the files.
        specs: Of the boxes, aligned with `layout.chunks` and `resolves`.
        layout: Of the files.
        tensors: What the index says of them.
        resolves: Each makes a box's elements, by the planner.
    """

    items: Items
    results: Sequence[WriteResult]
    specs: Sequence[BoxSpec]
    layout: Layout
    tensors: tuple[TensorEntry, ...]
    resolves: Sequence[Resolve]

    @property
    def n_tensors(self) -> int:
        """For reports."""
        return sum(not any(spec.offsets) for spec in self.specs)

    @property
    def structure(self) -> bytes:
        """The structure of a rank that is not the coordinator: its chunks. All names are in the coordinator's."""
        part_nbytes = tuple(part.nbytes for part in self.layout.parts)
        return encode_structure(Structure(tree=("d", ()), tensors=self.tensors, n_objects=0, part_nbytes=part_nbytes))

    def results_of(self, save_id: SaveId, rank: int) -> list[WriteResult]:
        """Return a result for each item, once the save has its id."""
        found = list(self.results)
        for (item, spec), chunk in zip(self.items.tensors, self.layout.chunks, strict=True):
            name = shard_name(save_id, rank, chunk.part)
            stored = StoredChunk(relative_path=name, offset=chunk.offset_bytes, length=chunk.nbytes)
            found.append(_result(item, spec.nbytes, stored))
        return found


def lay_out(plan: SavePlan, planner: SavePlanner, *, one_file: bool) -> LaidOut:
    """Lay out what `plan` gives to this rank; leaves that are no tensors are made, tensors are not.

    Raises:
        UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
        Exception: Whatever the planner raises.
    """
    items = sorted_out(plan.items)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # IMPORTANT: what the state was made by may still run in this thread's stream; writing threads have others.
        torch.cuda.current_stream().synchronize()
    results = [_result(item, 0, StoredLeaf(raw=encode_leaf(planner, item))) for item in items.leaves]
    results += [_result(item, 0, None) for item in items.empty]
    specs = [spec for _, spec in items.tensors]
    layout = build_layout(specs, n_parts=1 if one_file else max(1, min(len(specs), MAX_PARTS)))
    if len(layout.parts) > MAX_PARTS:
        raise UnsupportedLeafError(
            f"a rank holds more than {MAX_PARTS} boxes of one tensor; give it fewer, larger ones"
        )
    return LaidOut(
        items=items,
        results=results,
        specs=specs,
        layout=layout,
        tensors=_entries(specs, layout),
        resolves=[partial(_elements, planner, item, spec) for item, spec in items.tensors],
    )


def _result(item: WriteItem, nbytes: int, stored: object) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=stored)


def _elements(planner: SavePlanner, item: WriteItem, spec: BoxSpec) -> torch.Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise UnsupportedLeafError(
            f"the planner resolves the tensor {spec.fqn!r} to a {kind}", leaf=spec.fqn, type_name=kind
        )
    return bytes_of(found, spec)


def _entries(specs: list[BoxSpec], layout: Layout) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    for spec, chunk in zip(specs, layout.chunks, strict=True):
        known = entries.get(spec.fqn)
        if known is None:
            entries[spec.fqn] = TensorEntry(
                fqn=spec.fqn, dtype=spec.dtype, global_shape=spec.global_shape, chunks=(chunk,)
            )
        else:
            entries[spec.fqn] = known._replace(chunks=(*known.chunks, chunk))
    return tuple(entries.values())
