"""The limits of the machine: O_DIRECT write and reads of a file, and the copy into warm shared memory.

There are two limits of reading. `read_fresh_s` is of a file that was written with O_DIRECT and never read; a first load
is compared with it. `read_again_s` is of a file that was read before: the host of a virtual machine may have it in its
own memory. Only the standard library is used, so that the limits are the same whatever `asyncckpt` is measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

from benchmarks import machine, processes

MIB = 1 << 20
CHOICES = ((4 * MIB, 1), (4 * MIB, 2), (16 * MIB, 1), (16 * MIB, 4), (64 * MIB, 4))
"""Bytes of a block, and threads; a limit is the best of these in its round. Of nine choices that were searched for 42
limits (`best` in older result files), one of these was the best 37 times, and among the best three each time."""

COPY_THREADS = (1, 2, 4)
BUFFER_NBYTES = max(block * threads for block, threads in CHOICES)


def memory(nbytes: int, *, shared: bool = False) -> mmap.mmap:
    """Return memory whose pages are allocated, private or, as the memory of a worker is, shared; in whole pages."""
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    found = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, kind | mmap.MAP_ANONYMOUS)
    ctypes.memset(_address(found), 1, len(found))
    return found


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def parallel(threads: int, work: Callable[[int, int], Any], nbytes: int, block: int) -> float:
    """Call `work(thread, offset)` for each block of so many bytes, in turn; return the seconds of all."""

    def run(number: int) -> None:
        for offset in range(number * block, nbytes, threads * block):
            work(number, offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))  # raises an error of `work`: a thread that stopped early would look fast
    return time.perf_counter() - began


def direct(path: Path, mode: str) -> FileIO:
    """Open a file with O_DIRECT: "rb", or "xb" if it is not there."""
    return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT, 0o600))


def move_s(
    memory: mmap.mmap, block: int, threads: int, *, source: Path | None = None, target: Path | None = None
) -> float:
    """Return the seconds to move bytes by O_DIRECT, block by block.

    Args:
        memory: Where they pass: its bytes are written; with a source, it has a block for each thread.
        block: Bytes of a block.
        threads: How many move blocks.
        source: A file whose whole pages are read.
        target: A file that is not there; it is fdatasynced.
    """
    began, view = time.perf_counter(), memoryview(memory)
    nbytes = source.stat().st_size // 4096 * 4096 if source else len(view)
    with ExitStack() as opened:
        read = opened.enter_context(direct(source, "rb")) if source else None
        write = opened.enter_context(direct(target, "xb")) if target else None

        def move(number: int, offset: int) -> None:
            at, length = number * block if read else offset, min(block, nbytes - offset)
            piece = view[at : at + length]
            assert read is None or os.preadv(read.fileno(), [piece], offset) == length
            assert write is None or os.pwrite(write.fileno(), piece, offset) == length

        parallel(threads, move, nbytes, block)
        if write is not None:
            os.fdatasync(write)
    return time.perf_counter() - began


def copy_s(target: mmap.mmap, source: mmap.mmap) -> float:
    """Return the fewest seconds to copy between memories of one size, with one thread or more."""
    to, of, nbytes = _address(target), _address(source), len(source)

    def move(_: int, at: int) -> None:
        ctypes.memmove(to + at, of + at, min(4 * MIB, nbytes - at))

    return min(parallel(threads, move, nbytes, 4 * MIB) for threads in COPY_THREADS)


def measure(directory: str, nbytes: int) -> dict[str, float]:
    """Return the fewest seconds for a write, both kinds of reads and a copy of `nbytes`; leaves nothing behind."""
    source, buffer, path = memory(nbytes), memory(BUFFER_NBYTES), Path(directory, "limit.bin")
    tried: dict[str, list[float]] = {"write_s": [], "read_fresh_s": [], "read_again_s": []}
    machine.until_discarded(path.parent)
    for n, choice in enumerate(CHOICES):
        tried["write_s"].append(move_s(source, *choice, target=path))
        tried["read_fresh_s"].append(move_s(buffer, *choice, source=path))
        tried["read_again_s"].append(move_s(buffer, *CHOICES[n - 1], source=path))
        machine.remove(path)
    found = {name: min(seconds) for name, seconds in tried.items()}
    return found | {"copy_s": copy_s(memory(nbytes, shared=True), source)}


def measure_apart(directory: Path, nbytes: int) -> dict[str, float]:
    """Do what `measure` does in a process of its own, which gives its memory back.

    Raises:
        processes.ProcessError: They cannot be measured.
    """
    return dict(processes.call(measure, str(directory), nbytes))
