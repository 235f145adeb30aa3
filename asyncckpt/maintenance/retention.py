"""Retention: applies a policy to a root, and removes the checkpoints that the policy gives up.

Only one process at a time prunes a root: rank 0 of a manager, or `asyncckpt prune` while no training saves there.

IMPORTANT: a removal puts a tombstone, removes the files, then the tombstone and the directory (storage/COMMIT.md,
section 8). A process that dies in between leaves either a complete checkpoint, or a directory that is not one;
`finish_removal` continues from there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of
from asyncckpt.maintenance.gc import LOCK_TIMEOUT_S, GarbageRules, collect, write_tombstone
from asyncckpt.maintenance.mirroring import is_mirrored
from asyncckpt.maintenance.pins import pinned_in
from asyncckpt.maintenance.policy import (
    RetentionPolicy,
    StoredCheckpoint,
    ancestry_in,
    is_ancestor,
    metrics_in,
    newest_of,
    to_delete,
)
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, Found, scan
from asyncckpt.storage.checkpoint_dir import is_finished, is_pinned, manifest_or_error, tombstone_or_error, version_at
from asyncckpt.storage.commit import check_rank_files, remove_dcp_metadata
from asyncckpt.storage.store import Store, exclusively
from asyncckpt.storage.verification import verify_checkpoint

Score = Callable[[Mapping[str, Any]], float]
"""Returns a number for the metrics that a checkpoint was saved with."""

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Outcome for a checkpoint that the policy gives up.

    Attributes:
        stored: The checkpoint.
        is_removed: Whether it was removed; without `delete`, whether it would be.
        kept: Why it stays; empty: it does not.
        error: Error that stopped the removal. The checkpoint is then complete, or it has a tombstone.
    """

    stored: StoredCheckpoint
    is_removed: bool
    kept: str = ""
    error: OSError | None = None


