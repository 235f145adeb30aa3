"""`LazyImage`: the bytes of a rank's shard files, of which only the part that is being written is in memory.

A tensor is resolved when its first byte is written, and freed after its last. So a save takes, beside the state, one
buffer for each thread, the tensors that the planner allocates and that are being written, and the copies ahead.
"""

from __future__ import annotations

import ctypes
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from asyncckpt.errors import StagingError
from asyncckpt.format.layout import SAVE_ID_OFFSET, Layout, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping, copy_bytes
from asyncckpt.protocol.request import PartRange
from asyncckpt.staging.device import CudaDevice, Device, Event
from asyncckpt.storage.rank_writer import EXTENT_NBYTES


class CopyAhead:
    """Decides which tensors to copy from devices before they are written. May be used by several threads.

    Args:
        sizes: Length of each tensor in bytes, in the order of writing.
        limit_nbytes: Limit of bytes that are fetched and not yet written; a larger tensor is never fetched ahead.
    """

    def __init__(self, sizes: Sequence[int], limit_nbytes: int) -> None:
        self._sizes, self._limit = sizes, limit_nbytes
        self._next = 0
        self._ahead: set[int] = set()
        self._nbytes = 0
        self._lock = threading.Lock()

    def begin(self, number: int) -> list[int]:
        """Return the numbers of the tensors to fetch while `number` is written; each is returned once."""
        with self._lock:
            self._next = max(self._next, number + 1)
            found = []
            while self._next < len(self._sizes) and self._nbytes + self._sizes[self._next] <= self._limit:
                found.append(self._next)
                self._nbytes += self._sizes[self._next]
                self._ahead.add(self._next)
                self._next += 1
            return found

    def done(self, number: int) -> None:
        """Record that tensor `number` was written."""
        with self._lock:
            if number in self._ahead:
                self._ahead.remove(number)
                self._nbytes -= self._sizes[number]


ARRIVAL_TIMEOUT_S = 600.0
"""Limit of the wait for a device to finish the kernels before a copy, and the copy. Chosen, not measured."""

_POLL_S = 50e-6

Resolve = Callable[[], torch.Tensor]
"""Returns the elements of a tensor, in the form of `write_plan.resolved_bytes`."""


def pinned(like: torch.Tensor) -> torch.Tensor:
    """Return pinned host memory for an asynchronous copy of a tensor."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


def settle(made: torch.Tensor, device: Device) -> None:
    """Wait until a device has computed a tensor in this thread's stream: other threads read it in other streams.

    Raises:
        StagingError: The device does not finish within `ARRIVAL_TIMEOUT_S`.
    """
    index = device.device_of(made)
    if index is None:
        return
    with device.on(index):
        _await(device, index, device.record(device.current_stream(index)), "made")


def _await(device: Device, index: int, event: Event, done: str) -> None:
    """Wait for an event of the current device."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise StagingError(
                f"device {index} has not {done} a tensor within {ARRIVAL_TIMEOUT_S:g} s; nothing was published. Check "
                "whether a kernel hangs"
            )
        time.sleep(_POLL_S)


