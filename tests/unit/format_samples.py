"""One small checkpoint's documents, of one rank: what the format tests and the golden files are made from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from asyncckpt.format.checksums import block_count, block_digest, file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import BoxSpec, build_layout
from asyncckpt.format.manifest import Manifest, RankRecord, encode_manifest
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.format.objects import encode_objects, encode_value
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.local import LocalStore

SAVE_ID = SaveId(3, 14, "0123456789ab")
SPECS = (
    BoxSpec(fqn="model.weight", dtype="bfloat16", global_shape=(4, 3), offsets=(0, 0), sizes=(4, 3)),
    BoxSpec(fqn="model.bias", dtype="float32", global_shape=(8,), offsets=(4,), sizes=(4,)),
    BoxSpec(fqn="scale", dtype="complex128", global_shape=(), offsets=(), sizes=()),
    BoxSpec(fqn="empty", dtype="int64", global_shape=(0, 5), offsets=(0, 0), sizes=(0, 5)),
)
VALUES = (7, "text", None, [1.5, (2, 3)], {1: b"\0"}, 1 << 80, float("-inf"))
LAYOUT = build_layout(SPECS)
TREE = (
    "d",
    (
        "model",
        ("o", ("weight", ("T", 0), "bias", ("T", 1), "tied", ("T", 0)), 5),
        "scale",
        ("T", 2),
        "empty",
        ("T", 3),
        "rest",
        ("l", (("O", 0), ("t", (("O", 1), ("O", 2), ("O", 3), ("O", 4), ("O", 6))))),
        -1,
        ("d", ()),
    ),
)
STRUCTURE = Structure(
    tree=TREE,
    tensors=tuple(
        TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(chunk,))
        for s, chunk in zip(SPECS, LAYOUT.chunks, strict=True)
    ),
    n_objects=len(VALUES),
    part_nbytes=tuple(p.nbytes for p in LAYOUT.parts),
)
SHARDED_STRUCTURE = dataclasses.replace(
    STRUCTURE,
    tree=("d", ("w", ("s", ("codes", ("T", 0), "scale", ("T", 1)), 0, "module.Class", bytes(range(8))), "x", ("T", 2))),
)
"""The same with a tensor that is stored as its components, sharded: its node has a digest."""

OBJECTS = encode_objects(SAVE_ID, [encode_value(v) for v in VALUES])
IMAGE = b"".join(p.header + bytes(range(256))[: p.nbytes - len(p.header)] for p in LAYOUT.parts)
BLOCK_NBYTES = 4096
INDEX = RankIndex(
    save_id=SAVE_ID,
    rank=0,
    world_size=1,
    block_nbytes=BLOCK_NBYTES,
    shards=(
        ShardRecord(
            name=shard_name(SAVE_ID, 0, 0),
            nbytes=len(IMAGE),
            digests=b"".join(block_digest(IMAGE[i : i + BLOCK_NBYTES]) for i in range(0, len(IMAGE), BLOCK_NBYTES)),
        ),
    ),
    objects=ObjectsRecord(name=objects_name(SAVE_ID, 0), nbytes=len(OBJECTS), checksum=file_checksum(OBJECTS)),
    structure=encode_structure(STRUCTURE),
)
_INDEX_BYTES = encode_index(INDEX)
# IMPORTANT: everything here is what tests/golden/format-v1 holds, which does not change. A test of a field that was
# added later uses `dataclasses.replace(MANIFEST, field=...)`.
MANIFEST = Manifest(
    save_id=SAVE_ID,
    step=300,
    world_size=1,
    created="2024-02-29T12:00:00Z",
    fsync=True,
    writer="asyncckpt 0.1.0",
    ranks=(
        RankRecord(
            rank=0,
            index_name=index_name(SAVE_ID, 0),
            index_nbytes=len(_INDEX_BYTES),
            index_checksum=file_checksum(_INDEX_BYTES),
            n_tensors=len(SPECS),
            n_files=3,
            nbytes=len(IMAGE) + len(OBJECTS) + len(_INDEX_BYTES),
        ),
    ),
    metadata={"loss": 0.25, "note": 'quotes " and \u00e4'},
    timings={"write": 0.5},
)
assert block_count(0, BLOCK_NBYTES) == 0


def reseal(path: Path, index: bytes) -> None:
    """Put `index` in the place of the rank's, and a manifest that vouches for it."""
    manifest = read_manifest(str(path), LocalStore())
    (record,) = manifest.ranks
    record = dataclasses.replace(record, index_nbytes=len(index), index_checksum=file_checksum(index))
    (path / record.index_name).write_bytes(index)
    (path / "manifest.json").write_bytes(encode_manifest(dataclasses.replace(manifest, ranks=(record,))))
