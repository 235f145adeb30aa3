"""Finds the newest checkpoint on disk and in memory, which may hold one that is being written or could not be."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncckpt.recall.snapshots import HeldSnapshot, held_snapshots
from asyncckpt.storage.catalog import Candidate
from asyncckpt.storage.checkpoint_dir import has_identity, is_finished, manifest_if_readable
from asyncckpt.storage.locate import store_at
from asyncckpt.storage.store import Store

_log = logging.getLogger("asyncckpt")
_MEMORY_ONLY = "%s: the newest snapshot, of step %d, is in the worker's memory only: save %s"
_DIRECTORY_REMOVED = (
    "the worker's memory has a snapshot of step %d of %s, which is skipped, since it is not on disk and its "
    "directory was removed; source='memory' loads it"
)


class NewestCandidate(NamedTuple):
    """A checkpoint that may be the newest: on disk, or (with a save id) a snapshot that is in memory only."""

    path: str
    save_id: str = ""
    step: int = 0

    def choose(self) -> str:
        """Return its path, and log if it is in memory only. Called on the one that is used."""
        if self.save_id:
            _log.warning(_MEMORY_ONLY, self.path, self.step, self.save_id)
        return self.path


def newest_candidates(root: str, on_disk: str | None, source: str, endpoint: str | None) -> list[NewestCandidate]:
    """Return the checkpoints in `root` that may be the newest: snapshots only in memory, then the newest one on disk.

    Three kinds of snapshots are left out: those at whose path another save is committed, because that one would be
    loaded; those that were committed, and then removed from disk; and those whose directory was removed or replaced. A
    user who removes a checkpoint wants to resume from an older one, or to start again. With `source` "memory", the
    third kind is returned.

    Args:
        root: Absolute path of the directory that holds the checkpoints' directories, or of one of these.
        on_disk: Path of the newest one on disk; None: there is none.
        source: "memory" or "auto".
        endpoint: Endpoint of the worker; None: the default one.

    Returns:
        The candidates, the newest first.

    Blocks: for the worker's answer, as `held_snapshots`.
    """
    store, found = store_at(root), list[NewestCandidate]()
    existing = None if on_disk is None else manifest_if_readable(on_disk, store_at(on_disk))
    for snapshot in _memory_only(_newest_in(root, endpoint), store, asked=source == "memory"):
        if existing is not None and snapshot.save_id <= existing.save_id:
            break
        found.append(NewestCandidate(snapshot.path, str(snapshot.save_id), snapshot.step))
    return found if on_disk is None else [*found, NewestCandidate(on_disk)]


def can_load(candidates: Iterable[NewestCandidate], root: str, endpoint: str | None) -> list[bool]:
    """Return for each candidate whether this process can load it: from disk, or from its own worker's memory.

    Blocks: as `held_snapshots`.
    """
    held = {(s.path, str(s.save_id)) for s in held_snapshots(root, endpoint=endpoint) if s.complete}
    return [not candidate.save_id or (candidate.path, candidate.save_id) in held for candidate in candidates]


def merged_candidates(root: str, on_disk: list[Candidate], source: str, endpoint: str | None) -> list[Candidate]:
    """Return what may be restored from `root`, the newest first: on disk, in memory, or both.

    Args:
        root: As for `newest_candidates`.
        on_disk: Candidates on disk, the newest first.
        source: "disk", "memory", or "auto": both, where the disk takes precedence for a path that is in both.
        endpoint: As for `newest_candidates`.

    Blocks: for the worker's answer, as `held_snapshots`, unless `source` is "disk".
    """
    if source == "disk":
        return on_disk
    if source == "memory":
        return [_candidate(snapshot) for snapshot in _newest_in(root, endpoint)]
    merged, paths = list(on_disk), {one.path for one in on_disk}
    for snapshot in _memory_only(_newest_in(root, endpoint), store_at(root), asked=False):
        if snapshot.path in paths:  # its manifest is damaged, which loading it will report
            continue
        age = snapshot.save_id
        older = (n for n, one in enumerate(merged) if one.save_id is not None and one.save_id < age)
        at = next(older, len(merged))
        if at == 0:
            _log.warning(_MEMORY_ONLY, snapshot.path, snapshot.step, snapshot.save_id)
        merged.insert(at, _candidate(snapshot))
    return merged


def _candidate(snapshot: HeldSnapshot) -> Candidate:
    """Return a candidate without save ID, since a snapshot has no directory that could be quarantined."""
    return Candidate(path=snapshot.path, save_id=None, step=snapshot.step)


def _newest_in(root: str, endpoint: str | None) -> Iterator[HeldSnapshot]:
    """Yield the newest complete snapshot of each path that is `root` or lies in it, the newest first."""
    paths = set()
    for snapshot in held_snapshots(root, endpoint=endpoint):
        beside = snapshot.path == root or os.path.dirname(snapshot.path) == root
        if beside and snapshot.complete and snapshot.path not in paths:
            paths.add(snapshot.path)
            yield snapshot


def _memory_only(snapshots: Iterable[HeldSnapshot], store: Store, *, asked: bool) -> Iterator[HeldSnapshot]:
    """Yield the snapshots of paths at which nothing is committed, and which were not committed and removed.

    Unless `asked` for memory, leave out those whose directory was removed, with a warning.
    """
    for snapshot in snapshots:
        existing = None if snapshot.committed else manifest_if_readable(snapshot.path, store)
        unfinished = existing is None or (
            existing.save_id == snapshot.save_id and not is_finished(snapshot.path, existing, store)
        )
        if not unfinished or snapshot.committed:
            continue
        homes = snapshot.homes
        if asked or not homes or any(has_identity(snapshot.path, one, store) for one in homes):
            yield snapshot
        else:
            _log.warning(_DIRECTORY_REMOVED, snapshot.step, snapshot.path)