class WrittenTensor:
    """A tensor that is resolved at the first read of its bytes and freed after the last. Several threads may use it.

    Args:
        resolve: Returns the elements.
        nbytes: Length of the elements in bytes.
        device: The interface to devices.
    """

    def __init__(self, resolve: Resolve, nbytes: int, device: Device) -> None:
        self._resolve, self._missing, self._device = resolve, nbytes, device
        self._elements: torch.Tensor | None = None
        self._arrival: tuple[int, Event, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def on_device(self) -> bool:
        """Resolve the tensor, if it is not yet; return whether it is on a device, or was before it was fetched."""
        with self._lock:
            return self._arrival is not None or self._device.device_of(self._resolved()) is not None

    def _resolved(self) -> torch.Tensor:
        if self._elements is None:
            self._elements = self._resolve()
        return self._elements

    def fetch(self) -> None:
        """Begin to copy it to the host, if it is on a device and not being read yet."""
        with self._lock:
            if self._elements is not None:
                return
            found = self._resolve()
            index = self._device.device_of(found)
            if index is None:
                return  # resolved again when it is written: a tensor on the CPU is not kept in memory until then
            host = pinned(found)
            with self._device.on(index):
                current, side = self._device.current_stream(index), self._device.side_stream(index)
                # IMPORTANT: kernels of the planner may still compute the values in this thread's stream. Tensors that
                # another thread has resolved are complete (`settle`).
                self._device.wait(side, self._device.record(current))
            with self._device.on_stream(side):
                self._device.copy([host], [found], non_blocking=True)
                self._arrival = index, self._device.record(side), found  # keeps the source alive during the copy
            self._elements = host

    def read(self, low: int, high: int, address: int) -> bool:
        """Copy bytes `low` to `high` to `address`; return whether all bytes have been read now.

        Raises:
            StagingError: The device does not finish within `ARRIVAL_TIMEOUT_S`.
        """
        with self._lock:
            found = self._resolved()
            if self._arrival is not None:
                index, event, _ = self._arrival
                with self._device.on(index):
                    _await(self._device, index, event, "copied")
        place = self._device.device_of(found)
        if place is None:
            copy_bytes(address, found.data_ptr() + low, high - low)
        else:
            memory = torch.frombuffer((ctypes.c_char * (high - low)).from_address(address), dtype=torch.uint8)
            with self._device.on(place):
                self._device.copy([memory], [found[low:high]], non_blocking=False)
        with self._lock:
            self._missing -= high - low
            if not self._missing:
                self._elements = self._arrival = None
            return not self._missing


class _Region(NamedTuple):
    """Bytes `start` to `end` of the image: a header (`number` is -1), or tensor `number`."""

    start: int
    end: int
    header: bytes
    number: int


def in_file_order(layout: Layout) -> list[int]:
    """Return the numbers of the chunks that are not empty, in the order of the files."""
    chunks = layout.chunks
    held = (n for n, chunk in enumerate(chunks) if chunk.nbytes)
    return sorted(held, key=lambda n: (chunks[n].part, chunks[n].offset_bytes))


class LazyImage:
    """The bytes of a rank's shard files, a `storage.shard_writer.MadeImage`. As a context manager it frees its buffers.

    Args:
        layout: Layout of the files.
        resolves: For each chunk, a function that returns its elements.
        save_id: Save ID, for the headers.
        copy_ahead_nbytes: Bytes of tensors on CUDA devices that are copied before they are written.
        device: The interface to devices; tests replace it.

    Attributes:
        parts: Byte range of each file in the image.
    """

    is_page_aligned = True

    def __init__(
        self,
        layout: Layout,
        resolves: Sequence[Resolve],
        save_id: SaveId,
        copy_ahead_nbytes: int = 0,
        device: Device | None = None,
    ) -> None:
        device = device or CudaDevice()
        starts, at = [], 0
        for part in layout.parts:
            starts.append(at)
            at += part.padded_nbytes
        self.parts = tuple(PartRange(start, part.nbytes) for start, part in zip(starts, layout.parts, strict=True))
        self._nbytes = at
        regions = [
            _Region(s, s + len(p.header), _named(p.header, save_id), -1)
            for s, p in zip(starts, layout.parts, strict=True)
        ]
        placed = in_file_order(layout)
        chunks = [layout.chunks[n] for n in placed]
        self._tensors = [WrittenTensor(resolves[n], c.nbytes, device) for n, c in zip(placed, chunks, strict=True)]
        for place, chunk in enumerate(chunks):
            start = starts[chunk.part] + chunk.offset_bytes
            regions.append(_Region(start, start + chunk.nbytes, b"", place))
        self._regions = sorted(regions)
        self._starts = [region.start for region in self._regions]
        self._ahead = CopyAhead([chunk.nbytes for chunk in chunks], copy_ahead_nbytes)
        self._local = threading.local()
        self._buffers: list[Mapping] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice, /) -> memoryview:
        start, end, _ = piece.indices(self._nbytes)
        buffer = self._buffer(end - start)
        self.copy_to(start, end, buffer.address)
        return buffer.view()[: end - start]

    def copy_to(self, start: int, end: int, address: int) -> None:
        """Write bytes `start` to `end` of the image to `address`: headers, tensors, and zeros between them.

        Raises:
            Exception: An error of a function in `resolves`.

        Blocks: for the tensors to be resolved and copied.
        """
        at = start
        first = max(0, bisect_right(self._starts, start) - 1)
        for number in range(first, bisect_left(self._starts, end)):
            region = self._regions[number]
            low, high = max(start, region.start), min(end, region.end)
            if low >= high:
                continue
            ctypes.memset(address + at - start, 0, low - at)  # padding
            self._fill(region, low - region.start, high - region.start, address + low - start)
            at = high
        ctypes.memset(address + at - start, 0, end - at)

    def _fill(self, region: _Region, low: int, high: int, address: int) -> None:
        if region.number < 0:
            ctypes.memmove(address, region.header[low:high], high - low)
            return
        tensor = self._tensors[region.number]
        if tensor.on_device():
            for number in self._ahead.begin(region.number):
                self._tensors[number].fetch()
        if tensor.read(low, high, address):
            self._ahead.done(region.number)

    def _buffer(self, nbytes: int) -> Mapping:
        found: Mapping | None = getattr(self._local, "buffer", None)
        if found is None or found.nbytes < nbytes:
            found = Mapping(-1, round_up(max(nbytes, min(EXTENT_NBYTES, self._nbytes))))
            self._local.buffer = found
            with self._lock:
                self._buffers.append(found)
        return found

    def close(self) -> None:
        """Free the buffers. No thread may use the image afterwards."""
        self._local = threading.local()
        while self._buffers:
            self._buffers.pop().close()

    def __enter__(self) -> LazyImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(header: bytes, save_id: SaveId) -> bytes:
    name = save_id_bytes(save_id)
    return header[:SAVE_ID_OFFSET] + name + header[SAVE_ID_OFFSET + len(name) :]
