"""Proves that a file on storage holds the blocks whose checksums are known, past the page cache where that is possible.

A process that has written it, and is dead, may have been told that a page was lost; the kernel tells that once, and the
page cache goes on showing what was to be written.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from asyncckpt.failpoints import reach
from asyncckpt.format.checksum import BLOCK_NBYTES, DIGEST_NBYTES, block_digest
from asyncckpt.format.layout import PAGE_NBYTES, round_up
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.files import Files, fsync_file, named, opened
from asyncckpt.storage.prints import first_block

PIECE_NBYTES = 4 << 20
"""One read; whole blocks. Chosen, not measured."""


class OtherBytesError(Exception):
    """A file does not hold what it must; the text says which, and where."""


class ReadingBack:
    """See the module. For one file, once.

    Args:
        path: The file.
        nbytes: Its exact length.
        digests: One checksum per block.
        files: The storage seam.
        check: Called before each read; raises when there is no point in it any more.

    Attributes:
        first: As `storage.prints` has it, once it was read.
    """

    def __init__(self, path: str, nbytes: int, digests: bytes, files: Files, check: Callable[[], None]) -> None:
        self._path, self._nbytes, self._digests = path, nbytes, digests
        self._files, self._check = files, check
        self._lock = threading.Lock()
        self._todo: deque[int] = deque()
        self._error: BaseException | None = None
        self._direct = True
        self.first = b""

    def run(self, end: int, pool: Executor, n_threads: int, *, flush: bool) -> None:
        """Read the bytes up to `end`, a block's end or the file's, and compare.

        Args:
            end: See above.
            pool: Runs `n_threads` - 1 other threads; the calling thread reads too.
            n_threads: See above.
            flush: The file is flushed first.

        Raises:
            OtherBytesError: It has another length, is no regular file, or a block differs.
            FileNotFoundError: It is not there.
            OSError: A call failed.
            Exception: Whatever `check` raises.

        Blocks: for the reads.
        """
        files = self._files
        with opened(files, self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            found = files.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._nbytes:
                raise OtherBytesError(f"{self._path} is {found.st_size} bytes long, expected {self._nbytes}")
            if flush:
                fsync_file(files, fd, self._path)
                reach("ring: kept file flushed")
            self._go_past_the_cache(fd)
            self._todo.extend(range(0, end, PIECE_NBYTES))
            futures: list[Future[None]] = []
            try:
                for _ in range(min(n_threads, len(self._todo)) - 1):
                    futures.append(pool.submit(self._run, fd, end))
                self._run(fd, end)
            finally:
                # IMPORTANT: no thread may still use the descriptor when this returns.
                self._stop(None)
                for future in futures:
                    if not future.cancel():
                        future.result()
            if self._error is not None:
                raise self._error

    def _go_past_the_cache(self, fd: int) -> None:
        try:
            self._files.set_direct(fd, True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise named(error, self._path, "switching O_DIRECT on") from error
            self._go_cached(fd)

    def _go_cached(self, fd: int) -> None:
        with self._lock:
            if self._direct:
                self._direct = False
                self._files.set_direct(fd, False)
                self._files.forget(fd)

    def _run(self, fd: int, end: int) -> None:
        """One thread: read until nothing is left, or something has failed. Errors are kept, not raised."""
        try:
            memory = Mapping(-1, PIECE_NBYTES)
            try:
                with memory.view() as view:
                    while True:
                        with self._lock:
                            if not self._todo:
                                return
                            start = self._todo.popleft()
                        self._check()
                        nbytes = min(PIECE_NBYTES, end - start)
                        self._read(fd, view[: round_up(nbytes)], start, nbytes)
                        self._compare(view[:nbytes], start)
            finally:
                memory.close()
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._todo.clear()
            if self._error is None:
                self._error = error

    def _read(self, fd: int, view: memoryview, start: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            at = done // PAGE_NBYTES * PAGE_NBYTES  # a read that was short may have ended within a page
            try:
                count = self._files.preadv(fd, [view[at:]], start + at)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    self._go_cached(fd)
                    continue
                raise named(error, self._path, f"reading bytes {start + at} to {start + nbytes} back") from error
            if at + count <= done:
                raise OtherBytesError(f"{self._path} ends at byte {start + done}, before {start + nbytes}")
            done = at + count

    def _compare(self, view: memoryview, start: int) -> None:
        for at in range(0, len(view), BLOCK_NBYTES):
            number = (start + at) // BLOCK_NBYTES
            with view[at : at + BLOCK_NBYTES] as block:
                if block_digest(block) != self._digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
                    where = f"bytes {start + at} to {start + at + len(block)} of {self._path}"
                    raise OtherBytesError(f"{where} are not those that were written")
                if number == 0:
                    self.first = first_block(block)
