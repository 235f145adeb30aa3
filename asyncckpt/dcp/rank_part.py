"""One rank's part in a save: lay out, write, and say what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.dcp.items import bytes_of, sorted_out
from asyncckpt.dcp.leaf_values import encode_leaf
from asyncckpt.dcp.resolving import CallersResolves
from asyncckpt.dcp.results import StoredChunk, StoredLeaf, rank_result
from asyncckpt.dcp.streamed import StreamedImage, in_file_order
from asyncckpt.dcp.tickets import Ticket
from asyncckpt.dcp.written_tensor import Resolve, settle
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.layout import BoxSpec, Layout, build_layout
from asyncckpt.format.names import MAX_PARTS, shard_name
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.staging.cuda import CudaDevice
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_files import RankWriter
from asyncckpt.storage.rank_job import RankJob

MIN_THREADS = 3
"""That write. 1.6 GB on two cores take 2.8 s by one, 2.3 by two, 2.05 by three or four: while one thread copies and
digests, the disk has nothing to do."""


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
class Unfinished:
    """The coordinator's files but for index and objects: its writer, the job, and its tensors."""

    writer: RankWriter
    job: RankJob
    tensors: tuple[TensorEntry, ...]


def write_part(
    plan: SavePlan, planner: SavePlanner, ticket: Ticket, options: WriteOptions, files: Files, *, keep_open: bool
) -> tuple[list[WriteResult], Unfinished | None]:
    """Write what `plan` gives to this rank.

    Args:
        plan, planner: What to write.
        ticket: Of the save.
        options: How.
        files: The storage seam.
        keep_open: Leave index and objects to the caller: this is the coordinator.

    Returns:
        A result for each item, and one for the rank; and what is left to do.

    Raises:
        UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
        CheckpointExistsError, OSError: Storage. What was created is removed.
        Exception: Whatever the planner raises.

    Blocks: for the writes.
    """
    items = sorted_out(plan.items)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # IMPORTANT: what the state was made by may still run in this thread's stream; writing threads have others.
        torch.cuda.current_stream().synchronize()
    results = [_result(item, 0, StoredLeaf(raw=encode_leaf(planner, item))) for item in items.leaves]
    results += [_result(item, 0, None) for item in items.empty]
    specs = [spec for _, spec in items.tensors]
    layout = build_layout(specs, n_parts=1 if options.one_file else max(1, min(len(specs), MAX_PARTS)))
    if len(layout.parts) > MAX_PARTS:
        raise UnsupportedLeafError(
            f"a rank holds more than {MAX_PARTS} boxes of one tensor; give it fewer, larger ones"
        )
    tensors = _entries(specs, layout)
    resolves: list[Resolve] = [partial(_elements, planner, item, spec) for item, spec in items.tensors]
    order = in_file_order(layout)
    device, serving = CudaDevice(), None
    if options.threads == 1:
        serving = CallersResolves([resolves[n] for n in order], partial(settle, device=device))
        for n, resolve in zip(order, serving.resolves(), strict=True):
            resolves[n] = resolve
    threads = max(options.threads, MIN_THREADS)
    with StreamedImage(layout, specs, resolves, ticket.save_id, options.copy_ahead_nbytes, device) as image:
        job = RankJob(
            path=options.path,
            save_id=ticket.save_id,
            rank=ticket.rank,
            world_size=ticket.world_size,
            parts=image.parts,
            structure=structure_of(tensors, layout),
            objects=encode_objects(ticket.save_id, []),
            n_tensors=sum(not any(spec.offsets) for spec in specs),
            fsync=options.fsync,
            overwrite=options.overwrite,
            umask=options.umask,
            threads=threads,
        )
        writer = RankWriter(job, image, files, serving.check if serving is not None else lambda: None)
        with ThreadPoolExecutor(threads - 1, "asyncckpt-write") as pool:
            if serving is not None:
                serving.serve(partial(writer.write_shards, pool))
            else:
                writer.write_shards(pool)
    for (item, spec), chunk in zip(items.tensors, layout.chunks, strict=True):
        name = shard_name(ticket.save_id, ticket.rank, chunk.part)
        stored = StoredChunk(relative_path=name, offset=chunk.offset_bytes, length=chunk.nbytes)
        results.append(_result(item, spec.nbytes, stored))
    if keep_open:
        return [*results, rank_result(ticket.rank, None)], Unfinished(writer=writer, job=job, tensors=tensors)
    return [*results, rank_result(ticket.rank, writer.finish(job))], None


def structure_of(tensors: tuple[TensorEntry, ...], layout: Layout) -> bytes:
    """Return the structure of a rank that is not the coordinator: its chunks. All names are in the coordinator's."""
    part_nbytes = tuple(part.nbytes for part in layout.parts)
    return encode_structure(Structure(tree=("d", ()), tensors=tensors, n_objects=0, part_nbytes=part_nbytes))


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