class Scores:
    """Scores of checkpoints by their metrics. If the score of one raises, that is logged once.

    Args:
        score: The user's score of the metrics.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._failed: set[SaveId] = set()

    def of(self, manifest: Manifest) -> float | None:
        """Return the score of a checkpoint; None: it has no metrics, or its score raises."""
        metrics = metrics_in(manifest.metadata)
        if metrics is None:
            return None
        try:
            return float(self._score(metrics))
        except Exception as error:
            if manifest.save_id not in self._failed:
                self._failed.add(manifest.save_id)
                text = "best_fn fails for the metrics of step %d, %.500r: %.500r"
                _log.warning(text, manifest.step, dict(metrics), error)
            return None


@dataclass(frozen=True, slots=True)
class Survey:
    """The checkpoints of a root.

    Attributes:
        stored: The committed checkpoints, the newest by lineage first.
        manifests: Their manifests, by name of the directory.
        names: Names of all directories with committed checkpoints, or saves that were given up or never committed;
            except those in an object store from which nothing can be removed any more.
        unscored: Names of the directories of checkpoints with metrics for which the score raises.
    """

    stored: tuple[StoredCheckpoint, ...]
    manifests: Mapping[str, Manifest]
    names: tuple[str, ...] = ()
    unscored: frozenset[str] = frozenset()


def survey(
    root: str, store: Store, *, score: Scores | None = None, broken: Collection[str] = (), links: bool = False
) -> Survey:
    """Return what a root holds. Reads manifests, but no data.

    Args:
        root: Absolute path of the root.
        store: Store that holds it.
        score: Scores of checkpoints; a checkpoint has none if it raises.
        broken: Names of directories of checkpoints that are known to be damaged.
        links: As for `scan`.

    Raises:
        OSError: `root` exists and cannot be listed.
    """
    try:
        found = scan(root, store, links=links)
    except (FileNotFoundError, NotADirectoryError):
        found = []
    return survey_of(root, found, store, score=score, broken=broken)


def survey_of(
    root: str, found: Iterable[Found], store: Store, *, score: Scores | None = None, broken: Collection[str] = ()
) -> Survey:
    """Return what `survey` does, from what `scan` has found."""
    found = [one for one in found if os.path.dirname(one.path) == root]
    manifests = {os.path.basename(one.path): one.manifest for one in found if one.manifest is not None}
    sound = (manifest for name, manifest in manifests.items() if name not in broken)
    newest = max(sound, key=lambda manifest: manifest.save_id, default=None)
    ancestry = None if newest is None else ancestry_in(newest.metadata)
    stored = [
        StoredCheckpoint(
            name=name,
            step=manifest.step,
            save_id=manifest.save_id,
            score=None if score is None else score.of(manifest),
            is_abandoned=newest is not None and not _is_ancestor(manifest, newest, ancestry),
            is_sound=name not in broken,
            nbytes=manifest.nbytes,
            is_unmirrored=_is_unmirrored(os.path.join(root, name), manifest, store),
        )
        for name, manifest in manifests.items()
    ]
    stored.sort(key=lambda one: one.save_id, reverse=True)
    states = (COMMITTED, ABANDONED, INCOMPLETE)
    names = tuple(os.path.basename(one.path) for one in found if one.state in states and not one.is_bare)
    unscored = frozenset(
        one.name for one in stored if one.score is None and metrics_in(manifests[one.name].metadata) is not None
    )
    return Survey(tuple(stored), manifests, names, unscored if score is not None else frozenset())


def abandoned_in(surveys: Mapping[str, Survey]) -> frozenset[str]:
    """Return the paths of checkpoints that a rollback has abandoned, by the newest one of several roots together.

    Args:
        surveys: By root: a root and its mirror. The newest checkpoint may be in one of them only.
    """
    sound = [one.manifests[stored.name] for one in surveys.values() for stored in one.stored if stored.is_sound]
    newest = max(sound, key=lambda manifest: manifest.save_id, default=None)
    ancestry = None if newest is None else ancestry_in(newest.metadata)
    return frozenset(
        os.path.join(root, stored.name)
        for root, one in surveys.items()
        for stored in one.stored
        if newest is not None and not _is_ancestor(one.manifests[stored.name], newest, ancestry)
    )


def _is_ancestor(one: Manifest, newest: Manifest, ancestry: Sequence[SaveId] | None) -> bool:
    return is_ancestor(one.save_id, ancestry_in(one.metadata), newest.save_id, ancestry)


def _is_unmirrored(path: str, manifest: Manifest, store: Store) -> bool:
    if manifest.mirror in (None, path):
        return False
    try:
        return not is_mirrored(path, manifest.save_id, store)
    except OSError as error:
        _log.warning("%s counts as not copied to its mirror yet: %s", path, error)
        return True


def prune(
    root: str,
    store: Store,
    policy: RetentionPolicy,
    *,
    package: str,
    score: Scores | None = None,
    broken: Collection[str] = (),
    busy: Collection[str] = (),
    pinned: Collection[str] = (),
    dead_after_s: float = 86400.0,
    delete: bool = True,
    restored: SaveId | None = None,
    verifies: Callable[[StoredCheckpoint], bool] | None = None,
    is_ours: Callable[[], bool] = lambda: True,
    is_mirror: bool = False,
) -> list[Pruned]:
    """Remove the checkpoints that the policy gives up, in its order.

    Four kinds of checkpoints stay although the policy gives them up:

    - All, while the newest checkpoint is not whole on disk.
    - Those with metrics of earlier runs, while the score raises for all metrics: one of them may be the best.
    - One from which a run was restored, until that run, or a later run that was restored from it, has a verified
      checkpoint. To find that out, one checkpoint of the run is read back, once. Each checkpoint of a manager names the
      one from which its run was restored (`maintenance.policy`). If no checkpoint of the run is kept, this rule does
      not apply.
    - Those that are still to be copied to their mirrors: as many as `policy.max_unmirrored`, or while there is room for
      two checkpoints as large as the newest. Beyond that the oldest are removed, which is logged.

    A removal that fails is logged, and tried again next time. The files of saves that were never committed are removed
    too, if they have not changed for `dead_after_s`, or, except in a mirror, for `gc.QUIET_S` if a later run has
    committed a checkpoint.

    Args:
        root: Absolute path of the root.
        store: Store that holds it.
        policy: What to keep.
        package: asyncckpt's version.
        score, broken: As for `survey`.
        busy: Names of directories to which a save is in progress: they stay. Asked right before each removal.
        pinned: Names of directories that count as pinned, besides those that have a pin in the root.
        dead_after_s: Seconds, longer than any save lives: a worker gives a save up after `commit_timeout_s`.
        delete: False: remove nothing, and return what would be removed.
        restored: ID of the save that this run has restored from, until the run has committed one of its own.
        verifies: Returns whether a checkpoint can be read back; None: read it, and compare all checksums.
        is_ours: Returns whether no other process prunes the root. Asked right before each removal, since this process
            may have been stopped for longer than others wait for it.
        is_mirror: Whether the root is a mirror: a worker copies there for as long as it takes, also for a dead run.

    Raises:
        OSError: `root` or its pins cannot be read; nothing was removed.

    Blocks: for removals, and for checkpoints that are read back; for locks, `gc.LOCK_TIMEOUT_S` for each directory.
    """
    found, pinned = survey(root, store, score=score, broken=broken), {*pinned, *pinned_in(root, store)}
    newest = newest_of(found.stored)
    if newest is None:
        return []
    done = []
    maybe_best = _maybe_best(found, newest)
    is_sound = is_whole(os.path.join(root, newest.name), found.manifests[newest.name], store)
    to_remove = to_delete(found.stored, policy, pinned)
    unmirrored = _Unmirrored(root, store, policy, [one for one in to_remove if one.is_unmirrored], newest.nbytes)
    origins = _unverified_origins(found, to_remove, restored, verifies or _reads_back(root, store)) if is_sound else {}
    for one in to_remove:
        if not is_sound:
            done.append(Pruned(stored=one, is_removed=False, kept=f"the newest, {newest.name}, is not whole"))
        elif one.name in busy:
            done.append(Pruned(stored=one, is_removed=False, kept="a save to it is in progress"))
        elif one.name in maybe_best:
            done.append(
                Pruned(stored=one, is_removed=False, kept="best_fn fails for all metrics, so this may be the best")
            )
        elif one.name in origins:
            _log.info("%s stays: %s", os.path.join(root, one.name), origins[one.name])
            done.append(Pruned(stored=one, is_removed=False, kept=origins[one.name]))
        elif one.is_unmirrored and not unmirrored.must_go(one, is_logged=delete):
            done.append(Pruned(stored=one, is_removed=False, kept="it is not in its mirror yet"))
        else:
            done.append(_pruned(root, one, store, package, busy, is_ours, delete=delete))
    if not is_sound:
        _log.warning("%s is not whole: retention removes nothing older", os.path.join(root, newest.name))
    elif delete:
        dead_before = 0 if is_mirror else newest.save_id.epoch
        rules = GarbageRules(now=time.time(), older_than_s=dead_after_s, dead_before_epoch=dead_before)
        for name in found.names:
            if name not in busy and is_ours():
                _finish(os.path.join(root, name), store)
                _sweep(os.path.join(root, name), rules, store, package)
    return done


class _Unmirrored:
    """The checkpoints that are given up and are not in their mirrors yet.

    Args:
        root, store, policy: As for `prune`.
        waiting: These checkpoints, in the order of removal.
        next_nbytes: Expected size of the next checkpoint.
    """

    def __init__(
        self, root: str, store: Store, policy: RetentionPolicy, waiting: Sequence[StoredCheckpoint], next_nbytes: int
    ) -> None:
        self._root, self._store, self._next_nbytes = root, store, next_nbytes
        n_kept = len(waiting) if policy.max_unmirrored is None else policy.max_unmirrored
        self._limit = policy.max_unmirrored
        self._excess = {one.name for one in waiting[: max(0, len(waiting) - n_kept)]}

    def must_go(self, one: StoredCheckpoint, *, is_logged: bool) -> bool:
        """Return whether a checkpoint is removed before it is in its mirror; `is_logged`: log that."""
        why = f"max_unmirrored is {self._limit}" if one.name in self._excess else ""
        why = why or ("there is no room for two more checkpoints" if self._is_full() else "")
        if why and is_logged:
            _log.warning("%s is removed before it is in its mirror: %s", os.path.join(self._root, one.name), why)
        return bool(why)

    def _is_full(self) -> bool:
        if is_object_url(self._root):
            return False
        try:
            found = self._store.as_files().statvfs(self._root)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < 2 * self._next_nbytes


def _maybe_best(found: Survey, newest: StoredCheckpoint) -> set[str]:
    """Return names of checkpoints of earlier runs with metrics, if none has a score: a new best_fn may be a mistake.

    Checkpoints of this run are not among them: it may not have evaluated yet, and the disk must not fill up.
    """
    if any(one.score is not None for one in found.stored):
        return set()
    return {one.name for one in found.stored if one.name in found.unscored and one.save_id.epoch < newest.save_id.epoch}


def _unverified_origins(
    found: Survey,
    to_remove: Sequence[StoredCheckpoint],
    restored: SaveId | None,
    verifies: Callable[[StoredCheckpoint], bool],
) -> dict[str, str]:
    """Return which of `to_remove` a run has restored from without having a sound checkpoint since, by name, and why."""
    removed_names = {one.name for one in to_remove}
    runs_by_origin: dict[tuple[str, SaveId], list[StoredCheckpoint]] = {}  # by run and its origin; the newest first
    for one in found.stored:
        ancestry = ancestry_in(found.manifests[one.name].metadata)
        if ancestry and one.name not in removed_names:
            runs_by_origin.setdefault((one.save_id.run_id, ancestry[0]), []).append(one)
    origins, kept = {origin for _, origin in runs_by_origin}, {}
    for one in to_remove:
        if one.save_id == restored:
            kept[one.name] = "this run has restored from it, and has not committed a checkpoint since"
        for (_, origin), run in runs_by_origin.items():
            if origin != one.save_id or one.name in kept or any(later.save_id in origins for later in run):
                continue
            if not any(later.is_sound and verifies(later) for later in run):
                kept[one.name] = (
                    f"the run of {run[0].name} has restored from it, and no newer checkpoint of that run verifies"
                )
    return kept


def _reads_back(root: str, store: Store) -> Callable[[StoredCheckpoint], bool]:
    return functools.cache(lambda one: is_read_back(os.path.join(root, one.name), one.save_id, store))


def is_read_back(path: str, save_id: SaveId, store: Store) -> bool:
    """Return whether the checkpoint at `path` is that of `save_id`, and can be read back as it was written.

    Blocks: for the reads, by one thread, since a training may be running.
    """
    verdict = verify_checkpoint(path, store.as_files(), threads=1)
    if verdict.contents is not None and verdict.contents.manifest.save_id != save_id:
        return False  # replaced meanwhile
    if verdict.faults:
        _log.warning("%s does not verify: %s", path, verdict.faults[0])
    return not verdict.faults


def _pruned(
    root: str,
    one: StoredCheckpoint,
    store: Store,
    package: str,
    busy: Collection[str],
    is_ours: Callable[[], bool],
    *,
    delete: bool,
) -> Pruned:
    path = os.path.join(root, one.name)
    if not delete:
        return Pruned(stored=one, is_removed=True)

    def is_wanted() -> bool:
        return one.name in busy or is_pinned(path, store) or not is_ours()

    try:
        gone = remove_checkpoint(path, one.save_id, store, package=package, is_wanted=is_wanted)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
        return Pruned(stored=one, is_removed=False, error=error)
    if gone:
        _log.info("removed step %d, %s", one.step, path)
    meanwhile = "it was pinned or replaced meanwhile, a save to it has begun, or another process manages this root"
    kept = "" if gone else meanwhile
    return Pruned(stored=one, is_removed=gone, kept=kept)


def _finish(path: str, store: Store) -> None:
    """Finish an interrupted removal; log it if that fails."""
    try:
        finish_removal(path, store)
    except OSError as error:
        _log.warning("an interrupted removal of %s cannot be finished: %s", path, error)


def _sweep(path: str, rules: GarbageRules, store: Store, package: str) -> None:
    """Remove files of dead runs, after a tombstone: a process that still writes such a save cannot commit it then."""
    try:
        done = collect(path, store, rules, package=package)
        if done is not None and done.removed:
            _log.info("removed files of saves that were never committed from %s", path)
    except FileNotFoundError:  # retention has just removed it
        pass
    except OSError as error:
        _log.warning("files of saves that were never committed cannot be removed from %s: %s", path, error)


def remove_checkpoint(
    path: str,
    save_id: SaveId,
    store: Store,
    *,
    package: str,
    is_wanted: Callable[[], bool] = lambda: False,
) -> bool:
    """Remove the checkpoint at `path`, if it is still the one of `save_id`, and not wanted.

    Call it only if a newer checkpoint is known to be sound.

    Args:
        path: Directory of the checkpoint.
        save_id: Save id of its manifest.
        store: Store that holds it.
        package: asyncckpt's version.
        is_wanted: Returns whether the checkpoint must stay; called under the lock that `pin` takes as well.

    Returns:
        Whether it was removed. False: it is wanted, or the directory holds another save's manifest, or none.

    Raises:
        OSError: A call failed. The checkpoint is complete, or it has a tombstone and `finish_removal` removes the rest.

    Blocks: for the lock of the directory, at most `gc.LOCK_TIMEOUT_S`.
    """
    with exclusively(store, path, LOCK_TIMEOUT_S) as is_locked:
        version = version_at(path, store)
        existing = manifest_or_error(path, store)
        if version is None or existing is None or existing.save_id != save_id or is_wanted():
            return False
        try:
            write_tombstone(path, save_id, store, package=package, replaces=version, was_committed=True)
        except FileExistsError:  # without locks another save was faster
            return False
        # IMPORTANT: a power cut must not bring the manifest back once files that it names are gone.
        store.sync(path)
        reach("retention: delisted")
        _remove_rest(path, save_id, store, is_locked=is_locked)
    _remove_directory(path, store)
    return True


def finish_removal(path: str, store: Store) -> bool:
    """Finish an interrupted removal.

    Args:
        path: Directory of the checkpoint.
        store: Store that holds it.

    Returns:
        Whether there was one to finish.

    Raises:
        OSError: As `remove_checkpoint`.

    Blocks: as `remove_checkpoint`.
    """
    tombstone = tombstone_or_error(path, store)
    if tombstone is None or not tombstone.was_committed:
        return False
    with exclusively(store, path, LOCK_TIMEOUT_S) as is_locked:
        tombstone = tombstone_or_error(path, store)
        if tombstone is None or not tombstone.was_committed:
            return False
        _remove_rest(path, tombstone.save_id, store, is_locked=is_locked)
    _remove_directory(path, store)
    return True


def _remove_rest(path: str, save_id: SaveId, store: Store, *, is_locked: bool) -> None:
    """Remove the files, once the tombstone is there. Without the lock it stays: a later save may be replacing it."""
    remove_dcp_metadata(path, save_id, None, store, is_locked=True)
    later = False
    for name in store.names(path):
        owner = owner_of(name)
        if owner is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # its save has removed it
            if not store.stat(os.path.join(path, name)).is_object:
                continue
            if owner > save_id:
                later = True
                continue
            reach("retention: removing")
            store.remove(os.path.join(path, name))
    store.sync(path)
    reach("retention: emptied")
    if is_locked and not later:  # else that save replaces it
        store.remove(os.path.join(path, MANIFEST_NAME))


def _remove_directory(path: str, store: Store) -> None:
    """Remove the directory. If this process dies, it stays, empty or with the lock file."""
    with contextlib.suppress(OSError):  # it has other files, or files of a later save
        reach("retention: removing directory")
        store.remove_prefix(path)


def is_whole(path: str, manifest: Manifest, store: Store) -> bool:
    """Return whether every file that the manifest names is there in full, by sizes and indexes."""
    try:
        check_rank_files(path, manifest, store=store)
        return is_finished(path, manifest, store)
    except (OSError, AsyncCkptError):
        return False
