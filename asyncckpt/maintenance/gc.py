"""Garbage collection: files of saves that were never committed, of replaced checkpoints, and of killed programs.

A file is garbage only if its name carries a save id, the save is not the committed one of its directory, and neither
the worker nor the file's age says that the save may still be in progress. It is removed only once its save can no
longer be published: see storage/COMMIT.md, section 7.

A temporary directory of a killed program (`convert`, `doctor`) is removed if three conditions hold: only that program
uses its name, it has only files with names of that program, and it was not changed for a given time.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.manifest import Manifest, Tombstone, encode_tombstone
from asyncckpt.format.names import (
    LOCK_NAME,
    MANIFEST_NAME,
    SaveId,
    is_quarantined,
    is_temporary,
    owner_of,
    temporary_tombstone_name,
)
from asyncckpt.storage.catalog import COMMITTED, scan
from asyncckpt.storage.checkpoint_dir import (
    is_finished,
    is_torn,
    manifest_if_readable,
    remove_torn,
    tombstone_if_readable,
    version_at,
)
from asyncckpt.storage.commit import remove_dcp_metadata
from asyncckpt.storage.store import OBJECT, PREFIX, Entry, Store, UnsupportedByStoreError, exclusively

ATTEMPT = "attempt"
LEFTOVERS = "leftovers"
TOMBSTONE = "tombstone"
LOCK = "lock"
BROKEN = "broken"
CONVERSION = "conversion"
PROBE = "probe"
QUIET_S = 60.0
"""Seconds without change after which no worker writes a save of a dead run any more. Chosen."""

REPORTED_PATH_CHARS = 1000
"""Length at which a worker's report cuts paths."""

LOCK_TIMEOUT_S = 1.0
"""Seconds to wait for the lock of a directory: its holder is committing, or was stopped while doing so. Chosen."""

