"""Loads of one process into a standing state, beside the disk's limit and `safetensors`: cold, and from the page cache.

    python -m benchmarks.load [--state gpt|small|large|tiny] [--rounds 7] [--dir D] [--no-file]

In each round every way to load takes its turn, in another order each time, so that what else the machine does meets all
of them. Verification is on in ours and not known to `safetensors`, whose tensors are copied into the state afterwards,
as a training that goes on has to; its bare `load_file` is there too. `cold`: the page cache was told to drop the files,
which are the same ones in every round, so that the host of a virtual machine may have them in its memory. `cold fresh`:
of a checkpoint that was saved for this load and was never read. The limits are O_DIRECT reads of such shard files, of
the same one and of ones that were never read, the best of several block sizes and numbers of threads. Nothing is
measured while the disk discards what was removed. Per load the seconds of the processor are kept beside those of the
clock: on a busy machine they say more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.memory.mapping import Mapping
from benchmarks import machine, quiet, sources, states
from benchmarks.limits import BLOCKS_NBYTES, CHOSEN_WITH_NBYTES, THREADS, choose, read_s

RESULTS = Path(__file__).parent / "results"
CEILING_S = 240.0
"""No round begins later than this."""

FRESH_LIMITS = 2
"""Checkpoints of a round of which each is read once for the limit: a file can be read for the first time only once."""


MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{"gpt": states.gpt, "small": states.small, "large": states.large},
    "tiny": lambda: states.small(count=100),
}


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=("gpt", "small", "large", "tiny"), default="gpt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result = {"benchmark": "load", "state": args.state, "machine": machine.describe(directory)}
        result["code"] = sources.code_of("load")
        result |= measure(MAKERS[args.state](), directory, args.rounds)
    finally:
        shutil.rmtree(directory)
    if not args.no_file:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"load-{args.state}.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


class Ways:
    """Ways to load one saved state; each returns the seconds that it took, and those of the processor.

    Args:
        state: What is saved, and filled.
        directory: Where to.
    """

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        from safetensors.torch import save_file

        self.state, self._ours, self._other = state, directory / "ours", directory / "other.safetensors"
        self._tensors = {str(n): tensor for n, tensor in enumerate(states.tensors(state))}
        self._save(self._ours)
        save_file(self._tensors, self._other)
        fd = os.open(self._other, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        self._nbytes = _shard(self._ours).stat().st_size // 4096 * 4096
        self._memory = Mapping(-1, max(BLOCKS_NBYTES) * max(THREADS))
        self._memory.populate(0, self._memory.nbytes)
        with Mapping(-1, min(self._nbytes, CHOSEN_WITH_NBYTES)) as chosen_with, chosen_with.view() as view:
            chosen_with.populate(0, chosen_with.nbytes)
            self.best = choose(directory, view)

    def _save(self, path: Path) -> None:
        with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
            checkpointer.save(self.state, path)

    def _read(self, path: Path, choice: tuple[int, int]) -> float:
        with self._memory.view() as view:
            return read_s(_shard(path), view, self._nbytes, *choice)

    def limit(self) -> tuple[float, float]:
        """The machine's, of the files that are read again and again."""
        began = time.process_time()
        best = min(self._read(self._ours, choice) for choice in self.best["reads_again"])
        return best, time.process_time() - began

    def limit_fresh(self) -> tuple[float, float]:
        """The machine's, of files that were never read."""
        return min(
            self._of_fresh(lambda path, choice=choice: self._limit_of(path, choice))  # type: ignore[misc]
            for choice in self.best["reads_fresh"][:FRESH_LIMITS]
        )

    def ours_fresh(self) -> tuple[float, float]:
        """`asyncckpt.load` of a checkpoint that was never read."""
        return self._of_fresh(self._load_cold)

    def _limit_of(self, path: Path, choice: tuple[int, int]) -> tuple[float, float]:
        began = time.process_time()
        return self._read(path, choice), time.process_time() - began

    def _load_cold(self, path: Path) -> tuple[float, float]:
        return _timed(path, lambda: asyncckpt.load(path, self.state, strict=True, source="disk"), True)

    def _of_fresh(self, load: Callable[[Path], tuple[float, float]]) -> tuple[float, float]:
        """Return what a load of a new checkpoint takes; the disk has discarded it when this returns."""
        path = self._ours.with_name("fresh")
        self._save(path)
        found = load(path)
        shutil.rmtree(path)
        quiet.until_discarded(path.parent)
        return found

    def ours(self, *, cold: bool) -> tuple[float, float]:
        """`asyncckpt.load`."""
        return _timed(self._ours, lambda: asyncckpt.load(self._ours, self.state, strict=True, source="disk"), cold)

    def safetensors(self, *, cold: bool, copied: bool = True) -> tuple[float, float]:
        """`load_file`, and a copy into what stands."""
        from safetensors.torch import load_file

        def load() -> None:
            found = load_file(self._other)
            for name, tensor in self._tensors.items() if copied else ():
                tensor.copy_(found[name])

        return _timed(self._other, load, cold)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


