"""Plans which bytes of a shard file are read, and in which steps and extents. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol

from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import PAGE_NBYTES, round_up

EXTENT_NBYTES = 16 << 20
"""Most bytes of one O_DIRECT read. Measured with 1.5 GB on two cores: extents of 2 MiB and three threads, whose
buffers stay in the processor's cache, take 0.52 s on an idle machine and 1.0 s on a busy one, where a thread whose read
has ended waits for a core. Four threads with 16 MiB keep the disk busy meanwhile, and take 0.70 and 0.76 s. The disk
alone takes 0.42 s."""

STEP_NBYTES = 1 << 20
"""Bytes of one read from the page cache, and of a step, which is verified and copied at once: half of a usual L2
cache."""


BUFFERED_STEP_NBYTES = 2 << 20
"""Bytes of a step of ranges that are read through the page cache. On two cores, 1 MiB takes 9 % more processor time,
and 256 KiB a third more, because each step makes some calls into torch (ADR 0026)."""

BUFFERED_EXTENT_NBYTES = 4 << 20
"""Bytes of such ranges that one thread reads at a time. 8 and 16 MiB were slower with a cold cache: threads far apart
in the file profit less from each other's read-ahead."""

EXACT_BELOW_NBYTES = 128 << 10
"""Without checksums, shorter runs are read without the rest of their pages, which for longer ones is at most 6 %."""


READ_THROUGH_NBYTES = 256 << 10
"""With checksums, a gap between two ranges that is shorter is read too: one longer request is faster than two. Chosen:
at 100 MB/s such a gap takes 2.6 ms, the answer of an object store 10 to 100 ms."""


def with_verifiers(readers: int) -> int:
    """Return the number of threads with which `readers` threads read from the disk at any time (ADR 0038).

    If there were only `readers` threads, their reads would end together, and the disk would idle while all verify and
    copy: for 78 ms of a load of 480 ms (1.5 GB, two cores). With half as many more it does not idle.
    """
    return readers + readers // 2 if readers > 1 else 1


class Sink(Protocol):
    """Receives the verified bytes of one wanted range, in pieces, in any order, from several threads."""

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        """Receive bytes of the range.

        Args:
            position: Offset of the bytes in the range.
            address: Address of the bytes in memory, valid until this returns.
            nbytes: Number of bytes.
        """


class Wanted(NamedTuple):
    """A byte range of a shard file to read, or several of equal length.

    Ranges with `times` above 1 or with `every` are not verified.

    Attributes:
        offset, nbytes: The range.
        fqn: FQN of the tensor that it belongs to, for messages.
        sink: Where its bytes go: an address in memory, a `Sink`, or None to verify only.
        times: Number of ranges of `nbytes`, which begin `every` bytes apart. The sink gets them without gaps.
        every: With `times` of 1, the range consists of rows of `every` bytes, of which only some bytes are wanted. It
            is read through the page cache, because other processes of the machine want the other bytes. The sink gets
            whole rows, or pieces that begin at multiples of `BUFFERED_STEP_NBYTES` from `offset`.
        dense: All bytes of the rows are wanted. If the range is long enough, it is read like other ranges, and the sink
            gets pieces as with `every`, which never split an element.
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
    """The ranges to read of one shard file, which may overlap. `block_nbytes`: bytes of a block with one checksum."""

    shard: ShardRecord
    block_nbytes: int
    wanted: Sequence[Wanted]


class Batch(NamedTuple):
    """Ranges number `first` to `first + times - 1` of one `Wanted` with several ranges."""

    wanted: Wanted
    first: int
    times: int

    @property
    def nbytes(self) -> int:
        """Number of wanted bytes."""
        return self.times * self.wanted.nbytes

    @property
    def start(self) -> int:
        """Offset of the first range in the file."""
        return self.wanted.offset + self.first * self.wanted.every

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length of the bytes from the page of the first range to the end of the last one."""
        start = self.start // PAGE_NBYTES * PAGE_NBYTES
        return start, self.start + (self.times - 1) * self.wanted.every + self.wanted.nbytes - start


