"""Reads directories of files that each rank of Accelerate has written for itself: `save_fsdp_model(use_dcp=False)`.

Each file is one of `torch.save`, `NAME_rank0.bin`, `NAME_rank1.bin` and so on. Its DTensors say what the rank holds:
shape of the whole tensor, placements, shape of the mesh, and the rank's coordinate on it. So the files together can be
read at any number of ranks. Source: torch 2.13, `distributed/device_mesh.py`, `_mesh_layout.py`, and
`tensor/_dtensor_spec.py`; accelerate 1.15, `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.objects import Record
from asyncckpt.format.state_tree import DICT, MAX_DEPTH, Node, Path, fqn_of
from asyncckpt.format.structure import MAX_DIMS, MAX_TENSORS, Box, Chunk
from asyncckpt.interop.sources.pickle_globals import KNOWN, TensorRef, size_of
from asyncckpt.interop.sources.pickle_tree import Locate, TreeBuilder
from asyncckpt.interop.sources.source import ContentsBuilder, read_exactly
from asyncckpt.interop.sources.torch_file import TorchArchive
from asyncckpt.interop.sources.unpickler import DICTS, Maker, OpaqueGlobal, UnpicklingError, made_by, shown
from asyncckpt.sharding.mesh_layout import Run, count_indices, index_runs
from asyncckpt.storage.contents import Contents, Located, Strided
from asyncckpt.storage.files import Files, opened

RANK_FILES = "fsdp"
"""The kind of such a directory."""

_NAME = re.compile(r"(?P<what>pytorch_model_fsdp|optimizer)(?:_(?P<number>[0-9]{1,4}))?_rank(?P<rank>[0-9]{1,7})\.bin")
_KEYS = {"pytorch_model_fsdp": "model", "optimizer": "optimizer"}
_MAX_RANKS = 1 << 20

_TENSOR = "torch.distributed.tensor"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_OTHERS = "leaves that are no DTensors are those of the lowest rank"


def is_rank_files(names: Collection[str]) -> bool:
    """Return whether a directory with files of these names may be one of these."""
    return any(_NAME.fullmatch(name) for name in names)


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """What one rank holds of a DTensor.

    Attributes:
        local: The rank's elements.
        shape: Shape of the whole tensor.
        splits: How each dimension is sharded, as `index_runs` takes it.
    """

    local: TensorRef
    shape: tuple[int, ...]
    splits: tuple[tuple[tuple[int, int, int], ...], ...]


def _refused(why: str) -> UnpicklingError:
    return UnpicklingError(f"a DTensor {why}", "torch.distributed.tensor.DTensor")


def _dtensor(maker: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return the shard of a DTensor; any other tensor subclass as usual."""
    if type(maker) is not Maker or maker.name != _WRAPPER or type(kind) is not Maker:
        return made_by(KNOWN["torch._tensor._rebuild_from_type_v2"], (maker, kind, arguments, state))
    attributes = dict[Any, Any]()
    for part in state if type(state) is tuple else (state,):  # a class with __slots__ has two parts
        attributes |= part if isinstance(part, dict) else {}
    local, spec = attributes.get("_local_tensor"), _record(attributes.get("_spec"), "DTensorSpec")
    if type(local) is not TensorRef:
        raise _refused("without its elements")
    shape, mesh = size_of(arguments[2]), _record(spec.get("mesh"), "DeviceMesh")
    sizes, coordinate = _mesh_sizes(mesh), mesh.get("_coordinate_on_dim")
    if coordinate is None:
        raise _refused("of a rank that is not on its mesh")
    at, placements = size_of(coordinate), spec.get("placements")
    if not isinstance(placements, tuple) or not len(placements) == len(sizes) == len(at):
        raise _refused("whose placements do not fit its mesh")
    if any(not 0 <= one < size for one, size in zip(at, sizes, strict=True)):
        raise _refused("whose rank is not on its mesh")
    if max(len(shape), len(sizes)) > MAX_DIMS:
        raise _refused(f"or its mesh of more than {MAX_DIMS} dimensions")
    splits: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for size, one, placement in zip(sizes, at, placements, strict=True):
        if split := _split(placement, len(shape)):
            dim, factor = split
            splits[dim].append((size, one, factor))
    return _Shard(local, shape, tuple(map(tuple, splits)))


