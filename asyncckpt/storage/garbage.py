"""What is left of saves that came to nothing, and of checkpoints that were replaced: found, not touched.

A file is garbage only if its name carries a save id, the save is not the committed one of its directory, and neither
the worker nor the clock says that it may still be under way.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, is_quarantined, is_temporary, owner_of
from asyncckpt.format.steps import lineage_key
from asyncckpt.format.tombstone import Tombstone
from asyncckpt.storage.catalog import COMMITTED, scan
from asyncckpt.storage.dcp_commit import is_finished
from asyncckpt.storage.files import Files
from asyncckpt.storage.standing import standing_at, tombstone_at

ATTEMPT = "attempt"
LEFTOVERS = "leftovers"
TOMBSTONE = "tombstone"
LOCK = "lock"
BROKEN = "broken"
CONVERSION = "conversion"
PROBE = "probe"
QUIET_S = 60.0
"""A worker may still write what a run had staged that has died. Then it changes its files more often. Chosen."""

CUT_CHARS = 1000
"""A worker's report cuts paths there."""

_logger = logging.getLogger("asyncckpt.storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What may go.

    Attributes:
        now: Seconds since 1970, as the file system counts.
        older_than_s: What was changed later than so long ago may be under way.
        dead_before_epoch: Saves of runs before it are not, once nothing of theirs was changed for `QUIET_S`.
        busy: Real paths to which a worker writes.
        tombstones: Also directories with nothing but a tombstone.
        locks: Also lock files that nobody holds, and temporary names of the committed save.
        broken: Also checkpoints that were put aside as broken.
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
    """What there is to remove of one directory.

    Attributes:
        path: The directory.
        kind: `attempt`: a save that was never committed. `leftovers`: of other saves beside a committed one, or of a
            save that was given up. `tombstone`, `lock`, `broken`: as in `Rules`. `conversion`, `probe`: of `convert`
            and `doctor`, killed.
        names: Files that go.
        nbytes: Their length.
        age_s: Since the last of them was changed.
        save_ids: Of what saves, the earliest first.
        standing: The manifest or tombstone that stands there.
        kept: Why nothing of it goes; empty: it does.
    """

    path: str
    kind: str
    names: tuple[str, ...]
    nbytes: int
    age_s: float
    save_ids: tuple[SaveId, ...]
    standing: Manifest | Tombstone | None = None
    kept: str = ""


def garbage_at(path: str, files: Files, rules: Rules, *, is_locked: bool = False) -> Garbage | None:
    """Return what there is to remove in one directory; None: nothing of ours, or only what belongs there.

    Args:
        path: The directory.
        files: The storage seam.
        rules: What may go.
        is_locked: The caller holds its lock, whose file is then no garbage.

    Raises:
        OSError: The directory cannot be read.
    """
    found = {name: files.lstat(os.path.join(path, name)) for name in files.listdir(path)}
    regular = {name: one for name, one in found.items() if stat.S_ISREG(one.st_mode)}  # neither links nor directories
    if is_locked:
        regular.pop(LOCK_NAME, None)
    owners = {name: owner for name in regular if (owner := owner_of(name)) is not None}
    look = _Look(path, regular, rules)
    if is_quarantined(os.path.basename(path)):
        return look.broken(owners, files) if owners and rules.broken else None
    if MANIFEST_NAME not in found:
        return look.garbage(ATTEMPT, owners) if owners else None
    standing, tombstone = standing_at(path, files), tombstone_at(path, files)
    if tombstone is not None:
        return look.beside_tombstone(owners, tombstone)
    if standing is None:
        kept = "its manifest cannot be read, is damaged, of a newer version, or not ours"
        return look.garbage(ATTEMPT, owners, kept=kept) if owners else None
    if not is_finished(path, standing, files):
        return look.garbage(ATTEMPT, owners, standing)
    return look.beside_committed(owners, standing)


@dataclass(frozen=True, slots=True)
class _Look:
    """At one directory and the regular files in it."""

    path: str
    regular: Mapping[str, os.stat_result]
    rules: Rules

    def beside_tombstone(self, owners: Mapping[str, SaveId], tombstone: Tombstone) -> Garbage | None:
        if any(lineage_key(owner) > lineage_key(tombstone.save_id) for owner in owners.values()):
            return self.garbage(ATTEMPT, owners, tombstone)
        if owners:
            return self.garbage(LEFTOVERS, owners, tombstone)
        return self.garbage(TOMBSTONE, {MANIFEST_NAME: tombstone.save_id}, tombstone) if self.rules.tombstones else None

    def beside_committed(self, owners: Mapping[str, SaveId], standing: Manifest) -> Garbage | None:
        names = {name: owner for name, owner in owners.items() if owner != standing.save_id}
        kind = LEFTOVERS if names else LOCK
        if self.rules.locks:
            names |= {name: owner for name, owner in owners.items() if is_temporary(name)}
            if LOCK_NAME in self.regular and self.regular[LOCK_NAME].st_size == 0:
                names[LOCK_NAME] = standing.save_id
        return self.garbage(kind, names, standing) if names else None

    def broken(self, owners: Mapping[str, SaveId], files: Files) -> Garbage:
        names = dict(owners)
        if MANIFEST_NAME in self.regular:  # ours, although it may be damaged: by the names beside it
            names[MANIFEST_NAME] = max(owners.values(), key=lineage_key)
        beside = scan(os.path.dirname(self.path), files)
        last = "" if any(one.state == COMMITTED for one in beside) else "no committed checkpoint is beside it"
        return self.garbage(BROKEN, names, kept=last)

    def garbage(
        self,
        kind: str,
        names: Mapping[str, SaveId],
        standing: Manifest | Tombstone | None = None,
        *,
        kept: str = "",
    ) -> Garbage:
        save_ids = set(names.values())
        if kind == ATTEMPT and standing is not None:  # layout dcp: a manifest that commits nothing
            save_ids.add(standing.save_id)
            names = names or {MANIFEST_NAME: standing.save_id}
        age_s = self.rules.now - max(self.regular[name].st_mtime for name in names)
        if not kept and self._is_busy():
            kept = "the worker writes there"
        # IMPORTANT: of the very files that would go: a save of a living run may have begun to write there meanwhile.
        is_dead = all(one.epoch < self.rules.dead_before_epoch for one in save_ids)
        quiet_s = min(QUIET_S, self.rules.older_than_s) if is_dead else self.rules.older_than_s
        if not kept and age_s < quiet_s:
            kept = f"changed {max(0.0, age_s):.0f} s ago: it may be under way"
        return Garbage(
            path=self.path,
            kind=kind,
            names=tuple(sorted(names)),
            nbytes=sum(self.regular[name].st_size for name in names),
            age_s=age_s,
            save_ids=tuple(sorted(save_ids, key=lineage_key)),
            standing=standing,
            kept=kept,
        )

    def _is_busy(self) -> bool:
        real = os.path.realpath(self.path)
        return any(real == path or (len(path) >= CUT_CHARS and real.startswith(path)) for path in self.rules.busy)


def garbage_in(root: str, files: Files, rules: Rules, *, recursive: bool = False) -> list[Garbage]:
    """Return what there is to remove in `root` and one level below it, or at any depth, ordered by path.

    Links are not followed. What cannot be read is passed over.

    Raises:
        OSError: `root` cannot be listed.
    """
    found: list[Garbage] = []
    for one in scan(root, files, recursive=recursive):
        try:
            garbage = garbage_at(one.path, files, rules)
        except OSError as error:
            _logger.warning("%s cannot be looked at: %s", one.path, error)
            continue
        if garbage is not None:
            found.append(garbage)
    return found
