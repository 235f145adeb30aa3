"""Reads safetensors files, and directories of them: of Hugging Face's hub, and of DCP with the offsets of its shards.

Of a directory the names say which files are the model, and which are variants, copies or adapters of it. These are the
names that transformers and diffusers write: `model.safetensors`; shards `model-00001-of-00002.safetensors` with the
index `model.safetensors.index.json`; and the same for a variant such as fp16: `model.fp16.safetensors`,
`model.fp16-00001-of-00002.safetensors` or `model-00001-of-00002.fp16.safetensors`, `model.safetensors.index.fp16.json`.

A header is checked whole. Source: the README of safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.format.layout import MAX_HEADER_NBYTES, METADATA_KEY
from asyncckpt.format.state_tree import DICT
from asyncckpt.format.structure import MAX_DIMS, Chunk
from asyncckpt.interop.sources.source import ContentsBuilder, read_exactly
from asyncckpt.interop.sources.torch_file import ReadAt
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, opened, read_small_file

_F4 = "F4"
_NAMES = {row.safetensors: row.name for row in DTYPES.values() if row.safetensors} | {
    "F8_E8M0": "float8_e8m0fnu",
    _F4: "float4_e2m1fn_x2",
}
"""dtypes by their safetensors names. asyncckpt writes all but the last two, which safetensors 0.5 does not know."""

_WRITTEN = {name: kind for kind, name in _NAMES.items()}


SAFETENSORS_START = 9
"""Bytes that are enough to recognize a file: the length of the header, and its first character."""


class HeaderEntry(NamedTuple):
    """One tensor: its name, the name of its torch dtype, shape in torch's elements, offset and length in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def is_safetensors(start: bytes, nbytes: int) -> bool:
    """Whether a file of `nbytes` that begins with these `SAFETENSORS_START` bytes may be a safetensors file."""
    return (
        len(start) >= SAFETENSORS_START
        and start[8:9] == b"{"
        and 2 <= int.from_bytes(start[:8], "little") <= nbytes - 8
    )


