"""How the writing of one rank's files begins, and how one that began before the seal is stopped."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import BEGUN, WRITING
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.actions import CutOff, Write
from asyncckpt_worker.events import Wire
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


def write_again(t: Tables, save: Save, entry: RankSave, error: Wire) -> None:
    """What began before the seal has failed.

    IMPORTANT: it ends nothing, also when the seal was seen meanwhile: it may have failed since nothing was staged for
    so long. Once sealed it is written as ever, and the error of that counts. What is sealed can be loaded from memory
    even if the disk refuses it.
    """
    entry.streaming = False
    text = f"what was written before the seal is written again: {error.get('text', '')}"
    t.log("info", text, save_id=save.save_id, session=entry.session, count="early_failed")
    if entry.phase == WRITING and not save.given_up:
        assert entry.request is not None
        start_writing(t, save, entry, entry.request)


def stop_early(t: Tables) -> None:
    """Nobody waits any longer for those who stage: what is written beside that, and is no ring, ends."""
    for _, entry in t.entries():
        if entry.phase == BEGUN and entry.streaming and entry.writing and not entry.ring:
            t.actions.append(CutOff(slot=entry.slot, generation=entry.generation))


def stop_streams(t: Tables, save: Save) -> None:
    """A save has ended: what waits for its trainers to go on waits no longer."""
    for entry in save.ranks.values():
        if entry.streaming and entry.writing:
            t.actions.append(CutOff(slot=entry.slot, generation=entry.generation))
