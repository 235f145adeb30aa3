"""Remembers the shard files that this process has written, so that later saves can link to those that are unchanged.

Nothing here is on disk. A process that has just started writes everything once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from asyncckpt.basics.urls import parent_of
from asyncckpt.format.names import SaveId

SAVES_PER_RANK = 2
"""If the newest save of a rank has failed, its files are gone, and those of the save before are still linked."""

MAX_HISTORY_NBYTES = 64 << 20
"""Maximum bytes in memory: 24 for each 256 KiB of a shard, so 700 GB of large shards; 80, so 200 GB, where blocks
have 32 KiB; and `SHARD_NBYTES`. Chosen."""

SHARD_NBYTES = 600
"""Bytes that a shard takes in memory besides the values of its digests and prints. Measured with tracemalloc: 540."""


class WrittenShard(NamedTuple):
    """A shard file that was written completely, and flushed if `is_durable`.

    Attributes:
        path: Its path.
        nbytes: Its length.
        origin: The save whose ID is in the file: that which wrote it.
        is_durable: Whether it was flushed.
        version: `Store.link_version(path)` after it was closed.
        digests: The checksums of its blocks of `BLOCK_NBYTES`, one after the other.
        prints: `ShardWriter.prints`, `PRINT_NBYTES` for each `BLOCK_NBYTES`; the first is without the save ID.
        n_links: How many saves have linked the file since it was written, one after the other.
    """

    path: str
    nbytes: int
    origin: SaveId
    is_durable: bool
    version: str
    digests: bytes
    prints: bytes
    n_links: int = 0

    @property
    def history_nbytes(self) -> int:
        """Bytes that it takes in memory, roughly."""
        return SHARD_NBYTES + len(self.digests) + len(self.prints)


class ShardHistory:
    """The shards of each rank's last saves in each directory. May be used from several threads.

    Of any run: a training that is started again in the same worker links to what it wrote before.

    Args:
        max_nbytes: Maximum bytes in memory. If it is reached, the last saves of all ranks are kept longest.

    Attributes:
        nbytes: Bytes in memory.
    """

    def __init__(self, max_nbytes: int = MAX_HISTORY_NBYTES) -> None:
        self.nbytes = 0
        self._max_nbytes = max_nbytes
        self._ranks: OrderedDict[tuple[str, int], deque[tuple[WrittenShard, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, path: str, rank: int, shards: Iterable[WrittenShard]) -> None:
        """Remember the shards of a save to `path`."""
        key, written = (parent_of(path), rank), tuple(shards)
        if not written:  # else each directory would take some memory that is not counted
            return
        with self._lock:
            saves = self._ranks.pop(key, None) or deque()
            saves.append(written)
            self.nbytes += _nbytes_of(written)
            while len(saves) > SAVES_PER_RANK:
                self.nbytes -= _nbytes_of(saves.popleft())
            self._ranks[key] = saves
            if self.nbytes > self._max_nbytes:
                self._shrink()

    def _shrink(self) -> None:
        """Forget saves until the limit is kept: first those that are not the last ones of their rank, then ranks."""
        for saves in self._ranks.values():
            if self.nbytes > self._max_nbytes and len(saves) > 1:
                self.nbytes -= _nbytes_of(saves.popleft())
        while self.nbytes > self._max_nbytes:
            _, forgotten = self._ranks.popitem(last=False)
            self.nbytes -= sum(map(_nbytes_of, forgotten))

    def forget(self, path: str, rank: int) -> None:
        """Forget the rank's saves beside `path`, so that its next save there writes everything."""
        with self._lock:
            self.nbytes -= sum(map(_nbytes_of, self._ranks.pop((parent_of(path), rank), ())))

    def shards(self, path: str, rank: int) -> list[WrittenShard]:
        """Return the shards of the rank's last saves beside `path`, the newest save's first."""
        with self._lock:
            return [shard for save in reversed(self._ranks.get((parent_of(path), rank), ())) for shard in save]


def _nbytes_of(save: tuple[WrittenShard, ...]) -> int:
    return sum(shard.history_nbytes for shard in save)
