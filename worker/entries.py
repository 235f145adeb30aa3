"""How a rank's part in a save begins: by its Begin, or by a sealed slot whose Begin never came."""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.protocol.lifecycle import BEGUN, SUBMITTED, WRITING
from asyncckpt.protocol.messages import Begin
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.actions import Prepare
from asyncckpt_worker.records import RankSave, Session, Slot

_TO_DURABLE = {BEGUN: ("submit", "write", "finish"), SUBMITTED: ("write", "finish"), WRITING: ("finish",)}


def entry_of_begin(session: Session, m: Begin, now: float, *, adopted: int = -1, resumed: bool = False) -> RankSave:
    """Return the entry of a rank that stages, into a slot of which a dead worker had the generation `adopted`.

    `resumed`: of a follower, whose leader or worker before is dead: whether it is committed is to be found.
    """
    return RankSave(
        rank=session.rank,
        session=session.name,
        slot=m.slot,
        generation=m.generation,
        path=m.path,
        step=m.step,
        nbytes=m.nbytes,
        umask=m.umask,
        overwrite=m.overwrite,
        begun_at=now,
        commit_timeout_s=m.commit_timeout_s,
        link=session.link,
        prepared=bool(session.link) and not resumed,
        resumed=resumed,
        leftovers=m.generation <= adopted,
    )


def entry_of_request(slot: Slot, generation: int, request: SaveRequest, now: float) -> RankSave:
    """Return the entry of a rank whose sealed slot is the first that is heard of it."""
    return RankSave(
        rank=request.rank,
        session=slot.session,
        slot=slot.number,
        generation=generation,
        path=request.path,
        step=request.step,
        nbytes=sum(p.nbytes for p in request.parts),
        umask=request.umask,
        overwrite=request.overwrite,
        begun_at=now,
        commit_timeout_s=request.commit_timeout_s,
        link=slot.link,
        prepared=bool(slot.link),
        resumed=generation <= slot.adopted,
        leftovers=generation <= slot.adopted,
    )


def prepare_of(save_id: str, entry: RankSave, *, fsync: bool) -> Prepare:
    """Return the job that makes the entry's directory."""
    return Prepare(
        key=(save_id, entry.rank),
        path=entry.path,
        step=entry.step,
        nbytes=entry.nbytes,
        umask=entry.umask,
        fsync=fsync,
        overwrite=entry.overwrite,
        resumed=entry.resumed or entry.leftovers,
    )


def steps_to_durable(entry: RankSave) -> Iterator[str]:
    """Yield what has happened to a sealed rank of a save whose manifest stands, put by another worker."""
    yield from _TO_DURABLE.get(entry.phase, ())
