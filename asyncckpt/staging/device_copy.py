"""Copies tensors on devices into a slot, by few and large transfers that are planned once per slot and plan.

A transfer to the host takes some microseconds to enqueue, however small it is: 20,000 of them take 100 ms. So small
tensors that are adjacent in the slot are gathered on the device first, hundreds at once by a few kernels, into a buffer
with the same layout as their range of the slot; then one transfer copies them all (a batch).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import StagingError
from asyncckpt.staging import pinned_memory
from asyncckpt.staging.cpu_copy import SlotImage, integer_view
from asyncckpt.staging.device import Device, Event
from asyncckpt.staging.device_snapshot import DeviceSnapshot, copy_into

SMALL_NBYTES = 64 * 1024
"""Smaller tensors are gathered. Chosen: at 25 GB/s so many bytes take 2.6 us, less than to enqueue a transfer."""

BUFFER_NBYTES = 16 << 20
"""Size of the buffer on a device for gathering: large enough that transfers take much longer than to enqueue them.
Chosen, not measured."""

ALIGNMENT = 16
"""The offsets of a batch in the buffer and in the slot are equal modulo this: the alignment that views of any dtype
need."""


TRANSFER_TIMEOUT_S = 600.0
"""Time limit for the devices' earlier work and the copies. Chosen: no queue of kernels takes so long, unless one of
them waits for a rank that has ended."""

SETTLE_TIMEOUT_S = 30.0
"""Time limit for the copies of a failed save to end, so that nothing writes to its slot. Chosen: far above the time to
copy a full slot."""

FIRST_POLL_S, LAST_POLL_S = 50e-6, 2e-3
"""Pauses between two queries of an event: torch's own wait for it has no timeout."""

POLL_FRACTION = 50
"""Between the two, a pause is 1/`POLL_FRACTION` of the time that the wait has taken: it ends at most 2 % late."""


class Batch(NamedTuple):
    """Small boxes that are adjacent in the slot, gathered on the device and transferred together.

    Attributes:
        boxes: Numbers of the boxes.
        start, end: Their range of the slot.
        lap: How often the buffer was filled before it holds this batch.
        at: Offset in the buffer.
    """

    boxes: list[int]
    start: int
    end: int
    lap: int
    at: int


class _Lap(NamedTuple):
    """One filling of the buffer, and its transfers.

    Attributes:
        fills: By dtype: views of the buffer, and the positions of their sources.
        targets, sources: Views of the slot and of the buffer, for the transfers.
    """

    fills: list[tuple[list[torch.Tensor], list[int]]]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]


def batches_of(slot_spans: Iterable[tuple[int, int, int]], buffer_nbytes: int) -> list[Batch]:
    """Return the batches of boxes to gather, with their place in the buffer; all other boxes get their own transfers.

    Args:
        slot_spans: (number, offset in the slot, nbytes) of the boxes of one device, in any order.
        buffer_nbytes: Size of the buffer. A batch that does not fit behind the others begins another lap: the buffer is
            filled from its beginning again.
    """
    found: list[Batch] = []
    boxes: list[int] = []
    lap = at = first = last = 0

    def flush() -> None:
        nonlocal lap, at
        if len(boxes) > 1:
            start = at + (first - at) % ALIGNMENT
            if start + last - first > buffer_nbytes:
                lap, start = lap + 1, first % ALIGNMENT
            found.append(Batch(list(boxes), first, last, lap, start))
            at = start + last - first
        boxes.clear()

    for number, start, nbytes in sorted(slot_spans, key=lambda span: span[1]):
        if not 0 < nbytes < SMALL_NBYTES:
            continue
        if boxes and (start != last or start + nbytes - first + ALIGNMENT > buffer_nbytes):
            flush()
        if not boxes:
            first = start
        boxes.append(number)
        last = start + nbytes
    flush()
    return found


