"""Layout "dcp": the `.metadata` that stock readers look for, put beside the manifest under the lock of who overwrites.

`.metadata` names files of one save that are all durable, and is replaced by a rename: whoever reads it finds a whole
checkpoint. A manifest of this layout counts once any `.metadata` of ours stands beside it. So for both kinds of
readers a save comes into being with the last of the two, and what it replaces stays whole until then.
"""

from __future__ import annotations

import contextlib
import os

import msgpack

from asyncckpt.errors import CheckpointExistsError, UnsupportedLeafError
from asyncckpt.failpoints import reach
from asyncckpt.format.dcp import OWNER_WITHIN_NBYTES, encode_items, owner_of_metadata
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import DCP_METADATA_NAME, SaveId, temporary_dcp_metadata_name
from asyncckpt.format.objects import decode_objects
from asyncckpt.format.torch_pickle import NotPickledError
from asyncckpt.storage.store import Store

LOCK_TIMEOUT_S = 30.0
"""Nobody holds the lock longer than it takes to flush a few directories. Chosen, not measured."""


def is_finished(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether a manifest that stands at `path` commits: in layout "dcp" only beside a `.metadata`.

    Raises:
        OSError: It cannot be known.
    """
    return manifest.dcp is None or _stands(path, store)


def _stands(path: str, store: Store) -> bool:
    try:
        return store.stat(os.path.join(path, DCP_METADATA_NAME)).is_object
    except FileNotFoundError:
        return False


def owner_at(path: str, store: Store) -> SaveId | None:
    """Return the save of ours that wrote the `.metadata` at `path`; None: somebody else.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read.
    """
    return owner_of_metadata(store.read(os.path.join(path, DCP_METADATA_NAME), 0, OWNER_WITHIN_NBYTES))


def refuse_foreign_metadata(path: str, save_id: SaveId, store: Store) -> None:
    """Raise when a `.metadata` at `path` is not ours: it is another's checkpoint, and is never replaced.

    Raises:
        CheckpointExistsError: It is not.
        OSError: It cannot be known.
    """
    try:
        owner = owner_at(path, store)
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
    """Return `format.dcp.encode_items` of a rank's structure and objects, both as they are stored.

    Raises:
        UnsupportedLeafError: A leaf has no form that stock readers know; the trainer has refused it before.
        CorruptCheckpointError: The objects are none.
    """
    raw = msgpack.unpackb(structure, strict_map_key=True, use_list=False)
    try:
        return encode_items(raw["tree"], decode_objects(objects, save_id, raw["n_objects"]), rank)
    except NotPickledError as error:
        raise UnsupportedLeafError(f"layout='dcp' has no item for {error}", leaf="", type_name=str(error)) from error


def write_temporary(path: str, manifest: Manifest, data: bytes, store: Store) -> str:
    """Write `.metadata` under its temporary name, flushed as `manifest.fsync` says, and return that.

    Raises:
        CheckpointExistsError: A `.metadata` of somebody else stands there.
        OSError: It cannot be written.
    """
    refuse_foreign_metadata(path, manifest.save_id, store)
    temporary = os.path.join(path, temporary_dcp_metadata_name(manifest.save_id))
    with contextlib.suppress(FileNotFoundError):
        store.remove(temporary)  # of an earlier try of this very save
    store.put(temporary, data, durable=manifest.fsync)
    return temporary


def goes_first(path: str, standing: Manifest | None, store: Store) -> bool:
    """Whether `.metadata` has to be there before the manifest: for that one to count in the instant when it stands.

    Args:
        path: The checkpoint's directory; its lock is held.
        standing: A manifest of another save that is to be replaced, and may be whole.
        store: Where it lies.

    Raises:
        OSError: It cannot be known.
    """
    return standing is not None and is_finished(path, standing, store) and not _stands(path, store)


def put(path: str, temporary: str, manifest: Manifest, store: Store) -> None:
    """Give `.metadata` its name, flushed as `manifest.fsync` says.

    Raises:
        OSError: A call failed.
    """
    store.move(temporary, os.path.join(path, DCP_METADATA_NAME), replace=True)
    reach("commit: metadata put")
    if manifest.fsync:
        store.sync(path)


def remove_metadata_of(
    path: str, doomed: SaveId | None, before: SaveId | None, store: Store, *, is_locked: bool = False
) -> None:
    """Remove a `.metadata` of ours whose files are about to go.

    IMPORTANT: before them. A stock reader takes whatever `.metadata` names for complete.

    Args:
        path: The checkpoint's directory.
        doomed: The save that wrote it; or
        before: one that is earlier than this, by (epoch, sequence).
        store: Where it lies.
        is_locked: The caller holds the lock of `path`.

    Raises:
        OSError: It cannot be removed.
    """

    def is_doomed(owner: SaveId | None) -> bool:
        if owner is None:
            return False
        return owner == doomed or (before is not None and owner < before)

    with contextlib.suppress(FileNotFoundError):
        if not is_doomed(owner_at(path, store)):
            return
        with contextlib.nullcontext() if is_locked else store.lock(path, LOCK_TIMEOUT_S):
            if is_doomed(owner_at(path, store)):
                store.remove(os.path.join(path, DCP_METADATA_NAME))
