"""Checkpoints of several ranks from one state dict per rank, without a trainer or a worker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.format.checksums import BLOCK_NBYTES, block_digest, file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, BoxSpec, build_layout, save_id_bytes
from asyncckpt.format.manifest import Manifest, RankRecord, encode_manifest
from asyncckpt.format.names import SaveId, index_name, objects_name, per_rank_name, shard_name
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Box, Structure, TensorEntry, encode_structure
from asyncckpt.state_dict.flatten import Flattened, flatten
from asyncckpt.state_dict.leaf_codecs import encode_leaves
from asyncckpt.torch_tensors import dtype_name

SAVE_ID = SaveId(1, 0, "0123456789ab")
Cut = Callable[[str, tuple[int, ...], Sequence[int]], Mapping[int, Sequence[Box]]]
"""Cuts a tensor that several ranks hold: (FQN, shape, ranks that hold it) -> boxes by rank."""


def even_rows(fqn: str, shape: tuple[int, ...], holders: Sequence[int]) -> dict[int, list[Box]]:
    """Give each holder a run of rows of the first dimension that has several; the first holder all that has none."""
    dim = next((d for d, n in enumerate(shape) if n > 1), None)
    whole = ((0,) * len(shape), shape)
    if dim is None or 0 in shape:
        return {holders[0]: [whole]}
    cuts = [shape[dim] * n // len(holders) for n in range(len(holders) + 1)]
    found: dict[int, list[Box]] = {}
    for rank, low, high in zip(holders, cuts, cuts[1:], strict=False):
        if high > low:
            found[rank] = [
                ((*whole[0][:dim], low, *whole[0][dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
            ]
    return found


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, row-major."""
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.itemsize) if flat.numel() else b""


def save_ranks(path: str | os.PathLike[str], states: Sequence[Mapping[Any, Any]], **options: Any) -> str:
    """Write what `checkpoint_files` returns to the directory `path`."""
    os.makedirs(path)
    for name, data in checkpoint_files(states, **options).items():
        with open(os.path.join(path, name), "xb") as file:
            file.write(data)
    return os.fspath(path)


def checkpoint_files(
    states: Sequence[Mapping[Any, Any]],
    *,
    cut: Cut = even_rows,
    save_id: SaveId = SAVE_ID,
    step: int = 0,
    block_nbytes: int = BLOCK_NBYTES,
) -> dict[str, bytes]:
    """Return the files of a checkpoint by name, the manifest last.

    Tensors that several ranks hold with equal dtype, shape and bytes are shared, and cut by `cut`; unequal ones, and
    those in a `PerRank`, are stored by each rank under its own name.
    """
    flats = [flatten(state) for state in states]
    holders: dict[str, dict[int, torch.Tensor]] = {}
    for rank, flat in enumerate(flats):
        for n in flat.common:
            holders.setdefault(flat.fqns[n], {})[rank] = flat.tensors[n]
    boxes: dict[str, Mapping[int, Sequence[Box]]] = {}
    for fqn, by_rank in holders.items():
        shape = tuple(next(iter(by_rank.values())).shape)
        if len({(t.dtype, t.shape, raw_bytes(t)) for t in by_rank.values()}) == 1:
            boxes[fqn] = (
                cut(fqn, shape, list(by_rank)) if len(by_rank) > 1 else {rank: [_whole(shape)] for rank in by_rank}
            )
    files: dict[str, bytes] = {}
    records = []
    for rank, flat in enumerate(flats):
        ours = _rank_files(rank, len(flats), flat, boxes, save_id, block_nbytes)
        name = index_name(save_id, rank)
        record = RankRecord(
            rank=rank,
            index_name=name,
            index_nbytes=len(ours[name]),
            index_checksum=file_checksum(ours[name]),
            n_tensors=len(flat.tensors),
            n_files=len(ours),
            nbytes=sum(map(len, ours.values())),
        )
        records.append(record)
        files |= ours
    manifest = Manifest(
        save_id=save_id,
        step=step,
        world_size=len(flats),
        created="2025-01-01T00:00:00.000+00:00",
        fsync=False,
        writer="tests",
        ranks=tuple(records),
    )
    return files | {"manifest.json": encode_manifest(manifest)}


def _whole(shape: tuple[int, ...]) -> Box:
    return (0,) * len(shape), shape


def _rank_files(
    rank: int,
    world_size: int,
    flat: Flattened,
    boxes: Mapping[str, Mapping[int, Sequence[Box]]],
    save_id: SaveId,
    block_nbytes: int,
) -> dict[str, bytes]:
    common = set(flat.common)
    specs: list[BoxSpec] = []
    values: list[bytes] = []
    owners: list[int] = []
    names = []
    for n, (fqn, tensor) in enumerate(zip(flat.fqns, flat.tensors, strict=True)):
        shared = n in common and fqn in boxes
        names.append(fqn if shared else per_rank_name(fqn, rank))
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        assert dtype is not None
        for offsets, sizes in boxes[fqn].get(rank, ()) if shared else [_whole(shape)]:
            specs.append(BoxSpec(fqn=names[n], dtype=dtype, global_shape=shape, offsets=offsets, sizes=sizes))
            box = tensor
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                box = box.narrow(dim, offset, size) if size != shape[dim] else box
            values.append(raw_bytes(box))
            owners.append(n)
    layout = build_layout(specs)
    parts = [bytearray(part.header.ljust(part.nbytes, b"\0")) for part in layout.parts]
    for part in parts:
        part[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(save_id)
    for chunk, value in zip(layout.chunks, values, strict=True):
        parts[chunk.part][chunk.offset_bytes : chunk.offset_bytes + chunk.nbytes] = value
    structure = Structure(
        tree=flat.tree,
        tensors=tuple(
            TensorEntry(
                fqn=names[n],
                dtype=str(dtype_name(tensor.dtype)),
                global_shape=tuple(tensor.shape),
                chunks=tuple(c for c, owner in zip(layout.chunks, owners, strict=True) if owner == n),
            )
            for n, tensor in enumerate(flat.tensors)
        ),
        n_objects=len(flat.objects),
        part_nbytes=tuple(map(len, parts)),
    )
    return sealed(rank, world_size, parts, encode_structure(structure), encode_leaves(flat), save_id, block_nbytes)


def sealed(
    rank: int,
    world_size: int,
    parts: Sequence[bytes | bytearray],
    structure: bytes,
    objects: Sequence[Any],
    save_id: SaveId = SAVE_ID,
    block_nbytes: int = BLOCK_NBYTES,
) -> dict[str, bytes]:
    """Return one rank's files by name: shards, objects, and an index that vouches for them."""
    encoded = encode_objects(save_id, objects)
    shards = {shard_name(save_id, rank, n): bytes(part) for n, part in enumerate(parts)}
    index = RankIndex(
        save_id=save_id,
        rank=rank,
        world_size=world_size,
        block_nbytes=block_nbytes,
        shards=tuple(
            ShardRecord(
                name=name,
                nbytes=len(data),
                digests=b"".join(
                    block_digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)
                ),
            )
            for name, data in shards.items()
        ),
        objects=ObjectsRecord(name=objects_name(save_id, rank), nbytes=len(encoded), checksum=file_checksum(encoded)),
        structure=structure,
    )
    return {**shards, objects_name(save_id, rank): encoded, index_name(save_id, rank): encode_index(index)}
