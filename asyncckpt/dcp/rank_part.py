"""One rank's part in a save that is written in this process: lay out, write, and say what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.dcp.laid_out import WriteOptions, lay_out
from asyncckpt.dcp.resolving import CallersResolves
from asyncckpt.dcp.results import rank_result
from asyncckpt.dcp.streamed import StreamedImage, in_file_order
from asyncckpt.dcp.tickets import Ticket
from asyncckpt.dcp.written_tensor import settle
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import TensorEntry
from asyncckpt.staging.cuda import CudaDevice
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_writer import RankJob, RankWriter

MIN_THREADS = 3
"""That write. 1.6 GB on two cores take 2.8 s by one, 2.3 by two, 2.05 by three or four: while one thread copies and
digests, the disk has nothing to do."""


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
    laid_out = lay_out(plan, planner, one_file=options.one_file)
    resolves, order = list(laid_out.resolves), in_file_order(laid_out.layout)
    device, serving = CudaDevice(), None
    if options.threads == 1:
        serving = CallersResolves([resolves[n] for n in order], partial(settle, device=device))
        for n, resolve in zip(order, serving.resolves(), strict=True):
            resolves[n] = resolve
    threads = max(options.threads, MIN_THREADS)
    with StreamedImage(
        laid_out.layout, laid_out.specs, resolves, ticket.save_id, options.copy_ahead_nbytes, device
    ) as image:
        job = RankJob(
            path=options.path,
            save_id=ticket.save_id,
            rank=ticket.rank,
            world_size=ticket.world_size,
            parts=image.parts,
            structure=laid_out.structure,
            objects=encode_objects(ticket.save_id, []),
            n_tensors=laid_out.n_tensors,
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
    results = laid_out.results_of(ticket.save_id, ticket.rank)
    if keep_open:
        unfinished = Unfinished(writer=writer, job=job, tensors=laid_out.tensors)
        return [*results, rank_result(ticket.rank, None)], unfinished
    return [*results, rank_result(ticket.rank, writer.finish(job))], None
