"""The errors that the brain itself ends a save with."""

from __future__ import annotations

from asyncckpt.errors import CommitTimeoutError, SaveFailedError, to_wire
from asyncckpt.protocol.lifecycle import DURABLE
from asyncckpt_worker.events import Wire
from asyncckpt_worker.records import RankSave, Save


def failed(save: Save, entry: RankSave, code: str, detail: str) -> Wire:
    """One rank cannot go on. `code`: a word of ours."""
    return to_wire(
        SaveFailedError(
            f"save {save.save_id} (step {entry.step}, rank {entry.rank}) to {entry.path or 'an unknown path'}: "
            f"{detail}; nothing was published",
            code=code,
            rank=entry.rank,
            path=entry.path,
            detail=detail,
            save_id=save.save_id,
            step=entry.step,
        )
    )


def timed_out(save: Save, timeout_s: float) -> Wire:
    """Ranks did not come in time after the first one was durable."""
    missing = [r for r in range(save.world_size) if r not in save.ranks or save.ranks[r].phase != DURABLE]
    path = next(iter(save.ranks.values())).path
    return to_wire(
        CommitTimeoutError(
            f"save {save.save_id} to {path}: ranks {missing[:20]} were not durable "
            f"{timeout_s:g} s after the first one; nothing was published",
            missing_ranks=missing,
            timeout_s=timeout_s,
            save_id=save.save_id,
            path=path,
        )
    )
