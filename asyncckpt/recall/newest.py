"""Whether memory holds a newer checkpoint than the disk: one that is being written, or could not be."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncckpt.recall.snapshots import HeldSnapshot, held_snapshots
from asyncckpt.storage.catalog import Candidate
from asyncckpt.storage.checkpoint_dir import is_at_home, is_finished, standing_at
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.store import Store

_log = logging.getLogger("asyncckpt")
_TEXT = "%s: the newest snapshot, of step %d, is in the worker's memory only: save %s"
_GONE = (
    "the worker's memory has a snapshot of step %d of %s, which is passed over: it is not on disk, and its directory "
    "was removed since; source='memory' gives it"
)


class Offer(NamedTuple):
    """A checkpoint that may be the newest: of disk, or the snapshot of one save that is in memory only."""

    path: str
    save_id: str = ""
    step: int = 0

    def choose(self) -> str:
        """Return its path; it is the one that is used."""
        if self.save_id:
            _log.warning(_TEXT, self.path, self.step, self.save_id)
        return self.path


def offers_of_both(root: str, on_disk: str | None, source: str, endpoint: str | None) -> list[Offer]:
    """Return what may be the newest checkpoint in `root`: whole in the worker's memory only, and then that on disk.

    A path where another save is committed loads as that, so it does not count for what is in memory. Nor does what was
    committed and is not there any more, or whose directory is not the one that it was: whoever has removed it goes on
    from an older one, or starts anew, and means to. With `source` "memory" the last is offered all the same.

    Args:
        root: Absolute path of the directory that holds the checkpoints' directories, or of one of these.
        on_disk: The newest one there.
        source: "memory" or "auto".
        endpoint: Of the worker; None: this user's of this job.

    Returns:
        The newest first.

    Blocks: for the worker's answer, as `held_snapshots`.
    """
    store, found = LocalStore(), list[Offer]()
    standing = None if on_disk is None else standing_at(on_disk, store)
    for snapshot in _nowhere_else(_beside(root, endpoint), store, asked=source == "memory"):
        if standing is not None and snapshot.save_id <= standing.save_id:
            break
        found.append(Offer(snapshot.path, str(snapshot.save_id), snapshot.step))
    return found if on_disk is None else [*found, Offer(on_disk)]


def can_load(offers: Iterable[Offer], root: str, endpoint: str | None) -> list[bool]:
    """Return which of these this process can load: those on disk, and those that its own worker has in memory.

    Blocks: as `held_snapshots`.
    """
    held = {(s.path, str(s.save_id)) for s in held_snapshots(root, endpoint=endpoint) if s.complete}
    return [not offer.save_id or (offer.path, offer.save_id) in held for offer in offers]


def candidates_of_both(root: str, on_disk: list[Candidate], source: str, endpoint: str | None) -> list[Candidate]:
    """Return what may be restored of `root`, the newest first: of disk and memory, or of one of them.

    Args:
        root: As `offers_of_both` has it.
        on_disk: The candidates there, the newest first.
        source: "disk", "memory", or "auto": both. What is on disk stands for what memory has of the same path.
        endpoint: As there.

    Blocks: for the worker's answer, as `held_snapshots`, unless `source` is "disk".
    """
    if source == "disk":
        return on_disk
    if source == "memory":
        return [_candidate(snapshot) for snapshot in _beside(root, endpoint)]
    merged, paths = list(on_disk), {one.path for one in on_disk}
    for snapshot in _nowhere_else(_beside(root, endpoint), LocalStore(), asked=False):
        if snapshot.path in paths:  # its manifest is damaged: loading it says so
            continue
        age = snapshot.save_id
        older = (n for n, one in enumerate(merged) if one.save_id is not None and one.save_id < age)
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


def _nowhere_else(snapshots: Iterable[HeldSnapshot], store: Store, *, asked: bool) -> Iterator[HeldSnapshot]:
    """Leave out what is committed, by whatever save; what was, and has been removed; and, unless `asked` for memory,
    what was saved to a directory that has been removed since."""
    for snapshot in snapshots:
        standing = None if snapshot.committed else standing_at(snapshot.path, store)
        unfinished = standing is None or (
            standing.save_id == snapshot.save_id and not is_finished(snapshot.path, standing, store)
        )
        if not unfinished or snapshot.committed:
            continue
        homes = snapshot.homes
        if asked or not homes or any(is_at_home(snapshot.path, home, store) for home in homes):
            yield snapshot
        else:
            _log.warning(_GONE, snapshot.step, snapshot.path)
