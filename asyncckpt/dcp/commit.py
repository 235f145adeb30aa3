"""The coordinator's last steps: the tree of all leaves, their proof, the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt import __version__
from asyncckpt.dcp.saved_metadata import kept_planner_data, nested
from asyncckpt.dcp.write_plan import StoredLeaf, StoredRank
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.coverage import uncovered
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import decode_value, encode_objects
from asyncckpt.format.state_tree import OBJECT, TENSOR, Node
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.state_dict.flatten import check_keys
from asyncckpt.storage.commit import commit_save
from asyncckpt.storage.contents import read_named_file
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.rank_writer import RankResult, RankWriter
from asyncckpt.sync.collective_save import hole_error
from asyncckpt.torch_tensors import dtype_name
from asyncckpt.training_step import step_in


def finished_request(
    request: SaveRequest,
    tensors: Sequence[TensorEntry],
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
) -> tuple[SaveRequest, dict[int, RankResult | None]]:
    """Put together what all ranks have said.

    Args:
        request: The coordinator's, as it was begun.
        tensors: In its own files.
        metadata: What the planner says of the whole checkpoint.
        results: Of every rank.

    Returns:
        The request with what only the coordinator knows, and only at the end: structure and objects, as its index has
        them, step and metadata. And the results by rank.

    Raises:
        SaveFailedError: Code `results`: a rank's, or a leaf's, are missing.
        UnsupportedLeafError: A key that the index cannot hold.
    """
    found = [result.storage_data for part in results for result in part]
    ranks = {entry.rank: entry.result for entry in found if isinstance(entry, StoredRank)}
    if sorted(ranks) != list(range(request.world_size)):
        raise _incomplete(request, f"results of ranks {sorted(ranks)}, expected {request.world_size} of them")
    raws: dict[str, Any] = {}
    for part in results:
        for result in part:
            if isinstance(result.storage_data, StoredLeaf):
                raws.setdefault(result.index.fqn, result.storage_data.raw)
    structure, objects = _whole(request, tensors, metadata, raws)
    step = step_in({"step": decode_value(raws.get("step"))})
    kept = json.dumps({PLANNER_KEY: {"planner_data": kept_planner_data(metadata)}})
    return replace(request, structure=structure, objects=objects, step=step or 0, metadata=kept), ranks


def commit_all(
    writer: RankWriter,
    tensors: Sequence[TensorEntry],
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    files: Files,
) -> None:
    """Write the coordinator's index and objects, prove that every tensor is there once, and publish.

    Args:
        writer: Of the coordinator's files, which are written but for index and objects.
        tensors: In these.
        metadata: What the planner says of the whole checkpoint.
        results: Of every rank.
        files: The storage seam.

    Raises:
        SaveFailedError: Code `coverage`: a tensor is not stored exactly once; and as `finished_request`.
        UnsupportedLeafError: As `finished_request`.
        CheckpointExistsError, CommitUnknownError, OSError: As `storage.commit.publish`.
    """
    request, ranks = finished_request(writer.request, tensors, metadata, results)
    structures = {request.rank: request.structure}
    for rank, done in ranks.items():
        if done is not None:
            structures[rank] = _structure_of(request.path, done, files)
    holes = uncovered([structures[rank] for rank in range(request.world_size)])
    if holes:
        raise hole_error(holes, writer.save_id, request.path)
    ranks[request.rank] = writer.finish(request)
    written = [done for _, done in sorted(ranks.items()) if done is not None]
    commit_save([request], written, store=store_over(files, umask=request.umask), package=__version__)


def _whole(
    request: SaveRequest, own: Sequence[TensorEntry], metadata: Metadata, raws: dict[str, Any]
) -> tuple[bytes, bytes]:
    """Return the coordinator's structure, with the tree of all leaves, and the objects of all ranks."""
    tensors = {entry.fqn: entry for entry in own}
    numbers = {fqn: number for number, fqn in enumerate(tensors)}
    values: list[Any] = []
    leaves: dict[str, Node] = {}

    def leaf(raw: Any) -> Node:
        values.append(raw)
        return (OBJECT, len(values) - 1)

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
            leaves[fqn] = (TENSOR, numbers[fqn])
        elif isinstance(about, BytesStorageMetadata):
            if fqn not in raws:
                raise _incomplete(request, f"the planner names a leaf {fqn!r} that no rank has written")
            leaves[fqn] = leaf(raws[fqn])
    tree = nested(leaves, metadata.planner_data, lambda: leaf(None))
    check_keys(tree)
    structure = Structure(
        tree=tree,
        tensors=tuple(tensors.values()),
        n_objects=len(values),
        part_nbytes=tuple(part.nbytes for part in request.parts),
    )
    return encode_structure(structure), encode_objects(SaveId.parse(request.save_id), values)


def _incomplete(request: SaveRequest, detail: str) -> SaveFailedError:
    return SaveFailedError(
        f"save {request.save_id} to {request.path}: {detail}; nothing was published",
        code="results",
        path=request.path,
        detail=detail,
        save_id=request.save_id,
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
