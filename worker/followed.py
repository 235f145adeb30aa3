"""A run that another worker leads: the connection, and who waits for what. Part of `following`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.codec import unpack
from asyncckpt.protocol.lifecycle import COMMITTED
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.relay import LEADER_RECORDS, Asked, Ended, Joined
from asyncckpt_worker.actions import Connect
from asyncckpt_worker.events import Peer
from asyncckpt_worker.progress import packed
from asyncckpt_worker.records import Save
from asyncckpt_worker.run_record import Run
from asyncckpt_worker.streams import Stream


@dataclass(slots=True)
class Followed:
    """See the module."""

    run: Run
    connect: Connect
    stream: Stream
    heard_at: float
    joined: dict[int, int] = field(default_factory=dict)
    """Rank -> the attempt that this stream has told of."""

    attempts: dict[int, int] = field(default_factory=dict)
    follows: dict[tuple[Peer, int], float] = field(default_factory=dict)
    """Follow requests that wait, until when."""

    lineages: dict[tuple[Peer, int], Asked] = field(default_factory=dict)
    """Lineage requests that wait, and what the leader was asked for each."""

    def join(self, rank: int) -> None:
        """Tell the leader that a rank has this worker, once in a stream and attempt; not before it has said so."""
        attempt = self.attempts.get(rank)
        if attempt is not None and self.joined.get(rank) != attempt:
            self.joined[rank] = attempt
            record = Joined(rank=rank, world_size=self.run.world_size, attempt=attempt, opened=self.stream.opened)
            self.stream.post(packed(record))

    def take_lineages(self, parent: str | None = None) -> list[tuple[Peer, int]]:
        """Take the Lineage requests off that wait for this directory, or all of them."""
        found = [key for key, asked in self.lineages.items() if parent in (None, os.path.dirname(asked.path))]
        for key in found:
            del self.lineages[key]
        return found

    def silent_until(self, save: Save) -> float:
        """Return when the leader has been silent about a save for too long."""
        begun_at = min(e.begun_at for e in save.ranks.values())
        return max(self.heard_at, begun_at) + save.timeout_s

    def row(self, now: float) -> Mapping[str, Any]:
        """Return what to tell people of it."""
        address, silent_s = self.connect.address, now - self.heard_at
        return {"run": self.run.run_id, "address": address, "leader": self.run.leader, "silent_s": silent_s}


def heard(data: bytes) -> Message:
    """Read a record of the leader's.

    Raises:
        ProtocolError: Not such a record.
        ValueError: An end without a commit that gives no reason: nobody could be told of it.
    """
    record = unpack(data, LEADER_RECORDS)
    if isinstance(record, Ended) and record.outcome != COMMITTED and not record.error:
        raise ValueError(f"save {record.save_id} {record.outcome} without a reason")
    return record


def unreachable(known: Followed, why: str) -> WorkerUnavailableError:
    """Return the error of who waits for the leader in vain."""
    address = known.connect.address
    return WorkerUnavailableError(
        f"the worker at {address} that leads run {known.run.run_id} cannot be reached from here: {why}. Start the "
        "worker beside rank 0 with --advertise HOST, a name or address of its node that the other nodes reach, and "
        "--port P if a firewall is between them",
        endpoint=address,
        detail="leader",
    )
