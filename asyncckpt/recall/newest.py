"""Whether memory holds a newer checkpoint than the disk: one that is being written, or could not be."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator

from asyncckpt.format.steps import lineage_key
from asyncckpt.recall.snapshots import HeldSnapshot, held_snapshots
from asyncckpt.storage.candidates import Candidate
from asyncckpt.storage.dcp_commit import is_finished
from asyncckpt.storage.files import Files
from asyncckpt.storage.standing import standing_at

_log = logging.getLogger("asyncckpt")
_TEXT = "%s: the newest snapshot, of step %d, is in the worker's memory only: save %s"


def newest_of_both(root: str, on_disk: str | None, endpoint: str | None) -> str | None:
    """Return the path of the newest checkpoint in `root`, on disk or whole in the worker's memory; None without any.

    A path where another save is committed loads as that, so it does not count for what is in memory. Nor does what was
    committed and is not there any more: whoever has removed it goes on from an older one, and means to.

    Args:
        root: Absolute path of the directory that holds the checkpoints' directories, or of one of these.
        on_disk: The newest one there.
        endpoint: Of the worker; None: this user's of this job.

    Blocks: for the worker's answer, as `held_snapshots`.
    """
    files = Files()
    standing = None if on_disk is None else standing_at(on_disk, files)
    for snapshot in _nowhere_else(_beside(root, endpoint), files):
        if standing is not None and lineage_key(snapshot.save_id) <= lineage_key(standing.save_id):
            break
        _log.warning(_TEXT, snapshot.path, snapshot.step, snapshot.save_id)
        return snapshot.path
    return on_disk


def candidates_of_both(root: str, on_disk: list[Candidate], source: str, endpoint: str | None) -> list[Candidate]:
    """Return what may be restored of `root`, the newest first: of disk and memory, or of one of them.

    Args:
        root: As `newest_of_both` has it.
        on_disk: The candidates there, the newest first.
        source: "disk", "memory", or "auto": both. What is on disk stands for what memory has of the same path.
        endpoint: As `newest_of_both` has it.

    Blocks: for the worker's answer, as `held_snapshots`, unless `source` is "disk".
    """
    if source == "disk":
        return on_disk
    if source == "memory":
        return [_candidate(snapshot) for snapshot in _beside(root, endpoint)]
    merged, paths = list(on_disk), {one.path for one in on_disk}
    for snapshot in _nowhere_else(_beside(root, endpoint), Files()):
        if snapshot.path in paths:  # its manifest is damaged: loading it says so
            continue
        age = lineage_key(snapshot.save_id)
        older = (n for n, one in enumerate(merged) if one.save_id is not None and lineage_key(one.save_id) < age)
        at = next(older, len(merged))
        if at == 0:
            _log.warning(_TEXT, snapshot.path, snapshot.step, snapshot.save_id)
        merged.insert(at, _candidate(snapshot))
    return merged


def _candidate(snapshot: HeldSnapshot) -> Candidate:
    """Without a save id: there is no directory that could be put aside for it."""
    return Candidate(path=snapshot.path, save_id=None, step=snapshot.step)


def _beside(root: str, endpoint: str | None) -> Iterator[HeldSnapshot]:
    """Yield the newest complete snapshot of each path that is `root`, or lies in it; the newest first."""
    paths = set()
    for snapshot in held_snapshots(root, endpoint=endpoint):
        beside = snapshot.path == root or os.path.dirname(snapshot.path) == root
        if beside and snapshot.complete and snapshot.path not in paths:
            paths.add(snapshot.path)
            yield snapshot


def _nowhere_else(snapshots: Iterable[HeldSnapshot], files: Files) -> Iterator[HeldSnapshot]:
    """Leave out what is committed, by whatever save, and what was and has been removed."""
    for snapshot in snapshots:
        standing = None if snapshot.committed else standing_at(snapshot.path, files)
        unfinished = standing is None or (
            standing.save_id == snapshot.save_id and not is_finished(snapshot.path, standing, files)
        )
        if unfinished and not snapshot.committed:
            yield snapshot
