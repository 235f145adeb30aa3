"""Writes one shard file: creates it, reserves its space, writes extents, truncates, flushes and closes it.

O_DIRECT is used if the memory is page-aligned and the file system supports it. If the file system refuses it, even at
the first write, the same descriptor is used for buffered writes.

The fingerprint of a rank's shard files (`shards_print`) is equal if two saves have the same values. Such files differ
only in the save ID, which is in the first `BLOCK_NBYTES`. So the fingerprint is made from these without the save ID,
and from all checksums but the first. The fingerprints of single blocks (`prints`) are of `BLOCK_NBYTES` each, whatever
the number of bytes that have one checksum.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterable
from typing import Protocol

import xxhash

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.checksums import BLOCK_NBYTES, DIGEST_NBYTES, block_count, block_digests
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up
from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import Files, apply_mode, await_seen, fsync_file, named


class MadeImage(Protocol):
    """An image whose bytes are made when they are read. May be read from several threads.

    Attributes:
        is_page_aligned: Whether a piece that begins at a page of the image is page-aligned in memory.
    """

    is_page_aligned: bool

    def __len__(self) -> int:
        """Return the image's length in bytes."""

    def __getitem__(self, piece: slice, /) -> memoryview:
        """Return the bytes of `piece`, valid until the calling thread reads another one."""


Image = memoryview | MadeImage


def is_page_aligned(image: Image) -> bool:
    """Whether pages of `image` are page-aligned in memory, as O_DIRECT needs."""
    if not isinstance(image, memoryview):
        return image.is_page_aligned
    if image.readonly or not len(image):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(image)) % PAGE_NBYTES == 0


PRINT_NBYTES = 16
"""Bytes of a fingerprint: xxh3_128. Different snapshots have the same one with a probability of 2**-128."""


def block_print(block: memoryview) -> bytes:
    """Return the fingerprint of a block of a shard, but not of its first. Releases the GIL."""
    return xxhash.xxh3_128_digest(block)


def first_block_print(block: memoryview) -> bytes:
    """Return the fingerprint of a shard's first block without its save ID."""
    digest = xxhash.xxh3_128()
    with block[:SAVE_ID_OFFSET] as before, block[SAVE_ID_OFFSET + SAVE_ID_NBYTES :] as behind:
        digest.update(before)
        digest.update(behind)
    return digest.digest()


def shards_print(shards: Iterable[ShardWriter]) -> bytes:
    """Return the fingerprint of a rank's shards, in order."""
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(shard.nbytes.to_bytes(8, "little"))
        # A shard that was kept has no fingerprint of its first block. Its checksum, with the save ID, is unique.
        digest.update(shard.first or bytes(shard.digests[:DIGEST_NBYTES]))
        digest.update(bytes(shard.digests[DIGEST_NBYTES:]))
    return digest.digest()


_NO_PREALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


