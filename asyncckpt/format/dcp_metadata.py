"""The pickled `.metadata` of `torch.distributed.checkpoint`, written without torch.

Source: torch 2.13 `distributed/checkpoint/metadata.py`, `filesystem.py`, `default_planner.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.dcp_items import items_of, name_of
from asyncckpt.format.dcp_layout import Frames
from asyncckpt.format.names import DCP, SaveId, items_name, per_rank_name, shard_name, split_per_rank_name
from asyncckpt.format.objects import Opaque
from asyncckpt.format.pickle_image import Call, Encoded, encoded
from asyncckpt.format.records import Record
from asyncckpt.format.tree import Path, fqn_of

DCP_VERSION = "1.0.0"
"""Of DCP's metadata: torch 2.13, `distributed/checkpoint/_version.py` and the planner that writes it."""

OWNER_PREFIX = "asyncckpt "
OWNER_WITHIN_NBYTES = 4096
"""The save id stands within these first bytes of a `.metadata` of ours."""

_METADATA = "torch.distributed.checkpoint.metadata"
_OWNER = re.compile(re.escape(OWNER_PREFIX.encode()) + rb"([0-9]{6}-[0-9]{8}-[0-9a-f]{12})")
_JUNK = (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, msgpack.UnpackException)
Box = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(maxsize=4096)
def _size(numbers: tuple[int, ...]) -> Encoded:
    """Return a `torch.Size`."""
    return encoded(Opaque("torch.Size", list(numbers)))


@functools.cache
def _properties(dtype: str) -> Encoded:
    """Return the `TensorProperties` of a dense tensor."""
    properties = (
        Opaque("torch.dtype", dtype),
        Call("torch.serialization._get_layout", ("torch.strided",)),
        False,
        Call(f"{_METADATA}._MEM_FORMAT_ENCODING", (0,)),
        False,
    )
    return encoded(Record(f"{_METADATA}.TensorProperties", properties))


def tensor_entry(dtype: str, shape: Sequence[int], boxes: Iterable[Box]) -> Record:
    """Return a `TensorStorageMetadata`; boxes are (offsets, sizes)."""
    chunks = [
        Record(f"{_METADATA}.ChunkStorageMetadata", {"offsets": _size(tuple(offsets)), "sizes": _size(tuple(sizes))})
        for offsets, sizes in boxes
    ]
    state = {
        "properties": _properties(dtype),
        "size": _size(tuple(shape)),
        "chunks": chunks,
    }
    return Record(f"{_METADATA}.TensorStorageMetadata", state)


def bytes_entry() -> Record:
    """Return a `BytesStorageMetadata`."""
    return Record(f"{_METADATA}.BytesStorageMetadata")


def index_record(fqn: str, offset: Sequence[int] | None = None, number: int = 0) -> Record:
    """Return a `MetadataIndex`: of a tensor's chunk number `number` at `offset`, or of an item without one."""
    state = {
        "fqn": fqn,
        "offset": None if offset is None else _size(tuple(offset)),
        "index": None if offset is None else number,
    }
    return Record(f"{_METADATA}.MetadataIndex", state)


def storage_record(name: str, offset: int, length: int) -> Record:
    """Return a `_StorageInfo`."""
    info = {"relative_path": name, "offset": offset, "length": length}
    return Record("torch.distributed.checkpoint.filesystem._StorageInfo", info)


def metadata_pickle(
    entries: Mapping[str, Record], paths: Mapping[str, Path], storage: Mapping[Any, Record], owner: str | None = None
) -> bytes:
    """Return the file's bytes.

    Args:
        entries, paths, storage: DCP's `state_dict_metadata`, `planner_data`, `storage_data`.
        owner: A text that the storage's metadata keep.
    """
    meta: dict[str, Any] = {"checkpoint_id": None, "save_id": owner, "load_id": None, "modules": []}
    state = {
        "storage_meta": None if owner is None else Record(f"{_METADATA}.StorageMeta", meta),
        "state_dict_metadata": dict(entries),
        "planner_data": dict(paths),
        "storage_data": dict(storage),
        "version": DCP_VERSION,
    }
    return b"\x80\x02" + encoded(Record(f"{_METADATA}.Metadata", state)).data + b"."


def metadata_of(save_id: SaveId, ranks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the `.metadata` of a save in layout "dcp".

    At each name the first rank that has it counts, as for readers of ours.

    Args:
        save_id: Of the save.
        ranks: Of every rank, in order: its structure, and the table of its items that are no tensors.

    Raises:
        CorruptCheckpointError: One of them does not decode.
    """
    entries: dict[str, Record] = {}
    paths: dict[str, Path] = {}
    storage: dict[Any, Record] = {}
    try:
        structures = [msgpack.unpackb(structure, strict_map_key=True, use_list=False) for structure, _ in ranks]
        places = _places(save_id, structures)
        for rank, (raw, (_, table)) in enumerate(zip(structures, ranks, strict=True)):
            for item in items_of(raw["tree"]):
                if item.node[0] != "T":
                    continue
                stored, dtype, shape, _ = raw["tensors"][item.node[1]]
                name, path = _named(stored, *name_of(item._replace(own=False), rank))
                if name in entries:
                    continue
                found = places[stored]
                entries[name], paths[name] = tensor_entry(dtype, shape, (box for box, _ in found)), path
                for number, ((offsets, _), place) in enumerate(found):
                    storage[index_record(name, offsets, number)] = place
            for name, path, offset, length in msgpack.unpackb(table, use_list=False):
                if name not in entries:
                    entries[name], paths[name] = bytes_entry(), path
                    storage[index_record(name)] = storage_record(items_name(save_id, rank), offset, length)
    except _JUNK as error:
        raise CorruptCheckpointError(f"the structure of a rank does not decode: {error}", detail=str(error)) from error
    return metadata_pickle(entries, paths, storage, f"{OWNER_PREFIX}{save_id}")


def _named(stored: str, name: str, path: Path) -> tuple[str, Path]:
    """Return name and path of a tensor; one that a rank has stored for itself is called so."""
    own = split_per_rank_name(stored)
    if own is None:
        return name, path
    name = per_rank_name(fqn_of(path), own[1])
    return name, (name,)


def _places(save_id: SaveId, structures: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[Box, Record]]]:
    """Return the chunks of every stored tensor over all ranks: (box, where its archive lies)."""
    frames = Frames()
    found: dict[str, list[tuple[Box, Record]]] = {}
    for rank, raw in enumerate(structures):
        for fqn, dtype, shape, chunks in raw["tensors"]:
            places = found.setdefault(fqn, [])
            for part, at, nbytes, *box in chunks:
                offsets, sizes = box or ((0,) * len(shape), shape)
                head, tail = frames.around(dtype, sizes, nbytes)
                name = shard_name(save_id, rank, part, DCP)
                place = storage_record(name, at - len(head), len(head) + nbytes + len(tail))
                places.append(((offsets, sizes), place))
    return found


def owner_of_metadata(head: bytes) -> SaveId | None:
    """Return the save of ours that wrote a `.metadata`, by its first `OWNER_WITHIN_NBYTES`; None: somebody else's."""
    found = _OWNER.search(head[:OWNER_WITHIN_NBYTES])
    return SaveId.parse(found[1].decode()) if found else None
