"""Which replicas, and which bytes of them, the ranks compare at which save: in rotation, equal on all ranks. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from asyncckpt.planning.contributions import TensorKey

WINDOW_NBYTES = 4096
"""Bytes of a tensor that are compared at one save; a multiple of every itemsize. Chosen, not measured."""

SAMPLE_LIMIT = 2048
"""Number of tensors that are compared at one save. Chosen: if they are in no cache, 2,000 windows take 6 to 9 ms of one
core, 500 windows 1.2 ms, and 2,000 of 20,000 replicas at each save 8 ms."""


class SampleSchedule(NamedTuple):
    """When a replica is compared: at every save with `sequence % period == position`."""

    position: int
    period: int


class Window(NamedTuple):
    """`n` elements of a tensor from the one with index `start` on, in row-major order."""

    start: int
    n: int


def assign_schedules(holders: Mapping[TensorKey, frozenset[int]], limit: int) -> dict[TensorKey, SampleSchedule]:
    """Return the schedule of every replica.

    All holders of a replica must compare it at the same saves, and no rank should compare many more than `limit`. So
    the period of a replica is determined by the holder that holds the most replicas.

    Args:
        holders: For each replica, the ranks that hold it.
        limit: Number of replicas that a rank compares at one save. Rounding adds up to one for each set of holders that
            the rank is in.
    """
    sets: dict[frozenset[int], list[TensorKey]] = {}
    for key in sorted(holders):
        sets.setdefault(holders[key], []).append(key)
    n_held: dict[int, int] = {}
    for ranks, keys in sets.items():
        for rank in ranks:
            n_held[rank] = n_held.get(rank, 0) + len(keys)
    schedules: dict[TensorKey, SampleSchedule] = {}
    for ranks, keys in sets.items():
        period = -(-max(n_held[rank] for rank in ranks) // limit)
        schedules.update((key, SampleSchedule(n % period, period)) for n, key in enumerate(keys))
    return schedules


def window_of(schedule: SampleSchedule, n_elements: int, itemsize: int, sequence: int) -> Window | None:
    """Return the window of a replica that is compared at save `sequence`; None: it is not compared at that save.

    All windows of a replica are compared before the first one is compared again; successive windows are far apart.
    """
    if not n_elements or sequence % schedule.period != schedule.position:
        return None
    per_window = WINDOW_NBYTES // itemsize
    if n_elements <= per_window:
        return Window(0, n_elements)
    n_windows = -(-n_elements // per_window)
    start = (sequence // schedule.period * stride_of(n_windows)) % n_windows * per_window
    return Window(start, min(per_window, n_elements - start))


@functools.cache
def stride_of(n_windows: int) -> int:
    """Return the distance between successive windows: about 0.618 of their number, and coprime to it, so that all are
    visited.
    """
    return next(n for n in itertools.count(max(1, int(n_windows * 0.618))) if math.gcd(n, n_windows) == 1)
