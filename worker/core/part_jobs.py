"""The jobs of a rank's part in a save: prepare, write, stop what is written before the seal, clean up."""

from __future__ import annotations

from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import ABANDONED, FAILED, OPEN, WRITING
from asyncckpt_worker.core.actions import CutOff, Prepare, Remove, Write
from asyncckpt_worker.core.events import Wire
from asyncckpt_worker.core.model import REMOVE, RankSave, Save
from asyncckpt_worker.core.part_table import WRITE
from asyncckpt_worker.core.tables import Tables


def start_writing(t: Tables, save: Save, entry: RankSave, request: SaveRequest) -> None:
    """Write the files of a rank whose directory is there."""
    key = (save.save_id, entry.rank)
    early = entry.phase == OPEN
    assert not entry.job
    entry.job, entry.wrote, entry.streaming = WRITE, True, early or entry.ring
    save.jobs += 1
    t.slots[entry.slot].writes.add(key)
    t.touched[key] = None
    t.actions.append(
        Write(
            key=key,
            slot=entry.slot,
            generation=entry.generation,
            request=request,
            resumed=entry.leftovers,
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
        if entry.phase == OPEN and entry.streaming and entry.writing and not entry.ring:
            t.actions.append(CutOff(slot=entry.slot, generation=entry.generation))


def stop_streams(t: Tables, save: Save) -> None:
    """A save has ended: what waits for its trainers to go on waits no longer."""
    for entry in save.ranks.values():
        if entry.streaming and entry.writing:
            t.actions.append(CutOff(slot=entry.slot, generation=entry.generation))


def prepare_of(save_id: str, entry: RankSave) -> Prepare:
    """Return the job that makes the entry's directory."""
    return Prepare(
        key=(save_id, entry.rank),
        path=entry.path,
        step=entry.step,
        nbytes=entry.nbytes,
        umask=entry.umask,
        fsync=entry.fsync,
        overwrite=entry.overwrite,
        resumed=entry.leftovers,
    )


def clean_up(t: Tables, save: Save) -> None:
    """Remove what was written of a failed save, once nobody writes to it any more here: one path, then the next.

    IMPORTANT: also of a rank whose writing has failed. It removes what it has created, but for what resists.
    """
    left = [e for e in save.ranks.values() if e.wrote or (e.leftovers and not e.link)]
    # IMPORTANT: never after `unknown`: the manifest may stand, and these are its files.
    if save.outcome in (FAILED, ABANDONED) and left and not save.jobs:
        t.actions.append(Remove(save_id=save.save_id, path=left[0].path))
        save.job = REMOVE
        save.jobs += 1
        for entry in [e for e in left if e.path == left[0].path]:
            entry.result, entry.wrote, entry.leftovers = None, False, False
