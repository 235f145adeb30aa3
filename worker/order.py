"""Which save goes first: one at a path, and the saves of a run in the order in which they were taken."""

from __future__ import annotations

from collections.abc import Mapping

from asyncckpt.format.names import SaveId
from asyncckpt_worker.records import Save


def rival(path: str, save_id: str, saves: Mapping[str, Save]) -> Save | None:
    """Return another save to `path` that has not ended: the earlier one keeps the path."""
    for save in saves.values():
        if save.outcome is None and save.save_id != save_id and any(e.path == path for e in save.ranks.values()):
            return save
    return None


def same_call(save_id: str, saves: Mapping[str, Save]) -> list[Save]:
    """Return the saves of the same sequence and run: `save_id`'s own, and those under another epoch."""
    return [s for s in saves.values() if s.save_id[7:] == save_id[7:]]


def has_elder(save: Save, saves: Mapping[str, Save]) -> bool:
    """Whether an earlier save of the same run has not ended.

    Whoever sees a checkpoint may rely on the ones before it: a small state must not overtake a large one. A save that
    is only being staged counts too; it ends with its session at the latest.
    """
    mine = SaveId.parse(save.save_id)
    others = [SaveId.parse(s.save_id) for s in saves.values() if s.outcome is None and s is not save]
    return any(other.run_id == mine.run_id and other.sequence < mine.sequence for other in others)
