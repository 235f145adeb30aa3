"""The targets `torch` and `dcp`: archives that `torch.load(weights_only=True)` and stock `dcp.load` read."""

from __future__ import annotations

import codecs
import itertools
import mmap
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.serialization import config as torch_config

from asyncckpt.dtypes import SUB_BYTE
from asyncckpt.errors import DuplicateNameError, InsufficientMemoryError, UnsupportedLeafError
from asyncckpt.format.dcp import DCP_VERSION, is_terminal, item_pickle, items_of
from asyncckpt.format.layout import Payload
from asyncckpt.format.names import DCP_METADATA_NAME
from asyncckpt.format.objects import decode_value
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    LIST,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    SEQUENCES,
    TENSOR,
    Node,
    Path,
    fqn_of,
    is_counter,
    leaves,
    members,
    python_key,
)
from asyncckpt.format.torch_pickle import NotPickledError
from asyncckpt.interop.conversion_losses import (
    TOP,
    ConversionLosses,
    container_types_lost,
    ordered_dicts_lost,
    refuse_long_keys,
    sentence,
)
from asyncckpt.interop.copy_pipeline import OutputFile, Target, length_of
from asyncckpt.interop.diff import bytes_at
from asyncckpt.interop.outline import Outline, containers
from asyncckpt.interop.sources.unpickler import MAX_NBYTES
from asyncckpt.loading.fetch import tensor_for
from asyncckpt.state_dict.leaf_codecs import decode_torch
from asyncckpt.state_dict.unflatten import Unflattener
from asyncckpt.storage.contents import SavedTensor
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import check_memory_is_real, torch_dtype

_ENTRY = struct.Struct("<4s6H3L5H2L")
_DESCRIPTOR = b"PK\x07\x08"
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = 4, 16
_END_NBYTES, _ZIP64_END_NBYTES = 22, 76


class SkippedSave:
    """A file object for `torch.save` under `torch.serialization.skip_data`, which seeks over the elements of tensors.

    Attributes:
        parts: The bytes that were written, and the length of each range that was skipped, in the order of the file.
    """

    def __init__(self) -> None:
        self.parts: list[bytearray | int] = []

    def write(self, data: Any) -> int:
        """Append bytes."""
        if not self.parts or isinstance(self.parts[-1], int):
            self.parts.append(bytearray())
        part = self.parts[-1]
        assert isinstance(part, bytearray)
        part += data
        return len(data)

    def seek(self, nbytes: int, whence: int = 0) -> int:
        """Skip `nbytes` bytes of elements."""
        assert whence == 1, "torch seeks forward only"
        self.parts.append(nbytes)
        return 0

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""


class Entry(NamedTuple):
    """An entry of an archive's directory; `crc_at` is the offset of its CRC-32 in the last piece of the archive."""

    name: bytes
    nbytes: int
    crc_at: int


def entries_of(pieces: Sequence[bytes | Payload]) -> Iterator[Entry]:
    """Yield the entries of an archive in order. `nbytes` is 0xFFFFFFFF for entries of 4 GiB and more."""
    tail = pieces[-1]
    assert isinstance(tail, bytes), "the directory is last"
    at = len(tail) - _END_NBYTES - _ZIP64_END_NBYTES - int.from_bytes(tail[-10:-6], "little")
    while tail.startswith(b"PK\x01\x02", at):
        found = _ENTRY.unpack_from(tail, at)
        name_at = at + _ENTRY.size
        yield Entry(tail[name_at : name_at + found[10]], found[9], at + _CRC_IN_ENTRY)
        at = name_at + sum(found[10:13])


def crc_places(pieces: Sequence[bytes | Payload]) -> tuple[tuple[int, int], ...]:
    """Return where the CRC-32 of each payload is written: (index of the payload in `pieces`, offset in the archive).

    In an archive of `torch.save` this is the data descriptor and the entry in the directory, both after the elements.
    Any other file has no CRC-32s.
    """
    payloads = [number for number, piece in enumerate(pieces) if isinstance(piece, Payload)]
    if not payloads or not isinstance(pieces[0], bytes) or not pieces[0].startswith(b"PK\x03\x04"):
        return ()
    starts = list(itertools.accumulate(map(length_of, pieces), initial=0))
    entries = (entry for entry in entries_of(pieces) if b"/data/" in entry.name and entry.nbytes)
    places: list[tuple[int, int]] = []
    for number, entry in zip(payloads, entries, strict=True):
        after = pieces[number + 1]
        assert isinstance(after, bytes) and after.startswith(_DESCRIPTOR), "what was skipped has a data descriptor"
        places += [(number, starts[number + 1] + _CRC_IN_DESCRIPTOR), (number, starts[-2] + entry.crc_at)]
    return tuple(places)


