"""The targets `safetensors` and `hf`: one file, or a directory with shards of bounded size and their index."""

from __future__ import annotations

import json
from collections.abc import Sequence

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ConfigError
from asyncckpt.format.layout import MAX_HEADER_NBYTES, METADATA_KEY, Payload, round_up
from asyncckpt.format.state_tree import ARRAY, BYTES, MAPPINGS, OBJECT, TENSOR, fqn_of, is_text, leaves
from asyncckpt.interop.conversion_losses import (
    METADATA_TEXT_KEY,
    TOP,
    ConversionLosses,
    container_types_lost,
    kept_metadata,
    ordered_dicts_lost,
    sentence,
)
from asyncckpt.interop.copy_pipeline import OutputFile, Target
from asyncckpt.interop.mapping.made_tensors import AnyTensor
from asyncckpt.interop.outline import Outline, containers
from asyncckpt.interop.sources.safetensors_file import FILE_METADATA, INDEX_NAME, header_form

DEFAULT_SHARD_NBYTES = 5_000_000_000
"""The default of `save_pretrained` of Hugging Face's transformers for years ("5GB")."""

_ALIGNMENT = 64


def check_safetensors(outline: Outline) -> ConversionLosses:
    """Return which leaves safetensors files cannot hold, and what they hold in another form."""
    losses = ConversionLosses()
    for fqn, node in outline.leaves():
        if node[0] in (OBJECT, BYTES):
            losses.cannot[fqn] = "safetensors files hold only tensors"
        elif _form(outline.tensors[node[1]]) is None:
            dtype = outline.tensors[node[1]].dtype
            only = " without a dimension" if header_form(dtype, (1,)) else ""
            losses.cannot[fqn] = f"safetensors has no tensors of dtype {dtype}{only}"
        elif not is_text(fqn):
            losses.cannot[fqn] = "its name is not valid UTF-8, as JSON requires"
        elif fqn == METADATA_KEY:
            losses.cannot[fqn] = "its name is reserved by safetensors"
    paths = [path for path, node in leaves(outline.tree) if node[0] in (TENSOR, ARRAY)]
    nested = [str(path[0]) for path in paths if len(path) > 1 or type(path[0]) is not str]
    losses.changed += sentence(
        f"nesting and keys of {len(nested)} tensors became names with dots, in", sorted(set(nested))
    )
    firsts: dict[int, str] = {}
    held = [(fqn, node[1]) for fqn, node in outline.leaves() if fqn not in losses.cannot]
    pairs = [f"{fqn} (= {first})" for fqn, number in held if (first := firsts.setdefault(number, fqn)) != fqn]
    losses.changed += sentence("tied tensors are stored once for each name", pairs)
    arrays = [fqn for fqn, node in outline.leaves() if node[0] == ARRAY]
    losses.changed += sentence("numpy arrays became tensors", arrays)
    found = list(containers(outline.tree))
    empty = sorted(fqn_of(path) or TOP for path, node in found if node[0] in MAPPINGS and not node[1])
    losses.changed += sentence("empty dicts are not kept", empty)
    losses.changed += ordered_dicts_lost(found) + container_types_lost(found)
    return losses


def safetensors_target(outline: Outline) -> Target:
    """Return the content of one safetensors file.

    Raises:
        ConfigError: Its header would be larger than readers accept.
    """
    named = [(fqn, node[1]) for fqn, node in outline.leaves()]
    return Target(files=[_file("", outline, named, _metadata(outline))], is_directory=False)


def hf_target(outline: Outline, max_shard_nbytes: int | None) -> Target:
    """Return the files of a Hugging Face directory, which `from_pretrained` loads.

    Args:
        outline: What is written; has only tensors.
        max_shard_nbytes: Limit of the tensors in one file; a larger tensor gets its own file. None: 5 GB.

    Raises:
        ConfigError: A header would be larger than readers accept.
    """
    limit = max_shard_nbytes or DEFAULT_SHARD_NBYTES
    shards: list[list[tuple[str, int]]] = [[]]
    held = total = 0
    for fqn, node in outline.leaves():
        nbytes = outline.nbytes_of(node[1])
        if shards[-1] and held + nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append((fqn, node[1]))
        held += nbytes
        total += nbytes
    metadata = _metadata(outline)
    if len(shards) == 1:
        return Target(files=[_file("model.safetensors", outline, shards[0], metadata)], is_directory=True)
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    weight_map = {fqn: name for name, shard in zip(names, shards, strict=True) for fqn, _ in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files = [_file(name, outline, shard, metadata) for name, shard in zip(names, shards, strict=True)]
    text = json.dumps(index, indent=2).encode() + b"\n"
    return Target(files=[*files, OutputFile(name=INDEX_NAME, pieces=(text,))], is_directory=True)


def _metadata(outline: Outline) -> dict[str, str]:
    """Return the metadata for the header: those of the source, as one JSON text if not all of them are texts.

    `format` is always "pt": transformers refuses files without it or with another value.
    """
    found = {key: value for key, value in kept_metadata(outline.contents).items() if key not in FILE_METADATA}
    if not all(isinstance(value, str) for value in found.values()):
        found = {METADATA_TEXT_KEY: json.dumps(found)}
    return {**found, "format": "pt"}


def _form(tensor: AnyTensor) -> tuple[str, tuple[int, ...]] | None:
    return header_form(tensor.dtype, tuple(tensor.global_shape))


def _file(name: str, outline: Outline, named: Sequence[tuple[str, int]], metadata: dict[str, str]) -> OutputFile:
    """Return one file. Tensors with the largest elements come first, so that all are aligned.

    The header lists the tensors in the order of the state dict.
    """
    ordered = sorted(named, key=lambda pair: -DTYPES[outline.tensors[pair[1]].dtype].itemsize)
    header: dict[str, object] = {METADATA_KEY: metadata} if metadata else {}
    header |= dict.fromkeys(fqn for fqn, _ in named)
    at, payloads = 0, []
    for fqn, number in ordered:
        tensor, nbytes = outline.tensors[number], outline.nbytes_of(number)
        form = _form(tensor)
        assert form is not None, "refused, or left out"
        header[fqn] = {"dtype": form[0], "shape": form[1], "data_offsets": [at, at + nbytes]}
        payloads.append(Payload(number, nbytes))
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    length = round_up(8 + len(text), _ALIGNMENT) - 8
    if length > MAX_HEADER_NBYTES:
        raise ConfigError(
            f"the names of {len(named)} tensors take {length} bytes, more than the {MAX_HEADER_NBYTES} that readers of "
            "safetensors accept; use to='hf' with max_shard_bytes",
            field="to",
        )
    return OutputFile(name=name, pieces=(length.to_bytes(8, "little") + text.ljust(length), *payloads))
