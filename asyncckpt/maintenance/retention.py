"""Retention: applying a policy to a directory. What there is, what may go, and its removal, step by step.

One process of a root at a time prunes: a manager's rank 0, or whoever calls `asyncckpt prune` while no training saves
there.

IMPORTANT: the order of a removal is tombstone, files, tombstone again and directory (storage/COMMIT.md, section 8).
Whoever dies in between leaves either the whole checkpoint, or a directory that nobody takes for one; `retire_rest` goes
on from there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of
from asyncckpt.maintenance.gc import LOCK_TIMEOUT_S, Rules, collect, write_tombstone
from asyncckpt.maintenance.pins import pinned_in
from asyncckpt.maintenance.policy import (
    RetentionPolicy,
    Stored,
    ancestry_in,
    is_ancestor,
    metrics_in,
    newest_of,
    to_delete,
)
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, scan
from asyncckpt.storage.checkpoint_dir import is_finished, is_pinned, known_standing_at, known_tombstone_at, version_at
from asyncckpt.storage.commit import check_rank_files, remove_dcp_metadata
from asyncckpt.storage.store import Store, exclusively
from asyncckpt.storage.verification import verify_checkpoint

Score = Callable[[Mapping[str, Any]], float]
"""From the metrics that a checkpoint was saved with to a number."""

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What became of a checkpoint that the policy gives up.

    Attributes:
        stored: Which one.
        is_removed: It is gone, or would go.
        kept: Why it stays after all; empty: it does not.
        error: What stopped its removal; what is left is no checkpoint any more, or it is whole.
    """

    stored: Stored
    is_removed: bool
    kept: str = ""
    error: OSError | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a root.

    Attributes:
        stored: The committed checkpoints, the newest by lineage first.
        manifests: Theirs, by the name of the directory.
        names: Of all directories in which something of ours is: also what was never committed, and what was given up.
        unscored: Of those whose metrics the score fails on.
    """

    stored: tuple[Stored, ...]
    manifests: Mapping[str, Manifest]
    names: tuple[str, ...] = ()
    unscored: frozenset[str] = frozenset()


def survey(
    root: str, store: Store, *, score: Score | None = None, broken: Collection[str] = (), links: bool = False
) -> Survey:
    """Look at the checkpoints in a directory; reads their manifests, no data.

    Args:
        root: Absolute path.
        store: Where it lies.
        score: Of a checkpoint with metrics; what it raises counts as no score, and is logged.
        broken: Names of the directories of those that are known to be damaged.
        links: As of `scan`.

    Raises:
        OSError: `root` cannot be listed, for another reason than that it does not exist.
    """
    try:
        found = [one for one in scan(root, store, links=links) if os.path.dirname(one.path) == root]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    manifests = {os.path.basename(one.path): one.manifest for one in found if one.manifest is not None}
    sound = (manifest for name, manifest in manifests.items() if name not in broken)
    newest = max(sound, key=lambda manifest: manifest.save_id, default=None)
    ancestry = None if newest is None else ancestry_in(newest.metadata)
    stored = [
        Stored(
            name=name,
            step=manifest.step,
            save_id=manifest.save_id,
            score=_score_of(manifest, score),
            is_abandoned=newest is not None and not is_ancestor(manifest.save_id, newest.save_id, ancestry),
            is_sound=name not in broken,
            nbytes=manifest.nbytes,
        )
        for name, manifest in manifests.items()
    ]
    stored.sort(key=lambda one: one.save_id, reverse=True)
    names = tuple(os.path.basename(one.path) for one in found if one.state in (COMMITTED, ABANDONED, INCOMPLETE))
    unscored = {
        one.name for one in stored if one.score is None and metrics_in(manifests[one.name].metadata) is not None
    }
    return Survey(tuple(stored), manifests, names, frozenset(unscored) if score is not None else frozenset())


def prune(
    root: str,
    store: Store,
    policy: RetentionPolicy,
    *,
    package: str,
    score: Score | None = None,
    broken: Collection[str] = (),
    busy: Collection[str] = (),
    dead_after_s: float = 86400.0,
    delete: bool = True,
    restored: SaveId | None = None,
    verifies: Callable[[Stored], bool] | None = None,
    is_ours: Callable[[], bool] = lambda: True,
) -> list[Pruned]:
    """Remove the checkpoints that the policy gives up, in the order in which they go.

    Nothing goes while the newest one is not whole on disk; nor, while the score fails on all metrics that there are,
    what earlier runs have saved with some: nobody knows the best of them. What fails to go is logged, and tried again
    next time. Nor does one that a run has restored from, while nothing newer of its own line has been verified: not a
    checkpoint of that run, which is read back for it (once: only when the one that it went on from would go), nor has
    a later run restored one of those. Each checkpoint of a manager names the one that its run went on from
    (`maintenance.policy`), so every process knows that; a line of which nothing stays counts no more.

    With them go the files of saves that were begun and never committed, if they have not changed for `dead_after_s`;
    for `gc.QUIET_S` only, if a run that came after them has committed one.

    Args:
        root: Absolute path.
        store: Where it lies.
        policy: What is to be kept.
        package: asyncckpt's version.
        score, broken: As of `survey`.
        busy: Names of directories to which a save is under way: they stay for now. Asked right before each goes.
        dead_after_s: Longer than any save lives: a worker gives one up after `commit_timeout_s`.
        delete: False only says what would go.
        restored: What this run has restored from, until it has committed one of its own.
        verifies: Whether a checkpoint is read back sound; None: by all of its checksums.
        is_ours: Whether nobody else has the root meanwhile. Asked right before each goes: this process may have been
            stopped for longer than others wait for it.

    Raises:
        OSError: `root` or its pins cannot be read: nothing was removed.

    Blocks: for the removal, and what is read back; for who holds the lock of a directory, `gc.LOCK_TIMEOUT_S`
    each.
    """
    found, pinned = survey(root, store, score=score, broken=broken), pinned_in(root, store)
    newest = newest_of(found.stored)
    if newest is None:
        return []
    done = []
    unknown = _unknown(found, newest)
    is_sound = is_whole(os.path.join(root, newest.name), found.manifests[newest.name], store)
    doomed = to_delete(found.stored, policy, pinned)
    resumed = _resumed(found, doomed, restored, verifies or _reads_back(root, store)) if is_sound else {}
    for one in doomed:
        if not is_sound:
            done.append(Pruned(stored=one, is_removed=False, kept=f"the newest, {newest.name}, is not whole"))
        elif one.name in busy:
            done.append(Pruned(stored=one, is_removed=False, kept="a save to it is under way"))
        elif one.name in unknown:
            done.append(Pruned(stored=one, is_removed=False, kept="best_fn fails on all metrics: it may be the best"))
        elif one.name in resumed:
            _log.info("%s stays: %s", os.path.join(root, one.name), resumed[one.name])
            done.append(Pruned(stored=one, is_removed=False, kept=resumed[one.name]))
        else:
            done.append(_pruned(root, one, store, package, busy, is_ours, delete=delete))
    if not is_sound:
        _log.warning("%s is not whole any more: nothing older is removed", os.path.join(root, newest.name))
    elif delete:
        rules = Rules(now=time.time(), older_than_s=dead_after_s, dead_before_epoch=newest.save_id.epoch)
        for name in found.names:
            if name not in busy and is_ours():
                _finish(os.path.join(root, name), store)
                _sweep(os.path.join(root, name), rules, store, package)
    return done


def _unknown(found: Survey, newest: Stored) -> set[str]:
    """What an earlier run has saved with metrics, where none has a score: a new best_fn may be a mistake.

    This run's own go all the same: it may not have come to its first evaluation, and the disk must not fill up.
    """
    if any(one.score is not None for one in found.stored):
        return set()
    return {one.name for one in found.stored if one.name in found.unscored and one.save_id.epoch < newest.save_id.epoch}


def _resumed(
    found: Survey, doomed: Sequence[Stored], restored: SaveId | None, verifies: Callable[[Stored], bool]
) -> dict[str, str]:
    """Return which of the doomed stay since a run went on from them and has nothing that is known to be sound; why."""
    going = {one.name for one in doomed}
    lines: dict[tuple[str, SaveId], list[Stored]] = {}  # by run, and what it went on from; the newest first
    for one in found.stored:
        ancestry = ancestry_in(found.manifests[one.name].metadata)
        if ancestry and one.name not in going:
            lines.setdefault((one.save_id.run_id, ancestry[0]), []).append(one)
    origins, kept = {origin for _, origin in lines}, {}
    for one in doomed:
        if one.save_id == restored:
            kept[one.name] = "this run has restored from it, and has committed nothing since"
        for (_, origin), line in lines.items():
            if origin != one.save_id or one.name in kept or any(later.save_id in origins for later in line):
                continue
            if not any(later.is_sound and verifies(later) for later in line):
                kept[one.name] = f"the run of {line[0].name} has restored from it, and nothing newer of it verifies"
    return kept


def _reads_back(root: str, store: Store) -> Callable[[Stored], bool]:
    return functools.cache(lambda one: is_read_back(os.path.join(root, one.name), one.save_id, store))


def is_read_back(path: str, save_id: SaveId, store: Store) -> bool:
    """Whether the checkpoint at `path` is that of `save_id`, and all of it is read back as it was written.

    Blocks: for the reads, by one thread: a training may be under way.
    """
    verdict = verify_checkpoint(path, store.as_files(), threads=1)
    if verdict.contents is not None and verdict.contents.manifest.save_id != save_id:
        return False  # replaced meanwhile
    if verdict.faults:
        _log.warning("%s does not verify: %s", path, verdict.faults[0])
    return not verdict.faults


def _pruned(
    root: str,
    one: Stored,
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
        gone = retire(path, one.save_id, store, package=package, is_wanted=is_wanted)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
        return Pruned(stored=one, is_removed=False, error=error)
    if gone:
        _log.info("removed step %d, %s", one.step, path)
    kept = "" if gone else "it was pinned or saved anew meanwhile, or is about to be, or another training has the root"
    return Pruned(stored=one, is_removed=gone, kept=kept)


def _finish(path: str, store: Store) -> None:
    """Go on with a removal that was broken off."""
    try:
        retire_rest(path, store)
    except OSError as error:
        _log.warning("what is left of %s cannot be removed: %s", path, error)


def _sweep(path: str, rules: Rules, store: Store, package: str) -> None:
    """Remove attempts of dead runs, behind a tombstone: who still writes one can commit it no more."""
    try:
        done = collect(path, store, rules, package=package)
        if done is not None and done.removed:
            _log.info("removed what saves that were never committed left in %s", path)
    except FileNotFoundError:  # retention has just removed it
        pass
    except OSError as error:
        _log.warning("what saves left in %s cannot be removed: %s", path, error)


def _score_of(manifest: Manifest, score: Score | None) -> float | None:
    metrics = metrics_in(manifest.metadata)
    if score is None or metrics is None:
        return None
    try:
        return float(score(metrics))
    except Exception as error:
        _log.warning("best_fn fails on the metrics of step %d, %r: %r", manifest.step, dict(metrics), error)
        return None


def retire(
    path: str,
    save_id: SaveId,
    store: Store,
    *,
    package: str,
    is_wanted: Callable[[], bool] = lambda: False,
) -> bool:
    """Remove the checkpoint at `path`, if it is still the one of `save_id` and nobody has come to want it.

    The caller knows of a newer one that is sound.

    Args:
        path: The checkpoint's directory.
        save_id: Of its manifest.
        store: Where it lies.
        package: asyncckpt's version.
        is_wanted: Asked under the lock that who pins it takes as well.

    Returns:
        Whether it is gone: False: another save's manifest stands there, or none, or it is wanted; nothing was done.

    Raises:
        OSError: A call failed. It is whole, or no checkpoint any more; `retire_rest` removes what is left.

    Blocks: for who commits or pins there, at most `gc.LOCK_TIMEOUT_S`.
    """
    with exclusively(store, path, LOCK_TIMEOUT_S) as is_locked:
        version = version_at(path, store)
        standing = known_standing_at(path, store)
        if version is None or standing is None or standing.save_id != save_id or is_wanted():
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


def retire_rest(path: str, store: Store) -> bool:
    """Go on with a removal that was broken off.

    Args:
        path: A directory.
        store: Where it lies.

    Returns:
        Whether there was anything to do.

    Raises:
        OSError: As of `retire`.

    Blocks: as `retire`.
    """
    tombstone = known_tombstone_at(path, store)
    if tombstone is None or not tombstone.was_committed:
        return False
    with exclusively(store, path, LOCK_TIMEOUT_S) as is_locked:
        tombstone = known_tombstone_at(path, store)
        if tombstone is None or not tombstone.was_committed:
            return False
        _remove_rest(path, tombstone.save_id, store, is_locked=is_locked)
    _remove_directory(path, store)
    return True


def _remove_rest(path: str, save_id: SaveId, store: Store, *, is_locked: bool) -> None:
    """The tombstone stands. Without the lock it stays: a later save may be replacing it."""
    remove_dcp_metadata(path, save_id, None, store, is_locked=True)
    later = False
    for name in store.names(path):
        owner = owner_of(name)
        if owner is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # by its save itself
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
    """At worst an empty directory stays, or one with a lock's file: whoever removes it may die."""
    with contextlib.suppress(OSError):  # somebody else's files are in it, or a later save's
        reach("retention: removing directory")
        store.remove_prefix(path)


def is_whole(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether every file that a standing manifest names is there in full, as far as sizes and indexes tell."""
    try:
        check_rank_files(path, manifest, store=store)
        return is_finished(path, manifest, store)
    except (OSError, AsyncCkptError):
        return False
