"""One rank's index: its structure, and the sizes and checksums of the files that the rank wrote.

The trainer provides the structure; the writer adds sizes and checksums. The manifest has the checksum of each index,
and an index has the checksums of its files. So a valid manifest is enough to verify every byte of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from asyncckpt.basics.limits import MAX_PARTS, MAX_RANKS
from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.checksums import BLOCK_NBYTES, DIGEST_NBYTES, is_file_checksum
from asyncckpt.format.manifest import MUST, check_version, list_of
from asyncckpt.format.names import (
    DCP,
    SAFETENSORS,
    SaveId,
    items_name,
    layout_of,
    objects_name,
    shard_name,
)
from asyncckpt.format.structure import MAX_INT, MAX_STRUCTURE_NBYTES

INDEX_VERSION = 1
MAX_INDEX_NBYTES = 2 * MAX_STRUCTURE_NBYTES
MIN_BLOCK_NBYTES = 4096
MAX_BLOCK_NBYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A shard file.

    Attributes:
        name: Its name.
        nbytes: Its exact length.
        digests: One 8-byte checksum per block, concatenated.
        origin: The save whose ID is in the file, if it is linked to a file of that save; else None.
    """

    name: str
    nbytes: int
    digests: bytes
    origin: SaveId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectsRecord:
    """The objects file or the items file: name, exact length in bytes, `file_checksum` of its bytes."""

    name: str
    nbytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIndex:
    """One rank's record of its files.

    Attributes:
        save_id: ID of the save.
        rank, world_size: The rank, and how many there are.
        block_nbytes: Bytes of a block of the shard files, which has one checksum.
        shards: The shard files, in order of their part numbers.
        objects: The objects file.
        structure: Bytes of `encode_structure`.
        layout: One of `names.LAYOUTS`.
        items: In layout "dcp" the file with the non-tensor leaves as DCP's items; else None.
    """

    save_id: SaveId
    rank: int
    world_size: int
    block_nbytes: int = BLOCK_NBYTES
    shards: tuple[ShardRecord, ...]
    objects: ObjectsRecord
    structure: bytes
    layout: str = SAFETENSORS
    items: ObjectsRecord | None = None


def encode_index(index: RankIndex) -> bytes:
    """Return the msgpack of `index` (format/SPEC.md section 3)."""
    document: dict[str, Any] = {
        "asyncckpt_index": INDEX_VERSION,
        "save_id": str(index.save_id),
        "rank": index.rank,
        "world_size": index.world_size,
        "block_nbytes": index.block_nbytes,
        "shards": [[s.name, s.nbytes, s.digests] for s in index.shards],
        "objects": [index.objects.name, index.objects.nbytes, index.objects.checksum],
        "structure": index.structure,
    }
    if index.items is not None:
        document |= {
            "layout": index.layout,
            "items": [index.items.name, index.items.nbytes, index.items.checksum],
            MUST: ["layout"],
        }
    if any(shard.origin is not None for shard in index.shards):
        document["origins"] = [None if s.origin is None else str(s.origin) for s in index.shards]
        document[MUST] = [*document.get(MUST, []), "origins"]
    return bytes(msgpack.packb(document))


def decode_index(data: bytes) -> RankIndex:
    """Decode and check an index. Its structure stays encoded.

    Args:
        data: The file's bytes.

    Raises:
        UnsupportedFormatError: A newer version wrote it, or it requires a field that this version does not know.
        CorruptCheckpointError: It violates format/SPEC.md section 3.
    """
    try:
        if len(data) > MAX_INDEX_NBYTES:
            raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_INDEX_NBYTES}")
        raw = unpack_strict(data)
        if not isinstance(raw, dict):
            raise ValueError(f"expected a map, found {type(raw).__name__}")
        check_version(raw, "asyncckpt_index", INDEX_VERSION, what="index", known=("layout", "origins"))
        return _checked_index(raw)
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        if isinstance(error, (UnsupportedFormatError, CorruptCheckpointError)):
            raise
        raise CorruptCheckpointError(f"an index does not decode: {error}", detail=str(error)) from error


def _checked_index(raw: dict[str, Any]) -> RankIndex:
    save_id = SaveId.parse(raw["save_id"])
    rank, world_size = raw["rank"], raw["world_size"]
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= MAX_RANKS:
        raise ValueError(f"`rank` is {rank!r} and `world_size` {world_size!r}")
    block_nbytes = raw["block_nbytes"]
    if type(block_nbytes) is not int or not MIN_BLOCK_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % 4096:
        raise ValueError(f"`block_nbytes` is {block_nbytes!r}")
    if len(list_of(raw["shards"])) > MAX_PARTS:
        raise ValueError(f"{len(raw['shards'])} shards, the limit is {MAX_PARTS}")
    layout = layout_of(raw)
    origins = _checked_origins(raw)
    shards = []
    for part, (name, nbytes, digests) in enumerate(map(list_of, raw["shards"])):
        if name != shard_name(save_id, rank, part, layout):
            raise ValueError(f"shard {part} is named {name!r}, expected {shard_name(save_id, rank, part, layout)!r}")
        _check_length(nbytes)
        if not isinstance(digests, bytes) or len(digests) != -(-nbytes // block_nbytes) * DIGEST_NBYTES:
            raise ValueError(f"the checksums of shard {name} do not fit its {nbytes} bytes")
        shards.append(ShardRecord(name=name, nbytes=nbytes, digests=digests, origin=origins[part]))
    if not isinstance(raw["structure"], bytes):
        raise ValueError(f"`structure` is of type {type(raw['structure']).__name__}, expected bytes")
    return RankIndex(
        save_id=save_id,
        rank=rank,
        world_size=world_size,
        block_nbytes=block_nbytes,
        shards=tuple(shards),
        objects=_checked_record(raw["objects"], objects_name(save_id, rank)),
        structure=raw["structure"],
        layout=layout,
        items=_checked_record(raw["items"], items_name(save_id, rank)) if layout == DCP else None,
    )


def _checked_origins(raw: dict[str, Any]) -> list[SaveId | None]:
    given = list_of(raw.get("origins", (None,) * len(raw["shards"])))
    if len(given) != len(raw["shards"]):
        raise ValueError(f"`origins` has {len(given)} members, there are {len(raw['shards'])} shards")
    return [None if origin is None else SaveId.parse(origin) for origin in given]


def _checked_record(raw: Any, expected: str) -> ObjectsRecord:
    name, nbytes, checksum = list_of(raw)
    _check_length(nbytes)
    if name != expected or not is_file_checksum(checksum):
        raise ValueError(f"malformed record of {expected}")
    return ObjectsRecord(name=name, nbytes=nbytes, checksum=checksum)


def _check_length(nbytes: Any) -> None:
    if type(nbytes) is not int or not 0 <= nbytes <= MAX_INT:
        raise ValueError(f"a file's length is {nbytes!r}, expected an integer from 0 to 2**63 - 1")
