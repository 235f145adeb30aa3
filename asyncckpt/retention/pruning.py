"""Applying a retention policy to a directory: what there is, what may go, and its removal.

One process of a root at a time prunes: a manager's rank 0, or whoever calls `asyncckpt prune` while no training saves
there.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.format.steps import lineage_key
from asyncckpt.retention.ancestry import ancestry_in, is_ancestor, metrics_in
from asyncckpt.retention.pins import is_pinned, pinned_in
from asyncckpt.retention.policy import RetentionPolicy, Stored, newest_of, to_delete
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, scan
from asyncckpt.storage.collecting import collect
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import Rules
from asyncckpt.storage.retiring import is_whole, retire, retire_rest
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


def survey(root: str, files: Files, *, score: Score | None = None, broken: Collection[str] = ()) -> Survey:
    """Look at the checkpoints in a directory; reads their manifests, no data.

    Args:
        root: Absolute path.
        files: The storage seam.
        score: Of a checkpoint with metrics; what it raises counts as no score, and is logged.
        broken: Names of the directories of those that are known to be damaged.

    Raises:
        OSError: `root` cannot be listed, for another reason than that it does not exist.
    """
    try:
        found = [one for one in scan(root, files) if os.path.dirname(one.path) == root]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    manifests = {os.path.basename(one.path): one.manifest for one in found if one.manifest is not None}
    newest = max((m for name, m in manifests.items() if name not in broken), key=_age, default=None)
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
    stored.sort(key=lambda one: lineage_key(one.save_id), reverse=True)
    names = tuple(os.path.basename(one.path) for one in found if one.state in (COMMITTED, ABANDONED, INCOMPLETE))
    unscored = {
        one.name for one in stored if one.score is None and metrics_in(manifests[one.name].metadata) is not None
    }
    return Survey(tuple(stored), manifests, names, frozenset(unscored) if score is not None else frozenset())


def prune(
    root: str,
    files: Files,
    policy: RetentionPolicy,
    *,
    umask: int,
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
    (`retention.ancestry`), so every process knows that; a line of which nothing stays counts no more.

    With them go the files of saves that were begun and never committed, if they have not changed for `dead_after_s`;
    for `garbage.QUIET_S` only, if a run that came after them has committed one.

    Args:
        root: Absolute path.
        files: The storage seam.
        policy: What is to be kept.
        umask: Of the modes of what is made meanwhile.
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

    Blocks: for the removal, and what is read back; for who holds the lock of a directory, `collecting.LOCK_TIMEOUT_S`
    each.
    """
    found, pinned = survey(root, files, score=score, broken=broken), pinned_in(root, files)
    newest = newest_of(found.stored)
    if newest is None:
        return []
    done = []
    unknown = _unknown(found, newest)
    is_sound = is_whole(os.path.join(root, newest.name), found.manifests[newest.name], files)
    doomed = to_delete(found.stored, policy, pinned)
    resumed = _resumed(found, doomed, restored, verifies or _reads_back(root, files)) if is_sound else {}
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
            done.append(_pruned(root, one, files, umask, package, busy, is_ours, delete=delete))
    if not is_sound:
        _log.warning("%s is not whole any more: nothing older is removed", os.path.join(root, newest.name))
    elif delete:
        rules = Rules(now=time.time(), older_than_s=dead_after_s, dead_before_epoch=newest.save_id.epoch)
        for name in found.names:
            if name not in busy and is_ours():
                _finish(os.path.join(root, name), files, umask)
                _sweep(os.path.join(root, name), rules, files, umask, package)
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


def _reads_back(root: str, files: Files) -> Callable[[Stored], bool]:
    return functools.cache(lambda one: is_read_back(os.path.join(root, one.name), one.save_id, files))


def is_read_back(path: str, save_id: SaveId, files: Files) -> bool:
    """Whether the checkpoint at `path` is that of `save_id`, and all of it is read back as it was written.

    Blocks: for the reads, by one thread: a training may be under way.
    """
    verdict = verify_checkpoint(path, files, threads=1)
    if verdict.contents is not None and verdict.contents.manifest.save_id != save_id:
        return False  # replaced meanwhile
    if verdict.faults:
        _log.warning("%s does not verify: %s", path, verdict.faults[0])
    return not verdict.faults


def _pruned(
    root: str,
    one: Stored,
    files: Files,
    umask: int,
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
        return one.name in busy or is_pinned(path, files) or not is_ours()

    try:
        gone = retire(path, one.save_id, files, umask=umask, package=package, is_wanted=is_wanted)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error)
        return Pruned(stored=one, is_removed=False, error=error)
    if gone:
        _log.info("removed step %d, %s", one.step, path)
    kept = "" if gone else "it was pinned or saved anew meanwhile, or is about to be, or another training has the root"
    return Pruned(stored=one, is_removed=gone, kept=kept)


def _finish(path: str, files: Files, umask: int) -> None:
    """Go on with a removal that was broken off."""
    try:
        retire_rest(path, files, umask=umask)
    except OSError as error:
        _log.warning("what is left of %s cannot be removed: %s", path, error)


def _sweep(path: str, rules: Rules, files: Files, umask: int, package: str) -> None:
    """Remove attempts of dead runs, behind a tombstone: who still writes one can commit it no more."""
    try:
        done = collect(path, files, rules, umask=umask, package=package)
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


def _age(manifest: Manifest) -> tuple[int, int, str]:
    return lineage_key(manifest.save_id)
