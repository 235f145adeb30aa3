"""A checkpoint's directory: what stands there, whether a save may go there, and whether it is still the same one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.urls import is_object_url, parent_of
from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, UnsupportedFormatError
from asyncckpt.format.dcp import OWNER_WITHIN_NBYTES, owner_of_metadata
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES, Manifest, Tombstone, decode_manifest, decode_tombstone
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, SaveId, owner_of
from asyncckpt.storage.store import DirectoryIdentity, Store

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

PINS_NAME = ".pins"
"""Of the directory beside the checkpoints."""

NO_HOME = DirectoryIdentity()
"""No directory was there to be seen."""


def prepare_directory(
    path: str, *, save_id: SaveId, store: Store, fsync: bool, overwrite: bool = False, resumed: bool = False
) -> list[str]:
    """Make the checkpoint's directory and its missing parents, each name flushed.

    Args:
        path: Absolute path of the checkpoint.
        save_id: Of the save that goes there.
        store: Where it lies.
        fsync: Whether to flush.
        overwrite: Whether an older checkpoint may stand there.
        resumed: Whether the save's own manifest may: another process has begun this save, and died.

    Returns:
        The directories that this call has made, outermost first: for `remove_made`, if the save comes to nothing.

    Raises:
        CheckpointExistsError: A manifest is there that is not to be replaced; or the path lies inside a checkpoint, or
            is the directory that holds another one.
        OSError: A part of the path is no directory, or a call failed. What this call made is gone again.
    """
    refuse_inside(path, save_id, store)
    made: list[str] = []
    try:
        made = store.make_prefix(path, durable=fsync)
        if not made:
            refuse_around(path, save_id, store)
        standing = refuse_standing(path, save_id, store, overwrite=overwrite)
        if isinstance(standing, Manifest) and standing.save_id == save_id and not resumed:
            raise exists(path, save_id, standing, overwrite=overwrite)
        reach("directory: made")
    except BaseException:
        remove_made(made, store)
        raise
    return made


def look_at_directory(path: str, *, save_id: SaveId, store: Store, overwrite: bool) -> None:
    """Refuse what `prepare_directory` would refuse, and make nothing: another process will.

    Raises:
        CheckpointExistsError: As there.
        OSError: It cannot be looked at.
    """
    refuse_inside(path, save_id, store)
    refuse_around(path, save_id, store)
    refuse_standing(path, save_id, store, overwrite=overwrite)


def remove_made(made: Sequence[str], store: Store) -> None:
    """Remove directories that `prepare_directory` has made, as far as they are empty."""
    with contextlib.suppress(OSError):
        for directory in reversed(made):
            reach("failed: removing directory")
            store.remove_prefix(directory)


def tombstone_at(path: str, store: Store) -> Tombstone | None:
    """Return the tombstone that stands at `path`, or None when there is none that can be read."""
    try:
        return known_tombstone_at(path, store)
    except OSError:
        return None


def known_tombstone_at(path: str, store: Store) -> Tombstone | None:
    """As `tombstone_at`, for who must not take a failing call for the absence of a tombstone.

    Returns:
        None: there is none, or what is called so is none of ours.

    Raises:
        OSError: A call failed: it cannot be known.
    """
    try:
        return decode_tombstone(store.read_whole(os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES), path)
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
        return None


def standing_at(path: str, store: Store) -> Manifest | None:
    """Return the manifest that stands at `path`, or None when there is none that can be read."""
    try:
        return _readable_at(path, store)
    except FileNotFoundError:
        return None


def known_standing_at(path: str, store: Store) -> Manifest | None:
    """As `standing_at`, for who must not take a failing call for the absence of a manifest.

    Returns:
        None: nothing is called as a manifest is, or it is no manifest that this version reads.

    Raises:
        OSError: A call failed: it cannot be known.
    """
    try:
        return decode_manifest(store.read_whole(os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES), path)
    except (FileNotFoundError, AsyncCkptError):
        return None


def _readable_at(path: str, store: Store) -> Manifest | None:
    """As `standing_at`, where something is called as a manifest.

    Raises:
        FileNotFoundError: Nothing is.
    """
    try:
        data = store.read_whole(os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        return decode_manifest(data, path)
    except AsyncCkptError:
        return None


def is_finished(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether a manifest that stands at `path` commits: in layout "dcp" only beside a `.metadata`.

    Raises:
        OSError: It cannot be known.
    """
    return manifest.dcp is None or has_dcp_metadata(path, store)


def has_dcp_metadata(path: str, store: Store) -> bool:
    """Whether a `.metadata`, of whomever, stands at `path`.

    Raises:
        OSError: It cannot be known.
    """
    try:
        return store.stat(os.path.join(path, DCP_METADATA_NAME)).is_object
    except FileNotFoundError:
        return False


def dcp_metadata_owner(path: str, store: Store) -> SaveId | None:
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
        owner = dcp_metadata_owner(path, store)
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


def version_at(path: str, store: Store) -> str | None:
    """Return the store's version of what is called as a manifest at `path`, for `replace_if`; None: nothing is.

    Ask before reading it: then what was read is replaced, or nothing.

    Raises:
        OSError: It cannot be known.
    """
    try:
        return store.stat(os.path.join(path, MANIFEST_NAME)).version
    except FileNotFoundError:
        return None


