"""The brain compares what a run has committed with what it committed before, and says so where nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.format.names import SaveId
from asyncckpt_worker.freshness import Committed, Contents, unchanged
from asyncckpt_worker.records import Save
from asyncckpt_worker.tables import Tables


def compare(t: Tables, save: Save, contents: Contents | None) -> Mapping[str, Any]:
    """Return the figures of a save that has just been committed, remember what it holds, and warn if that is not new.

    A save that cannot be compared is forgotten: the next one is not compared with an older one.
    """
    saved = SaveId.parse(save.save_id)
    run = t.runs.get(saved.run_id)
    if run is None:
        return {}
    entry = save.ranks[min(save.ranks)]
    before = run.committed
    now = None if contents is None else Committed(saved.sequence, entry.step or 0, contents)
    if before is not None and before.sequence >= saved.sequence:
        return {}  # it was overdue, and a later one has gone first
    run.committed = now
    found = unchanged(before, now) if before is not None and now is not None else {}
    if found.get("unchanged"):
        text = f"step {entry.step} is bit for bit what step {found['same_tensors_as_step']} was"
        t.log("warning", text, save_id=save.save_id, count="saves_unchanged", path=entry.path)
    return found
