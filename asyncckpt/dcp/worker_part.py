"""One rank's part in a save that the worker writes: it is laid out as files, staged into a slot, and sealed.

The coordinator knows the tree, the objects and the step only after every rank has staged. So its slot is sealed last,
with a request that contains them (memory/SPEC.md, section 5); the requests of other ranks have no step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.client.pending_saves import StagedSnapshot, WriteFuture
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_stream import SlotStream, should_stream
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.config import RankInfo
from asyncckpt.dcp.commit import finished_request
from asyncckpt.dcp.tensor_stream import LazyImage
from asyncckpt.dcp.worker_session import SaveTask
from asyncckpt.dcp.write_plan import LaidOut, StoredLeaf, WriteOptions, lay_out, rank_result
from asyncckpt.errors import InsufficientMemoryError, SaveFailedError, SlotBusyError
from asyncckpt.format.layout import round_up
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import TensorEntry
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.protocol.request import MAX_METADATA_NBYTES, PartRange, SaveRequest, check_metadata, encode_request
from asyncckpt.staging.device import CudaDevice
from asyncckpt.staging.ring_copy import ring_within
from asyncckpt.staging.save_request import build_request
from asyncckpt.staging.slot_copy import REQUEST_SLACK_NBYTES
from asyncckpt.storage.rank_writer import EXTENT_NBYTES

NAME_NBYTES = 128
"""Bytes of a leaf in tree and index, apart from its name, which is stored twice. Measured: 20 to 60."""

MANY_RANKS = 8
"""If the plans of other ranks are cached and therefore empty, each rank is assumed to have as many leaves as the
coordinator, but at most so many ranks: most leaves are on one rank. Chosen, not measured."""

LEAVES_NBYTES = 4 << 20
"""Room for the leaves of other ranks, whose lengths are not in the plans; at most an eighth of the limit. Chosen, not
measured."""


@dataclass(kw_only=True, slots=True)
class RequestSizeEstimate:
    """Estimates how much room at the end of the slot the coordinator's final request needs. One per writer.

    Attributes:
        names_nbytes: Bytes of the names of all ranks' leaves, from the plans of this save.
        others_have_leaves: Whether another rank has leaves that are no tensors.
        others_have_cached_plans: Whether the plan of another rank is empty, as cached plans are.
        last_nbytes: Length of the last final request of this writer in bytes; 0: there was none.
    """

    names_nbytes: int = 0
    others_have_leaves: bool = False
    others_have_cached_plans: bool = False
    last_nbytes: int = 0

    def record_plans(self, plans: Sequence[SavePlan], own: int) -> None:
        """Record the plans of all ranks; `own` is the index of the coordinator's plan."""
        names = {item.index.fqn for plan in plans for item in plan.items}
        self.names_nbytes = names_nbytes(names)
        others = [plan for number, plan in enumerate(plans) if number != own]
        self.others_have_cached_plans = any(not plan.items for plan in others)
        self.others_have_leaves = any(item.type is WriteItemType.BYTE_IO for plan in others for item in plan.items)

    def nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int) -> int:
        """Return the minimal length of names and leaves in bytes, in whole pages."""
        return round_up(max(own_names_nbytes, self.names_nbytes) + own_leaves_nbytes)

    def likely_nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int, world_size: int) -> int:
        """Return the likely length of names and leaves in bytes, in whole pages. No save is refused for lack of it."""
        as_ours = (
            min(world_size, MANY_RANKS) * (own_names_nbytes + own_leaves_nbytes) if self.others_have_cached_plans else 0
        )
        return max(self.nbytes(own_names_nbytes, own_leaves_nbytes), round_up(max(as_ours, self.last_nbytes)))

    def spare_nbytes(self, limit_nbytes: int) -> int:
        """Return the bytes to add for leaves of other ranks, in whole pages, to a slot of at most `limit_nbytes`."""
        return round_up(min(LEAVES_NBYTES, limit_nbytes // 8)) if self.others_have_leaves else 0


def names_nbytes(names: set[str]) -> int:
    """Return how many bytes leaves with these names take in tree and index."""
    return sum(2 * len(name.encode(errors="surrogatepass")) + NAME_NBYTES for name in names)


@dataclass(kw_only=True, slots=True)
class UnsealedPart:
    """The coordinator's part, staged but not sealed. `seal` seals the slot; `WorkerClient.withdraw` abandons it.

    Attributes:
        process: Client of the worker.
        request: The request as it was before staging.
        tensors: The tensors in this rank's files.
        size_estimate: Gets the length of the final request.
        slot: The slot; open.
        offset: Offset of the final request in the slot.
        body_nbytes: Length of the files in the slot in bytes.
        begun: Whether the worker was told of the save.
        stream: Writes the slot while it is filled; None: the slot is written after the seal.
        began_at: `time.perf_counter()` when staging began.
    """

    process: WorkerClient
    request: SaveRequest
    tensors: Sequence[TensorEntry]
    size_estimate: RequestSizeEstimate
    slot: Slot
    offset: int
    body_nbytes: int
    begun: bool
    stream: SlotStream | None
    began_at: float

    def seal(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> WriteFuture:
        """Seal the slot with the final request, and tell the worker.

        Args:
            metadata, results: The arguments of `StorageWriter.finish`.

        Returns:
            A future of the commit.

        Raises:
            SaveFailedError: See `finished_request`; or code `request`: the request is too long for its room in a slot
                that the worker is already writing.
            UnsupportedLeafError: See `finished_request`.
            InsufficientMemoryError: The request is too long for its room, and there is no memory for a larger slot.
            AsyncCkptError: The worker is lost.
        """
        asked, _ = finished_request(self.request, self.tensors, metadata, results)
        try:
            check_metadata(asked.metadata)
        except ValueError as error:
            raise self._failed("metadata", f"the planner data cannot be stored: {error}") from error
        request = encode_request(asked)
        self.size_estimate.last_nbytes = len(request) + REQUEST_SLACK_NBYTES
        if self.offset + len(request) > self.slot.memory.nbytes - PAGE_NBYTES:
            if self.begun:
                raise self._failed(
                    "request",
                    f"names and objects of all ranks take {len(request)} bytes, more than the room after the state, "
                    "which is already being written. The next save with this StorageWriter leaves enough room, if "
                    "arena_limit_bytes allows it; use_worker=False needs none",
                )
            self._move(len(request))
        if not self.begun:
            begin(self.process, self.slot, self.request, len(request))
        if self.stream is None:
            self.slot.memory.control.seal(request, self.offset)
        else:
            self.stream.finish(request, self.offset)
        return hand_over(self.process, self.slot, asked, self.began_at)

    def _move(self, request_nbytes: int) -> None:
        """Copy the files into a slot that is large enough, and free this one. The worker was not told of it yet."""
        before, path, save_id = self.slot, self.request.path, SaveId.parse(self.request.save_id)
        nbytes = slot_nbytes(self.body_nbytes, request_nbytes)
        try:
            slot = self.process.pool.acquire(nbytes, None, save_id, step=None, path=path, may_wait=False)
        except (InsufficientMemoryError, SlotBusyError) as error:
            # IMPORTANT: do not wait for a slot: the slot that would become free may be the one of this save.
            raise InsufficientMemoryError(
                f"save {save_id} to {path}: names and objects of all ranks take {request_nbytes} bytes, more than the "
                f"room in the slot of {before.memory.nbytes} bytes, and there is no memory for another slot of "
                f"{nbytes} bytes (arena_limit_bytes={self.process.config.arena_limit_bytes}); nothing was published. "
                "The next save with this StorageWriter leaves enough room, if arena_limit_bytes allows it; "
                "use_worker=False needs none",
                nbytes=nbytes,
                limit=self.process.config.arena_limit_bytes,
            ) from error
        slot.generation += 1
        slot.is_ring = False
        slot.memory.control.open(slot.generation)
        copy_bytes(
            slot.memory.mapping.address + PAGE_NBYTES, before.memory.mapping.address + PAGE_NBYTES, self.body_nbytes
        )
        self.slot = slot
        self.process.pool.free(save_id, before)

    def _failed(self, code: str, detail: str) -> SaveFailedError:
        request = self.request
        return SaveFailedError(
            f"save {request.save_id} to {request.path}: {detail}; nothing was published",
            code=code,
            path=request.path,
            detail=detail,
            save_id=request.save_id,
        )


def begin(process: WorkerClient, slot: Slot, request: SaveRequest, request_nbytes: int) -> None:
    """Tell the worker of a save, without its step. `request_nbytes`: the approximate length of the final request."""
    process.begin(
        SaveId.parse(request.save_id),
        slot,
        step=None,
        path=request.path,
        nbytes=sum(part.nbytes for part in request.parts) + request_nbytes,
        umask=request.umask,
    )


def hand_over(process: WorkerClient, slot: Slot, request: SaveRequest, began_at: float) -> WriteFuture:
    """Tell the worker that a slot is sealed. Does not wait.

    Args:
        process: Client of the worker.
        slot: The sealed slot.
        request: The final request.
        began_at: `time.perf_counter()` when staging began.

    Returns:
        A future of the commit.
    """
    snapshot = StagedSnapshot(
        save_id=SaveId.parse(request.save_id),
        step=request.step or 0,
        path=request.path,
        slot=slot,
        nbytes=sum(part.nbytes for part in request.parts),
        seconds={"stage": time.perf_counter() - began_at},
        began=began_at,
        extra={},
    )
    return process.write(snapshot, request.path)


class Piece(NamedTuple):
    """Bytes `start` to `end` of the image, and their offset in the slot."""

    start: int
    end: int
    offset: int


def pieces_of(image: LazyImage, ring: StreamLayout | None) -> list[Piece]:
    """Return the pieces of an image for the cells of a ring, or, if `ring` is None, for a slot with room for all."""
    if ring is None:
        starts = range(0, len(image), EXTENT_NBYTES)
        return [Piece(at, min(at + EXTENT_NBYTES, len(image)), PAGE_NBYTES + at) for at in starts]
    found = []
    for number, segment in enumerate(ring.segments):
        first = image.parts[segment.part][0]
        found.append(Piece(first + segment.start, first + round_up(segment.end), ring.offset_of(number)))
    return found


def fill(
    image: LazyImage,
    address: int,
    pieces: Sequence[Piece],
    *,
    threads: int,
    ready: Callable[[int], None],
    filled: Callable[[int], None],
) -> None:
    """Write all pieces of an image into a slot.

    Args:
        image: The image.
        address: Memory address of the slot.
        pieces: The pieces, in the order in which they are begun.
        threads: Number of threads. With 1, the calling thread writes the pieces one after another.
        ready: Called with the index of a piece before it is written; waits until its memory is free, or raises.
        filled: Called, under a lock, with the number of pieces without a gap from the first on, when it has grown.

    Raises:
        Exception: An error of the planner or of `ready`.

    Blocks: until all pieces are written. No other thread is left when this returns or raises.
    """

    def make(number: int) -> None:
        ready(number)
        start, end, offset = pieces[number]
        image.copy_to(start, end, address + offset)

    if threads == 1 or len(pieces) < 2:
        for number in range(len(pieces)):
            make(number)
            filled(number + 1)
        return
    lock, done = threading.Lock(), [False] * len(pieces)
    errors: list[BaseException] = []
    taken = iter(range(len(pieces)))
    count = 0

    def work() -> None:
        nonlocal count
        while not errors:
            with lock:
                number = next(taken, None)
            if number is None:
                return
            try:
                make(number)
            except BaseException as error:
                errors.append(error)
                return
            with lock:
                done[number] = True
                before = count
                while count < len(done) and done[count]:
                    count += 1
                if count > before:
                    filled(count)

    with ThreadPoolExecutor(min(threads, len(pieces)), "asyncckpt-stage") as pool:
        running: list[Future[None]] = []
        while True:
            try:
                if not running:
                    with signals_deferred():
                        running = [pool.submit(work) for _ in range(min(threads, len(pieces)))]
                wait(running)
                break
            except BaseException as error:
                # IMPORTANT: wait for the threads even after a second Ctrl-C: they would write to memory that another
                # save uses by then.
                errors.append(error)
                if not running:
                    break
    for future in running:
        future.result()
    if errors:
        raise errors[0]


SMALL_RING_NBYTES = 256 << 20
"""Size of the slot if the machine has no memory for the whole state: sixteen writes. Chosen, not measured."""

_log = logging.getLogger("asyncckpt.dcp")


def stage_part(
    plan: SavePlan,
    planner: SavePlanner,
    task: SaveTask,
    options: WriteOptions,
    process: WorkerClient,
    size_estimate: RequestSizeEstimate,
) -> tuple[list[WriteResult], UnsealedPart | None]:
    """Stage this rank's files. Except on the coordinator, also seal the slot and tell the worker.

    Args:
        plan, planner: The plan of this rank and its planner.
        task: This rank's part in the save.
        options: Settings.
        process: Client of the worker that joined for the task.
        size_estimate: The estimate for the coordinator's final request.

    Returns:
        A result for each item and one for the rank; and, on the coordinator, the part that is to be sealed.

    Raises:
        UnsupportedLeafError, DuplicateNameError: A leaf cannot be stored.
        SlotTimeoutError: No slot became free in time.
        InsufficientMemoryError: There is no memory, not even for a ring of segments.
        AsyncCkptError: The save has failed on another rank, or the worker is lost.
        Exception: An error of the planner.

        After any of these the save has ended on all ranks.

    Blocks: for a slot and for the copy. If the state is larger than its memory, until all but the last segments are
        written.
    """
    save_id, slot = task.save_id, None
    try:
        laid_out, device = lay_out(plan, planner, one_file=options.one_file), CudaDevice()
        with LazyImage(laid_out.layout, laid_out.resolves, save_id, options.copy_ahead_nbytes, device) as image:
            part = _Part(laid_out, image, task, options, process, size_estimate)
            slot = part.acquire(image)
            unsealed = part.stage(image, slot)
    except BaseException as error:
        if slot is not None:
            slot.settle()
        process.withdraw(save_id, f"staging failed: {error!r}")
        raise
    return [*laid_out.results_of(save_id, task.rank), rank_result(task.rank, None)], unsealed


class _Part:
    """One call of `stage_part`."""

    def __init__(
        self,
        laid_out: LaidOut,
        image: LazyImage,
        task: SaveTask,
        options: WriteOptions,
        process: WorkerClient,
        size_estimate: RequestSizeEstimate,
    ) -> None:
        self.laid_out = laid_out
        self._task, self._options, self._process = task, options, process
        self._began_at, self._size_estimate = time.perf_counter(), size_estimate
        self._is_coordinator = task.rank == 0
        self._ring: StreamLayout | None = None
        self.request = build_request(
            process.config,
            RankInfo(task.rank, task.world_size),
            task.save_id,
            path=options.path,
            step=None,
            parts=tuple(PartRange(PAGE_NBYTES + offset, nbytes) for offset, nbytes in image.parts),
            structure=laid_out.structure,
            n_tensors=laid_out.n_tensors,
        )

    def acquire(self, image: LazyImage) -> Slot:
        """Return a slot for the whole state, or a smaller one for a ring if there is no memory for that."""
        limit = self._process.config.arena_limit_bytes
        needed, likely = self._rooms(len(encode_request(self.request)))
        if likely > needed and (slot := self._acquire(image, likely, limit)) is not None:
            return slot
        slot = self._acquire(image, needed, limit)
        return slot or self._slot(slot_nbytes(len(image), needed))  # raises the error with the reason

    def _acquire(self, image: LazyImage, room: int, limit: int | None) -> Slot | None:
        """Return a slot with `room` bytes for requests, or None if there is no memory for it."""
        nbytes = slot_nbytes(len(image), room)
        if limit is None or nbytes <= limit:
            try:
                return self._slot(nbytes, self._spare(limit))
            except InsufficientMemoryError as error:
                if limit is not None or nbytes <= SMALL_RING_NBYTES:
                    return None
                _log.warning("save %s to %s: %s", self._task.save_id, self._options.path, error.message)
        room += self._spare(limit)
        ring = ring_within(limit or SMALL_RING_NBYTES, self.request.parts, room)
        if ring is None:
            return None
        self._ring = ring
        self.request = replace(self.request, ring_segments=ring.n_cells, ring_segment_nbytes=ring.segment_nbytes)
        _log.warning(
            "save %s to %s: %d bytes are staged in segments through %d bytes of memory: staging takes as long as "
            "writing",
            self._task.save_id,
            self._options.path,
            len(image),
            ring.cells_nbytes,
        )
        return self._slot(ring.end + room + PAGE_NBYTES)

    def _slot(self, nbytes: int, spare_nbytes: int = 0) -> Slot:
        task, path, pool = self._task, self._options.path, self._process.pool
        return pool.acquire(nbytes, None, task.save_id, step=None, path=path, spare_nbytes=spare_nbytes)

    def _spare(self, limit: int | None) -> int:
        """Return how many bytes to add for other ranks' leaves in the coordinator's final request."""
        return self._size_estimate.spare_nbytes(limit or SMALL_RING_NBYTES) if self._is_coordinator else 0

    def _rooms(self, request_nbytes: int) -> tuple[int, int]:
        """Return the minimal and the likely room for requests in the slot, in bytes.

        On the coordinator this includes the final request.
        """
        room = round_up(request_nbytes + REQUEST_SLACK_NBYTES)
        if not self._is_coordinator:
            return room, room
        items, world_size = self.laid_out.items, self._task.world_size
        names = {item.index.fqn for item in [*(item for item, _ in items.tensors), *items.leaves, *items.empty]}
        raws = [r.storage_data.raw for r in self.laid_out.results if isinstance(r.storage_data, StoredLeaf)]
        objects_nbytes = len(encode_objects(self._task.save_id, raws))
        if world_size == 1:
            objects_nbytes += MAX_METADATA_NBYTES
        own_names_nbytes, size_estimate = names_nbytes(names), self._size_estimate
        needed = size_estimate.nbytes(own_names_nbytes, objects_nbytes)
        return 2 * room + needed, 2 * room + size_estimate.likely_nbytes(own_names_nbytes, objects_nbytes, world_size)

    def stage(self, image: LazyImage, slot: Slot) -> UnsealedPart | None:
        """Fill the slot. On the coordinator return the unsealed part; on other ranks seal it and tell the worker."""
        process, save_id, path = self._process, self._task.save_id, self._options.path
        ring, control = self._ring, slot.memory.control
        slot.generation += 1
        slot.is_ring = ring is not None
        request = encode_request(self.request)
        body_end = PAGE_NBYTES + len(image) if ring is None else ring.end
        # With several ranks the coordinator tells the worker at the end: the length of its request is not known before.
        is_known = not self._is_coordinator or self._task.world_size == 1
        streams = ring is not None or (should_stream(len(image)) and is_known)
        begun = streams or not self._is_coordinator
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
        if self._is_coordinator:
            return UnsealedPart(
                process=process,
                request=self.request,
                tensors=self.laid_out.tensors,
                size_estimate=self._size_estimate,
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
