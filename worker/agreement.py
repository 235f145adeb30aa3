"""Whether what the ranks of one save say about it is the same."""

from __future__ import annotations

from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.records import RankSave, Save, Slot


def other_world(save: Save | None, request: SaveRequest) -> str:
    """Return how a sealed request names another world than its save, if that is known, has; "" when it does not."""
    if save is None or save.world_size == request.world_size:
        return ""
    return f"rank {request.rank} of {request.world_size} saves under an id that {save.world_size} ranks use"


def disagreement(save: Save, entry: RankSave, slot: Slot) -> str:
    """Return how a sealed request contradicts its session, its Begin or another rank; "" when it does not."""
    request = entry.request
    assert request is not None
    wanted = {"rank": slot.rank, "world_size": slot.world_size, "path": entry.path, "step": entry.step}
    for name, value in wanted.items():
        if getattr(request, name) != value:
            return f"the sealed request says {name} {getattr(request, name)!r}, begun was {value!r}"
    for other in save.ranks.values():
        if (other.path, other.step, save.world_size) != (request.path, request.step, request.world_size):
            return (
                f"rank {entry.rank} saves step {request.step} of {request.world_size} ranks to {request.path}, "
                f"rank {other.rank} step {other.step} of {save.world_size} ranks to {other.path}"
            )
    return ""
