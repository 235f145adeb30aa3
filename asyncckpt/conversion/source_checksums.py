"""The CRC-32s that a source's zip archives carry, held against its elements as they pass: a flipped bit is an error.

An archive has one for each storage, which may hold one tensor, many, or a shard of one. Ranges of it are summed up in
any order by the threads that move them, and compared when they are all of it. What passed in part, or in another order
than it lies in the file, is read once more at the end.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.verification import crc_of, damaged
from asyncckpt.foreign.zip_directory import ZipEntry, data_offset, read_directory
from asyncckpt.format.crc import joined
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.source import Inline, Located, Strided


class _Storage:
    """An entry that holds elements.

    Attributes:
        name, start: Its file, and where its bytes begin there.
        archive: Where its archive begins there, and how long that is.
        sums: By offset in it: length and CRC-32 of what has passed. None: they overlap.
        passed: Bytes of these.
        is_sound: Whether all of it has passed, and was what its CRC-32 says.
    """

    __slots__ = ("archive", "entry", "is_sound", "name", "passed", "start", "sums")

    def __init__(self, name: str, archive: tuple[int, int], start: int, entry: ZipEntry) -> None:
        self.name, self.archive, self.start, self.entry = name, archive, start, entry
        self.sums: dict[int, tuple[int, int]] | None = {}
        self.passed = 0
        self.is_sound = not entry.nbytes

    def take(self, at: int, nbytes: int, crc: int) -> bool:
        """Take the CRC-32 of the bytes from `at` on; False if with them all have passed, and its own is another."""
        if self.is_sound or self.sums is None or at in self.sums:  # perhaps the other name of a tied tensor
            return True
        self.sums[at] = (nbytes, crc)
        self.passed += nbytes
        if self.passed < self.entry.nbytes:
            return True
        end = whole = 0
        for start, (length, part) in sorted(self.sums.items()):
            if start != end:
                self.sums = None
                return True
            whole = joined(whole, part, length) if start else part
            end += length
        self.is_sound = whole == self.entry.crc and end == self.entry.nbytes
        self.sums = None
        return self.is_sound or end != self.entry.nbytes


class SourceChecksums:
    """See the module. Several threads may call.

    Args:
        contents: The source; of one whose data lie in no archives there is nothing to compare.
        files: The storage seam.

    Attributes:
        are_there: Whether sums are wanted: archives have them, but for a few whose writer was told to leave them out.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents, self._files = contents, files
        self._lock = threading.Lock()
        self._archives: dict[str, list[tuple[int, int]]] = {}
        self._storages: dict[tuple[str, int], tuple[list[int], list[_Storage]]] = {}
        for name, start, nbytes in sorted(contents.source.archives) if contents.source is not None else []:
            self._archives.setdefault(name, []).append((start, nbytes))
        self.are_there = bool(self._archives)

    def take(self, part: int, offset: int, nbytes: int, crc: int) -> None:
        """Take the CRC-32 of `nbytes` of a part, from byte `offset` of it on, as they lie in the file.

        Raises:
            CorruptCheckpointError: With them a storage is whole, and has another CRC-32; names file and tensor.
            OSError: The archive cannot be read.
        """
        assert self._contents.source is not None
        place = self._contents.source.place(part, self._files)
        storage = self._storage_of(place, offset)
        if storage is None or not isinstance(place, Located):
            return
        with self._lock:
            is_sound = storage.take(place.offset + offset - storage.start, nbytes, crc)
        if not is_sound:
            raise damaged(self._contents, storage.name, storage.entry, storage.start)

    def check_rest(self, tensors: Iterable[SavedTensor], threads: int) -> None:
        """Read and compare the storages of these tensors that were not compared while they passed.

        Args:
            tensors: That were converted.
            threads: That read.

        Raises:
            CorruptCheckpointError: One has another CRC-32; names file and tensor.
            OSError: It cannot be read.

        Blocks: for the reads.
        """
        source = self._contents.source
        if source is None or not self._archives:
            return
        rest: dict[tuple[str, int], _Storage] = {}
        for tensor in tensors:
            for _, chunk in tensor.chunks:
                if not chunk.nbytes:
                    continue
                storage = self._storage_of(source.place(chunk.part, self._files), chunk.offset_bytes)
                if storage is not None and not storage.is_sound:
                    rest[storage.name, storage.start] = storage
        if rest:
            with ThreadPoolExecutor(threads, "asyncckpt-sums") as pool:
                for _ in pool.map(self._read, rest.values()):
                    pass

    def _read(self, storage: _Storage) -> None:
        start, nbytes = storage.archive
        with self._opened_archive(storage.name) as fd:
            read_at = read_exactly(self._files, fd, nbytes, start)
            try:
                crc = crc_of(read_at, storage.entry, storage.start - start)
            except ValueError as error:
                raise self._unreadable(storage.name, storage.archive, error) from error
        if crc != storage.entry.crc:
            raise damaged(self._contents, storage.name, storage.entry, storage.start)

    def _storage_of(self, place: Located | Strided | Inline, offset: int) -> _Storage | None:
        """Return the storage in which byte `offset` of a place lies; None: in none that has a CRC-32."""
        if isinstance(place, Inline):
            return None
        name, at = self._contents.ranks[0].index.shards[place.part].name, place.offset + offset
        archives = self._archives.get(name, [])
        number = bisect_right(archives, at, key=lambda archive: archive[0]) - 1
        if number < 0:
            return None
        with self._lock:
            starts, storages = self._entries(name, archives[number])
        found = bisect_right(starts, at) - 1
        return storages[found] if found >= 0 and at < starts[found] + storages[found].entry.nbytes else None

    def _entries(self, name: str, archive: tuple[int, int]) -> tuple[list[int], list[_Storage]]:
        """Return where the storages of an archive begin in their file, and these; none of one without CRC-32s."""
        if (name, archive[0]) not in self._storages:
            found: list[_Storage] = []
            start, nbytes = archive
            with self._opened_archive(name) as fd:
                read_at = read_exactly(self._files, fd, nbytes, start)
                try:
                    entries = read_directory(read_at, nbytes).values()
                    if any(entry.crc for entry in entries):  # else: torch.serialization.set_crc32_options(False)
                        held = [entry for entry in entries if "/data/" in entry.name]
                        found = [_Storage(name, archive, start + data_offset(read_at, entry), entry) for entry in held]
                except ValueError as error:
                    raise self._unreadable(name, archive, error) from error
            found.sort(key=lambda storage: storage.start)
            self._storages[name, start] = ([storage.start for storage in found], found)
        return self._storages[name, archive[0]]

    def _opened_archive(self, name: str) -> AbstractContextManager[int]:
        assert self._contents.source is not None
        return opened(self._files, os.path.join(self._contents.source.directory, name), os.O_RDONLY)

    def _unreadable(self, name: str, archive: tuple[int, int], error: ValueError) -> AsyncCkptError:
        if isinstance(error, AsyncCkptError):
            return error
        assert self._contents.source is not None
        detail = f"bytes {archive[0]} to {sum(archive)}: {error}"
        where = os.path.join(self._contents.source.directory, name)
        return CorruptCheckpointError(f"{where}: {detail}", path=self._contents.path, file=name, detail=detail)
