"""What of a cold load a quick disk does not hide: loads and bare loops whose reads are made up.

    python -m benchmarks.load_parts [--state gpt|tiny] [--rounds 7] [--budget-s 300] [--dir D] [--out FILE]

The state is all zeros, and so is its shard but for the header: a read needs no disk. What stands for it has the kernel
look up the pages of the buffer, and make those that are not there yet, as a read by O_DIRECT does, and waits until a
disk of the given speed would have delivered, one read after the other; a disk "that takes no time" does not wait.
Everything else is as in a load: the index, digests of each block, which are compared, and the copy into the targets.
The loops are those of `benchmarks.bare_load`. Every way once in a round, in another order each time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncckpt
from asyncckpt.libc import libc
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage import block_reader
from asyncckpt.storage.files import Files
from benchmarks import kept, machine, quiet, sources, spread, states
from benchmarks.bare_load import DEADLINE_S, LOOPS, MIB, STATES, loop_s, shard_of

RESULTS = Path(__file__).parent / "results"
SPEEDS = {"takes no time": None, "gives 7 GB/s": 7e9, "gives 4 GB/s": 4e9, "gives 1.6 GB/s": 1.6e9}
"""Of the disks that are made up: bytes per second."""

ALIKE = "read, verify, copy, 6 x 16 MiB, 4 at the disk"
"""The loop that is built as a load is."""

BARE = [name for name, loop in LOOPS.items() if loop.verify and loop.copy]
FRESH, THERE, UNASKED = (
    "asyncckpt.load",
    "asyncckpt.load, buffers that are there",
    "asyncckpt.load, page cache not asked",
)
LOADS = (FRESH, THERE, UNASKED)
"""As it is; with the pages of its buffers there before the clock starts; and where it takes the page cache for empty
without a look, which it is."""

LARGE_NBYTES, HEAD_NBYTES = MIB, MIB
"""A read of a shard's tensors has more; what is not zero lies in the first bytes of a shard."""

_MADV_POPULATE_WRITE = 23


class MadeUpDisk:
    """Stands for `os.preadv` where much is read.

    Args:
        path: The shard.
        speed: Bytes per second; None takes no time.

    Attributes:
        first, last: When the first of these reads was asked for, and when the last had ended; of the monotonic clock.
    """

    def __init__(self, path: Path, speed: float | None) -> None:
        self._speed, self._lock, self._free_at = speed, threading.Lock(), 0.0
        self._real = os.preadv
        with path.open("rb") as file:
            self._head = file.read(HEAD_NBYTES)
        self.first, self.last = 0.0, 0.0

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        """Fill one buffer with what the shard has there; small reads are real ones."""
        nbytes = sum(map(len, buffers))
        if nbytes < LARGE_NBYTES:
            return self._real(fd, buffers, offset, flags)
        now = time.perf_counter()
        with self._lock:
            self.first = self.first or now
            self._free_at = max(now, self._free_at) + (nbytes / self._speed if self._speed else 0.0)
            until = self._free_at
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
        if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), "the kernel cannot make pages ahead of their use")
        if offset == 0:
            ctypes.memmove(address, self._head, min(HEAD_NBYTES, nbytes))
        else:
            ctypes.memset(address, 0, min(HEAD_NBYTES, nbytes))  # the head of an earlier read
        time.sleep(max(0.0, until - time.perf_counter()))
        with self._lock:
            self.last = time.perf_counter()
        return nbytes


class _Lent:
    """Stands for the memory of a load's buffers: the pages are there, and stay."""

    def __init__(self, memory: Mapping, fd: int, nbytes: int) -> None:
        if fd >= 0 or nbytes > memory.nbytes:
            raise ValueError(f"a mapping of {nbytes} bytes of {fd} was not expected")
        self._memory, self.address = memory, memory.address

    def view(self) -> memoryview:
        return self._memory.view()

    def __enter__(self) -> _Lent:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no round is begun that would not end within it")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "load_parts.json", help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "load_parts", "state": args.state, "machine": machine.describe(directory)}
    head |= {"code": sources.code_of("load_parts"), "rounds_asked": args.rounds, "budget_s": args.budget_s}
    file = kept.Kept(args.out, head)
    try:
        file.end(measure(STATES[args.state](), directory, file, kept.Budget(args.budget_s)))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    report(file.result)


