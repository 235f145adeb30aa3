"""Layout "dcp": the `.metadata` that stock readers look for, put beside the manifest under the lock of who overwrites.

`.metadata` names files of one save that are all durable, and is replaced by a rename: whoever reads it finds a whole
checkpoint. A manifest of this layout counts once any `.metadata` of ours stands beside it. So for both kinds of
readers a save comes into being with the last of the two, and what it replaces stays whole until then.
"""

from __future__ import annotations

import contextlib
import os
import stat

import msgpack

from asyncckpt.errors import CheckpointExistsError, UnsupportedLeafError
from asyncckpt.failpoints import reach
from asyncckpt.format.dcp_items import encode_items
from asyncckpt.format.dcp_metadata import OWNER_WITHIN_NBYTES, owner_of_metadata
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, SaveId, temporary_dcp_metadata_name
from asyncckpt.format.objects import decode_objects
from asyncckpt.format.pickle_image import NotPickledError
from asyncckpt.format.steps import lineage_key
from asyncckpt.storage.files import MODE_FILE, Files, fsync_directory, opened, write_new_file
from asyncckpt.storage.overwrite_lock import overwrite_lock

_PRIVATE = 0o077
"""The umask of a lock file that is gone again at once."""


def is_finished(path: str, manifest: Manifest, files: Files) -> bool:
    """Whether a manifest that stands at `path` commits: in layout "dcp" only beside a `.metadata`.

    Raises:
        OSError: It cannot be known.
    """
    return manifest.dcp is None or _stands(path, files)


def _stands(path: str, files: Files) -> bool:
    try:
        return stat.S_ISREG(files.lstat(os.path.join(path, DCP_METADATA_NAME)).st_mode)
    except FileNotFoundError:
        return False


def owner_at(path: str, files: Files) -> SaveId | None:
    """Return the save of ours that wrote the `.metadata` at `path`; None: somebody else.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read.
    """
    head = bytearray(OWNER_WITHIN_NBYTES)
    with opened(files, os.path.join(path, DCP_METADATA_NAME), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        count = files.preadv(fd, [head], 0)
    return owner_of_metadata(bytes(head[:count]))


def is_replaced(path: str, manifest: Manifest, files: Files) -> bool:
    """Whether somebody else's `.metadata` came to stand beside a manifest after it: by a stock `dcp.save` to its path.

    An older one was there before, and what is ours was saved beside it. Layout "dcp" is never saved beside one.

    Raises:
        OSError: It cannot be known.
    """
    try:
        theirs = files.lstat(os.path.join(path, DCP_METADATA_NAME))
        if not stat.S_ISREG(theirs.st_mode) or owner_at(path, files) is not None:
            return False
        ours = files.lstat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return False
    return manifest.dcp is not None or theirs.st_mtime_ns > ours.st_mtime_ns


def refuse_foreign_metadata(path: str, save_id: SaveId, files: Files) -> None:
    """Raise when a `.metadata` at `path` is not ours: it is another's checkpoint, and is never replaced.

    Raises:
        CheckpointExistsError: It is not.
        OSError: It cannot be known.
    """
    try:
        owner = owner_at(path, files)
    except FileNotFoundError:
        return
    if owner is None:
        raise CheckpointExistsError(
            f"{path} already holds a checkpoint of torch.distributed.checkpoint ({DCP_METADATA_NAME} is not ours); it "
            "was left untouched: save to another path",
            path=path,
            save_id=str(save_id),
            existing_save_id=None,
        )


def dcp_items(structure: bytes, objects: bytes, save_id: SaveId, rank: int) -> tuple[bytes, bytes]:
    """Return `format.dcp_items.encode_items` of a rank's structure and objects, both as they are stored.

    Raises:
        UnsupportedLeafError: A leaf has no form that stock readers know; the trainer has refused it before.
        CorruptCheckpointError: The objects are none.
    """
    raw = msgpack.unpackb(structure, strict_map_key=True, use_list=False)
    try:
        return encode_items(raw["tree"], decode_objects(objects, save_id, raw["n_objects"]), rank)
    except NotPickledError as error:
        raise UnsupportedLeafError(f"layout='dcp' has no item for {error}", leaf="", type_name=str(error)) from error


def write_temporary(path: str, manifest: Manifest, data: bytes, *, files: Files, umask: int) -> str:
    """Write `.metadata` under its temporary name, flushed as `manifest.fsync` says, and return that.

    Raises:
        CheckpointExistsError: A `.metadata` of somebody else stands there.
        OSError: It cannot be written.
    """
    refuse_foreign_metadata(path, manifest.save_id, files)
    temporary = os.path.join(path, temporary_dcp_metadata_name(manifest.save_id))
    with contextlib.suppress(FileNotFoundError):
        files.unlink(temporary)  # of an earlier try of this very save
    write_new_file(files, temporary, data, mode=MODE_FILE & ~umask, fsync=manifest.fsync)
    return temporary


def goes_first(path: str, standing: Manifest | None, files: Files) -> bool:
    """Whether `.metadata` has to be there before the manifest: for that one to count in the instant when it stands.

    Args:
        path: The checkpoint's directory; its lock is held.
        standing: A manifest of another save that is to be replaced, and may be whole.
        files: The storage seam.

    Raises:
        OSError: It cannot be known.
    """
    return standing is not None and is_finished(path, standing, files) and not _stands(path, files)


def put(path: str, temporary: str, manifest: Manifest, files: Files) -> None:
    """Give `.metadata` its name, flushed as `manifest.fsync` says.

    Raises:
        OSError: A call failed.
    """
    files.rename(temporary, os.path.join(path, DCP_METADATA_NAME))
    reach("commit: metadata put")
    if manifest.fsync:
        fsync_directory(files, path)


def remove_metadata_of(
    path: str, doomed: SaveId | None, before: SaveId | None, files: Files, *, is_locked: bool = False
) -> None:
    """Remove a `.metadata` of ours whose files are about to go.

    IMPORTANT: before them. A stock reader takes whatever `.metadata` names for complete.

    Args:
        path: The checkpoint's directory.
        doomed: The save that wrote it; or
        before: one that is earlier than this, by (epoch, sequence).
        files: The storage seam.
        is_locked: The caller holds the lock of `path`.

    Raises:
        OSError: It cannot be removed.
    """

    def is_doomed(owner: SaveId | None) -> bool:
        if owner is None:
            return False
        return owner == doomed or (before is not None and lineage_key(owner) < lineage_key(before))

    with contextlib.suppress(FileNotFoundError):
        if not is_doomed(owner_at(path, files)):
            return
        with contextlib.nullcontext() if is_locked else overwrite_lock(path, files=files, umask=_PRIVATE):
            if is_doomed(owner_at(path, files)):
                files.unlink(os.path.join(path, DCP_METADATA_NAME))
