"""What stands at a target, and whether it may go: nothing but a checkpoint, and nothing that only lies beside one."""

from __future__ import annotations

import enum
import os
import stat

from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    UnsupportedFormatError,
)
from asyncckpt.foreign.kinds import OURS, kind_at
from asyncckpt.foreign.torch_file import is_torch_file
from asyncckpt.format.names import DCP_METADATA_NAME, LOCK_NAME, MANIFEST_NAME, owner_of
from asyncckpt.storage.files import Files

_HUB_NAMES = frozenset({".gitattributes", "license", "notice", "readme", "use_policy"})
_HUB_ENDINGS = (".safetensors", ".json", ".jsonl", ".txt", ".md", ".model", ".tiktoken", ".jinja", ".py")
_HUB_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx")


class Standing(enum.Enum):
    """What is at the target."""

    NOTHING = enum.auto()
    EMPTY_DIRECTORY = enum.auto()
    CHECKPOINT = enum.auto()


def standing_at(path: str, files: Files, *, overwrite: bool) -> Standing:
    """Return what stands at a target.

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
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise _no_checkpoint(path)
    try:
        kind = kind_at(path, files)
    except (CheckpointNotFoundError, CheckpointNotCommittedError, UnsupportedFormatError):
        raise _no_checkpoint(path) from None
    if stat.S_ISDIR(found.st_mode):
        _check_directory(path, kind, files)
    elif kind == "torch" and not is_torch_file(path, files):
        raise _no_checkpoint(path)
    return Standing.CHECKPOINT


def _check_directory(path: str, kind: str, files: Files) -> None:
    names = files.listdir(path)
    if kind == OURS and not (MANIFEST_NAME in names and any(map(owner_of, names))):
        raise _no_checkpoint(path)
    for name in sorted(names):
        if os.path.isdir(os.path.join(path, name)) or not _belongs(name, kind):
            raise CheckpointExistsError(
                f"{path} holds {name!r}, which is no part of a checkpoint and would be lost; it was left untouched. "
                "Move it away, or choose another path",
                path=path,
            )


def _belongs(name: str, kind: str) -> bool:
    if owner_of(name) is not None or name in (MANIFEST_NAME, LOCK_NAME, DCP_METADATA_NAME):  # in either layout
        return True
    if kind in (OURS, "dcp"):
        return kind == "dcp" and name.endswith((".distcp", ".metadata", ".metadata.tmp"))
    lower = name.lower()
    return lower in _HUB_NAMES or lower.endswith((*_HUB_ENDINGS, *_HUB_WEIGHTS))


def may_belong(name: str) -> bool:
    """Whether a file of this name may be part of a checkpoint of some kind that is converted."""
    return _belongs(name, "dcp") or _belongs(name, "hf")


def _no_checkpoint(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is no checkpoint of a kind that asyncckpt knows; it was left untouched", path=path
    )
