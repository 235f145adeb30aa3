"""What the brain remembers: sessions, slots, saves, runs. Plain records; the books change them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, ENDED, IN_FLIGHT
from asyncckpt.protocol.message import Message
from asyncckpt.protocol.request import SaveRequest
from asyncckpt_worker.actions import Action, Log
from asyncckpt_worker.events import Peer, SaveKey, Wire
from asyncckpt_worker.run_record import Run

MAX_SESSIONS = 4096
MAX_SLOTS_PER_SESSION = 64
MAX_JOBS = 4096
"""Jobs that may be outstanding; above it, requests that would add one are refused. Chosen, not measured."""

MAX_HISTORY = 1024
"""Ended saves that are remembered, so that late questions and repeated requests find them. As many as one Heartbeat
may ask for."""


@dataclass(slots=True)
class Session:
    """One incarnation of a trainer's client. `hello`: the id to answer once its process is being watched, else None."""

    name: str
    peer: Peer
    pid: int
    pid_start: int
    rank: int
    world_size: int
    package: str
    hello: int | None
    replaces: str = ""
    """The session to end once this one's process has been seen."""

    run: str = ""
    """The run that it saves for, or "": not known yet."""

    granted: dict[int, int] = field(default_factory=dict)
    """Allocate request id -> slot number, so that a repeated request gets the same slot."""

    slots: set[int] = field(default_factory=set)

    link: str = ""
    """The stream of the worker that this rank has; "" for one of ours."""

    joined: tuple[int, int] = (0, 0)
    """Which of several links of the rank is the latest: `attempt` and `opened` of `joined`."""


@dataclass(slots=True)
class Waiter:
    """A Submit that is answered when its slot has been read."""

    peer: Peer
    id: int
    save_id: str
    generation: int


@dataclass(slots=True)
class Slot:
    """A slot and who uses it; the table of its states is in `state`."""

    number: int
    nbytes: int
    session: str
    rank: int
    world_size: int
    allocate_id: int
    fd: int = -1
    token: bytes = b""
    closing: bool = False
    reading: bool = False
    read_again: bool = False
    taken: int = -1
    """The highest generation that was taken up: it is never taken twice."""

    key: SaveKey | None = None
    """The save that used it last."""

    opened: bool = False
    """When it was read last, a trainer was staging into it."""

    postponed: bool = False
    """It did not fit into memory while others were being freed: it is tried again when they are."""

    populate: bool = False

    writes: set[SaveKey] = field(default_factory=set)
    waiters: list[Waiter] = field(default_factory=list)
    link: str = ""
    """As `Session.link`: then it is nothing that we have."""

    process: tuple[int, int] = (0, 0)
    """Pid and start time of who has it, or had."""

    closed_at: float = 0.0
    """When its session ended."""

    parting: bool = False
    """Its session has said goodbye, and its process may live on."""

    dropped: bool = False
    """It was given back, or up: what it holds is not kept."""

    void: bool = False
    """Closing, and it was found to hold something else than what was taken up last: it was opened, and not sealed."""

    kept: bool = False
    held_by: set[str] = field(default_factory=set)
    """Sessions that read what it holds."""

    @property
    def state(self) -> str:
        """`creating`, `lent`, `closing` or `kept`."""
        return ("kept" if self.kept else "closing") if self.closing else "creating" if self.fd < 0 else "lent"


@dataclass(slots=True)
class RankSave:
    """One rank's part in a save."""

    rank: int
    session: str
    slot: int
    generation: int
    path: str
    step: int
    nbytes: int
    umask: int
    overwrite: bool
    begun_at: float
    commit_timeout_s: float
    phase: str = BEGUN
    preparing: bool = False
    prepared: bool = False
    writing: bool = False
    request: SaveRequest | None = None
    result: Any = None
    error: Wire | None = None
    report: dict[str, Any] = field(default_factory=dict)
    durable_at: float | None = None
    consented: bool = False
    link: str = ""
    """As `Session.link`: then its files are written there."""

    told: int = 0
    """How far the leader has been told of it: begun, sealed, delivered."""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def needs_consent(self) -> bool:
        """Whether the commit waits for what this rank's hook says."""
        return self.request is not None and self.request.hook_timeout_s > 0 and not self.consented


@dataclass(slots=True)
class Save:
    """One checkpoint in the making: the ranks that were heard of so far. `outcome`: an ended phase, or None."""

    save_id: str
    world_size: int
    ranks: dict[int, RankSave] = field(default_factory=dict)
    outcome: str | None = None
    error: Wire | None = None
    committing: bool = False
    removing: bool = False
    sealed_since: float | None = None
    """When the first rank was taken up: from here its other ranks have `commit_timeout_s`."""

    waiting_since: float | None = None
    """When the first rank was durable."""

    given_up: bool = False
    """Followed: it cannot go on here, and the leader is told so."""

    complete: bool = False
    """All of its ranks have sealed it, and agree."""

    objected: bool = False
    """It was ended by something that speaks against what was staged."""

    told_missing: list[int] | None = None
    """Followed: the ranks that the leader waits for, as it has said."""

    turn_since: float = 0.0
    """When the last of the run's earlier saves that were under way ended: hooks are asked one after another."""

    def has_sealed(self, rank: int) -> bool:
        """Whether `rank`'s snapshot was taken up, in a save that has not ended."""
        return rank in self.ranks and self.ranks[rank].phase in IN_FLIGHT

    @property
    def missing(self) -> list[int]:
        """The ranks that have not sealed it yet; none once it has ended."""
        if self.outcome is not None or sum(r.phase in IN_FLIGHT for r in self.ranks.values()) == self.world_size:
            return []
        return [rank for rank in range(self.world_size) if not self.has_sealed(rank)]

    @property
    def timeout_s(self) -> float:
        """How long its ranks may take: the smallest that one of them has named."""
        return min(r.commit_timeout_s for r in self.ranks.values())

    @property
    def busy(self) -> bool:
        """Whether a job of this save is outstanding that touches its files."""
        return self.committing or self.removing or any(r.writing or r.preparing for r in self.ranks.values())

    @property
    def unfinished(self) -> bool:
        """Whether the save has been submitted by some rank, and not ended; or has a job outstanding."""
        return self.busy or (self.outcome is None and any(r.phase in IN_FLIGHT for r in self.ranks.values()))


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
