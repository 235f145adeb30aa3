"""The coordinator's last steps: the tree of all leaves, their proof, the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt import __version__
from asyncckpt.dcp.saved_metadata import kept_planner_data, nested
from asyncckpt.dcp.write_plan import StoredLeaf, StoredRank
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import decode_value, encode_objects
from asyncckpt.format.state_tree import Node
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.state_dict.flatten import check_keys
from asyncckpt.storage import commit
from asyncckpt.storage.commit import build_manifest
from asyncckpt.storage.contents import read_named_file
from asyncckpt.storage.coverage import uncovered
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankJob, RankResult, RankWriter
from asyncckpt.sync.collective_save import hole_error
from asyncckpt.torch_tensors import dtype_name
from asyncckpt.training_step import step_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """The coordinator's files but for index and objects: its writer, the job, and its tensors."""

    writer: RankWriter
    job: RankJob
    tensors: tuple[TensorEntry, ...]


class Saved(NamedTuple):
    """Which save the coordinator ends, and its own files: what is in them, and how long they are."""

    save_id: SaveId
    path: str
    world_size: int
    tensors: Sequence[TensorEntry]
    part_nbytes: tuple[int, ...]


class Ending(NamedTuple):
    """What only the coordinator knows, and only at the end; `structure` and `objects` as its index has them."""

    structure: bytes
    objects: bytes
    step: int
    metadata: str
    ranks: Mapping[int, RankResult | None]


def ending_of(saved: Saved, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Ending:
    """Put together what all ranks have said.

    Args:
        saved: See there.
        metadata: What the planner says of the whole checkpoint.
        results: Of every rank.

    Raises:
        SaveFailedError: Code `results`: a rank's, or a leaf's, are missing.
        UnsupportedLeafError: A key that the index cannot hold.
    """
    found = [result.storage_data for part in results for result in part]
    ranks = {entry.rank: entry.result for entry in found if isinstance(entry, StoredRank)}
    if sorted(ranks) != list(range(saved.world_size)):
        raise _incomplete(saved, f"results of ranks {sorted(ranks)}, expected {saved.world_size} of them")
    raws: dict[str, Any] = {}
    for part in results:
        for result in part:
            if isinstance(result.storage_data, StoredLeaf):
                raws.setdefault(result.index.fqn, result.storage_data.raw)
    structure, objects = _whole(saved, metadata, raws)
    step = step_in({"step": decode_value(raws.get("step"))})
    return Ending(
        structure=structure,
        objects=objects,
        step=0 if step is None else step,
        metadata=json.dumps({PLANNER_KEY: {"planner_data": kept_planner_data(metadata)}}),
        ranks=ranks,
    )


def commit_all(
    unfinished: Unfinished, metadata: Metadata, results: Sequence[Sequence[WriteResult]], files: Files
) -> None:
    """Write the coordinator's index and objects, prove that every tensor is there once, and publish.

    Args:
        unfinished: The coordinator's own part.
        metadata: What the planner says of the whole checkpoint.
        results: Of every rank.
        files: The storage seam.

    Raises:
        SaveFailedError: Code `coverage`: a tensor is not stored exactly once; and as `ending_of`.
        UnsupportedLeafError: As `ending_of`.
        CheckpointExistsError, CommitUnknownError, OSError: As `storage.commit.publish`.
    """
    job = unfinished.job
    part_nbytes = tuple(nbytes for _, nbytes in job.parts)
    saved = Saved(job.save_id, job.path, job.world_size, unfinished.tensors, part_nbytes)
    ending = ending_of(saved, metadata, results)
    ranks = dict(ending.ranks)
    structures = {job.rank: ending.structure}
    for rank, done in ranks.items():
        if done is not None:
            structures[rank] = _structure_of(job.path, done, files)
    holes = uncovered([structures[rank] for rank in range(job.world_size)])
    if holes:
        raise hole_error(holes, job.save_id, job.path)
    ranks[job.rank] = unfinished.writer.finish(replace(job, structure=ending.structure, objects=ending.objects))
    manifest = build_manifest(
        job.save_id,
        [done for _, done in sorted(ranks.items()) if done is not None],
        step=ending.step,
        world_size=job.world_size,
        fsync=job.fsync,
        metadata=ending.metadata,
        package=__version__,
    )
    commit.publish(job.path, manifest, store=LocalStore(files, umask=job.umask), overwrite=job.overwrite)


def _whole(saved: Saved, metadata: Metadata, raws: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the coordinator's structure, with the tree of all leaves, and the objects of all ranks."""
    tensors = {entry.fqn: entry for entry in saved.tensors}
    numbers = {fqn: number for number, fqn in enumerate(tensors)}
    values: list[Any] = []
    leaves: dict[str, Node] = {}

    def leaf(raw: Any) -> Node:
        values.append(raw)
        return ("O", len(values) - 1)

    for fqn, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            if fqn not in tensors:
                numbers[fqn] = len(tensors)
                tensors[fqn] = TensorEntry(
                    fqn=fqn,
                    dtype=dtype_name(about.properties.dtype) or str(about.properties.dtype),
                    global_shape=tuple(about.size),
                    chunks=(),
                )
            leaves[fqn] = ("T", numbers[fqn])
        elif isinstance(about, BytesStorageMetadata):
            if fqn not in raws:
                raise _incomplete(saved, f"the planner names a leaf {fqn!r} that no rank has written")
            leaves[fqn] = leaf(raws[fqn])
    tree = nested(leaves, metadata.planner_data, lambda: leaf(None))
    check_keys(tree)
    structure = Structure(
        tree=tree,
        tensors=tuple(tensors.values()),
        n_objects=len(values),
        part_nbytes=saved.part_nbytes,
    )
    return encode_structure(structure), encode_objects(saved.save_id, values)


def _incomplete(saved: Saved, detail: str) -> SaveFailedError:
    return SaveFailedError(
        f"save {saved.save_id} to {saved.path}: {detail}; nothing was published",
        code="results",
        path=saved.path,
        detail=detail,
        save_id=str(saved.save_id),
    )


def _structure_of(path: str, done: RankResult, files: Files) -> bytes:
    record = done.record
    data = read_named_file(
        path,
        record.index_name,
        nbytes=record.index_nbytes,
        max_nbytes=MAX_INDEX_NBYTES,
        checksum=record.index_checksum,
        files=files,
    )
    return decode_index(data).structure
