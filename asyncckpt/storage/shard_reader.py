"""One open shard file for reading: proven to be the right one; read from the page cache, else by O_DIRECT."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Sequence

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.storage.cached_copies import CachedCopies
from asyncckpt.storage.files import Files, named
from asyncckpt.storage.gathering import near
from asyncckpt.storage.read_plan import Batch

_NOT_CACHED = frozenset({errno.EAGAIN, errno.EINTR})
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NOT_A_FILE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR})


NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class ShardReader:
    """See the module. `read_cached` and `read` may be called from several threads; `close()` by the last of them.

    Args:
        path: The checkpoint's directory.
        shard: Name and exact length of the file.
        save_id: Whose file it must be; None: a file of another format, which may be reached by a link.
        files: The storage seam.
        read_ahead: The file is read by `read_buffered`, front to back, and the kernel reads ahead: it takes a third of
            the time that pages cost that are asked for by number, for it takes them in larger units.

    Raises:
        CorruptCheckpointError: Missing, no regular file, of another length or of another save.
        OSError: It cannot be opened or read.
    """

    def __init__(
        self, path: str, shard: ShardRecord, save_id: SaveId | None, files: Files, *, read_ahead: bool = False
    ) -> None:
        self.name, self.nbytes = shard.name, shard.nbytes
        self._directory, self._files = path, files
        self._path = os.path.join(path, shard.name)
        self._flags = os.O_RDONLY | (os.O_NOFOLLOW if save_id is not None else 0)
        self._direct_fd = -1
        self._tried_direct = False
        self._nowait = True
        self._lock = threading.Lock()
        try:
            self._fd = files.open(self._path, self._flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            raise self._corrupt("it is missing" if error.errno == errno.ENOENT else str(error.strerror)) from error
        try:
            self.copies = CachedCopies(files, self._fd)
            self._check(save_id, read_ahead)
        except BaseException:
            self.close()
            raise

    def _check(self, save_id: SaveId | None, read_ahead: bool) -> None:
        if not read_ahead:
            with contextlib.suppress(OSError):
                self._files.advise_random(self._fd)
        found = self._files.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._corrupt("it is not a regular file")
        if found.st_size != self.nbytes:
            raise self._corrupt(
                f"{found.st_size} bytes long, {self.nbytes} were written: it was "
                f"{'cut short' if found.st_size < self.nbytes else 'extended'}",
                offset=min(found.st_size, self.nbytes),
                nbytes=abs(found.st_size - self.nbytes),
            )
        if save_id is None:
            return
        marker = bytearray(SAVE_ID_NBYTES)
        try:
            self._files.preadv(self._fd, [marker], SAVE_ID_OFFSET)
        except OSError as error:
            raise named(error, self._path, "reading its save id") from error
        if bytes(marker) != save_id_bytes(save_id):
            raise self._corrupt(
                f"it carries save id {bytes(marker).decode('ascii', 'replace')!r}, expected {save_id}: the file of "
                "another checkpoint, or damaged",
                offset=SAVE_ID_OFFSET,
                nbytes=SAVE_ID_NBYTES,
            )

    def _corrupt(self, detail: str, offset: int | None = None, nbytes: int | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: {detail}", path=self._directory, file=self.name, offset=offset, nbytes=nbytes, detail=detail
        )

    @property
    def is_in_memory(self) -> bool:
        """Whether the file lies in this process's memory: `address` says where."""
        return self._files.address(self._fd) is not None

    def address(self, offset: int, nbytes: int) -> int | None:
        """Where a range of the file lies in this process's memory, to be looked at; None where it must be read."""
        lies_at = self._files.address(self._fd)
        if lies_at is None:
            return None
        self._files.advise_needed(self._fd, offset, nbytes)
        return lies_at + offset

    def is_done(self, offset: int, nbytes: int) -> None:
        """Say that a range whose `address` was given is not looked at any more."""
        self._files.advise_done(self._fd, offset, nbytes)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether a range seems to be in the page cache; `read_cached` may still find that it is not."""
        return self._nowait and self._files.resident(self._fd, offset, nbytes)

    def read_cached(self, view: memoryview, offset: int) -> bool:
        """Fill `view` from `offset` if all of it is in the page cache; False otherwise, without waiting.

        Raises:
            OSError: The read failed.
        """
        try:
            return self._files.preadv(self._fd, [view], offset, os.RWF_NOWAIT) == len(view)
        except OSError as error:
            if error.errno in _NO_NOWAIT:
                self._nowait = False
            elif error.errno not in _NOT_CACHED:
                raise named(error, self._path, f"reading bytes {offset} to {offset + len(view)}") from error
            return False

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> None:
        """Fill `buffer[:nbytes]` from `offset`, by O_DIRECT where it works.

        Args:
            buffer: Page-aligned, with room for whole pages.
            offset: O_DIRECT takes whole pages only.
            nbytes: Up to the end of the file at most.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: The read failed.
        """
        pages = offset % PAGE_NBYTES == 0 and (nbytes % PAGE_NBYTES == 0 or offset + nbytes == self.nbytes)
        self.read_buffered(buffer, offset, nbytes, self._read_direct(buffer, offset, nbytes) if pages else 0)

    def read_buffered(self, buffer: memoryview, offset: int, nbytes: int, done: int = 0) -> None:
        """Fill `buffer[done:nbytes]` with what is there from `offset` on, through the page cache.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: The read failed.
        """
        while done < nbytes:
            try:
                count = self._files.preadv(self._fd, [buffer[done:nbytes]], offset + done)
            except OSError as error:
                raise named(error, self._path, f"reading bytes {offset + done} to {offset + nbytes}") from error
            if count <= 0:
                raise self._corrupt("it ends early", offset=offset + done, nbytes=nbytes - done)
            done += count

    def read_batch(self, batch: Batch, buffer: memoryview, address: int) -> None:
        """Read the ranges of a batch and hand them on.

        Args:
            batch: Of this file.
            buffer: For what goes to a sink, at `address`; what goes to memory is read there.
            address: See `buffer`.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: A read failed.
            Exception: Whatever the sink raises.
        """
        sink, position = batch.wanted.sink, batch.first * batch.wanted.nbytes
        if not isinstance(sink, int):
            self._read_ranges(buffer, address, batch)
            if sink is not None:
                sink.deliver(position, address, batch.nbytes)
            return
        memory = (ctypes.c_char * batch.nbytes).from_address(sink + position)
        with memoryview(memory) as typed, typed.cast("B") as target:
            self._read_ranges(target, sink + position, batch)

    def _read_ranges(self, buffer: memoryview, address: int, batch: Batch) -> None:
        nbytes, every = batch.wanted.nbytes, batch.wanted.every
        preadv, fd, at, done = self._files.preadv, self._fd, batch.start, 0
        try:
            brought = near(nbytes, every) and self.copies.bring(at, (batch.times - 1) * every + nbytes)
            cached = brought or self.has(batch)
            # Of a file that it may not write, it is told yes.
            if not brought and (not cached or self._files.address(fd) is None):
                self._fetch_ranges(batch)
            if cached:
                done = self.copies.gather(address, at, nbytes, every, batch.times)
            at += done * every  # what is left, if anything, comes one by one, or says why it does not
            for start in range(done * nbytes, batch.nbytes, nbytes):
                with buffer[start : start + nbytes] as view:
                    if preadv(fd, [view], at) != nbytes:
                        self.read(view, at, nbytes)  # a short read, which says why
                at += every
        except OSError as error:
            raise named(error, self._path, f"reading bytes {at} to {at + nbytes}") from error

    def fetch(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Read through the page cache, for what stays there: as many bytes as `buffers` take, or fewer.

        Raises:
            OSError: The read failed.
        """
        self._files.preadv(self._fd, buffers, offset)

    def has(self, batch: Batch) -> bool:
        """Whether the ranges of a batch seem to be in the page cache, with what lies between them."""
        start = batch.start // PAGE_NBYTES * PAGE_NBYTES
        end = batch.start + (batch.times - 1) * batch.wanted.every + batch.wanted.nbytes
        return self.is_cached(start, end - start)

    def _fetch_ranges(self, batch: Batch) -> None:
        """Have ranges that lie close together brought into the page cache whole: small reads would each wait."""
        nbytes, every = batch.wanted.nbytes, batch.wanted.every
        if near(nbytes, every):
            start = batch.start // PAGE_NBYTES * PAGE_NBYTES
            with contextlib.suppress(OSError):
                self._files.advise_needed(self._fd, start, batch.start + (batch.times - 1) * every + nbytes - start)

    def _read_direct(self, buffer: memoryview, offset: int, nbytes: int) -> int:
        """Read whole pages by O_DIRECT; return how many bytes are good, 0 where it does not work."""
        fd = self._open_direct()
        done = 0
        while fd >= 0 and done < nbytes:
            try:
                count = self._files.preadv(fd, [buffer[done : round_up(nbytes)]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise named(error, self._path, f"reading bytes {offset + done} to {offset + nbytes}") from error
            if done + count >= nbytes:
                return nbytes
            if count < PAGE_NBYTES:
                break
            done += count // PAGE_NBYTES * PAGE_NBYTES
        return done

    def _open_direct(self) -> int:
        with self._lock:
            if self._tried_direct:
                return self._direct_fd
            self._tried_direct = True
            try:
                fd = self._files.open(self._path, self._flags | os.O_DIRECT)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT, *NO_DESCRIPTORS):
                    return -1
                raise
            try:
                if not os.path.samestat(self._files.fstat(self._fd), self._files.fstat(fd)):
                    raise self._corrupt("it was replaced while it was read")
            except BaseException:  # else another thread would read on there
                with contextlib.suppress(OSError):
                    self._files.close(fd)
                raise
            self._direct_fd = fd
            return fd

    def close(self) -> None:
        """Close both descriptors; later calls do nothing. Nothing was written, so errors do not matter."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._files.close(fd)
        self._fd = self._direct_fd = -1