def cuts_of(start: int, nbytes: int, piece_nbytes: int) -> list[tuple[int, int]]:
    """Cut `nbytes` at offset `start` of a pinned slot at the borders of pinned pieces.

    Returns:
        (start, end) of each part, relative to `start`.
    """
    ends = [*range(piece_nbytes - start % piece_nbytes, nbytes, piece_nbytes), nbytes]
    return list(zip([0, *ends], ends, strict=False))


class DeviceBoxes:
    """Some of an image's boxes, of tensors on one device, and the transfers that copy them into the slot.

    It has views of the slot's memory: the owner must drop it, as the image, before the slot is unmapped.

    Args:
        device: The interface to the devices.
        index: Index of the device.
        image: The image that the boxes belong to. No reference to it is held: it may hold one to this object.
        address: Address of the slot.
        numbers: Numbers of the boxes.
    """

    def __init__(self, device: Device, index: int, image: SlotImage, address: int, numbers: Sequence[int]) -> None:
        self._device, self._index, self._plan, self._address = device, index, image.plan, address
        plan = image.plan
        chunks, ranges = plan.layout.chunks, plan.part_ranges()
        slot_spans = [(n, ranges[chunks[n].part].offset + chunks[n].offset_bytes, chunks[n].nbytes) for n in numbers]
        self._slot_spans = {n: (start, nbytes) for n, start, nbytes in slot_spans if nbytes}
        self._laps: list[_Lap] = []
        batches = batches_of(slot_spans, BUFFER_NBYTES)
        try:
            self._plan_gathering(batches)
        except RuntimeError:  # no memory on the device: each box gets its own transfer
            batches = []
        gathered = [n for batch in batches for n in batch.boxes]
        self._order = [*gathered, *sorted(self._slot_spans.keys() - set(gathered))]
        self._n_gathered = len(gathered)
        self._targets = image.targets(self._order[self._n_gathered :])
        self._cuts = {
            position: cuts
            for position, n in enumerate(self._order)
            if position >= self._n_gathered
            and len(cuts := cuts_of(*self._slot_spans[n], pinned_memory.PIECE_NBYTES)) > 1
        }

    def __bool__(self) -> bool:
        return bool(self._slot_spans)

    def _plan_gathering(self, batches: list[Batch]) -> None:
        if not batches:
            return
        # Allocated in the side stream, since only that stream uses it, one lap after another.
        with self._device.on_stream(self._device.side_stream(self._index)):
            buffer = self._device.allocate(max(s.at + s.end - s.start for s in batches), self._index)
        plan, position = self._plan, 0
        laps: dict[int, _Lap] = {}
        fills: dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[int]]] = {}
        for batch in batches:
            lap = laps.setdefault(batch.lap, _Lap([], [], []))
            for n in batch.boxes:
                at = batch.at + self._slot_spans[n][0] - batch.start
                dtype = plan.signature[1][plan.boxes[n].number][0]
                whole = buffer[at : at + self._slot_spans[n][1]].view(dtype).view(plan.layout.chunks[n].sizes)
                key = (batch.lap, dtype)
                if key not in fills:
                    lap.fills.append(fills.setdefault(key, ([], [])))
                fills[key][0].append(integer_view(whole))
                fills[key][1].append(position)
                position += 1
            for a, b in cuts_of(batch.start, batch.end - batch.start, pinned_memory.PIECE_NBYTES):
                lap.targets.append(self._bytes(batch.start + a, b - a))
                lap.sources.append(buffer[batch.at + a : batch.at + b])
        self._laps = [laps[number] for number in sorted(laps)]

    def _bytes(self, start: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_char * nbytes).from_address(self._address + start)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def copy_on_device(
        self, image: SlotImage, tensors: Sequence[torch.Tensor], buffers: Mapping[torch.dtype, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Enqueue copies of the sources, on their own device, in the current stream; return them, for `copy`.

        Args:
            image: The image that the boxes belong to.
            tensors: All tensors of the state, by number.
            buffers: For each dtype, as many elements as the boxes have together.

        Raises:
            RuntimeError: From the device.
        """
        return copy_into(self._device, image.sources(tensors, self._order), buffers)

    def copy(
        self,
        image: SlotImage,
        tensors: Sequence[torch.Tensor],
        device_copies: Sequence[torch.Tensor] | None = None,
        *,
        non_blocking: bool,
    ) -> None:
        """Enqueue the copies into the slot, in the side stream, which must be current.

        Args:
            image: The image that the boxes belong to.
            tensors: All tensors of the state, by number. With `non_blocking` they must live until the copies end.
            device_copies: Result of `copy_on_device`: copy these instead of `tensors`.
            non_blocking: As for `Device.copy`.

        Raises:
            RuntimeError: From the device. Copies that were enqueued before may still run.
        """
        sources = image.sources(tensors, self._order) if device_copies is None else device_copies
        # The large ones first: the device copies them while the host enqueues the others.
        targets, rows, made_nbytes = list[torch.Tensor](), list[torch.Tensor](), 0
        for position in range(self._n_gathered, len(sources)):
            source, target = sources[position], self._targets[position - self._n_gathered]
            if not source.is_contiguous():
                # Bounds memory: the whole state may be non-contiguous, with channels_last for example.
                if made_nbytes >= BUFFER_NBYTES:
                    self._device.copy(targets, rows, non_blocking=non_blocking)
                    targets, rows, made_nbytes = [], [], 0
                source = self._row_major(source)
                made_nbytes += source.numel() * source.element_size()
            if position in self._cuts:
                here, there = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
                targets += [there[a:b] for a, b in self._cuts[position]]
                rows += [here[a:b] for a, b in self._cuts[position]]
            else:
                targets.append(target)
                rows.append(source)
        if targets:
            self._device.copy(targets, rows, non_blocking=non_blocking)
        for lap in self._laps:
            for views, positions in lap.fills:
                self._gather(views, [sources[position] for position in positions])
            self._device.copy(lap.targets, lap.sources, non_blocking=non_blocking)

    def _gather(self, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        strided = {n for n, source in enumerate(sources) if not source.is_contiguous()}
        if strided:  # separately: with one of them in a call, torch would launch a kernel for each tensor of it
            self._device.copy([views[n] for n in strided], [sources[n] for n in strided], non_blocking=True)
            views = [view for n, view in enumerate(views) if n not in strided]
            sources = [source for n, source in enumerate(sources) if n not in strided]
        if sources:
            self._device.copy(views, sources, non_blocking=True)

    def _row_major(self, source: torch.Tensor) -> torch.Tensor:
        """Return a row-major copy on the device, for the side stream only: the allocator reuses its memory there."""
        nbytes = source.numel() * source.element_size()
        made = self._device.allocate(nbytes, self._index).view(source.dtype).view(source.shape)
        self._device.copy([made], [source], non_blocking=True)
        return made


_Gathered = dict[int, list[tuple[torch.Tensor, list[int]]]]
"""By device, buffers with the bytes of windows, and the numbers of these windows."""


class DeviceWork(NamedTuple):
    """The boxes of one device: those copied before `save()` returns, and the others."""

    immediate: DeviceBoxes
    deferred: DeviceBoxes


class Transfer:
    """The copies of one save's tensors from devices into a slot: enqueued, waited for, or ordered before later work.

        save()            |  [snapshot]; record on producing stream; side stream waits for it; immediate copies
        copier's thread   |  [deferred copies; record: done]
        hook of `step()`  |  the same if the copier has not come to it; the stream of the step waits for `done`
        copier's thread   |  waits until `done` has run; then the sources are checked and the slot is sealed

    `enqueue` enqueues the deferred copies, once, in the thread that needs them first: that takes some milliseconds of
    the CPU for many tensors. The side stream has them wait for the work before `save()` alone. With a snapshot, which
    the producing stream makes on the device, later work need not wait for anything. The tensors are kept alive until
    their copies have ended.

    Args:
        device: The interface to the devices.
        image: The image in the slot.
        boxes: What is copied, by device.
        tensors: All tensors of the state, by number; detached, so that nothing frees their memory.
        replica_windows: (device, flat tensor): their bytes at `start` are compared with those of other ranks.
        snapshot: Memory on the devices for copies of the sources; with it, all of `boxes` must be in `deferred`.
        torn_check_windows: (device, flat tensor): their bytes are read before and after the copies.
        pinned: The slot is pinned, so that copies can be enqueued without waiting for each.
    """

    def __init__(
        self,
        device: Device,
        image: SlotImage,
        boxes: Mapping[int, DeviceWork],
        tensors: Sequence[torch.Tensor],
        replica_windows: Sequence[tuple[int, torch.Tensor]] = (),
        snapshot: DeviceSnapshot | None = None,
        *,
        torn_check_windows: Sequence[tuple[int, torch.Tensor]] = (),
        pinned: bool,
    ) -> None:
        self._device, self._image, self._boxes, self._tensors, self._pinned = device, image, boxes, tensors, pinned
        self._replica_windows, self._torn_check_windows = replica_windows, torn_check_windows
        self._replica_bytes, self._before, self._after = (_Gathered() for _ in range(3))
        self._snapshot, self._device_copies = snapshot, dict[int, list[torch.Tensor]]()
        self._replica_sizes, self._torn_check_sizes = (
            [window.nbytes for _, window in some] for some in (replica_windows, torn_check_windows)
        )
        # The stream that copies the sources into the snapshot may not be the one that their memory is reused in.
        self._held = [] if snapshot is None else [tensor.untyped_storage() for tensor in tensors]
        self._touched: dict[int, Event | None] = {}
        self._lock = threading.RLock()  # a signal handler may come to `enqueue` in a thread that holds the lock
        self._may_enqueue, self._is_enqueuing, self._is_enqueued = True, False, False
        self._failure: BaseException | None = None
        self._owner_pid = os.getpid()

    @property
    def can_order_in_stream(self) -> bool:
        """Whether all copies are in streams, so that sources may be changed after `make_current_stream_wait`."""
        return self._pinned or self._snapshot is not None

    def start(self) -> None:
        """Begin behind the work in the calling thread's current streams: snapshots, immediate copies, and windows.

        If the slot is pinned, the current stream waits for the immediate copies, so that later work in that stream
        comes after them; else the CPU waits.

        Raises:
            RuntimeError: From a device. Copies may still run: call `settle`.
        """
        for index in sorted({*self._boxes, *(index for index, _ in self._replica_windows)}):
            with self._device.on(index):
                current, side = self._device.current_stream(index), self._device.side_stream(index)
                boxes = self._boxes.get(index)
                if self._snapshot is not None and boxes is not None and boxes.deferred:
                    buffers = self._snapshot.buffers[index]
                    self._device_copies[index] = boxes.deferred.copy_on_device(self._image, self._tensors, buffers)
                    reach("device: snapshot made")
                # IMPORTANT: the current stream may still be computing the values of the tensors.
                self._device.wait(side, self._device.record(current))
            with self._device.on_stream(side):
                self._touched[index] = None
                reach("device: copying")
                if boxes is not None and boxes.immediate:
                    boxes.immediate.copy(self._image, self._tensors, non_blocking=self._pinned)
                gathered = self._gather(index, self._replica_windows, self._replica_bytes)
                gathered = self._gather(index, self._torn_check_windows, self._before) or gathered
                # IMPORTANT: later work waits for the windows too. They may be of tensors that no hook guards; if they
                # were read a step later, they would differ from the windows of the other ranks.
                begun = self._device.record(side)
                if gathered or (self._pinned and boxes is not None and boxes.immediate):
                    self._device.wait(current, begun)
                self._touched[index] = begun

    def enqueue(self, is_cancelled: Callable[[], bool] = lambda: False, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """Enqueue the deferred copies, unless another thread has done so; if the slot is not pinned, wait for each.

        Args:
            is_cancelled: Whether no more copies are wanted.
            timeout_s: Time limit for another thread that is enqueuing them.

        Raises:
            StagingError: Another thread has failed to enqueue them, or takes too long.
            RuntimeError: From a device. Copies may still run: call `settle`.
        """
        with self._holding_lock(timeout_s) as is_held:
            if not is_held:
                raise StagingError(f"another thread has not enqueued the copies by devices within {timeout_s:g} s")
            if self._may_enqueue:
                self._may_enqueue, self._is_enqueuing = False, True
                try:
                    for index, boxes in self._boxes.items():
                        if boxes.deferred and not is_cancelled():
                            self._enqueue_deferred(index, boxes.deferred)
                    self._is_enqueued = True
                except BaseException as error:
                    self._failure = error
                    raise
                finally:
                    self._is_enqueuing = False
            elif not self._is_enqueued:
                # IMPORTANT: some of the copies are missing, so the slot must not be sealed.
                raise StagingError(f"the copies by devices were not enqueued: {self._failure}") from self._failure

    @contextlib.contextmanager
    def _holding_lock(self, timeout_s: float) -> Iterator[bool]:
        """Hold the lock; whether that is so is the value of the context: not if a thread is enqueuing for so long."""
        deadline, is_held = time.monotonic() + timeout_s, False
        try:
            while True:
                with signals_deferred():  # a signal after `acquire` and before the assignment would leave it held
                    is_held = self._lock.acquire(blocking=False)
                if is_held or time.monotonic() >= deadline:
                    break
                time.sleep(FIRST_POLL_S)
            yield is_held
        finally:
            if is_held:
                self._lock.release()

    def _enqueue_deferred(self, index: int, boxes: DeviceBoxes) -> None:
        side = self._device.side_stream(index)
        with self._device.on_stream(side):
            self._touched[index] = None
            boxes.copy(self._image, self._tensors, self._device_copies.get(index), non_blocking=self._pinned)
            self._gather(index, self._torn_check_windows, self._after)
            self._touched[index] = self._device.record(side)
            reach("device: copies begun")

    def _gather(self, index: int, some: Sequence[tuple[int, torch.Tensor]], into: _Gathered) -> bool:
        """Enqueue copies of a device's windows into few buffers there, after which the tensors may be changed.

        Args:
            index: Index of the device.
            some: Windows, of any device.
            into: Gets the buffers, by device.

        Returns:
            Whether the device has windows.
        """
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, (device, window) in enumerate(some):
            if device == index:
                by_dtype.setdefault(window.dtype, []).append(number)
        for dtype, numbers in by_dtype.items():
            sizes = [some[number][1].numel() for number in numbers]
            buffer = self._device.allocate(sum(sizes) * dtype.itemsize, index)
            into.setdefault(index, []).append((buffer, numbers))
            targets = list(torch.split(buffer.view(dtype), sizes))
            self._device.copy(targets, [some[number][1] for number in numbers], non_blocking=True)
        return bool(by_dtype)

    def fetch_replica_windows(self) -> list[bytes]:
        """Return the bytes of the replica windows.

        Blocks: for a transfer of a few MB, and for earlier work in its stream.

        Raises:
            RuntimeError: From a device.
        """
        found = self._fetched(self._replica_bytes, self._replica_sizes)
        reach("device: samples fetched")
        return found

    def fetch_torn_check_windows(self) -> list[tuple[bytes, bytes]]:
        """Return the bytes of the torn-check windows before and after the copies, which have ended.

        Blocks as `fetch_replica_windows`.

        Raises:
            RuntimeError: From a device.
        """
        before, after = (self._fetched(some, self._torn_check_sizes) for some in (self._before, self._after))
        return list(zip(before, after, strict=True))

    def _fetched(self, gathered: _Gathered, sizes: Sequence[int]) -> list[bytes]:
        found = [b""] * len(sizes)
        for index, buffers in gathered.items():
            for buffer, numbers in buffers:
                here = torch.empty(buffer.numel(), dtype=torch.uint8, device="cpu")
                with self._device.on_stream(self._device.side_stream(index)):
                    self._device.copy([here], [buffer], non_blocking=False)
                at = here.data_ptr()
                for number in numbers:
                    found[number] = ctypes.string_at(at, sizes[number])
                    at += sizes[number]
        return found

    def make_current_stream_wait(self, timeout_s: float) -> None:
        """Make the calling thread's current streams wait for the copies, which are enqueued now if they are not yet.

        The CPU does not wait, except for another thread that is enqueuing them, at most `timeout_s`.

        Raises:
            StagingError: As `enqueue`.
            RuntimeError: From a device.
        """
        if self._snapshot is not None:  # made in the streams that later work goes to, so it comes first
            return
        self.enqueue(timeout_s=timeout_s)
        for index, event in self._touched.items():
            with self._device.on(index):
                # Work that is captured now runs when its graph is launched, which no hook sees: the event cannot order
                # it.
                if not self._device.capturing():
                    self._device.wait(self._device.current_stream(index), event)

    def finish(self, is_cancelled: Callable[[], bool]) -> None:
        """Enqueue what is not yet enqueued, and wait until all copies have ended, or `is_cancelled()`.

        Raises:
            StagingError: They have not ended within `TRANSFER_TIMEOUT_S`, or as `enqueue`.
            RuntimeError: From a device.
        """
        self.enqueue(is_cancelled)
        began = time.monotonic()
        deadline = began + TRANSFER_TIMEOUT_S
        while not self.ended() and not is_cancelled():
            now = time.monotonic()
            if now >= deadline:
                raise StagingError(
                    f"devices {sorted(self._boxes)} have not copied the state within {TRANSFER_TIMEOUT_S:g} s; a "
                    "kernel before the copies may wait for a rank that has ended"
                )
            time.sleep(min(max((now - began) / POLL_FRACTION, FIRST_POLL_S), LAST_POLL_S))
        if not is_cancelled():
            reach("device: copied")
            self._drop_sources()

    def settle(self) -> bool:
        """Enqueue nothing from now on, and wait until all copies have ended, whatever has failed before.

        Blocks: at most `SETTLE_TIMEOUT_S`. An interrupt is raised at the end of the wait.

        Returns:
            False if it is not known whether they have ended: then the slot must stay mapped and pinned for good.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        interrupt: BaseException | None = None
        while True:
            try:
                # IMPORTANT: first. A hook may be about to enqueue copies, into what is soon the slot of another save.
                if not self._forbid_enqueuing(deadline):
                    known = False
                    break
                if self.ended():
                    self._drop_sources()
                    known = True
                    break
                if time.monotonic() >= deadline:
                    known = False
                    break
                time.sleep(LAST_POLL_S)
            except RuntimeError:  # the driver's
                known = False
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None and known:
            raise interrupt
        return known

    def _forbid_enqueuing(self, deadline: float) -> bool:
        """Have `enqueue` enqueue nothing from now on; return False if a thread is still enqueuing at `deadline`."""
        if os.getpid() != self._owner_pid:  # in a forked child the lock may be held by a thread that is not there
            return True
        with self._holding_lock(deadline - time.monotonic()) as is_held:
            if is_held:
                self._may_enqueue = False
            return is_held

    def _drop_sources(self) -> None:
        """Drop the sources. IMPORTANT: only when the copies have ended."""
        self._tensors = self._replica_windows = self._torn_check_windows = ()
        self._snapshot = None if self._snapshot is None else self._snapshot._replace(buffers={})
        self._device_copies.clear()
        self._held.clear()

    def ended(self) -> bool:
        """Whether all enqueued copies have ended. Does not wait.

        Raises:
            RuntimeError: A device does not answer.
        """
        if os.getpid() != self._owner_pid:  # a forked child has neither the copies nor the memory
            return True
        if self._is_enqueuing:  # or was when `settle` gave up: that thread may go on
            return False
        for index, event in list(self._touched.items()):
            side = self._device.side_stream(index)
            with self._device.on(index):
                if not (self._device.idle(side) if event is None else self._device.done(event)):
                    return False
        return True
