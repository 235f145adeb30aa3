"""A rank's shard files as an image that is never whole in memory: each piece is made when it is written.

A tensor is resolved when its first byte is wanted and let go after its last, so what a save takes beside the state is
one buffer per thread, whatever the planner allocates for the tensors that are just being written, and the copies ahead.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from asyncckpt.dcp.copy_ahead import CopyAhead
from asyncckpt.dcp.written_tensor import Resolve, WrittenTensor
from asyncckpt.format.layout import SAVE_ID_OFFSET, BoxSpec, Layout, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping
from asyncckpt.staging.cuda import CudaDevice
from asyncckpt.staging.device import Device
from asyncckpt.storage.rank_writer import EXTENT_NBYTES


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
        parts: (offset in the image, exact length) of each file.
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
        self.parts = tuple((start, part.nbytes) for start, part in zip(starts, layout.parts, strict=True))
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
