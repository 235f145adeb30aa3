"""Directories of `torch.distributed.checkpoint`: a pickled `.metadata`, and files of items that `torch.save` wrote.

Where the elements lie inside an item is found when they are read: its directory at the end, its pickle at the start.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError
from asyncckpt.foreign.assembly import Assembly
from asyncckpt.foreign.growth import Growth
from asyncckpt.foreign.long_values import LongBytes
from asyncckpt.foreign.nesting import led_through_leaves, nested
from asyncckpt.foreign.pickle_values import shown, unknown_global
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.refusals import MAX_NBYTES, UnpicklingError
from asyncckpt.foreign.safetensors_header import SAFETENSORS_START, is_safetensors
from asyncckpt.foreign.strangers import Stranger
from asyncckpt.foreign.torch_file import TorchArchive, place_of
from asyncckpt.foreign.torch_globals import KNOWN, TensorRef, dtype_of, size_of
from asyncckpt.foreign.unpickling import unpickle_data
from asyncckpt.format.keys import MAX_KEY_CHARS
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.format.records import Record
from asyncckpt.format.structure import Chunk
from asyncckpt.format.tree import MAX_DEPTH, Node, Path, fqn_of
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, opened, read_small_file
from asyncckpt.storage.source import Located, Place, Strided

Item = tuple[int, int, int]
"""(part, offset, length) of what one `torch.save` wrote."""


def read_dcp_directory(path: str, files: Files) -> Contents:
    """Read the structure of a DCP directory, and its leaves that are no tensors; see `storage.unread` for some.

    Raises:
        CorruptCheckpointError: Damaged.
        UnsupportedFormatError: It holds something that is not read, or was written through a transform.
        DuplicateNameError: Two leaves have one name.
        OSError: It cannot be read.
    """
    return _Directory(path, files).contents()


class _Directory:
    def __init__(self, path: str, files: Files) -> None:
        self._path, self._files = path, files
        self._assembly = Assembly("dcp", path, path, files)
        self._tied: dict[Any, Node] = {}
        self._growth = Growth(self._assembly)
        self._items: dict[tuple[str, tuple[int, ...] | None], Item] = {}

    def contents(self) -> Contents:
        """Return the whole."""
        assembly = self._assembly
        try:
            assembly.stamp(DCP_METADATA_NAME)
            data = read_small_file(self._files, os.path.join(self._path, DCP_METADATA_NAME), MAX_NBYTES)
            metadata, _ = unpickle_data(data, KNOWN)
            if not isinstance(metadata, Record) or metadata.kind != "Metadata":
                raise ValueError("it holds no Metadata")
            entries = metadata.get("state_dict_metadata")
            storage = metadata.get("storage_data")
            if not isinstance(entries, dict) or not isinstance(storage, dict):
                raise ValueError("it lacks the list of its items")
            about = metadata.get("storage_meta")
            assembly.source.names_save = isinstance(about, Record) and bool(about.get("save_id"))
            self._read_storage(storage)
            paths = self._paths(metadata.get("planner_data"), entries)
            leaves = [(paths[fqn], self._leaf(fqn, paths[fqn], entry)) for fqn, entry in entries.items()]
            tree = nested(leaves)
        except ValueError as error:
            if isinstance(error, AsyncCkptError):
                raise
            raise assembly.refused(error, DCP_METADATA_NAME) from error
        return assembly.contents(tree, "torch.distributed.checkpoint")

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
            if info.get("transform_descriptors"):
                steps = ", ".join(map(shown, list(info.get("transform_descriptors"))[:9]))
                raise self._assembly.unsupported(f"item {shown(fqn)} went through {steps}: not supported")
            part = self._assembly.file(name)
            if offset + length > self._assembly.shards[part].nbytes:
                raise self._assembly.corrupt("it was cut short", file=name, fqn=fqn)
            archives[name, offset, length] = None
            self._items[fqn, None if at is None else size_of(at)] = (part, offset, length)
        for (name, offset, length), (other, start, _) in itertools.pairwise(sorted(archives)):
            # Tied tensors may share an item. What overlaps would be read as often as somebody has written it down.
            if name == other and offset + length > start:
                self._refuse_safetensors(self._assembly.file(name), offset, self._files)
                raise self._assembly.corrupt("two of its items overlap", file=name)
        self._assembly.source.archives += archives

    def _paths(self, planner_data: Any, entries: dict[Any, Any]) -> dict[str, Path]:
        """Return where each leaf stands in the nesting; without a path its name is a key of a flat dict."""
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
                raise self._assembly.unsupported(f"leaf {fqn[:80]!r} is nested deeper than {MAX_DEPTH} levels")
            if any(type(key) is str and len(key) > MAX_KEY_CHARS for key in path):
                raise self._assembly.unsupported(f"leaf {fqn[:80]!r} has a key of more than {MAX_KEY_CHARS} characters")
            found[fqn] = path
        if others:
            self._assembly.source.changed["what a planner keeps that is no path was not read"] = others
        through = led_through_leaves(found)
        if through:  # of a dict with the keys 1 and "1", which became one
            found |= {fqn: (fqn,) for fqn in through}
            self._assembly.source.changed["whose path leads through another leaf is at the top level"] = dict.fromkeys(
                through, ""
            )
        return found

    def _leaf(self, fqn: str, path: Path, entry: Any) -> Node:
        kind = entry.kind if isinstance(entry, Record) else ""
        if kind == "BytesStorageMetadata":
            item = self._items.get((fqn, None))
            if item is None:
                raise self._assembly.corrupt(f"leaf {fqn!r} lies in no file", fqn=fqn)
            return self._object(path, item)
        if kind != "TensorStorageMetadata":
            raise ValueError(f"leaf {shown(fqn)} is neither tensor nor bytes")
        properties, chunks = entry.get("properties"), entry.get("chunks")
        if not isinstance(properties, Record) or not isinstance(chunks, list):
            raise ValueError(f"tensor {fqn!r} lacks its properties")
        dtype = dtype_of(properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype"))
        size = size_of(entry.get("size"))
        boxes = {(size_of(c.get("offsets")), size_of(c.get("sizes"))) for c in chunks if isinstance(c, Record)}
        items = tuple((self._items.get((fqn, box[0])) or self._items.get((fqn, None)), box) for box in sorted(boxes))
        key = (dtype, size, items)
        if items and key in self._tied:
            return self._tied[key]
        found = [self._chunk(fqn, dtype, offsets, sizes) for offsets, sizes in sorted(boxes)]
        self._tied[key] = self._assembly.tensor(fqn, dtype, size, found)
        return self._tied[key]

    def _chunk(self, fqn: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        item = self._items.get((fqn, offsets)) or self._items.get((fqn, None))
        if item is None:
            raise self._assembly.corrupt(f"a chunk of tensor {fqn!r} at {list(offsets)} lies in no file", fqn=fqn)
        nbytes = math.prod(sizes) * DTYPES[dtype].itemsize
        part = self._assembly.place(item[0], nbytes, self._finder(fqn, item, dtype, sizes))
        return Chunk(part=part, offset_bytes=0, nbytes=nbytes, offsets=offsets, sizes=sizes)

    def _finder(self, fqn: str, item: Item, dtype: str, sizes: tuple[int, ...]) -> Callable[[Files], Place]:
        assembly = self._assembly
        part, offset, _ = item
        name = assembly.shards[part].name
        known: list[Located | Strided] = []

        def find(files: Files) -> Place:
            if known:  # the file is the same: whoever reads asks `check_unchanged` afterwards
                return known[0]
            try:
                with opened(files, os.path.join(assembly.source.directory, name), os.O_RDONLY) as fd:
                    archive = self._archive(item, files, fd)
                    value = archive.value()
                    if type(value) is Stranger:
                        raise unknown_global(value.name)
                    if type(value) is not TensorRef or (value.dtype, value.size) != (dtype, sizes):
                        raise ValueError(f"the item holds something else than {dtype}{list(sizes)}")
                    place = place_of(value, part, offset + archive.storage(value.storage))
            except AsyncCkptError:
                raise
            except ValueError as error:
                said = UnpicklingError(f"tensor {fqn!r}: {error}", getattr(error, "name", None))
                raise assembly.refused(said, name) from error
            known.append(place if isinstance(place, Strided) else Located(*place))
            return known[0]

        return find

    def _archive(self, item: Item, files: Files, fd: int) -> TorchArchive:
        part, offset, length = item
        try:
            return TorchArchive(read_exactly(files, fd, length, offset), length)
        except ValueError:
            self._refuse_safetensors(part, offset, files)
            raise

    def _refuse_safetensors(self, part: int, offset: int, files: Files) -> None:
        """Refuse `SerializationFormat.SAFETENSORS`: all tensors of a file are said to begin where its header does."""
        file = self._assembly.shards[part]
        nbytes = file.nbytes - offset
        with opened(files, os.path.join(self._path, file.name), os.O_RDONLY) as fd:
            start = read_exactly(files, fd, nbytes, offset)(0, min(nbytes, SAFETENSORS_START))
        if is_safetensors(start, nbytes):
            said = f"{file.name} was written with SerializationFormat.SAFETENSORS, which stock dcp.load does not read"
            raise self._assembly.unsupported(said, "SerializationFormat.SAFETENSORS")

    def _object(self, path: Path, item: Item) -> Node:
        part, offset, _ = item
        name = self._assembly.shards[part].name
        with opened(self._files, os.path.join(self._path, name), os.O_RDONLY) as fd:
            try:
                archive = self._archive(item, self._files, fd)
                value = archive.value()
            except AsyncCkptError:
                raise
            except ValueError as error:
                raise self._assembly.refused(error, name) from error

            def locate(ref: TensorRef | LongBytes) -> tuple[int, int] | Strided:
                if isinstance(ref, LongBytes):
                    return part, offset + ref.start
                return place_of(ref, part, offset + archive.storage(ref.storage))

            return self._growth.node_of(value, path, locate)
