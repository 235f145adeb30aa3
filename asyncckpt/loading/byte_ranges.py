"""Which byte ranges of which files hold the requested part of a saved tensor, and which tensors they are read into.

The requested part of a row-major chunk is a set of runs of bytes. Two runs are read as one range if the gap between
them is shorter than the unit of reading (a page, or a block with one checksum), since no whole unit could be skipped;
with checksums also if it is shorter than `READ_THROUGH_NBYTES`. So the number of ranges is bounded by the length of the
chunk in units.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ConfigError
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.format.structure import Chunk, row_major
from asyncckpt.loading.tensor_writers import BoxWriter, flat_start, takes_bytes
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.read_plan import EXACT_BELOW_NBYTES, READ_THROUGH_NBYTES, Sink, Wanted
from asyncckpt.torch_tensors import torch_dtype

MAX_RANGES = 65_536
"""Maximum number of ranges of one chunk. If there would be more, whole blocks are read. Chosen, not measured."""


class Region(NamedTuple):
    """The elements of a tensor that slices select.

    Attributes:
        offsets, counts, steps: In each dimension, the first index, the number of indices and their distance.
        shape: Shape of the result. As in indexing, a dimension that an int selects from is dropped.
    """

    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a region within one chunk, in elements.

    Attributes:
        start, length: The range of the chunk to read, gaps included.
        offsets, sizes: The box that the requested elements form in the result of the region.
        strides: Strides of the requested elements in the range; with several ranges, in the concatenated ranges.
        times: Number of ranges.
        every: Distance from the start of one range to the start of the next.
    """

    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    times: int = 1
    every: int = 0


def region_of(slices: Any, shape: tuple[int, ...], fqn: str) -> Region:
    """Return the region that `slices` select of a tensor of `shape`, with the rules of indexing.

    Args:
        slices: An int, a slice with a positive step, `...`, or a tuple or list of them; None selects everything.
        shape: Shape of the tensor, in elements.
        fqn: The tensor's name, for messages.

    Raises:
        ConfigError: Too many dimensions, an int out of range, a step below 1, or anything else.
    """
    wanted = [] if slices is None else list(slices) if isinstance(slices, (tuple, list)) else [slices]
    n_ellipses = sum(item is Ellipsis for item in wanted)
    if n_ellipses > 1 or len(wanted) - n_ellipses > len(shape):
        raise _refused(slices, fqn, f"the tensor has {len(shape)} dimensions")
    at = next((n for n, item in enumerate(wanted) if item is Ellipsis), len(wanted))
    rest = [slice(None)] * (len(shape) - len(wanted) + n_ellipses)
    full = wanted[:at] + rest + wanted[at + n_ellipses :]
    offsets, counts, steps, result = [], [], [], []
    for dim, (item, n) in enumerate(zip(full, shape, strict=True)):
        if isinstance(item, slice):
            try:
                start, stop, step = item.indices(n)
            except (TypeError, ValueError) as error:
                raise _refused(slices, fqn, str(error)) from error
            if step < 1:
                raise _refused(slices, fqn, f"step {step} of dimension {dim} is not positive")
            count = len(range(start, stop, step))
            result.append(count)
        else:
            start, count, step = _position(item, n, dim, slices, fqn), 1, 1
        offsets.append(start)
        counts.append(count)
        steps.append(step)
    return Region(tuple(offsets), tuple(counts), tuple(steps), tuple(result))


def slab_slices(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Any, ...]]:
    """Yield slices that cut a tensor into boxes of at most `limit` elements, each a run of its row-major order."""
    row = math.prod(shape[1:])
    if not shape or row * shape[0] <= limit:
        yield (...,)
    elif row <= limit:
        step = limit // row
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)
    else:
        for n in range(shape[0]):
            for inner in slab_slices(shape[1:], limit):
                yield (slice(n, n + 1), *inner)


def _position(item: Any, n: int, dim: int, slices: Any, fqn: str) -> int:
    try:
        position = operator.index(item) if not isinstance(item, bool) else None
    except TypeError:
        position = None
    if position is None:
        raise _refused(slices, fqn, f"{item!r} of dimension {dim} is no int, slice or ...")
    if not -n <= position < n:
        raise _refused(slices, fqn, f"index {position} is out of range for dimension {dim} of size {n}")
    return position + n if position < 0 else position


