"""How the writing of one rank's files begins, and how one that began before the seal is stopped."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import BEGUN
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.actions import CutOff, Write
from asyncckpt_worker.records import RankSave, Save
from asyncckpt_worker.tables import Tables


def start_writing(t: Tables, save: Save, entry: RankSave, request: SaveRequest) -> None:
    """Write the files of a rank whose directory is there."""
    key = (save.save_id, entry.rank)
    early = entry.phase == BEGUN
    entry.writing, entry.streaming = True, early or entry.ring
    t.slots[entry.slot].writes.add(key)
    t.touched[key] = None
    t.actions.append(
        Write(
            key=key,
            slot=entry.slot,
            generation=entry.generation,
            request=request,
            resumed=entry.resumed or entry.leftovers,
            early=early,
        )
    )


def stop_streams(t: Tables, save: Save) -> None:
    """A save has ended: what waits for its trainers to go on waits no longer."""
    for entry in save.ranks.values():
        if entry.streaming and entry.writing:
            t.actions.append(CutOff(slot=entry.slot, generation=entry.generation))