def read_header(read_at: ReadAt, nbytes: int) -> tuple[list[HeaderEntry], dict[str, Any]]:
    """Return the tensors in the order of the header, and the metadata.

    Raises:
        ValueError: It is no JSON, has an unknown dtype, or byte ranges that overlap, leave gaps or exceed the file.
    """
    length = int.from_bytes(read_at(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {nbytes}")
    try:
        raw = json.loads(read_at(8, length), object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(raw, dict):
        raise ValueError("the header is no JSON object")
    metadata = raw.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the header's metadata are no texts")
    at = 8 + length
    entries = [_entry(name, entry, at) for name, entry in raw.items()]
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            raise ValueError(f"the bytes of tensor {entry.name!r} begin at {entry.offset}, expected {at}")
        at += entry.nbytes
    if at != nbytes:
        raise ValueError(f"its tensors end at byte {at}, the file at {nbytes}: it was cut short or extended")
    return entries, metadata


def header_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return safetensors' dtype and shape of a tensor, or None where it has none.

    Args:
        dtype: The name of the torch dtype.
        shape: Shape in torch's elements. One element of `float4_e2m1fn_x2` is two of F4 in the last dimension, so a
            tensor of this dtype without dimensions has no form.
    """
    kind = _WRITTEN.get(dtype)
    if kind is None or (kind == _F4 and not shape):
        return None
    return kind, (*shape[:-1], 2 * shape[-1]) if kind == _F4 else shape


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in the header twice")
    return found


def _entry(name: str, raw: Any, begin: int) -> HeaderEntry:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= set(raw):
        raise ValueError(f"tensor {name!r} lacks dtype, shape or offsets")
    kind, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(kind, str) or kind not in _NAMES:
        raise ValueError(f"tensor {name!r} is of unknown dtype {str(kind)[:20]!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise ValueError(f"shape or offsets of tensor {name!r} are no numbers")
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has {len(shape)} dimensions and {len(offsets)} offsets")
    dtype = _NAMES[kind]
    if kind == _F4:  # two of them make one element of torch's
        if not shape or shape[-1] % 2:
            raise ValueError(f"tensor {name!r} has an odd number of 4-bit elements in a row")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, its shape {shape} needs {nbytes}")
    return HeaderEntry(name, dtype, tuple(shape), begin + offsets[0], nbytes)


INDEX_NAME = "model.safetensors.index.json"

_INDEX = re.compile(r"(.+)\.safetensors\.index(\.[^.]+)?\.json\Z")
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}(\.[^.]+)?\.safetensors\Z")
_NUMBER = re.compile(r"-([0-9]{5})-of-([0-9]{5})(?:\.[^.]+)?\.safetensors\Z")
_NOT_THE_MODEL = re.compile(r"(consolidated([-.][0-9]+)?|adapter_model)\Z")
"""Files that are not the model: a copy of all of it under Mistral's tensor names, and adapters of peft."""


class AmbiguousFolderError(ValueError):
    """A directory holds several models, and none is the obvious one; `files` are the names to choose from."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = sorted(files)
        super().__init__(f"it holds several models: {', '.join(self.files)}; give the path of one of these files")


class Chosen(NamedTuple):
    """The model of a folder: the name of its index, or without an index the names of its files.

    `several`: the names of the files are those of more than one model, so the files may not belong together.
    """

    index_name: str | None
    files: tuple[str, ...] = ()
    several: bool = False


def is_index(name: str) -> bool:
    """Whether a file of this name is an index of sharded safetensors files."""
    return _INDEX.match(name) is not None


def index_names(names: Iterable[str]) -> list[str]:
    """Return which of a directory's names are indexes of sharded safetensors files."""
    return sorted(filter(is_index, names))


def model_of(name: str) -> str:
    """Return the part of a name that all files of one model and variant share, such as `model` or `model.fp16`.

    Files whose names are numbers have no such part: "".
    """
    found = _INDEX.match(name) or _SHARD.match(name)
    stem = found[1] + (found[2] or "") if found else name.removesuffix(".safetensors")
    return "" if stem.isdecimal() else stem


def chosen_model(names: Iterable[str]) -> Chosen:
    """Return the model of a folder; of several variants, the one without a suffix.

    Args:
        names: The names of the files in the folder.

    Raises:
        AmbiguousFolderError: There are indexes of several models that are not variants of one.
    """
    names = list(names)
    indexes, weights = index_names(names), sorted(name for name in names if name.endswith(".safetensors"))
    models = {model_of(name) for name in (*indexes, *weights)}
    bases = {model for model in models if not _is_variant(model, models)}
    bases = {base for base in bases if not _NOT_THE_MODEL.match(base)} or bases
    indexes = [name for name in indexes if model_of(name) in bases]
    if INDEX_NAME in indexes or len(indexes) == 1:
        return Chosen(INDEX_NAME if INDEX_NAME in indexes else indexes[0])
    if indexes:
        raise AmbiguousFolderError(indexes)
    if "model.safetensors" in weights:  # other files may be adapters
        return Chosen(None, ("model.safetensors",))
    found = tuple(name for name in weights if model_of(name) in bases)
    return Chosen(None, found, len({model_of(name) for name in found}) > 1)


def _is_variant(model: str, models: set[str]) -> bool:
    base, dot, _ = model.rpartition(".")
    return bool(dot) and (base in models or _is_variant(base, models))


MAX_INDEX_NBYTES = 256 << 20
_SHARDING = "DCP_SHARDING_INFO"
FILE_METADATA = (_SHARDING, "DCP_VERSION")
"""Keys of metadata in a header that belong to one file of DCP, not to the checkpoint."""

COPIES = "of the copies in several files only that of the file that the index names was read"
"""The sentence in `ForeignSource.changed` about tensors that are in several files."""

INDEX_METADATA = "metadata of the index of the files are not kept"


def read_safetensors_file(path: str, files: Files) -> Contents:
    """Read the structure of a safetensors file, as a flat dict from names to tensors.

    Raises:
        CorruptCheckpointError: The file is damaged.
        OSError: The file cannot be read.
    """
    directory, name = os.path.split(path)
    builder = ContentsBuilder("safetensors", path, directory, files)
    entries, metadata = _header(builder, name, files)
    builder.source.metadata.update(metadata)
    return _assembled(builder, [(name, entry) for entry in entries], {}, {}, "safetensors")


def read_hf_directory(path: str, files: Files) -> Contents:
    """Read the structure of a directory of safetensors files.

    Args:
        path: The directory, or the index of one model in it.
        files: The storage seam.

    Raises:
        CorruptCheckpointError: A file is damaged; or the index names a file or tensor that does not exist; or there is
            no index, and the names of the files say that others are missing; or a tensor is in two files, and the index
            does not name one of them, or they differ in shape or dtype.
        UnsupportedFormatError: The directory holds several models, and none is the obvious one; lists the files.
        OSError: A file cannot be read.

    Of several variants, such as `fp16`, the one without a suffix is read: see `chosen_model`.

    Every tensor of the files that the index names is read, also one that the index does not list: transformers and
    huggingface_hub load whole files too. If a tensor is in two files, the copy in the file that the index names is
    read, and `ForeignSource.changed` names the other files. It is refused if the index does not list it, if there is no
    index, and if the copies differ in shape or dtype.
    """
    is_folder = not is_index(os.path.basename(path)) or stat.S_ISDIR(files.stat(path).st_mode)
    directory, name = (path, "") if is_folder else os.path.split(path)
    builder = ContentsBuilder("hf", path, directory, files)
    try:
        model = Chosen(name) if name else chosen_model(files.listdir(directory))
    except AmbiguousFolderError as error:
        raise builder.unsupported(str(error), ", ".join(error.files)) from error
    expected = _weight_map(builder, model.index_name, files) if model.index_name else None
    shards = sorted(set(expected.values())) if expected is not None else list(model.files)
    found: list[tuple[str, HeaderEntry]] = []
    sharding: dict[tuple[str, str], list[int]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for shard in shards:
        entries, metadata = _header(builder, shard, files)
        headers[shard] = metadata
        found += [(shard, entry) for entry in entries]
        sharding |= {(shard, name): offsets for name, offsets in _offsets(builder, shard, metadata).items()}
    if expected is not None:
        missing = expected.items() - {(entry.name, shard) for shard, entry in found}
        if missing:
            name, _ = min(missing)
            raise builder.corrupt(
                f"{expected[name]} lacks tensor {name!r}, which the index promises", model.index_name or ""
            )
    if expected is None and not sharding:
        _refuse_incomplete(builder, shards)
    if model.several:
        _refuse_doubles(builder, found, sharding)
    builder.source.metadata |= {**_joined(headers), "files": shards}
    return _assembled(builder, found, sharding, expected or {}, "safetensors, as Hugging Face has it")


def _joined(headers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the joined metadata of all files; a key with different values gets a dict from file name to value."""
    found: dict[str, dict[str, Any]] = {}
    for file, metadata in headers.items():
        for key, value in metadata.items():
            if key not in FILE_METADATA:
                found.setdefault(f"{METADATA_KEY}.files" if key == "files" else key, {})[file] = value
    return {
        key: next(iter(values.values())) if len(set(values.values())) == 1 else values for key, values in found.items()
    }


def _refuse_incomplete(builder: ContentsBuilder, names: Iterable[str]) -> None:
    """Raise if the names, such as `model-00001-of-00002.safetensors`, say that there were more files."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        if found := _NUMBER.search(name):
            numbers.setdefault((model_of(name), found[2]), set()).add(found[1])
    for (model, total), present in numbers.items():
        if len(present) < int(total):
            raise builder.corrupt(
                f"of the {int(total)} files of {model!r} there are {len(present)}, and no index: files are missing. To "
                "load those that are there, give the path of each"
            )


def _refuse_doubles(
    builder: ContentsBuilder, found: Iterable[tuple[str, HeaderEntry]], sharding: Mapping[tuple[str, str], list[int]]
) -> None:
    """Raise if two models have the same tensor, so that the files cannot be parts of one model."""
    seen: dict[str, str] = {}
    for shard, entry in found:
        other = seen.setdefault(entry.name, shard)
        if model_of(other) != model_of(shard) and (shard, entry.name) not in sharding:
            error = AmbiguousFolderError({shard for shard, _ in found})
            raise builder.unsupported(
                f"{error}. Tensor {entry.name!r} is in {other} and {shard}", ", ".join(error.files)
            )


def _weight_map(builder: ContentsBuilder, name: str, files: Files) -> dict[str, str]:
    path = os.path.join(builder.source.directory, name)
    builder.stamp(name)
    try:
        raw = json.loads(read_small_file(files, os.path.realpath(path), MAX_INDEX_NBYTES))
        found = raw["weight_map"]
        if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
            raise ValueError("weight_map is no map from names to files")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise builder.corrupt(f"the index cannot be read: {error!r}", file=name) from error
    about = raw.get("metadata")
    names = sorted(str(name) for name in about if name != "total_size") if isinstance(about, dict) else []
    if names:
        builder.source.changed[INDEX_METADATA] = {"": f" ({', '.join(name[:80] for name in names[:9])})"}
    return found


def _header(builder: ContentsBuilder, name: str, files: Files) -> tuple[list[HeaderEntry], dict[str, Any]]:
    nbytes = builder.shards[builder.file(name)].nbytes
    path = os.path.join(builder.source.directory, name)
    with builder.refusing(name, "no sound safetensors file: "), opened(files, path, os.O_RDONLY) as fd:
        return read_header(read_exactly(files, fd, nbytes), nbytes)


def _offsets(builder: ContentsBuilder, shard: str, metadata: dict[str, Any]) -> dict[str, list[int]]:
    """Return the offsets of each tensor of a DCP shard in the global tensor; empty for other files."""
    if _SHARDING not in metadata:
        return {}
    try:
        raw = json.loads(metadata[_SHARDING])
        found = {name: entry["saved_offsets"] for name, entry in raw.items()}
        if any(type(n) is not int or n < 0 for offsets in found.values() for n in offsets):
            raise ValueError("offsets that are no numbers")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise builder.corrupt(f"{_SHARDING} cannot be read: {error!r}", file=shard) from error
    return found


def _assembled(
    builder: ContentsBuilder,
    found: list[tuple[str, HeaderEntry]],
    sharding: dict[tuple[str, str], list[int]],
    expected: dict[str, str],
    writer: str,
) -> Contents:
    by_name: dict[str, list[tuple[str, HeaderEntry]]] = {}
    for shard, entry in found:
        by_name.setdefault(entry.name, []).append((shard, entry))
    members: list[Any] = []
    for name, held in by_name.items():
        if len(held) > 1 and any((shard, name) not in sharding for shard, _ in held):
            is_whole = not any((shard, name) in sharding for shard, _ in held)
            parts = [_copy_meant(builder, name, held, expected.get(name) if is_whole else None)]
        else:
            parts = held
        chunks, dtype = [], parts[0][1].dtype
        for shard, entry in parts:
            offsets = tuple(sharding.get((shard, name)) or (0,) * len(entry.shape))
            if len(offsets) != len(entry.shape) or entry.dtype != dtype:
                raise builder.corrupt(f"the shards of tensor {name!r} do not fit together", file=shard, fqn=name)
            chunks.append(
                Chunk(
                    part=builder.file(shard),
                    offset_bytes=entry.offset,
                    nbytes=entry.nbytes,
                    offsets=offsets,
                    sizes=entry.shape,
                )
            )
        shape = tuple(max(c.offsets[d] + c.sizes[d] for c in chunks) for d in range(len(chunks[0].sizes)))
        members += (name, builder.tensor(name, dtype, shape, chunks))
    return builder.contents((DICT, tuple(members)), writer)


def _copy_meant(
    builder: ContentsBuilder, name: str, held: list[tuple[str, HeaderEntry]], file: str | None
) -> tuple[str, HeaderEntry]:
    """Return the copy of a tensor that is in `file`, which the index names, and record the other copies."""
    found = " and ".join([shard for shard, _ in held][:4])
    meant = next((part for part in held if part[0] == file), None)
    if meant is None:
        raise builder.corrupt(f"tensor {name!r} is in {found}", fqn=name)
    if any((entry.dtype, entry.shape) != (meant[1].dtype, meant[1].shape) for _, entry in held):
        raise builder.corrupt(f"tensor {name!r} is in {found}, with other shapes or dtypes", fqn=name)
    others = [shard for shard, _ in held if shard != file]
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    builder.source.changed.setdefault(COPIES, {})[name] = f" (not from {', '.join(others[:4])}{more})"
    return meant
