"""Which bytes of a shard file to read, and in which pieces. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol

from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import PAGE_NBYTES, round_up

EXTENT_NBYTES = 16 << 20
"""One O_DIRECT read. Measured with 1.5 GB on two cores: extents of 2 MiB and three threads, whose buffers stay in the
processor's cache, take 0.52 s on an idle machine and 1.0 s on a busy one, where every read that is done waits for a
core; four threads of 16 MiB keep the disk supplied meanwhile and take 0.70 and 0.76 s. The disk alone: 0.42 s."""

STEP_NBYTES = 1 << 20
"""One read from the page cache, and the piece that is verified and copied at once: half of a usual L2 cache."""


THROUGH_STEP_NBYTES = 2 << 20
"""One read of what is read through, and the piece that is handed on at once. On two cores 1 MiB takes 9 % more time
of the processor, 256 KiB a third more: each piece costs some calls into torch (ADR 0026)."""

THROUGH_EXTENT_NBYTES = 4 << 20
"""What one thread reads through at a time. Longer ones, of 8 and 16 MiB, were slower when cold: threads that are far
apart find less of what others have brought in."""

EXACT_BELOW_NBYTES = 128 << 10
"""Shorter runs are read by their own ends, without checksums; the pages around longer ones are 6 % more at most."""


def with_verifiers(readers: int) -> int:
    """Return how many threads it takes so that `readers` of them read from the disk at any time (ADR 0038).

    If there are no others, their reads share the disk and end together, and it idles while all verify and copy: 78 ms
    of a load of 480 (1.5 GB, two cores). With half as many more it idles for none.
    """
    return readers + readers // 2 if readers > 1 else 1


class Sink(Protocol):
    """Takes the verified bytes of one wanted range, in pieces, in any order, from several threads."""

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        """Take `nbytes` at `address`, which belong at `position` of the range; they are gone afterwards."""


class Wanted(NamedTuple):
    """A byte range of a shard file, whose it is, and where it goes: an address, a `Sink`, or None to verify only.

    With `times` there are as many ranges of `nbytes`, `every` bytes apart; they go to the sink one behind the other.
    Such are not verified.

    One range with `every` holds wanted bytes and others, in rows of `every` bytes: it is read through the page cache,
    for the others are what other processes of the machine want, and comes in whole rows, or in pieces whose distance
    from `offset` is a multiple of `THROUGH_STEP_NBYTES`. Not verified either.

    With `dense` all of its bytes are wanted: such rows, of some length, are read as other ranges are, and come in the
    same pieces, so that none cuts an element wherever in the file that begins.
    """

    offset: int
    nbytes: int
    fqn: str
    sink: int | Sink | None
    times: int = 1
    every: int = 0
    dense: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRequest:
    """What is wanted of one shard file. Ranges may overlap; `block_nbytes` is its rank's unit of checksum."""

    shard: ShardRecord
    block_nbytes: int
    wanted: Sequence[Wanted]


