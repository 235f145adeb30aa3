"""Coverage: do the chunks of all ranks hold every element of every tensor exactly once? Pure.

Three answers, the cheapest first. By sums: what a rank stores of each tensor as one number, and those of all ranks add
up to a known one. Every coordinate of every dimension has a number of its own, drawn by a hash. A run of elements
counts as the number of its start less that of its end, a box as the product over its dimensions. Where boxes meet, what
lies between them cancels out; so those that hold every element of a tensor exactly once add up to what a single box of
its shape counts, however they are cut, and in whatever order they come. Any others do so by chance only, about once in
2**58 (ADR 0018). Box by box, where sums do not add up (`coverage_fault`). For people, with the boxes that are missing
or stored twice, and whose lie beside (`located_fault`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.names import SaveId, split_per_rank_name
from asyncckpt.format.structure import Box, find_overlap

MAX_CUTS = 64
"""One inside the other. A mesh has one for each dimension, a mesh of what a mesh has cut two. Chosen, not measured."""

MAX_PAIRS = 1_000_000
"""Boxes that are compared with each other, about a second. What a mesh has cut is compared with nothing."""


def coverage_fault(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor of `global_shape`; None when nothing is.

    Boxes lie inside the shape (the index's decoder saw to it). Those without elements count for nothing.
    """
    if len(boxes) == 1 and boxes[0][1] == global_shape:
        return None
    filled = [box for box in boxes if 0 not in box[1]]
    wanted, found = math.prod(global_shape), sum(math.prod(sizes) for _, sizes in filled)
    if found == wanted and _fits_together(filled, tuple((0, n) for n in global_shape)):
        return None
    if len(filled) > 1 and not is_affordable(filled, len(global_shape)):
        # IMPORTANT: refused, whoever is right: boxes that somebody has thought up would take hours.
        if found == wanted:
            return f"its {len(filled)} chunks lie in no order in which they could be compared"
    elif len(filled) > 1:
        twice = find_overlap(filled)
        if twice is not None:
            return f"elements {filled[twice[0]]} and {filled[twice[1]]} (offsets, sizes) are stored twice"
    if found != wanted:
        return f"{found} of {wanted} elements are stored"
    return None


def is_affordable(boxes: Sequence[Box], n_dims: int) -> bool:
    """Whether the sweep for boxes that overlap compares few enough of them."""
    if n_dims == 0:
        return True
    d = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    starts = sorted(offsets[d] for offsets, _ in boxes)
    ends = sorted(offsets[d] + sizes[d] for offsets, sizes in boxes)
    pairs = over = 0
    for begun, start in enumerate(starts):
        while ends[over] <= start:
            over += 1
        pairs += begun - over
    return pairs <= MAX_PAIRS


def _fits_together(boxes: list[Box], region: tuple[tuple[int, int], ...], cuts: int = 0) -> bool:
    """Whether `boxes` cover `region` ((start, end) in each dimension) exactly once. False may also mean: not obviously.

    Where no box lies on both sides of a cut through the region, both sides are looked at by themselves: sorting is all
    that thousands of boxes cost, which come from meshes, and from rows of what meshes have cut.
    """
    if cuts > MAX_CUTS:
        return False
    if len(boxes) < 2 or not region:
        return [tuple((o, o + s) for o, s in zip(*box, strict=True)) for box in boxes] == [region]
    others = (tuple(start for start, _ in region[1:]), tuple(end - start for start, end in region[1:]))
    if all((offsets[1:], sizes[1:]) == others for offsets, sizes in boxes):  # rows: by far the most
        return _are_joined(sorted((offsets[0], sizes[0]) for offsets, sizes in boxes), *region[0])
    for d, (start, end) in enumerate(region):
        slabs: list[list[Box]] = []
        bounds = [start]
        reached = start
        for box in sorted(boxes, key=lambda b: b[0][d]):
            first = box[0][d]
            if first >= reached and slabs:
                if first > reached:
                    return False
                bounds.append(first)
                slabs.append([box])
            elif slabs:
                slabs[-1].append(box)
            else:
                slabs.append([box])
            reached = max(reached, first + box[1][d])
        bounds.append(end)
        if len(slabs) > 1:
            parts = zip(slabs, itertools.pairwise(bounds), strict=True)
            return all(_fits_together(slab, (*region[:d], part, *region[d + 1 :]), cuts + 1) for slab, part in parts)
    return False


