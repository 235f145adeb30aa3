"""What is left to gain in a cold load: loops that only read, verify and copy, beside `asyncckpt.load`.

    python -m benchmarks.bare_load [--state gpt|tiny] [--rounds 7] [--budget-s 300] [--dir D] [--out FILE]

Each way gets a checkpoint that was saved for it and never read, and reads its largest shard by O_DIRECT: some loops do
nothing else, others compute a checksum of each MiB and copy it into memory that is there, with plain threads and none
of our code. They know neither tensors nor an index. What they take beside what reading alone takes, no load that
verifies and copies on this machine can save. Their order is another one in each round. Nothing else should run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

import asyncckpt
from asyncckpt.memory.mapping import Mapping
from benchmarks import kept, machine, quiet, sources, spread, states

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 300.0
"""Of a save."""

MIB = 1 << 20
STATES: dict[str, Callable[[], dict[str, Any]]] = {"gpt": states.gpt, "tiny": lambda: states.small(count=100)}


class Loop(NamedTuple):
    """A way to go through a file.

    Attributes:
        threads: How many, each with a buffer.
        block: Bytes of a read.
        at_disk: How many of them read at a time.
        verify: Compute checksums.
        copy: Copy to where a tensor would lie.
    """

    threads: int
    block: int
    at_disk: int
    verify: bool = False
    copy: bool = False


LOOPS = {
    "read, 1 x 4 MiB": Loop(1, 4 * MIB, 1),
    "read, 2 x 4 MiB": Loop(2, 4 * MIB, 2),
    "read, 4 x 16 MiB": Loop(4, 16 * MIB, 4),
    "read and verify, 4 x 16 MiB": Loop(4, 16 * MIB, 4, verify=True),
    "read and copy, 4 x 16 MiB": Loop(4, 16 * MIB, 4, copy=True),
    "read, verify, copy, 6 x 16 MiB, 4 at the disk": Loop(6, 16 * MIB, 4, verify=True, copy=True),
    "read, verify, copy, 3 x 4 MiB, 2 at the disk": Loop(3, 4 * MIB, 2, verify=True, copy=True),
    "read, verify, copy, 3 x 4 MiB, 1 at the disk": Loop(3, 4 * MIB, 1, verify=True, copy=True),
}
LOADS = {"asyncckpt.load": True, "asyncckpt.load(verify=False)": False}
"""Name -> whether it verifies."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no round is begun that would not end within it")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "bare_load.json", help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "bare_load", "state": args.state, "machine": machine.describe(directory)}
    head |= {"code": sources.code_of("bare_load"), "rounds_asked": args.rounds, "budget_s": args.budget_s}
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
    names = [*LOOPS, *LOADS]
    most = max(loop.threads * loop.block for loop in LOOPS.values())
    with Mapping(-1, most) as buffers, Mapping(-1, nbytes + 2 * MIB) as target:
        for memory in (buffers, target):
            memory.populate(0, memory.nbytes)
        with asyncckpt.AsyncCheckpointer() as checkpointer:
            checkpointer.prepare(state)

            def make() -> dict[str, Any]:
                row: dict[str, Any] = {}
                turn = len(file.rounds) * 3 % len(names)
                for name in names[turn:] + names[:turn]:
                    path = directory / "checkpoint"
                    checkpointer.save(state, path).written.result(DEADLINE_S)
                    quiet.until_discarded(directory)
                    if name in LOOPS:
                        row[name] = loop_s(LOOPS[name], shard_of(path), buffers, target)
                    else:
                        row[name] = load_s(path, state, verify=LOADS[name])
                    shutil.rmtree(path)
                    quiet.until_discarded(directory)
                return row

            return file.grow(budget, make)


def shard_of(path: Path) -> Path:
    """Return the largest shard file of a checkpoint."""
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def loop_s(loop: Loop, path: Path, buffers: Mapping, target: Mapping) -> float:
    """Return the seconds that a loop takes for a file, whole pages of it."""
    nbytes = path.stat().st_size // 4096 * 4096
    offsets = iter(range(0, nbytes, loop.block))
    turn, lock = threading.Semaphore(loop.at_disk), threading.Lock()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def run(number: int) -> None:
        begin = number * loop.block
        with buffers.view() as view, view[begin : begin + loop.block] as buffer:
            while True:
                with turn:
                    with lock:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    want = min(loop.block, nbytes - offset)
                    with buffer[:want] as piece:
                        assert os.preadv(fd, [piece], offset) == want
                for at in range(0, want, MIB):
                    step = min(MIB, want - at)
                    if loop.verify:
                        with buffer[at : at + step] as piece:
                            xxhash.xxh3_64_intdigest(piece)
                    if loop.copy:
                        ctypes.memmove(target.address + offset + at, buffers.address + begin + at, step)

    try:
        with ThreadPoolExecutor(loop.threads) as pool:
            began = time.perf_counter()
            for running in [pool.submit(run, number) for number in range(loop.threads)]:
                running.result()  # raises what a thread has raised: a loop that stopped early would look quick
            return time.perf_counter() - began
    finally:
        os.close(fd)


def load_s(path: Path, state: dict[str, Any], *, verify: bool) -> float:
    """Return the seconds of a load from the disk into a state that stands."""
    began = time.perf_counter()
    asyncckpt.load(path, state, strict=True, source="disk", verify=verify)
    return time.perf_counter() - began


def summary(result: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of each way, and what a load takes over the quickest bare loop that verifies and copies.

    And what that loop takes over the quickest one that only reads. Of each a value per round.
    """
    rounds = result["rounds"]
    found = {name: [row[name] for row in rounds] for name in (*LOOPS, *LOADS)}
    bare = [name for name, loop in LOOPS.items() if loop.verify and loop.copy]
    only = [name for name, loop in LOOPS.items() if not (loop.verify or loop.copy)]
    found["asyncckpt.load / the quickest bare loop"] = [
        row["asyncckpt.load"] / min(row[name] for name in bare) for row in rounds
    ]
    found["the quickest bare loop / reading alone"] = [
        min(row[name] for name in bare) / min(row[name] for name in only) for row in rounds
    ]
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"{result['state']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds; medians")
    for name, values in summary(result).items():
        print(f"  {name:48s} {spread.text_of(values, 3)}")


if __name__ == "__main__":
    main()
