"""Boxes of saved tensors, the tensors that they go into, and the byte ranges that this takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.loading.boxes import Piece, Region, near, pieces_to_read, whole_region
from asyncckpt.loading.sinks import BoxSink, flat_start, takes_bytes
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.read_plan import Sink, Wanted
from asyncckpt.torch_tensors import torch_dtype

THROUGH_GAPS_BELOW_NBYTES = 16 << 10
"""Of files without checksums: what lies in narrower gaps is read too, and left out when the rest is copied, for that
takes less time than a call of its own for every run. The same on two cores for runs of 8 KiB, 8 KiB apart."""


class Placement(NamedTuple):
    """The box of `saved` at `offsets` goes into `target`, a plain tensor of the box's shape.

    `address`: where all the stored bytes go as they are, if the box is the whole and somebody has looked; None: perhaps
    they do not.
    """

    saved: SavedTensor
    target: torch.Tensor
    offsets: tuple[int, ...]
    address: int | None = None

    @property
    def region(self) -> Region:
        """What of the saved tensor is read."""
        return whole_region(self.offsets, tuple(self.target.shape))


def ranges_by_file(
    contents: Contents, placements: Iterable[Placement], verify: bool
) -> dict[tuple[int, int], list[Wanted]]:
    """Return the ranges of each file, named by (rank, part), that all placements need; as `ranges_of` has them."""
    found: defaultdict[tuple[int, int], list[Wanted]] = defaultdict(list)
    for placement in placements:
        (fqn, dtype_name, shape, chunks), target, _, address = placement
        rank, (part, offset_bytes, nbytes, _, sizes) = chunks[0]
        if address is not None and sizes == shape:
            found[rank, part].append(Wanted(offset_bytes, nbytes, fqn, address))
            continue
        if sizes == shape == target.shape and takes_bytes(target, torch_dtype(dtype_name)):  # as `ranges_of`
            found[rank, part].append(Wanted(offset_bytes, nbytes, fqn, target.data_ptr()))
            continue
        for file, wanted in ranges_of(contents, placement, verify):
            found[file].append(wanted)
    return found


def ranges_of(contents: Contents, placement: Placement, verify: bool) -> Iterable[tuple[tuple[int, int], Wanted]]:
    """Return ((rank, part), range of that file) for all that goes into one target, which must stay alive until then."""
    (fqn, dtype_name, shape, chunks), target, _, _ = placement
    dtype, (rank, (part, offset_bytes, nbytes, _, sizes)) = torch_dtype(dtype_name), chunks[0]
    if sizes == shape == target.shape and takes_bytes(target, dtype):  # the usual case, without the calculations
        return (((rank, part), Wanted(offset_bytes, nbytes, fqn, target.data_ptr())),)
    return wanted_ranges(contents, placement.saved, placement.region, target, dtype, verify=verify)


def wanted_ranges(
    contents: Contents, saved: SavedTensor, region: Region, target: torch.Tensor, dtype: torch.dtype, *, verify: bool
) -> Iterator[tuple[tuple[int, int], Wanted]]:
    """Yield the ranges of the files, each named by (rank, part), that hold a region of a tensor.

    Args:
        contents, saved: The checkpoint, and the tensor.
        region: What is wanted of it.
        target: Of the shape that the region counts.
        dtype: Of the stored elements, or one that is as wide if the target's is the same.
        verify: As `boxes.pieces_to_read` has it.
    """
    if not target.numel():
        return
    foreign = contents.source is not None
    verify = verify and not foreign  # of another format nothing could be compared
    unit = THROUGH_GAPS_BELOW_NBYTES if foreign else PAGE_NBYTES
    direct = takes_bytes(target, dtype)
    shape, itemsize = tuple(target.shape), dtype.itemsize
    for rank, chunk in near(saved.chunks, region, saved.global_shape):
        file, block_nbytes = (rank, chunk.part), contents.ranks[rank].index.block_nbytes
        for piece in pieces_to_read(
            chunk, region, itemsize=itemsize, block_nbytes=block_nbytes, verify=verify, unit=unit
        ):
            nbytes = piece.length * itemsize
            start = _place(piece, shape) if direct else None
            every = piece.every or (_row(piece) if foreign else 0)
            sink: int | Sink
            if start is None:
                aligned = every > 0 or foreign or chunk.offset_bytes % itemsize == 0  # foreign: see `fetching`
                total = nbytes * piece.times
                sink = BoxSink(target, piece.offsets, piece.sizes, dtype, total, piece.strides, aligned=aligned)
            else:
                sink = target.data_ptr() + start * itemsize
            at = chunk.offset_bytes + piece.start * itemsize
            yield file, Wanted(at, nbytes, saved.fqn, sink, piece.times, every * itemsize)


def _row(piece: Piece) -> int:
    """Return the elements from one row of a piece with gaps to the next; 0 of one without gaps."""
    if piece.length == math.prod(piece.sizes):
        return 0
    return next(stride for size, stride in zip(piece.sizes, piece.strides, strict=True) if size > 1)


def _place(piece: Piece, shape: tuple[int, ...]) -> int | None:
    """Return the number of a piece's first element in a row-major tensor, if it is one run there; else None."""
    if piece.length * piece.times != math.prod(piece.sizes):
        return None
    return flat_start(piece.offsets, piece.sizes, shape)


SavedBox = tuple[SavedTensor, tuple[int, ...], tuple[int, ...]]
"""A box of a saved tensor: offsets and sizes in elements."""


def box_of(placement: Placement) -> SavedBox:
    """Return what of the checkpoint a placement reads."""
    return placement.saved, placement.offsets, tuple(placement.target.shape)


def needed_nbytes(boxes: Iterable[SavedBox]) -> int:
    """Return the bytes of boxes; one that occurs twice, or belongs to a tensor that is there whole, counts once."""
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}
    whole: dict[str, int] = {}
    for saved, offsets, sizes in boxes:
        nbytes = math.prod(sizes) * DTYPES[saved.dtype].itemsize
        if sizes == saved.global_shape:
            whole[saved.fqn] = nbytes
        found.setdefault(saved.fqn, {})[offsets, sizes] = nbytes
    return sum(whole[fqn] if fqn in whole else sum(parts.values()) for fqn, parts in found.items())
