"""All that the brain knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.core.actions import Action, Fault, Log
from asyncckpt_worker.core.ended import EndedSave, History
from asyncckpt_worker.core.events import Peer, SaveKey
from asyncckpt_worker.core.model import RankSave, Run, Save, Session, Slot


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
    closing: dict[int, Slot] = field(default_factory=dict)
    """Slots that are closing, or kept."""

    postponed: dict[int, Slot] = field(default_factory=dict)
    """Slots that did not fit into memory while others were being freed."""

    found: dict[int, tuple[Slot, SaveRequest]] = field(default_factory=dict)
    """What was found in slots that were adopted of saves that were committed by then, until it is remembered."""

    stirred: bool = False
    """Something has happened that may decide about a slot that is closing, or kept."""

    n_reading: int = 0
    """Slots that are being read, or opened to be read."""

    freeing: set[int] = field(default_factory=set)
    """Slots that nobody has any more and whose memory is not back yet."""

    saves: dict[str, Save] = field(default_factory=dict)
    """Those that have not ended, or of which a job is outstanding. At the end of an event the others go to `ended`."""

    ended: History = field(default_factory=History)
    changed: dict[SaveKey, None] = field(default_factory=dict)
    """Ranks whose phase became durable or ended in this event, in order."""

    runs: dict[str, Run] = field(default_factory=dict)
    announced: dict[str, None] = field(default_factory=dict)
    """Runs of which a save has ended on all ranks in this event, or that have got a leader."""

    parting: dict[str, set[int]] = field(default_factory=dict)
    """Sessions that have said goodbye, and whose processes are watched until these slots of theirs are gone."""

    lineage_scans: int = 0
    next_slot: int = 1
    instance: str = ""
    touched: dict[SaveKey, None] = field(default_factory=dict)
    """Ranks whose phase has changed, or that have come, in this event."""

    to_report: set[str] = field(default_factory=set)
    """Followed runs of which there is something new to report in this event, besides what was touched."""

    failures: dict[str, int] = field(default_factory=dict)
    """Kind of error (`verdicts.kind_of`) -> how many saves have ended with it."""

    heard: dict[str, float] = field(default_factory=dict)
    """Follower in a run (`RankSave.link`) -> when it was heard last."""

    def log(
        self, level: str, text: str, *, save_id: str | None = None, session: str | None = None, **rest: Any
    ) -> None:
        """Add a Log action; `rest` are facts, but for `count`."""
        count = rest.pop("count", None)
        self.actions.append(Log(level=level, text=text, save_id=save_id, session=session, count=count, facts=rest))

    def contained(self, save_id: str, call: Callable[..., object], *args: object) -> None:
        """Do what is one of several things to be done at an event.

        IMPORTANT: a bug in it ends save `save_id` ("": none), and stops neither the other things nor the worker.
        """
        try:
            call(*args)
        except Exception as error:
            self.fault(save_id, error)

    def fault(self, save_id: str, error: Exception) -> None:
        """End save `save_id` ("": none) for a bug of ours."""
        self.actions.append(Fault(save_id=save_id, error=error))

    def entry(self, key: SaveKey | None) -> RankSave | None:
        """Return one rank's part in a save, open or ended, or None."""
        if key is None:
            return None
        save = self.saves.get(key[0])
        if save is not None and (found := save.ranks.get(key[1])) is not None:
            return found
        ended = self.ended.get(key[0])
        return ended.entry(key[1]) if ended is not None else None

    def find(self, save_id: str) -> Save | EndedSave | None:
        """Return a save, open or ended, or None."""
        return self.saves.get(save_id) or self.ended.get(save_id)

    def opened(self, save_id: str, *ranks: int) -> Save | None:
        """Return a save; one that has ended with `ranks` of it, for what comes after its end. None: never heard of."""
        save, ended = self.saves.get(save_id), self.ended.get(save_id)
        if ended is not None:
            late = ended.reopened(ranks)
            if save is None:
                save = self.saves[save_id] = late
            for entry in late.ranks.values():
                if entry.rank not in save.ranks:
                    save.add(entry)
        return save

    def of_call(self, call: str) -> list[Save | EndedSave]:
        """Return the saves of one sequence and run (`SaveId.call`): several if they differ in epochs."""
        found: dict[str, Save | EndedSave] = {save.save_id: save for save in self.ended.of_call(call)}
        found |= {save.save_id: save for save in self.saves.values() if save.save_id.call == call}
        return list(found.values())

    def open_saves(self, run_id: str | None = None) -> list[Save]:
        """Return the saves that have not ended: of one run, or all."""
        found = self.saves.values()
        return [s for s in found if s.outcome is None and run_id in (None, s.save_id.run_id)]

    def run_of(self, save_id: SaveId) -> Run | None:
        """Return the run of a save, or None: never heard of, or forgotten."""
        return self.runs.get(save_id.run_id)

    def entries(self) -> Iterable[tuple[Save, RankSave]]:
        """Yield every rank of every save that is open."""
        return ((save, entry) for save in self.saves.values() for entry in save.ranks.values())

    def is_followed(self, save_id: SaveId) -> bool:
        """Whether another worker decides on this save."""
        run = self.run_of(save_id)
        return run is not None and run.followed

    @property
    def jobs(self) -> int:
        """How many jobs are outstanding."""
        jobs = self.lineage_scans + len(self.freeing) + self.n_reading
        return jobs + sum(save.jobs for save in self.saves.values())

    def settle(self) -> None:
        """At the end of an event: leave alone what is over."""
        for save in [s for s in self.saves.values() if s.outcome is not None and not s.jobs]:
            del self.saves[save.save_id]
            self.ended.add(save)
            save.ranks, save.sayings = {}, {}