def refuse_standing(path: str, save_id: SaveId, store: Store, *, overwrite: bool) -> Manifest | Tombstone | None:
    """Raise when a manifest stands at `path` that the save must not replace; its own is welcome.

    An older one of layout "dcp" that never got its `.metadata` commits nothing, and may always be replaced. So may a
    tombstone by a later save than it was put for; that one and earlier ones were given up.

    Args:
        path: The checkpoint's directory.
        save_id: Of the save that goes there.
        store: Where it lies.
        overwrite: Whether it may replace an older one. One that cannot be read may be newer, or not ours at all; one
            of the same epoch and of another run is not older, whatever its number.

    Returns:
        What stands there: its own manifest, or the one to be replaced. None: nothing.

    Raises:
        CheckpointExistsError: It does; also an older one that is pinned.
        OSError: It cannot be known.
    """
    try:
        standing = _readable_at(path, store)
    except FileNotFoundError:
        return None
    if standing is not None and standing.save_id == save_id:
        return standing
    is_older = standing is not None and standing.save_id < save_id
    if standing is not None and is_older and not is_finished(path, standing, store):
        return standing
    if standing is not None and is_older and overwrite and not _are_rivals(standing.save_id, save_id):
        if is_pinned(path, store):
            raise pinned(path, save_id, standing)
        return standing
    try:
        store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return None
    tombstone = tombstone_at(path, store) if standing is None else None
    if tombstone is not None and tombstone.save_id < save_id:
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
    kind, advice = "a committed", "save to another path"
    advice += "" if is_object_url(path) else ", or by a checkpointer made with overwrite=True"
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
def overtaken(path: str, save_id: SaveId, store: Store, *, overwrite: bool) -> Iterator[None]:
    """Say so when another save has won the race to `path`: before the block, and when a file is gone inside it.

    The winner removes the loser's files as leftovers, so that the loser's own calls fail with ENOENT.

    Raises:
        CheckpointExistsError: Another save's manifest stands, and is not to be replaced.
    """
    refuse_standing(path, save_id, store, overwrite=overwrite)
    try:
        yield
    except FileNotFoundError:
        refuse_standing(path, save_id, store, overwrite=overwrite)
        raise


def refuse_inside(path: str, save_id: SaveId, store: Store) -> None:
    """Raise when a directory above `path` is a committed checkpoint: who looks for checkpoints looks not inside one.

    Other people's files are called manifest.json too: only one that is ours by its content counts.

    Raises:
        CheckpointExistsError: Naming the outer one.
        OSError: It cannot be known.
    """
    outer = parent_of(path)
    while outer != parent_of(outer):
        try:
            data = store.read_whole(os.path.join(outer, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
            existing: str | None = str(decode_manifest(data, outer).save_id)
        except UnsupportedFormatError:
            existing = None
        except (OSError, AsyncCkptError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_MANIFEST:
                raise
            outer = parent_of(outer)
            continue
        raise CheckpointExistsError(
            f"cannot save to {path}: it lies inside the committed checkpoint {outer} "
            f"({f'save {existing}' if existing else 'of a newer version'}), where nobody would look for it; "
            "save beside that one",
            path=path,
            save_id=str(save_id),
            existing_save_id=existing,
        )


def refuse_around(path: str, save_id: SaveId, store: Store) -> None:
    """Raise when a directory in `path` is a committed checkpoint: beside a manifest above it, nobody would look for it.

    Raises:
        CheckpointExistsError: Naming the inner one.
        OSError: `path` cannot be listed.
    """
    try:
        names = store.names(path)
    except FileNotFoundError:
        return
    for name in names:
        standing = None if owner_of(name) is not None else standing_at(os.path.join(path, name), store)
        if standing is not None:
            inner = os.path.join(path, name)
            raise CheckpointExistsError(
                f"cannot save to {path}: the committed checkpoint {inner} (save {standing.save_id}) lies in it, and "
                f"would be listed no more; save beside that one, to {os.path.join(path, 'NAME')}",
                path=path,
                save_id=str(save_id),
                existing_save_id=str(standing.save_id),
            )


def pin_of(path: str) -> str:
    """Return the path of the pin of the checkpoint at `path`."""
    root, name = os.path.split(path)
    return os.path.join(root, PINS_NAME, name)


def is_pinned(path: str, store: Store) -> bool:
    """Whether the checkpoint at `path` is pinned.

    Raises:
        OSError: It cannot be known.
    """
    try:
        store.stat(pin_of(path))
    except FileNotFoundError:
        return False
    return True


def home_of(path: str, store: Store) -> DirectoryIdentity:
    """Return what the directory at `path` is; where there is none, the one that was to hold it; else `NO_HOME`."""
    for directory in (path, os.path.dirname(path)):
        found = _home_at(directory, store)
        if found != NO_HOME:
            return found
    return NO_HOME


def is_at_home(path: str, home: DirectoryIdentity, store: Store) -> bool:
    """Whether what `home_of` once returned for `path` is still there; `NO_HOME` always is."""
    return home == NO_HOME or any(
        _is_same(home, _home_at(directory, store)) for directory in (path, os.path.dirname(path))
    )


def _is_same(one: DirectoryIdentity, other: DirectoryIdentity) -> bool:
    return one.inode == other.inode and (one.birth_ns == other.birth_ns or not (one.birth_ns and other.birth_ns))


def _home_at(directory: str, store: Store) -> DirectoryIdentity:
    try:
        return store.identity(directory)
    except OSError:
        return NO_HOME
