"""Determines the kind of the checkpoint at a path, and reads a checkpoint of any kind."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from asyncckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, owner_of
from asyncckpt.interop.sources.dcp_directory import read_dcp_directory
from asyncckpt.interop.sources.rank_files import RANK_FILES, is_rank_files, read_rank_files
from asyncckpt.interop.sources.safetensors_file import (
    is_index,
    is_safetensors,
    read_hf_directory,
    read_safetensors_file,
)
from asyncckpt.interop.sources.torch_file import HEAD_NBYTES, begins_torch_file, read_torch_file
from asyncckpt.storage.contents import NATIVE, Contents, read_contents
from asyncckpt.storage.files import Files, opened

_READERS = {
    "dcp": read_dcp_directory,
    "torch": read_torch_file,
    "safetensors": read_safetensors_file,
    "hf": read_hf_directory,
}
KINDS = (NATIVE, *_READERS)
"""Kinds that are read and written."""
_READ_ONLY = {RANK_FILES: read_rank_files}
_RANK_METADATA = re.compile(r"__[0-9]+\.metadata")


def kind_at(path: str, files: Files) -> str:
    """Return the kind of the checkpoint at `path`, one of `KINDS` or `RANK_FILES`.

    A directory of no other kind is "asyncckpt".

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        UnsupportedFormatError: It is a file of no known kind.
        OSError: It cannot be read.
    """
    with contextlib.suppress(OSError):
        files.lstat(os.path.join(path, MANIFEST_NAME))  # first: of a prefix, an object store would make a listing
        return NATIVE
    try:
        found = files.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"there is no checkpoint at {path}: nothing is there", path=path) from error
    if stat.S_ISDIR(found.st_mode):
        return _directory_kind(path, files)
    if not stat.S_ISREG(found.st_mode):
        raise UnsupportedFormatError(f"{path} is neither a file nor a directory", path=path)
    with opened(files, path, os.O_RDONLY) as fd:
        start = bytearray(HEAD_NBYTES)
        count = files.preadv(fd, [start], 0)
    head = bytes(start[:count])
    if begins_torch_file(head):
        return "torch"
    if is_index(os.path.basename(path)):
        return "hf"
    if is_safetensors(head, found.st_size):
        return "safetensors"
    raise UnsupportedFormatError(
        f"{path} is neither a file of torch.save nor a safetensors file; an asyncckpt checkpoint is a directory",
        path=path,
    )


def _directory_kind(path: str, files: Files) -> str:
    try:
        names = files.listdir(path)
    except PermissionError:  # it may be searched but not listed; reading the manifest gives the error, if any
        return NATIVE
    owned = [name for name in names if owner_of(name)]
    if DCP_METADATA_NAME in names and all(name.endswith(".distcp") for name in owned):  # asyncckpt's layout for DCP too
        return "dcp"
    is_hf = not owned and any(is_index(name) or name.endswith(".safetensors") for name in names)
    if is_hf:
        return "hf"
    return RANK_FILES if not owned and is_rank_files(names) else NATIVE


def read_any(path: str, files: Files) -> Contents:
    """Read the structure of the checkpoint at `path`, of any kind, without the elements of tensors.

    Args:
        path: A directory or a file.
        files: The storage seam.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        CheckpointNotCommittedError: An asyncckpt save was begun there and never committed.
        CorruptCheckpointError: A file is damaged.
        UnsupportedFormatError: It has a newer version or no known kind, or holds a value that cannot be read.
        DuplicateNameError: Two leaves have the same name.
        OSError: A file cannot be read.
    """
    kind = kind_at(path, files)
    if kind != NATIVE:
        return (_READERS | _READ_ONLY)[kind](path, files)
    try:
        return read_contents(path, files)
    except CheckpointNotFoundError as error:
        _refuse_rank_metadata(path, files, error)
        raise


def _refuse_rank_metadata(path: str, files: Files, error: CheckpointNotFoundError) -> None:
    """Raise if `dcp.save(use_collectives=False)` has saved at `path`: then there is no metadata of all ranks."""
    try:
        found = sorted(name for name in files.listdir(path) if _RANK_METADATA.fullmatch(name))
    except OSError:
        return
    if found:
        raise UnsupportedFormatError(
            f"{path} was saved by dcp.save(use_collectives=False): {found[0]} describes what one rank saved, and no "
            "file lists the ranks, so it cannot be read. Load it with dcp.load, which gives each rank its own part",
            path=path,
            found=found[0],
        ) from error