class ShardWriter(abc.ABC):
    """Writes one shard. `write_extent` may be called from several threads, other methods from one at a time.

    Args:
        path: Its path, which must not exist.
        image: The image with its bytes.
        offset: Offset of the shard in `image`.
        nbytes: Exact length of the shard.
        block_nbytes: Bytes that have one checksum; `BLOCK_NBYTES` is a multiple.

    Attributes:
        extent_nbytes_total: Length of all extents together: `nbytes`, or whole pages if O_DIRECT may be used.
        direct: Whether O_DIRECT is used.
        created: Whether the file was created or linked, or the upload begun.
        digests: One checksum for each `block_nbytes`, filled in by `write_extent`.
        first: `first_block_print` of the first block, set by `write_extent`.
        prints: Fingerprints of the blocks, one after the other, filled in by `write_extent`; None: not wanted.
        origin: The save whose ID is in the file, if the file is linked to one of that save; else None.
        n_links: How many saves have linked the file, this one included; 0: it is written.
        fsync_s: Seconds spent in fsync.
    """

    def __init__(self, path: str, image: Image, offset: int, nbytes: int, block_nbytes: int) -> None:
        self.path = path
        self.nbytes, self.block_nbytes = nbytes, block_nbytes
        self.direct = False
        self.extent_nbytes_total = nbytes
        self.created = False
        self.digests = bytearray(block_count(nbytes, block_nbytes) * DIGEST_NBYTES)
        self.first = b""
        self.prints: bytearray | None = None
        self.origin: SaveId | None = None
        self.n_links = 0
        self.fsync_s = 0.0
        self._image, self._offset = image, offset

    def write_extent(self, start: int, end: int) -> None:
        """Compute the checksums of an extent, and write it. The first call creates the file.

        Args:
            start, end: Bytes of the shard; multiples of `BLOCK_NBYTES`, except at the end of the shard.

        Raises:
            OSError: Names the shard and the byte range.
        """
        self._open()
        with self._image[self._offset + start : self._offset + end] as view:
            exact = min(end, self.nbytes) - start
            for at in range(0, exact, BLOCK_NBYTES):
                with view[at : min(at + BLOCK_NBYTES, exact)] as block:
                    number, where = (start + at) // BLOCK_NBYTES, (start + at) // self.block_nbytes * DIGEST_NBYTES
                    digests = block_digests(block, self.block_nbytes)
                    self.digests[where : where + len(digests)] = digests
                    if number == 0:
                        self.first = first_block_print(block)
                    if self.prints is not None:
                        found = block_print(block) if number else self.first
                        self.prints[number * PRINT_NBYTES : (number + 1) * PRINT_NBYTES] = found
            self._write(view, start)
        reach("shard: extent written")

    def keep_prints(self) -> None:
        """Make `write_extent` fill in `prints`."""
        self.prints = bytearray(block_count(self.nbytes, BLOCK_NBYTES) * PRINT_NBYTES)

    def block_print(self, number: int) -> bytes:
        """Return the fingerprint of a block of the image; that of the first is without the save ID."""
        start = number * BLOCK_NBYTES
        end = min(start + BLOCK_NBYTES, self.nbytes)
        with self._image[self._offset + start : self._offset + end] as block:
            return block_print(block) if number else first_block_print(block)

    def take(self, origin: SaveId, digests: bytes, prints: bytes, n_links: int) -> None:
        """Record that the file is linked to a complete one, instead of being written.

        Args:
            origin: The save whose ID is in the file.
            digests: The checksums of its blocks.
            prints: The fingerprints of its blocks.
            n_links: How many saves have linked it, this one included.
        """
        self.created, self.n_links = True, n_links
        self.origin, self.digests, self.prints = origin, bytearray(digests), bytearray(prints)
        self.first = prints[:PRINT_NBYTES]

    @abc.abstractmethod
    def _open(self) -> None:
        """Create the file, or begin the upload, unless that is done."""

    @abc.abstractmethod
    def _write(self, view: memoryview, start: int) -> None:
        """Write `view` at offset `start` of the shard."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Flush the bytes written so far. May be called from several threads.

        Raises:
            OSError: Names the file. It must be given up: the kernel reports a lost page to one caller only.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Complete the shard with its exact length, and make it durable if requested. Called once, after all extents.

        Raises:
            OSError: Names the shard. IMPORTANT: after an fsync error the file must be given up.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Close a shard that will not be finished. No-op after `finish`. No thread may be writing."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Wake threads that wait for another extent of this shard, because a thread has failed."""


