"""Reading shards into the page cache while a large index is still decoded and planned with: see ADR 0037."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

from asyncckpt.ends import BackgroundThread
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.failpoints import reach
from asyncckpt.format.index import RankIndex
from asyncckpt.libc import try_descriptors
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_reader import ShardReader

MIN_STRUCTURE_NBYTES = 256 << 10
"""Of a smaller index the plan is made before the disk has answered: some 5,000 tensors, 15 ms."""

SPARE_DESCRIPTORS = 8
"""Where fewer are free, the one that this takes is wanted by whoever reads in earnest. Chosen."""

_BUFFER_NBYTES = 2 << 20
_CALL_NBYTES = 64 << 20
"""One call of the kernel, into one buffer again and again: after each call this thread waits for the interpreter, which
the one that plans has, for up to 5 ms. Two cores, 0.33 GB: 85 ms of the clock and 16 of the processor."""


class ReadAhead:
    """A thread that reads a rank's shards front to back, the kernel ahead of it, and throws away what it reads.

    What it brings in is verified by whoever reads it then, as everything is; what it cannot read, it leaves alone: the
    same error meets whoever wants those bytes. A context manager: no thread is left behind it.

    Args:
        files: The storage seam.
        rank: Whose shards, of a checkpoint of `world_size` ranks; others are not read ahead.
        world_size: See `rank`.
    """

    def __init__(self, files: Files, rank: int, world_size: int) -> None:
        self._files, self._whose = files, (rank, world_size)
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, path: str, index: RankIndex) -> None:
        """Begin with the shards of `index`, of the checkpoint at `path`, if it is large and ours. Does not wait."""
        if self._thread is not None or (index.rank, index.world_size) != self._whose:
            return
        if self._stopped or len(index.structure) < MIN_STRUCTURE_NBYTES:
            return
        if try_descriptors(SPARE_DESCRIPTORS)[1] is not None:
            return
        thread = BackgroundThread(self._run, "asyncckpt-read-ahead", (path, index), end=self.stop)
        with contextlib.suppress(RuntimeError):  # can't start new thread
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Begin no further call: whoever wants the bytes reads them from now on. Does not wait."""
        self._stopped = True

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self, path: str, index: RankIndex) -> None:
        with (
            contextlib.suppress(CorruptCheckpointError, OSError),
            Mapping(-1, _BUFFER_NBYTES) as memory,
            memory.view() as view,
        ):
            for shard in index.shards:
                opened = ShardReader(path, shard, index.save_id, self._files, read_ahead=True)
                with contextlib.closing(opened) as reader:
                    self._fetch(reader, view)

    def _fetch(self, reader: ShardReader, view: memoryview) -> None:
        for start in range(0, reader.nbytes, _CALL_NBYTES):
            if self._stopped:
                return
            nbytes = min(_CALL_NBYTES, reader.nbytes - start)
            if not reader.is_cached(start, nbytes):
                reach("load: reading ahead")
                reader.fetch([view] * -(-nbytes // _BUFFER_NBYTES), start)
