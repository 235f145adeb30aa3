"""The target `asyncckpt`: a committed checkpoint of one rank."""

from __future__ import annotations

import os
from datetime import datetime, timezone

from asyncckpt import __version__
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import (
    METADATA_KEY,
    SAVE_ID_NBYTES,
    SAVE_ID_OFFSET,
    BoxSpec,
    Layout,
    Payload,
    build_layout,
    save_id_bytes,
)
from asyncckpt.format.manifest import Manifest, RankRecord, encode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, index_name, is_reserved, objects_name, shard_name
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.state_tree import ARRAY, BYTES, TENSOR, fqn_of, is_storable
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.interop.conversion_losses import ConversionLosses, refuse_long_keys, restored_metadata
from asyncckpt.interop.copy_pipeline import OutputFile, Target
from asyncckpt.interop.outline import Outline, leaves_and_empty
from asyncckpt.storage.files import MODE_FILE, Files, write_new_file


def check_asyncckpt(outline: Outline) -> ConversionLosses:
    """Return which leaves an asyncckpt checkpoint cannot hold."""
    losses = ConversionLosses()
    for path, node in leaves_and_empty(outline.tree):
        fqn = fqn_of(path)
        if not all(map(is_storable, path)):
            losses.cannot[fqn] = "its key is a text that is not valid UTF-8, or a number of more than 63 bits"
        elif node[0] in (TENSOR, ARRAY, BYTES) and (is_reserved(fqn) or fqn == METADATA_KEY):
            losses.cannot[fqn] = "its name is reserved"
    refuse_long_keys(outline, losses)
    return losses


def asyncckpt_target(
    outline: Outline, save_id: SaveId, files: Files, umask: int, max_shard_nbytes: int | None, block_nbytes: int
) -> Target:
    """Return the shard files of an asyncckpt checkpoint; `Target.finish` writes objects, index and manifest.

    Args:
        outline: What is written.
        save_id: Save ID of the new checkpoint.
        files: The storage seam.
        umask: Removed from mode 0666 of the files.
        max_shard_nbytes: Limit of one shard file with its header; a larger tensor gets its own file. None: one file.
        block_nbytes: Bytes of a shard file that have one checksum.

    Raises:
        ConfigError: The limit is so small that a rank would have too many files.
        DuplicateNameError: A tensor has a name that is reserved by safetensors.
    """
    specs = [_spec(outline, number) for number in range(len(outline.tensors))]
    layout = build_layout(specs, max_nbytes=max_shard_nbytes)
    shards = [
        OutputFile(
            name=shard_name(save_id, 0, part),
            pieces=(_with_save_id(layout.parts[part].header, save_id), *_payloads(layout, part)),
        )
        for part in range(len(layout.parts))
    ]
    structure = encode_structure(
        Structure(
            tree=outline.tree,
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
        record = ObjectsRecord(name=objects_name(save_id, 0), nbytes=len(objects), checksum=file_checksum(objects))
        index = encode_index(
            RankIndex(
                save_id=save_id,
                rank=0,
                world_size=1,
                block_nbytes=block_nbytes,
                shards=records,
                objects=record,
                structure=structure,
            )
        )
        rank = RankRecord(
            rank=0,
            index_name=index_name(save_id, 0),
            index_nbytes=len(index),
            index_checksum=file_checksum(index),
            n_tensors=len(outline.tensors),
            n_files=len(records) + 2,
            nbytes=sum(shard.nbytes for shard in records) + len(objects) + len(index),
        )
        manifest = Manifest(
            save_id=save_id,
            step=max(0, outline.contents.manifest.step),
            world_size=1,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            fsync=True,
            writer=f"asyncckpt {__version__}",
            ranks=(rank,),
            metadata=restored_metadata(outline.contents),
        )
        # The directory has a hidden name, so nobody else writes a manifest here. Its rename commits the checkpoint.
        for name, data in (
            (record.name, objects),
            (index_name(save_id, 0), index),
            (MANIFEST_NAME, encode_manifest(manifest)),
        ):
            write_new_file(files, os.path.join(directory, name), data, mode=MODE_FILE & ~umask, fsync=True)

    return Target(files=shards, is_directory=True, finish=finish, keeps_nesting=True, block_nbytes=block_nbytes)


def _spec(outline: Outline, number: int) -> BoxSpec:
    tensor = outline.tensors[number]
    shape = tensor.global_shape
    return BoxSpec(
        fqn=outline.names[number], dtype=tensor.dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape
    )


def _with_save_id(header: bytes, save_id: SaveId) -> bytes:
    return header[:SAVE_ID_OFFSET] + save_id_bytes(save_id) + header[SAVE_ID_OFFSET + SAVE_ID_NBYTES :]


def _payloads(layout: Layout, part: int) -> list[Payload]:
    found = [(chunk.offset_bytes, chunk.nbytes, n) for n, chunk in enumerate(layout.chunks) if chunk.part == part]
    return [Payload(number, nbytes) for _, nbytes, number in sorted(found)]
