"""Tensors that share memory: views of every kind, alone and inside of shards, for tests of what is saved and filled."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import asyncckpt
from asyncckpt import FlatShard, PerRank, ShardedSlice

LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda z: z.conj(),
    "neg": torch._neg_view,
    "conj_of_neg": lambda z: torch._neg_view(z).conj(),
    "neg_of_conj": lambda z: torch._neg_view(z.conj()),
    "imag": lambda z: z.imag,
    "real": lambda z: z.real,
    "imag_of_conj": lambda z: z.conj().imag,
    "neg_of_imag": lambda z: torch._neg_view(z.imag),
    "conj_of_slice": lambda z: z.conj()[1:],
    "slice_of_conj": lambda z: z[1:].conj(),
    "conj_of_every_other": lambda z: z[::2].conj(),
}
"""From a complex tensor of one dimension to views of it whose values differ, though many begin at one address."""


class Parts:
    """A framework's sharded tensor of one dimension, whose parts are views of its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Computed:
    """A framework's tensor that is whole here, and made anew, as a lazily conjugated one, whenever it is asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def register_types() -> None:
    """Teach asyncckpt the types above."""

    def halves(value: Parts) -> Any:
        at = value.tensor.numel() // 2
        return tuple(value.tensor.shape), [(value.tensor[:at], (0,)), (value.tensor[at:], (at,))]

    asyncckpt.register_shard_type(Parts, halves, lambda value, shards: None)
    asyncckpt.register_shard_type(Computed, lambda v: v.tensor.clone().conj(), lambda value, shards: None)


def sharded_tensor(tensor: torch.Tensor) -> Any:
    """A `ShardedTensor` of a contiguous tensor, which lies in this process alone; needs a process group."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    shard = Shard.from_tensor_and_offsets(tensor, [0] * tensor.dim(), rank=0)
    properties = TensorProperties(dtype=tensor.dtype)
    metadata = ShardedTensorMetadata([shard.metadata], tensor.size(), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata)


WRAPPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda t: t,
    "slice": lambda t: ShardedSlice(t, tuple(t.shape), (0,) * t.dim()),
    "flat": lambda t: FlatShard(t, tuple(t.shape), 0),
    "registered": Parts,
    "per_rank": PerRank,
}
"""From a tensor of one dimension to what may stand for it in a state."""


def value_of(leaf: Any) -> torch.Tensor:
    """Return a copy of the elements of what one of `WRAPPERS` made."""
    tensor = leaf.value if isinstance(leaf, PerRank) else getattr(leaf, "tensor", leaf)
    if type(leaf) is Computed:
        tensor = tensor.conj()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "local_shards"):
        tensor = tensor.local_shards()[0].tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # not clone(), which keeps the bits


def lazy_state(wrap: Callable[[torch.Tensor], Any], seed: int = 0) -> dict[str, Any]:
    """A complex tensor and all of `LAZY` of it, under names of their own."""
    base = torch.randn(9, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
    made = {"base": base, **{name: view(base) for name, view in LAZY.items()}}
    return {n: wrap(v) for n, v in made.items() if wrap is not sharded_tensor or v.is_contiguous()}


def random_view(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    """Return some view of a tensor; it may be the tensor itself."""
    view = base
    for _ in range(rng.randrange(3)):
        kind = rng.randrange(8)
        if kind == 0 and view.dim() > 1:
            view = view.transpose(0, 1)
        elif kind == 1 and view.dim() and view.shape[0] > 1:
            view = view[rng.randrange(view.shape[0]) :]
        elif kind == 2 and view.dim() and view.shape[-1] > 1:
            view = view[..., : rng.randrange(1, view.shape[-1])]
        elif kind == 3 and view.dim() and view.shape[0] > 2:
            view = view[rng.randrange(2) :: 2]
        elif kind == 4:
            view = view.conj() if view.is_complex() else torch._neg_view(view) if view.is_floating_point() else view
        elif kind == 5 and view.is_complex():
            view = rng.choice((view.real, view.imag))
        elif kind == 6 and view.is_contiguous() and not view.is_conj() and not view.is_neg():
            view = view.reshape(-1)
        elif kind == 7 and view.dtype == torch.float32 and not view.is_neg():
            view = view.view(torch.int32)
    return view
