"""One shard file while it is written: created, reserved, filled by any thread, cut, flushed, closed.

O_DIRECT is used when the memory is page-aligned and the file system takes it; a refusal, even at the first write, turns
the same descriptor to buffered writes.

Of what a rank's shard files hold, apart from the save that they belong to, there is a print: equal prints mean equal
snapshots. A shard file differs between two saves of the same values in its save id only, which lies in the first block.
So the print takes that block without it, and of all others the checksums that there are already.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import xxhash

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.checksums import BLOCK_NBYTES, DIGEST_NBYTES, block_count, block_digest
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up
from asyncckpt.storage.files import Files, apply_mode, fsync_file, named, write_all


class MadeImage(Protocol):
    """Makes the bytes of an image piece by piece; from several threads.

    Attributes:
        is_page_aligned: Whether each piece lies in memory as it does in the image, relative to pages.
    """

    is_page_aligned: bool

    def __len__(self) -> int:
        """Return the image's length in bytes."""

    def __getitem__(self, piece: slice, /) -> memoryview:
        """Return the bytes of `piece`, good until the calling thread asks for others."""


Image = memoryview | MadeImage


def is_page_aligned(image: Image) -> bool:
    """Whether O_DIRECT can write from `image` at whole pages of it."""
    if not isinstance(image, memoryview):
        return image.is_page_aligned
    if image.readonly or not len(image):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(image)) % PAGE_NBYTES == 0


PRINT_NBYTES = 16
"""xxh3_128: two snapshots that differ meet by accident once in 2**128."""


def first_block(block: memoryview) -> bytes:
    """Return the print of a shard's first block: all but the save id."""
    digest = xxhash.xxh3_128()
    with block[:SAVE_ID_OFFSET] as before, block[SAVE_ID_OFFSET + SAVE_ID_NBYTES :] as behind:
        digest.update(before)
        digest.update(behind)
    return digest.digest()


def shards_print(shards: Iterable[ShardWriter]) -> bytes:
    """Return the print of a rank's shards, in order."""
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(shard.nbytes.to_bytes(8, "little"))
        # Of one that was kept, and not read: its own, which has the save id in it and equals no other's.
        digest.update(shard.first or bytes(shard.digests[:DIGEST_NBYTES]))
        digest.update(bytes(shard.digests[DIGEST_NBYTES:]))
    return digest.digest()


_NO_PREALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_NONE_KNOWN: Mapping[int, bytes] = {}


