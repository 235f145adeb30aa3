"""What kind of checkpoint is at a path, found by looking at it; and its contents, whichever kind it is."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from asyncckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, owner_of
from asyncckpt.interop.sources.dcp_directory import read_dcp_directory
from asyncckpt.interop.sources.safetensors_file import (
    is_index,
    is_safetensors,
    read_hf_directory,
    read_safetensors_file,
)
from asyncckpt.interop.sources.torch_file import HEAD_NBYTES, begins_torch_file, read_torch_file
from asyncckpt.storage.contents import Contents, read_contents
from asyncckpt.storage.files import Files, opened

OURS = "asyncckpt"
_READERS = {
    "dcp": read_dcp_directory,
    "torch": read_torch_file,
    "safetensors": read_safetensors_file,
    "hf": read_hf_directory,
}
KINDS = (OURS, *_READERS)
_RANKS_OWN = re.compile(r"__[0-9]+\.metadata")


def kind_at(path: str, files: Files) -> str:
    """Return the kind of what is at `path`, one of `KINDS`; ours where nothing says otherwise.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        UnsupportedFormatError: A file of no kind that is read.
        OSError: It cannot be read.
    """
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
        f"{path} is neither a file of torch.save nor a safetensors file; a checkpoint of ours is a directory", path=path
    )


def _directory_kind(path: str, files: Files) -> str:
    with contextlib.suppress(OSError):
        files.lstat(os.path.join(path, MANIFEST_NAME))
        return OURS
    try:
        names = files.listdir(path)
    except PermissionError:  # one that may be searched and not listed; whoever reads the manifest says the rest
        return OURS
    owned = [name for name in names if owner_of(name)]
    if DCP_METADATA_NAME in names and all(name.endswith(".distcp") for name in owned):  # all that DCP knows of ours
        return "dcp"
    is_hf = not owned and any(is_index(name) or name.endswith(".safetensors") for name in names)
    return "hf" if is_hf else OURS


def read_any(path: str, files: Files) -> Contents:
    """Read everything about the checkpoint at `path` but its data, whatever kind it is.

    Args:
        path: A directory or a file.
        files: The storage seam.

    Raises:
        CheckpointNotFoundError: Nothing is there.
        CheckpointNotCommittedError: A save of ours was begun there and never committed.
        CorruptCheckpointError: Damaged.
        UnsupportedFormatError: Of a newer version, of no known kind, or holding something that is not read.
        DuplicateNameError: Two of its leaves have one name.
        OSError: It cannot be read.
    """
    kind = kind_at(path, files)
    if kind != OURS:
        return _READERS[kind](path, files)
    try:
        return read_contents(path, files)
    except CheckpointNotFoundError as error:
        _refuse_ranks_own(path, files, error)
        raise


def _refuse_ranks_own(path: str, files: Files, error: CheckpointNotFoundError) -> None:
    """Say so where `dcp.save(use_collectives=False)` has saved: each rank its own, and nobody what there is in all."""
    try:
        found = sorted(name for name in files.listdir(path) if _RANKS_OWN.fullmatch(name))
    except OSError:
        return
    if found:
        raise UnsupportedFormatError(
            f"{path} was saved by dcp.save(use_collectives=False): {found[0]} tells what one rank has saved, and "
            "nothing which ranks there were; it is not read. Stock dcp.load gives each rank its own",
            path=path,
            found=found[0],
        ) from error