_ALIGNMENT = 64
"""What `torch.save` aligns elements to."""

_MAP_NORESERVE = 0x4000
"""Linux on x86 and arm, `uapi/asm-generic/mman-common.h`; Python names it from 3.13 on."""


def check_torch(outline: Outline) -> ConversionLosses:
    """Return which leaves a file for `torch.load(weights_only=True)` cannot hold, and what it holds in another form."""
    losses = _check_pickles(outline)
    losses.changed += container_types_lost(containers(outline.tree), kept=("Counter",))
    return losses


def _check_pickles(outline: Outline) -> ConversionLosses:
    losses = ConversionLosses()
    for path, node in leaves(outline.tree):
        if node[0] == OBJECT:
            fqn = fqn_of(path)
            try:
                item_pickle(node, outline.objects)
            except NotPickledError as error:
                losses.cannot[fqn] = f"torch.load(weights_only=True) does not read {error}"
        elif outline.tensors[node[1]].dtype in SUB_BYTE:
            losses.cannot[fqn_of(path)] = f"torch.save writes no tensors of dtype {outline.tensors[node[1]].dtype}"
    refuse_long_keys(outline, losses)
    arrays = [fqn for fqn, node in outline.leaves() if node[0] == ARRAY]
    losses.changed += sentence("numpy arrays became tensors", arrays)
    for path, node in containers(outline.tree):
        if node[0] == ORDERED_DICT and node[2] is not None:
            try:
                item_pickle((ORDERED_DICT, (), node[2]), outline.objects)
            except NotPickledError as error:
                losses.unversioned.add(fqn_of(path))
                name = fqn_of(path) or TOP
                losses.changed.append(f"the _metadata of {name}, which holds {error}, is not kept")
    return losses


def check_dcp(outline: Outline) -> ConversionLosses:
    """Return which leaves a DCP directory cannot hold, and what it holds in another form.

    State dicts are flattened as `torch.distributed.checkpoint` does it.

    Raises:
        DuplicateNameError: A dict has two keys, such as 1 and "1", that become the same text.
    """
    _refuse_one_text(outline)
    losses = _check_pickles(outline)
    for fqn, why in losses.cannot.items():
        losses.cannot[fqn] = why.replace("torch.load(weights_only=True) does not read", "no item holds")
    apart = list(_containers(outline.tree, ()))
    paths = {path for path, _ in apart}
    lists = {fqn_of(path) for path, node in apart if node[0] == LIST}
    dicts = [(path, node) for path, node in apart if node[0] != LIST]
    numbers = {fqn_of(path) or TOP for path, node in dicts if any(type(key) is not str for key in node[1][::2])}
    empty = [path for path, node in dicts if not node[1]]
    lacking = {fqn_of(path[:n]) for path in empty for n, key in enumerate(path) if n and type(key) is int} & lists
    losses.changed += sentence("keys that are no texts became texts in", sorted(numbers))
    # Containers that are flattened lose their type; in the items only Counters keep it.
    otherwise = [(path, node) for path, node in containers(outline.tree) if path in paths or not is_counter(node)]
    losses.changed += ordered_dicts_lost(apart) + container_types_lost(otherwise)
    losses.changed += sentence("empty dicts are not kept", sorted({fqn_of(path) or TOP for path in empty}))
    losses.changed += sentence(
        "lists lost the members that were empty dicts, or are missing if they held nothing else", sorted(lacking)
    )
    losses.changed += sentence("tied tensors are stored apart, for each tuple that holds one", sorted(_untied(outline)))
    return losses


def _refuse_one_text(outline: Outline) -> None:
    """Raise if two keys of a dict become the same text."""
    for path, node in _containers(outline.tree, ()):
        texts: set[str] = set()
        for key in node[1][::2] if node[0] != LIST else ():
            if str(key) in texts:
                fqn = fqn_of((*path, key))
                where = outline.contents.path
                said = (
                    f"{where}: keys {str(key)!r} and {key!r} of {fqn_of(path) or TOP} are the same in DCP directories"
                )
                raise DuplicateNameError(f"{said}; give one of them another name (key_map, --rename)", fqn=fqn)
            texts.add(str(key))


