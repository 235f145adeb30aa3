"""Boxes that are copied out of ranges of a file, as these come in pieces."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from asyncckpt.loading.tensor_writers import BoxWriter


def at_any_alignment(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, unit: int) -> torch.Tensor:
    """Return zeros that begin at any multiple of `unit` bytes, every other time of 16."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = torch.zeros(nbytes + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + rng.choice((0, rng.randrange(0, 16, unit)))
    return room[start : start + nbytes].view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
def test_boxes_keep_every_bit_whether_copied_wide_or_narrow(rng: random.Random, dtype: torch.dtype) -> None:
    widened = narrow = 0
    for _ in range(100):
        unit = rng.choice((1, 16 // dtype.itemsize))
        rows, columns = rng.randint(1, 9), unit * rng.randint(1, 9)
        outer = (rows + rng.randint(0, 3), columns + unit * rng.randint(0, 3))
        at = (rng.randint(0, outer[0] - rows), unit * rng.randint(0, (outer[1] - columns) // unit))
        stride = columns + unit * rng.randint(0, 4)
        nbytes = ((rows - 1) * stride + columns) * dtype.itemsize
        data = at_any_alignment(rng, (nbytes,), torch.uint8, dtype.itemsize)
        data.copy_(torch.frombuffer(bytearray(rng.randbytes(nbytes)), dtype=torch.uint8))
        target = at_any_alignment(rng, outer, dtype, dtype.itemsize)
        sink = BoxWriter(target, at, (rows, columns), dtype, nbytes, (stride, 1))
        widened += sink._wide is not sink._box
        narrow += sink._wide is sink._box
        cuts = sorted({0, nbytes, *(rng.randrange(0, nbytes // dtype.itemsize) * dtype.itemsize for _ in range(3))})
        for low, high in itertools.pairwise(cuts):
            sink.deliver(low, data.data_ptr() + low, high - low)
        expected = data.clone().view(dtype).as_strided((rows, columns), (stride, 1))
        found = target[at[0] : at[0] + rows, at[1] : at[1] + columns]
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        rest = target.clone()
        rest[at[0] : at[0] + rows, at[1] : at[1] + columns] = 0
        assert not rest.contiguous().view(torch.uint8).any()
    assert widened + narrow == 100
    assert (widened > 0) is (dtype.itemsize < 16)


@pytest.mark.parametrize("shift", [1, 4, 8])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_elements_that_come_from_anywhere_in_memory_are_copied(dtype: torch.dtype, converted: bool, shift: int) -> None:
    values = torch.arange(63).view(9, 7).to(dtype)
    data = values.contiguous().view(-1).view(torch.uint8)
    room = torch.zeros(data.numel() + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + shift
    room[start : start + data.numel()] = data
    wanted = torch.complex128 if converted else dtype
    target = torch.zeros(9, 8, dtype=wanted)[:, :7]
    sink = BoxWriter(target, (0, 0), (9, 7), dtype, data.numel(), (7, 1))
    for at in range(0, data.numel(), 21 * dtype.itemsize):
        sink.deliver(at, room.data_ptr() + start + at, 21 * dtype.itemsize)
    assert torch.equal(target, values.to(wanted))
