"""Reading runs of tensors' elements to where they are wanted, whatever the source stores them as."""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import torch

from asyncckpt.conversion.arriving import Arriving
from asyncckpt.conversion.payloads import CARRIERS, strided_view
from asyncckpt.conversion.source_checksums import SourceChecksums
from asyncckpt.conversion.windows import Run
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.archive import TextPayload
from asyncckpt.format.structure import row_major
from asyncckpt.loading.boxes import whole_region
from asyncckpt.loading.fetching import bytes_of, read_ranges
from asyncckpt.loading.placements import wanted_ranges
from asyncckpt.loading.sinks import boxes_within, elements_at
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.storage import latin1
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import Wanted

_Range = tuple[tuple[int, int], Wanted]


class RunReader:
    """Reads runs of the tensors of one source, in the calling thread; several may call.

    A large tensor whose elements are not row-major in their file is read as a whole, and kept until another such.

    Args:
        contents: The source.
        tensors: What runs number.
        files: The storage seam.

    Raises:
        CorruptCheckpointError: A file is missing or of another length, or an archive damaged.
        OSError: It cannot be known.
    """

    def __init__(self, contents: Contents, tensors: Sequence[SavedTensor], files: Files) -> None:
        check_lengths(contents, files)
        self._contents, self._tensors, self._files = contents, tensors, files
        self._checksums = SourceChecksums(contents, files)
        self._lock = threading.Lock()
        self._view: tuple[int, torch.Tensor | None] = (-1, None)

    def read(self, runs: Sequence[Run], address: int, origin: int, buffer: memoryview, arriving: Arriving) -> None:
        """Read and verify runs.

        Args:
            runs: Of one window.
            address: Where the byte at `origin` of the file goes; the others behind it.
            origin: See `address`.
            buffer: Page-aligned memory that is read into first.
            arriving: Takes elements that lie in one piece; of others, which are put to their places, it knows nothing.

        Raises:
            CorruptCheckpointError: The files differ from what was saved; by the CRC-32 of a zip archive too.
            OSError: They cannot be read.
        """
        ranges: list[_Range] = []
        whole: list[tuple[Run, int, int]] = []
        summed = self._checksums.are_there
        for run in runs:
            to = address + run.at - origin
            saved = self._tensors[run.tensor]
            rank, chunk = saved.chunks[0]
            if run.text is not None:
                self._put_text(saved, run, run.text, to)
            elif chunk.sizes != saved.global_shape:
                ranges += self._of_chunks(saved, run, to)
            elif (run.start == 0 and run.is_last) or not self._copied(run, to):
                start, sink = chunk.offset_bytes + run.start, arriving.sink(run, summed=summed)
                ranges.append(((rank, chunk.part), Wanted(start, run.nbytes, saved.fqn, sink)))
                whole.append((run, chunk.part, start))
        read_ranges(self._contents, ranges, self._files, threads=1, verify=True, buffer=buffer)
        if summed:
            for run, part, start in whole:
                self._checksums.take(part, start, run.nbytes, arriving.crcs[run.piece])
            for (_, part), wanted in ranges:
                if isinstance(wanted.sink, int) and wanted.times == 1:
                    elements = (ctypes.c_char * wanted.nbytes).from_address(wanted.sink)
                    self._checksums.take(part, wanted.offset, wanted.nbytes, zlib.crc32(elements))

    def check_rest(self, numbers: Iterable[int], threads: int) -> None:
        """Hold what did not pass `read` as it lies in the source against the CRC-32s that the source has.

        Args:
            numbers: Of the tensors that were converted.
            threads: That read.

        Raises:
            CorruptCheckpointError: It was changed since it was written; names file and tensor.
            OSError: It cannot be read.

        Blocks: for the reads; there are none where every tensor is row-major in its file, and has a storage for itself.
        """
        self._checksums.check_rest((self._tensors[number] for number in numbers), threads)

    def _of_chunks(self, saved: SavedTensor, run: Run, to: int) -> Iterator[_Range]:
        """Yield the ranges of a tensor that lies in several chunks."""
        for target, offsets in _targets(saved, run, to):
            region = whole_region(offsets, tuple(target.shape))
            yield from wanted_ranges(self._contents, saved, region, target, target.dtype, verify=True)

    def _put_text(self, saved: SavedTensor, run: Run, text: TextPayload, to: int) -> None:
        """Put a run of the text that stands for bytes to its place, a step of these at a time."""
        end, total = run.start + run.nbytes, saved.global_shape[0]
        for n in range(bisect_right(text.starts, run.start) - 1, bisect_left(text.starts, end)):
            chosen = slice(n * text.step, min((n + 1) * text.step, total))
            data = read_tensor(self._contents, saved, (chosen,), self._files, threads=1, verify=True)
            start, found = text.starts[n], latin1.encoded(bytes_of(data))
            if len(found) != text.starts[n + 1] - start:
                detail = f"{saved.fqn!r} was changed while it was read"
                where = self._contents.path
                raise CorruptCheckpointError(f"{where}: {detail}", path=where, fqn=saved.fqn, detail=detail)
            low, high = max(run.start - start, 0), min(end - start, len(found))
            ctypes.memmove(to + start + low - run.start, found[low:high], high - low)

    def _copied(self, run: Run, to: int) -> bool:
        """Copy a run of a tensor that is not row-major in its file; False of any other, and nothing is done."""
        saved = self._tensors[run.tensor]
        with self._lock:  # also while it is copied: one such tensor at a time is in memory
            if self._view[0] != run.tensor:
                self._view = (-1, None)
                self._view = (run.tensor, strided_view(self._contents, saved, self._files, threads=DEFAULT_THREADS))
            view = self._view[1]
            if view is None:
                return False
            for target, offsets in _targets(saved, run, to):
                target.copy_(view[tuple(slice(o, o + n) for o, n in zip(offsets, target.shape, strict=True))])
            return True


def _targets(saved: SavedTensor, run: Run, to: int) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the boxes that a run consists of: the memory at `to` that each goes to, and its offsets."""
    itemsize, shape = DTYPES[saved.dtype].itemsize, saved.global_shape
    assert run.start % itemsize == run.nbytes % itemsize == 0, "a window cuts an element"
    first, end = run.start // itemsize, (run.start + run.nbytes) // itemsize
    for start, offsets, sizes in boxes_within(shape, row_major(shape), (0,) * len(shape), first, end):
        nbytes = math.prod(sizes) * itemsize
        yield elements_at(to + (start - first) * itemsize, nbytes, CARRIERS[itemsize]).view(sizes), offsets
