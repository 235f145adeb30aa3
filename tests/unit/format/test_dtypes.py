"""The dtype table against torch, and against what safetensors really reads."""

from __future__ import annotations

import warnings

import pytest
import torch

from asyncckpt.dtypes import DTYPES, stored_as

NOT_STORED = {
    # no dtypes of plain tensors: shells for packed bits, and quantised dtypes, whose tensors are stored as integers
    *("bits16", "bits1x8", "bits2x4", "bits4x2", "bits8"),
    *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
}


def test_every_dtype_of_torch_is_in_the_table_or_named_as_left_out() -> None:
    have = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert have - set(DTYPES) <= NOT_STORED
    assert not NOT_STORED & set(DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_itemsize_is_torchs(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    assert getattr(torch, name).itemsize == DTYPES[name].itemsize


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (2, 0, 5), (2, 3)])
def test_stored_shape_has_the_same_number_of_bytes(name: str, sizes: tuple[int, ...]) -> None:
    stored, shape = stored_as(name, sizes)
    width = 1 if stored == "U8" else DTYPES[name].itemsize
    count = wanted = 1
    for n in shape:
        count *= n
    for n in sizes:
        wanted *= n
    assert count * width == wanted * DTYPES[name].itemsize


def test_safetensors_names_are_the_ones_that_safetensors_knows() -> None:
    known = pytest.importorskip("safetensors.torch")._TYPES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = {row.safetensors: row.name for row in DTYPES.values() if row.safetensors}
    assert {n: str(d).removeprefix("torch.") for n, d in known.items() if n in ours} == ours
