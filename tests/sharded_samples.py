"""A state of DTensors over all ranks, cut by rows and by columns, unevenly; for tests that run inside of ranks."""

from __future__ import annotations

from typing import Any

import torch

WHOLE = {"by_rows": torch.arange(60.0).reshape(10, 6), "by_columns": torch.arange(35, dtype=torch.int32).reshape(5, 7)}


def state(world_size: int, fill: float | None = None) -> dict[str, Any]:
    """Return the state with DTensors over all ranks; the last ranks of an uneven split have less."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    found: dict[str, Any] = {}
    for n, (name, whole) in enumerate(WHOLE.items()):
        found[name] = distribute_tensor(
            whole.clone() if fill is None else torch.full_like(whole, fill), mesh, [Shard(n)]
        )
    return {"model": found, "same": torch.ones(3) if fill is None else torch.zeros(3), "step": 7 if fill is None else 0}


def full(state: Any) -> Any:
    """Return a state with whole tensors; a collective."""
    from torch.distributed.tensor import DTensor

    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return [full(value) for value in state] if isinstance(state, list) else state