class ShardWriter(abc.ABC):
    """Writes one shard. `write_extent` may be called from several threads, the rest from one at a time.

    Args:
        path: Its name; nothing must have it.
        image: What it is written from.
        offset: Where the shard's bytes begin in `image`.
        nbytes: The shard's exact length.

    Attributes:
        extent_nbytes_total: What the extents must cover: whole pages when O_DIRECT may be used.
        direct: Whether writes go by O_DIRECT.
        created: Whether something was begun under the name.
        digests: One checksum per block, filled by `write_extent`; `first`: as `first_block` returns it, likewise.
        fsync_s: Seconds that fsync took.
    """

    def __init__(self, path: str, image: Image, offset: int, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = False
        self.extent_nbytes_total = nbytes
        self.created = False
        self.digests = bytearray(block_count(nbytes) * DIGEST_NBYTES)
        self.first = b""
        self.fsync_s = 0.0
        self._image, self._offset = image, offset

    def write_extent(self, start: int, end: int, known: Mapping[int, bytes] = _NONE_KNOWN) -> None:
        """Digest and write the bytes `start` to `end`; whole blocks but for the last. Opens the file if need be.

        Args:
            start, end: See above.
            known: Checksums of blocks, by number, that are not computed again.

        Raises:
            OSError: Names the shard and the byte range.
        """
        self._open()
        with self._image[self._offset + start : self._offset + end] as view:
            exact = min(end, self.nbytes) - start
            for at in range(0, exact, BLOCK_NBYTES):
                with view[at : min(at + BLOCK_NBYTES, exact)] as block:
                    number = (start + at) // BLOCK_NBYTES
                    where = number * DIGEST_NBYTES
                    self.digests[where : where + DIGEST_NBYTES] = known.get(number) or block_digest(block)
                    if where == 0:
                        self.first = first_block(block)
            self._write(view, start)
        reach("shard: extent written")

    @abc.abstractmethod
    def _open(self) -> None:
        """Begin it, if nobody has."""

    @abc.abstractmethod
    def _write(self, view: memoryview, start: int) -> None:
        """Write bytes from `start` on."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Flush what was written so far. From several threads, as `write_extent`.

        Raises:
            OSError: Names the file, which must be given up: the kernel reports a lost page to one caller only.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Make it whole, of its exact length, and durable if that was asked for; called once, after the last extent.

        Raises:
            OSError: Names the shard. IMPORTANT: after an fsync error the file must be given up.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Let go of one that will not be finished; does nothing to one that is. No thread may be writing."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Another thread has failed: threads that wait for an extent of this shard must wait no longer."""


class FileShardWriter(ShardWriter):
    """Writes a shard into a file.

    Args:
        path, image, offset, nbytes: As of `ShardWriter`.
        aligned: Whether `image` and `offset` are page-aligned.
        mode: Permission bits.
        fsync: Whether `finish` flushes.
        files: The storage seam.
    """

    def __init__(
        self,
        path: str,
        image: Image,
        offset: int,
        nbytes: int,
        *,
        aligned: bool,
        mode: int,
        fsync: bool,
        files: Files,
    ) -> None:
        super().__init__(path, image, offset, nbytes)
        self.direct = aligned and offset + round_up(nbytes) <= len(image)
        self.extent_nbytes_total = round_up(nbytes) if self.direct else nbytes
        self._mode, self._fsync, self._files = mode, fsync, files
        self._fd = -1
        self._refused: OSError | None = None
        self._lock = threading.Lock()

    def _write(self, view: memoryview, start: int) -> None:
        done = self._write_direct(view, start) if self.direct else 0
        write_all(self._files, self._fd, view[done:], start + done, self.path)

    def _write_direct(self, view: memoryview, start: int) -> int:
        """Write with O_DIRECT until done or refused; return how much was written."""
        done = 0
        while done < len(view):
            try:
                written = self._files.pwrite(self._fd, view[done:], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._go_buffered()
                    break
                raise named(error, self.path, f"writing bytes {start + done} to {start + len(view)}") from error
            if written <= 0:
                raise OSError(errno.EIO, f"the file system took none of the bytes from {start + done}", self.path)
            done += written
        return done

    def _open(self) -> None:
        with self._lock:
            if self._fd >= 0:
                return
            if self._refused is not None:  # another thread was first: what it was told counts, not that a file is there
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
        """A full disk shows here, before anything is written; and writers inside a file's length do not queue."""
        try:
            self._files.fallocate(fd, self.extent_nbytes_total)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise named(error, self.path, f"reserving {self.extent_nbytes_total} bytes") from error

    def _go_direct(self, fd: int) -> None:
        """Switched on after creation, because open(O_CREAT | O_DIRECT) leaves a file behind when it is refused."""
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
        """As of `ShardWriter`, by fsync."""
        started = time.perf_counter()
        fsync_file(self._files, self._fd, self.path)
        self.fsync_s += time.perf_counter() - started

    def finish(self) -> None:
        """As of `ShardWriter`: cut the file to its length, flush and close it."""
        try:
            self._files.ftruncate(self._fd, self.nbytes)
            found = self._files.fstat(self._fd).st_size
        except OSError as error:
            raise named(error, self.path, f"setting its length to {self.nbytes}") from error
        if found != self.nbytes:
            raise OSError(errno.EIO, f"{found} bytes long after {self.nbytes} were written", self.path)
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
        reach("shard: closed")

    def stop(self) -> None:
        """As of `ShardWriter`: extents of a file do not wait for each other."""

    def abandon(self) -> None:
        """As of `ShardWriter`: close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                self._files.close(fd)