def _are_joined(runs: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    for first, n in runs:
        if first != start:
            return False
        start += n
    return start == end


MAX_BOXES = 3
"""Missing boxes that a text names."""

MAX_BESIDE = 4
"""Ranks beside a missing box that a text names, and ranks that store nothing."""

MAX_PIECES = 256
"""Pieces that are looked at while what is missing is cut out. Chosen, not measured: holes of meshes are few boxes."""

MAX_DIMS = 8
"""Dimensions of a box that a text shows."""


def located_fault(
    global_shape: tuple[int, ...], boxes: Sequence[Box], ranks: Sequence[int], idle: Sequence[int] = ()
) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor, where, and whose they are; None when nothing is.

    Args:
        global_shape: Of the tensor.
        boxes: What is stored of it; they lie inside the shape.
        ranks: Whose each box is.
        idle: Ranks that name the tensor, and store nothing of it.
    """
    fault = coverage_fault(global_shape, boxes)
    if fault is None:
        return None
    filled = [(rank, box) for rank, box in zip(ranks, boxes, strict=True) if 0 not in box[1]]
    stored = [box for _, box in filled]
    may_look = len(stored) > 1 and is_affordable(stored, len(global_shape))
    twice = find_overlap(stored) if may_look else None
    if twice is not None:
        (one, first), (other, second) = filled[twice[0]], filled[twice[1]]
        return f"rank {one} stores {shown(first)} and rank {other} {shown(second)}: elements of both are stored twice"
    missing = missing_boxes(global_shape, stored)
    if not missing:
        return fault
    parts = [f"{shown(box)} is missing{_beside(box, filled)}" for box in missing[:MAX_BOXES]]
    if len(missing) > MAX_BOXES:
        parts.append(f"and {len(missing) - MAX_BOXES} more boxes")
    nothing = f"; {_naming(idle)} it without storing any of it" if idle else ""
    return f"{fault}: {', '.join(parts)}{nothing}"


def shown(box: Box) -> str:
    """Return a box as text: `[first:end,first:end]`."""
    runs = [f"{offset}:{offset + size}" for offset, size in zip(*box, strict=True)]
    return f"[{','.join(runs[:MAX_DIMS])}{',...' if len(runs) > MAX_DIMS else ''}]"


def missing_boxes(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> list[Box]:
    """Return boxes that hold every element that `boxes` do not; none when there are too many of them to tell."""
    missing: list[Box] = [((0,) * len(global_shape), global_shape)] if 0 not in global_shape else []
    for box in sorted(boxes):
        missing = [piece for old in missing for piece in _without(old, box)]
        if len(missing) > MAX_PIECES:
            return []
    return _joined(missing)


def _without(box: Box, cut: Box) -> list[Box]:
    """Return what is left of `box`, in at most two pieces for each dimension."""
    low = [max(o, p) for o, p in zip(box[0], cut[0], strict=True)]
    high = [min(o + s, p + t) for o, s, p, t in zip(*box, *cut, strict=True)]
    if any(start >= end for start, end in zip(low, high, strict=True)):
        return [box]
    left: list[Box] = []
    offsets, sizes = list(box[0]), list(box[1])
    for d, (start, end) in enumerate(zip(low, high, strict=True)):
        for first, last in ((offsets[d], start), (end, offsets[d] + sizes[d])):
            if last > first:
                before, after = tuple(offsets[:d]), tuple(offsets[d + 1 :])
                left.append(((*before, first, *after), (*sizes[:d], last - first, *sizes[d + 1 :])))
        offsets[d], sizes[d] = start, end - start
    return left


def _joined(boxes: list[Box]) -> list[Box]:
    """Join boxes that make one together: cutting takes holes apart along the boxes around them."""
    for d in range(len(boxes[0][0]) if boxes else 0):
        joined: list[Box] = []
        for offsets, sizes in sorted(boxes, key=lambda b, d=d: (_others(b, d), b[0][d])):  # type: ignore[misc]
            last = joined[-1] if joined else None
            is_alike = last is not None and _others(last, d) == _others((offsets, sizes), d)
            if last is not None and is_alike and last[0][d] + last[1][d] == offsets[d]:
                joined[-1] = (last[0], (*sizes[:d], last[1][d] + sizes[d], *sizes[d + 1 :]))
            else:
                joined.append((offsets, sizes))
        boxes = joined
    return sorted(boxes, key=lambda box: -math.prod(box[1]))


def _others(box: Box, d: int) -> tuple[tuple[int, ...], ...]:
    return box[0][:d], box[0][d + 1 :], box[1][:d], box[1][d + 1 :]


def _beside(hole: Box, filled: Sequence[tuple[int, Box]]) -> str:
    """Name those who hold what lies next to a hole."""
    found = [(rank, box) for rank, box in filled if _touch(hole, box)]
    shown_ = [f"rank {rank} holds {shown(box)}" for rank, box in found[:MAX_BESIDE]]
    if len(found) > MAX_BESIDE:
        shown_.append(f"{len(found) - MAX_BESIDE} more boxes are")
    return f" ({' and '.join(shown_)} beside it)" if shown_ else ""


def _touch(a: Box, b: Box) -> bool:
    """Whether two boxes that have no element in common share a face."""
    gaps = [max(o, p) - min(o + s, p + t) for o, s, p, t in zip(*a, *b, strict=True)]
    return gaps.count(0) == 1 and max(gaps, default=1) == 0


def _naming(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} names"
    text = ", ".join(map(str, ranks[:MAX_BESIDE]))
    more = f" and {len(ranks) - MAX_BESIDE} more" if len(ranks) > MAX_BESIDE else ""
    return f"ranks {text}{more} name"


PRIME = (1 << 61) - 1
"""Sums are taken modulo this, the largest Mersenne prime below the 64 bits of the hash."""

LANE_NBYTES = 10
"""Of one tensor in `Tally.sums`: 2**19 ranks are added up before a sum could run into the next one."""

KINDS_NBYTES = 16

Kind = tuple[str, str, tuple[int, ...]]
"""Stored name, dtype, global shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What one rank stores.

    Attributes:
        kinds: Digest of the stored names, dtypes and shapes of the tensors that are summed, in order.
        sums: Of each of them, `LANE_NBYTES`, little-endian.
    """

    kinds: bytes
    sums: bytes


def seed_of(save_id: SaveId) -> int:
    """Return the seed of all tallies of a run: a structure that fools one run fools no other."""
    return int(save_id.run_id, 16)


def tally_of(structure: bytes, rank: int, seed: int) -> Tally:
    """Add up what a structure stores of each tensor.

    A tensor that belongs to `rank` by its name, and is stored exactly once here, is left out.

    Args:
        structure: Of a rank; it is taken for one.
        rank: Whose it is.
        seed: Of the hash; equal on all ranks.

    Raises:
        ValueError, TypeError, KeyError, IndexError, OverflowError: It is obviously no structure.
    """
    return tally_of_tensors(tensors_in(structure), rank, seed)


def tensors_in(structure: bytes) -> Sequence[Any]:
    """Return the raw entries of a structure's tensors: name, dtype, shape, chunks (format/SPEC.md section 4).

    Raises:
        ValueError, TypeError, KeyError: It is obviously no structure.
    """
    found: Sequence[Any] = msgpack.unpackb(structure, strict_map_key=True, use_list=False)["tensors"]
    return found


def tally_of_tensors(tensors: Sequence[Any], rank: int, seed: int) -> Tally:
    """As `tally_of`, of what `tensors_in` returns.

    Raises:
        ValueError, TypeError, KeyError, IndexError, OverflowError: It is obviously no structure.
    """
    count = Counter(seed)
    kinds, sums = [], []
    for fqn, dtype, shape, chunks in tensors:
        found = count.chunks(shape, chunks)
        if is_of_rank(fqn, rank) and found == count.whole(shape):
            continue
        kinds.append((fqn, dtype, shape))
        sums.append(found.to_bytes(LANE_NBYTES, "little"))
    return Tally(kinds=_digest(kinds), sums=b"".join(sums))


def kinds_of(tensors: Iterable[Any], rank: int, tally: Tally, seed: int) -> list[Kind] | None:
    """Return the tensors that `tally` is of; None when it is not of these of `rank`."""
    count, kinds = Counter(seed), []
    for fqn, dtype, shape, chunks in tensors:
        if not is_of_rank(fqn, rank) or count.chunks(shape, chunks) != count.whole(shape):
            kinds.append((fqn, dtype, shape))
    fits = _digest(kinds) == tally.kinds and len(tally.sums) == len(kinds) * LANE_NBYTES
    return kinds if fits else None


def is_of_rank(fqn: str, rank: int | None = None) -> bool:
    """Whether a tensor belongs to a rank by its stored name: to `rank`, or to whichever."""
    if "@rank" not in fqn:
        return False
    found = split_per_rank_name(fqn)
    return found is not None and (rank is None or found[1] == rank)


def _digest(kinds: list[Kind]) -> bytes:
    return xxhash.xxh3_128_digest(msgpack.packb(kinds))


class Counter:
    """Counts boxes.

    Args:
        seed: Of the hash.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._wholes: dict[tuple[int, ...], int] = {}
        self._tails: dict[tuple[int, ...], int] = {}

    def whole(self, shape: tuple[int, ...]) -> int:
        """Return what the chunks of a tensor of this shape must add up to."""
        found = self._wholes.get(shape)
        if found is None:
            found = self._wholes[shape] = self._box((0,) * len(shape), shape)
        return found

    def chunks(self, shape: tuple[int, ...], chunks: Iterable[Any]) -> int:
        """Return what some chunks of a tensor add up to."""
        total = 0
        for chunk in chunks:
            if len(chunk) == 3:
                total += self.whole(shape)
                continue
            offsets, sizes = chunk[3], chunk[4]
            if len(offsets) != len(sizes) or len(sizes) != len(shape):
                raise ValueError(f"a chunk of {len(offsets)} dimensions of a tensor of shape {shape}")
            if sizes[1:] == shape[1:] and not any(offsets[1:]) and shape:  # rows: by far the most
                total += self._run(0, offsets[0], sizes[0]) * self._tail(shape) % PRIME
            else:
                total += self._box(offsets, sizes)
        return total % PRIME

    def _tail(self, shape: tuple[int, ...]) -> int:
        found = self._tails.get(shape)
        if found is None:
            found = self._tails[shape] = self._product((0,) * (len(shape) - 1), shape[1:], 1)
        return found

    def _box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        return self._product(offsets, sizes, 0)

    def _product(self, offsets: tuple[int, ...], sizes: tuple[int, ...], first: int) -> int:
        product = 1
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True), first):
            product = product * self._run(dim, offset, size) % PRIME
        return product

    def _run(self, dim: int, start: int, size: int) -> int:
        # Every dimension has its own seed: else a box and the transposed one would count alike.
        seed = self._seed + dim
        return _hash(start.to_bytes(8, "little"), seed) - _hash((start + size).to_bytes(8, "little"), seed)


