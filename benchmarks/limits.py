"""The machine's own limits: O_DIRECT write and read of a file, and the copy into warm shared memory.

    python -m benchmarks.limits [--mib 1024] [--rounds 5] [--dir D]

There are two limits of reading. `read_fresh_s` is of a file that was written by O_DIRECT and never read, as a load is
that comes first. `read_again_s` is of one that was read before: a virtual machine's host may have kept it in its own
memory. A load is compared with the one that is like it. Nothing is measured while the disk discards what was removed.
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
from benchmarks import machine, quiet, sources

Choice = tuple[int, int]
"""Bytes of a block, and threads."""

BLOCKS_NBYTES = (4 << 20, 16 << 20, 64 << 20)
THREADS = (1, 2, 4)
CHOICES: tuple[Choice, ...] = tuple(itertools.product(BLOCKS_NBYTES, THREADS))
KINDS = ("writes", "reads_fresh", "reads_again")
CANDIDATES = 3
SAMPLES = 3
CHOSEN_WITH_NBYTES = 256 << 20
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
    """Return the seconds to write `memory` to a file that is not there, by O_DIRECT, and fdatasync it."""
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


def fresh_s(limits: dict[str, float]) -> float:
    """Return the limit for a load of files that were never read; older results have one limit of reading."""
    return limits.get("read_fresh_s", limits.get("read_s", 0.0))


def choose(directory: Path, memory: memoryview) -> dict[str, list[Choice]]:
    """Return the `CANDIDATES` fastest choices of each of `KINDS`, by the medians of `SAMPLES` tries.

    Every try of a write makes a file, which is read once by another choice and then once more. All of them are removed
    behind the last try, and the disk has discarded them when this returns.

    Args:
        directory: Where to write: as many times `memory` as there are choices and samples.
        memory: What is written, and where to.
    """
    tried: dict[str, dict[Choice, list[float]]] = {kind: {choice: [] for choice in CHOICES} for kind in KINDS}
    files = []
    quiet.until_discarded(directory)
    with Mapping(-1, max(BLOCKS_NBYTES) * max(THREADS)) as buffer, buffer.view() as into:
        buffer.populate(0, buffer.nbytes)
        for sample in range(SAMPLES):
            for number, choice in enumerate(CHOICES):
                files.append(directory / f"choice-{sample}-{number}.bin")
                tried["writes"][choice].append(write_s(files[-1], memory, *choice))
                reading = CHOICES[(number + sample + 1) % len(CHOICES)]
                for kind in ("reads_fresh", "reads_again"):
                    tried[kind][reading].append(read_s(files[-1], into, len(memory), *reading))
    for file in files:
        file.unlink()
    quiet.until_discarded(directory)

    def median(kind: str, choice: Choice) -> float:
        return statistics.median(tried[kind][choice])

    return {kind: sorted(CHOICES, key=lambda c: median(kind, c))[:CANDIDATES] for kind in KINDS}


class Limits:
    """Finds the best block sizes and thread counts once, then measures the limit again in every round.

    A round's limit is the best of `CANDIDATES` choices: a single one may have been lucky when it was chosen.

    Args:
        directory: Where to write; nothing is left there.
        nbytes: As much as the state that is compared with the limits.
        best: What `best` was in an earlier run here; not looked for again.

    Attributes:
        best: The fastest choices of each of `KINDS`.
    """

    def __init__(self, directory: Path, nbytes: int, best: dict[str, Any] | None = None) -> None:
        self.nbytes = nbytes // 4096 * 4096
        self._directory = directory
        self._slot = SlotMemory.create(self.nbytes + 2 * 4096)
        self._source = Mapping(-1, self.nbytes)
        for memory in (self._slot.mapping, self._source):
            memory.populate(0, memory.nbytes)
        self.best: dict[str, list[Any]] = best or choose(directory, self._view()[:CHOSEN_WITH_NBYTES])

    @property
    def best_writes(self) -> list[Any]:
        """The fastest choices for writing."""
        return self.best["writes"]

    @property
    def best_reads(self) -> list[Any]:
        """The fastest choices for a first read."""
        return self.best["reads_fresh"]

    def _view(self) -> memoryview:
        return self._slot.mapping.view()[4096 : 4096 + self.nbytes]

    def measure(self) -> dict[str, float]:
        """Return the fewest seconds for a write, both kinds of reads and a copy of `nbytes`, over the candidates.

        Each candidate writes a new file, which is read twice and removed; then the disk is waited for.
        """
        path = self._directory / "limit.bin"
        tried: dict[str, list[float]] = {"write_s": [], "read_fresh_s": [], "read_again_s": []}
        quiet.until_discarded(self._directory)
        with Mapping(-1, max(BLOCKS_NBYTES) * max(THREADS)) as buffer, buffer.view() as into:
            buffer.populate(0, buffer.nbytes)
            for write, fresh, again in zip(*(self.best[kind] for kind in KINDS), strict=True):
                tried["write_s"].append(write_s(path, self._view(), *write))
                tried["read_fresh_s"].append(read_s(path, into, self.nbytes, *fresh))
                tried["read_again_s"].append(read_s(path, into, self.nbytes, *again))
                path.unlink()
                quiet.until_discarded(self._directory)
        return {name: min(seconds) for name, seconds in tried.items()} | {"copy_s": self.copy_s()}

    def copy_s(self) -> float:
        """Return the fewest seconds for a copy of `nbytes` into warm shared memory."""
        target, source = self._slot.mapping.address, self._source.address
        return min(copy_s(target, source, self.nbytes, threads) for threads in THREADS)

    def close(self) -> None:
        """Free the memory."""
        self._slot.close()
        self._source.close()


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        about = machine.describe(directory)
        limits = Limits(directory, args.mib << 20)
        rounds = [quiet.until_idle() | limits.measure() for _ in range(args.rounds)]
        limits.close()
    finally:
        shutil.rmtree(directory)
    result = {"benchmark": "limits", "machine": about, "code": sources.code_of("limits"), "nbytes": limits.nbytes}
    result |= {"best": limits.best, "rounds": rounds}
    (Path(__file__).parent / "results" / "limits.json").write_text(json.dumps(result, indent=1) + "\n")
    for name in ("write_s", "read_fresh_s", "read_again_s", "copy_s"):
        seconds = [one[name] for one in rounds]
        rate = limits.nbytes / statistics.median(seconds) / 1e9
        print(f"{name[:-2]:12s}{rate:7.2f} GB/s   {min(seconds):.3f} to {max(seconds):.3f} s")
    for name, choices in limits.best.items():
        print(f"{name}: the best of 4, 16, 64 MiB and 1, 2, 4 threads: {choices}")


if __name__ == "__main__":
    main()
