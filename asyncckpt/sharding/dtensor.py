"""DTensor: its shards, read from mesh and placements. No call here starts a collective."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.format.structure import Box
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.shard_types import LocalShard, Sharded, ShardedComponent, unsupported_shard

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


Slice = Callable[[torch.Tensor, int, int], "Mapping[str, torch.Tensor] | None"]
"""(a composite tensor, a dimension, a length) -> the components of the slice of this length; None: it has none."""


def sharded_components(
    value: Any, local: torch.Tensor, components: Mapping[str, torch.Tensor], context: str, slice_of: Slice
) -> tuple[dict[str, ShardedComponent], tuple[int, ...] | None]:
    """Return the components of the local tensor of a DTensor that are sharded with it. All others belong to this rank.

    A component is sharded if it is cut when the local tensor is cut: a slice of half the length has half of it. If the
    class has no slices, or the local tensor has one row only, a component is taken to be sharded that has the length of
    the local tensor in each dimension that is sharded. Of the others it is then not known whether they are cut.

    Args:
        value: The DTensor.
        local: Its local tensor.
        components: The components of the local tensor by name.
        context: Its context as text: with another one, other components may be cut.
        slice_of: Returns the components of a slice of it.

    Returns:
        The components that are sharded; and where this rank's part of the tensor begins, if of another component it is
        not known that it is whole.

    Raises:
        UnsupportedLeafError: A placement is partial or strided, or the local tensor is not one box of the whole.
    """
    position = mesh_position_of(value._spec)
    grid, shape, sizes = position.grid, tuple(value.shape), tuple(local.shape)
    if position.coordinate is None:
        raise unsupported_shard("DTensor", f"its local tensor is a {type(local).__name__} on a rank outside its mesh")
    if any(len(placement) > 1 or (placement and placement[0] >= len(shape)) for placement in grid.placements):
        raise unsupported_shard(
            "DTensor", f"its local tensor is a {type(local).__name__} and its placements are {value._spec.placements}"
        )
    boxes = grid.boxes(shape, position.coordinate)
    if len(boxes) != 1 or boxes[0][1] != sizes:
        raise _wrong_shape(value, local)
    shapes = tuple((name, component.shape) for name, component in components.items())
    key = (type(local), context, shape, position.grid, position.coordinate, shapes)
    known = _component_places.get(key)
    if known is None:
        if len(_component_places) >= MAX_GRIDS:
            _component_places.clear()
        known = _component_places[key] = _places(local, components, shape, boxes[0], position, slice_of)
    places, are_others_whole = known
    of_mesh = zip(position.coordinate, grid.placements, strict=True)
    is_first = not any(at for at, placement in of_mesh if not placement)
    found = {}
    for name, (global_shape, offsets, own_grid, dims) in places.items():
        tensor = components[name]
        shard = LocalShard(tensor, offsets)
        is_written = is_first or own_grid is not None
        found[name] = ShardedComponent(
            Sharded(tensor.dtype, global_shape, (shard,), own_grid, "DTensor", is_written), dims
        )
    return found, None if are_others_whole else boxes[0][0]


_Place = tuple[tuple[int, ...], tuple[int, ...], "Grid | None", Mapping[int, int]]
_component_places: dict[Any, tuple[dict[str, _Place], bool]] = {}
"""(global shape, offsets, grid, `ShardedComponent.dims`) of the sharded components, and whether all others are known to
be whole, by what they depend on: slicing calls code of the class."""


def _places(
    local: torch.Tensor,
    components: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    box: Box,
    position: MeshPosition,
    slice_of: Slice,
) -> tuple[dict[str, _Place], bool]:
    placements = position.grid.placements
    dims = sorted({placement[0] for placement in placements if placement})
    moved: dict[str, dict[int, int]] = {name: {} for name in components}  # dimension of the whole -> of the component
    whole = set(components)
    for d in dims:
        length, part = _part_of(local, d, slice_of)
        for name, tensor in components.items():
            if tensor.dim() and (part is None or tensor.shape != part[name].shape):
                whole.discard(name)
            if part is None:
                if tensor.dim() == local.dim() and tensor.shape[d] == local.shape[d]:
                    moved[name][d] = d
                continue
            pairs = zip(tensor.shape, part[name].shape, strict=True) if tensor.dim() == part[name].dim() else ()
            cut = [(e, before, after) for e, (before, after) in enumerate(pairs) if before != after]
            if len(cut) == 1 and cut[0][2] * local.shape[d] == cut[0][1] * length:
                moved[name][d] = cut[0][0]
    found: dict[str, _Place] = {}
    for name, dim_of in moved.items():
        place = _place(tuple(components[name].shape), dim_of, shape, box) if len(dim_of) == len(dims) else None
        if place is not None:
            grid = position.grid._replace(placements=tuple((dim_of[p[0]],) if p else () for p in placements))
            assert position.coordinate is not None
            is_grid = grid.boxes(place[0], position.coordinate) == ((place[1], tuple(components[name].shape)),)
            found[name] = (*place, _grids.setdefault(grid, grid) if is_grid else None, dim_of)
    return found, not local.numel() or whole.union(found) == set(components)


def _part_of(local: torch.Tensor, dim: int, slice_of: Slice) -> tuple[int, Mapping[str, torch.Tensor] | None]:
    """Return the length of a slice that a class can make, and its components; classes may need a multiple of blocks."""
    n = local.shape[dim]
    for length in dict.fromkeys((n // 2, *(1 << bit for bit in range(n.bit_length() - 1, -1, -1)))):
        if 0 < length < n:
            part = slice_of(local, dim, length)
            if part is not None:
                return length, part
    return 0, None


def _place(
    own: tuple[int, ...], dim_of: Mapping[int, int], shape: tuple[int, ...], box: Box
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the global shape of a component and where this process's part begins; None: they are no integers.

    Args:
        own: Shape of this process's part.
        dim_of: For each dimension of the whole tensor that is sharded, that of the component.
        shape: Shape of the whole tensor.
        box: This process's part of the whole tensor.
    """
    if len(set(dim_of.values())) != len(dim_of):
        return None
    global_shape, offsets = list(own), [0] * len(own)
    for d, e in dim_of.items():
        offset, size = box[0][d], box[1][d]
        if own[e] == size:
            global_shape[e], offsets[e] = shape[d], offset
        elif not size or own[e] * shape[d] % size or own[e] * offset % size:
            return None
        else:
            global_shape[e], offsets[e] = own[e] * shape[d] // size, own[e] * offset // size
    return tuple(global_shape), tuple(offsets)


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