def plan_batches(request: ShardRequest) -> list[Batch]:
    """Divide each `Wanted` with several ranges into batches of about `STEP_NBYTES` wanted bytes."""
    batches = []
    for w in request.wanted:
        if w.times > 1 and w.nbytes:
            size = max(1, STEP_NBYTES // w.nbytes)
            batches += [Batch(w, first, min(size, w.times - first)) for first in range(0, w.times, size)]
    return batches


class Step(NamedTuple):
    """Bytes `start` to `end` of a file, which are verified and delivered at once, and the ranges that have some."""

    start: int
    end: int
    wanted: list[Wanted]


def plan_extents(
    request: ShardRequest,
    threads: int,
    *,
    unit: int,
    exact_below: int = 0,
    gaps_below: int = 1,
    extent_nbytes: int = EXTENT_NBYTES,
) -> list[list[Step]]:
    """Divide the wanted ranges of a file into steps, and group these into extents. Batches are not included.

    Args:
        request: The wanted ranges.
        threads: Number of reading threads. With several, extents of small requests are shorter, so that each thread has
            some.
        unit: Steps begin and end at multiples of this number of bytes, or at the end of the file.
        exact_below: A run of wanted bytes that is shorter than this, and at least a unit away from others, is not
            extended to multiples of `unit`.
        gaps_below: An extent may have gaps between its steps that are shorter than this.
        extent_nbytes: Largest length of an extent with more than one step.

    Returns:
        The extents, each a list of steps in order; those of ranges in rows come last. No byte is in two steps, and no
        unit without wanted bytes is in one.
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
        if last and step.start - last[-1].end < gaps_below and step.end - last[0].start <= limit:
            last.append(step)
        else:
            extents.append([step])
    in_rows = sorted((w for w in request.wanted if w.times == 1 and w.every and w.nbytes), key=itemgetter(0))
    dense = [w for w in in_rows if not _is_buffered(w)]
    buffered = [w for w in in_rows if _is_buffered(w)]
    return extents + _plan_rows(dense, threads, extent_nbytes) + _plan_rows(buffered, threads, BUFFERED_EXTENT_NBYTES)


def is_buffered(steps: Sequence[Step]) -> bool:
    """Whether an extent is read through the page cache from start to end, because it has rows with unwanted bytes."""
    return bool(steps) and any(w.every and _is_buffered(w) for w in steps[0].wanted)


def has_buffered_rows(request: ShardRequest) -> bool:
    """Whether an extent of this file is read as `is_buffered` says."""
    return any(w.every and w.times == 1 and _is_buffered(w) for w in request.wanted)


def _is_buffered(w: Wanted) -> bool:
    return w.every > 0 and not (w.dense and w.nbytes >= EXACT_BELOW_NBYTES)  # short dense rows: fewer calls this way


def _plan_rows(wanted: Sequence[Wanted], threads: int, extent_nbytes: int) -> list[list[Step]]:
    """Divide ranges in rows, which are sorted by offset, into steps, and group these into extents."""
    limit = min(extent_nbytes, sum(w.nbytes for w in wanted) // (2 * threads))
    extents: list[list[Step]] = []
    for w in wanted:
        end, joins = w.offset + w.nbytes, _is_buffered(w)
        for low, high in itertools.pairwise((*_cuts(w), end)):
            step, last = Step(low, high, [w]), extents[-1] if extents else []
            if last and step.end - last[0].start <= limit and (joins or step.start == last[-1].end):
                last.append(step)
            else:
                extents.append([step])
    return extents


def _cuts(w: Wanted) -> Iterable[int]:
    """Return the offsets at which the steps of a range in rows begin."""
    end, size = w.offset + w.nbytes, BUFFERED_STEP_NBYTES
    if w.every > size or not _is_buffered(w):
        return range(w.offset, end, size // w.every * w.every or size)
    # At the last row before each multiple of `size` in the file, so that threads do not share pages.
    edges = range((w.offset // size + 1) * size, end, size)
    return dict.fromkeys((w.offset, *(edge - (edge - w.offset) % w.every for edge in edges)))


def buffer_nbytes(steps: Sequence[Step]) -> int:
    """Return the size of the buffer for an extent, in bytes: whole pages of the file."""
    if is_buffered(steps):
        return max(step.end - step.start for step in steps)
    return round_up(steps[-1].end) - steps[0].start // PAGE_NBYTES * PAGE_NBYTES


def pages_of(start: int, end: int, file_nbytes: int) -> tuple[int, int]:
    """Return offset and length of the pages of a file with bytes `start` to `end`; for a short run only these bytes."""
    if end - start < EXACT_BELOW_NBYTES:
        return start, end - start
    low = start // PAGE_NBYTES * PAGE_NBYTES
    return low, min(round_up(end), file_nbytes) - low


def _runs(wanted: Sequence[Wanted], unit: int, exact_below: int) -> list[tuple[int, int]]:
    """Return (start, end) of disjoint runs: ranges less than a unit apart are joined, and ends rounded to units."""
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
    for w in wanted:  # sorted by offset, as the steps are
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
    """Return the FQNs of some ranges as text, for messages."""
    names = list(dict.fromkeys(w.fqn for w in wanted))
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
