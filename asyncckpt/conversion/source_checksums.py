"""The CRC-32s that a source's zip archives carry, held against its elements as they pass: a flipped bit is an error.

An archive has one for each storage, which may hold one tensor, many, or a shard of one. Ranges of it are summed up in
any order by the threads that move them, and compared when they are all of it. What passed in part, or in another order
than it lies in the file, is read once more at the end.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.verification import crc_of, damaged
from asyncckpt.foreign.zip_directory import ZipEntry, data_offset, read_directory
from asyncckpt.format.crc import joined
from asyncckpt.format.structure import Chunk
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.source import Inline, Latin1, Located, Place
from asyncckpt.uninterrupted import mapped

_BATCH = 16
"""Chunks that a thread looks up at once."""


class _Archive:
    """Where an archive lies, and its storages in their order: None until somebody has read its directory.

    Attributes:
        lock: Held by who reads that, which may take long; who wants another archive does not wait for it.
        left: Storages that are not known to be sound.
    """

    __slots__ = ("left", "lock", "name", "nbytes", "start", "storages")

    def __init__(self, name: str, start: int, nbytes: int) -> None:
        self.name, self.start, self.nbytes = name, start, nbytes
        self.lock = threading.Lock()
        self.storages: Sequence[_Storage] | None = None
        self.left = 0


class _Summed:
    """Bytes that have a CRC-32.

    Attributes:
        start: Where they begin.
        nbytes: How many they are.
        sums: By offset in it: length and CRC-32 of what has passed. None: nothing has, or nothing more is wanted.
        passed: Bytes of these.
        is_over: Whether no more is wanted: all of it has passed, or ranges that overlap.
        is_sound: Whether all of it has passed, and was what its CRC-32 says.
    """

    __slots__ = ("_crc", "is_over", "is_sound", "nbytes", "passed", "start", "sums")

    def __init__(self, start: int, nbytes: int, crc: int) -> None:
        self.start, self.nbytes, self._crc = start, nbytes, crc
        self.sums: dict[int, tuple[int, int]] | None = None
        self.passed = 0
        self.is_over = self.is_sound = not nbytes

    def take(self, at: int, nbytes: int, crc: int) -> bool:
        """Take the CRC-32 of the bytes from `at` on; False if with them all have passed, and its own is another."""
        if self.is_over or at in (self.sums or ()):  # perhaps the other name of a tied tensor
            return True
        self.passed += nbytes
        if self.passed < self.nbytes:
            self.sums = self.sums or {}
            self.sums[at] = (nbytes, crc)
            return True
        sums = {**(self.sums or {}), at: (nbytes, crc)}
        self.is_over, self.sums = True, None
        end = whole = 0
        for start, (length, part) in sorted(sums.items()):
            if start != end:
                return True
            whole = joined(whole, part, length) if start else part
            end += length
        self.is_sound = whole == self._crc and end == self.nbytes
        return self.is_sound or end != self.nbytes


class _Storage(_Summed):
    """An entry of an archive that holds elements; `start` is in the file."""

    __slots__ = ("archive", "entry")

    def __init__(self, archive: _Archive, start: int, entry: ZipEntry) -> None:
        super().__init__(start, entry.nbytes, entry.crc)
        self.archive, self.entry = archive, entry


class SourceChecksums:
    """See the module. Several threads may call.

    Args:
        contents: The source; of one whose data lie in no archives there is nothing to compare.
        files: The storage seam.

    Attributes:
        are_there: Whether sums are wanted: archives have them, but for a few whose writer was told to leave them out.
            Of what lies in pickles they were taken when these were read.
    """

    def __init__(self, contents: Contents, files: Files) -> None:
        self._contents, self._files = contents, files
        self._lock = threading.Lock()
        self._archives: dict[str, list[tuple[int, int]]] = {}
        self._known: dict[tuple[str, int], _Archive | None] = {}  # None: nothing of it is to be compared any more
        for name, start, nbytes in sorted(contents.source.archives) if contents.source is not None else []:
            self._archives.setdefault(name, []).append((start, nbytes))
        in_pickles = contents.source.in_pickles if contents.source is not None else {}
        self._in_pickles = {
            part: [_Summed(start, *known) for start, known in sorted(of_part.items())]
            for part, of_part in in_pickles.items()
        }
        self.are_there = bool(self._archives or self._in_pickles)

    def take(self, part: int, offset: int, nbytes: int, crc: int) -> None:
        """Take the CRC-32 of `nbytes` of a part, from byte `offset` of it on, as they lie in the file.

        Raises:
            CorruptCheckpointError: With them a storage is whole, and has another CRC-32; names file and tensor.
            OSError: The archive cannot be read.
        """
        assert self._contents.source is not None
        if self._is_in_pickle(part, offset, nbytes, crc):
            return
        place = self._contents.source.place(part, self._files)
        storage = self._storage_of(place, offset)
        if storage is None or not isinstance(place, Located):
            return
        with self._lock:
            was_sound = storage.is_sound
            is_right = storage.take(place.offset + offset - storage.start, nbytes, crc)
            if storage.is_sound and not was_sound:
                storage.archive.left -= 1
                self._forget_finished(storage.archive)
        if not is_right:
            raise damaged(self._contents, storage.archive.name, storage.entry, storage.start)

    def _is_in_pickle(self, part: int, offset: int, nbytes: int, crc: int) -> bool:
        """Take the CRC-32 of long bytes in a pickle; False of anything else. As `take`."""
        held = self._in_pickles.get(part, [])
        found = bisect_right(held, offset, key=lambda one: one.start) - 1
        if found < 0 or offset >= held[found].start + held[found].nbytes:
            return False
        with self._lock:
            is_right = held[found].take(offset - held[found].start, nbytes, crc)
        if not is_right:
            path, name = self._contents.path, self._contents.ranks[0].index.shards[part].name
            detail = "long bytes in its pickle are not what they were when that was read"
            raise CorruptCheckpointError(f"{path}: {name}: {detail}", path=path, file=name, detail=detail)
        return True

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
        if not self._archives:
            return
        chunks = [chunk for tensor in tensors for _, chunk in tensor.chunks if chunk.nbytes]
        batches = (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH))
        with ThreadPoolExecutor(threads, "asyncckpt-sums") as pool:
            found = (storage for storages in mapped(pool, self._not_sound, batches) for storage in storages)
            rest = {(storage.archive.name, storage.start): storage for storage in found}
            for _ in mapped(pool, self._read, rest.values()):
                pass

    def _not_sound(self, chunks: Sequence[Chunk]) -> list[_Storage]:
        source = self._contents.source
        assert source is not None
        found = [self._storage_of(source.place(chunk.part, self._files), chunk.offset_bytes) for chunk in chunks]
        return [storage for storage in found if storage is not None and not storage.is_sound]

    def _read(self, storage: _Storage) -> None:
        archive = storage.archive
        with self._opened_archive(archive) as fd:
            read_at = read_exactly(self._files, fd, archive.nbytes, archive.start)
            try:
                crc = crc_of(read_at, storage.entry, storage.start - archive.start)
            except ValueError as error:
                raise self._unreadable(archive, error) from error
        if crc != storage.entry.crc:
            raise damaged(self._contents, archive.name, storage.entry, storage.start)

    def _storage_of(self, place: Place, offset: int) -> _Storage | None:
        """Return the storage in which byte `offset` of a place lies; None: in none that is to be compared."""
        if isinstance(place, (Inline, Latin1)):  # of what lies in pickles, CRC-32s are of the pickle
            return None
        name, at = self._contents.ranks[0].index.shards[place.part].name, place.offset + offset
        archives = self._archives.get(name, [])
        number = bisect_right(archives, at, key=lambda archive: archive[0]) - 1
        if number < 0:
            return None
        storages = self._storages(name, *archives[number])
        found = bisect_right(storages, at, key=lambda storage: storage.start) - 1
        return storages[found] if found >= 0 and at < storages[found].start + storages[found].entry.nbytes else None

    def _storages(self, name: str, start: int, nbytes: int) -> Sequence[_Storage]:
        """Return the storages of an archive in their order; none of one without CRC-32s, or that are all sound."""
        with self._lock:
            if (name, start) not in self._known:
                self._known[name, start] = _Archive(name, start, nbytes)
            archive = self._known[name, start]
        if archive is None:
            return ()
        with archive.lock:
            if archive.storages is None:
                storages = self._storages_of(archive)
                archive.left = sum(not storage.is_sound for storage in storages)
                archive.storages = storages
                with self._lock:
                    self._forget_finished(archive)
        return archive.storages

    def _forget_finished(self, archive: _Archive) -> None:
        """Under the lock: of very many archives, those that are known to be sound take no memory."""
        if not archive.left:
            self._known[archive.name, archive.start] = None
            archive.storages = ()  # which refer to it

    def _storages_of(self, archive: _Archive) -> list[_Storage]:
        with self._opened_archive(archive) as fd:
            read_at = read_exactly(self._files, fd, archive.nbytes, archive.start)
            try:
                entries = read_directory(read_at, archive.nbytes).values()
                if not any(entry.crc for entry in entries):  # torch.serialization.set_crc32_options(False)
                    return []
                held = [entry for entry in entries if "/data/" in entry.name]
                found = [_Storage(archive, archive.start + data_offset(read_at, entry), entry) for entry in held]
            except ValueError as error:
                raise self._unreadable(archive, error) from error
        return sorted(found, key=lambda storage: storage.start)

    def _opened_archive(self, archive: _Archive) -> AbstractContextManager[int]:
        assert self._contents.source is not None
        return opened(self._files, os.path.join(self._contents.source.directory, archive.name), os.O_RDONLY)

    def _unreadable(self, archive: _Archive, error: ValueError) -> AsyncCkptError:
        if isinstance(error, AsyncCkptError):
            return error
        assert self._contents.source is not None
        detail = f"bytes {archive.start} to {archive.start + archive.nbytes}: {error}"
        where = os.path.join(self._contents.source.directory, archive.name)
        return CorruptCheckpointError(f"{where}: {detail}", path=self._contents.path, file=archive.name, detail=detail)
