"""Finds the shards of a save whose staged bytes equal those of a file that was written before, and links them.

Bytes count as equal if the xxh3_128 of each block does. The checksums of the format have 64 bits, which is enough to
notice damage; but a new value that is taken for an old one is lost, and nothing tells.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.storage.reuse.shard_history import WrittenShard
from asyncckpt.storage.shard_writer import PRINT_NBYTES, ShardWriter
from asyncckpt.storage.store import Store, UnknownOutcomeError, for_each

EXTENT_NBYTES = 64 * BLOCK_NBYTES
"""Bytes that a thread compares at a time. Chosen: 2 ms."""

MAX_LINKS = 32
"""How many saves link a file before it is written anew. IMPORTANT: nothing reads a file that is linked, so damage to it
would be in all checkpoints from then on. Chosen: costs 3 % of what linking spares."""

_logger = logging.getLogger("asyncckpt.storage")


_EXPECTED = frozenset({errno.ENOENT, errno.ESTALE, errno.EFBIG})
"""Errors of a link that say nothing about the storage: the file is gone, was changed, or is too large."""

_told: set[int | None] = set()


def _tell(path: str, error: OSError) -> None:
    """Log that a shard is written although it is unchanged: once a process for each errno that is not expected."""
    is_told = error.errno in _EXPECTED or error.errno in _told
    _told.add(error.errno)
    level = logging.DEBUG if is_told else logging.WARNING
    _logger.log(level, "%s is written although it is unchanged, since it cannot be linked: %s", path, error)


class UnchangedShards:
    """Compares the shards of one rank's save with those of its last saves, and links what is equal.

    Args:
        shards: Writers of the shards. Nothing is written yet.
        written: The shards of the last saves, the newest save's first.
        store: Store that holds both.
        durable: Whether a linked file must have been flushed.
        check: Raises if the image may not be used any more.
    """

    def __init__(
        self,
        shards: Sequence[ShardWriter],
        written: Sequence[WrittenShard],
        store: Store,
        *,
        durable: bool,
        check: Callable[[], None],
    ) -> None:
        self._shards, self._store, self._check = shards, store, check
        self._written = [one for one in written if one.is_durable or not durable]
        self._changed: set[int] = set()
        self._todo: deque[tuple[int, int]] = deque()

    def link(self, pool: Executor, threads: int) -> set[int]:
        """Link the shards that are unchanged.

        Args:
            pool: Runs up to `threads - 1` threads that compare; the calling thread compares as well.
            threads: Number of threads.

        Returns:
            The numbers of the linked shards. The others are to be written.

        Raises:
            UnknownOutcomeError: A file may come to have the name of a shard, so that it cannot be written.
            Exception: As `check`.

        Blocks: for the comparison, which reads the image only, and for the links. When it returns or raises, no thread
        uses the image any more.
        """
        sources = {number: found for number in range(len(self._shards)) if (found := self._sources_of(number))}
        if not sources:
            return set()
        self._compare({number: found[0].prints for number, found in sources.items()}, pool, threads)
        unchanged = [number for number in sources if number not in self._changed]
        linked = for_each(self._store, lambda number: self._link(self._shards[number], sources[number]), unchanged)
        return {number for number, is_linked in zip(unchanged, linked, strict=True) if is_linked}

    def _sources_of(self, number: int) -> list[WrittenShard]:
        """Return the files that may equal the shard: of its length, and with its first fingerprint."""
        shard = self._shards[number]
        alike = [one for one in self._written if one.nbytes == shard.nbytes]
        if not alike:
            return []
        first = shard.block_print(0)
        found = [one for one in alike if one.prints[:PRINT_NBYTES] == first]
        found = [one for one in found if one.prints == found[0].prints]
        # That of the save before the last, which has one link less, may be the same file.
        worn = {one.origin for one in found if one.n_links >= MAX_LINKS}
        return [one for one in found if one.origin not in worn]

    def _compare(self, wanted: dict[int, bytes], pool: Executor, threads: int) -> None:
        for number in wanted:
            self._todo.extend((number, start) for start in range(0, self._shards[number].nbytes, EXTENT_NBYTES))

        def run() -> None:
            while True:
                try:
                    number, start = self._todo.popleft()
                except IndexError:
                    return
                if number not in self._changed and not self._is_equal(number, start, wanted[number]):
                    self._changed.add(number)

        futures = []
        try:
            for _ in range(min(threads, len(self._todo)) - 1):
                futures.append(pool.submit(run))
            run()
        finally:
            self._todo.clear()
            # IMPORTANT: when this returns, no thread may use the image, whatever happened.
            running = [future for future in futures if not future.cancel()]
            wait(running)
        for future in running:
            future.result()

    def _is_equal(self, number: int, start: int, wanted: bytes) -> bool:
        shard = self._shards[number]
        self._check()
        end = min(start + EXTENT_NBYTES, shard.nbytes)
        blocks = range(start // BLOCK_NBYTES, -(-end // BLOCK_NBYTES))
        is_equal = all(shard.block_print(n) == wanted[n * PRINT_NBYTES : (n + 1) * PRINT_NBYTES] for n in blocks)
        # IMPORTANT: again. Bytes that were read after the slot was reopened are of no save.
        self._check()
        return is_equal

    def _link(self, shard: ShardWriter, sources: Sequence[WrittenShard]) -> bool:
        for source in sources:
            reach("shard: linking")
            try:
                self._store.link(source.path, shard.path, source.version)
            except UnknownOutcomeError:
                shard.created = True  # so that it is removed with the others
                raise
            except OSError as error:
                _tell(shard.path, error)
            else:
                shard.take(source.origin, source.digests, source.prints, source.n_links + 1)
                reach("shard: linked")
                return True
        return False