def _shard(path: Path) -> Path:
    (shard,) = path.glob("*.safetensors")
    return shard


def _timed(path: Path, load: Callable[[], Any], cold: bool) -> tuple[float, float]:
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb") as opened:
            if cold:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(16 << 20):
                    pass
    began, busy = time.perf_counter(), time.process_time()
    load()
    return time.perf_counter() - began, time.process_time() - busy


def measure(state: dict[str, Any], directory: Path, rounds: int) -> dict[str, Any]:
    """Return every round's figures."""
    before = time.monotonic()
    sums = [float(t.double().sum()) for t in states.tensors(state)[:50]]
    ways = Ways(state, directory)
    calls: dict[str, Callable[[], tuple[float, float]]] = {
        "read limit": ways.limit,
        "read limit fresh": ways.limit_fresh,
        "cold fresh": ways.ours_fresh,
        "cold": lambda: ways.ours(cold=True),
        "safetensors cold": lambda: ways.safetensors(cold=True),
        "warm": lambda: ways.ours(cold=False),
        "safetensors warm": lambda: ways.safetensors(cold=False),
        "safetensors warm, bare": lambda: ways.safetensors(cold=False, copied=False),
    }
    found: list[dict[str, Any]] = []
    names = list(calls)
    calls["warm"]()  # whatever is imported and made once
    while len(found) < rounds and time.monotonic() - before < CEILING_S:
        turn = len(found) % len(names)
        order = names[turn:] + names[:turn]
        found.append(quiet.until_idle() | {name: calls[name]() for name in order})
    ways.close()
    with torch.no_grad():
        for tensor in states.tensors(state):
            tensor.zero_()
    asyncckpt.load(directory / "ours", state, strict=True, source="disk")
    assert sums == [float(t.double().sum()) for t in states.tensors(state)[:50]]
    return {"nbytes": states.nbytes(state), "best": ways.best, "rounds": found}


RATIOS = {
    "cold fresh / read limit fresh": {"gpt": 1.1, "small": 1.5, "large": 1.1},
    "cold / read limit": {"gpt": 1.1, "small": 1.5, "large": 1.1},
    "warm / safetensors warm": {"gpt": 1.3, "small": 1.0, "large": 1.3},
    "warm / safetensors warm, bare": {},  # maps large tensors and copies nothing: nothing is in the state yet
    "cold / safetensors cold": {},
}
"""Pairs of a round that are divided, and PERFORMANCE.md's targets."""


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return medians: of the seconds, of the processor's seconds, and of the ratios within each round."""
    rounds = result["rounds"]
    found: dict[str, float] = {}
    names = [name for name, one in rounds[0].items() if isinstance(one, list | tuple)]
    for name in names:
        found[f"{name} s"] = statistics.median(r[name][0] for r in rounds)
    for name in names:
        found[f"{name} cpu s"] = statistics.median(r[name][1] for r in rounds)
    for ratio in RATIOS:
        one, other = ratio.split(" / ")
        if one in names:  # older results have no fresh ones
            found[ratio] = statistics.median(r[one][0] / r[other][0] for r in rounds)
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    print(f"{result['state']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds")
    for name, value in summary(result).items():
        target = RATIOS.get(name, {}).get(result["state"])
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:36s} {value:8.3f}{verdict}")


if __name__ == "__main__":
    main()
