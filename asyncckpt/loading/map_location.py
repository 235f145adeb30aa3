"""Where new tensors are made: `map_location` as `torch.load` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from asyncckpt.loading.sinks import tensor_over

MapLocation = (
    torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""As `torch.load` takes it. Checkpoints keep no devices: every saved location is "cpu"."""


def device_of(map_location: MapLocation) -> torch.device:
    """Return where new tensors are made. A callable decides later, from the CPU."""
    if map_location is None or callable(map_location):
        return torch.device("cpu")
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    return torch.device(map_location)


def relocated(
    tensor: torch.Tensor, move: Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
) -> torch.Tensor:
    """Return `tensor` where the callable `move` wants its storage."""
    storage = move(tensor.untyped_storage(), "cpu")
    if storage is None or storage.data_ptr() == tensor.untyped_storage().data_ptr():
        return tensor
    return tensor_over(storage, tensor)
