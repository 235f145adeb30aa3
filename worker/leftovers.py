"""What a save that has failed leaves on disk, and when it may go."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import ABANDONED, FAILED
from asyncckpt_worker.actions import Remove
from asyncckpt_worker.records import Save
from asyncckpt_worker.tables import Tables


def clean_up(t: Tables, save: Save) -> None:
    """Remove what durable ranks of a failed save have left, once nobody writes to it any more."""
    left = [e for e in save.ranks.values() if e.result is not None or e.leftovers]
    # IMPORTANT: never after `unknown`: the manifest may stand, and these are its files.
    if save.outcome in (FAILED, ABANDONED) and left and not save.busy:
        t.actions.append(Remove(save_id=save.save_id, path=left[0].path))
        save.removing = True
        for entry in left:
            entry.result, entry.leftovers = None, False