_logger = logging.getLogger("asyncckpt.storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class GarbageRules:
    """Rules that decide which files are garbage.

    Attributes:
        now: Current time in seconds since 1970, by the file system's clock.
        older_than_s: Saves whose files were changed within this time may be in progress, and stay.
        dead_before_epoch: For saves of earlier epochs `QUIET_S` is enough instead.
        busy: Real paths to which a worker writes; they stay.
        tombstones: Whether directories that hold only a tombstone are garbage.
        locks: Whether lock files that are not locked, and temporary files of the committed save, are garbage.
        broken: Whether quarantined checkpoints are garbage.
    """

    now: float
    older_than_s: float
    dead_before_epoch: int = 0
    busy: Collection[str] = ()
    tombstones: bool = False
    locks: bool = False
    broken: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Garbage in one directory.

    Attributes:
        path: The directory.
        kind: `attempt`: files of a save that was never committed. `leftovers`: files of other saves beside a committed
            one, or of a save that was given up. `tombstone`, `lock`, `broken`: as in `GarbageRules`. `conversion`,
            `probe`: temporary files of a killed `convert` or `doctor`. `upload`: parts of an object, see `uploads_in`.
        names: Names of the files to remove.
        nbytes: Length of these files together.
        age_s: Seconds since the last of them was changed or, if their save may be in progress, added.
        save_ids: IDs of the saves that they belong to, the earliest first.
        existing: Manifest or tombstone of the directory.
        version: The store's version of `existing`.
        kept: Why nothing is removed; empty: it is removed.
    """

    path: str
    kind: str
    names: tuple[str, ...]
    nbytes: int
    age_s: float
    save_ids: tuple[SaveId, ...]
    existing: Manifest | Tombstone | None = None
    version: str | None = None
    kept: str = ""


def garbage_at(path: str, store: Store, rules: GarbageRules, *, is_locked: bool = False) -> Garbage | None:
    """Return the garbage of one directory; None: there is none.

    Args:
        path: The directory.
        store: Store that holds it.
        rules: What counts as garbage.
        is_locked: Whether the caller holds the directory's lock, whose file is then no garbage.

    Raises:
        OSError: The directory cannot be read.
    """
    found = _garbage_at(path, store, rules, is_locked=is_locked)
    if found is None or found.kept or _goes_without_lock(found) or _has_locks(path, store):
        return found
    return replace(found, kept="this storage has no locks, and it is only removed under one")


def _has_locks(path: str, store: Store) -> bool:
    try:
        store.lock(path, 0.0)  # is taken when the block begins
    except UnsupportedByStoreError:
        return False
    return True


def _garbage_at(path: str, store: Store, rules: GarbageRules, *, is_locked: bool) -> Garbage | None:
    found = {entry.name: entry for entry in store.entries(path)}
    regular = {name: one for name, one in found.items() if one.is_object}  # neither links nor directories
    if is_locked:
        regular.pop(LOCK_NAME, None)
    owners = {name: owner for name in regular if (owner := owner_of(name)) is not None}
    version = version_at(path, store) if MANIFEST_NAME in found else None
    # The lock's file changes the directory, whose time then says nothing.
    times = None if is_locked else store
    found_there = _DirectoryScan(path, store.resolve(path), regular, rules, version, times)
    if is_quarantined(os.path.basename(path)):
        return found_there.broken(owners, store) if owners and rules.broken else None
    if MANIFEST_NAME not in found:
        return found_there.garbage(ATTEMPT, owners) if owners else None
    existing, tombstone = manifest_if_readable(path, store), tombstone_if_readable(path, store)
    if tombstone is not None:
        return found_there.beside_tombstone(owners, tombstone)
    if existing is None and is_torn(path, store):
        return found_there.garbage(ATTEMPT, owners) if owners else None
    if existing is None:
        kept = "its manifest cannot be read, is damaged, of a newer version, or not of asyncckpt"
        return found_there.garbage(ATTEMPT, owners, kept=kept) if owners else None
    if not is_finished(path, existing, store):
        return found_there.garbage(ATTEMPT, owners, existing)
    return found_there.beside_committed(owners, existing)


@dataclass(frozen=True, slots=True)
class _DirectoryScan:
    """One directory, and the regular files in it. `times`: the store, if the directory's own time counts."""

    path: str
    real_path: str
    regular: Mapping[str, Entry]
    rules: GarbageRules
    version: str | None
    times: Store | None

    def beside_tombstone(self, owners: Mapping[str, SaveId], tombstone: Tombstone) -> Garbage | None:
        if any(owner > tombstone.save_id for owner in owners.values()):
            return self.garbage(ATTEMPT, owners, tombstone)
        if owners:
            return self.garbage(LEFTOVERS, owners, tombstone)
        return self.garbage(TOMBSTONE, {MANIFEST_NAME: tombstone.save_id}, tombstone) if self.rules.tombstones else None

    def beside_committed(self, owners: Mapping[str, SaveId], existing: Manifest) -> Garbage | None:
        names = {name: owner for name, owner in owners.items() if owner != existing.save_id}
        kind = LEFTOVERS if names else LOCK
        if self.rules.locks:
            names |= {name: owner for name, owner in owners.items() if is_temporary(name)}
            if LOCK_NAME in self.regular and self.regular[LOCK_NAME].nbytes == 0:
                names[LOCK_NAME] = existing.save_id
        return self.garbage(kind, names, existing) if names else None

    def broken(self, owners: Mapping[str, SaveId], store: Store) -> Garbage:
        names = dict(owners)
        if MANIFEST_NAME in self.regular:  # a manifest of asyncckpt, as the other file names show; it may be damaged
            names[MANIFEST_NAME] = max(owners.values())
        beside = scan(os.path.dirname(self.path), store)
        last = "" if any(one.state == COMMITTED for one in beside) else "its parent has no committed checkpoint"
        return self.garbage(BROKEN, names, kept=last)

    def garbage(
        self,
        kind: str,
        names: Mapping[str, SaveId],
        existing: Manifest | Tombstone | None = None,
        *,
        kept: str = "",
    ) -> Garbage:
        save_ids = set(names.values())
        if kind == ATTEMPT and existing is not None:  # layout dcp: a manifest that commits nothing
            save_ids.add(existing.save_id)
            names = names or {MANIFEST_NAME: existing.save_id}
        changed_s = max(self.regular[name].mtime_s for name in names)
        if _may_be_published(kind, save_ids, existing):
            # IMPORTANT: a link to an unchanged file has that file's time. So a live save may have only old files.
            changed_s = max(changed_s, self._directory_changed_s())
        age_s = self.rules.now - changed_s
        if not kept and self._is_busy():
            kept = "the worker writes there"
        # IMPORTANT: use the epochs of the files that would be removed: a live run may have begun to write there.
        is_dead = all(one.epoch < self.rules.dead_before_epoch for one in save_ids)
        quiet_s = min(QUIET_S, self.rules.older_than_s) if is_dead else self.rules.older_than_s
        if not kept and age_s < quiet_s:
            kept = f"changed {max(0.0, age_s):.0f} s ago: it may be in progress"
        return Garbage(
            path=self.path,
            kind=kind,
            names=tuple(sorted(names)),
            nbytes=sum(self.regular[name].nbytes for name in names),
            age_s=age_s,
            save_ids=tuple(sorted(save_ids)),
            existing=existing,
            version=self.version if existing is not None else None,
            kept=kept,
        )

    def _directory_changed_s(self) -> float:
        """Return when a name was added or removed; 0: unknown."""
        if self.times is None:
            return 0.0
        with contextlib.suppress(FileNotFoundError):  # object stores have no directories
            return self.times.stat(self.real_path).mtime_s
        return 0.0

    def _is_busy(self) -> bool:
        real = self.real_path
        return any(
            real == path or (len(path) >= REPORTED_PATH_CHARS and real.startswith(path)) for path in self.rules.busy
        )


def garbage_in(root: str, store: Store, rules: GarbageRules, *, recursive: bool = False) -> list[Garbage]:
    """Return the garbage in `root` and one level below it, or at any depth, ordered by path.

    Links are not followed. Directories that cannot be read are skipped with a warning.

    Raises:
        OSError: `root` cannot be listed.
    """
    found: list[Garbage] = []
    for one in scan(root, store, recursive=recursive):
        try:
            garbage = garbage_at(one.path, store, rules)
        except OSError as error:
            _logger.warning("%s is skipped, since it cannot be read: %s", one.path, error)
            continue
        if garbage is not None:
            found.append(garbage)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionResult:
    """Outcome of removing a directory's garbage.

    Attributes:
        garbage: The garbage, as it was found right before the removal.
        removed: Names of the files that were removed.
        error: Error that stopped the removal; None: there was none.
    """

    garbage: Garbage
    removed: tuple[str, ...] = ()
    error: OSError | None = None


def collect(path: str, store: Store, rules: GarbageRules, *, package: str) -> CollectionResult | None:
    """Remove the garbage of one directory, which is determined again, and once more under the directory's lock.

    Args:
        path: The directory.
        store: Store that holds it.
        rules: What counts as garbage.
        package: asyncckpt's version.

    Returns:
        The outcome; None: there is no garbage any more.

    Raises:
        OSError: The directory cannot be read.

    Blocks: for the lock of the directory, at most `LOCK_TIMEOUT_S`.
    """
    garbage = garbage_at(path, store, rules)
    if garbage is None or garbage.kept:
        return None if garbage is None else CollectionResult(garbage=garbage)
    removed: list[str] = []
    try:
        if garbage.kind == BROKEN:
            _remove_broken(garbage, store, removed)
            return CollectionResult(garbage=garbage, removed=tuple(removed))
        with exclusively(store, path, LOCK_TIMEOUT_S):
            now = garbage_at(path, store, rules, is_locked=True)
            if now is not None and not now.kept and _has_grown(garbage, now):
                now = replace(now, kept="a file was added meanwhile: it may be in progress")
            if now is not None and now.kept:
                return CollectionResult(garbage=now)
            if now is not None:
                _remove_locked(now, store, removed, package=package)
        if garbage.kind == LOCK and LOCK_NAME in garbage.names:
            removed.append(LOCK_NAME)  # releasing the lock has removed its file
        if now is not None and now.kind == TOMBSTONE:
            with contextlib.suppress(OSError):  # it has other files
                store.remove_prefix(path)
    except FileExistsError:
        return CollectionResult(garbage=replace(garbage, kept="a save was committed there meanwhile"))
    except OSError as error:
        return CollectionResult(garbage=garbage, removed=tuple(removed), error=error)
    return CollectionResult(garbage=now or garbage, removed=tuple(removed))


def _goes_without_lock(garbage: Garbage) -> bool:
    """Whether the garbage cannot be published any more: a tombstone is put first, or a later save is committed; or it
    was quarantined."""
    if garbage.kind in (ATTEMPT, BROKEN):
        return True
    return garbage.kind == LEFTOVERS and not _may_be_published(garbage.kind, garbage.save_ids, garbage.existing)


def _may_be_published(kind: str, save_ids: Collection[SaveId], existing: Manifest | Tombstone | None) -> bool:
    """Whether a save could still be committed: it is later than the manifest or tombstone of its directory."""
    is_later = existing is None or any(one > existing.save_id for one in save_ids)
    return kind == ATTEMPT or (kind == LEFTOVERS and is_later)


def _has_grown(before: Garbage, now: Garbage) -> bool:
    """Whether files were added to saves that could still be committed. If they are links, their times are old."""
    can_grow = _may_be_published(now.kind, now.save_ids, now.existing)
    return can_grow and not set(now.names) <= set(before.names)


def _remove_locked(garbage: Garbage, store: Store, removed: list[str], *, package: str) -> None:
    path = garbage.path
    if garbage.kind == TOMBSTONE:
        _unlink(path, MANIFEST_NAME, store, removed)
        return
    if garbage.kind == ATTEMPT:
        write_tombstone(path, garbage.save_ids[-1], store, package=package, replaces=garbage.version)
    # IMPORTANT: flush the manifest or tombstone first: after a power cut it must be there if files are gone.
    store.sync(path)
    reach("gc: nothing removed")
    _remove_files(garbage, store, removed)


def write_tombstone(
    path: str,
    save_id: SaveId,
    store: Store,
    *,
    package: str,
    replaces: str | None,
    was_committed: bool = False,
) -> None:
    """Put a tombstone. The caller holds the lock of the directory, if the store has locks.

    Args:
        path: The directory.
        save_id: ID of the latest save that is given up.
        store: Store that holds it.
        package: asyncckpt's version.
        replaces: Version of the manifest or tombstone to replace; None: there must be neither.
        was_committed: Whether it replaces the save's own manifest.

    Raises:
        FileExistsError: Another manifest or tombstone was put meanwhile.
        OSError: A call failed; the tombstone may be there or not.
    """
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    tombstone = Tombstone(save_id=save_id, created=created, writer=f"asyncckpt {package}", was_committed=was_committed)
    data = encode_tombstone(tombstone)
    temporary = os.path.join(path, temporary_tombstone_name(save_id))
    final = os.path.join(path, MANIFEST_NAME)
    if replaces is None:
        remove_torn(path, store)
        store.put_if_absent(final, data, temporary=temporary)
    else:
        store.replace_if(final, data, replaces, temporary=temporary)
    reach("gc: tombstone put")


def _remove_files(garbage: Garbage, store: Store, removed: list[str]) -> None:
    committed = garbage.existing.save_id if isinstance(garbage.existing, Manifest) and garbage.kind != ATTEMPT else None
    for save_id in garbage.save_ids:
        if save_id != committed:
            remove_dcp_metadata(garbage.path, save_id, None, store, is_locked=True)
    for name in garbage.names:
        if owner_of(name) is not None:
            _unlink(garbage.path, name, store, removed)
    store.sync(garbage.path)


def _remove_broken(garbage: Garbage, store: Store, removed: list[str]) -> None:
    """Remove the manifest first, so that the rest is not taken for a damaged checkpoint."""
    if MANIFEST_NAME in garbage.names:
        _unlink(garbage.path, MANIFEST_NAME, store, removed)
        store.sync(garbage.path)
    _remove_files(garbage, store, removed)
    with contextlib.suppress(OSError):
        store.remove_prefix(garbage.path)


def _unlink(path: str, name: str, store: Store, removed: list[str]) -> None:
    reach("gc: removing")
    with contextlib.suppress(FileNotFoundError):  # its save has removed it
        store.remove(os.path.join(path, name))
        removed.append(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporaryKind:
    """How to recognise the temporary files and directories of one program.

    Attributes:
        kind: Value for `Garbage.kind`.
        who: Name of the program for messages, such as "conversion".
        is_named: Whether a name is one that the program gives to its temporary files and directories.
        may_hold: Whether a name is one that the program gives to a file in such a directory.
        keeps: Returns why the file or directory at a path must stay; "": no reason.
    """

    kind: str
    who: str
    is_named: Callable[[str], bool]
    may_hold: Callable[[str], bool]
    keeps: Callable[[str], str] = lambda path: ""


def temporaries_in(
    root: str, store: Store, rules: GarbageRules, of: Sequence[TemporaryKind], *, recursive: bool = False
) -> Iterator[Garbage]:
    """Yield what killed programs left in `root`, or at any depth, ordered by path. Links are not followed.

    Raises:
        OSError: `root` cannot be listed.
    """
    for entry in sorted(store.entries(root), key=lambda one: one.name):
        path = os.path.join(root, entry.name)
        made = next((one for one in of if one.is_named(entry.name)), None)
        try:
            if made is not None:
                yield _left_by(made, path, entry, store, rules)
            elif recursive and entry.kind == PREFIX:
                yield from temporaries_in(path, store, rules, of, recursive=True)
        except OSError:  # removed meanwhile, or this user may not read it
            continue


def _left_by(made: TemporaryKind, path: str, found: Entry, store: Store, rules: GarbageRules) -> Garbage:
    inside = {one.name: one for one in store.entries(path)} if found.kind == PREFIX else {}
    foreign = [name for name, one in sorted(inside.items()) if not (one.is_object and made.may_hold(name))]
    age_s = rules.now - max(one.mtime_s for one in (found, *inside.values()))
    kept = made.keeps(path)
    if kept:
        pass
    elif found.kind not in (PREFIX, OBJECT):
        kept = "it is neither a file nor a directory"
    elif foreign:
        kept = f"it holds {foreign[0]!r}, which no {made.who} writes"
    elif age_s < rules.older_than_s:
        kept = f"changed {max(0.0, age_s):.0f} s ago: it may be in progress"
    return Garbage(
        path=path,
        kind=made.kind,
        names=tuple(sorted(inside)),
        nbytes=sum(one.nbytes for one in inside.values()) if inside else found.nbytes,
        age_s=age_s,
        save_ids=(),
        kept=kept,
    )


def remove_temporary(garbage: Garbage, store: Store) -> list[str]:
    """Remove what `temporaries_in` has found, and return the names of the removed files.

    Raises:
        OSError: A file cannot be removed; or others were put into the directory since, which stay.
    """
    with contextlib.suppress(FileNotFoundError):  # object stores have no directories
        if store.stat(garbage.path).kind != PREFIX:
            store.remove(garbage.path)
            return [os.path.basename(garbage.path)]
    for name in garbage.names:
        store.remove(os.path.join(garbage.path, name))
    store.remove_prefix(garbage.path)
    return list(garbage.names)
