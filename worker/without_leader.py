"""How a save ends at a follower that has heard nothing of the leader for too long."""

from __future__ import annotations

from asyncckpt.protocol.lifecycle import DURABLE, FAILED, UNKNOWN
from asyncckpt_worker.records import Save
from asyncckpt_worker.saves import SaveBook
from asyncckpt_worker.verdicts import leader_lost


def give_up(saves: SaveBook, save: Save, why: str) -> None:
    """End it: as failed if the leader cannot have committed it; else nobody knows.

    It can if all ranks are durable here, or were, as far as a worker that is dead may have told.
    """
    ranks = save.ranks.values()
    resumed = any(e.resumed for e in ranks)
    unknown = all(e.phase == DURABLE or e.resumed for e in ranks) and (resumed or not save.given_up)
    # Should it come back, it must not wait for what is never told, or never consented.
    if not unknown or any(e.phase != DURABLE or e.needs_consent for e in ranks):
        saves.end(save, FAILED, leader_lost(save, why, unknown=False))
    saves.end_here(save, UNKNOWN if unknown else FAILED, leader_lost(save, why, unknown=unknown))
