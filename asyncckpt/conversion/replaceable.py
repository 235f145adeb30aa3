"""What stands at a target, and whether it may go: nothing but a checkpoint, and nothing that only lies beside one."""

from __future__ import annotations

import enum
import json
import os
import stat
from collections.abc import Sequence

from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    UnsupportedFormatError,
)
from asyncckpt.foreign.hf_folder import AmbiguousFolderError, chosen_model, is_index
from asyncckpt.foreign.kinds import OURS, kind_at
from asyncckpt.foreign.safetensors_files import MAX_INDEX_NBYTES
from asyncckpt.foreign.torch_file import is_torch_file
from asyncckpt.format.names import DCP_METADATA_NAME, LOCK_NAME, MANIFEST_NAME, owner_of
from asyncckpt.storage.files import Files, read_small_file

_HUB_NAMES = frozenset({".gitattributes", "license", "notice", "readme", "use_policy"})
_HUB_ENDINGS = (".json", ".jsonl", ".txt", ".md", ".model", ".tiktoken", ".jinja", ".py")
_HUB_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx")
_INDEX_ENDING = ".index.json"


class Standing(enum.Enum):
    """What is at the target."""

    NOTHING = enum.auto()
    EMPTY_DIRECTORY = enum.auto()
    CHECKPOINT = enum.auto()


def standing_at(path: str, files: Files, *, overwrite: bool, is_hub: bool = False) -> Standing:
    """Return what stands at a target.

    Args:
        path: The target.
        files: The storage seam.
        overwrite: Whether it may be replaced.
        is_hub: What replaces it is a Hugging Face directory, into which `companions_at` are carried over.

    Raises:
        CheckpointExistsError: Something does, and `overwrite` is False; or it is no checkpoint; or a directory that
            holds something else as well, which is named.
        OSError: It cannot be known.
    """
    try:
        found = files.lstat(path)
    except FileNotFoundError:
        return Standing.NOTHING
    if stat.S_ISDIR(found.st_mode) and not files.listdir(path):
        return Standing.EMPTY_DIRECTORY
    if not overwrite:
        raise CheckpointExistsError(
            f"{path} exists; it was left untouched. Choose another path, or replace it by overwrite=True (--overwrite)",
            path=path,
        )
    if stat.S_ISLNK(found.st_mode):
        raise CheckpointExistsError(
            f"{path} is a symbolic link; it was left untouched. Name what it leads to: {os.path.realpath(path)}",
            path=path,
        )
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise _no_checkpoint(path)
    try:
        kind = kind_at(path, files)
    except (CheckpointNotFoundError, CheckpointNotCommittedError, UnsupportedFormatError):
        raise _no_checkpoint(path) from None
    if stat.S_ISDIR(found.st_mode):
        _check_directory(path, kind, files, is_hub)
    elif kind == "hf" or (
        kind == "torch" and not is_torch_file(path, files)
    ):  # an index: no file of a checkpoint alone
        raise _no_checkpoint(path)
    return Standing.CHECKPOINT


def companions_at(path: str, files: Files) -> list[str]:
    """Return what lies beside the weights at `path` and is not theirs, where that is a Hugging Face directory.

    Raises:
        OSError: It cannot be known.
    """
    if not os.path.isdir(path) or kind_at(path, files) != "hf":
        return []
    return sorted(name for name in files.listdir(path) if _is_companion(path, name))


def _check_directory(path: str, kind: str, files: Files, is_hub: bool) -> None:
    names = files.listdir(path)
    if kind == OURS and not (MANIFEST_NAME in names and any(map(owner_of, names))):
        raise _no_checkpoint(path)
    weights = _hub_weights(path, names, files) if kind == "hf" else frozenset()
    for name in sorted(names):
        goes = name in weights if kind == "hf" and owner_of(name) is None else belongs(name, kind)
        comes_along = kind == "hf" and is_hub and _is_companion(path, name)
        if os.path.isdir(os.path.join(path, name)) or not (goes or comes_along or name == LOCK_NAME):
            raise CheckpointExistsError(
                f"{path} holds {name!r}, which is no part of the checkpoint that is read there and would be lost; it "
                "was left untouched. Move it away, or choose another path",
                path=path,
            )


def _hub_weights(path: str, names: Sequence[str], files: Files) -> frozenset[str]:
    """Return the files of the model that is read at `path`: of a second one beside it nobody knows whose it is."""
    try:
        model = chosen_model(names)
        if model.index_name is None:
            return frozenset(model.files)
        index = os.path.realpath(os.path.join(path, model.index_name))
        found = json.loads(read_small_file(files, index, MAX_INDEX_NBYTES))["weight_map"].values()
        return frozenset({model.index_name, *(name for name in found if isinstance(name, str))})
    except (AmbiguousFolderError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()


def _is_companion(path: str, name: str) -> bool:
    """Whether a name is one that people put beside weights: of their model, or notes and programs of their own."""
    lower = name.lower()
    if is_index(lower) or lower.endswith(_INDEX_ENDING) or not (lower in _HUB_NAMES or lower.endswith(_HUB_ENDINGS)):
        return False
    whole = os.path.join(path, name)
    return os.path.isfile(whole) or (os.path.islink(whole) and not os.path.isdir(whole))


def belongs(name: str, kind: str) -> bool:
    """Whether a file of this name may be part of a checkpoint of that kind."""
    if owner_of(name) is not None or name in (MANIFEST_NAME, LOCK_NAME, DCP_METADATA_NAME):  # in either layout
        return True
    if kind in (OURS, "dcp"):
        return kind == "dcp" and name.endswith((".distcp", ".metadata", ".metadata.tmp"))
    lower = name.lower()
    return lower in _HUB_NAMES or lower.endswith((*_HUB_ENDINGS, *_HUB_WEIGHTS))


def may_belong(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint of some kind that is converted."""
    return belongs(name, "dcp") or belongs(name, "hf")


def _no_checkpoint(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is no checkpoint of a kind that asyncckpt knows; it was left untouched", path=path
    )
