"""A rank's shard files as an image that is never whole in memory: each piece is made when it is written.

A tensor is resolved when its first byte is wanted and let go after its last, so what a save takes beside the state is
one buffer per thread, whatever the planner allocates for the tensors that are just being written, and the copies ahead.
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
from asyncckpt.format.layout import SAVE_ID_OFFSET, BoxSpec, Layout, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping, copy_bytes
from asyncckpt.protocol.request import PartRange
from asyncckpt.staging.device import CudaDevice, Device, Event
from asyncckpt.storage.rank_writer import EXTENT_NBYTES


class CopyAhead:
    """Copies tensors from devices before they are written, in the order of writing. Safe to use from several threads.

    Args:
        sizes: Bytes of each tensor, in the order of writing.
        limit_nbytes: Fetched and not yet written at any time; tensors that are larger are never fetched ahead.
    """

    def __init__(self, sizes: Sequence[int], limit_nbytes: int) -> None:
        self._sizes, self._limit = sizes, limit_nbytes
        self._next = 0
        self._ahead: set[int] = set()
        self._nbytes = 0
        self._lock = threading.Lock()

    def begin(self, number: int) -> list[int]:
        """Return which to fetch now that `number` is being written; each is named once."""
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
        """Take note that `number` was written."""
        with self._lock:
            if number in self._ahead:
                self._ahead.remove(number)
                self._nbytes -= self._sizes[number]


ARRIVAL_TIMEOUT_S = 600.0
"""For what a device has to do before a copy, and the copy. Chosen: no queue of kernels is so long."""

_POLL_S = 50e-6

Resolve = Callable[[], torch.Tensor]
"""Makes the elements of a tensor, as `items.bytes_of` returns them."""


def pinned(like: torch.Tensor) -> torch.Tensor:
    """Return host memory for a copy that nobody waits for yet."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


def settle(made: torch.Tensor, device: Device) -> None:
    """Wait until a device has made a tensor, in the stream of this thread: other threads read it by streams of theirs.

    Raises:
        StagingError: A device does not come to an end.
    """
    index = device.device_of(made)
    if index is None:
        return
    with device.on(index):
        _await(device, index, device.record(device.current_stream(index)), "made")


def _await(device: Device, index: int, event: Event, done: str) -> None:
    """Wait for an event, inside `on`."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise StagingError(f"device {index} has not {done} a tensor within {ARRIVAL_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


class WrittenTensor:
    """A tensor that is resolved at the first read of its bytes and freed after the last.

    Safe to use from several threads.

    Args:
        resolve: Makes the elements.
        nbytes: How many there are.
        device: The seam to devices.
    """

    def __init__(self, resolve: Resolve, nbytes: int, device: Device) -> None:
        self._resolve, self._missing, self._device = resolve, nbytes, device
        self._elements: torch.Tensor | None = None
        self._arrival: tuple[int, Event, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def on_device(self) -> bool:
        """Resolve it, if that was not done yet; whether it is on a device, or was before it was fetched."""
        with self._lock:
            return self._arrival is not None or self._device.device_of(self._resolved()) is not None

    def _resolved(self) -> torch.Tensor:
        if self._elements is None:
            self._elements = self._resolve()
        return self._elements

    def fetch(self) -> None:
        """Begin its copy to the host, where it is on a device and not being read yet."""
        with self._lock:
            if self._elements is not None:
                return
            found = self._resolve()
            index = self._device.device_of(found)
            if index is None:
                return  # resolved again in its turn: what a planner makes of it is not kept until then
            host = pinned(found)
            with self._device.on(index):
                current, side = self._device.current_stream(index), self._device.side_stream(index)
                # IMPORTANT: a planner's kernels may still be making the values, in the stream of this thread. What
                # another thread has made has settled.
                self._device.wait(side, self._device.record(current))
            with self._device.on_stream(side):
                self._device.copy([host], [found], non_blocking=True)
                self._arrival = index, self._device.record(side), found  # which lives until it is copied
            self._elements = host

    def read(self, low: int, high: int, address: int) -> bool:
        """Copy some of its bytes to `address`; True when it was the last of them.

        Raises:
            StagingError: A device does not come to an end.
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
    """Bytes of the image: a header, or the tensor of a number."""

    start: int
    end: int
    header: bytes
    number: int


def in_file_order(layout: Layout) -> list[int]:
    """Return the numbers of the chunks that have bytes, in the order in which they lie in the files."""
    chunks = layout.chunks
    held = (n for n, chunk in enumerate(chunks) if chunk.nbytes)
    return sorted(held, key=lambda n: (chunks[n].part, chunks[n].offset_bytes))


class StreamedImage:
    """See the module; a `storage.shard_writer.MadeImage`. A context manager, which frees the buffers.

    Args:
        layout: Of the files.
        specs: Of the layout's chunks.
        resolves: Aligned with them.
        save_id: For the headers.
        copy_ahead_nbytes: Of tensors on a CUDA device, so many bytes are fetched before it is their turn.
        device: The seam to devices; tests replace it.

    Attributes:
        parts: Where each file lies in the image.
    """

    is_page_aligned = True

    def __init__(
        self,
        layout: Layout,
        specs: Sequence[BoxSpec],
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
        self._tensors = [WrittenTensor(resolves[n], specs[n].nbytes, device) for n in placed]
        for place, n in enumerate(placed):
            start = starts[layout.chunks[n].part] + layout.chunks[n].offset_bytes
            regions.append(_Region(start, start + specs[n].nbytes, b"", place))
        self._regions = sorted(regions)
        self._starts = [region.start for region in self._regions]
        self._ahead = CopyAhead([specs[n].nbytes for n in placed], copy_ahead_nbytes)
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
        """Make bytes `start` to `end` of the image at `address`: headers, tensors, and zeros between them.

        Raises:
            Exception: Whatever makes a tensor raises.
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
        """Free the buffers; no thread may use the image any more."""
        self._local = threading.local()
        while self._buffers:
            self._buffers.pop().close()

    def __enter__(self) -> StreamedImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(header: bytes, save_id: SaveId) -> bytes:
    name = save_id_bytes(save_id)
    return header[:SAVE_ID_OFFSET] + name + header[SAVE_ID_OFFSET + len(name) :]