def _untied(outline: Outline) -> set[str]:
    """Return the FQNs of tied tensors that are in a tuple, which is one item of DCP, and also outside of it."""
    items: dict[int, dict[Path, list[str]]] = {}
    for item in items_of(outline.tree):
        for path, leaf in leaves(item.node):
            if leaf[0] in (TENSOR, ARRAY):
                whole = item.path if item.node[0] not in (TENSOR, ARRAY) else ()
                items.setdefault(leaf[1], {}).setdefault(whole, []).append(fqn_of((*item.path, *path)))
    return {name for found in items.values() if len(found) > 1 for names in found.values() for name in names}


def _containers(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of the dicts and lists that DCP flattens; other containers are part of an item."""
    if node[0] in MAPPINGS or (node[0] == LIST and not is_terminal(node)):
        yield path, node
        for key, child in members(node):
            yield from _containers(child, (*path, key))


def _saved(outline: Outline, node: Node, files: Files) -> tuple[bytes | Payload, ...]:
    """Return the content of the file that `torch.save` writes for a node, with zeros as CRC-32s of elements.

    Raises:
        UnsupportedLeafError: The pickle would be too long to be read again; or this torch lacks a dtype, or is in a
            mode such as FakeTensorMode, in which tensors have no memory.
        InsufficientMemoryError: A tensor has more bytes than the address space.
        CorruptCheckpointError, OSError: A leaf that is long `bytes`, which becomes part of the pickle, cannot be read.
    """
    _refuse_long(sum(outline.nbytes_of(number) for number in {leaf[1] for _, leaf in leaves(node) if leaf[0] == BYTES}))
    objects: list[Any] = []
    held: dict[Node, Node] = {}
    numbers: dict[int, int] = {}

    def object_of(number: int) -> int:
        objects.append(_as_read(decode_value(outline.objects[number], decode_torch)))
        return len(objects) - 1

    def plain(node: Node) -> Node:
        kind, inner = node[:2]
        if kind in MAPPINGS:
            inside = tuple(plain(member) if n % 2 else _as_read(python_key(member)) for n, member in enumerate(inner))
            if kind == ORDERED_DICT:
                return (kind, inside, None if node[2] is None else object_of(node[2]))
            return (kind, inside, *node[2:]) if is_counter(node) else (kind, inside)
        if kind in SEQUENCES:
            return (kind, tuple(map(plain, inner)))
        if kind == OBJECT:
            return (kind, object_of(inner))
        if kind == BYTES:
            if node not in held:
                objects.append(bytes_at(outline, node, files))
                held[node] = (OBJECT, len(objects) - 1)
            return held[node]
        return (TENSOR, numbers.setdefault(inner, len(numbers)))

    tree = plain(node)
    value, sink = Unflattener(_placeholders(outline, list(numbers)), objects).value_of(tree), SkippedSave()
    with torch.serialization.skip_data(), torch_config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(value, cast(Any, sink))
    skipped = (number for number in numbers if outline.nbytes_of(number))
    pieces = tuple(bytes(p) if isinstance(p, bytearray) else Payload(next(skipped), p) for p in sink.parts)
    assert next(skipped, None) is None, "torch.save skipped every storage"
    _refuse_long(next(entries_of(pieces)).nbytes)
    return pieces


class _NoBytes:
    """Stands for empty `bytes`: pickle encodes those as a call of `bytes`, which `weights_only=True` refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


_NO_BYTES = _NoBytes()


def _as_read(value: Any) -> Any:
    """Return a value of plain types that `torch.load(weights_only=True)` reads as an equal value."""
    kind = type(value)
    if kind is bytes:
        return value or _NO_BYTES
    if kind in (list, tuple, set):
        return kind(map(_as_read, value))
    return {_as_read(key): _as_read(member) for key, member in value.items()} if kind is dict else value


def _refuse_long(nbytes: int) -> None:
    if nbytes > MAX_NBYTES:
        raise UnsupportedLeafError(
            f"the leaves that are no tensors would be a pickle of at least {nbytes} bytes; readers accept at most "
            f"{MAX_NBYTES}. Select fewer leaves with keys"
        )


def _placeholders(outline: Outline, numbers: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors of the right dtypes and shapes that take no memory: their elements are pages that nobody accesses.

    Tensors of one dtype have the same address, tensors of different dtypes different ones: torch refuses to save
    storages of different dtypes at one address.
    """
    check_memory_is_real("convert")
    path, starts = outline.contents.path, dict[str, int]()
    for number in numbers:
        starts.setdefault(outline.tensors[number].dtype, _ALIGNMENT * len(starts))
    nbytes = _ALIGNMENT * (len(starts) + 1) + max(map(outline.nbytes_of, numbers), default=0)
    try:
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        said = f"{path}: a tensor of {nbytes:,} bytes does not fit into the address space; convert it to another format"
        raise InsufficientMemoryError(said, nbytes=nbytes) from error
    found = []
    for number in numbers:
        saved = outline.tensors[number]
        if count := outline.nbytes_of(number):
            flat = torch.frombuffer(room, dtype=torch.uint8, count=count, offset=starts[saved.dtype])
            found.append(flat.view(torch_dtype(saved.dtype)).view(saved.global_shape))
        else:
            found.append(tensor_for(SavedTensor(saved.fqn, saved.dtype, saved.global_shape, ()), path))
    return found


def torch_target(outline: Outline, files: Files) -> Target:
    """Return the content of one file as `torch.save` writes it."""
    pieces = _saved(outline, outline.tree, files)
    file = OutputFile(name="", pieces=pieces, crc_at=crc_places(pieces))
    return Target(files=[file], is_directory=False, keeps_nesting=True)


def dcp_target(outline: Outline, files: Files, max_shard_nbytes: int | None) -> Target:
    """Return the files of a DCP directory: the items in one file, or several of bounded size; the metadata last.

    Tied tensors share an item. FQNs are those that stock `dcp.load` expects.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    shards = _Shards(max_shard_nbytes)
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    places: dict[int, tuple[str, int, int]] = {}
    archives: dict[Any, tuple[bytes | Payload, ...]] = {}
    items = list(items_of(outline.tree))
    for path, node, _ in items:
        fqn = fqn_of(path)
        if node[0] not in (TENSOR, ARRAY):
            entries[fqn] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(fqn)] = _StorageInfo(*shards.place(_saved(outline, node, files)))
            continue
        number = node[1]
        form = outline.tensors[number].dtype, torch.Size(outline.tensors[number].global_shape)
        if form not in archives:
            archives[form] = _saved(outline, node, files)
        if number not in places:
            pieces = (Payload(number, p.nbytes) if isinstance(p, Payload) else p for p in archives[form])
            places[number] = shards.place(tuple(pieces))
        start, shape = torch.Size([0] * len(form[1])), form[1]
        chunk = dcp.ChunkStorageMetadata(offsets=start, sizes=shape)
        properties = dcp.TensorProperties(dtype=torch_dtype(form[0]))
        entries[fqn] = dcp.TensorStorageMetadata(properties=properties, size=shape, chunks=[chunk])
        storage[dcp.MetadataIndex(fqn, start, 0)] = _StorageInfo(*places[number])
    paths = {fqn_of(path): path for path, _, _ in items}
    metadata = dcp.Metadata(entries, planner_data=paths, storage_data=storage)
    metadata.version = DCP_VERSION
    described = OutputFile(name=DCP_METADATA_NAME, pieces=(pickle.dumps(metadata),))
    return Target(files=[*shards.output_files(), described], is_directory=True)


class _Shards:
    """The files with the items of a DCP directory. Every archive begins at a multiple of `_ALIGNMENT`."""

    def __init__(self, max_nbytes: int | None) -> None:
        self._max_nbytes = max_nbytes
        self._files: list[list[bytes | Payload]] = []
        self._crc_at: list[list[tuple[int, int]]] = []
        self._length = 0

    def place(self, archive: Sequence[bytes | Payload]) -> tuple[str, int, int]:
        """Append an archive; return (file name, offset, length)."""
        nbytes = sum(piece.nbytes for piece in archive if isinstance(piece, Payload))
        if not self._files or (self._max_nbytes and self._length and self._length + nbytes > self._max_nbytes):
            self._files.append([])
            self._crc_at.append([])
            self._length = 0
        pieces = self._files[-1]
        padding = bytes(-self._length % _ALIGNMENT)
        pieces.append(padding)
        start = self._length + len(padding)
        self._crc_at[-1] += [(len(pieces) + number, start + offset) for number, offset in crc_places(archive)]
        pieces += archive
        length = sum(map(length_of, archive))
        self._length = start + length
        return _shard_name(len(self._files) - 1), start, length

    def output_files(self) -> list[OutputFile]:
        """Return the files."""
        return [
            OutputFile(name=_shard_name(n), pieces=tuple(pieces), crc_at=tuple(crc_at))
            for n, (pieces, crc_at) in enumerate(zip(self._files, self._crc_at, strict=True))
        ]


def _shard_name(number: int) -> str:
    return f"__0_{number}.distcp"
