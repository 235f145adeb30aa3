"""All that the brain knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.message import Message
from asyncckpt_worker.actions import Action, Log
from asyncckpt_worker.events import Peer, SaveKey
from asyncckpt_worker.records import MAX_HISTORY, RankSave, Save, Session, Slot
from asyncckpt_worker.run_record import Run


@dataclass(slots=True)
class Tables:
    """All that the brain knows, and the actions that the current event has led to so far."""

    now: float = 0.0
    draining: bool = False
    begins_until: float = float("inf")
    """When a drain stops to let known sessions begin saves: one may be copying already, its Begin under way."""

    actions: list[Action] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)
    peers: dict[Peer, str] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    freeing: set[int] = field(default_factory=set)
    """Slots that nobody has any more and whose memory is not back yet."""

    saves: dict[str, Save] = field(default_factory=dict)
    changed: dict[SaveKey, None] = field(default_factory=dict)
    """Ranks whose phase became durable or ended in this event, in order."""

    runs: dict[str, Run] = field(default_factory=dict)
    announced: dict[str, None] = field(default_factory=dict)
    """Runs that got a change in this event."""

    parting: set[str] = field(default_factory=set)
    """Sessions that have said goodbye, and whose processes are watched until their slots are gone."""

    lineage_scans: int = 0
    next_slot: int = 1
    instance: str = ""
    touched: dict[SaveKey, None] = field(default_factory=dict)
    """Ranks whose phase has changed, or that have come, in this event."""

    told: list[tuple[str, Message]] = field(default_factory=list)
    """Run and record: what its leader is to hear, besides what was touched."""

    failures: dict[str, int] = field(default_factory=dict)
    """Kind of error (`verdicts.kind_of`) -> how many saves have ended with it."""

    heard: dict[str, float] = field(default_factory=dict)
    """Stream of a follower -> when it was heard last."""

    def log(
        self, level: str, text: str, *, save_id: str | None = None, session: str | None = None, **rest: Any
    ) -> None:
        """Add a Log action; `rest` are facts, but for `count`."""
        count = rest.pop("count", None)
        self.actions.append(Log(level=level, text=text, save_id=save_id, session=session, count=count, facts=rest))

    def entry(self, key: SaveKey | None) -> RankSave | None:
        """Return one rank's part in a save, or None."""
        save = self.saves.get(key[0]) if key else None
        return save.ranks.get(key[1]) if save and key else None

    def entries(self) -> Iterable[tuple[Save, RankSave]]:
        """Yield every rank of every save."""
        return ((save, entry) for save in self.saves.values() for entry in save.ranks.values())

    def is_followed(self, save_id: str) -> bool:
        """Whether another worker decides on this save."""
        run = self.runs.get(save_id[-12:])
        return run is not None and run.followed

    @property
    def jobs(self) -> int:
        """How many jobs are outstanding."""
        jobs = self.lineage_scans + len(self.freeing) + sum(s.reading for s in self.slots.values())
        for save in self.saves.values():
            jobs += save.committing + save.removing + sum(r.writing + r.preparing for r in save.ranks.values())
        return jobs

    def forget_old_saves(self) -> None:
        """Drop the oldest ended saves beyond `MAX_HISTORY`."""
        excess = len(self.saves) - MAX_HISTORY
        if excess > 0:
            in_use = {s.key[0] for s in self.slots.values() if s.key}
            old = [s.save_id for s in self.saves.values() if s.outcome and not s.busy and s.save_id not in in_use]
            for save_id in old[:excess]:
                del self.saves[save_id]
