"""Which save goes first: one at a path, and the saves of a run in the order in which they were taken."""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncckpt.format.names import SaveId
from asyncckpt.storage.catalog import check_epoch
from asyncckpt_worker.records import Save


def rival(path: str, save_id: str, saves: Mapping[str, Save]) -> Save | None:
    """Return another save to `path` that has not ended: the earlier one keeps the path."""
    for save in saves.values():
        if save.outcome is None and save.save_id != save_id and any(e.path == path for e in save.ranks.values()):
            return save
    return None


def next_epoch(path: str, on_disk: int, saves: Mapping[str, Save]) -> int:
    """Return the epoch of a run that begins at `path`: above that of every save beside it, on disk or not yet.

    Raises:
        SaveFailedError: There is none left.
    """
    parent = os.path.dirname(path)
    beside = [s.save_id for s in saves.values() if any(os.path.dirname(e.path) == parent for e in s.ranks.values())]
    largest = max((SaveId.parse(save_id).epoch for save_id in beside), default=0)
    return check_epoch(max(on_disk, largest + 1), path)


def has_elder(save: Save, saves: Mapping[str, Save]) -> bool:
    """Whether an earlier save of the same run has not ended.

    Whoever sees a checkpoint may rely on the ones before it: a small state must not overtake a large one. A save that
    is only being staged counts too; it ends with its session at the latest.
    """
    mine = SaveId.parse(save.save_id)
    others = [SaveId.parse(s.save_id) for s in saves.values() if s.outcome is None and s is not save]
    return any(other.run_id == mine.run_id and other.sequence < mine.sequence for other in others)
