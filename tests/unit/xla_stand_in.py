"""A type with the attributes of torch_xla's `XLAShardedTensor` (2.9), and how it is registered.

torch_xla 2.9 wants torch 2.9, so the real one cannot be tested beside the torch that is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class XLAShard:
    """One device's part: padded, with its box in the whole tensor, or Ellipsis where that is all of it."""

    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part without its padding."""
        return (
            self.data
            if self.indices is Ellipsis
            else self.data[tuple(slice(0, s.stop - s.start) for s in self.indices)]
        )

    @unpadded_data.setter
    def unpadded_data(self, value: torch.Tensor) -> None:
        self.unpadded_data.copy_(value)


class XLAShardedTensor(torch.Tensor):
    """Rows over devices, each held by `n_replicas` of them; behaves like the whole tensor, and has none of it here."""

    global_tensor: torch.Tensor
    n_loaded: int

    @staticmethod
    def __new__(cls, whole: torch.Tensor, n_devices: int, n_replicas: int = 1) -> XLAShardedTensor:
        found: Any = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        found.global_tensor, found.n_loaded, found._replicas = whole, 0, n_replicas
        rows = math.ceil(len(whole) / n_devices)
        found._devices = [torch.zeros(rows, *whole.shape[1:]) for _ in range(n_devices * n_replicas)]
        found._cuts = [[slice(min(n * rows, len(whole)), min((n + 1) * rows, len(whole)))] for n in range(n_devices)]
        for data, shard in zip(found._devices, found.local_shards, strict=True):
            data[: shard.unpadded_data.shape[0]] = whole if shard.indices is Ellipsis else whole[tuple(shard.indices)]
        return found  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called: it would gather the whole tensor")

    @property
    def local_shards(self) -> list[XLAShard]:
        """A snapshot of what the devices hold."""
        this: Any = self
        rest = [slice(0, n) for n in self.global_tensor.shape[1:]]
        return [
            XLAShard(
                data.clone(),
                ... if len(this._cuts) == 1 else [*this._cuts[n // this._replicas], *rest],
                f"CPU:{n}",
                n % this._replicas,
            )
            for n, data in enumerate(this._devices)
        ]

    def load_local_shards_(self, shards: list[XLAShard]) -> None:
        """Put a snapshot back onto the devices."""
        this: Any = self
        for data, shard in zip(this._devices, shards, strict=True):
            data.copy_(shard.data)
        self.n_loaded += 1


def to_shards(value: XLAShardedTensor) -> Any:
    """What is registered: each box once, however many devices hold it."""
    shards = [shard for shard in value.local_shards if shard.replica_id == 0]
    if shards[0].indices is Ellipsis:
        return shards[0].data
    boxes = [([s.start for s in shard.indices], [s.stop - s.start for s in shard.indices]) for shard in shards]
    return value.global_tensor.shape, [(shard.data, *box) for shard, box in zip(shards, boxes, strict=True)]


def from_shards(value: XLAShardedTensor, parts: list[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """What is registered: all parts are in; every device that holds one gets it."""
    found, shards = {offsets: tensor for tensor, offsets in parts}, value.local_shards
    for shard in shards:
        shard.unpadded_data = found[tuple(s.start for s in shard.indices)]
    value.load_local_shards_(shards)
