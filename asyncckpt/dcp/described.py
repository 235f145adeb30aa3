"""A committed checkpoint as torch.distributed.checkpoint sees one: its metadata, built from the index.

The names are those of the planner that saved it. Of what AsyncCheckpointer has saved, they are those that this torch's
`flatten_state_dict` gives the state dict, so that one of the same shape finds them. Other names of the same leaves, as
planners without flattening use them, are answered too, though not listed: leaves as they were stored, and containers.
"""

from __future__ import annotations

import io
from collections import deque
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
from asyncckpt.dcp.leaf_values import planner_bytes, saved_bytes
from asyncckpt.dcp.planner_data import planner_data_of, was_saved_by_torch
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import MissingKeysError, PickledLeafError
from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.format.state_tree import Node, form_in, fqn_of, leaves, python_key
from asyncckpt.format.structure import Chunk
from asyncckpt.loading.fetching import bytes_of
from asyncckpt.loading.saved_objects import SavedObjects
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.selection import HOLE
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.planning.numpy_values import array_of
from asyncckpt.planning.rebuilding import form_of, mapping_of, sequence_of
from asyncckpt.planning.torch_types import torch_dtype
from asyncckpt.storage.contents import Contents, SavedTensor, corrupt
from asyncckpt.storage.files import Files


class _Later:
    """A leaf whose value is read when it is wanted."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


class _Known(dict[str, Any]):
    """Metadata by name; also answers for names that it does not list."""

    def __init__(self, described: Described) -> None:
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


class Described:
    """See the module.

    Args:
        contents: The checkpoint.
        reader: Who reads it.
        files: The storage seam.
        threads, verify: Of reads.
        allow_pickle: Whether leaves that AsyncCheckpointer pickled may be unpickled.
    """

    def __init__(
        self, contents: Contents, reader: RankInfo, files: Files, *, threads: int, verify: bool, allow_pickle: bool
    ) -> None:
        self.contents = contents
        self._files, self._threads, self._verify = files, threads, verify
        self._tree = SavedTree(contents, reader)
        self._objects = SavedObjects(contents, files, allow_pickle=allow_pickle)
        self._marks: dict[int, tuple[torch.Tensor, SavedTensor]] = {}  # by identity: a mark stays as long as it counts
        self._paths: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._allow_pickle = allow_pickle
        try:
            if not was_saved_by_torch(contents.manifest):
                self._values, self._paths = flatten_state_dict(self._skeleton(self._tree.tree))
        except ValueError:
            pass  # two names become one where torch looks into what we keep as one leaf
        if not self._values:
            for path, node in leaves(self._tree.tree):
                if node is not HOLE:
                    self._values[fqn_of(path)], self._paths[fqn_of(path)] = (
                        self._skeleton(node),
                        tuple(key if isinstance(key, (str, int)) else str(key) for key in path),
                    )
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, Chunk]]] = {}

    def metadata(self, load_id: str) -> Metadata:
        """Return the checkpoint's metadata."""
        known = _Known(self)
        for fqn in self._values:
            known[fqn] = self.about(fqn)
        save_id = str(self.contents.manifest.save_id)
        return Metadata(
            state_dict_metadata=known,
            planner_data=self._planner_data(),
            storage_meta=StorageMeta(checkpoint_id=self.contents.path, save_id=save_id, load_id=load_id),
        )

    def _planner_data(self) -> Any:
        try:
            return planner_data_of(self.contents.manifest, self._paths, allow_pickle=self._allow_pickle)
        except (ValueError, TypeError) as error:
            detail = f"the planner data do not decode: {error}"
            raise corrupt(self.contents.path, MANIFEST_NAME, detail) from error

    def knows(self, fqn: str) -> bool:
        """Whether there is a leaf, or a container, of this name."""
        return fqn in self._values or self._tree.node_at(fqn) is not None

    def about(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return the metadata of one name that is known."""
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
        """Return the tensor of this name; None when it is no tensor."""
        value = self._value(fqn)
        return self._marks[id(value)][1] if isinstance(value, torch.Tensor) else None

    def chunk_at(self, saved: SavedTensor, offsets: tuple[int, ...]) -> tuple[int, Chunk] | None:
        """Return (rank, chunk) of a tensor by where the chunk begins."""
        found = self._chunks.get(saved.fqn)
        if found is None:
            found = self._chunks[saved.fqn] = {chunk.offsets: (rank, chunk) for rank, chunk in _filled(saved)}
        return found.get(offsets)

    def leaf_bytes(self, fqn: str) -> io.BytesIO:
        """Return a leaf that is no tensor as a planner reads it.

        Raises:
            CorruptCheckpointError: The files differ from what was saved.
            PickledLeafError: AsyncCheckpointer pickled it, and it may not be unpickled.
            OSError: The files cannot be read.
        """
        value = self._value(fqn)
        if isinstance(value, _Later) and value.node[0] == "O":
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
                raise MissingKeysError(f"{path}: there is nothing called {fqn!r}", path=path, keys=[fqn])
            self._values[fqn] = self._skeleton(found[1])
        return self._values[fqn]

    def _raw(self, node: Node) -> Any:
        rank, number = self._tree.object_at(node[1])
        return self._objects.raw(rank)[number]

    def _skeleton(self, node: Node) -> Any:
        """Return a node's value with marks for what is read later."""
        kind = node[0]
        if kind in ("d", "o"):
            pairs = zip(node[1][::2], node[1][1::2], strict=True)
            found = ((python_key(key), self._skeleton(child)) for key, child in pairs if child is not HOLE)
            return mapping_of(form_in(node) if kind == "d" else None, found)
        if kind in ("l", "t"):
            members = [self._skeleton(child) for child in node[1] if child is not HOLE]
            return sequence_of(form_in(node), members) if kind == "l" else tuple(members)
        if kind == "T":
            mark = torch.empty(0, device="meta")
            self._marks[id(mark)] = mark, self._tree.tensors[node[1]]
            return mark
        return self._container(node) if kind == "O" else _Later(node)

    def _container(self, node: Node) -> Any:
        """An object that torch would look into must be there for it; all others may wait."""
        raw = self._raw(node)
        if isinstance(raw, list) or (isinstance(raw, dict) and raw.get("$") == "dict"):
            try:
                return self._objects.value(*self._tree.object_at(node[1]))
            except PickledLeafError:
                pass
        return _Later(node)

    def _whole(self, value: Any) -> Any:
        """Return a value with its marks replaced by what they stand for."""
        if isinstance(value, _Later):
            kind, number = value.node
            if kind == "O":
                return self._objects.value(*self._tree.object_at(number))
            found = self._read(self._tree.tensors[number])
            return bytes_of(found) if kind == "B" else array_of(found)
        if isinstance(value, torch.Tensor) and id(value) in self._marks:
            return self._read(self._marks[id(value)][1])
        if isinstance(value, dict):
            pairs = ((key, self._whole(member)) for key, member in value.items())
            return mapping_of(form_of(value), pairs)
        if isinstance(value, deque):
            return deque(map(self._whole, value), value.maxlen)
        if type(value) in (list, tuple):
            return type(value)(map(self._whole, value))
        return value

    def _read(self, saved: SavedTensor) -> torch.Tensor:
        return read_tensor(self.contents, saved, None, self._files, threads=self._threads, verify=self._verify)


def _filled(saved: SavedTensor) -> list[tuple[int, Chunk]]:
    """Return the chunks with elements in them; of a tensor without elements, one."""
    assert saved.dtype in DTYPES
    return [found for found in saved.chunks if 0 not in found[1].sizes] or list(saved.chunks[:1])
