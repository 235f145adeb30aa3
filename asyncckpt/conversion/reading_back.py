"""Reads a target back from the disk, and compares it with the digests of what was written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.proof import failed
from asyncckpt.conversion.windows import payload_places
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import round_up
from asyncckpt.storage.block_reader import read_shards
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Sink, Wanted
from asyncckpt.uninterrupted import uninterrupted

_Stretch = list[tuple[OutputFile, ShardRequest]]
STRETCH_NBYTES = 4 << 30
"""What is read back in one pass, whose plan is in memory: a megabyte. Whole blocks. After each pass the readers wait
for the last of them, and ask for new buffers: with 256 MiB that took a third of the time."""

_EXTENT_NBYTES = 8 << 20
"""One read. Of 512 MiB 2, 4 and 8 MiB take a twentieth less than the 16 of loads: there is less fresh memory."""

_REPORTED_NBYTES = 64 << 20
"""What is read back between two reports of progress, about."""


def prove_bytes(
    path: str,
    outline: Outline,
    target: Target,
    blocks: Mapping[str, bytes],
    files: Files,
    threads: int,
    step: Callable[[int], None],
) -> None:
    """Read all files back, from the disk where O_DIRECT wrote them, and compare their blocks.

    Args:
        path: The target, under its temporary name.
        outline: What was written.
        target: Where it was written.
        blocks: By file name the digests of what was written.
        files: The storage seam.
        threads: That read.
        step: Called by this thread, with bytes that were read.

    Raises:
        CorruptCheckpointError: A block differs; names a leaf that it holds.
        OSError: A file cannot be read.

    Blocks: for the reads.
    """
    progress = _Progress()
    directory = path if target.is_directory else os.path.dirname(path)
    for stretch in _stretches(path, target, blocks, progress):

        def read(stretch: _Stretch = stretch) -> None:
            requests = [request for _, request in stretch]
            read_shards(directory, None, requests, files=files, threads=threads, extent_nbytes=_EXTENT_NBYTES)

        try:
            _apart(read, progress, step)
        except CorruptCheckpointError as error:
            file, first = next((f, r.wanted[0].offset) for f, r in stretch if r.shard.name == error.file)
            fqn = _held_at(outline, file, first if error.offset is None else error.offset)
            raise failed(path, fqn, f"holds other bytes: {error.detail}") from error


def _apart(read: Callable[[], None], progress: _Progress, step: Callable[[int], None]) -> None:
    """Read in another thread, and report from this one: a signal may interrupt it anywhere, but not in a pool's locks.

    No thread is left when this returns or raises.
    """

    def run() -> None:
        try:
            read()
            progress.report()
            progress.done.put(None)
        except BaseException as error:
            progress.done.put(error)

    thread = threading.Thread(target=run, name="asyncckpt-read-back")
    try:
        with uninterrupted():
            thread.start()
        while (found := progress.done.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            step(found)
    except BaseException:
        progress.stopped = True
        raise
    finally:
        _end(thread)


def _end(thread: threading.Thread) -> None:
    """Wait for a thread, whatever comes meanwhile: it reads into memory, and from files, that others may have next."""
    interrupted: BaseException | None = None
    while thread.is_alive():
        try:
            with uninterrupted():
                thread.join()
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _stretches(path: str, target: Target, blocks: Mapping[str, bytes], sink: Sink) -> Iterator[_Stretch]:
    """Yield ranges of the files, which together are all of them, `STRETCH_NBYTES` at a time."""
    stretch: _Stretch = []
    room = STRETCH_NBYTES
    for file in target.files:
        name = file.name if target.is_directory else os.path.basename(path)
        shard = ShardRecord(name=name, nbytes=file.nbytes, digests=blocks[file.name])
        start = 0
        while start < file.nbytes:
            end = min(file.nbytes, start + room)
            wanted = [Wanted(start, end - start, "", sink)]
            stretch.append((file, ShardRequest(shard=shard, block_nbytes=BLOCK_NBYTES, wanted=wanted)))
            room -= round_up(end - start, BLOCK_NBYTES)
            start = end
            if room <= 0:
                yield stretch
                stretch, room = [], STRETCH_NBYTES
    if stretch:
        yield stretch


class _Stopped(Exception):
    """Nobody wants the rest."""


class _Progress:
    """A sink that counts what passes.

    Attributes:
        done: Gets what has passed since the last time; an error, or None, at the end.
        stopped: What passes from now on is an error.
    """

    def __init__(self) -> None:
        self.done: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.stopped = False
        self._lock = threading.Lock()
        self._nbytes = 0

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        if self.stopped:
            raise _Stopped
        with self._lock:
            self._nbytes += nbytes
            is_due = self._nbytes >= _REPORTED_NBYTES
        if is_due:
            self.report()

    def report(self) -> None:
        """Say what was counted since the last time."""
        with self._lock:
            nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self.done.put(nbytes)


def _held_at(outline: Outline, file: OutputFile, offset: int) -> str | None:
    """Return the name of the first tensor that the block at `offset` holds something of."""
    for payload, at in payload_places(file):
        if at < offset + BLOCK_NBYTES and offset < at + payload.nbytes:
            return outline.names[payload.tensor]
    return None