class Batch(NamedTuple):
    """Some of the ranges of one `Wanted`: `times` of them from the `first` on."""

    wanted: Wanted
    first: int
    times: int

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.times * self.wanted.nbytes

    @property
    def start(self) -> int:
        """Offset of the first of them in the file."""
        return self.wanted.offset + self.first * self.wanted.every

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length of all of them with what lies between, from the beginning of a page."""
        start = self.start // PAGE_NBYTES * PAGE_NBYTES
        return start, self.start + (self.times - 1) * self.wanted.every + self.wanted.nbytes - start


def plan_batches(request: ShardRequest) -> list[Batch]:
    """Cut what is wanted in several ranges into batches of about `STEP_NBYTES`."""
    batches = []
    for w in request.wanted:
        if w.times > 1 and w.nbytes:
            size = max(1, STEP_NBYTES // w.nbytes)
            batches += [Batch(w, first, min(size, w.times - first)) for first in range(0, w.times, size)]
    return batches


class Step(NamedTuple):
    """Bytes that are verified and handed on at once, and the ranges that want some of them."""

    start: int
    end: int
    wanted: list[Wanted]


def plan_extents(
    request: ShardRequest, threads: int, *, unit: int, exact_below: int = 0, extent_nbytes: int = EXTENT_NBYTES
) -> list[list[Step]]:
    """Cut what is wanted of a file into steps, and group them into extents.

    Args:
        request: The ranges that are wanted.
        threads: How many readers there are: for several, small requests are cut finer, so that each has something to
            do.
        unit: Every step begins at a multiple of it, and ends there or at the end of the file. In bytes.
        exact_below: A run of wanted bytes that is shorter, and a unit or more from others, keeps its own ends.
        extent_nbytes: No extent is longer, unless a step is.

    Returns:
        Extents of consecutive steps, of all that is wanted in one range each. No byte is read twice; no unit is read
        that nobody wants. Behind them, those of ranges that come in rows, each for itself.
    """
    step_nbytes = max(unit, STEP_NBYTES // unit * unit)
    steps = _steps(request, unit, step_nbytes, exact_below)
    limit = extent_nbytes
    if threads > 1:
        limit = min(limit, sum(step.end - step.start for step in steps) // (2 * threads))
    limit = max(step_nbytes, limit)
    extents: list[list[Step]] = []
    for step in steps:
        last = extents[-1] if extents else []
        if last and last[-1].end == step.start and step.end - last[0].start <= limit:
            last.append(step)
        else:
            extents.append([step])
    in_rows = sorted((w for w in request.wanted if w.times == 1 and w.every and w.nbytes), key=itemgetter(0))
    dense = [w for w in in_rows if not _is_through(w)]
    through = [w for w in in_rows if _is_through(w)]
    return extents + _plan_rows(dense, threads, extent_nbytes) + _plan_rows(through, threads, THROUGH_EXTENT_NBYTES)


def is_through(steps: Sequence[Step]) -> bool:
    """Whether an extent is of ranges that are read through: one thread reads it front to back."""
    return bool(steps) and any(w.every and _is_through(w) for w in steps[0].wanted)


def reads_through(request: ShardRequest) -> bool:
    """Whether something of a file is read through."""
    return any(w.every and w.times == 1 and _is_through(w) for w in request.wanted)


def _is_through(w: Wanted) -> bool:
    return w.every > 0 and not (w.dense and w.nbytes >= EXACT_BELOW_NBYTES)  # a call for each short one costs more


def _plan_rows(wanted: Sequence[Wanted], threads: int, extent_nbytes: int) -> list[list[Step]]:
    """Cut ranges that come in rows into steps, and group them into extents, each for one thread; by their offsets."""
    limit = min(extent_nbytes, sum(w.nbytes for w in wanted) // (2 * threads))
    extents: list[list[Step]] = []
    for w in wanted:
        end, joins = w.offset + w.nbytes, _is_through(w)
        for low, high in itertools.pairwise((*_cuts(w), end)):
            step, last = Step(low, high, [w]), extents[-1] if extents else []
            if last and step.end - last[0].start <= limit and (joins or step.start == last[-1].end):
                last.append(step)
            else:
                extents.append([step])
    return extents


def _cuts(w: Wanted) -> Iterable[int]:
    """Return where the steps of a range in rows begin."""
    end, size = w.offset + w.nbytes, THROUGH_STEP_NBYTES
    if w.every > size or not _is_through(w):
        return range(w.offset, end, size // w.every * w.every or size)
    # At the last row before each unit of the file: then a step needs no page of a unit that is another thread's.
    edges = range((w.offset // size + 1) * size, end, size)
    return dict.fromkeys((w.offset, *(edge - (edge - w.offset) % w.every for edge in edges)))


def buffer_nbytes(steps: Sequence[Step]) -> int:
    """Return the bytes of buffer that an extent takes, whole pages of the file."""
    if is_through(steps):
        return max(step.end - step.start for step in steps)
    return round_up(steps[-1].end) - steps[0].start // PAGE_NBYTES * PAGE_NBYTES


def pages_of(start: int, end: int, file_nbytes: int) -> tuple[int, int]:
    """Return offset and length of the whole pages of a file that hold a run, or of a short one the run itself."""
    if end - start < EXACT_BELOW_NBYTES:
        return start, end - start
    low = start // PAGE_NBYTES * PAGE_NBYTES
    return low, min(round_up(end), file_nbytes) - low


def _runs(wanted: Sequence[Wanted], unit: int, exact_below: int) -> list[tuple[int, int]]:
    """Join ranges that lie less than a unit apart, then round the ends of runs to units: they stay disjoint."""
    runs: list[list[int]] = []
    for w in wanted:
        end = w.offset + w.nbytes
        if runs and w.offset - runs[-1][1] < unit:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([w.offset, end])
    return [
        (start, end) if end - start < exact_below else (start // unit * unit, round_up(end, unit))
        for start, end in runs
    ]


def _steps(request: ShardRequest, unit: int, step_nbytes: int, exact_below: int) -> list[Step]:
    wanted = sorted([w for w in request.wanted if w.nbytes and w.times == 1 and not w.every], key=itemgetter(0))
    steps: list[Step] = []
    for start, end in _runs(wanted, unit, exact_below):
        stop = min(end, request.shard.nbytes)
        cuts = [start, *range((start // step_nbytes + 1) * step_nbytes, stop, step_nbytes), stop]
        steps += [Step(low, high, []) for low, high in itertools.pairwise(cuts)]
    first = 0
    for w in wanted:  # by their offsets, as the steps are
        start, end = w.offset, w.offset + w.nbytes
        while steps[first].end <= start:
            first += 1
        steps[first].wanted.append(w)
        at = first + 1
        while at < len(steps) and steps[at].start < end:
            steps[at].wanted.append(w)
            at += 1
    return steps


def fqns_of(wanted: Sequence[Wanted]) -> str:
    """Return whose ranges they are, for a message."""
    names = list(dict.fromkeys(w.fqn for w in wanted))
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
