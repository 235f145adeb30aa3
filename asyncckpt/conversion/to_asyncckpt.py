"""The target `asyncckpt`: a committed checkpoint of one rank."""

from __future__ import annotations

import json
import os

from asyncckpt import __version__
from asyncckpt.conversion.holding import Holding, is_text, leaves_and_empty, refuse_long_keys
from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.user_metadata import metadata_again
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import (
    METADATA_KEY,
    SAVE_ID_NBYTES,
    SAVE_ID_OFFSET,
    BoxSpec,
    Layout,
    build_layout,
    save_id_bytes,
)
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import SaveId, index_name, is_reserved, objects_name, shard_name
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.format.tree import fqn_of
from asyncckpt.planning.keys import is_storable
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import MODE_FILE, Files, write_new_file
from asyncckpt.storage.rank_job import RankResult
from asyncckpt.storage.record import build_manifest


def check_asyncckpt(outline: Outline) -> Holding:
    """Say what a checkpoint of ours cannot hold of the outline."""
    holding = Holding()
    for path, node in leaves_and_empty(outline.tree):
        fqn = fqn_of(path)
        if not is_text(fqn) or not all(map(is_storable, path)):
            holding.cannot[fqn] = "its key is a text that UTF-8 has not, or a number of more than 63 bits"
        elif node[0] in ("T", "N", "B") and (is_reserved(fqn) or fqn == METADATA_KEY):
            holding.cannot[fqn] = "names like this are reserved"
    refuse_long_keys(outline, holding)
    return holding


def asyncckpt_target(
    outline: Outline, save_id: SaveId, files: Files, umask: int, max_shard_nbytes: int | None
) -> Target:
    """Return the pieces of a checkpoint of ours; index, objects and manifest follow when the shards are written.

    Args:
        outline: What is written.
        save_id: Of the new checkpoint.
        files: The storage seam.
        umask: Of the files' mode 0666.
        max_shard_nbytes: Of one shard file with its header; a larger tensor has a file of its own. None: one file.

    Raises:
        ConfigError: The limit is so small that more files would be needed than a rank may have.
        DuplicateNameError: A tensor has a name that safetensors keeps for itself.
    """
    used = sorted({node[1] for _, node in outline.leaves() if node[0] != "O"})
    specs = [_spec(outline, number) for number in used]
    layout = build_layout(specs, max_nbytes=max_shard_nbytes)
    shards = [
        OutputFile(
            name=shard_name(save_id, 0, part),
            pieces=(_with_save_id(layout.parts[part].header, save_id), *_payloads(layout, part, used)),
            digest_blocks=True,
        )
        for part in range(len(layout.parts))
    ]
    numbers = {number: n for n, number in enumerate(used)}
    structure = encode_structure(
        Structure(
            tree=_renumbered(outline.tree, numbers),
            tensors=tuple(
                TensorEntry(fqn=s.fqn, dtype=s.dtype, global_shape=s.global_shape, chunks=(chunk,))
                for s, chunk in zip(specs, layout.chunks, strict=True)
            ),
            n_objects=len(outline.objects),
            part_nbytes=tuple(part.nbytes for part in layout.parts),
        )
    )
    objects = encode_objects(save_id, outline.objects)

    def finish(directory: str, digests: dict[str, bytes]) -> None:
        records = tuple(ShardRecord(name=s.name, nbytes=s.nbytes, digests=digests[s.name]) for s in shards)
        _finish(directory, outline, save_id, records, structure, objects, files, umask)

    return Target(files=shards, is_directory=True, finish=finish, keeps_nesting=True)


def _spec(outline: Outline, number: int) -> BoxSpec:
    tensor = outline.tensors[number]
    shape = tensor.global_shape
    return BoxSpec(
        fqn=outline.names[number], dtype=tensor.dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape
    )


def _with_save_id(header: bytes, save_id: SaveId) -> bytes:
    return header[:SAVE_ID_OFFSET] + save_id_bytes(save_id) + header[SAVE_ID_OFFSET + SAVE_ID_NBYTES :]


def _payloads(layout: Layout, part: int, used: list[int]) -> list[Payload]:
    found = [(chunk.offset_bytes, chunk.nbytes, n) for n, chunk in enumerate(layout.chunks) if chunk.part == part]
    return [Payload(used[n], nbytes) for _, nbytes, n in sorted(found)]


def _renumbered(node: tuple[object, ...], numbers: dict[int, int]) -> tuple[object, ...]:
    kind, inner = node[0], node[1]
    if kind in ("d", "o"):
        assert isinstance(inner, tuple)
        members = tuple(_renumbered(m, numbers) if i % 2 else m for i, m in enumerate(inner))
        return (kind, members, *node[2:])
    if kind in ("l", "t"):
        assert isinstance(inner, tuple)
        return (kind, tuple(_renumbered(child, numbers) for child in inner), *node[2:])
    assert isinstance(inner, int)
    return (kind, inner if kind == "O" else numbers[inner])


def _finish(
    directory: str,
    outline: Outline,
    save_id: SaveId,
    shards: tuple[ShardRecord, ...],
    structure: bytes,
    objects: bytes,
    files: Files,
    umask: int,
) -> None:
    """Write objects, index and manifest."""
    record = ObjectsRecord(name=objects_name(save_id, 0), nbytes=len(objects), checksum=file_checksum(objects))
    index = encode_index(
        RankIndex(save_id=save_id, rank=0, world_size=1, shards=shards, objects=record, structure=structure)
    )
    mode = MODE_FILE & ~umask
    write_new_file(files, os.path.join(directory, record.name), objects, mode=mode, fsync=True)
    write_new_file(files, os.path.join(directory, index_name(save_id, 0)), index, mode=mode, fsync=True)
    rank = RankRecord(
        rank=0,
        index_name=index_name(save_id, 0),
        index_nbytes=len(index),
        index_checksum=file_checksum(index),
        n_tensors=len({node[1] for _, node in outline.leaves() if node[0] != "O"}),
        n_files=len(shards) + 2,
        nbytes=sum(shard.nbytes for shard in shards) + len(objects) + len(index),
    )
    source = outline.contents.manifest
    manifest = build_manifest(
        save_id,
        [RankResult(record=rank, nbytes=rank.nbytes, seconds={}, direct=False)],
        step=max(0, source.step),
        world_size=1,
        fsync=True,
        metadata=json.dumps(metadata_again(outline.contents)),
        package=__version__,
    )
    publish(directory, manifest, files=files, umask=umask)
