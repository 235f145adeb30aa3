"""Which checkpoint is newest: order by lineage, not by step number.

After a rollback to step 100 the new branch's step 150 is newer than the old branch's step 900: its run has a greater
epoch. Pure; `storage.catalog` reads the manifests.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId


def lineage_key(save_id: SaveId) -> tuple[int, int, str]:
    """Return what checkpoints of one root are ordered by: epoch, then sequence; the run id only breaks ties."""
    return save_id.epoch, save_id.sequence, save_id.run_id


def newest(manifests: Iterable[tuple[str, Manifest]]) -> tuple[str, Manifest] | None:
    """Return the (path, manifest) pair that is newest by lineage, or None."""
    return max(manifests, key=lambda pair: lineage_key(pair[1].save_id), default=None)
