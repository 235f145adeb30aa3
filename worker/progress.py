"""What a follower tells the leader of one rank's part in a save: each step once, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from asyncckpt.protocol.codec import pack
from asyncckpt.protocol.fields import MAX_RECORD_NBYTES
from asyncckpt.protocol.lifecycle import BEGUN, DURABLE, SUBMITTED, WRITING
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.relay import Asked, Begun, Delivered, Ringed, Sealed
from asyncckpt.protocol.request import encode_request
from asyncckpt_worker.records import RankSave
from asyncckpt_worker.results import pack_result

_STEPS = {BEGUN: 1, SUBMITTED: 2, WRITING: 2, DURABLE: 3}


def packed(record: Message) -> bytes:
    """Return a record as it travels.

    Raises:
        ProtocolError: It is too long.
    """
    return pack(record, MAX_RECORD_NBYTES)


def asked(rank: int, path: str) -> Asked:
    """Return the question for the run's epoch."""
    return Asked(rank=rank, path=path)


def told_of(save_id: str, entry: RankSave) -> Iterator[bytes]:
    """Yield the records of the steps that the leader has not been told of; none of a save that has ended."""
    reached = _STEPS.get(entry.phase, 0)
    if entry.told < 1 <= reached:
        entry.told = 1
        yield packed(
            Begun(
                save_id=save_id,
                rank=entry.rank,
                step=entry.step,
                path=entry.path,
                nbytes=entry.nbytes,
                umask=entry.umask,
                overwrite=entry.overwrite,
                commit_timeout_s=entry.commit_timeout_s,
                resumed=entry.resumed or entry.leftovers or entry.retold,
            )
        )
    writing = entry.ring and entry.writing
    if reached == 1 and writing != entry.ringed:
        entry.ringed = writing
        yield packed(Ringed(save_id=save_id, rank=entry.rank, writing=writing))
    if entry.told < 2 <= reached:
        entry.told = 2
        assert entry.request is not None
        request = encode_request(replace(entry.request, objects=b""))
        yield packed(Sealed(save_id=save_id, rank=entry.rank, request=request))
    if entry.told < 3 <= reached:
        entry.told = 3
        yield packed(Delivered(save_id=save_id, rank=entry.rank, result=pack_result(entry.result), report=entry.report))
