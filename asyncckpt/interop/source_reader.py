"""Reads the elements of tensors of any source into given memory, and verifies them.

The zip archives of `torch.save` have a CRC-32 for each storage, which may hold one tensor, several, or a shard of one.
The reading threads compute the CRC-32 of each range that they read. At the end those of one storage are combined and
compared. Storages that were not read as a whole, in the order of the file, are read once more for this.
"""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from asyncckpt.basics.deferred_signals import mapped
from asyncckpt.dtypes import DTYPES
from asyncckpt.format.structure import row_major
from asyncckpt.format.torch_zip import combined_crc32
from asyncckpt.interop.copy_pipeline import ElementRun
from asyncckpt.interop.mapping.made_tensors import AnyTensor, MadeTensor
from asyncckpt.interop.sources.torch_file import ZipEntry, crc_of, damaged, data_offset, opened_archive, read_directory
from asyncckpt.loading.byte_ranges import wanted_ranges, whole_region
from asyncckpt.loading.fetch import read_ranges, strided_view
from asyncckpt.loading.tensor_writers import boxes_within, elements_at
from asyncckpt.storage.contents import Contents, Inline, Located, SavedTensor, Strided, check_lengths
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import Wanted
from asyncckpt.storage.reader import DEFAULT_THREADS
from asyncckpt.torch_tensors import CARRIERS, torch_dtype

_BATCH = 16
"""Archives per task of a thread: a directory may have very many."""


_Archive = tuple[str, int, int]
"""An element of `ForeignSource.archives`: name of the file, offset of the archive in it, length in bytes."""


class _Storage(NamedTuple):
    """An entry of an archive that holds elements; they begin at byte `start` of the file."""

    archive: _Archive
    start: int
    entry: ZipEntry


