"""Reads directories of `torch.distributed.checkpoint`: a pickled `.metadata`, and files with items of `torch.save`.

The offset of the elements in an item is found when they are read, from the directory at its end and its pickle.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.format.objects import Record
from asyncckpt.format.state_tree import MAX_DEPTH, MAX_KEY_CHARS, Node, Path, fqn_of, tree_of
from asyncckpt.format.structure import Chunk
from asyncckpt.interop.sources.pickle_globals import KNOWN, TensorRef, dtype_of, size_of
from asyncckpt.interop.sources.pickle_tree import TreeBuilder
from asyncckpt.interop.sources.safetensors_file import SAFETENSORS_START, is_safetensors
from asyncckpt.interop.sources.source import ContentsBuilder, read_exactly
from asyncckpt.interop.sources.torch_file import TorchArchive
from asyncckpt.interop.sources.unpickler import (
    MAX_NBYTES,
    OpaqueGlobal,
    members_of,
    shown,
    unknown_global,
    unpickle_data,
)
from asyncckpt.storage.contents import Contents, Place
from asyncckpt.storage.files import Files, opened, read_small_file

Item = tuple[int, int, int]
"""(part, offset, length) of one archive that `torch.save` wrote."""


def read_dcp_directory(path: str, files: Files) -> Contents:
    """Read the structure of a DCP directory, and its leaves that are no tensors; some may be an `UnreadLeaf`.

    Raises:
        CorruptCheckpointError: A file is damaged.
        UnsupportedFormatError: It holds a value that cannot be read, or was written through a transform.
        DuplicateNameError: Two leaves have the same name.
        OSError: A file cannot be read.
    """
    return _Directory(path, files).contents()


class _Directory:
    def __init__(self, path: str, files: Files) -> None:
        self._path, self._files = path, files
        self._builder = ContentsBuilder("dcp", path, path, files)
        self._tied: dict[Any, Node] = {}
        self._trees: TreeBuilder | None = None
        self._items: dict[tuple[str, tuple[int, ...] | None], Item] = {}

    def contents(self) -> Contents:
        """Read the directory."""
        builder = self._builder
        with builder.refusing(DCP_METADATA_NAME):
            builder.stamp(DCP_METADATA_NAME)
            data = read_small_file(self._files, os.path.join(self._path, DCP_METADATA_NAME), MAX_NBYTES)
            metadata, _ = unpickle_data(data, KNOWN)
            if not isinstance(metadata, Record) or metadata.kind != "Metadata":
                raise ValueError("it holds no Metadata")
            entries = metadata.get("state_dict_metadata")
            storage = metadata.get("storage_data")
            if not isinstance(entries, dict) or not isinstance(storage, dict):
                raise ValueError("it lacks the list of its items")
            about = metadata.get("storage_meta")
            builder.source.names_save = isinstance(about, Record) and bool(about.get("save_id"))
            self._read_storage(storage)
            paths = self._paths(metadata.get("planner_data"), entries)
            tree = tree_of([(paths[fqn], self._leaf(fqn, paths[fqn], entry)) for fqn, entry in entries.items()])
        return builder.contents(tree, "torch.distributed.checkpoint")

    def _read_storage(self, storage: dict[Any, Any]) -> None:
        archives: dict[tuple[str, int, int], None] = {}
        for index, info in storage.items():
            if not isinstance(index, Record) or not isinstance(info, Record) or info.kind != "_StorageInfo":
                raise ValueError("an item's place is no place in a file")
            fqn, at = index.get("fqn"), index.get("offset")
            if type(fqn) is not str:
                raise ValueError("an item without a name")
            name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if type(name) is not str or any(type(n) is not int or n < 0 for n in (offset, length)):
                raise ValueError("an item's place is no place in a file")
            if steps := info.get("transform_descriptors"):
                names = ", ".join(map(shown, list(members_of(steps))[:9])) or shown(steps)
                raise self._builder.unsupported(f"item {shown(fqn)} went through {names}: not supported")
            part = self._builder.file(name)
            if offset + length > self._builder.shards[part].nbytes:
                raise self._builder.corrupt("it was cut short", file=name, fqn=fqn)
            archives[name, offset, length] = None
            self._items[fqn, None if at is None else size_of(at)] = (part, offset, length)
        for (name, offset, length), (other, start, _) in itertools.pairwise(sorted(archives)):
            # Tied tensors may share an item. Overlapping items could make a reader read the same bytes many times.
            if name == other and offset + length > start:
                self._refuse_safetensors(self._builder.file(name), offset, self._files)
                raise self._builder.corrupt("two of its items overlap", file=name)
        self._builder.source.archives += archives

    def _paths(self, planner_data: Any, entries: dict[Any, Any]) -> dict[str, Path]:
        """Return the path of each leaf; a leaf without a path in the planner's data is at the top level."""
        given = planner_data if isinstance(planner_data, dict) else {}
        found: dict[str, Path] = {}
        others = {shown(fqn)[:80]: "" for fqn in given if fqn not in entries}
        if planner_data is not None and not isinstance(planner_data, dict):
            others[""] = ""
        for fqn in entries:
            if type(fqn) is not str:
                raise ValueError(f"the name {shown(fqn)} is no text")
            path = given.get(fqn, (fqn,))
            is_path = type(path) is tuple and path and all(type(key) in (str, int) for key in path)
            if not is_path or fqn_of(path) != fqn:
                others[fqn] = ""
                path = (fqn,)
            if len(path) > MAX_DEPTH - 2:
                raise self._builder.unsupported(f"leaf {fqn[:80]!r} is nested deeper than {MAX_DEPTH} levels")
            if any(type(key) is str and len(key) > MAX_KEY_CHARS for key in path):
                raise self._builder.unsupported(f"leaf {fqn[:80]!r} has a key of more than {MAX_KEY_CHARS} characters")
            found[fqn] = path
        if others:
            self._builder.source.changed["what a planner keeps that is no path was not read"] = others
        ends = set(found.values())
        through = [fqn for fqn, path in found.items() if any(path[:n] in ends for n in range(1, len(path)))]
        if through:  # a dict had the keys 1 and "1", which became the same
            found |= {fqn: (fqn,) for fqn in through}
            self._builder.source.changed["whose path leads through another leaf is at the top level"] = dict.fromkeys(
                through, ""
            )
        return found

    def _leaf(self, fqn: str, path: Path, entry: Any) -> Node:
        kind = entry.kind if isinstance(entry, Record) else ""
        if kind == "BytesStorageMetadata":
            item = self._items.get((fqn, None))
            if item is None:
                raise self._builder.corrupt(f"leaf {fqn!r} is in no file", fqn=fqn)
            return self._object(path, item)
        if kind != "TensorStorageMetadata":
            raise ValueError(f"leaf {shown(fqn)} is neither tensor nor bytes")
        properties, chunks = entry.get("properties"), entry.get("chunks")
        if not isinstance(properties, Record) or not isinstance(chunks, list):
            raise ValueError(f"tensor {fqn!r} lacks its properties")
        state = properties.state
        dtype = dtype_of(state[0] if isinstance(state, tuple) and state else properties.get("dtype"))
        size = size_of(entry.get("size"))
        boxes = sorted({(size_of(c.get("offsets")), size_of(c.get("sizes"))) for c in chunks if isinstance(c, Record)})
        items = tuple(self._items.get((fqn, offsets)) or self._items.get((fqn, None)) for offsets, _ in boxes)
        key = (dtype, size, tuple(boxes), items)
        if not items or key not in self._tied:
            found = [self._chunk(fqn, dtype, box, item) for box, item in zip(boxes, items, strict=True)]
            self._tied[key] = self._builder.tensor(fqn, dtype, size, found)
        return self._tied[key]

    def _chunk(self, fqn: str, dtype: str, box: tuple[tuple[int, ...], tuple[int, ...]], item: Item | None) -> Chunk:
        offsets, sizes = box
        if item is None:
            raise self._builder.corrupt(f"a chunk of tensor {fqn!r} at {list(offsets)} is in no file", fqn=fqn)
        nbytes = math.prod(sizes) * DTYPES[dtype].itemsize

        def find(files: Files) -> Place:
            name = self._builder.shards[item[0]].name
            with self._builder.refusing(name, f"tensor {fqn!r}: "), self._open_archive(item, files) as archive:
                value = archive.value()
                if type(value) is OpaqueGlobal:
                    raise unknown_global(value.name)
                if type(value) is not TensorRef or (value.dtype, value.size) != (dtype, sizes):
                    raise ValueError(f"the item holds something else than {dtype}{list(sizes)}")
                return value.place(item[0], item[1] + archive.storage(value.storage))

        part = self._builder.place(item[0], nbytes, find)
        return Chunk(part=part, offset_bytes=0, nbytes=nbytes, offsets=offsets, sizes=sizes)

    @contextlib.contextmanager
    def _open_archive(self, item: Item, files: Files) -> Iterator[TorchArchive]:
        part, offset, length = item
        with opened(files, os.path.join(self._path, self._builder.shards[part].name), os.O_RDONLY) as fd:
            try:
                archive = TorchArchive(read_exactly(files, fd, length, offset), length)
            except ValueError:
                self._refuse_safetensors(part, offset, files)
                raise
            yield archive

    def _refuse_safetensors(self, part: int, offset: int, files: Files) -> None:
        """Refuse `SerializationFormat.SAFETENSORS`: its metadata gives the offset of the header for every tensor."""
        file = self._builder.shards[part]
        nbytes = file.nbytes - offset
        with opened(files, os.path.join(self._path, file.name), os.O_RDONLY) as fd:
            start = read_exactly(files, fd, nbytes, offset)(0, min(nbytes, SAFETENSORS_START))
        if is_safetensors(start, nbytes):
            said = f"{file.name} was written with SerializationFormat.SAFETENSORS, which stock dcp.load does not read"
            raise self._builder.unsupported(said, "SerializationFormat.SAFETENSORS")

    def _object(self, path: Path, item: Item) -> Node:
        with (
            self._builder.refusing(self._builder.shards[item[0]].name),
            self._open_archive(item, self._files) as archive,
        ):
            value = archive.value()
            self._trees = self._trees or TreeBuilder(self._builder)
            return self._trees.add(value, path, lambda storage: (item[0], item[1] + archive.storage(storage)))
