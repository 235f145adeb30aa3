"""Which replicas, and which bytes of them, are compared at a save: a rotation that all ranks know. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from asyncckpt.planning.contributions import TensorKey

WINDOW_NBYTES = 4096
"""Compared of one tensor at one save; a multiple of every itemsize. Chosen, not measured."""

SAMPLE_LIMIT = 2048
"""Tensors compared at one save. Chosen: 2,000 windows take 6 to 9 ms of one core where no cache holds them, 500 of them
1.2 ms, and of 20,000 replicas 2,000 at each save 8 ms."""


class Turn(NamedTuple):
    """When a replica is compared: at saves whose sequence leaves `position` over when divided by `period`."""

    position: int
    period: int


class Window(NamedTuple):
    """`n` elements from `start` on, in row-major order."""

    start: int
    n: int


def turns_of(holders: Mapping[TensorKey, frozenset[int]], limit: int) -> dict[TensorKey, Turn]:
    """Give every replica its turn.

    All holders of a replica must compare it at the same saves, and no rank should compare many more than `limit`: a
    replica's period is that of its holder which has most to compare.

    Args:
        holders: Of each replica.
        limit: A rank compares at most so many at a save, and one more for each set of holders that it is in.
    """
    sets: dict[frozenset[int], list[TensorKey]] = {}
    for key in sorted(holders):
        sets.setdefault(holders[key], []).append(key)
    n_held: dict[int, int] = {}
    for ranks, keys in sets.items():
        for rank in ranks:
            n_held[rank] = n_held.get(rank, 0) + len(keys)
    turns: dict[TensorKey, Turn] = {}
    for ranks, keys in sets.items():
        period = -(-max(n_held[rank] for rank in ranks) // limit)
        turns.update((key, Turn(n % period, period)) for n, key in enumerate(keys))
    return turns


def window_of(turn: Turn, n_elements: int, itemsize: int, sequence: int) -> Window | None:
    """Return what is compared of a replica at save `sequence`; None when it has no turn, or no elements.

    Successive turns visit all its windows before the first comes again, far from one another.
    """
    if not n_elements or sequence % turn.period != turn.position:
        return None
    per_window = WINDOW_NBYTES // itemsize
    if n_elements <= per_window:
        return Window(0, n_elements)
    n_windows = -(-n_elements // per_window)
    start = (sequence // turn.period * stride_of(n_windows)) % n_windows * per_window
    return Window(start, min(per_window, n_elements - start))


@functools.cache
def stride_of(n_windows: int) -> int:
    """Return a step that visits all windows: about the golden section of them, without a common divisor."""
    return next(n for n in itertools.count(max(1, int(n_windows * 0.618))) if math.gcd(n, n_windows) == 1)
