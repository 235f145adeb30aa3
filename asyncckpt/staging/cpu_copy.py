"""Copies tensors in host memory, or boxes of them, into a slot. Targets are computed once per slot and plan.

Large contiguous tensors are copied by plain threads, everything else by one batched torch call. torch's own parallel
copy has an OpenMP barrier after every tensor: on cores that a data loader or a writer shares with it, it took 500 ms
for 67 MB, and the threads, which have no barrier, took 10 ms (docs/adr/0007).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.client.slot_stream import Watermark
from asyncckpt.dtypes import UNCONVERTED
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import STAGED_OFFSET
from asyncckpt.planning.save_plan import SavePlan, TensorBox
from asyncckpt.staging.memcopy import MARK_NBYTES, MAX_THREADS, PIECE_NBYTES, CopyQueue, Progress, copy_all

_AS_INTEGERS = {
    name: integer
    for names, integer in (
        (("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", *UNCONVERTED), torch.uint8),
        (("complex32",), torch.int32),
    )
    for name in names
}
_COPIED_AS = {getattr(torch, name): integer for name, integer in _AS_INTEGERS.items() if hasattr(torch, name)}
"""Dtypes whose copy kernel is missing or partial in some torch versions are copied as integers of the same width."""


LARGE_NBYTES = 64 * 1024
"""Tensors of at least so many bytes are copied by threads; for less, torch uses one thread too (its grain size)."""

THREAD_NBYTES = 8 << 20
"""One thread is used for each so many bytes. Chosen, not measured: starting one costs 0.1 ms, the time to copy 1 MB."""

MIN_DEFERRED_NBYTES = LARGE_NBYTES
"""Smaller tensors in host memory are copied before `save()` returns, except through a ring: to defer one costs the
training thread 4.6 microseconds and the copier 1.6 (20,000 of 16 KiB, an EPYC), as long as it takes to copy 64 KiB."""

MIN_SHARED_TENSORS = 2000
"""From so many tensors that torch copies, a second thread copies half of them: they take 4 ms. Chosen, not measured."""


def nbytes_before(box: TensorBox, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the offset in bytes of a box in a contiguous tensor."""
    elements = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        elements = elements * size + offset
    return elements * dtype.itemsize


def cut_out(tensor: torch.Tensor, box: TensorBox) -> torch.Tensor:
    """Return the part of `tensor` that is the box."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of it as integers if some torch versions have no batched copy kernel for its dtype.

    `torch_tensors.copyable`, for copies of one tensor, views only dtypes that no version of torch copies.
    """
    integer = _COPIED_AS.get(tensor.dtype)
    return tensor if integer is None else tensor.view(integer)


