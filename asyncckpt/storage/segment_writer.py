"""One rank's files of one save, written while they are still being staged: segment by segment, as these are filled.

Helpers of a pool write, and the calling thread. Out of a ring the bytes of a segment come once, so what has gone wrong
cannot be written again; out of a slot with room for everything it can, once that is sealed. Either way the files are
removed, as after any failure. Everything else is as in `rank_writer`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Protocol

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.layout import round_up
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_writer import DEFAULT_THREADS, RankResult, RankWriter
from asyncckpt.storage.shard_writer import ShardWriter

LINGER_S = 0.05
"""A helper waits so long for another segment before it gives its thread back. Chosen, not measured."""

PATIENCE_S = 0.002
"""So long a segment waits for a helper, then the calling thread takes it. Chosen: one of a pool begins in 0.1 ms."""


class Source(Protocol):
    """Where the segments come from."""

    layout: StreamLayout

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        """Return how many segments are filled, once these are more than `count`, or `goes_on()` is False.

        Raises:
            Exception: There will be none.

        Blocks: as the source says.
        """

    def filled(self) -> int:
        """Return how many segments are filled. Does not wait."""

    def freed(self, count: int) -> None:
        """So many segments, from the first on, are needed no more."""


class StreamedImage:
    """The image whose segments lie in a slot: what was filled and not freed of it can be read.

    Args:
        slot: The bytes of the slot.
        layout: Where segments lie in it.
    """

    is_page_aligned = True

    def __init__(self, slot: memoryview, layout: StreamLayout) -> None:
        self._slot, self._layout = slot, layout

    def __len__(self) -> int:
        """Return the image's length in bytes, the head page included."""
        return PAGE_NBYTES + self._layout.image_nbytes

    def __getitem__(self, piece: slice) -> memoryview:
        """Return bytes of one segment."""
        number = self._layout.number_at(piece.start)
        at = self._layout.offset_of(number) + piece.start - self._layout.image_offset_of(number)
        return self._slot[at : at + piece.stop - piece.start]


class SegmentWriter(RankWriter):
    """As `RankWriter`, from the segments of `source` as they are filled.

    Only segments that are there get a thread of the pool; the calling thread waits for them, and writes too.

    Args:
        request: What to write.
        slot: The bytes of the slot; page-aligned.
        source: Says which segments are filled, and hears which are written.
        files, check, threads, progress: As there.
    """

    # Segments that are filled go to `_ready`; threads take them from there: helpers of the pool, and the calling one.
    # `_at_work`: threads that write. `_over`: nothing is to be written any more. `_freed`: so many are written, from
    # the first on.

    def __init__(
        self,
        request: SaveRequest,
        slot: memoryview,
        source: Source,
        files: Files,
        *,
        check: Callable[[], None] = lambda: None,
        threads: int = DEFAULT_THREADS,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._source, self._segments = source, source.layout.segments
        image = StreamedImage(slot, source.layout)
        super().__init__(request, image, files, check=check, threads=threads, progress=progress)
        self._changed = threading.Condition(self._lock)
        self._ready: deque[int] = deque()
        self._written = [False] * len(self._segments)
        self._filled = self._helpers = self._at_work = self._freed = 0
        self._over = False

    def write(self, pool: Executor, final: Callable[[], SaveRequest] | None = None) -> RankResult:
        """As there.

        Args:
            pool: As there.
            final: Returns the request of the seal, once it is sealed: of that are index and objects. Default: the one
                that was begun with.

        Raises:
            Exception: As there, and whatever `source` and `final` raise.

        Blocks: for the writes, for the segments and for `final`.
        """
        self.write_shards(pool)
        with self._removed_on_failure():
            request = final() if final is not None else self.request
        return self.finish(request)

    def _plan(self) -> list[tuple[int, int, int]]:
        for segment in self._segments:
            self._remaining[segment.part] = self._remaining.get(segment.part, 0) + 1
        return []  # nothing is there yet

    def _write_shards(self, pool: Executor) -> None:
        futures: list[Future[None]] = []
        try:
            while self._error is None and self._filled < len(self._written):
                # IMPORTANT: not beyond an error of a helper's: the trainer waits for that very segment to be freed.
                self._note(self._source.await_filled(self._filled, lambda: self._error is None))
                self._call_helpers(pool, futures)
                while self._is_left_over():
                    self._take_one()
            while self._take_one():
                pass
        except BaseException as error:
            self._stop(error)
        finally:
            self._end(futures)
        if self._error is not None:
            raise self._error
        if not all(self._written):
            raise AssertionError("segments were left unwritten without an error")

    def _note(self, filled: int) -> None:
        with self._changed:
            if not self._over:
                self._ready.extend(range(self._filled, filled))
                self._filled = max(self._filled, filled)
                self._changed.notify_all()

    def _call_helpers(self, pool: Executor, futures: list[Future[None]]) -> None:
        futures[:] = [future for future in futures if not future.done()]
        with self._lock:
            wanted = min(self._threads - 1, len(self._ready) + self._at_work) - self._helpers
            self._helpers += max(0, wanted)
        for _ in range(wanted):
            futures.append(pool.submit(self._help))

    def _is_left_over(self) -> bool:
        """Whether a segment is ready that no helper gets to: all are at work, or the pool has no thread to spare."""
        with self._changed:
            if self._ready and self._at_work < self._threads - 1:
                self._changed.wait_for(lambda: not self._ready, PATIENCE_S)
            return bool(self._ready)

    def _help(self) -> None:
        """Write what is ready, until nothing comes any more: the pool's threads are all saves' together."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._over, LINGER_S)
                if not self._ready or self._over:
                    self._helpers -= 1
                    return
            self._take_one()
            try:
                self._note(self._source.filled())  # the calling thread may be writing
            except BaseException as error:
                self._stop(error)

    def _take_one(self) -> bool:
        """Write a segment that is ready; False: none is. Errors are kept, not raised."""
        with self._changed:
            if not self._ready:
                return False
            number = self._ready.popleft()
            self._at_work += 1
            self._changed.notify_all()
        try:
            self._write_segment(number)
        except BaseException as error:
            self._stop(error)
        finally:
            with self._lock:
                self._at_work -= 1
        return True

    def _stop(self, error: BaseException | None) -> None:
        super()._stop(error)
        with self._changed:
            self._over = True
            self._ready.clear()
            self._changed.notify_all()

    def _write_segment(self, number: int) -> None:
        segment = self._segments[number]
        shard = self.shards[segment.part]
        self.check()
        if segment.start == 0:
            self._check_image(segment.part)
        end = min(round_up(segment.end), shard.extent_nbytes_total)
        shard.write_extent(segment.start, end)
        self._progress(end - segment.start)
        self._let_go(shard)
        reach("segment: written")
        self.check()
        with self._lock:
            self._remaining[segment.part] -= 1
            last = self._remaining[segment.part] == 0
        if last:
            shard.finish()
        with self._lock:
            self._written[number] = True
            while self._freed < len(self._written) and self._written[self._freed]:
                self._freed += 1
            self._source.freed(self._freed)

    def _let_go(self, shard: ShardWriter) -> None:
        """A segment of `shard` has been given to the system, and its cell in a ring is about to be used again."""
        if self._source.layout.n_cells and self.request.fsync and not shard.direct:
            # IMPORTANT: else what the ring keeps out of memory piles up there as the kernel's dirty pages.
            shard.flush()
