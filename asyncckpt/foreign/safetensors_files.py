"""One safetensors file, or a directory of them as Hugging Face's hub has it: sharded, and DCP's shards with offsets."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any

from asyncckpt.foreign.assembly import Assembly
from asyncckpt.foreign.hf_folder import AmbiguousFolderError, Chosen, chosen_model, is_index, model_of
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.safetensors_header import HeaderEntry, read_header
from asyncckpt.format.layout import METADATA_KEY
from asyncckpt.format.structure import Chunk
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, opened, read_small_file

MAX_INDEX_NBYTES = 256 << 20
_SHARDING = "DCP_SHARDING_INFO"
OF_ONE_FILE = (_SHARDING, "DCP_VERSION")
"""Metadata of a header that say how DCP reads that file, and nothing of the checkpoint."""

COPIES = "of the copies in several files only that of the file that the index names was read"
"""What `Source.changed` says of such tensors."""

INDEX_METADATA = "metadata of the index of the files are not kept"


def read_safetensors_file(path: str, files: Files) -> Contents:
    """Read the structure of a safetensors file: its names become a flat dict.

    Raises:
        CorruptCheckpointError: Damaged.
        OSError: It cannot be read.
    """
    directory, name = os.path.split(path)
    assembly = Assembly("safetensors", path, directory, files)
    entries, metadata = _header(assembly, name, files)
    assembly.source.metadata.update(metadata)
    return _assembled(assembly, [(name, entry) for entry in entries], {}, {}, "safetensors")


def read_hf_directory(path: str, files: Files) -> Contents:
    """Read the structure of a directory of safetensors files.

    Args:
        path: The directory; or the index of one model in it.
        files: The storage seam.

    Raises:
        CorruptCheckpointError: Damaged; the index names a file or a tensor that is not there; two files of one model
            have a tensor, and the index does not say which is meant, or they differ in shape or dtype.
        UnsupportedFormatError: It holds several models, and nothing says which is meant; the files are listed.
        OSError: It cannot be read.

    Of variants (`fp16`) the one without a suffix is the model: see `hf_folder`.

    Of the files that the index names every tensor is read, also one that it lacks: transformers and huggingface_hub
    load whole files too, and take of the index their names alone. Of one that another file has as well that copy is
    read that is in the file that the index names, and `Source.changed` has the others. It is refused where nobody can
    tell which is meant: the index lacks it, or there is none; and where the copies differ in shape or dtype.
    """
    is_folder = not is_index(os.path.basename(path)) or stat.S_ISDIR(files.stat(path).st_mode)
    directory, name = (path, "") if is_folder else os.path.split(path)
    assembly = Assembly("hf", path, directory, files)
    try:
        model = Chosen(name) if name else chosen_model(files.listdir(directory))
    except AmbiguousFolderError as error:
        raise assembly.unsupported(str(error), ", ".join(error.files)) from error
    expected = _weight_map(assembly, model.index_name, files) if model.index_name else None
    shards = sorted(set(expected.values())) if expected is not None else list(model.files)
    found: list[tuple[str, HeaderEntry]] = []
    sharding: dict[tuple[str, str], list[int]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for shard in shards:
        entries, metadata = _header(assembly, shard, files)
        headers[shard] = metadata
        found += [(shard, entry) for entry in entries]
        sharding |= {(shard, name): offsets for name, offsets in _offsets(assembly, shard, metadata).items()}
    if expected is not None:
        missing = expected.items() - {(entry.name, shard) for shard, entry in found}
        if missing:
            name, _ = min(missing)
            raise assembly.corrupt(
                f"{expected[name]} lacks tensor {name!r}, which the index promises", model.index_name or ""
            )
    if model.several:
        _refuse_doubles(assembly, found, sharding)
    assembly.source.metadata |= {**_joined(headers), "files": shards}
    return _assembled(assembly, found, sharding, expected or {}, "safetensors, as Hugging Face has it")


def _joined(headers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata of all files as those of one checkpoint; where files differ, each one's value by its name."""
    found: dict[str, dict[str, Any]] = {}
    for file, metadata in headers.items():
        for key, value in metadata.items():
            if key not in OF_ONE_FILE:
                found.setdefault(f"{METADATA_KEY}.files" if key == "files" else key, {})[file] = value
    return {
        key: next(iter(values.values())) if len(set(values.values())) == 1 else values for key, values in found.items()
    }


