"""The limits of the machine: O_DIRECT write and reads of a file, and the copy into warm shared memory.

There are two limits of reading. `read_fresh_s` is of a file that was written with O_DIRECT and never read; a first load
is compared with it. `read_again_s` is of a file that was read before: the host of a virtual machine may have it in its
own memory. Only the standard library is used, so that the limits are the same whatever `asyncckpt` is measured.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine, processes
from benchmarks.runner import Context

Choice = tuple[int, int]
"""Bytes of a block, and threads."""

MIB = 1 << 20
THREADS = (1, 2, 4)
BLOCKS_NBYTES = (4 * MIB, 16 * MIB, 64 * MIB)
CHOICES: tuple[Choice, ...] = tuple(itertools.product(BLOCKS_NBYTES, THREADS))
KINDS = ("writes", "reads_fresh", "reads_again")
CANDIDATES, SAMPLES = 3, 3
CHOSEN_WITH_NBYTES = 256 * MIB
"""More bytes lead to the same choices, and take long to remove."""

DEADLINE_S = 300.0


class Memory:
    """Memory whose pages are allocated, private or, as the memory of a worker is, shared.

    Args:
        nbytes: How many; rounded up to pages.
        shared: Backed by a memfd.
    """

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        self.nbytes = -(-nbytes // 4096) * 4096
        fd = os.memfd_create("benchmark") if shared else -1
        if shared:
            os.ftruncate(fd, self.nbytes)
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(fd, self.nbytes, kind | getattr(mmap, "MAP_POPULATE", 0x8000))
        if shared:
            os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 1, self.nbytes)

    def view(self) -> memoryview:
        """Return its bytes."""
        return memoryview(self._map)


def parallel(threads: int, work: Callable[[int, int], Any], nbytes: int, block: int) -> float:
    """Call `work(thread, offset)` for each block of so many bytes, in turn; return the seconds of all."""

    def run(number: int) -> None:
        for offset in range(number * block, nbytes, threads * block):
            work(number, offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for helper in [pool.submit(run, number) for number in range(threads)]:
            helper.result()  # raises its error: a thread that stopped early would look fast
    return time.perf_counter() - began


@contextmanager
def direct(path: Path, flags: int) -> Iterator[int]:
    """Provide a file descriptor for O_DIRECT; with O_CREAT, of a file that is not there."""
    fd = os.open(path, flags | os.O_DIRECT | (os.O_EXCL if flags & os.O_CREAT else 0))
    try:
        yield fd
    finally:
        os.close(fd)


def write_s(path: Path, memory: memoryview, block: int, threads: int) -> float:
    """Return the seconds to write `memory` to a file that is not there, by O_DIRECT, and fdatasync it."""
    began = time.perf_counter()
    with direct(path, os.O_CREAT | os.O_WRONLY) as fd:

        def put(_: int, offset: int) -> None:
            piece = memory[offset : offset + block]
            assert os.pwrite(fd, piece, offset) == len(piece)

        parallel(threads, put, len(memory), block)
        os.fdatasync(fd)
    return time.perf_counter() - began


def read_s(path: Path, memory: memoryview, block: int, threads: int, into: Path | None = None) -> float:
    """Return the seconds to read a file's whole pages by O_DIRECT into `threads` buffers of `block` bytes.

    With `into`, each block is written there meanwhile, by O_DIRECT, and the copy is fdatasynced.
    """
    began, nbytes = time.perf_counter(), path.stat().st_size // 4096 * 4096
    with ExitStack() as opened:
        fd = opened.enter_context(direct(path, os.O_RDONLY))
        copy = opened.enter_context(direct(into, os.O_CREAT | os.O_WRONLY)) if into else None

        def move(number: int, offset: int) -> None:
            piece = memory[number * block : number * block + min(block, nbytes - offset)]
            assert os.preadv(fd, [piece], offset) == len(piece)
            assert copy is None or os.pwrite(copy, piece, offset) == len(piece)

        parallel(threads, move, nbytes, block)
        if copy is not None:
            os.fdatasync(copy)
    return time.perf_counter() - began


def copy_s(target: int, source: int, nbytes: int) -> float:
    """Return the fewest seconds to copy between addresses, with one thread or more."""

    def move(_: int, at: int) -> None:
        ctypes.memmove(target + at, source + at, min(4 * MIB, nbytes - at))

    return min(parallel(threads, move, nbytes, 4 * MIB) for threads in THREADS)


class Limits:
    """Finds the best block sizes and thread counts once, then measures the limits again in every round.

    A round's limit is the best of `CANDIDATES` choices: a single one may have been lucky when it was chosen.

    Args:
        directory: Where to write; nothing is left there.
        nbytes: As much as the state that is compared with the limits.
        best: The choices of an earlier round; they are not searched again.

    Attributes:
        best: The fastest choices of each of `KINDS`.
    """

    def __init__(self, directory: Path, nbytes: int, best: dict[str, list[Any]] | None = None) -> None:
        self._directory = directory
        self._shared, self._source = Memory(nbytes, shared=True), Memory(nbytes)
        self.nbytes = self._source.nbytes
        self.buffer = Memory(max(BLOCKS_NBYTES) * max(THREADS))
        self.best = best or self._choose()

    def _choose(self) -> dict[str, list[Any]]:
        """Return the `CANDIDATES` fastest choices of each of `KINDS`, by the medians of `SAMPLES` tries.

        Each try writes a new file, which is then read twice, by another choice.
        """
        tried: dict[str, dict[Choice, list[float]]] = {kind: {choice: [] for choice in CHOICES} for kind in KINDS}
        machine.until_discarded(self._directory)
        for sample in range(SAMPLES):
            for number, choice in enumerate(CHOICES):
                file = self._directory / f"choice-{sample}-{number}.bin"
                tried["writes"][choice].append(write_s(file, self._source.view()[:CHOSEN_WITH_NBYTES], *choice))
                reading = CHOICES[(number + sample + 1) % len(CHOICES)]
                for kind in ("reads_fresh", "reads_again"):
                    tried[kind][reading].append(read_s(file, self.buffer.view(), *reading))
        for file in self._directory.glob("choice-*.bin"):
            file.unlink()
        machine.until_discarded(self._directory)
        medians = {kind: {c: statistics.median(s) for c, s in tries.items()} for kind, tries in tried.items()}
        return {kind: sorted(CHOICES, key=medians[kind].__getitem__)[:CANDIDATES] for kind in KINDS}

    def measure(self) -> dict[str, float]:
        """Return the fewest seconds for a write, both kinds of reads and a copy of `nbytes`, over the candidates."""
        path, into = self._directory / "limit.bin", self.buffer.view()
        tried: dict[str, list[float]] = {"write_s": [], "read_fresh_s": [], "read_again_s": []}
        machine.until_discarded(self._directory)
        for write, fresh, again in zip(*(self.best[kind] for kind in KINDS), strict=True):
            tried["write_s"].append(write_s(path, self._source.view(), *write))
            tried["read_fresh_s"].append(read_s(path, into, *fresh))
            tried["read_again_s"].append(read_s(path, into, *again))
            machine.remove(path)
        return {name: min(seconds) for name, seconds in tried.items()} | {"copy_s": self.copy_s()}

    def copy_s(self) -> float:
        """Return the fewest seconds for a copy of `nbytes` into warm shared memory."""
        return copy_s(self._shared.address, self._source.address, self.nbytes)


def limits_apart(directory: str, nbytes: int, best: dict[str, list[Any]] | None) -> tuple[dict[str, float], Any]:
    """Return the limits and the best choices; for a process of its own, which gives its memory back."""
    found = Limits(Path(directory), nbytes, best)
    return found.measure(), found.best


def measure_apart(context: Context, nbytes: int) -> dict[str, float]:
    """Return the machine's limits for so many bytes, measured in another process.

    Raises:
        processes.ProcessError: They cannot be measured.
    """
    given = (str(context.directory), nbytes, context.facts.get("best"))
    found, context.facts["best"] = processes.call(limits_apart, *given, deadline_s=DEADLINE_S)
    return dict(found)
