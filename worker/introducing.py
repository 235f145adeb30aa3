"""What a follower tells by a new stream: who is here, and what a leader must know that knows nothing of the run.

It may be another leader, whose predecessor is dead: what that one was told, and what it had ended, died with it.
"""

from __future__ import annotations

from asyncckpt.protocol.fields import MAX_TEXT_CHARS
from asyncckpt.protocol.lifecycle import ABANDONED, FAILED
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.relay import GaveUp, Left
from asyncckpt_worker.followed import Followed
from asyncckpt_worker.records import Save
from asyncckpt_worker.tables import Tables

MAX_TOLD_AGAIN = 64
"""Saves of a run that have failed here, of which the next leader is told, the latest: others may wait for them.
More than are in flight at once."""


def introduce(t: Tables, known: Followed) -> None:
    """Tell everything anew: `Tables.touched` and `told` are told at the end of the event, in this order."""
    known.joined.clear()
    for rank in sorted({*known.run.members, *known.run.gone}):
        known.join(rank)
    records: list[Message] = list(known.lineages.values())
    failed: list[Message] = []
    for save in [s for s in t.saves.values() if s.save_id.endswith(known.run.run_id)]:
        if save.outcome is None:
            records += _again(t, save)
        elif save.outcome in (FAILED, ABANDONED) and save.error:
            failed.append(GaveUp(save_id=save.save_id, outcome=save.outcome, error=save.error))
    records += [*failed[-MAX_TOLD_AGAIN:], *known.run.declined]
    # After what they have sealed: that can be committed without them.
    gone = [(rank, why) for rank, why in known.run.gone.items() if rank in known.joined]
    records += [Left(rank=rank, why=why[:MAX_TEXT_CHARS]) for rank, why in gone]
    t.told += [(known.run.run_id, record) for record in records]


def _again(t: Tables, save: Save) -> list[Message]:
    """Let an open save be told from its beginning; returns what belongs to it beside that."""
    records: list[Message] = []
    for rank, entry in save.ranks.items():
        entry.retold = entry.retold or entry.told > 0
        entry.told, entry.ringed = 0, False
        t.touched[(save.save_id, rank)] = None
        if entry.spoke is not None:
            records.append(entry.spoke)
    if save.given_up and save.objection is not None:
        outcome, error = save.objection
        records.append(GaveUp(save_id=save.save_id, outcome=outcome, error=error))
    return records
