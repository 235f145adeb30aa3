"""`dcp_to_torch_save` and `torch_save_to_dcp`: with the names and arguments of torch's, streaming."""

from __future__ import annotations

import os
from collections.abc import Iterable

from asyncckpt.conversion.converter import ConversionReport, convert
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.foreign.kinds import kind_at
from asyncckpt.paths import absolute_path
from asyncckpt.storage.files import Files


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str],
    torch_save_path: str | os.PathLike[str],
    *,
    keys: str | Iterable[str] | None = None,
    overwrite: bool = True,
    partial: bool = False,
) -> ConversionReport:
    """Convert a directory of `dcp.save` into one file that `torch.load(weights_only=True)` reads.

    No process group is needed, and no more than 256 MB of memory. A checkpoint of ours is taken as well.

    Args:
        dcp_checkpoint_dir: The directory.
        torch_save_path: The file.
        keys: FQNs, or prefixes: only these. None takes everything.
        overwrite: Replaces a checkpoint that stands at `torch_save_path`, in one step, as torch's function would.
        partial: Leaves out, and reports, what such a file cannot hold; otherwise that is an error.

    Returns:
        What was done.

    Raises:
        UnsupportedFormatError: There is something else; or it holds something that is not read, which is named.
        AsyncCkptError, OSError: As `asyncckpt.convert`.

    Blocks: for reading and writing everything.
    """
    _check_kind(dcp_checkpoint_dir, ("dcp", "asyncckpt"), "directory of torch.distributed.checkpoint")
    return convert(dcp_checkpoint_dir, torch_save_path, to="torch", keys=keys, overwrite=overwrite, partial=partial)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: str | os.PathLike[str],
    *,
    keys: str | Iterable[str] | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = True,
    partial: bool = False,
) -> ConversionReport:
    """Convert a file of `torch.save` into a directory that stock `dcp.load` reads, resharded too.

    No process group is needed, and no more than 256 MB of memory, beside a tensor that does not lie row-major in the
    file. Nothing of the file is run.

    Args:
        torch_save_path: The file.
        dcp_checkpoint_dir: The directory; the ones above it are made as well.
        keys: FQNs, or prefixes: only these. None takes everything.
        max_shard_bytes: Limit of one file's tensors; a larger tensor has a file of its own. None: one file.
        overwrite: Replaces a checkpoint that stands at `dcp_checkpoint_dir`, in one step, as torch's function would.
        partial: Leaves out, and reports, what such a directory cannot hold; otherwise that is an error.

    Returns:
        What was done.

    Raises:
        UnsupportedFormatError: There is something else; or it holds something that is not read, which is named.
        AsyncCkptError, OSError: As `asyncckpt.convert`.

    Blocks: for reading and writing everything.
    """
    _check_kind(torch_save_path, ("torch",), "file of torch.save")
    os.makedirs(os.path.dirname(absolute_path(dcp_checkpoint_dir)), exist_ok=True)
    return convert(
        torch_save_path,
        dcp_checkpoint_dir,
        to="dcp",
        keys=keys,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        partial=partial,
    )


def _check_kind(source: str | os.PathLike[str], kinds: tuple[str, ...], wanted: str) -> None:
    path = absolute_path(source)
    found = kind_at(path, Files())
    if found not in kinds:
        raise UnsupportedFormatError(f"{path} is no {wanted}, but of kind {found!r}", path=path, found=found)
