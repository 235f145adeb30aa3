"""Builds the metadata that torch.distributed.checkpoint expects from the indexes of a committed checkpoint.

FQNs are those of the planner that saved the checkpoint. If AsyncCheckpointer saved it, they are those that this torch's
`flatten_state_dict` gives, so that a state dict of the same structure has the same FQNs. Planners that do not flatten
use other names, of stored leaves and of containers; these are answered too, but not listed.
"""

from __future__ import annotations

import base64
import io
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.config import RankInfo
from asyncckpt.dcp.write_plan import TAG, encode_exactly, planner_bytes, saved_bytes
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import MissingKeysError, PickledLeafError
from asyncckpt.format.dcp import DCP_VERSION
from asyncckpt.format.manifest import PLANNER_KEY, Manifest
from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.format.state_tree import (
    BYTES,
    CONTAINERS,
    DICT,
    KEYED,
    LIST,
    MAX_DEPTH,
    OBJECT,
    SEQUENCES,
    TENSOR,
    Node,
    Path,
    form_in,
    fqn_of,
    leaves,
    python_key,
    tree_of,
)
from asyncckpt.format.structure import Chunk
from asyncckpt.loading.byte_ranges import SavedBox, whole_box
from asyncckpt.loading.fetch import bytes_of, read_tensor
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY
from asyncckpt.loading.saved_state import SavedObjects, SavedTree, refuse_incompatible_shards
from asyncckpt.state_dict.leaf_codecs import decode_leaf
from asyncckpt.state_dict.numpy_values import array_of
from asyncckpt.state_dict.pickling import unpickle
from asyncckpt.state_dict.unflatten import mapping_form, mapping_of, sequence_of
from asyncckpt.storage.contents import Contents, SavedTensor, corrupt
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import torch_dtype


def _paths_of(fqns: Iterable[str], planner_data: Any) -> dict[str, Path]:
    """Return the path of each leaf: that of the planner's data, if our trees can have it, else the FQN as one key."""
    paths: dict[str, Path] = {}
    for fqn in fqns:
        path = planner_data.get(fqn) if isinstance(planner_data, Mapping) else None
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) < MAX_DEPTH
            or fqn_of(path) != fqn  # the leaf is known by this name
            or type(path[0]) is not str  # a state dict is a dict of names
            or not all(type(key) in (str, int) for key in path)
        ):
            path = (fqn,)
        paths[fqn] = path
    return paths


def nested(leaves: Mapping[str, Node], planner_data: Any, hole: Callable[[], Node]) -> Node:
    """Return the tree of the leaves, in the order of the planner's data; a flat dict if paths contradict each other.

    Args:
        leaves: Leaf nodes by FQN.
        planner_data: The planner's data in the checkpoint's metadata: paths by FQN, or anything else.
        hole: Returns a node for a member of a list that no rank has.
    """
    fqns = list(leaves)
    if isinstance(planner_data, Mapping):  # in the order of the state dict, as far as the planner's data have it
        known = [fqn for fqn in planner_data if fqn in leaves]
        fqns = known + [fqn for fqn in fqns if fqn not in planner_data]
    try:
        paths = _paths_of(fqns, planner_data)
        return tree_of([(path, leaves[fqn]) for fqn, path in paths.items()], hole)
    except ValueError:  # the paths contradict each other
        return DICT, tuple(part for pair in leaves.items() for part in pair)


_PATHS_OF_TREE = {"$": "paths"}
"""Stored in place of planner data that equal the paths of the tree."""

_logger = logging.getLogger("asyncckpt.dcp")


class _PickleNotAllowedError(Exception):
    """The planner data hold a pickle, and unpickling is not allowed."""


def encoded_planner_data(metadata: Metadata) -> Any:
    """Return the JSON form of the planner data in a checkpoint's metadata."""
    found = metadata.planner_data
    if _equals_paths_of_tree(found, metadata):
        return _PATHS_OF_TREE
    raw = encode_exactly(found)
    if raw is None and found is not None:
        data = io.BytesIO()
        torch.save(found, data)
        raw = {"$": TAG, "v": [type(found).__qualname__, base64.b64encode(data.getvalue()).decode()]}
    return raw


def _equals_paths_of_tree(found: Any, metadata: Metadata) -> bool:
    if not isinstance(found, Mapping) or found.keys() != metadata.state_dict_metadata.keys():
        return False
    return _paths_of(found, found) == dict(found)


def was_saved_by_torch(manifest: Manifest) -> bool:
    """Whether a planner of torch.distributed.checkpoint saved the checkpoint, so that FQNs are the planner's."""
    return isinstance(manifest.metadata.get(PLANNER_KEY), dict)