def _record(value: Any, kind: str) -> Record:
    if not isinstance(value, Record) or value.kind != kind:
        raise _refused(f"without its {kind}")
    return value


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _mesh_sizes(mesh: Record) -> tuple[int, ...]:
    """Return the shape of a mesh: of its layout, or, before torch 2.10, of its tensor of ranks."""
    layout, ranks = mesh.get("_layout"), mesh.get("mesh")
    if type(ranks) is TensorRef:
        return _checked(ranks.size)
    if not isinstance(layout, Record):
        raise _refused("whose mesh has no layout")
    axes = layout.get("axes", layout.state)
    if _is(layout, "_MeshLayout") and isinstance(axes, tuple) and all(_is(axis, "_FlatLayout") for axis in axes):
        return _checked(tuple(math.prod(size_of(_as_tuple(axis.get("shape")))) for axis in axes))
    shape = layout.get("shape", layout.state[0] if isinstance(layout.state, tuple) and layout.state else None)
    return _checked(tuple(math.prod(size_of(_as_tuple(one))) for one in _as_tuple(shape)))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _checked(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not 0 < math.prod(sizes) <= _MAX_RANKS:
        raise _refused(f"on a mesh of {math.prod(sizes)} ranks")
    return sizes


def _split(value: Any, n_dims: int) -> tuple[int, int] | None:
    """Return the dimension that a placement shards, and its split factor; None: it replicates."""
    if _is(value, "Replicate"):
        return None
    if not (_is(value, "Shard") or _is(value, "_StridedShard")):
        raise _refused(f"with the placement {value.kind if isinstance(value, Record) else shown(value)}")
    dim, factor = value.get("dim"), value.get("split_factor", 1)
    if type(dim) is not int or not 0 <= dim < n_dims or type(factor) is not int or not 0 < factor <= _MAX_RANKS:
        raise _refused("with an invalid placement")
    return dim, factor


def _named(kind: str) -> Any:
    return lambda *members: Record(kind, members or None)


_SHARDED: Mapping[str, Any] = {
    **KNOWN,
    **{
        name: Maker(name, make)
        for name, make in {
            _WRAPPER: lambda *arguments: OpaqueGlobal(shown(arguments[0]) if arguments else "", arguments),
            "torch._tensor._rebuild_from_type_v2": _dtensor,
            f"{_TENSOR}.DTensor": None,
            **{
                f"{module}.{kind}": _named(kind)
                for module, kinds in {
                    f"{_TENSOR}._dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
                    f"{_TENSOR}.placement_types": ("Shard", "Replicate", "Partial", "_StridedShard"),
                    "torch.distributed.device_mesh": ("DeviceMesh",),
                    "torch.distributed._mesh_layout": ("_MeshLayout", "_FlatLayout"),
                }.items()
                for kind in kinds
            },
        }.items()
    },
}
"""As `pickle_globals.KNOWN`, and what a DTensor is pickled as."""


def read_rank_files(path: str, files: Files) -> Contents:
    """Read the structure of a directory of rank files: a dict of "model" and "optimizer", or of those that are there.

    Raises:
        CorruptCheckpointError: A file is damaged or missing, or the files together lack elements of a tensor.
        UnsupportedFormatError: A file has no DTensors, or does not say what its rank holds; the ranks have saved
            different leaves; or it holds a value that cannot be read.
        DuplicateNameError: Two leaves have the same name.
        OSError: A file cannot be read.
    """
    builder = ContentsBuilder(RANK_FILES, path, path, files)
    groups: dict[str, dict[int, str]] = {}
    for name in sorted(files.listdir(path)):
        if match := _NAME.fullmatch(name):
            number = int(match["number"] or 0)
            key = _KEYS[match["what"]] + (f"_{number}" if number else "")
            ranks = groups.setdefault(key, {})
            if ranks.setdefault(int(match["rank"]), name) != name:
                raise builder.unsupported(f"{ranks[int(match['rank'])]} and {name} are both of that rank")
    members: list[Any] = []
    for key, names in groups.items():
        missing = sorted(set(range(max(names) + 1)) - names.keys()) if max(names) < _MAX_RANKS else [0]
        if missing:
            raise builder.corrupt(f"it lacks the file of rank {missing[0]} beside {names[max(names)]}")
        members += (key, _Group(builder, files, [names[rank] for rank in sorted(names)]).node(key))
    return builder.contents((DICT, tuple(members)), "accelerate, a file of each rank")


class _Group:
    """The files of all ranks of one state dict.

    Args:
        builder: Gets the tensors and objects.
        files: The storage seam.
        names: Names of the files, by rank.
    """

    def __init__(self, builder: ContentsBuilder, files: Files, names: list[str]) -> None:
        self._builder, self._files, self._names = builder, files, names
        self._shards: list[dict[Path, _Shard]] = []
        self._locates: list[Locate] = []
        self._tied: dict[tuple[str, tuple[int, ...], tuple[Chunk, ...]], Node] = {}
        self._n_made = dict.fromkeys(names, 0)
        self._values = [self._read(name) for name in names]

    def node(self, key: str) -> Node:
        """Add all leaves; return their node."""
        first = self._values[0]
        self._shards += map(self._collect, self._values, self._names)
        if not self._shards[0]:
            raise self._builder.unsupported(
                "it holds no DTensors, so it does not say which part of which tensor it holds: such files are read one "
                "by one, and only a training with as many ranks can use them",
                "no DTensor",
                self._names[0],
            )
        for name, shards in zip(self._names, self._shards, strict=True):
            if differing := self._shards[0].keys() ^ shards.keys():
                which = sorted(map(fqn_of, differing))[0]
                raise self._builder.unsupported(f"{which!r} is a DTensor in {name} or {self._names[0]}, not in both")
        self._builder.source.changed.setdefault(_OTHERS, {})[key] = ""
        with self._builder.refusing(self._names[0]):
            return TreeBuilder(self._builder, self._whole).add(first, (key,), self._locates[0])

    def _collect(self, value: Any, name: str) -> dict[Path, _Shard]:
        """Return the shards in the value of a file by their paths.

        Values are counted as in `TreeBuilder`, since a pickle may refer to one list many times.
        """
        found: dict[Path, _Shard] = {}
        todo: list[tuple[Path, Any]] = [((), value)]
        n_values = 1
        while todo:
            path, value = todo.pop()
            if type(value) is _Shard:
                found[path] = value
            elif len(path) < MAX_DEPTH and (isinstance(value, DICTS) or type(value) in (list, tuple)):
                n_values += len(value)
                if n_values > MAX_TENSORS:
                    raise self._builder.unsupported(
                        f"more than {MAX_TENSORS} values, at {fqn_of(path)[:200]!r}", file=name
                    )
                members = value.items() if isinstance(value, dict) else enumerate(value)
                todo += [((*path, key), member) for key, member in members]
        return found

    def _read(self, name: str) -> Any:
        builder = self._builder
        part = builder.file(name)
        nbytes = builder.shards[part].nbytes
        with (
            builder.refusing(name),
            opened(self._files, os.path.join(builder.source.directory, name), os.O_RDONLY) as fd,
        ):
            archive = TorchArchive(read_exactly(self._files, fd, nbytes), nbytes)
            value = archive.value(_SHARDED)
            starts = archive.storages()
        builder.source.archives.append((name, 0, nbytes))

        def locate(storage: Any) -> tuple[int, int]:
            with builder.refusing(name):
                start, length = starts.get(storage.key, (0, -1))
                if length < storage.nbytes:
                    raise ValueError(f"storage {storage.key!r} is missing or was cut short")
                return part, start

        self._locates.append(locate)
        if not isinstance(value, dict):
            raise builder.unsupported("it holds no state dict", shown(value), name)
        return value

    def _whole(self, shard: Any, path: Path) -> Node | None:
        """Add a tensor of which each rank holds a shard; return its node. None: `shard` is no shard."""
        if type(shard) is not _Shard:
            return None
        fqn, chunks = fqn_of(path), dict[Box, Chunk]()
        dtype, shape = shard.local.dtype, shard.shape
        for shards, locate, name in zip(self._shards, self._locates, self._names, strict=True):
            found = shards.get(path[1:])
            if found is None:
                raise self._builder.unsupported(f"tensor {fqn!r} is below a key that is neither a text nor an integer")
            if (found.local.dtype, found.shape) != (dtype, shape):
                raise self._builder.corrupt(f"tensor {fqn!r} is another one there than on rank 0", name, fqn)
            with self._builder.refusing(name, f"tensor {fqn!r}: "):
                for box, chunk in self._chunks(found, locate, name, fqn):
                    chunks.setdefault(box, chunk)  # replicas: the lowest rank's
        parts = tuple(chunks.values()) or (_empty(shape),)
        if (dtype, shape, parts) not in self._tied:
            self._tied[dtype, shape, parts] = self._builder.tensor(fqn, dtype, shape, parts)
        return self._tied[dtype, shape, parts]

    def _chunks(self, shard: _Shard, locate: Locate, name: str, fqn: str) -> list[tuple[Box, Chunk]]:
        local, found = shard.local, []
        runs, whole = self._runs(shard, name, fqn), locate(local.storage)
        if runs is None:
            return []
        starts = [
            dict(zip([at for at, _ in one], itertools.accumulate([n for _, n in one[:-1]], initial=0), strict=True))
            for one in runs
        ]
        itemsize = DTYPES[local.dtype].itemsize
        for parts in itertools.product(*runs):
            offsets, sizes = tuple(at for at, _ in parts), tuple(n for _, n in parts)
            first = sum(
                starts[d][at] * stride for d, (at, stride) in enumerate(zip(offsets, local.stride, strict=True))
            )
            part = TensorRef(local.storage, local.dtype, local.offset + first, sizes, local.stride)
            place = part.place(*whole)
            nbytes = math.prod(sizes) * itemsize
            number, offset = place.part, place.offset
            if isinstance(place, Strided):
                number, offset = self._builder.place(place.part, nbytes, place), 0
            assert isinstance(place, (Located, Strided))
            found.append(
                ((offsets, sizes), Chunk(part=number, offset_bytes=offset, nbytes=nbytes, offsets=offsets, sizes=sizes))
            )
        return found

    def _runs(self, shard: _Shard, name: str, fqn: str) -> list[tuple[Run, ...]] | None:
        """Return the indices of each dimension that a rank holds; None: it holds no elements.

        IMPORTANT: they are counted before they are made, and so are their products, the boxes. A file of a few bytes
        could otherwise ask for any number of them.
        """
        local = shard.local
        counted = [count_indices(length, splits) for length, splits in zip(shard.shape, shard.splits, strict=True)]
        lengths = tuple(length for length, _ in counted)
        if lengths != local.size and math.prod(lengths) + math.prod(local.size):
            raise self._builder.corrupt(
                f"tensor {fqn!r}: the rank holds {list(local.size)}, and by its placements {list(lengths)}", name, fqn
            )
        if 0 in lengths:
            return None
        self._count(sum(n_steps for _, n_steps in counted), name, fqn)
        runs = [index_runs(length, splits) for length, splits in zip(shard.shape, shard.splits, strict=True)]
        n_boxes = math.prod(map(len, runs))
        if n_boxes > local.storage.nbytes:
            raise self._builder.corrupt(
                f"tensor {fqn!r}: the rank holds {n_boxes} parts of it in {local.storage.nbytes} bytes", name, fqn
            )
        self._count(n_boxes, name, fqn)
        return runs

    def _count(self, n: int, name: str, fqn: str) -> None:
        """Count the parts that are made of the shards in a file, and refuse too many."""
        self._n_made[name] += n
        if self._n_made[name] > MAX_TENSORS:
            raise self._builder.unsupported(
                f"its shards have more than {MAX_TENSORS} parts, at {fqn[:200]!r}", file=name
            )


def _empty(shape: tuple[int, ...]) -> Chunk:
    return Chunk(part=0, offset_bytes=0, nbytes=0, offsets=(0,) * len(shape), sizes=shape)
