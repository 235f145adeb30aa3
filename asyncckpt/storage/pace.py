"""How many threads read or write a device, and how much each takes at a time: learnt from what loads and saves took.

Nothing is written or read to find out. The first operations on a device go as the default says; then each of a few
others has its turn, and is kept only where it was clearly faster. So the worst that learning costs is one operation
for each of the others. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

SAMPLE_NBYTES = 256 << 20
"""Operations on less say nothing about a device: opening files and waking threads count for too much. Chosen."""

ENOUGH = 2
"""Times that something must have been tried before it can be preferred."""

KEPT = 5
"""Latest samples of each choice that count."""

GAIN = 1.1
"""So much faster than the default the median of another choice must be. Chosen, not measured (ADR 0028)."""


class Pace(NamedTuple):
    """Threads, and the bytes that one of them takes at a time."""

    threads: int
    extent_nbytes: int


class Sample(NamedTuple):
    """What one operation reached, and when it ended (seconds since the epoch)."""

    pace: Pace
    bytes_per_s: float
    at: float


def best_pace(paces: Sequence[Pace], samples: Sequence[Sample]) -> Pace:
    """Return what the next operation should go at.

    Args:
        paces: The default, then the others.
        samples: Of one device, the oldest first.
    """
    rates = {pace: [s.bytes_per_s for s in samples if s.pace == pace][-KEPT:] for pace in paces}
    default, others = paces[0], paces[1:]
    if len(rates[default]) < ENOUGH:
        return default
    usual = statistics.median(rates[default])
    for pace in others:
        if not rates[pace] or (len(rates[pace]) < ENOUGH and rates[pace][0] > usual):
            return pace
    tried = [pace for pace in others if len(rates[pace]) >= ENOUGH]
    best = max(tried, key=lambda pace: statistics.median(rates[pace]), default=default)
    return best if best != default and statistics.median(rates[best]) > GAIN * usual else default


def kept_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that still count, the oldest first."""
    left: dict[Pace, int] = {}
    kept = []
    for sample in reversed(samples):
        left[sample.pace] = left.get(sample.pace, KEPT) - 1
        if left[sample.pace] >= 0:
            kept.append(sample)
    return kept[::-1]
