"""Copies of ranges of one open file out of the page cache, into which they are brought in large pages first."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from asyncckpt.memory.copying import copy_bytes, view_at
from asyncckpt.storage.bringing import UNIT_NBYTES
from asyncckpt.storage.files import Files
from asyncckpt.storage.gathering import MAX_RANGES
from asyncckpt.storage.quicker import Quicker
from asyncckpt.storage.read_plan import Runs

BRING_FROM_NBYTES = UNIT_NBYTES // 2
"""Of a shorter range most of what came with it might be wanted by nobody. Chosen, not measured."""

SIFT_NBYTES = 1 << 20
"""One read of what is sifted: it stays in the processor's cache until it is copied on. On two cores 512 KiB take as
long, 256 KiB 6 % longer."""

_SIFT_ROWS = 8
"""Runs so long that a read would have fewer of them are copied one by one. Chosen, not measured."""

_TRIES = 8
"""So often in a row what was brought in may not be there, or not be copied, before a file is read without that. Chosen:
pages of it that were cached before make it one in a few, a file system that reads little at a fault all."""

SIFTING = Quicker()
"""Whether runs are sifted, by (length, bytes from one to the next), rather than copied one by one: of two sorts of
processors one does that in four fifths of the time, on the other it is the slower (ADR 0034)."""


class CachedCopies:
    """See the module. Safe to use from several threads.

    Args:
        files: The storage seam.
        fd: The file; whoever gives it closes it.
    """

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._is_in_memory = files.address(fd) is not None
        self._tries = self._copies = _TRIES
        self._sieves: dict[tuple[int, int, int], list[memoryview]] = {}

    def bring(self, offset: int, nbytes: int) -> bool:
        """Have a range brought into the page cache in large pages; say whether it seems to be there now.

        Blocks: for the reads.
        """
        if nbytes < BRING_FROM_NBYTES or self._tries <= 0:
            return False
        found = self._files.bring(self._fd, offset, nbytes) and self.is_there(offset + nbytes - 1)
        self._tries = _TRIES if found else self._tries - 1
        return found

    def is_there(self, offset: int) -> bool:
        """Whether a byte is cached; mincore(2) says yes of every file that the process may not write."""
        try:
            return self._files.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def copy(
        self, offset: int, nbytes: int, wanted: Sequence[Runs], room: tuple[int, int], *, is_there: bool = False
    ) -> bool:
        """Copy what is wanted of a range to where it goes, if the range can be brought in.

        Args:
            offset, nbytes: The range.
            wanted: Of it.
            room: Address and length of this thread's buffer; what it holds is gone.
            is_there: The range need not be brought in: if it is not cached after all, the copies are slower.

        Returns:
            False where something is missing, of the range or of the copies: whoever reads it then learns what.

        Blocks: for the reads.
        """
        if self._copies <= 0 or not (is_there or self.bring(offset, nbytes)):
            return False
        try:
            done = all(self._copy(offset + w.start, w, *room) for w in wanted)
        except OSError:
            return False
        self._copies = _TRIES if done else self._copies - 1  # a sandbox may refuse the call each time
        return done

    def _copy(self, at: int, runs: Runs, address: int, room: int) -> bool:
        _, nbytes, every, times, target, apart = runs
        gap = every - nbytes
        rows = min(SIFT_NBYTES // every, (room - gap) // nbytes, MAX_RANGES // 2)
        if rows < _SIFT_ROWS or times == 1 or gap > nbytes or apart != nbytes or self._is_in_memory:
            return self.gather(target, at, nbytes, every, times, apart) == times
        kind, began = (nbytes, every), time.thread_time()
        if not SIFTING.is_first(kind):
            if self.gather(target, at, nbytes, every, times, apart) == times:
                SIFTING.took(kind, (time.thread_time() - began) / times, first=False)
                return True
            SIFTING.took(kind, math.inf, first=False)  # a sandbox may refuse the call
            began = time.thread_time()
        done = self._sift(at, runs, address, rows)
        if done:
            SIFTING.took(kind, (time.thread_time() - began) / times, first=True)
        return done

    def _sift(self, at: int, runs: Runs, address: int, rows: int) -> bool:
        """Copy runs that are at least half of their range, many of them by one read, with what is between.

        It may cost the kernel more to look up the pages of every run than to copy what nobody wants into a few pages
        that are in the processor's cache; and what is wanted goes on in long copies.
        """
        _, nbytes, every, times, target, _ = runs
        sieve = self._sieves.get((address, nbytes, every))
        if sieve is None:
            between = view_at(address + rows * nbytes, every - nbytes)
            sieve = [view for n in range(rows) for view in (view_at(address + n * nbytes, nbytes), between)]
            self._sieves[address, nbytes, every] = sieve
        for done in range(0, times, rows):
            count = min(rows, times - done)
            read = self._files.preadv(self._fd, sieve[: 2 * count - 1], at + done * every)
            if read != (count - 1) * every + nbytes:
                return False
            copy_bytes(target + done * nbytes, address, count * nbytes)
        return True

    def gather(self, target: int, at: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
        """As `Files.gather`; none was copied where the file ends within the ranges.

        Raises:
            OSError: The file cannot be looked at.
        """
        done = self._files.gather(self._fd, target, at, nbytes, every, times, apart)
        # IMPORTANT: after it. What lies between a file's end and its page's end is there, as zeros.
        return done if self._files.fstat(self._fd).st_size >= at + (times - 1) * every + nbytes else 0
