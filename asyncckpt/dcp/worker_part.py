"""One rank's part in a save that the worker writes: laid out, staged into a slot, and sealed.

The coordinator knows tree, objects and step only when every rank has staged. So its slot is sealed last, with a request
that says them (memory/SPEC.md, section 5); the other ranks leave the step to it.
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
from asyncckpt.dcp.tensor_stream import StreamedImage
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
"""What a leaf takes in tree and index beside its name, which is there twice. Measured: 20 to 60."""

MANY_RANKS = 8
"""Where plans are cached and say nothing, a rank is taken to have as much as the coordinator; at most so many of them,
since most leaves are on one rank. Chosen, not measured."""

LEAVES_NBYTES = 4 << 20
"""Room for the leaves of other ranks, of whose lengths plans say nothing; at most an eighth of the limit. Chosen, not
measured."""


@dataclass(kw_only=True, slots=True)
class SealRoom:
    """Says how much room the request of a seal needs at the end of the slot. One per writer.

    Attributes:
        names_nbytes: Of the trees of all ranks, as the plans of this save say.
        others_have_leaves: Whether another rank has leaves that are no tensors.
        others_say_nothing: Whether the plan of another rank is empty, as cached ones are.
        last_nbytes: The last request that this writer had to seal; 0: none yet.
    """

    names_nbytes: int = 0
    others_have_leaves: bool = False
    others_say_nothing: bool = False
    last_nbytes: int = 0

    def note_plans(self, plans: Sequence[SavePlan], own: int) -> None:
        """Take in the plans of all ranks; the coordinator's is `own`."""
        names = {item.index.fqn for plan in plans for item in plan.items}
        self.names_nbytes = names_nbytes(names)
        others = [plan for number, plan in enumerate(plans) if number != own]
        self.others_say_nothing = any(not plan.items for plan in others)
        self.others_have_leaves = any(item.type is WriteItemType.BYTE_IO for plan in others for item in plan.items)

    def nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int) -> int:
        """Return what names and leaves take at least, in whole pages."""
        return round_up(max(own_names_nbytes, self.names_nbytes) + own_leaves_nbytes)

    def likely_nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int, world_size: int) -> int:
        """Return what they may well take, in whole pages: a wish, for which no save is refused."""
        as_ours = min(world_size, MANY_RANKS) * (own_names_nbytes + own_leaves_nbytes) if self.others_say_nothing else 0
        return max(self.nbytes(own_names_nbytes, own_leaves_nbytes), round_up(max(as_ours, self.last_nbytes)))

    def spare_nbytes(self, limit_nbytes: int) -> int:
        """Return what is added for leaves of other ranks to a slot of at most `limit_nbytes`, in whole pages."""
        return round_up(min(LEAVES_NBYTES, limit_nbytes // 8)) if self.others_have_leaves else 0


def names_nbytes(names: set[str]) -> int:
    """Return what leaves of these names take in tree and index."""
    return sum(2 * len(name.encode(errors="surrogatepass")) + NAME_NBYTES for name in names)


@dataclass(kw_only=True, slots=True)
class Unsealed:
    """The coordinator's part, staged: its slot is sealed by `seal`, or given up by `WorkerClient.withdraw`.

    Attributes:
        request: As it was begun.
        tensors: In this rank's files.
        slot: Open, or streamed if `begun`.
        seal_room: Learns how long the request was.
        offset: Where the request of the seal belongs in it.
        stream: Of the slot, where it is streamed.
    """

    process: WorkerClient
    request: SaveRequest
    tensors: Sequence[TensorEntry]
    seal_room: SealRoom
    slot: Slot
    offset: int
    body_nbytes: int
    begun: bool
    stream: SlotStream | None
    began_at: float

    def seal(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> WriteFuture:
        """Say what only the coordinator knows, and hand the save over.

        Args:
            metadata, results: As `StorageWriter.finish` gets them.

        Returns:
            A future of the commit.

        Raises:
            SaveFailedError: As `finished_request`; or code `request`: too long for its place beside what is streamed.
            UnsupportedLeafError: As there.
            InsufficientMemoryError: It is too long for its place, and there is no room for a larger slot.
            AsyncCkptError: There is no worker any more.
        """
        asked, _ = finished_request(self.request, self.tensors, metadata, results)
        try:
            check_metadata(asked.metadata)
        except ValueError as error:
            raise self._failed("metadata", f"what the planner keeps with it cannot be stored: {error}") from error
        request = encode_request(asked)
        self.seal_room.last_nbytes = len(request) + REQUEST_SLACK_NBYTES
        if self.offset + len(request) > self.slot.memory.nbytes - PAGE_NBYTES:
            if self.begun:
                raise self._failed(
                    "request",
                    f"names and objects of all ranks take {len(request)} bytes, for which no room was left beside the "
                    "state, which is being written already; the next save with this StorageWriter leaves it, as far as "
                    "arena_limit_bytes allows; use_worker=False needs none",
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
        """Take a slot that is large enough, and give this one up. Nobody has heard of it yet."""
        before, path, save_id = self.slot, self.request.path, SaveId.parse(self.request.save_id)
        nbytes = slot_nbytes(self.body_nbytes, request_nbytes)
        try:
            slot = self.process.pool.acquire(nbytes, None, save_id, step=None, path=path, may_wait=False)
        except (InsufficientMemoryError, SlotBusyError) as error:
            # IMPORTANT: to wait would be to wait for the very slot that this save has.
            raise InsufficientMemoryError(
                f"save {save_id} to {path}: names and objects of all ranks take {request_nbytes} bytes, more "
                f"than was left for them, and a slot of {nbytes} bytes has no room beside the one of "
                f"{before.memory.nbytes} (arena_limit_bytes={self.process.config.arena_limit_bytes}); nothing was "
                "published; the next save with this StorageWriter leaves it from its beginning, as far as "
                "arena_limit_bytes allows; use_worker=False needs no memory for it",
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
    """Announce a save whose request will be about so long; its step is not known yet."""
    process.begin(
        SaveId.parse(request.save_id),
        slot,
        step=None,
        path=request.path,
        nbytes=sum(part.nbytes for part in request.parts) + request_nbytes,
        umask=request.umask,
    )


def hand_over(process: WorkerClient, slot: Slot, request: SaveRequest, began_at: float) -> WriteFuture:
    """Ring the doorbell for a slot that is sealed. Does not wait.

    Args:
        process: The worker.
        slot: See above.
        request: Of the seal.
        began_at: `time.perf_counter()` when its staging began.
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
    """Bytes `start` to `end` of the image, and where they belong in the slot."""

    start: int
    end: int
    offset: int


def pieces_of(image: StreamedImage, ring: StreamLayout | None) -> list[Piece]:
    """Return the pieces of an image, for a slot that has room for all of it, or for the cells of a ring."""
    if ring is None:
        starts = range(0, len(image), EXTENT_NBYTES)
        return [Piece(at, min(at + EXTENT_NBYTES, len(image)), PAGE_NBYTES + at) for at in starts]
    found = []
    for number, segment in enumerate(ring.segments):
        first = image.parts[segment.part][0]
        found.append(Piece(first + segment.start, first + round_up(segment.end), ring.offset_of(number)))
    return found


def fill(
    image: StreamedImage,
    address: int,
    pieces: Sequence[Piece],
    *,
    threads: int,
    ready: Callable[[int], None],
    filled: Callable[[int], None],
) -> None:
    """Make all pieces where they belong.

    Args:
        image: See there.
        address: Of the slot.
        pieces: In the order in which they are begun.
        threads: With one, that is the calling thread: it makes them one after another.
        ready: Called before the piece of a number is made; waits until there is room for it, or raises.
        filled: Called with how many, from the first on, are done, as these become more. Under a lock.

    Raises:
        Exception: Whatever makes a tensor raises, or `ready`.

    Blocks: for all of them. No other thread is left when this returns or raises.
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
                # IMPORTANT: nothing ends this early, not even a second Ctrl-C: they would write to memory that is
                # another save's by then.
                errors.append(error)
                if not running:
                    break
    for future in running:
        future.result()
    if errors:
        raise errors[0]


SMALL_RING_NBYTES = 256 << 20
"""Of the slot of a state for which the machine has no memory. Chosen: sixteen writes, and a fraction of any node."""

_log = logging.getLogger("asyncckpt.dcp")


def stage_part(
    plan: SavePlan,
    planner: SavePlanner,
    task: SaveTask,
    options: WriteOptions,
    process: WorkerClient,
    seal_room: SealRoom,
) -> tuple[list[WriteResult], Unsealed | None]:
    """Stage what `plan` gives to this rank, and hand it to the worker unless this is the coordinator.

    Args:
        plan, planner: What to save.
        task: Of the save.
        options: How.
        process: The worker, joined for the task.
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
    save_id, slot = task.save_id, None
    try:
        laid_out, device = lay_out(plan, planner, one_file=options.one_file), CudaDevice()
        with StreamedImage(
            laid_out.layout, laid_out.specs, laid_out.resolves, save_id, options.copy_ahead_nbytes, device
        ) as image:
            part = _Part(laid_out, image, task, options, process, seal_room)
            slot = part.acquire(image)
            unsealed = part.stage(image, slot)
    except BaseException as error:
        if slot is not None:
            slot.settle()
        process.withdraw(save_id, f"staging failed: {error!r}")
        raise
    return [*laid_out.results_of(save_id, task.rank), rank_result(task.rank, None)], unsealed


class _Part:
    """One `stage_part`."""

    def __init__(
        self,
        laid_out: LaidOut,
        image: StreamedImage,
        task: SaveTask,
        options: WriteOptions,
        process: WorkerClient,
        seal_room: SealRoom,
    ) -> None:
        self.laid_out = laid_out
        self._task, self._options, self._process = task, options, process
        self._began_at, self._seal_room = time.perf_counter(), seal_room
        self._is_open_end = task.rank == 0
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

    def acquire(self, image: StreamedImage) -> Slot:
        """Return a slot for everything, or one for a ring, where there is no memory for that."""
        limit = self._process.config.arena_limit_bytes
        needed, likely = self._rooms(len(encode_request(self.request)))
        if likely > needed and (slot := self._acquire(image, likely, limit)) is not None:
            return slot
        slot = self._acquire(image, needed, limit)
        return slot or self._slot(slot_nbytes(len(image), needed))  # which says why not

    def _acquire(self, image: StreamedImage, room: int, limit: int | None) -> Slot | None:
        """Return a slot with so much room for the request, or None where there is no memory for it."""
        nbytes = slot_nbytes(len(image), room)
        if limit is None or nbytes <= limit:
            try:
                return self._slot(nbytes, self._spare(limit))
            except InsufficientMemoryError as error:
                if limit is not None or nbytes <= SMALL_RING_NBYTES:
                    return None
                _log.warning("save %s: %s", self._task.save_id, error.message)
        room += self._spare(limit)
        ring = ring_within(limit or SMALL_RING_NBYTES, self.request.parts, room)
        if ring is None:
            return None
        self._ring = ring
        self.request = replace(self.request, ring_segments=ring.n_cells, ring_segment_nbytes=ring.segment_nbytes)
        _log.warning(
            "save %s: %d bytes go through %d bytes of memory in segments: staging takes as long as writing",
            self._task.save_id,
            len(image),
            ring.cells_nbytes,
        )
        return self._slot(ring.end + room + PAGE_NBYTES)

    def _slot(self, nbytes: int, spare_nbytes: int = 0) -> Slot:
        task, path, pool = self._task, self._options.path, self._process.pool
        return pool.acquire(nbytes, None, task.save_id, step=None, path=path, spare_nbytes=spare_nbytes)

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
        items, world_size = self.laid_out.items, self._task.world_size
        names = {item.index.fqn for item in [*(item for item, _ in items.tensors), *items.leaves, *items.empty]}
        raws = [r.storage_data.raw for r in self.laid_out.results if isinstance(r.storage_data, StoredLeaf)]
        objects_nbytes = len(encode_objects(self._task.save_id, raws))
        if world_size == 1:
            objects_nbytes += MAX_METADATA_NBYTES
        own_names_nbytes, seal_room = names_nbytes(names), self._seal_room
        needed = seal_room.nbytes(own_names_nbytes, objects_nbytes)
        return 2 * room + needed, 2 * room + seal_room.likely_nbytes(own_names_nbytes, objects_nbytes, world_size)

    def stage(self, image: StreamedImage, slot: Slot) -> Unsealed | None:
        """Fill the slot; seal it and hand it over, but that of the coordinator."""
        process, save_id, path = self._process, self._task.save_id, self._options.path
        ring, control = self._ring, slot.memory.control
        slot.generation += 1
        slot.is_ring = ring is not None
        request = encode_request(self.request)
        body_end = PAGE_NBYTES + len(image) if ring is None else ring.end
        # A coordinator of several ranks begins at the end: nobody knows yet how long its request will be.
        is_known = not self._is_open_end or self._task.world_size == 1
        streams = ring is not None or (should_stream(len(image)) and is_known)
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
            return Unsealed(
                process=process,
                request=self.request,
                tensors=self.laid_out.tensors,
                seal_room=self._seal_room,
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
