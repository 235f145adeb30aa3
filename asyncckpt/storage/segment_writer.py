"""Writes one rank's files while the trainer still stages them: segment by segment, as these are filled.

Threads of a pool and the calling thread write. The bytes of a segment in a ring are overwritten, so if writing fails,
the save fails. From a slot with room for everything, the files can be written again after it is sealed. In both cases
the files are removed after an error. Everything else is as in `rank_writer`.
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
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.shard_writer import ShardWriter

IDLE_EXIT_S = 0.05
"""Seconds that a helper thread waits for another segment before it returns to the pool. Chosen, not measured."""

HELPER_WAIT_S = 0.002
"""Seconds that a segment waits for a helper thread before the calling thread writes it. Chosen: a thread of the pool
begins within 0.1 ms."""


class Source(Protocol):
    """Provides the segments: says which are filled, and is told which are written."""

    layout: StreamLayout

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        """Wait until more than `count` segments are filled or `goes_on()` is False. Return how many are filled.

        Raises:
            Exception: No more segments will be filled; the class is that of the source.

        Blocks: as the source says.
        """

    def filled(self) -> int:
        """Return how many segments are filled. Does not wait."""

    def freed(self, count: int) -> None:
        """Tell the source that the first `count` segments are written, so that their memory may be reused."""


class StreamedImage:
    """The image of a slot that is written while it is filled. Segments that are filled and not freed can be read.

    Args:
        slot: The bytes of the slot.
        layout: Places of the segments in it.
    """

    is_page_aligned = True

    def __init__(self, slot: memoryview, layout: StreamLayout) -> None:
        self._slot, self._layout = slot, layout

    def __len__(self) -> int:
        """Return the image's length in bytes, the head page included."""
        return PAGE_NBYTES + self._layout.image_nbytes

    def __getitem__(self, piece: slice) -> memoryview:
        """Return the bytes of `piece`, which must lie in one segment."""
        number = self._layout.number_at(piece.start)
        at = self._layout.offset_of(number) + piece.start - self._layout.image_offset_of(number)
        return self._slot[at : at + piece.stop - piece.start]


class SegmentWriter(RankWriter):
    """A `RankWriter` that writes the segments of `source` as they are filled.

    The calling thread waits for segments, and writes too. Threads of the pool are used only for filled segments.

    Args:
        request: What to write.
        slot: The bytes of the slot, page-aligned.
        source: Provides the segments.
        files, check, threads, progress: As of `RankWriter`.
        history: As of `RankWriter`, but nothing is linked: segments are written before all bytes are there.
    """

    # Numbers of filled segments go to `_ready`, from which the calling thread and the helper threads of the pool take
    # them. `_filled`: number of filled segments that were put there. `_helpers`: number of helper threads. `_at_work`:
    # number of threads that write. `_freed`: the first so many segments are written. `_over`: write no more segments.

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
        history: ShardHistory | None = None,
    ) -> None:
        self._source, self._segments = source, source.layout.segments
        image = StreamedImage(slot, source.layout)
        super().__init__(request, image, files, check=check, threads=threads, progress=progress, history=history)
        self._changed = threading.Condition(self._lock)
        self._ready: deque[int] = deque()
        self._written = [False] * len(self._segments)
        self._filled = self._helpers = self._at_work = self._freed = 0
        self._over = False

    def write(self, pool: Executor, final: Callable[[], SaveRequest] | None = None) -> RankResult:
        """Write all files of the rank.

        Args:
            pool: As of `RankWriter.write`.
            final: Waits until the slot is sealed, and returns the request of the seal, from which index and objects are
                written. None: the request with which the writer was made.

        Returns:
            As `RankWriter.write`.

        Raises:
            Exception: As `RankWriter.write`, `source` and `final`.

        Blocks: for the writes, for the segments and for `final`.
        """
        self.write_shards(pool)
        with self._removed_on_failure():
            request = final() if final is not None else self.request
        return self.finish(request)

    def _plan(self) -> list[tuple[int, int, int]]:
        for segment in self._segments:
            self._remaining[segment.part] = self._remaining.get(segment.part, 0) + 1
        return []  # no segment is filled yet

    def _write_shards(self, pool: Executor) -> None:
        futures: list[Future[None]] = []
        try:
            while self._error is None and self._filled < len(self._written):
                # IMPORTANT: stop waiting if a helper fails: the trainer may be waiting until its segment is freed.
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
            raise AssertionError("some segments were not written, and no error was raised")

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
        """Whether no helper thread takes a ready segment: all are at work, or the pool has no free thread."""
        with self._changed:
            if self._ready and self._at_work < self._threads - 1:
                self._changed.wait_for(lambda: not self._ready, HELPER_WAIT_S)
            return bool(self._ready)

    def _help(self) -> None:
        """Body of a helper thread: write segments until there are none for a while, as other saves use the pool too."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._over, IDLE_EXIT_S)
                if not self._ready or self._over:
                    self._helpers -= 1
                    return
            self._take_one()
            try:
                self._note(self._source.filled())  # the calling thread may be writing
            except BaseException as error:
                self._stop(error)

    def _take_one(self) -> bool:
        """Write one ready segment; return False if there is none. Errors are stored, not raised."""
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
        self._flush_before_reuse(shard)
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

    def _flush_before_reuse(self, shard: ShardWriter) -> None:
        """Flush a segment of `shard` before its cell in a ring is used again."""
        if self._source.layout.n_cells and self.request.fsync and not shard.direct:
            # IMPORTANT: else dirty pages of the kernel take the memory that the ring saves.
            shard.flush()
