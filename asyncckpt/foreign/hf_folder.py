"""Which files of a Hugging Face folder are its model, and which are variants, copies or adapters of it. Reads nothing.

The names that transformers and diffusers write: `model.safetensors`; shards `model-00001-of-00002.safetensors` with the
index `model.safetensors.index.json`; and the same for a variant such as fp16: `model.fp16.safetensors`,
`model.fp16-00001-of-00002.safetensors` or `model-00001-of-00002.fp16.safetensors`, `model.safetensors.index.fp16.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

INDEX_NAME = "model.safetensors.index.json"

_INDEX = re.compile(r"(.+)\.safetensors\.index(\.[^.]+)?\.json\Z")
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}(\.[^.]+)?\.safetensors\Z")
_BESIDE = re.compile(r"(consolidated([-.][0-9]+)?|adapter_model)\Z")
"""Files that are not the model: a copy of all of it under Mistral's tensor names, and adapters of peft."""


class AmbiguousFolderError(ValueError):
    """A folder holds several models, and nothing says which is meant; `files` are the names to choose from."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = sorted(files)
        super().__init__(f"it holds several models: {', '.join(self.files)}; choose one of these files and name that")


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
    bases = {base for base in bases if not _BESIDE.match(base)} or bases
    indexes = [name for name in indexes if model_of(name) in bases]
    if INDEX_NAME in indexes or len(indexes) == 1:
        return Chosen(INDEX_NAME if INDEX_NAME in indexes else indexes[0])
    if indexes:
        raise AmbiguousFolderError(indexes)
    if "model.safetensors" in weights:  # adapters, say, beside it
        return Chosen(None, ("model.safetensors",))
    found = tuple(name for name in weights if model_of(name) in bases)
    return Chosen(None, found, len({model_of(name) for name in found}) > 1)


def _is_variant(model: str, models: set[str]) -> bool:
    base, dot, _ = model.rpartition(".")
    return bool(dot) and (base in models or _is_variant(base, models))
