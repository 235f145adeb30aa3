"""Saves of which another worker may know more: a dead one may have committed them, one that leads may commit them.

What a save ends by that was not committed after all: it could not be taken up but for that doubt.
"""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import ABANDONED, FAILED, UNKNOWN
from asyncckpt_worker.entries import prepare_of
from asyncckpt_worker.events import Wire
from asyncckpt_worker.order import rival
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.runs import RunBook
from asyncckpt_worker.tables import Tables
from asyncckpt_worker.verdicts import leader_lost, path_in_use


def late_refusal(t: Tables, runs: RunBook, save: Save, entry: RankSave) -> tuple[str, Wire] | None:
    """Return outcome and error, or None: it goes on."""
    if t.is_followed(save.save_id):
        return None  # its leader sees all ranks, and has heard of consents that died with the worker before this one
    if (verdict := runs.verdict(save)) is not None:
        return ABANDONED, verdict
    if (silent := runs.silent_for_good(save)) is not None:
        return FAILED, silent
    other = rival(entry.path, save.save_id, t.saves)
    return None if other is None else (FAILED, path_in_use(save, entry, other.save_id))


def look_first(t: Tables, save: Save) -> bool:
    """Whether what would end a save must wait for a look at the disk, which is begun here if nobody looks yet.

    IMPORTANT: where another worker has led the run, late pieces of a stream with that one can tell of a save as of a
    new one that it has committed.
    """
    if save.doubtful:
        return True
    run, linked = t.runs.get(save.save_id[-12:]), [e for e in save.ranks.values() if e.link]
    if run is None or not run.inherited or save.looked or save.objection is not None or not linked:
        return False
    for entry in linked:
        entry.resumed = True
    linked[0].preparing = True
    t.actions.append(prepare_of(save.save_id, linked[0], fsync=True))
    return True


def estranged(t: Tables, save: Save, outcome: str, error: Wire) -> tuple[str, Wire]:
    """Return how a save ends here: if its leader cannot be followed, nobody knows what that one makes of it.

    It may have heard from a worker that is dead that all of these ranks are durable.
    """
    run = t.runs.get(save.save_id[-12:])
    if run is None or not run.estranged or not any(e.resumed for e in save.ranks.values()):
        return outcome, error
    why = f"it cannot be followed from here; {error.get('text', '')}"
    return UNKNOWN, leader_lost(save, why, unknown=True)
