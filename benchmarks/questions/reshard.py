"""What does loading one rank's part of a checkpoint read and take that was sharded differently, against a plain load?

One process saves square matrices in parts, as four ranks would hold them, and loads a quarter of each as a rank of
another mesh would, from the page cache. A plain load fills whole tensors. "Extra time" is the time of the resharded
load over that of the plain one for as many bytes as the blocks have that hold the part (without checksums: as the part
has).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

import asyncckpt
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files
from benchmarks import machine
from benchmarks.figures import Row
from benchmarks.runner import Context, Question

Box = tuple[tuple[int, int], tuple[int, int]]


class Parts:
    """A matrix that one process holds in parts."""

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Box]) -> None:
        self.parts = [(whole[o[0] : o[0] + s[0], o[1] : o[1] + s[1]].contiguous(), o) for o, s in boxes]


def cuts_of(size: int) -> dict[str, list[Box]]:
    """Return the boxes of four ranks in each mesh."""
    quarter, half = size // 4, size // 2
    return {
        "Shard(0)": [((n * quarter, 0), (quarter, size)) for n in range(4)],
        "Shard(1)": [((0, n * quarter), (size, quarter)) for n in range(4)],
        "2 x 2": [((a * half, b * half), (half, half)) for a in range(2) for b in range(2)],
    }


def run(context: Context) -> Row:
    """Save in each mesh, and load in each."""
    size, path = context.options.size, context.directory / "checkpoint"
    asyncckpt.register_shard_type(Parts, lambda value: ((size, size), value.parts), lambda value, parts: None)
    names = [f"w{n}" for n in range(max(1, (context.options.mib << 20) // (size * size * 4)))]
    nbytes = context.facts["nbytes"] = len(names) * size * size * 4
    whole = torch.randn(size, size)
    row: Row = {"verified": {}, "not verified": {}}
    process = psutil.Process()
    for saved, boxes in cuts_of(size).items():
        with asyncckpt.SyncCheckpointer(fsync=False, rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
            checkpointer.save({name: Parts(whole + n, boxes) for n, name in enumerate(names)}, path)
        machine.fill_cache(path)
        plain = {name: torch.zeros(size, size) for name in names}
        for wanted, cuts in cuts_of(size).items():
            offsets, sizes = cuts[1]
            target = {name: asyncckpt.ShardedSlice(torch.zeros(sizes), (size, size), offsets) for name in names}
            part = len(names) * sizes[0] * sizes[1] * 4
            for kind, touched in (("verified", _touched(path, names, offsets, sizes)), ("not verified", part)):
                load = partial(asyncckpt.load, path, verify=kind == "verified")
                before = process.io_counters().read_chars  # of shards, and the little that an index has
                load(target)
                read = process.io_counters().read_chars - before
                found: Row = defaultdict(list, read_over_touched=read / touched)
                for _ in range(context.options.loads):
                    found["plain_s"].append(machine.timed(partial(load, plain))["s"])
                    found["reshard_s"].append(machine.timed(partial(load, target))["s"])
                    found["extra_time"].append(found["reshard_s"][-1] / found["plain_s"][-1] * nbytes / touched)
                row[kind][f"{saved} to {wanted}"] = found
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert torch.equal(target[names[-1]].tensor, (whole + (len(names) - 1))[box])
        machine.remove(path)
    return row


def _touched(path: Path, names: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the bytes of the blocks that hold a box of each tensor."""
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


QUESTION = Question(
    run,
    [f"{kind}/*/{figure}" for kind in ("verified", "not verified") for figure in ("read_over_touched", "extra_time")],
    options={"mib": 512, "size": 4096, "loads": 2},
    smallest="--mib 1 --size 256 --loads 1",
)