_hash: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest


def suspects(tallies: Sequence[Tally], structures: Sequence[bytes], seed: int) -> set[str] | None:
    """Return the tensors that are not obviously stored exactly once; None: a tally is not of its rank's structure.

    Of tensors that belong to a rank by their name those are among them that another one stores, or several times.

    Args:
        tallies: Of every rank.
        structures: Of every rank; one of each kind is decoded.
        seed: That the tallies were made with.

    Raises:
        ValueError, TypeError, KeyError, IndexError, OverflowError: A structure is obviously none.
    """
    totals: dict[bytes, int] = {}
    first: dict[bytes, int] = {}
    for rank, tally in enumerate(tallies):
        # One addition of two large integers adds up all tensors of the rank.
        totals[tally.kinds] = totals.get(tally.kinds, 0) + int.from_bytes(tally.sums, "little")
        if len(tally.sums) != len(tallies[first.setdefault(tally.kinds, rank)].sums):
            return None
    count = Counter(seed)
    found: dict[str, tuple[Kind, int]] = {}
    odd: set[str] = set()
    for key, rank in first.items():
        kinds = kinds_of(tensors_in(structures[rank]), rank, tallies[rank], seed)
        if kinds is None:
            return None
        sums = totals[key].to_bytes(LANE_NBYTES * (len(kinds) + 1), "little")
        for n, kind in enumerate(kinds):
            total = int.from_bytes(sums[n * LANE_NBYTES : (n + 1) * LANE_NBYTES], "little")
            known = found.get(kind[0])
            if (known is not None and known[0] != kind) or is_of_rank(kind[0]):
                odd.add(kind[0])
            found[kind[0]] = kind, total + (known[1] if known is not None else 0)
    odd.update(fqn for fqn, (kind, total) in found.items() if total % PRIME != count.whole(kind[2]))
    return odd


