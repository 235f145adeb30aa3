"""What stands at a path before a save gets there, and whether the save may go on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, UnsupportedFormatError
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of
from asyncckpt.format.steps import lineage_key
from asyncckpt.format.tombstone import Tombstone, decode_tombstone
from asyncckpt.storage.dcp_commit import is_finished
from asyncckpt.storage.files import Files, read_small_file
from asyncckpt.storage.pinned import is_pinned

_NO_MANIFEST = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.EISDIR,
        errno.EINVAL,
        errno.EFBIG,
        errno.ENXIO,
    }
)
"""Why what is called manifest.json is none of ours, or none that this user could load."""


def tombstone_at(path: str, files: Files) -> Tombstone | None:
    """Return the tombstone that stands at `path`, or None when there is none that can be read."""
    try:
        return known_tombstone_at(path, files)
    except OSError:
        return None


def known_tombstone_at(path: str, files: Files) -> Tombstone | None:
    """As `tombstone_at`, for who must not take a failing call for the absence of a tombstone.

    Returns:
        None: there is none, or what is called so is none of ours.

    Raises:
        OSError: A call failed: it cannot be known.
    """
    try:
        return decode_tombstone(read_small_file(files, os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES), path)
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
        return None


def standing_at(path: str, files: Files) -> Manifest | None:
    """Return the manifest that stands at `path`, or None when there is none that can be read."""
    try:
        return known_standing_at(path, files)
    except OSError:
        return None


def known_standing_at(path: str, files: Files) -> Manifest | None:
    """As `standing_at`, for who must not take a failing call for the absence of a manifest.

    Returns:
        None: nothing is called as a manifest is, or it is no manifest that this version reads.

    Raises:
        OSError: A call failed: it cannot be known.
    """
    try:
        return decode_manifest(read_small_file(files, os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES), path)
    except (FileNotFoundError, AsyncCkptError):
        return None


def refuse_standing(path: str, save_id: SaveId, files: Files, *, overwrite: bool) -> Manifest | Tombstone | None:
    """Raise when a manifest stands at `path` that the save must not replace; its own is welcome.

    An older one of layout "dcp" that never got its `.metadata` commits nothing, and may always be replaced. So may a
    tombstone by a later save than it was put for; that one and earlier ones were given up.

    Args:
        path: The checkpoint's directory.
        save_id: Of the save that goes there.
        files: The storage seam.
        overwrite: Whether it may replace an older one. One that cannot be read may be newer, or not ours at all; one
            of the same epoch and of another run is not older, whatever its number.

    Returns:
        What stands there: its own manifest, or the one to be replaced. None: nothing.

    Raises:
        CheckpointExistsError: It does; also an older one that is pinned.
        OSError: It cannot be known.
    """
    standing = standing_at(path, files)
    if standing is not None and standing.save_id == save_id:
        return standing
    is_older = standing is not None and lineage_key(standing.save_id) < lineage_key(save_id)
    if standing is not None and is_older and not is_finished(path, standing, files):
        return standing
    if standing is not None and is_older and overwrite and not _are_rivals(standing.save_id, save_id):
        if is_pinned(path, files):
            raise pinned(path, save_id, standing)
        return standing
    try:
        files.lstat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return None
    tombstone = tombstone_at(path, files) if standing is None else None
    if tombstone is not None and lineage_key(tombstone.save_id) < lineage_key(save_id):
        return tombstone
    if tombstone is not None:
        raise CheckpointExistsError(
            f"{path}: save {save_id} was given up by `asyncckpt gc` (tombstone of {tombstone.save_id}); it was too "
            "old to be under way. Save again",
            path=path,
            save_id=str(save_id),
            existing_save_id=str(tombstone.save_id),
        )
    raise exists(path, save_id, standing, overwrite=overwrite)


def _are_rivals(one: SaveId, other: SaveId) -> bool:
    """Whether two runs have one epoch, so that their saves have no order.

    Each was given it by a worker of its own before the other had begun a file: one worker may have been frozen there
    until a restarted run had begun at another.
    """
    return one.epoch == other.epoch and one.run_id != other.run_id


def exists(path: str, save_id: SaveId, standing: Manifest | None, *, overwrite: bool) -> CheckpointExistsError:
    """Return the error of a save that finds `path` taken."""
    what = f"save {standing.save_id}, step {standing.step}" if standing else "its manifest cannot be read"
    kind, advice = "a committed", "save to another path, or by a checkpointer made with overwrite=True"
    if standing is not None and overwrite and _are_rivals(standing.save_id, save_id):
        kind, advice = "another run's", "it began when this run did, so neither is older: save to another path"
    elif overwrite:
        kind, advice = ("a newer" if standing else "a"), "overwrite=True replaces older ones only: save to another path"
    return CheckpointExistsError(
        f"{path} already holds {kind} checkpoint ({what}); it was left untouched: {advice}",
        path=path,
        save_id=str(save_id),
        existing_save_id=str(standing.save_id) if standing else None,
    )


def pinned(path: str, save_id: SaveId, standing: Manifest) -> CheckpointExistsError:
    """Return the error of a save that would replace a pinned checkpoint."""
    return CheckpointExistsError(
        f"{path} holds a pinned checkpoint (save {standing.save_id}, step {standing.step}); it was left untouched: "
        "save to another path, or take the pin off (`asyncckpt pin --remove`)",
        path=path,
        save_id=str(save_id),
        existing_save_id=str(standing.save_id),
    )


@contextlib.contextmanager
def overtaken(path: str, save_id: SaveId, files: Files, *, overwrite: bool) -> Iterator[None]:
    """Say so when another save has won the race to `path`: before the block, and when a file is gone inside it.

    The winner removes the loser's files as leftovers, so that the loser's own calls fail with ENOENT.

    Raises:
        CheckpointExistsError: Another save's manifest stands, and is not to be replaced.
    """
    refuse_standing(path, save_id, files, overwrite=overwrite)
    try:
        yield
    except FileNotFoundError:
        refuse_standing(path, save_id, files, overwrite=overwrite)
        raise


def refuse_inside(path: str, save_id: SaveId, files: Files) -> None:
    """Raise when a directory above `path` is a committed checkpoint: who looks for checkpoints looks not inside one.

    Other people's files are called manifest.json too: only one that is ours by its content counts.

    Raises:
        CheckpointExistsError: Naming the outer one.
        OSError: It cannot be known.
    """
    outer = os.path.dirname(path)
    while outer != os.path.dirname(outer):
        try:
            data = read_small_file(files, os.path.join(outer, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
            existing: str | None = str(decode_manifest(data, outer).save_id)
        except UnsupportedFormatError:
            existing = None
        except (OSError, AsyncCkptError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_MANIFEST:
                raise
            outer = os.path.dirname(outer)
            continue
        raise CheckpointExistsError(
            f"cannot save to {path}: it lies inside the committed checkpoint {outer} "
            f"({f'save {existing}' if existing else 'of a newer version'}), where nobody would look for it; "
            "save beside that one",
            path=path,
            save_id=str(save_id),
            existing_save_id=existing,
        )


def refuse_around(path: str, save_id: SaveId, files: Files) -> None:
    """Raise when a directory in `path` is a committed checkpoint: beside a manifest above it, nobody would look for it.

    Raises:
        CheckpointExistsError: Naming the inner one.
        OSError: `path` cannot be listed.
    """
    for name in files.listdir(path):
        standing = None if owner_of(name) is not None else standing_at(os.path.join(path, name), files)
        if standing is not None:
            inner = os.path.join(path, name)
            raise CheckpointExistsError(
                f"cannot save to {path}: the committed checkpoint {inner} (save {standing.save_id}) lies in it, and "
                f"would be listed no more; save beside that one, to {os.path.join(path, 'NAME')}",
                path=path,
                save_id=str(save_id),
                existing_save_id=str(standing.save_id),
            )
