"""`dcp_to_torch_save` and `torch_save_to_dcp`: with the names and arguments of torch's, streaming."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from asyncckpt.basics.paths import absolute_path, current_umask
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.interop.convert import ConversionReport, convert
from asyncckpt.interop.sources.detect import kind_at
from asyncckpt.storage.checkpoint_dir import remove_made
from asyncckpt.storage.files import MODE_DIRECTORY, Files, fsync_directory
from asyncckpt.storage.local import store_over


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str],
    torch_save_path: str | os.PathLike[str],
    *,
    keys: str | Iterable[str] | None = None,
    overwrite: bool = True,
    partial: bool = False,
) -> ConversionReport:
    """Convert a directory of `dcp.save` into one file that `torch.load(weights_only=True)` reads.

    No process group is needed, and no more memory than `asyncckpt.convert` needs. A checkpoint of ours is taken too.
    Unlike torch's it replaces a checkpoint only: any other file at `torch_save_path` is refused. The file may lie in
    the directory, under a name that `dcp.save` does not use.

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
        CheckpointExistsError: What stands at the target is no checkpoint, or `overwrite` is False.
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

    No process group is needed, and no more memory than `asyncckpt.convert` needs. Nothing of the file is run. Unlike
    torch's it writes into no directory that holds something else than a checkpoint: that is refused, unless the file
    lies in it; then all that is there stays, and a checkpoint in it is not replaced.

    Args:
        torch_save_path: The file.
        dcp_checkpoint_dir: The directory; the ones above it are made as well, and are gone again if this fails.
        keys: FQNs, or prefixes: only these. None takes everything.
        max_shard_bytes: Limit of one file's tensors; a larger tensor has a file of its own. None: one file.
        overwrite: Replaces a checkpoint that stands at `dcp_checkpoint_dir`, in one step, as torch's function would.
        partial: Leaves out, and reports, what such a directory cannot hold; otherwise that is an error.

    Returns:
        What was done.

    Raises:
        UnsupportedFormatError: There is something else; or it holds something that is not read, which is named.
        CheckpointExistsError: What stands at the target is no checkpoint, or `overwrite` is False.
        AsyncCkptError, OSError: As `asyncckpt.convert`.

    Blocks: for reading and writing everything.
    """
    _check_kind(torch_save_path, ("torch",), "file of torch.save")
    with _parents_of(absolute_path(dcp_checkpoint_dir)):
        return convert(
            torch_save_path,
            dcp_checkpoint_dir,
            to="dcp",
            keys=keys,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            partial=partial,
        )


@contextlib.contextmanager
def _parents_of(path: str) -> Iterator[None]:
    """Make the directories above `path`, each name flushed; on an error those that were made go, as far as empty."""
    files, missing, made = Files(), [], []
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else was faster
                files.mkdir(directory, MODE_DIRECTORY & ~current_umask())
                made.append(directory)
            fsync_directory(files, os.path.dirname(directory))
        yield
    except BaseException:
        remove_made(made, store_over(files))
        raise


def _check_kind(source: str | os.PathLike[str], kinds: tuple[str, ...], wanted: str) -> None:
    path = absolute_path(source)
    found = kind_at(path, Files())
    if found not in kinds:
        raise UnsupportedFormatError(f"{path} is no {wanted}, but of kind {found!r}", path=path, found=found)
