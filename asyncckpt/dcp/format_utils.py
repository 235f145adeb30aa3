"""`dcp_to_torch_save` and `torch_save_to_dcp`: the functions of torch's `format_utils`, in bounded memory."""

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

    Needs no process group, and no more memory than `asyncckpt.convert`. The directory may also be an asyncckpt
    checkpoint. Unlike torch's function it replaces only a checkpoint: any other file at `torch_save_path` is refused.
    The file may be inside the directory, under a name that `dcp.save` does not use.

    Args:
        dcp_checkpoint_dir: The directory.
        torch_save_path: The file.
        keys: FQNs and prefixes; only these leaves are converted. None converts everything.
        overwrite: Replace a checkpoint at `torch_save_path`, in one step. Torch's function always replaces.
        partial: Leave out, and report, leaves that such a file cannot hold. False: they are an error.

    Returns:
        Numbers of leaves and bytes, and what the file holds in another form.

    Raises:
        UnsupportedFormatError: The directory is no such checkpoint, or has leaves that cannot be read; names them.
        CheckpointExistsError: There is something at `torch_save_path` that is no checkpoint, or `overwrite` is False.
        AsyncCkptError, OSError: See `asyncckpt.convert`.

    Blocks: until everything is read and written.
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
    """Convert a file of `torch.save` into a directory that stock `dcp.load` reads, also into sharded targets.

    Needs no process group, and no more memory than `asyncckpt.convert`. No code that the file names is run. Unlike
    torch's function it refuses a directory that holds anything else than a checkpoint. Exception: the directory
    contains `torch_save_path` and no checkpoint; then files are added to it and nothing is replaced.

    Args:
        torch_save_path: The file.
        dcp_checkpoint_dir: The directory. Missing parent directories are created, and removed again after an error.
        keys: FQNs and prefixes; only these leaves are converted. None converts everything.
        max_shard_bytes: Limit in bytes of the tensors in one file; a larger tensor gets its own file. None: one file.
        overwrite: Replace a checkpoint at `dcp_checkpoint_dir`, in one step. Torch's function always replaces.
        partial: Leave out, and report, leaves that such a directory cannot hold. False: they are an error.

    Returns:
        Numbers of leaves and bytes, and what the directory holds in another form.

    Raises:
        UnsupportedFormatError: The file is no file of `torch.save`, or has leaves that cannot be read; names them.
        CheckpointExistsError: There is something at `dcp_checkpoint_dir` that is no checkpoint; or `overwrite` is
            False.
        AsyncCkptError, OSError: See `asyncckpt.convert`.

    Blocks: until everything is read and written.
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
    """Create and flush the parent directories of `path`; after an error, remove those that were created."""
    files, missing, made = Files(), [], []
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process has created it
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
        raise UnsupportedFormatError(
            f"{path} is no {wanted}, but a checkpoint of kind {found!r}; use asyncckpt.convert", path=path, found=found
        )
