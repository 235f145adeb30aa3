"""The coordinator's last steps: build the tree of all leaves, check that all elements are stored, and commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt import __version__
from asyncckpt.dcp.saved_metadata import encoded_planner_data, nested
from asyncckpt.dcp.write_plan import StoredLeaf, StoredRank
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.coverage import uncovered
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import decode_value, encode_objects
from asyncckpt.format.state_tree import DICT, OBJECT, TENSOR, Node
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
    """Complete the coordinator's request from the results of all ranks.

    Args:
        request: The coordinator's request, without what is known only at the end.
        tensors: The tensors in the coordinator's files.
        metadata: The planner's metadata of the whole checkpoint.
        results: The write results of every rank.

    Returns:
        The request with structure and objects of the whole checkpoint, step and metadata; and the result of each rank.

    Raises:
        SaveFailedError: Code `results`: the result of a rank or of a leaf is missing.
        UnsupportedLeafError: The index cannot hold a key.
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
    kept = json.dumps({PLANNER_KEY: {"planner_data": encoded_planner_data(metadata)}})
    return replace(request, structure=structure, objects=objects, step=step or 0, metadata=kept), ranks


def commit_all(
    writer: RankWriter,
    tensors: Sequence[TensorEntry],
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    files: Files,
) -> None:
    """Check that every element is stored exactly once, write the coordinator's index and objects, and commit.

    Args:
        writer: Writer of the coordinator's files; all except index and objects are written.
        tensors: The tensors in these files.
        metadata: The planner's metadata of the whole checkpoint.
        results: The write results of every rank.
        files: The storage seam.

    Raises:
        SaveFailedError: Code `coverage`: an element is not stored exactly once; or see `finished_request`.
        UnsupportedLeafError: See `finished_request`.
        CheckpointExistsError, CommitUnknownError, OSError: See `storage.commit.publish`.

    Blocks: for reading the indexes of all ranks, and for the commit.
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
            leaves[fqn] = (OBJECT, len(values))
            values.append(raws[fqn])
    tree = nested(leaves, metadata.planner_data, lambda: (DICT, ()))
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