def planner_data_of(manifest: Manifest, paths: dict[str, Any], *, allow_pickle: bool, path: str) -> Any:
    """Return the planner data of a checkpoint.

    Args:
        manifest: The manifest.
        paths: Paths of the tree, by FQN.
        allow_pickle: Whether pickled planner data are unpickled. False: None is returned, and this is logged.
        path: Path of the checkpoint, for the log.
    """
    kept = manifest.metadata.get(PLANNER_KEY)
    raw = kept.get("planner_data") if isinstance(kept, dict) else _PATHS_OF_TREE
    if raw == _PATHS_OF_TREE:
        return paths

    def from_pickle(kind: str, data: bytes) -> Any:
        if not allow_pickle:
            raise _PickleNotAllowedError(kind)
        return unpickle(data)

    try:
        return decode_leaf(raw, from_pickle)
    except _PickleNotAllowedError as error:
        _logger.warning(
            "load of %s: the planner data are a pickle (%s) and were left out; pass allow_pickle=True to read them",
            path,
            error,
        )
        return None


class _DeferredLeaf:
    """A leaf whose value is read only when it is requested."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


class _MetadataByName(dict[str, Any]):
    """Metadata by FQN. Lookups also succeed for known FQNs that are not listed."""

    def __init__(self, described: CheckpointMetadata) -> None:
        super().__init__()
        self._described = described

    def __contains__(self, fqn: object) -> bool:
        return super().__contains__(fqn) or (isinstance(fqn, str) and self._described.knows(fqn))

    def __missing__(self, fqn: str) -> Any:
        if not self._described.knows(fqn):
            raise KeyError(fqn)
        return self._described.about(fqn)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class CheckpointMetadata:
    """The metadata of a committed checkpoint, in the form that torch.distributed.checkpoint expects.

    Args:
        contents: The checkpoint.
        reader: Rank and world size of the process that reads it.
        files: The storage seam.
        threads: Number of reading threads.
        verify: Whether checksums are verified.
        allow_pickle: Whether leaves that AsyncCheckpointer pickled may be unpickled.
    """

    def __init__(
        self, contents: Contents, reader: RankInfo, files: Files, *, threads: int, verify: bool, allow_pickle: bool
    ) -> None:
        self.contents = contents
        self._files, self._threads, self._verify = files, threads, verify
        self._tree, self._reader = SavedTree(contents, reader), reader
        self._objects = SavedObjects(contents, files, allow_pickle=allow_pickle)
        # By ID of a placeholder; holding the placeholder keeps its ID from being reused.
        self._marks: dict[int, tuple[torch.Tensor, SavedTensor]] = {}
        self._paths: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._allow_pickle = allow_pickle
        try:
            if not was_saved_by_torch(contents.manifest):
                self._values, self._paths = flatten_state_dict(self._skeleton(self._tree.tree))
        except ValueError:
            pass  # torch flattens a container that asyncckpt stores as one leaf, and two leaves get the same FQN
        if not self._values:
            for path, node in leaves(self._tree.tree):
                if node is not OTHER_RANKS_ONLY and fqn_of(path) not in self._values:
                    self._values[fqn_of(path)], self._paths[fqn_of(path)] = (
                        self._skeleton(node),
                        tuple(key if isinstance(key, (str, int)) else str(key) for key in path),
                    )
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, Chunk]]] = {}

    def metadata(self, load_id: str) -> Metadata:
        """Return the checkpoint's metadata."""
        known = _MetadataByName(self)
        for fqn in self._values:
            known[fqn] = self.about(fqn)
        save_id = str(self.contents.manifest.save_id)
        found = Metadata(
            state_dict_metadata=known,
            planner_data=self._planner_data(),
            storage_meta=StorageMeta(checkpoint_id=self.contents.path, save_id=save_id, load_id=load_id),
        )
        found.version = DCP_VERSION
        return found

    def _planner_data(self) -> Any:
        try:
            return planner_data_of(
                self.contents.manifest, self._paths, allow_pickle=self._allow_pickle, path=self.contents.path
            )
        except (ValueError, TypeError) as error:
            detail = f"the planner data cannot be decoded: {error}"
            raise corrupt(self.contents.path, MANIFEST_NAME, detail) from error

    def knows(self, fqn: str) -> bool:
        """Whether there is a leaf or a container with this FQN."""
        return fqn in self._values or self._tree.node_at(fqn) is not None

    def is_container(self, fqn: str) -> bool:
        """Whether there is a container, or a tensor saved as its components, with this FQN."""
        found = self._tree.node_at(fqn)
        return found is not None and found[1][0] in CONTAINERS

    def about(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return the metadata of a known FQN."""
        saved = self.tensor(fqn)
        if saved is None:
            return BytesStorageMetadata()
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for _, chunk in _filled(saved)
        ]
        properties = TensorProperties(dtype=torch_dtype(saved.dtype))
        return TensorStorageMetadata(properties=properties, size=torch.Size(saved.global_shape), chunks=chunks)

    def tensor(self, fqn: str) -> SavedTensor | None:
        """Return the tensor with this FQN; None: it is no tensor."""
        value = self._value(fqn)
        return self._marks[id(value)][1] if isinstance(value, torch.Tensor) else None

    def chunk_at(self, saved: SavedTensor, offsets: tuple[int, ...]) -> tuple[int, Chunk] | None:
        """Return (rank, chunk) of the chunk that begins at `offsets` of a tensor; None: there is none."""
        found = self._chunks.get(saved.fqn)
        if found is None:
            found = self._chunks[saved.fqn] = {chunk.offsets: (rank, chunk) for rank, chunk in _filled(saved)}
        return found.get(offsets)

    def leaf_bytes(self, fqn: str) -> io.BytesIO:
        """Return a leaf that is no tensor in the form that planners read.

        Raises:
            CorruptCheckpointError: Stored bytes differ from those that were saved.
            PickledLeafError: AsyncCheckpointer pickled the leaf, and unpickling is not allowed.
            OSError: A file cannot be read.
        """
        value = self._value(fqn)
        if isinstance(value, _DeferredLeaf) and value.node[0] == OBJECT:
            try:
                kept = planner_bytes(self._raw(value.node))
            except ValueError as error:
                rank, _ = self._tree.object_at(value.node[1])
                name = self.contents.ranks[rank].index.objects.name
                raise corrupt(self.contents.path, name, f"leaf {fqn!r} does not decode: {error}") from error
            if kept is not None:
                return kept
        return saved_bytes(self._whole(value))

    def _value(self, fqn: str) -> Any:
        if fqn not in self._values:
            found = self._tree.node_at(fqn)
            if found is None:
                path = self.contents.path
                raise MissingKeysError(
                    f"{path}: the checkpoint has no leaf or container {fqn!r}", path=path, keys=[fqn]
                )
            self._values[fqn] = self._skeleton(found[1])
        return self._values[fqn]

    def _raw(self, node: Node) -> Any:
        rank, number = self._tree.object_at(node[1])
        return self._objects.raw(rank)[number]

    def _skeleton(self, node: Node) -> Any:
        """Return the value of a node with placeholders for tensors and other values that are read later.

        A composite tensor becomes a dict of its components.
        """
        kind = node[0]
        if kind in KEYED:
            pairs = zip(node[1][::2], node[1][1::2], strict=True)
            found = ((python_key(key), self._skeleton(child)) for key, child in pairs if child is not OTHER_RANKS_ONLY)
            return mapping_of(form_in(node) if kind == DICT else None, found)
        if kind in SEQUENCES:
            members = [self._skeleton(child) for child in node[1] if child is not OTHER_RANKS_ONLY]
            return sequence_of(form_in(node), members) if kind == LIST else tuple(members)
        if kind == TENSOR:
            mark = torch.empty(0, device="meta")
            self._marks[id(mark)] = mark, self._tree.tensors[node[1]]
            return mark
        return self._container(node) if kind == OBJECT else _DeferredLeaf(node)

    def _container(self, node: Node) -> Any:
        """Return the value of an object if it is a list or dict, which torch flattens; else a `_DeferredLeaf`."""
        raw = self._raw(node)
        if isinstance(raw, list) or (isinstance(raw, dict) and raw.get("$") == "dict"):
            try:
                return self._objects.value(*self._tree.object_at(node[1]))
            except PickledLeafError:
                pass
        return _DeferredLeaf(node)

    def _whole(self, value: Any) -> Any:
        """Return a value of `_skeleton` with all placeholders replaced by the values that were saved."""
        if isinstance(value, _DeferredLeaf):
            kind, number = value.node
            if kind == OBJECT:
                return self._objects.value(*self._tree.object_at(number))
            found = self._read(self._tree.tensors[number])
            return bytes_of(found) if kind == BYTES else array_of(found)
        if isinstance(value, torch.Tensor) and id(value) in self._marks:
            return self._read(self._marks[id(value)][1])
        if isinstance(value, dict):
            pairs = ((key, self._whole(member)) for key, member in value.items())
            return mapping_of(mapping_form(value), pairs)
        if isinstance(value, deque):
            return deque(map(self._whole, value), value.maxlen)
        if type(value) in (list, tuple):
            return type(value)(map(self._whole, value))
        return value

    def refuse_incompatible_shards(self, boxes: Iterable[SavedBox]) -> None:
        """Refuse to read boxes of sharded subclasses whose shards are incompatible.

        Raises:
            PerRankUnavailableError: There is one; names it.
            CorruptCheckpointError, OSError: What has to be compared cannot be read.
        """
        doubtful, otherwise = self._tree.doubtful_components, "leave it out of the state dict"
        refuse_incompatible_shards(
            doubtful, boxes, self._reader, self._objects, verify=self._verify, otherwise=otherwise
        )

    def _read(self, saved: SavedTensor) -> torch.Tensor:
        self.refuse_incompatible_shards([whole_box(saved)])
        return read_tensor(self.contents, saved, None, self._files, threads=self._threads, verify=self._verify)


def _filled(saved: SavedTensor) -> list[tuple[int, Chunk]]:
    """Return the chunks that have elements, or for a tensor without elements one chunk."""
    assert saved.dtype in DTYPES
    return [found for found in saved.chunks if 0 not in found[1].sizes] or list(saved.chunks[:1])