_JUNK = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    OverflowError,
    msgpack.UnpackException,
)

MAX_LOCATED = 8
"""Tensors of which a fault is said with its place: a text names fewer, and looking takes time."""


def uncovered(
    structures: Sequence[bytes], tallies: Sequence[Tally] | None = None, *, seed: int = 0
) -> list[tuple[str, str]]:
    """Look for tensors that a reader would refuse.

    Each structure by itself is taken for one: who wrote the rank's files has decoded it (`decode_structure`). Of
    thousands of ranks, each with thousands of tensors, it would take too long here to do so once more. What the tallies
    say is whole is not looked at box by box; the rest is, and only that is kept in memory.

    Args:
        structures: Of every rank, as they will lie in the indexes.
        tallies: `tally_of` each of them, where that was made before: by whoever has decoded it.
        seed: That `tallies` were made with; 0 and up.

    Returns:
        Stored name and what is wrong, in the order of the ranks and their structures; nothing when all is well.

    Raises:
        CorruptCheckpointError: One of them is obviously no structure.
    """
    try:
        with no_collections():
            if tallies is None:
                tallies = [tally_of(data, rank, seed) for rank, data in enumerate(structures)]
            doubtful = suspects(tallies, structures, seed)
            if doubtful is not None and not doubtful:
                return []
            return _uncovered(structures, doubtful)
    except _JUNK as error:
        raise CorruptCheckpointError(f"the structure of a rank does not decode: {error}", detail=str(error)) from error


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from walking millions of tuples again and again, none of which is in a cycle.

    With it looking box by box took 1.6 microseconds a chunk for 200,000 of them and 3.2 for 2,000,000; without, 1.3 and
    1.7. Adding up took 3.4 of 256,000, and 1.9 without.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _uncovered(structures: Sequence[bytes], doubtful: set[str] | None) -> list[tuple[str, str]]:
    """Prove tensors box by box: those that are doubtful; None: all."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[Box]] = {}
    holders: dict[str, list[int]] = {}
    idle: dict[str, list[int]] = {}
    faults: dict[str, str] = {}
    for rank, data in enumerate(structures):
        for fqn, dtype, shape, here in tensors_in(data):
            if doubtful is not None and fqn not in doubtful:
                continue
            known = kinds.get(fqn)
            if known is None:
                kinds[fqn] = known = (dtype, shape)
                boxes[fqn], holders[fqn], idle[fqn] = [], [], []
            elif known[1] != shape or known[0] != dtype:
                faults.setdefault(fqn, _unlike(rank, dtype, shape, *known))
            for chunk in here:
                boxes[fqn].append(chunk[3:] if len(chunk) > 3 else ((0,) * len(shape), shape))
                holders[fqn].append(rank)
            if not here:
                idle[fqn].append(rank)
    for fqn, (_, shape) in kinds.items():
        if fqn not in faults:
            found = boxes.pop(fqn)
            fault = (
                located_fault(shape, found, holders[fqn], idle[fqn])
                if len(faults) < MAX_LOCATED
                else coverage_fault(shape, found)
            )
            if fault:
                faults[fqn] = fault
    return [(fqn, faults[fqn]) for fqn in kinds if fqn in faults]


def _unlike(rank: int, dtype: str, shape: Sequence[int], other_dtype: str, other_shape: Sequence[int]) -> str:
    text = f"rank {rank} has it as {dtype}{list(shape)}, "
    return text + f"an earlier one as {other_dtype}{list(other_shape)}"