class FileShardWriter(ShardWriter):
    """Writes a shard to a file.

    Args:
        path, image, offset, nbytes, block_nbytes: As of `ShardWriter`.
        aligned: Whether `image` and `offset` are page-aligned.
        truncates: Whether the last page may be written whole, and truncated at the shard's end afterwards.
        mode: Permission bits of the file.
        fsync: Whether `finish` calls fsync.
        files: The `Files` to write with.
    """

    def __init__(
        self,
        path: str,
        image: Image,
        offset: int,
        nbytes: int,
        *,
        block_nbytes: int,
        aligned: bool,
        truncates: bool = True,
        mode: int,
        fsync: bool,
        files: Files,
    ) -> None:
        super().__init__(path, image, offset, nbytes, block_nbytes)
        pages_nbytes = round_up(nbytes)
        self.direct = aligned and truncates and offset + pages_nbytes <= len(image)
        self.extent_nbytes_total = pages_nbytes if self.direct else nbytes
        self._truncates, self._mode, self._fsync, self._files = truncates, mode, fsync, files
        self._fd = -1
        self._refused: OSError | None = None
        self._lock = threading.Lock()

    def _write(self, view: memoryview, start: int) -> None:
        done, direct = 0, self.direct
        while done < len(view):
            try:
                written = self._files.pwrite(self._fd, view[done:], start + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # O_DIRECT is refused
                    self._go_buffered()
                    direct = False
                    continue
                raise named(error, self.path, f"writing bytes {start + done} to {start + len(view)}") from error
            if written <= 0:
                raise OSError(errno.EIO, f"the file system took none of the bytes from {start + done} on", self.path)
            done += written

    def _open(self) -> None:
        with self._lock:
            if self._fd >= 0:
                return
            if self._refused is not None:  # the error of the thread that tried first, rather than EEXIST
                raise named(self._refused, self.path)
            fd = self._files.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, self._mode)
            self.created = True
            try:
                reach("shard: created")
                apply_mode(self._files, fd, self._mode)
                self._reserve(fd)
                self._go_direct(fd)
                reach("shard: reserved")
            except BaseException as error:
                self._refused = error if isinstance(error, OSError) else None
                with contextlib.suppress(OSError):
                    self._files.close(fd)
                raise
            self._fd = fd

    def _reserve(self, fd: int) -> None:
        """Reserve the file's space: a full disk is noticed before writing, and writers need not wait for each other."""
        try:
            self._files.fallocate(fd, self.extent_nbytes_total)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise named(error, self.path, f"reserving {self.extent_nbytes_total} bytes") from error

    def _go_direct(self, fd: int) -> None:
        """Switch O_DIRECT on. Not at creation: a refused open(O_CREAT | O_DIRECT) leaves a file behind."""
        if not self.direct:
            return
        try:
            self._files.set_direct(fd, True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise named(error, self.path, "switching O_DIRECT on") from error
            self.direct = False

    def _go_buffered(self) -> None:
        with self._lock:
            if self.direct:
                self._files.set_direct(self._fd, False)
                self.direct = False

    def flush(self) -> None:
        """Implement `ShardWriter.flush`: fsync the file."""
        started = time.perf_counter()
        fsync_file(self._files, self._fd, self.path)
        self.fsync_s += time.perf_counter() - started

    def finish(self) -> None:
        """Implement `ShardWriter.finish`: truncate the file to its length, fsync and close it, check its length."""
        if self._truncates:
            try:
                self._files.ftruncate(self._fd, self.nbytes)
            except OSError as error:
                raise named(error, self.path, f"setting its length to {self.nbytes}") from error
        reach("shard: cut")
        if self._fsync:
            started = time.perf_counter()
            fsync_file(self._files, self._fd, self.path)
            self.fsync_s += time.perf_counter() - started
        reach("shard: flushed")
        fd, self._fd = self._fd, -1
        try:
            self._files.close(fd)
        except OSError as error:
            raise named(error, self.path, "close") from error
        # IMPORTANT: only now. Mounts of object stores show another length while a file is open for writing.
        found = await_seen(lambda: self._files.lstat(self.path).st_size, lambda nbytes: nbytes == self.nbytes)
        if found != self.nbytes:
            raise OSError(errno.EIO, f"{found} bytes long after {self.nbytes} were written", self.path)
        reach("shard: closed")

    def stop(self) -> None:
        """Implement `ShardWriter.stop`: nothing to do, since extents of a file do not wait for each other."""

    def abandon(self) -> None:
        """Implement `ShardWriter.abandon`: close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                self._files.close(fd)
