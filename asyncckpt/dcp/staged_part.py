"""One rank's part in a save that the worker writes: laid out, staged into a slot, and sealed.

The coordinator knows tree, objects and step only when every rank has staged. So its slot is sealed last, with a request
that says them (memory/SPEC.md, section 5); the other ranks leave the step to it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt import __version__
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.dcp.committing import Saved
from asyncckpt.dcp.filling import fill, pieces_of
from asyncckpt.dcp.laid_out import LaidOut, WriteOptions, lay_out
from asyncckpt.dcp.results import StoredLeaf, rank_result
from asyncckpt.dcp.seal_room import SealRoom, names_nbytes
from asyncckpt.dcp.streamed import StreamedImage
from asyncckpt.dcp.tickets import Ticket
from asyncckpt.dcp.unsealed import Unsealed, begin, hand_over
from asyncckpt.errors import InsufficientMemoryError
from asyncckpt.format.layout import round_up
from asyncckpt.format.objects import encode_objects
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.protocol.request import MAX_METADATA_NBYTES, PartRange, SaveRequest, encode_request
from asyncckpt.staging.cuda import CudaDevice
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.segmented_copy import REQUEST_SLACK_NBYTES, ring_within
from asyncckpt.staging.streaming import SlotStream, pays

SMALL_RING_NBYTES = 256 << 20
"""Of the slot of a state for which the machine has no memory. Chosen: sixteen writes, and a fraction of any node."""

_log = logging.getLogger("asyncckpt.dcp")


def stage_part(
    plan: SavePlan,
    planner: SavePlanner,
    ticket: Ticket,
    options: WriteOptions,
    process: WorkerClient,
    seal_room: SealRoom,
) -> tuple[list[WriteResult], Unsealed | None]:
    """Stage what `plan` gives to this rank, and hand it to the worker unless this is the coordinator.

    Args:
        plan, planner: What to save.
        ticket: Of the save.
        options: How.
        process: The worker, joined for the ticket.
        seal_room: Of the coordinator.

    Returns:
        A result for each item, and one for the rank; and what the coordinator has to seal.

    Raises:
        UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
        SlotTimeoutError: The worker does not get on with what it has.
        InsufficientMemoryError: Not even for a ring of segments.
        AsyncCkptError: The save has failed meanwhile, or the worker is lost. In any case it has ended on all ranks.
        Exception: Whatever the planner raises.

    Blocks: for a slot, and for the copy; where the state is larger than its memory, for all but the last segments to be
    written.
    """
    save_id, slot = ticket.save_id, None
    try:
        part = _Part(lay_out(plan, planner, one_file=options.one_file), ticket, options, process, seal_room)
        device = CudaDevice()
        with StreamedImage(
            part.laid_out.layout,
            part.laid_out.specs,
            part.laid_out.resolves,
            save_id,
            options.copy_ahead_nbytes,
            device,
        ) as image:
            part.lie_in(image)
            slot = part.acquire(image)
            unsealed = part.stage(image, slot)
    except BaseException as error:
        if slot is not None:
            slot.settle()
        process.withdraw(save_id, f"staging failed: {error!r}")
        raise
    return [*part.laid_out.results_of(save_id, ticket.rank), rank_result(ticket.rank, None)], unsealed


class _Part:
    """One `stage_part`."""

    def __init__(
        self, laid_out: LaidOut, ticket: Ticket, options: WriteOptions, process: WorkerClient, seal_room: SealRoom
    ) -> None:
        self.laid_out = laid_out
        self._ticket, self._options, self._process = ticket, options, process
        self._began_at, self._seal_room = time.perf_counter(), seal_room
        self._is_open_end = ticket.rank == 0
        self._ring: StreamLayout | None = None
        config = process.config
        self.request = SaveRequest(
            save_id=str(ticket.save_id),
            step=None,
            path=options.path,
            rank=ticket.rank,
            world_size=ticket.world_size,
            parts=(),
            structure=laid_out.structure,
            objects=encode_objects(ticket.save_id, []),
            n_tensors=laid_out.n_tensors,
            metadata="{}",
            fsync=options.fsync,
            overwrite=options.overwrite,
            umask=options.umask,
            write_threads=config.write_threads or 0,
            package=__version__,
            commit_timeout_s=config.commit_timeout_s,
            hook_timeout_s=0.0,
            plan="",
            samples=b"",
            changed=False,
        )

    def lie_in(self, image: StreamedImage) -> None:
        """Take the files' places over from the image."""
        parts = tuple(PartRange(offset=PAGE_NBYTES + offset, nbytes=nbytes) for offset, nbytes in image.parts)
        self.request = replace(self.request, parts=parts)

    def acquire(self, image: StreamedImage) -> LentSlot:
        """Return a slot for everything, or one for a ring, where there is no memory for that."""
        limit = self._process.config.arena_limit_bytes
        needed, likely = self._rooms(len(encode_request(self.request)))
        if likely > needed and (slot := self._acquire(image, likely, limit)) is not None:
            return slot
        slot = self._acquire(image, needed, limit)
        return slot or self._slot(slot_nbytes(len(image), needed))  # which says why not

    def _acquire(self, image: StreamedImage, room: int, limit: int | None) -> LentSlot | None:
        """Return a slot with so much room for the request, or None where there is no memory for it."""
        nbytes = slot_nbytes(len(image), room)
        if limit is None or nbytes <= limit:
            try:
                return self._slot(nbytes, self._spare(limit))
            except InsufficientMemoryError as error:
                if limit is not None or nbytes <= SMALL_RING_NBYTES:
                    return None
                _log.warning("save %s: %s", self._ticket.save_id, error.message)
        room += self._spare(limit)
        ring = ring_within(limit or SMALL_RING_NBYTES, self.request.parts, room)
        if ring is None:
            return None
        self._ring = ring
        self.request = replace(self.request, ring_segments=ring.n_cells, ring_segment_nbytes=ring.segment_nbytes)
        _log.warning(
            "save %s: %d bytes go through %d bytes of memory in segments: staging takes as long as writing",
            self._ticket.save_id,
            len(image),
            ring.cells_nbytes,
        )
        return self._slot(ring.end + room + PAGE_NBYTES)

    def _slot(self, nbytes: int, spare_nbytes: int = 0) -> LentSlot:
        ticket, path, pool = self._ticket, self._options.path, self._process.pool
        return pool.acquire(nbytes, None, ticket.save_id, step=None, path=path, spare_nbytes=spare_nbytes)

    def _spare(self, limit: int | None) -> int:
        """Return how much is added for what other ranks' leaves may take in the coordinator's request."""
        return self._seal_room.spare_nbytes(limit or SMALL_RING_NBYTES) if self._is_open_end else 0

    def _rooms(self, request_nbytes: int) -> tuple[int, int]:
        """Return how much of the slot is for requests at least, and how much may well be wanted.

        Of the coordinator, for the one of the seal too.
        """
        room = round_up(request_nbytes + REQUEST_SLACK_NBYTES)
        if not self._is_open_end:
            return room, room
        items, world_size = self.laid_out.items, self._ticket.world_size
        names = {item.index.fqn for item in [*(item for item, _ in items.tensors), *items.leaves, *items.empty]}
        raws = [r.storage_data.raw for r in self.laid_out.results if isinstance(r.storage_data, StoredLeaf)]
        objects_nbytes = len(encode_objects(self._ticket.save_id, raws))
        if world_size == 1:
            objects_nbytes += MAX_METADATA_NBYTES
        own_names_nbytes, seal_room = names_nbytes(names), self._seal_room
        needed = seal_room.nbytes(own_names_nbytes, objects_nbytes)
        return 2 * room + needed, 2 * room + seal_room.likely_nbytes(own_names_nbytes, objects_nbytes, world_size)

    def stage(self, image: StreamedImage, slot: LentSlot) -> Unsealed | None:
        """Fill the slot; seal it and hand it over, but that of the coordinator."""
        process, save_id, path = self._process, self._ticket.save_id, self._options.path
        ring, control = self._ring, slot.memory.control
        slot.generation += 1
        slot.is_ring = ring is not None
        request = encode_request(self.request)
        body_end = PAGE_NBYTES + len(image) if ring is None else ring.end
        # A coordinator of several ranks begins at the end: nobody knows yet how long its request will be.
        is_known = not self._is_open_end or self._ticket.world_size == 1
        streams = ring is not None or (pays(len(image)) and is_known)
        begun = streams or not self._is_open_end
        if begun:
            begin(process, slot, self.request, len(request))
        control.open(slot.generation)
        pieces = pieces_of(image, ring)
        stream: SlotStream | None = None
        if streams:
            stream = SlotStream(process, slot, request, body_end, ring, save_id=save_id, step=None, path=path)

        def ready(number: int) -> None:
            if begun and (error := process.early_error(save_id)) is not None:
                raise error
            if stream is not None and ring is not None:
                stream.await_cell(number)

        def filled(count: int) -> None:
            done_nbytes = pieces[count - 1].end
            if stream is not None:
                stream.has_filled(round_up(done_nbytes) if ring is None else ring.end_of(count))
            control.note_staged(done_nbytes)

        fill(image, slot.mapping.address, pieces, threads=self._options.threads, ready=ready, filled=filled)
        if self._is_open_end:
            saved = Saved(
                save_id,
                path,
                self._ticket.world_size,
                self.laid_out.tensors,
                tuple(nbytes for _, nbytes in image.parts),
            )
            return Unsealed(
                process=process,
                saved=saved,
                seal_room=self._seal_room,
                request=self.request,
                slot=slot,
                offset=round_up(body_end + len(request)) if streams else body_end,
                body_nbytes=len(image),
                begun=begun,
                stream=stream,
                began_at=self._began_at,
            )
        if stream is not None:
            stream.finish()
        else:
            control.seal(request, body_end)
        hand_over(process, slot, self.request, self._began_at)
        return None
