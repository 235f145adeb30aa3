"""Writes the files of a target: threads that each read a window, complete it and write it, by O_DIRECT where it works.

Nothing is handed from thread to thread; how many read, and how many write, the `Files` may settle (`both_ways`). Only
what checksums of whole tensors there are, and where they go, is settled in turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Protocol

from asyncckpt.conversion import windows
from asyncckpt.conversion.arriving import Arriving
from asyncckpt.conversion.passing import PassingChecksums
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.windows import Run, Window, windows_of
from asyncckpt.format.layout import round_up
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import ShardWriter
from asyncckpt.uninterrupted import uninterrupted

MAX_THREADS = 8
"""With a window and a buffer to read each, they have 200 MiB."""

ENDS_NBYTES = 1 << 20
"""What is read around the elements of a window, as whole blocks of the source: so much more is in the buffer, that one
read fills a window. In two or three, as the window's length and its place in the source cut it, there was as often
nothing on its way: a seventh of the time (ADR 0019)."""


class ReadsRuns(Protocol):
    """Reads the elements that a window wants, from several threads: `asyncckpt.conversion.runs.RunReader`."""

    def read(self, runs: Sequence[Run], address: int, origin: int, buffer: memoryview, arriving: Arriving) -> None:
        """Read and verify runs; see there."""


def write_files(
    directory: str,
    target: Target,
    reader: ReadsRuns,
    files: Files,
    mode: int,
    step: Callable[[int], None],
    *,
    threads: int,
) -> dict[str, bytes]:
    """Write all files of a target, flush and close them.

    Args:
        directory: Where they go; of a target that is one file, its path. None of them may exist.
        target: What they are made of.
        reader: Of the source.
        files: The storage seam.
        mode: Permission bits.
        step: Called by this thread with the bytes of every window that was written.
        threads: That read and write; at most `MAX_THREADS` are used.

    Returns:
        By file name the digests of its blocks.

    Raises:
        OSError: Names the file; files may be left behind, incomplete.
        Exception: Whatever the reader raises.

    Blocks: for reading and writing everything. No thread is left when this returns or raises.
    """
    outputs = [
        _Output(file, os.path.join(directory, file.name) if target.is_directory else directory, files, mode)
        for file in target.files
    ]
    try:
        _Works(outputs, reader).run(min(threads, MAX_THREADS), step)
    finally:
        for output in outputs:
            output.close()
    return {output.file.name: bytes(output.writer.digests) for output in outputs}


class _Image:
    """The bytes of a file while they pass: each extent is there from `put` until it is taken."""

    is_page_aligned = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(nbytes)
        self._extents: dict[int, memoryview] = {}

    def put(self, start: int, extent: memoryview) -> None:
        self._extents[start] = extent

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice, /) -> memoryview:
        return self._extents.pop(piece.start)[: piece.stop - piece.start]


class _Output:
    """One file of the target.

    Attributes:
        writer: Of the file.
        checksums: That go into it; None: none do.
        remaining: Windows that are not written yet.
        turn: Number of the window whose checksums are next.
        early: Those of later windows, by number, that wait for it.
    """

    def __init__(self, file: OutputFile, path: str, files: Files, mode: int) -> None:
        nbytes = file.nbytes
        self.file, self._image = file, _Image(nbytes)
        self.writer = ShardWriter(path, self._image, 0, nbytes, aligned=True, mode=mode, fsync=True, files=files)
        self.checksums = PassingChecksums(file) if file.crc_at else None
        self.remaining = -(-nbytes // windows.WINDOW_NBYTES)
        self.turn = 0
        self.early: dict[int, list[tuple[Run, int]]] = {}

    def close(self) -> None:
        """Let go of the file, finished or not, and of memory."""
        self.writer.abandon()
        if self.checksums is not None:
            self.checksums.close()

    def arriving(self, window: Window, address: int, room: memoryview) -> Arriving:
        """Return what takes the elements of a window."""
        return Arriving(window, address, room, () if self.checksums is None else self.checksums.wanted)

    def write(self, start: int, data: memoryview, digests: Mapping[int, bytes]) -> None:
        """Write whole blocks at `start`, some of whose digests are known; whole pages at the end of the file."""
        self._image.put(start, data)
        self.writer.write_extent(start, min(start + len(data), self.writer.extent_nbytes_total), digests)


class _Stopped(Exception):
    """Another thread has failed."""


class _Works:
    """All windows of all files, and the threads that work through them."""

    def __init__(self, outputs: Sequence[_Output], reader: ReadsRuns) -> None:
        self._reader = reader
        self._todo = ((o, window) for o in outputs for window in windows_of(o.file, windows.WINDOW_NBYTES))
        self._lock = threading.Lock()
        self._turned = threading.Condition(threading.RLock())
        self._stopped = False
        self._at_work = 0
        self._done: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def run(self, threads: int, step: Callable[[int], None]) -> None:
        """Work through all windows; the first error of any thread is raised once all have stopped."""
        workers = [threading.Thread(target=self._work, name=f"asyncckpt-convert-{n}") for n in range(threads)]
        try:
            with uninterrupted():
                for worker in workers:
                    worker.start()
            for _ in workers:
                while (found := self._done.get()) is not None:
                    if isinstance(found, BaseException):
                        raise found
                    step(found)
        finally:
            self._stop_all()
            for worker in workers:
                if worker.is_alive():
                    worker.join()

    def _stop_all(self) -> None:
        """Wait until no thread is at work. One that a signal, come while it was started, hides from us does nothing.

        IMPORTANT: nothing ends this wait early, not even a second Ctrl-C: threads would go on writing to files that are
        closed, and whose numbers others have by then.
        """
        interrupted: BaseException | None = None
        while True:
            try:
                with self._turned:
                    self._stop()
                    while self._at_work:
                        self._turned.wait()
                break
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _stop(self) -> None:
        with self._turned:
            self._stopped = True
            self._turned.notify_all()

    def _work(self) -> None:
        """One thread: take windows until none is left or a thread has failed. Errors are passed on, not raised."""
        with self._turned:
            if self._stopped:
                return
            self._at_work += 1
        try:
            self._work_through()
        except _Stopped:
            pass
        except BaseException as error:
            self._stop()
            self._done.put(error)
        finally:
            with self._turned:
                self._at_work -= 1
                self._turned.notify_all()
            self._done.put(None)

    def _work_through(self) -> None:
        size = round_up(windows.WINDOW_NBYTES)
        with (
            Memory(-1, 2 * size + ENDS_NBYTES) as memory,
            memory.view() as whole,
            whole[:size] as room,
            whole[size:] as buffer,
        ):
            while not self._stopped:
                with self._lock:
                    output, window = next(self._todo, (None, None))
                if output is None or window is None:
                    break
                arriving = output.arriving(window, memory.address, room)
                self._fill(window, arriving, buffer)
                self._write(output, window, arriving)

    def _fill(self, window: Window, arriving: Arriving, buffer: memoryview) -> None:
        """Bring everything of a window that is known or read into its memory."""
        room = arriving.room
        for at, text in window.texts:
            room[at - window.start : at - window.start + len(text)] = text
        nbytes = window.end - window.start
        room[nbytes : round_up(nbytes)] = bytes(round_up(nbytes) - nbytes)
        self._reader.read(window.runs, arriving.address, window.start, buffer, arriving)

    def _write(self, output: _Output, window: Window, arriving: Arriving) -> None:
        """Put the checksums in, write what waits for none, and finish the file after its last window."""
        start, extents = window.start, None
        if output.checksums is not None:
            extents = self._sum(output, output.checksums, window, arriving)
        if extents is None:
            extents = [(start, start + round_up(window.end - start))]
        for at, stop in extents:
            output.write(at, arriving.room[at - start : stop - start], arriving.digests)
        with self._lock:
            output.remaining -= 1
            is_whole = not output.remaining
        if is_whole:
            output.writer.finish()
        self._done.put(window.end - start)

    def _sum(
        self, output: _Output, checksums: PassingChecksums, window: Window, arriving: Arriving
    ) -> list[tuple[int, int]] | None:
        """Settle a window's checksums, or leave them to the thread whose turn is before.

        Returns:
            What may be written now, as `PassingChecksums.put` has it; None: all of it.

        IMPORTANT: before the window is counted as written: the file is finished when all are, and then no block waits.
        """
        number = window.start // windows.WINDOW_NBYTES
        sums = checksums.sums(window, arriving.room, arriving.crcs)
        concerned, extents = checksums.concerns(window), None
        with self._turned:
            if output.turn != number and not concerned:
                output.early[number] = sums
                return None
            while output.turn != number and not self._stopped:
                self._turned.wait()
            if self._stopped:
                raise _Stopped
        following: list[tuple[Run, int]] | None = sums
        while following is not None:
            for at, data in checksums.released(following):
                output.write(at, data, {})
            if concerned:
                concerned, extents = False, checksums.put(window, arriving.room)
            with self._turned:
                output.turn += 1
                following = output.early.pop(output.turn, None)
                self._turned.notify_all()
        return extents
