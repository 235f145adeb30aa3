"""DTensor: its shards, read from mesh and placements. No call here starts a collective."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.shard_types import LocalShard, Sharded, unsupported_shard

MAX_GRIDS = 4096
"""Maximum size of the cache of mesh positions. A state has a few, the same ones at every save."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class MeshPosition:
    """The grid of a mesh and placements, and this process's coordinate on it; None if it is not in the mesh."""

    __slots__ = ("coordinate", "grid", "mesh", "placements")

    def __init__(self, mesh: Any, placements: Any) -> None:
        self.mesh, self.placements = weakref.ref(mesh), placements
        ranks = mesh.mesh
        coordinate = mesh.get_coordinate()
        self.coordinate = None if coordinate is None else tuple(coordinate)
        kinds = tuple(_placement(placement) for placement in placements)
        grid = Grid(tuple(ranks.shape), tuple(ranks.flatten().tolist()), kinds)
        self.grid = _grids.setdefault(grid, grid)


_grids: dict[Grid, Grid] = {}
_mesh_positions: dict[tuple[int, int], MeshPosition] = {}
"""By IDs of mesh and placements."""


def mesh_position_of(spec: Any) -> MeshPosition:
    """Return grid and coordinate for a DTensorSpec.

    Raises:
        UnsupportedLeafError: A placement is neither a shard nor a replica.
    """
    mesh, placements = spec.mesh, spec.placements
    key = id(mesh), id(placements)
    found = _mesh_positions.get(key)
    if found is None or found.mesh() is not mesh or found.placements is not placements:
        if len(_mesh_positions) >= MAX_GRIDS:
            _mesh_positions.clear()
            _grids.clear()
        found = _mesh_positions[key] = MeshPosition(mesh, placements)
    return found


def describe_dtensor(value: Any) -> Sharded:
    """Return what this process holds of a DTensor.

    Raises:
        UnsupportedLeafError: A placement is partial, or the local tensor's shape does not match the placements.
    """
    position = mesh_position_of(value._spec)
    shape = tuple(value.shape)
    local = local_tensor(value)
    if position.coordinate is None:
        return Sharded(value.dtype, shape, (), position.grid, "DTensor")
    if any(placement and placement[0] >= len(shape) for placement in position.grid.placements):
        raise unsupported_shard(
            "DTensor", f"its placements {value._spec.placements} do not fit its shape {list(shape)}"
        )
    boxes = position.grid.boxes(shape, position.coordinate)
    if len(boxes) == 1 and tuple(local.shape) == boxes[0][1]:
        return Sharded(local.dtype, shape, (LocalShard(local, boxes[0][0]),), position.grid, "DTensor")
    shards = _cut(local, boxes, shape, value)
    return Sharded(local.dtype, shape, shards, position.grid, "DTensor", anchor=None if shards else local)


def local_tensor(value: Any) -> torch.Tensor:
    """Return the plain tensor inside a DTensor, waiting for a collective that still fills it.

    Raises:
        UnsupportedLeafError: It is not a plain tensor.
    """
    local = value._local_tensor
    if type(local) is torch.Tensor or type(local) is torch.nn.Parameter:
        return local
    if hasattr(local, "wait"):
        local = local.wait()
    if type(local) not in _PLAIN:
        raise unsupported_shard("DTensor", f"its local tensor is a {type(local).__name__}")
    return local  # type: ignore[no-any-return]


def _cut(local: torch.Tensor, boxes: Any, shape: tuple[int, ...], value: Any) -> tuple[LocalShard, ...]:
    """Cut the local tensor into its boxes, whose indices are concatenated there in each dimension."""
    starts: list[dict[int, int]] = []
    for d in range(len(shape)):
        sizes = {offsets[d]: sizes[d] for offsets, sizes in boxes}
        at, found = 0, {}
        for offset in dict.fromkeys(offsets[d] for offsets, _ in boxes):
            found[offset] = at
            at += sizes[offset]
        starts.append(found)
        if boxes and at != local.shape[d]:
            raise _wrong_shape(value, local)
    if not boxes and local.numel():
        raise _wrong_shape(value, local)
    shards = []
    with torch.no_grad():
        for offsets, sizes in boxes:
            box = local
            for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                if size != box.shape[d]:
                    box = box.narrow(d, starts[d][offset], size)
            shards.append(LocalShard(box, offsets))
    return tuple(shards)


def _wrong_shape(value: Any, local: torch.Tensor) -> Exception:
    return unsupported_shard(
        "DTensor",
        f"its local tensor has shape {list(local.shape)}, which is not this rank's part of {list(value.shape)} with "
        f"the placements {value._spec.placements} on a mesh of {tuple(value._spec.mesh.mesh.shape)}",
    )


def _placement(placement: Any) -> tuple[int, ...]:
    kind = type(placement).__name__
    if kind == "Replicate":
        return ()
    if kind == "Shard":
        return (int(placement.dim),)
    if kind == "_StridedShard":
        return (int(placement.dim), int(placement.split_factor))
    text = f"its placement {placement!r} is neither a shard nor a replica; redistribute() it first"
    raise unsupported_shard("DTensor", text)


def local_tensor_on_grid(value: Any, grid: Grid | None, global_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return the local tensor of a DTensor on `grid` and of `global_shape`.

    It runs for every tensor of every save, so it calls no Python code of torch.

    Returns:
        None if that cannot be determined by cached values; call `describe_dtensor` then.
    """
    spec = getattr(value, "_spec", None)
    if spec is None or grid is None:
        return None
    position = _mesh_positions.get((id(spec.mesh), id(spec.placements)))
    if position is None or position.grid is not grid:
        return None
    if position.mesh() is not spec.mesh or position.placements is not spec.placements:
        return None
    local = value._local_tensor
    return local if type(local) is torch.Tensor and value.shape == global_shape else None


def without_dtensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors` with each DTensor replaced by its local tensor."""
    return [t if type(t) in _PLAIN else getattr(t, "_local_tensor", t) for t in tensors]
