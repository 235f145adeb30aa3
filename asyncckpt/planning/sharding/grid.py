"""Which elements of a global tensor each rank of a device mesh holds. Pure index arithmetic; no torch.

A placement is a tuple: `()` replicates over its mesh dimension, `(d,)` shards dimension d, `(d, factor)` shards it as
torch's `_StridedShard` does. They apply in the order of the mesh's dimensions, each to what the ones before have left.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Run = tuple[int, int]
"""(first index, how many)"""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) in elements."""


class Grid(NamedTuple):
    """How a tensor lies on a mesh: the same value on all of its ranks.

    Attributes:
        mesh: Shape of the mesh.
        ranks: Global ranks in row-major order of the mesh.
        placements: One for each dimension of the mesh; see the module.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]

    @property
    def n_replicas(self) -> int:
        """How many ranks hold each element."""
        sizes = zip(self.mesh, self.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement)

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Return where the rank at `position` of `ranks` stands."""
        found = []
        for size in reversed(self.mesh):
            position, at = divmod(position, size)
            found.append(at)
        return tuple(reversed(found))

    def boxes(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
        """Return what the rank at `coordinate` holds of a tensor of `shape`, row-major; none when that is nothing."""
        return _boxes(self.mesh, self.placements, shape, coordinate)

    def replicas(self, position: int) -> tuple[int, ...]:
        """Return the ranks that hold the same as the one at `position`, ascending; it is among them."""
        base, step, free = position, 1, []
        for size, placement in zip(reversed(self.mesh), reversed(self.placements), strict=True):
            if not placement:
                free.append(range(0, size * step, step))
                base -= position // step % size * step
            step *= size
        return tuple(sorted(self.ranks[base + sum(offsets)] for offsets in itertools.product(*free)))


@functools.lru_cache(4096)
def _boxes(
    mesh: tuple[int, ...], placements: tuple[tuple[int, ...], ...], shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Box, ...]:
    by_dimension = [
        runs_of(
            length,
            [
                (size, at, placement[1] if len(placement) > 1 else 1)
                for size, at, placement in zip(mesh, coordinate, placements, strict=True)
                if placement and placement[0] == d
            ],
        )
        for d, length in enumerate(shape)
    ]
    return tuple((tuple(r[0] for r in runs), tuple(r[1] for r in runs)) for runs in itertools.product(*by_dimension))


def runs_of(length: int, shards: Sequence[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return the indices of one dimension that are left after sharding it.

    Args:
        length: Of the dimension.
        shards: (number of shards, which one, split factor; 1 for a plain shard), in the order of the mesh.
    """
    runs: list[Run] = [(0, length)]
    for n_shards, at, factor in shards:
        total = sum(n for _, n in runs)
        pieces = []
        for start, stop in _chunks(total, factor):
            chunk = -(-(stop - start) // n_shards)
            first = min(start + chunk * at, stop)
            pieces.append((first, min(first + chunk, stop) - first))
        runs = _joined(itertools.chain.from_iterable(_taken(runs, start, n) for start, n in pieces if n))
    return tuple(runs)


def _chunks(length: int, n_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each of `torch.chunk`'s pieces that has elements: as many each, but the last one."""
    size = -(-length // n_chunks)
    for start in range(0, length, size or 1):
        yield start, min(start + size, length)


def _taken(runs: Sequence[Run], start: int, n: int) -> Iterator[Run]:
    """Yield `n` indices from the `start`-th on of those in `runs`."""
    for first, length in runs:
        if start < length and n > 0:
            here = min(length - start, n)
            yield first + start, here
            n -= here
            start = length
        start -= length


def _joined(runs: Iterator[Run]) -> list[Run]:
    found: list[Run] = []
    for first, n in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + n)
        else:
            found.append((first, n))
    return found


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two of `boxes` that share an element: a sweep along the dimension that tells most of them apart."""
    filled = [box for box in boxes if math.prod(box[1])]
    if len(filled) < 2:
        return None
    n_dims = len(filled[0][0])
    if n_dims == 0:
        return filled[0], filled[1]
    sweep = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in filled}))
    active: list[Box] = []
    for box in sorted(filled, key=lambda b: b[0][sweep]):
        active = [a for a in active if a[0][sweep] + a[1][sweep] > box[0][sweep]]
        for other in active:
            if all(o < p + t and p < o + s for o, s, p, t in zip(*other, *box, strict=True)):
                return other, box
        active.append(box)
    return None