def measure(state: dict[str, Any], directory: Path, file: kept.Kept, budget: kept.Budget) -> str:
    """Put every round into the result file; returns why no more are made."""
    nbytes = file.result["nbytes"] = states.nbytes(state)
    for tensor in states.tensors(state):
        tensor.zero_()
    path = directory / "checkpoint"
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        checkpointer.save(state, path).written.result(DEADLINE_S)
    subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
    quiet.until_discarded(directory)
    with Mapping(-1, block_reader.BUFFERS_NBYTES) as buffers, Mapping(-1, nbytes + 2 * MIB) as target:
        for memory in (buffers, target):
            memory.populate(0, memory.nbytes)
        ways: dict[str, Callable[[], Any]] = {
            name: functools.partial(loop_s, LOOPS[name], shard_of(path), buffers, target) for name in BARE
        }
        ways |= {name: functools.partial(load_as, name, path, state, buffers) for name in LOADS}

        def make() -> dict[str, Any]:
            row: dict[str, Any] = {}
            turn = len(file.rounds) * 2 % len(ways)
            names = list(ways)
            for disk, speed in SPEEDS.items():
                row[disk] = {n: _timed(ways[n], MadeUpDisk(shard_of(path), speed)) for n in names[turn:] + names[:turn]}
            return row

        return file.grow(budget, make)


def load_as(name: str, path: Path, state: dict[str, Any], buffers: Mapping) -> None:
    """Load in one of the ways of `LOADS`; `buffers`, whose pages are there, are for the second."""
    with contextlib.ExitStack() as stack:
        if name == THERE:
            stack.enter_context(put(block_reader, "Mapping", functools.partial(_Lent, buffers)))
        if name == UNASKED:
            stack.enter_context(put(Files, "resident", lambda *_: False))
        asyncckpt.load(path, state, strict=True, source="disk")


def _timed(way: Callable[[], Any], disk: MadeUpDisk) -> dict[str, float]:
    """Return the seconds and the CPU seconds of a way, and those ahead of its first read and behind its last."""
    with put(os, "preadv", disk.preadv):
        cpu_s, began = time.process_time(), time.perf_counter()
        way()
        ended = time.perf_counter()
        return {
            "s": ended - began,
            "cpu_s": time.process_time() - cpu_s,
            "ahead_s": disk.first - began,
            "behind_s": ended - disk.last,
        }


@contextlib.contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give something else a name of a module or class, for as long as the block runs."""
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def summary(result: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return, by disk, the seconds of each way, and of what a load takes over the quickest loop; a value per round.

    Each part is a difference: `fresh buffers` and `asking the page cache` of two loads, `both ends` what lies ahead of
    the first read and behind the last, `between` the rest of what a load takes longer than the quickest loop.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for disk in SPEEDS:
        rows = [row[disk] for row in result["rounds"]]
        one = {name: [row[name]["s"] for row in rows] for name in (*BARE, *LOADS)}
        quickest = [min(row[name]["s"] for name in BARE) for row in rows]
        one["asyncckpt.load / the quickest loop"] = [a / b for a, b in zip(one[FRESH], quickest, strict=True)]
        over = [a - b for a, b in zip(one[FRESH], quickest, strict=True)]
        parts = {
            "fresh buffers": [a - b for a, b in zip(one[FRESH], one[THERE], strict=True)],
            "asking the page cache": [a - b for a, b in zip(one[FRESH], one[UNASKED], strict=True)],
            "both ends": [row[FRESH]["ahead_s"] + row[FRESH]["behind_s"] for row in rows],
        }
        parts["between"] = [a - sum(others) for a, *others in zip(over, *parts.values(), strict=True)]
        one |= {"over the quickest loop": over} | parts
        one |= {f"{name}, CPU": [row[name]["cpu_s"] for row in rows] for name in (ALIKE, *LOADS)}
        found[disk] = one
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"{result['state']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds; medians of seconds")
    for disk, ways in summary(result).items():
        print(f"a disk that {disk}")
        for name, values in ways.items():
            print(f"  {name:52s} {spread.text_of(values, 3)}")


if __name__ == "__main__":
    main()
