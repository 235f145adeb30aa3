"""Coverage by arithmetic: what a rank stores of each tensor as one number; those of all ranks add up to a known one.

Every coordinate of every dimension has a number of its own, drawn by a hash. A run of elements counts as the number of
its start less that of its end, a box as the product over its dimensions. Where boxes meet, what lies between them
cancels out; so those that hold every element of a tensor exactly once add up to what a single box of its shape counts,
however they are cut, and in whatever order they come. Any others do so by chance only, about once in 2**58 (ADR 0018).
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from asyncckpt.format.names import SaveId, split_per_rank_name

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
