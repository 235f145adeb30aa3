"""What a save ends by that was not committed after all: it could not be taken up but for that doubt."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import ABANDONED, FAILED
from asyncckpt_worker.events import Wire
from asyncckpt_worker.order import rival
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import path_in_use


def late_refusal(t: Tables, runs: RunBook, save: Save, entry: RankSave) -> tuple[str, Wire] | None:
    """Return outcome and error, or None: it goes on."""
    if (verdict := runs.verdict(save)) is not None:
        return ABANDONED, verdict
    if (silent := runs.silent_for_good(save)) is not None:
        return FAILED, silent
    other = rival(entry.path, save.save_id, t.saves)
    return None if other is None else (FAILED, path_in_use(save, entry, other.save_id))
