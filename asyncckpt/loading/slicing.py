"""One tensor of a checkpoint, or a part of it: reads the bytes of that part only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from asyncckpt.loading.boxes import region_of
from asyncckpt.loading.fetching import read_ranges, tensor_for
from asyncckpt.loading.placements import wanted_ranges
from asyncckpt.storage.contents import Contents, SavedTensor, check_lengths
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import CARRIERS, torch_dtype

SLAB_NBYTES = 32 << 20
"""What is compared, or sent, at a time. Chosen, not measured."""


def read_tensor(
    contents: Contents,
    saved: SavedTensor,
    slices: Any,
    files: Files,
    *,
    threads: int,
    verify: bool,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `slices` select of a tensor: a new, contiguous one on the CPU.

    Args:
        contents: The checkpoint.
        saved: The tensor.
        slices: As `boxes.region_of` takes them.
        files: The storage seam.
        threads: Reading threads.
        verify: Read whole blocks and compare their checksums; False reads the pages that are needed.
        room: Bytes of host memory, enough and aligned, that the result lies in; None: new memory.

    Raises:
        ConfigError: Slices that make no sense.
        CorruptCheckpointError: The files differ from what was saved.
        UnsupportedLeafError: This torch lacks the dtype.
        OSError: The files cannot be read.
    """
    region = region_of(slices, saved.global_shape, saved.fqn)
    dtype = torch_dtype(saved.dtype)
    check_lengths(contents, files, saved)
    carrier = CARRIERS[dtype.itemsize]
    if room is None:
        found = tensor_for(saved, contents.path, shape=region.counts, dtype=carrier)
    else:
        found = room[: math.prod(region.counts) * carrier.itemsize].view(carrier).view(region.counts)
    ranges = wanted_ranges(contents, saved, region, found, carrier, verify=verify)
    read_ranges(contents, ranges, files, threads=threads, verify=verify)
    return found.view(dtype).view(region.shape).detach()


def slab_slices(shape: tuple[int, ...], limit: int) -> Iterator[tuple[Any, ...]]:
    """Yield slices that cut a tensor into runs of its row-major order, of at most `limit` elements each."""
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