def runs(tensor: torch.Tensor, start: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views that together are the elements `start` to `end` of a tensor in row-major order."""
    if start >= end:
        return
    if (start, end) == (0, tensor.numel()):
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from runs(tensor[last], start - last * row, end - last * row)
        return
    if start < first * row:
        yield from runs(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < end:
        yield from runs(tensor[last], 0, end - last * row)


class LargeBox(NamedTuple):
    """A box that threads copy, if its tensor is contiguous and in host memory.

    Attributes:
        box: Number of the box in the plan.
        target: Address in the slot.
        nbytes: Length of the box.
        source_offset: Bytes of a contiguous tensor before the box.
    """

    box: int
    target: int
    nbytes: int
    source_offset: int


class CopyWork(NamedTuple):
    """Some boxes of an image, to be copied: `large` by threads, `small`, as numbers of boxes, by torch."""

    large: list[LargeBox]
    small: list[int]

    @property
    def boxes(self) -> list[int]:
        """The numbers of all boxes, large ones first."""
        return [*(one.box for one in self.large), *self.small]

    def __bool__(self) -> bool:
        return bool(self.large or self.small)


class SlotImage:
    """The image of a plan's shard files in a slot, byte for byte: headers are written, and there is a view of each box.

    The caller owns the memory, and must not unmap it before this object is gone.

    Args:
        address: Address of the slot's first byte in this process.
        plan: The plan whose files are laid out.

    Attributes:
        deferrable: Numbers of the tensors that are large enough to be copied behind the training.
        body_end: Offset in the slot behind the files' last byte, where the request goes.
    """

    def __init__(self, address: int, plan: SavePlan) -> None:
        self.plan = plan
        self._queue = CopyQueue()
        self.progress = Progress(address + STAGED_OFFSET)
        self._threads: list[threading.Thread] = []
        self._half: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # targets and sources for a second thread
        self._headers: list[int] = []
        ranges = plan.part_ranges()
        bases: list[torch.Tensor] = []
        for where, part in zip(ranges, plan.layout.parts, strict=True):
            start = address + where.offset
            self._headers.append(start + SAVE_ID_OFFSET)
            bases.append(torch.frombuffer((ctypes.c_char * part.padded_nbytes).from_address(start), dtype=torch.uint8))
        chunks, shapes = plan.layout.chunks, plan.signature[1]
        self._targets = [  # detached, so that they do not keep their base tensors: that halves the memory of a view
            integer_view(bases[c.part].narrow(0, c.offset_bytes, c.nbytes).view(shapes[n][0]).view(c.sizes)).detach()
            for c, (n, _, _) in zip(chunks, plan.boxes, strict=True)
        ]
        self._numbers = [b.number for b in plan.boxes]
        self._partial = {n: b for n, b in enumerate(plan.boxes) if b.sizes != shapes[b.number][1]}
        large = [
            LargeBox(n, address + ranges[c.part].offset + c.offset_bytes, c.nbytes, nbytes_before(b, *shapes[b.number]))
            for n, (c, b) in enumerate(zip(chunks, plan.boxes, strict=True))
            if c.nbytes >= LARGE_NBYTES
        ]
        self._all = CopyWork(large, [n for n, c in enumerate(chunks) if c.nbytes < LARGE_NBYTES])
        self._split: tuple[frozenset[int], CopyWork, CopyWork] = (frozenset(), self._all, CopyWork([], []))
        sizes: dict[int, int] = {}
        for c, b in zip(chunks, plan.boxes, strict=True):
            sizes[b.number] = sizes.get(b.number, 0) + c.nbytes
        self.deferrable = [number for number, nbytes in sizes.items() if nbytes >= MIN_DEFERRED_NBYTES]
        self._has_integer_views = any(dtype in _COPIED_AS for dtype, _ in plan.signature[1])
        self.body_end = PAGE_NBYTES + plan.body_nbytes
        self._address = address
        self.lay_out()

    def lay_out(self) -> None:
        """Write headers and padding: at first, and again after the slot has held another plan's image."""
        for where, part in zip(self.plan.part_ranges(), self.plan.layout.parts, strict=True):
            start = self._address + where.offset
            ctypes.memmove(start, part.header, len(part.header))
            for offset, data in part.inserts:
                ctypes.memmove(start + offset, data, len(data))
            # The padding is written to disk before the file is truncated: it must not hold old contents.
            ctypes.memset(start + part.nbytes, 0, part.padded_nbytes - part.nbytes)

    def split(self, deferred: frozenset[int]) -> tuple[CopyWork, CopyWork]:
        """Return the work for all other tensors, and that for the tensors with the numbers `deferred`."""
        if self._split[0] != deferred:  # fast if it is the same object as in the last save
            numbers = self._numbers
            immediate_work, deferred_work = CopyWork([], []), CopyWork([], [])
            for box in self._all.large:
                (deferred_work if numbers[box.box] in deferred else immediate_work).large.append(box)
            for n in self._all.small:
                (deferred_work if numbers[n] in deferred else immediate_work).small.append(n)
            self._split = (deferred, immediate_work, deferred_work)
        return self._split[1:]

    def numbers(self, boxes: Sequence[int]) -> list[int]:
        """Return the number of the tensor of each box."""
        return [self._numbers[n] for n in boxes]

    def pairs(
        self, tensors: Sequence[torch.Tensor], boxes: Sequence[int]
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return (number of the tensor, the box of it, its view of the slot) for each box."""
        with torch.no_grad():
            found = [(n, self._numbers[n], tensors[self._numbers[n]]) for n in boxes]
            return [
                (number, cut_out(tensor, self._partial[n]) if n in self._partial else tensor, self._targets[n])
                for n, number, tensor in found
            ]

    def targets(self, boxes: Sequence[int]) -> list[torch.Tensor]:
        """Return the slot's view of each box."""
        return [self._targets[n] for n in boxes]

    def sources(self, tensors: Sequence[torch.Tensor], boxes: Sequence[int]) -> list[torch.Tensor]:
        """Return the source of each box, with the dtype and shape of its view of the slot."""
        found = [tensors[self._numbers[n]] for n in boxes]
        with torch.no_grad():
            if self._partial:
                found = [
                    cut_out(t, self._partial[n]) if n in self._partial else t for n, t in zip(boxes, found, strict=True)
                ]
            return [integer_view(t) for t in found] if self._has_integer_views else found

    def fill(self, tensors: Sequence[torch.Tensor], save_id: SaveId, work: CopyWork | None = None) -> None:
        """Copy `tensors`, by number, and write `save_id` into the headers. Blocks until the copies are done.

        Args:
            tensors: All tensors of the state.
            save_id: ID of the save.
            work: The boxes to copy; the others are left to `copy`. None: all boxes.

        Raises:
            RuntimeError: From torch, when a tensor cannot be copied.
        """
        id_bytes = save_id_bytes(save_id)
        for address in self._headers:
            ctypes.memmove(address, id_bytes, SAVE_ID_NBYTES)
        self.copy(tensors, self._all if work is None else work)

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        work: CopyWork,
        fault_safe: bool = False,
        watermark: Watermark | None = None,
    ) -> None:
        """Copy the boxes of `work` out of `tensors`, by number. Blocks until that is done.

        Args:
            tensors: All tensors of the state.
            work: The boxes to copy.
            fault_safe: Raise OSError, not SIGSEGV, if the memory of a tensor is unmapped meanwhile.
            watermark: Gets the address of each piece once it is copied; with it, pieces are copied in the files' order.

        Raises:
            RuntimeError: torch cannot copy a tensor.
            OSError: `fault_safe`, and the memory of a tensor was unmapped.
        """
        self._queue.fault, self._queue.on_copied = None, None
        others = list(work.small)
        try:
            self.progress.begin()
            unmarked = 0
            for n, target, nbytes, source_offset in work.large:
                tensor = tensors[self._numbers[n]]
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    source = tensor.data_ptr() + source_offset
                    for at in range(0, nbytes, PIECE_NBYTES):
                        size = min(PIECE_NBYTES, nbytes - at)
                        self._queue.append((target + at, source + at, size))
                        unmarked += size
                        if watermark is None and unmarked >= MARK_NBYTES:
                            unmarked = self.progress.mark(self._queue, unmarked)
                else:
                    others.append(n)
            late: list[int] = []  # addresses of what torch copies
            if watermark is not None:
                late = [target.data_ptr() for target in self.targets(others) if target.numel()]
                in_order = sorted(self._queue)
                self._queue.clear()
                self._queue.extend(in_order)
                watermark.expect([*(target for target, _, _ in in_order), *late])
                self._queue.on_copied = watermark.done
            self._start_threads(fault_safe)
            self._copy_by_torch(tensors, others, helped=not fault_safe and watermark is None)
            for address in late:
                assert watermark is not None
                watermark.done(address)
            copy_all(self._queue, fault_safe)
        except BaseException:
            # IMPORTANT: an interrupt may come before `settle` knows of a thread: that thread must find nothing to copy.
            self._half.clear()
            raise
        finally:
            self.settle()
            self._queue.on_copied = None
        if self._queue.fault is not None:
            raise self._queue.fault
        self.progress.end(unmarked)

    def cancel(self) -> None:
        """Make a `copy` in another thread end early. What it has copied is not used."""
        self._queue.clear()

    def settle(self) -> None:
        """Wait until no thread copies into the image; pieces that have not started are dropped.

        Blocks: for one piece at most. An interrupt is raised once every thread has ended.

        IMPORTANT: reuse or unmap a slot only after this. Else a thread that still runs would write old values into the
        next snapshot, or to unmapped memory.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                # IMPORTANT: also without threads. A piece that is left after an error would be copied by the next
                # `copy`, from memory that may be unmapped by then.
                self._queue.clear()
                if not self._threads:
                    break
                if self._threads[-1].ident is not None:  # None: it was not started, or will find nothing to copy
                    self._threads[-1].join()
                self._threads.pop()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _start_threads(self, fault_safe: bool) -> None:
        """Start threads that help with the pieces; fewer or none if the system refuses."""
        nbytes = sum(piece[2] for piece in self._queue)
        wanted = min(MAX_THREADS, len(os.sched_getaffinity(0)), nbytes // THREAD_NBYTES)
        for _ in range(wanted - 1):
            thread = BackgroundThread(copy_all, "asyncckpt-copy", (self._queue, fault_safe))
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # can't start new thread: the other threads copy its share
                self._threads.remove(thread)
                return

    def _copy_by_torch(self, tensors: Sequence[torch.Tensor], boxes: list[int], *, helped: bool) -> None:
        if not boxes:
            return
        targets, sources = self.targets(boxes), self.sources(tensors, boxes)
        half = 0
        if helped and len(boxes) >= MIN_SHARED_TENSORS and len(os.sched_getaffinity(0)) > 1:
            half = len(boxes) // 2
            self._half.append((targets[:half], sources[:half]))
            thread = BackgroundThread(self._copy_half, "asyncckpt-copy")
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # can't start new thread
                self._threads.remove(thread)
                self._half.clear()
                half = 0
        _copy_batch(targets[half:], sources[half:])

    def _copy_half(self) -> None:
        """As `_copy_batch`, for `_half`, in a thread: an error is left in `_queue.fault`."""
        try:
            while self._half:
                _copy_batch(*self._half.pop())
        except Exception as error:
            self._queue.fault = error


def _copy_batch(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    # IMPORTANT: no_grad is per thread. Without it, a copy from a Parameter would append to the autograd graph of the
    # slot's views, which would grow with every save.
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)
