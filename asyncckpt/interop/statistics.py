"""Statistics of a checkpoint's tensors, read in slabs: minimum, maximum, mean, standard deviation, zeros, NaN, Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncckpt.dtypes import SUB_BYTE
from asyncckpt.loading.byte_ranges import slab_slices
from asyncckpt.loading.fetch import read_tensor
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.storage.reader import DEFAULT_THREADS

SLAB_ELEMENTS = 4 << 20
"""Elements that are read and processed at a time: 32 MiB as float64."""

_FLOAT4 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64, device="cpu"
)
"""The value of each 4-bit pattern of `float4_e2m1fn_x2`; a byte holds two, the first in its lower bits.

Source: OCP Microscaling Formats 1.0."""


@dataclass(slots=True)
class TensorStatistics:
    """Statistics of one tensor; for complex elements, of their absolute values.

    Attributes:
        n: Number of elements.
        minimum, maximum, mean: Of the finite elements; None if there is none.
        std: Population standard deviation of the finite elements; None if there is none.
        zeros, nans, infinities: Numbers of such elements.
    """

    n: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int = 0
    nans: int = 0
    infinities: int = 0


def statistics_of(contents: Contents, files: Files) -> Iterator[tuple[SavedTensor, TensorStatistics]]:
    """Yield each stored tensor with its statistics; all bytes are verified.

    Raises:
        CorruptCheckpointError: Stored bytes differ from those that were saved.
        OSError: A file cannot be read.

    Blocks: until the tensors are read. Memory: one slab and its copy.
    """
    for saved in contents.tensors.values():
        found, squares = TensorStatistics(), 0.0
        for slices in slab_slices(saved.global_shape, SLAB_ELEMENTS):
            slab = read_tensor(contents, saved, slices, files, threads=DEFAULT_THREADS, verify=True)
            squares = _add(found, squares, slab)
        finite = found.n - found.nans - found.infinities
        if finite:
            found.std = math.sqrt(max(0.0, squares / finite))
        yield saved, found


def numbers_of(slab: torch.Tensor) -> torch.Tensor:
    """Return the elements as a one-dimensional float64 tensor; complex ones as complex128.

    Integers of fewer than 8 bits count as their bytes.
    """
    flat = slab.reshape(-1)
    if str(flat.dtype) == "torch.float4_e2m1fn_x2":  # which torch 2.6 lacks, and no torch converts to anything
        packed = flat.view(torch.uint8).to(torch.int64)
        return _FLOAT4[torch.stack((packed & 15, packed >> 4), dim=1).reshape(-1)]
    if str(flat.dtype).removeprefix("torch.") in SUB_BYTE:  # the same
        flat = flat.view(torch.uint8 if "uint" in str(flat.dtype) else torch.int8)
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def _add(found: TensorStatistics, squares: float, slab: torch.Tensor) -> float:
    """Add a slab to the statistics. `squares` is the sum of squared distances from the mean; return its new value.

    Source: Chan, Golub and LeVeque, 1979.
    """
    values = numbers_of(slab.abs() if slab.is_complex() else slab)
    before = found.n - found.nans - found.infinities
    found.n += values.numel()
    found.zeros += values.numel() - int(values.count_nonzero())
    finite = values.isfinite()
    if not finite.all():
        found.nans += int(values.isnan().sum())
        found.infinities += int(values.isinf().sum())
        values = values[finite]
    count = values.numel()
    if not count:
        return squares
    low, high = map(float, values.aminmax())
    variance, mean = map(float, torch.var_mean(values, correction=0))
    found.minimum = low if found.minimum is None else min(found.minimum, low)
    found.maximum = high if found.maximum is None else max(found.maximum, high)
    apart = mean - (found.mean or 0.0)
    total = before + count
    found.mean = mean if not before else (found.mean or 0.0) + apart * count / total
    return squares + variance * count + (apart * apart * before * count / total if before else 0.0)
