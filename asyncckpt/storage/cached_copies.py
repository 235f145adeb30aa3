"""Copies of ranges of one open file out of the page cache, into which they are brought in large pages first."""

from __future__ import annotations

import os
from collections.abc import Sequence

from asyncckpt.storage.bringing import UNIT_NBYTES
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import Runs

BRING_FROM_NBYTES = UNIT_NBYTES // 2
"""Of a shorter range most of what came with it might be wanted by nobody. Chosen, not measured."""

_TRIES = 8
"""So often in a row what was brought in may not be there, or not be copied, before a file is read without that. Chosen:
pages of it that were cached before make it one in a few, a file system that reads little at a fault all."""


class CachedCopies:
    """See the module. Safe to use from several threads.

    Args:
        files: The storage seam.
        fd: The file; whoever gives it closes it.
    """

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._tries = self._copies = _TRIES

    def bring(self, offset: int, nbytes: int) -> bool:
        """Have a range brought into the page cache in large pages; say whether it seems to be there now.

        Blocks: for the reads.
        """
        if nbytes < BRING_FROM_NBYTES or self._tries <= 0:
            return False
        found = self._files.bring(self._fd, offset, nbytes) and self._is_there(offset + nbytes - 1)
        self._tries = _TRIES if found else self._tries - 1
        return found

    def _is_there(self, offset: int) -> bool:
        """Whether a byte is cached; mincore(2) says yes of every file that the process may not write."""
        try:
            return self._files.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def copy(self, offset: int, nbytes: int, wanted: Sequence[Runs]) -> bool:
        """Copy what is wanted of a range to where it goes, if the range can be brought in.

        Returns:
            False where something is missing, of the range or of the copies: whoever reads it then learns what.

        Blocks: for the reads.
        """
        if self._copies <= 0 or not self.bring(offset, nbytes):
            return False
        try:
            done = all(self.gather(w.target, offset + w.start, *w[1:4], w.apart) == w.times for w in wanted)
        except OSError:
            return False
        self._copies = _TRIES if done else self._copies - 1  # a sandbox may refuse the call each time
        return done

    def gather(self, target: int, at: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
        """As `Files.gather`; none was copied where the file ends within the ranges.

        Raises:
            OSError: The file cannot be looked at.
        """
        done = self._files.gather(self._fd, target, at, nbytes, every, times, apart)
        # IMPORTANT: after it. What lies between a file's end and its page's end is there, as zeros.
        return done if self._files.fstat(self._fd).st_size >= at + (times - 1) * every + nbytes else 0
