"""The target `asyncckpt` in an object store: converted on this machine first, then copied and committed there.

What a conversion writes gets its name by a rename, once it is read back. An object store has none, so what is read back
are files in the directory for temporary files.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.errors import AsyncCkptError, CommitUnknownError, ConfigError
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.mirroring import copy_to_mirror
from asyncckpt.storage.catalog import next_epoch_beside
from asyncckpt.storage.checkpoint_dir import check_target_directory
from asyncckpt.storage.commit import remove_files_of
from asyncckpt.storage.files import conversion_failure
from asyncckpt.storage.locate import store_at

R = TypeVar("R")


def write_to_object_store(
    url: str,
    write: Callable[[str, SaveId], R],
    step: Callable[[int], None],
    *,
    overwrite: bool,
) -> R:
    """Write a checkpoint to files, and copy it to an object store, where it is complete or absent.

    Args:
        url: URL of the checkpoint.
        write: Writes a committed checkpoint to a path that does not exist. Its arguments: the path, and the ID of its
            save. It returns what this function returns.
        step: Called with numbers of bytes that were copied.
        overwrite: As of `convert`.

    Raises:
        ConfigError: `overwrite` is True.
        CheckpointExistsError: There is a checkpoint at the URL.
        CommitUnknownError: The request that commits it failed, so that it may be there.
        SaveFailedError: The store failed. Nothing of the target is left but uploads that `asyncckpt gc` removes.
        AsyncCkptError: As `write`.

    Blocks: until everything is copied.
    """
    if overwrite:
        raise ConfigError(
            f"convert to {url}: overwrite=True replaces a checkpoint in one step, which object stores cannot do; "
            "convert to a path of its own, and remove the older one with `asyncckpt prune`",
            field="overwrite",
            value=True,
        )
    store = store_at(url)
    try:
        save_id = SaveId(next_epoch_beside(url, store), 0, secrets.token_hex(6))
        check_target_directory(url, save_id=save_id, store=store, overwrite=False)
    except AsyncCkptError:
        raise
    except OSError as error:
        raise conversion_failure(error, url) from error
    with tempfile.TemporaryDirectory(prefix="asyncckpt-convert-") as directory:
        path = os.path.join(directory, os.path.basename(url))
        result = write(path, save_id)
        try:
            copy_to_mirror(path, save_id, url, source=store_at(path), target=store, progress=step)
        except CommitUnknownError:
            raise
        except BaseException as error:
            remove_files_of(url, save_id, store=store)
            if not isinstance(error, OSError) or isinstance(error, AsyncCkptError):
                raise
            raise conversion_failure(error, url) from error
    return result
