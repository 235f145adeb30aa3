"""Loading one rank's part of a checkpoint that was cut otherwise: bytes read and time, against a plain load.

    python -m benchmarks.reshard [--mib 512] [--rounds 5] [--dir D]

One process saves square matrices in parts, as four ranks would hold them, and loads a quarter of each as another mesh
would, from the page cache. A plain load fills whole tensors. `extra time`: seconds of the resharded load against those
of the plain one for as many bytes as the blocks have that hold the part (without checksums: as the part has).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.format.layout import SAVE_ID_NBYTES
from asyncckpt.loading.reader import DefaultReader
from asyncckpt.storage.files import Files
from benchmarks import machine, quiet, sources

RESULTS = Path(__file__).parent / "results"
N = 4096
BYTES_LIMIT, TIME_LIMIT = 1.1, 1.5
Box = tuple[tuple[int, int], tuple[int, int]]

CUTS: dict[str, list[Box]] = {
    "Shard(0)": [((n * N // 4, 0), (N // 4, N)) for n in range(4)],
    "Shard(1)": [((0, n * N // 4), (N, N // 4)) for n in range(4)],
    "2 x 2": [((a * N // 2, b * N // 2), (N // 2, N // 2)) for a in range(2) for b in range(2)],
}
"""Meshes of four ranks."""


class Parts:
    """A matrix that one process holds in parts."""

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Box]) -> None:
        self.parts = [(whole[o[0] : o[0] + s[0], o[1] : o[1] + s[1]].contiguous(), o) for o, s in boxes]


class CountingFiles(Files):
    """Adds up what is read of the shards."""

    def __init__(self) -> None:
        self.nbytes = 0

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset, flags)
        self.nbytes += count if count > SAVE_ID_NBYTES else 0
        return count

    def gather(self, fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
        count = super().gather(fd, target, offset, nbytes, every, times, apart)
        self.nbytes += count * nbytes
        return count


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    asyncckpt.register_shard_type(Parts, lambda value: ((N, N), value.parts), lambda value, parts: None)
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result: dict[str, Any] = {"benchmark": "reshard", "machine": machine.describe(directory)}
        result |= {"code": sources.code_of("reshard"), **quiet.until_idle()}
        result |= measure(directory, max(1, args.mib * (1 << 20) // (N * N * 4)), args.rounds)
    finally:
        shutil.rmtree(directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "reshard.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def measure(directory: Path, n_tensors: int, rounds: int) -> dict[str, Any]:
    """Return the figures of every pair of meshes."""
    names = [f"w{n}" for n in range(n_tensors)]
    whole = torch.randn(N, N)
    found = []
    for saved, boxes in CUTS.items():
        path = directory / "c"
        with asyncckpt.SyncCheckpointer(fsync=False, rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
            checkpointer.save({name: Parts(whole + n, boxes) for n, name in enumerate(names)}, path)
        for file in path.iterdir():
            file.read_bytes()  # into the page cache
        plain = {name: torch.zeros(N, N) for name in names}
        for wanted, cuts in CUTS.items():
            offsets, sizes = cuts[1]
            target = {name: asyncckpt.ShardedSlice(torch.zeros(sizes), (N, N), offsets) for name in names}
            for verify in (True, False):
                row = _compare(path, plain, target, rounds, verify=verify)
                row["part_nbytes"] = n_tensors * sizes[0] * sizes[1] * 4
                row["touched_nbytes"] = _touched(path, names, offsets, sizes) if verify else row["part_nbytes"]
                found.append({"saved": saved, "loaded": wanted, "verify": verify, **row})
        part = target[names[-1]]
        box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.tensor.shape, strict=True))
        assert torch.equal(part.tensor, (whole + (n_tensors - 1))[box])
        shutil.rmtree(path)
    return {"nbytes": n_tensors * N * N * 4, "rounds": rounds, "pairs": found}


def _compare(path: Path, plain: dict[str, Any], target: dict[str, Any], rounds: int, *, verify: bool) -> dict[str, Any]:
    times: dict[str, list[float]] = {"plain_s": [], "reshard_s": []}
    files = CountingFiles()
    DefaultReader(files).read(path, target, verify=verify)
    for _ in range(rounds):
        times["plain_s"].append(_timed(lambda: asyncckpt.load(path, plain, verify=verify)))
        times["reshard_s"].append(_timed(lambda: asyncckpt.load(path, target, verify=verify)))
    return {"read_nbytes": files.nbytes, **times}


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _touched(path: Path, names: Sequence[str], offsets: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Return the bytes of the blocks that hold a box of each tensor."""
    from asyncckpt.storage.contents import read_contents

    contents = read_contents(str(path), Files())
    blocks: set[tuple[int, int, int]] = set()
    for name in names:
        for rank, chunk in contents.tensors[name].chunks:
            low = [max(o, c) for o, c in zip(offsets, chunk.offsets, strict=True)]
            high = [min(o + s, c + t) for o, s, c, t in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
            unit, columns = contents.ranks[rank].index.block_nbytes, chunk.sizes[1]
            for line in range(low[0], high[0]) if low[1] < high[1] else ():
                first = ((line - chunk.offsets[0]) * columns + low[1] - chunk.offsets[1]) * 4 + chunk.offset_bytes
                last = first + (high[1] - low[1]) * 4 - 1
                blocks.update((rank, chunk.part, block) for block in range(first // unit, last // unit + 1))
    return len(blocks) * contents.ranks[0].index.block_nbytes


def report(result: dict[str, Any]) -> None:
    """Print the figures."""
    for row in result["pairs"]:
        plain, reshard = (statistics.median(row[key]) for key in ("plain_s", "reshard_s"))
        ratios = [r / p for r, p in zip(row["reshard_s"], row["plain_s"], strict=True)]
        extra = statistics.median(ratios) * result["nbytes"] / row["touched_nbytes"]
        read = row["read_nbytes"] / row["touched_nbytes"]
        within = "" if read <= BYTES_LIMIT and extra <= TIME_LIMIT else "   over the limit"
        print(
            f"{row['saved']:>8} -> {row['loaded']:<8} {'verified' if row['verify'] else 'not verified':<13}"
            f"read {read:.2f} of what is touched, {reshard:.3f} s, plain {plain:.3f} s, extra time {extra:.2f}{within}"
        )


if __name__ == "__main__":
    main()