class SourceChecksums:
    """Compares the CRC-32s of a source's zip archives with what is read. Several threads may call `take`.

    Args:
        contents: The source. Sources without archives have no CRC-32s.
        files: The storage seam.

    Attributes:
        are_there: Whether the source has archives, so that CRC-32s have to be computed.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents, self._files = contents, files
        self._archives: dict[str, list[_Archive]] = {}
        self._passed: dict[str, dict[int, tuple[int, int]]] = {}
        for found in sorted(contents.source.archives) if contents.source is not None else []:
            self._archives.setdefault(found[0], []).append(found)
            self._passed[found[0]] = {}
        self.are_there = bool(self._archives)

    def take(self, part: int, offset: int, nbytes: int, crc: int) -> None:
        """Record the CRC-32 of `nbytes` bytes that were read at byte `offset` of a part.

        Raises:
            CorruptCheckpointError, OSError: See `ForeignSource.place`.
        """
        assert self._contents.source is not None
        place = self._contents.source.place(part, self._files)
        if nbytes and isinstance(place, Located):
            passed = self._passed.get(self._name_of(place), {})
            passed[place.offset + offset] = (nbytes, crc)

    def check(self, tensors: Iterable[SavedTensor], threads: int) -> None:
        """Compare the CRC-32s of all storages that hold the given tensors.

        Args:
            tensors: The tensors that were converted.
            threads: Number of threads that read.

        Raises:
            CorruptCheckpointError: The CRC-32 of a storage differs; names file and tensor.
            OSError: A file cannot be read.

        Blocks: until directories of archives, and storages that were not read completely, are read.
        """
        source, held = self._contents.source, dict[_Archive, list[int]]()
        for chunk in (chunk for tensor in tensors for _, chunk in tensor.chunks if chunk.nbytes and self.are_there):
            assert source is not None
            place = source.place(chunk.part, self._files)
            if isinstance(place, Inline):  # the elements are in the pickle, which has its own CRC-32
                continue
            archives, at = self._archives.get(self._name_of(place), []), place.offset + chunk.offset_bytes
            number = bisect_right(archives, at, key=lambda archive: archive[1]) - 1
            if number >= 0:
                held.setdefault(archives[number], []).append(at)
        found = list(held.items())
        batches = (found[at : at + _BATCH] for at in range(0, len(found), _BATCH))
        with ThreadPoolExecutor(threads, "asyncckpt-sums") as pool:
            rest = [storage for storages in mapped(pool, self._compare, batches) for storage in storages]
            for _ in mapped(pool, self._read_and_compare, rest):
                pass

    def _name_of(self, place: Located | Strided) -> str:
        return self._contents.ranks[0].index.shards[place.part].name

    def _compare(self, held: Sequence[tuple[_Archive, list[int]]]) -> list[_Storage]:
        """Compare the storages at given offsets of archives; return those that were not read completely.

        Raises:
            CorruptCheckpointError: The CRC-32 of a storage differs.
        """
        rest = []
        for archive, places in held:
            storages, passed = self._storages_of(archive), self._passed[archive[0]]
            numbers = {bisect_right(storages, at, key=lambda storage: storage.start) - 1 for at in places}
            for storage in (storages[number] for number in sorted(numbers) if number >= 0):
                at, end, crc = storage.start, storage.start + storage.entry.nbytes, 0
                while at < end and at in passed:
                    nbytes, of_range = passed[at]
                    crc = combined_crc32(crc, of_range, nbytes) if at > storage.start else of_range
                    at += nbytes
                if at != end:
                    rest.append(storage)
                elif crc != storage.entry.crc:
                    raise damaged(self._contents, archive[0], storage.entry, storage.start)
        return rest

    def _storages_of(self, archive: _Archive) -> list[_Storage]:
        """Return the storages of an archive in the order of the file; none if the archive has no CRC-32s."""
        with opened_archive(self._contents, archive, self._files) as read_at:
            entries = read_directory(read_at, archive[2]).values()
            if not any(entry.crc for entry in entries):  # torch.serialization.set_crc32_options(False)
                return []
            held = [entry for entry in entries if "/data/" in entry.name]
            found = [_Storage(archive, archive[1] + data_offset(read_at, entry), entry) for entry in held]
        return sorted(found, key=lambda storage: storage.start)

    def _read_and_compare(self, storage: _Storage) -> None:
        archive, start, entry = storage
        with opened_archive(self._contents, archive, self._files) as read_at:
            crc = crc_of(read_at, entry, start - archive[1])
        if crc != entry.crc:
            raise damaged(self._contents, archive[0], entry, start)


class SourceReader:
    """Reads runs of the tensors of one source, in the calling thread. Several threads may call it.

    A tensor whose elements are not row-major in the file is read as a whole, and kept until the next such tensor.
    Elements of a made tensor are cast while they are copied out of the read buffer.

    Args:
        contents: The source.
        tensors: The tensors, by the numbers that runs refer to.
        files: The storage seam.

    Raises:
        CorruptCheckpointError: A file is missing or has another length.
        OSError: A system call failed.
    """

    def __init__(self, contents: Contents, tensors: Sequence[AnyTensor], files: Files) -> None:
        check_lengths(contents, files)
        self._contents, self._tensors, self._files = contents, tensors, files
        self._checksums = SourceChecksums(contents, files)
        self._lock = threading.Lock()
        self._view: tuple[str | None, torch.Tensor | None] = (None, None)

    def read(self, runs: Sequence[ElementRun], address: int, origin: int, buffer: memoryview) -> dict[ElementRun, int]:
        """Read and verify the runs of a window; see `copy_pipeline.ReadsRuns`.

        Raises:
            CorruptCheckpointError: Stored bytes differ from those that were saved.
            OSError: A file cannot be read.
        """
        ranges: list[tuple[tuple[int, int], Wanted]] = []
        whole: dict[int, ElementRun] = {}
        for run in runs:
            to = address + run.at - origin
            saved = self._tensors[run.tensor]
            if isinstance(saved, MadeTensor):
                ranges += self._of_made(saved, run, to)
                continue
            rank, chunk = saved.chunks[0]
            if chunk.sizes != saved.global_shape:
                ranges += self._of_chunks(saved, run, to)
            elif run.nbytes == chunk.nbytes or not self._copied(saved, _targets(saved, run, to)):
                whole[len(ranges)] = run
                ranges.append(((rank, chunk.part), Wanted(chunk.offset_bytes + run.start, run.nbytes, saved.fqn, to)))
        read_ranges(self._contents, ranges, self._files, threads=1, verify=True, buffer=buffer)
        sums = {}
        for number, ((_, part), wanted) in enumerate(ranges if self._checksums.are_there else ()):
            if isinstance(wanted.sink, int) and wanted.times == 1:
                crc = zlib.crc32((ctypes.c_char * wanted.nbytes).from_address(wanted.sink))
                self._checksums.take(part, wanted.offset, wanted.nbytes, crc)
                if number in whole:
                    sums[whole[number]] = crc
        return sums

    def check_checksums(self, numbers: Iterable[int], threads: int) -> None:
        """Compare the storages of the given tensors with the CRC-32s in the source.

        Args:
            numbers: Numbers of the tensors that were converted.
            threads: Number of threads that read storages again, if `read` has not read all of them.

        Raises:
            CorruptCheckpointError: A storage was changed since it was written; names file and tensor.
            OSError: A file cannot be read.

        Blocks: for these reads. There are few if every tensor is row-major and has a storage of its own.
        """
        found: dict[str, SavedTensor] = {}
        for tensor in (self._tensors[number] for number in numbers):
            of_it = [box.saved for box in tensor.boxes] if isinstance(tensor, MadeTensor) else [tensor]
            found |= {saved.fqn: saved for saved in of_it}
        self._checksums.check(found.values(), threads)

    def _of_chunks(self, saved: SavedTensor, run: ElementRun, to: int) -> Iterator[tuple[tuple[int, int], Wanted]]:
        """Yield the ranges to read of a tensor that is stored as several chunks."""
        for target, offsets in _targets(saved, run, to):
            region = whole_region(offsets, tuple(target.shape))
            yield from wanted_ranges(self._contents, saved, region, target, target.dtype, verify=True)

    def _of_made(self, made: MadeTensor, run: ElementRun, to: int) -> Iterator[tuple[tuple[int, int], Wanted]]:
        """Yield the ranges to read of a made tensor; what is not row-major in its file is copied at once."""
        dtype = torch_dtype(made.dtype)
        for memory, origin in _boxes(made.wide_shape, dtype, run, to):
            for box in made.sources_of(origin, tuple(memory.shape)):
                target = memory[tuple(slice(at, at + n) for at, n in zip(box.within, box.sizes, strict=True))]
                if box.lacks is not None:
                    target = target.squeeze(box.lacks)
                stored = torch_dtype(box.saved.dtype)
                if stored == dtype:  # copy bits: torch changes some NaNs when it copies floating point numbers
                    stored = CARRIERS[dtype.itemsize]
                    target = target.view(stored)
                if not self._copied(box.saved, [(target, box.offsets)]):
                    region = whole_region(box.offsets, tuple(target.shape))
                    yield from wanted_ranges(self._contents, box.saved, region, target, stored, verify=True)

    def _copied(self, saved: SavedTensor, boxes: Iterable[tuple[torch.Tensor, tuple[int, ...]]]) -> bool:
        """Copy boxes of a tensor that is not row-major in its file. False: it is row-major, and nothing was done.

        Args:
            saved: The tensor.
            boxes: The memory of each box, and its offsets in the tensor.
        """
        if self._contents.source is None:
            return False
        with self._lock:  # held during the copy, so that only one such tensor is in memory at a time
            if self._view[0] != saved.fqn:
                self._view = (None, None)
                self._view = (saved.fqn, strided_view(self._contents, saved, self._files, threads=DEFAULT_THREADS))
            view = self._view[1]
            if view is None:
                return False
            stored = torch_dtype(saved.dtype)
            for target, offsets in boxes:
                box = view[tuple(slice(o, o + n) for o, n in zip(offsets, target.shape, strict=True))]
                target.copy_(box if target.dtype == view.dtype else box.view(stored))
            return True


def _targets(saved: SavedTensor, run: ElementRun, to: int) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the boxes that a run of a tensor consists of; see `_boxes`."""
    return _boxes(saved.global_shape, CARRIERS[DTYPES[saved.dtype].itemsize], run, to)


def _boxes(
    shape: tuple[int, ...], dtype: torch.dtype, run: ElementRun, to: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the boxes that a run consists of: a tensor over the memory of each, from `to` on, and its offsets."""
    itemsize = dtype.itemsize
    assert run.start % itemsize == run.nbytes % itemsize == 0, "a window cuts an element"
    first, end = run.start // itemsize, (run.start + run.nbytes) // itemsize
    for start, offsets, sizes in boxes_within(shape, row_major(shape), (0,) * len(shape), first, end):
        nbytes = math.prod(sizes) * itemsize
        yield elements_at(to + (start - first) * itemsize, nbytes, dtype).view(sizes), offsets
