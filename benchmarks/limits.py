"""The machine's own limits: O_DIRECT write and read of a file, and the copy into warm shared memory.

python -m benchmarks.limits [--mib 1024] [--rounds 5] [--dir D]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import Mapping

BLOCKS_NBYTES = (4 << 20, 16 << 20, 64 << 20)
THREADS = (1, 2, 4)
CANDIDATES = 3
CHOSEN_WITH_NBYTES = 1 << 30
"""More says nothing else about block sizes and threads, and takes long to remove."""


def _parallel(threads: int, work: Callable[[int, int], None], nbytes: int, block: int) -> None:
    offsets, lock = iter(range(0, nbytes, block)), threading.Lock()

    def run(number: int) -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            work(number, offset)

    helpers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()


def write_s(path: Path, memory: memoryview, block: int, threads: int) -> float:
    """Return the seconds to write `memory` to a new file by O_DIRECT and fdatasync it."""
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)

    def put(_: int, offset: int) -> None:
        piece = memory[offset : offset + block]
        assert os.pwrite(fd, piece, offset) == len(piece)

    _parallel(threads, put, len(memory), block)
    os.fdatasync(fd)
    os.close(fd)
    return time.perf_counter() - began


def read_s(path: Path, memory: memoryview, nbytes: int, block: int, threads: int) -> float:
    """Return the seconds to read `nbytes` of a file by O_DIRECT into `threads` buffers of `block` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def get(number: int, offset: int) -> None:
        want = min(block, nbytes - offset)
        assert os.preadv(fd, [memory[number * block : number * block + want]], offset) == want

    began = time.perf_counter()
    _parallel(threads, get, nbytes, block)
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


def copy_s(target: int, source: int, nbytes: int, threads: int, block: int = 4 << 20) -> float:
    """Return the seconds to copy `nbytes` between addresses with `threads` threads."""

    def move(_: int, at: int) -> None:
        ctypes.memmove(target + at, source + at, min(block, nbytes - at))

    began = time.perf_counter()
    _parallel(threads, move, nbytes, block)
    return time.perf_counter() - began


def copy_file_s(source: Path, target: Path, block: int = 16 << 20, threads: int = 4) -> float:
    """Return the seconds to copy a file by O_DIRECT, reading and writing at the same time, and fdatasync the copy."""
    nbytes = source.stat().st_size // 4096 * 4096
    memory = Mapping(-1, threads * block)
    memory.populate(0, memory.nbytes)
    view = memory.view()
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    read_fd = os.open(source, os.O_RDONLY | os.O_DIRECT)
    write_fd = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)

    def move(number: int, offset: int) -> None:
        piece = view[number * block : number * block + min(block, nbytes - offset)]
        assert os.preadv(read_fd, [piece], offset) == len(piece)
        assert os.pwrite(write_fd, piece, offset) == len(piece)

    _parallel(threads, move, nbytes, block)
    os.fdatasync(write_fd)
    seconds = time.perf_counter() - began
    for fd in (read_fd, write_fd):
        os.close(fd)
    view.release()
    memory.close()
    return seconds


class Limits:
    """Finds the best block sizes and thread counts once, then measures the limit again in every round.

    A round's limit is the best of `CANDIDATES` choices: a single one may have been lucky when it was chosen.

    Args:
        directory: Where to write; the file is removed by `close`.
        nbytes: As much as the state that is compared with the limits.
        best: What `best` was in an earlier run here; not looked for again.

    Attributes:
        best: The fastest choices of (block size, threads), of `writes` and `reads`.
    """

    def __init__(self, directory: Path, nbytes: int, best: dict[str, Any] | None = None) -> None:
        self.nbytes = nbytes // 4096 * 4096
        self._path = directory / "limit.bin"
        self._slot = SlotMemory.create(self.nbytes + 2 * 4096)
        self._source = Mapping(-1, self.nbytes)
        for memory in (self._slot.mapping, self._source):
            memory.populate(0, memory.nbytes)
        self.best_writes: list[Any]
        self.best_reads: list[Any]
        if best:
            self.best_writes, self.best_reads = best["writes"], best["reads"]
            write_s(self._path, self._view(), *self.best_writes[0])  # there must be a file to read
            return
        choices = list(itertools.product(BLOCKS_NBYTES, THREADS))
        nbytes = min(self.nbytes, CHOSEN_WITH_NBYTES)
        writes = {c: write_s(self._path, self._view()[:nbytes], *c) for c in choices}
        reads = {c: read_s(self._path, self._view(), nbytes, *c) for c in choices}
        write_s(self._path, self._view(), *choices[0])  # what is read from now on is whole
        self.best_writes = sorted(choices, key=lambda c: writes[c])[:CANDIDATES]
        self.best_reads = sorted(choices, key=lambda c: reads[c])[:CANDIDATES]

    @property
    def best(self) -> dict[str, list[Any]]:
        """See the class."""
        return {"writes": self.best_writes, "reads": self.best_reads}

    def _view(self) -> memoryview:
        return self._slot.mapping.view()[4096 : 4096 + self.nbytes]

    def measure(self) -> dict[str, float]:
        """Return the fewest seconds for a write, a read and a copy of `nbytes`, over the candidates."""
        return {
            "write_s": min(write_s(self._path, self._view(), *c) for c in self.best_writes),
            "read_s": min(read_s(self._path, self._view(), self.nbytes, *c) for c in self.best_reads),
            "copy_s": self.copy_s(),
        }

    def copy_s(self) -> float:
        """Return the fewest seconds for a copy of `nbytes` into warm shared memory."""
        target, source = self._slot.mapping.address, self._source.address
        return min(copy_s(target, source, self.nbytes, threads) for threads in THREADS)

    def close(self) -> None:
        """Free memory and file."""
        self._path.unlink(missing_ok=True)
        self._slot.close()
        self._source.close()


def main() -> None:
    """Measure, print, and keep the result file."""
    from benchmarks import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        about = machine.describe(directory)
        limits = Limits(directory, args.mib << 20)
        rounds = [limits.measure() for _ in range(args.rounds)]
        limits.close()
    finally:
        shutil.rmtree(directory)
    best = {"writes": limits.best_writes, "reads": limits.best_reads}
    result = {"benchmark": "limits", "machine": about, "nbytes": limits.nbytes, "best": best, "rounds": rounds}
    (Path(__file__).parent / "results" / "limits.json").write_text(json.dumps(result, indent=1) + "\n")
    for name in rounds[0]:
        seconds = [one[name] for one in rounds]
        rate = limits.nbytes / statistics.median(seconds) / 1e9
        print(f"{name[:-2]:6s}{rate:7.2f} GB/s   {min(seconds):.3f} to {max(seconds):.3f} s")
    for name, choices in best.items():
        print(f"{name}: the best of 4, 16, 64 MiB and 1, 2, 4 threads: {choices}")


if __name__ == "__main__":
    main()
