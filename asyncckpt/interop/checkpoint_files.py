"""Which files of a directory belong to a checkpoint, and which are companion files of the weights, as config.json is.

A conversion from one Hugging Face directory to another copies the companion files. A conversion that replaces such a
directory keeps them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable

from asyncckpt.format.names import DCP_METADATA_NAME, LOCK_NAME, MANIFEST_NAME, owner_of
from asyncckpt.interop.sources.safetensors_file import (
    MAX_INDEX_NBYTES,
    AmbiguousFolderError,
    chosen_model,
    index_names,
    is_index,
)
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, read_small_file

_HUB_NAMES = frozenset({".gitattributes", "license", "notice", "readme", "use_policy"})
_HUB_ENDINGS = (".json", ".jsonl", ".txt", ".md", ".model", ".tiktoken", ".jinja", ".py")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx")
_INDEX_ENDING = ".index.json"


def belongs(name: str, kind: str) -> bool:
    """Whether a file of this name may be part of a checkpoint of kind `kind`."""
    if owner_of(name) is not None or name in (MANIFEST_NAME, LOCK_NAME, DCP_METADATA_NAME):  # in either layout
        return True
    if kind in ("asyncckpt", "dcp"):
        return kind == "dcp" and name.endswith((".distcp", ".metadata", ".metadata.tmp"))
    return _is_of_hub(name) or name.lower().endswith(_WEIGHTS)


def may_belong(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint of any kind."""
    return belongs(name, "dcp") or belongs(name, "hf")


def _is_of_hub(name: str) -> bool:
    lower = name.lower()
    return lower in _HUB_NAMES or lower.endswith(_HUB_ENDINGS)


def holds_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or is an index of files that do."""
    return name.endswith((*_WEIGHTS, _INDEX_ENDING)) or is_index(name)


def copied_files(source: str, contents: Contents, files: Files) -> tuple[list[str], list[str]]:
    """Return what a Hugging Face directory holds apart from the weights that are read.

    Args:
        source: The directory.
        contents: Its contents.
        files: The storage seam.

    Returns:
        The names of the companion files, which are copied; and the names of everything else: directories, hidden
        files, weights in other formats.

    Raises:
        OSError: The directory cannot be listed.
    """
    names = set(files.listdir(source))
    read = {*contents.manifest.metadata.get("files", ()), *index_names(names)}
    copied = {name for name in names if not (name.startswith(".") or holds_weights(name))}
    copied = {name for name in copied if os.path.isfile(os.path.join(source, name))}
    return sorted(copied), sorted(names - read - copied)


def is_carried_over(path: str, name: str) -> bool:
    """Whether `name` is a companion file in the Hugging Face directory `path`, kept when the weights are replaced."""
    whole = os.path.join(path, name)
    if not _is_of_hub(name) or holds_weights(name.lower()):
        return False
    return os.path.isfile(whole) or (os.path.islink(whole) and not os.path.isdir(whole))


def model_files(path: str, names: Iterable[str], files: Files) -> frozenset[str]:
    """Return the names of the weights and the index of the model that is read at `path`.

    A second model in the same directory does not count: it may belong to somebody else. Empty if no model is found.
    """
    try:
        model = chosen_model(names)
        if model.index_name is None:
            return frozenset(model.files)
        index = os.path.realpath(os.path.join(path, model.index_name))
        found = json.loads(read_small_file(files, index, MAX_INDEX_NBYTES))["weight_map"].values()
        return frozenset({model.index_name, *(name for name in found if isinstance(name, str))})
    except (AmbiguousFolderError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()


def copy_file(source: str, path: str, mode: int | None = None) -> None:
    """Copy a file, or a symbolic link as a link, and flush it to the disk.

    Args:
        source: The file.
        path: The copy.
        mode: Permission bits of the copy. None: mode and times of the file.

    Raises:
        OSError: A system call failed.
    """
    if mode is None:
        shutil.copy2(source, path, follow_symlinks=False)
    else:
        shutil.copyfile(source, path)
        os.chmod(path, mode)
    if not os.path.islink(path):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