def _refused(slices: Any, fqn: str, why: str) -> ConfigError:
    return ConfigError(f"slices={slices!r} of tensor {fqn!r}: {why}", field="slices", value=repr(slices)[:200])


def pieces_of(chunk: Chunk, region: Region, *, itemsize: int, unit: int, exact_below: int = 0) -> Iterator[Piece]:
    """Yield the pieces of `chunk` that lie in a region.

    Args:
        chunk: A chunk of a tensor.
        region: The requested region of the same tensor.
        itemsize: Bytes of an element.
        unit: Runs with a shorter gap between them, in bytes, are joined into one piece.
        exact_below: Evenly spaced runs that are shorter, in bytes, become one piece with several ranges.

    Yields:
        Pieces that together cover every requested element of the chunk once.
    """
    low = [max(0, -((o - c) // step)) for o, c, step in zip(region.offsets, chunk.offsets, region.steps, strict=True)]
    high = [
        min(count, -((o - c - size) // step))
        for o, count, step, c, size in zip(
            region.offsets, region.counts, region.steps, chunk.offsets, chunk.sizes, strict=True
        )
    ]
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return
    strides = row_major(chunk.sizes)
    first = sum(
        (o + lo * step - c) * stride
        for o, lo, step, c, stride in zip(region.offsets, low, region.steps, chunk.offsets, strides, strict=True)
    )
    distances = tuple(stride * step for stride, step in zip(strides, region.steps, strict=True))
    cutter = _Cutter(distances, unit / itemsize, exact_below // itemsize)
    yield from cutter.cut(first, tuple(low), tuple(h - lo for lo, h in zip(low, high, strict=True)))


def pieces_to_read(
    chunk: Chunk, region: Region, *, itemsize: int, block_nbytes: int, verify: bool, unit: int = PAGE_NBYTES
) -> Sequence[Piece]:
    """Return the pieces of `chunk` to read for a region.

    Args:
        chunk, region, itemsize: The arguments of `pieces_of`.
        block_nbytes: Bytes of a block, which has one checksum.
        verify: Whether whole blocks are read. If not, runs with a gap shorter than `unit` are joined.
        unit: A number of bytes: at least a page, since no storage reads less.
    """
    whole = whole_chunk_piece(chunk, region)
    if whole is not None:
        return [whole] if whole.length else []
    if not verify:
        exact = pieces_of(chunk, region, itemsize=itemsize, unit=unit, exact_below=EXACT_BELOW_NBYTES)
        found = list(itertools.islice(exact, MAX_RANGES + 1))
        if len(found) <= MAX_RANGES:
            return found
    return list(pieces_of(chunk, region, itemsize=itemsize, unit=max(block_nbytes, READ_THROUGH_NBYTES)))


def chunks_near(
    chunks: Iterable[tuple[int, Chunk]], region: Region, shape: tuple[int, ...]
) -> Iterable[tuple[int, Chunk]]:
    """Return those of a tensor's (rank, chunk) pairs that overlap a region in the dimension that it restricts most.

    A quick filter, which may return chunks that do not overlap the region: each of a thousand tensors may have
    thousands of chunks.
    """
    if not shape or 0 in region.counts:
        return chunks
    dim = max(range(len(shape)), key=lambda d: shape[d] / region.counts[d])
    low = region.offsets[dim]
    end = low + (region.counts[dim] - 1) * region.steps[dim] + 1
    if low == 0 and end == shape[dim]:
        return chunks
    return [c for c in chunks if c[1].offsets[dim] < end and c[1].offsets[dim] + c[1].sizes[dim] > low]


def whole_chunk_piece(chunk: Chunk, region: Region) -> Piece | None:
    """Return a whole chunk as one piece if it lies in the region, which must have no steps; else None."""
    offsets = []
    for o, count, step, c, size in zip(
        region.offsets, region.counts, region.steps, chunk.offsets, chunk.sizes, strict=True
    ):
        if step != 1 or c < o or c + size > o + count:
            return None
        offsets.append(c - o)
    return Piece(0, math.prod(chunk.sizes), tuple(offsets), chunk.sizes, row_major(chunk.sizes))


def whole_region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Region:
    """Return a box as a region."""
    return Region(offsets, sizes, (1,) * len(sizes), sizes)


class _Cutter:
    """Cuts the requested elements of a chunk into pieces, at wide gaps. Lengths are in elements.

    Args:
        strides: Strides of the requested elements in the chunk.
        unit: Minimum length of a wide gap.
        exact_below: Shorter runs that are evenly spaced become one piece with several ranges.
    """

    def __init__(self, strides: tuple[int, ...], unit: float, exact_below: int) -> None:
        self._strides, self._unit, self._exact_below = strides, unit, exact_below

    def cut(self, start: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Piece]:
        strides = self._strides
        dim = next((d for d, n in enumerate(sizes) if n > 1), None)
        if dim is None or self._widest_gap(sizes) < self._unit:
            yield Piece(start, _span(sizes, strides), offsets, sizes, strides)
            return
        one = (*sizes[:dim], 1, *sizes[dim + 1 :])
        run, every = _span(one, strides), strides[dim]
        if run < self._exact_below and self._widest_gap(one) < self._unit:
            packed = (*strides[:dim], run, *strides[dim + 1 :])
            yield Piece(start, run, offsets, sizes, packed, sizes[dim], every)
            return
        for at in range(sizes[dim]):
            yield from self.cut(start + at * every, (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), one)

    def _widest_gap(self, sizes: tuple[int, ...]) -> int:
        """Return the length of the widest gap between neighbouring elements of a box, in any dimension."""
        widest, inner = 0, 1
        for size, stride in zip(sizes[::-1], self._strides[::-1], strict=True):
            if size > 1:
                widest = max(widest, stride - inner)
                inner += (size - 1) * stride
        return widest


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a box, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


THROUGH_GAPS_BELOW_NBYTES = 16 << 10
"""For files without checksums: narrower gaps are read too and dropped when the rest is copied, which takes less time
than one system call for each run. Measured on two cores: equal times for runs of 8 KiB that are 8 KiB apart."""


class Placement(NamedTuple):
    """A box of a saved tensor, and the plain tensor that it is read into.

    Attributes:
        saved: The saved tensor.
        target: The plain tensor, which has the shape of the box.
        offsets: Offsets of the box in the saved tensor, in elements.
        address: Address in the target to which the stored bytes of the whole tensor can be read without conversion;
            None: not determined.
    """

    saved: SavedTensor
    target: torch.Tensor
    offsets: tuple[int, ...]
    address: int | None = None

    @property
    def region(self) -> Region:
        """The part of the saved tensor that is read."""
        return whole_region(self.offsets, tuple(self.target.shape))


def ranges_by_file(
    contents: Contents, placements: Iterable[Placement], verify: bool
) -> dict[tuple[int, int], list[Wanted]]:
    """Return the byte ranges that all placements need, by file; a file is named by (rank, part)."""
    found: defaultdict[tuple[int, int], list[Wanted]] = defaultdict(list)
    for placement in placements:
        (fqn, dtype_name, shape, chunks), target, _, address = placement
        rank, (part, offset_bytes, nbytes, _, sizes) = chunks[0]
        if address is not None and sizes == shape:
            found[rank, part].append(Wanted(offset_bytes, nbytes, fqn, address))
            continue
        if sizes == shape == target.shape and takes_bytes(target, torch_dtype(dtype_name)):  # as in `ranges_of`
            found[rank, part].append(Wanted(offset_bytes, nbytes, fqn, target.data_ptr()))
            continue
        for file, wanted in ranges_of(contents, placement, verify):
            found[file].append(wanted)
    return found


def ranges_of(contents: Contents, placement: Placement, verify: bool) -> Iterable[tuple[tuple[int, int], Wanted]]:
    """Return ((rank, part), range of that file) for one placement, whose target must stay alive until they are read."""
    (fqn, dtype_name, shape, chunks), target, _, _ = placement
    dtype, (rank, (part, offset_bytes, nbytes, _, sizes)) = torch_dtype(dtype_name), chunks[0]
    if sizes == shape == target.shape and takes_bytes(target, dtype):  # the usual case, without the calculations
        return (((rank, part), Wanted(offset_bytes, nbytes, fqn, target.data_ptr())),)
    return wanted_ranges(contents, placement.saved, placement.region, target, dtype, verify=verify)


def wanted_ranges(
    contents: Contents, saved: SavedTensor, region: Region, target: torch.Tensor, dtype: torch.dtype, *, verify: bool
) -> Iterator[tuple[tuple[int, int], Wanted]]:
    """Yield ((rank, part), range of that file) for the ranges that hold a region of a tensor.

    Args:
        contents, saved: The checkpoint, and the saved tensor.
        region: The requested region.
        target: The tensor to fill; its shape is the `counts` of the region.
        dtype: Dtype of the stored elements, or another dtype of the same width if the target has that dtype.
        verify: Whether whole blocks are read, so that their checksums can be compared.
    """
    if not target.numel():
        return
    foreign = contents.source is not None
    verify = verify and not foreign  # other formats have no checksums to compare
    unit = THROUGH_GAPS_BELOW_NBYTES if foreign else PAGE_NBYTES
    direct = takes_bytes(target, dtype)
    shape, itemsize = tuple(target.shape), dtype.itemsize
    for rank, chunk in chunks_near(saved.chunks, region, saved.global_shape):
        file, block_nbytes = (rank, chunk.part), contents.ranks[rank].index.block_nbytes
        for piece in pieces_to_read(
            chunk, region, itemsize=itemsize, block_nbytes=block_nbytes, verify=verify, unit=unit
        ):
            nbytes = piece.length * itemsize
            start = _run_start(piece, shape) if direct else None
            every = piece.every or (_row(piece) if foreign else 0)
            sink: int | Sink
            if start is None:
                aligned = every > 0 or foreign or chunk.offset_bytes % itemsize == 0  # foreign: see `fetch`
                total = nbytes * piece.times
                sink = BoxWriter(target, piece.offsets, piece.sizes, dtype, total, piece.strides, aligned=aligned)
            else:
                sink = target.data_ptr() + start * itemsize
            at = chunk.offset_bytes + piece.start * itemsize
            yield file, Wanted(at, nbytes, saved.fqn, sink, piece.times, every * itemsize)


def _row(piece: Piece) -> int:
    """Return the distance from one row of a piece to the next, in elements; 0 if the piece has no gaps."""
    if piece.length == math.prod(piece.sizes):
        return 0
    return next(stride for size, stride in zip(piece.sizes, piece.strides, strict=True) if size > 1)


def _run_start(piece: Piece, shape: tuple[int, ...]) -> int | None:
    """Return the index of a piece's first element in the row-major target if the piece is one run there; else None."""
    if piece.length * piece.times != math.prod(piece.sizes):
        return None
    return flat_start(piece.offsets, piece.sizes, shape)


SavedBox = tuple[SavedTensor, tuple[int, ...], tuple[int, ...]]
"""A box of a saved tensor: offsets and sizes in elements."""


def box_of(placement: Placement) -> SavedBox:
    """Return the box of the checkpoint that a placement reads."""
    return placement.saved, placement.offsets, tuple(placement.target.shape)


def whole_box(saved: SavedTensor) -> SavedBox:
    """Return the box that is a whole tensor."""
    return saved, (0,) * len(saved.global_shape), saved.global_shape


def needed_nbytes(boxes: Iterable[SavedBox]) -> int:
    """Return the total bytes of boxes. A box that occurs twice, or whose whole tensor occurs too, counts once."""
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}
    whole: dict[str, int] = {}
    for saved, offsets, sizes in boxes:
        nbytes = math.prod(sizes) * DTYPES[saved.dtype].itemsize
        if sizes == saved.global_shape:
            whole[saved.fqn] = nbytes
        found.setdefault(saved.fqn, {})[offsets, sizes] = nbytes
    return sum(whole[fqn] if fqn in whole else sum(parts.values()) for fqn, parts in found.items())