def _refuse_doubles(
    assembly: Assembly, found: Iterable[tuple[str, HeaderEntry]], sharding: Mapping[tuple[str, str], list[int]]
) -> None:
    """Refuse files that are no one model's: a tensor is whole in two of them."""
    seen: dict[str, str] = {}
    for shard, entry in found:
        other = seen.setdefault(entry.name, shard)
        if model_of(other) != model_of(shard) and (shard, entry.name) not in sharding:
            error = AmbiguousFolderError({shard for shard, _ in found})
            raise assembly.unsupported(
                f"{error}. Tensor {entry.name!r} is in {other} and {shard}", ", ".join(error.files)
            )


def _weight_map(assembly: Assembly, name: str, files: Files) -> dict[str, str]:
    path = os.path.join(assembly.source.directory, name)
    assembly.stamp(name)
    try:
        raw = json.loads(read_small_file(files, os.path.realpath(path), MAX_INDEX_NBYTES))
        found = raw["weight_map"]
        if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
            raise ValueError("weight_map is no map from names to files")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise assembly.corrupt(f"the index cannot be read: {error!r}", file=name) from error
    about = raw.get("metadata")
    names = sorted(str(name) for name in about if name != "total_size") if isinstance(about, dict) else []
    if names:
        assembly.source.changed[INDEX_METADATA] = {"": f" ({', '.join(name[:80] for name in names[:9])})"}
    return found


def _header(assembly: Assembly, name: str, files: Files) -> tuple[list[HeaderEntry], dict[str, Any]]:
    part = assembly.file(name)
    nbytes = assembly.shards[part].nbytes
    with opened(files, os.path.join(assembly.source.directory, name), os.O_RDONLY) as fd:
        try:
            return read_header(read_exactly(files, fd, nbytes), nbytes)
        except ValueError as error:
            raise assembly.corrupt(f"no sound safetensors file: {error}", file=name) from error


def _offsets(assembly: Assembly, shard: str, metadata: dict[str, Any]) -> dict[str, list[int]]:
    """Return where each tensor of a shard of DCP's begins in the global one."""
    if _SHARDING not in metadata:
        return {}
    try:
        raw = json.loads(metadata[_SHARDING])
        found = {name: entry["saved_offsets"] for name, entry in raw.items()}
        if any(type(n) is not int or n < 0 for offsets in found.values() for n in offsets):
            raise ValueError("offsets that are no numbers")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise assembly.corrupt(f"{_SHARDING} cannot be read: {error!r}", file=shard) from error
    return found


def _assembled(
    assembly: Assembly,
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
            parts = [_copy_meant(assembly, name, held, expected.get(name) if is_whole else None)]
        else:
            parts = held
        chunks, dtype = [], parts[0][1].dtype
        for shard, entry in parts:
            offsets = tuple(sharding.get((shard, name)) or (0,) * len(entry.shape))
            if len(offsets) != len(entry.shape) or entry.dtype != dtype:
                raise assembly.corrupt(f"the shards of tensor {name!r} do not fit together", file=shard, fqn=name)
            chunks.append(
                Chunk(
                    part=assembly.file(shard),
                    offset_bytes=entry.offset,
                    nbytes=entry.nbytes,
                    offsets=offsets,
                    sizes=entry.shape,
                )
            )
        shape = tuple(max(c.offsets[d] + c.sizes[d] for c in chunks) for d in range(len(chunks[0].sizes)))
        members += (name, assembly.tensor(name, dtype, shape, chunks))
    return assembly.contents(("d", tuple(members)), writer)


def _copy_meant(
    assembly: Assembly, name: str, held: list[tuple[str, HeaderEntry]], file: str | None
) -> tuple[str, HeaderEntry]:
    """Return of a tensor that several files have the one in `file`, which the index names, and note the others."""
    found = " and ".join([shard for shard, _ in held][:4])
    meant = next((part for part in held if part[0] == file), None)
    if meant is None:
        raise assembly.corrupt(f"tensor {name!r} is in {found}", fqn=name)
    if any((entry.dtype, entry.shape) != (meant[1].dtype, meant[1].shape) for _, entry in held):
        raise assembly.corrupt(f"tensor {name!r} is in {found}, with other shapes or dtypes", fqn=name)
    others = [shard for shard, _ in held if shard != file]
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    assembly.source.changed.setdefault(COPIES, {})[name] = f" (not from {', '.join(others[:4])}{more})"
    return meant
