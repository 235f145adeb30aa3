"""What the brain remembers: sessions, slots, saves, runs. Plain records; the books change them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncckpt.protocol.lifecycle import BEGUN, ENDED, IN_FLIGHT
from asyncckpt.protocol.relay import Consented
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.home import NO_HOME, Home
from asyncckpt_worker.events import Peer, SaveKey, Wire

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

    durable: tuple[int | None, float] | tuple[()] = ()
    """The step that this rank has made durable last, and when; for the status report."""

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

    adopted: int = -1
    """The generation that it held when it was taken over from a dead worker, which may have written that; else -1."""

    committed: str = ""
    """Adopted: the save that it holds if that was committed by then, until it has been looked into."""

    found: SaveRequest | None = None
    """What was found of `committed`, until its save has ended here too."""

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
    step: int | None
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

    retold: bool = False
    """A leader that is dead had been told of it."""

    spoke: Consented | None = None
    """Followed: what its hook has said."""

    ringed: bool = False
    """Its ring is being written, and not sealed: as its worker has said last, where another one leads."""

    resumed: bool = False
    """A worker that is dead may have written its files, or some, or committed it. `link`: or led its save."""

    leftovers: bool = False
    """A worker that is dead may have begun to write it: files may stand, which go if the save fails."""

    seen: str = ""
    """The phase that was told of last (`moves`), and `since` when it is in it."""

    since: float = 0.0

    ring: bool = False
    """Its snapshot goes through a ring, and is never whole in memory."""

    stream: SaveRequest | None = None
    """The request of what is written while it is being staged, or was until that failed: not tried twice."""

    streaming: bool = False
    """It is being written, or was, since before it is sealed; or goes through a ring."""

    written_at: float = 0.0
    """When its files were written; of a ring, that may be before it is sealed."""

    home: Home = NO_HOME
    """Its directory, once that was made or could not be."""

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

    looked: bool = False
    """It was not committed when this worker looked, and only this one can have committed it since."""

    objection: tuple[str, Wire] | None = None
    """What would end it, and how: for as long as it is doubtful. Followed: what it was given up by."""

    complete: bool = False
    """All of its ranks have sealed it, and agree."""

    objected: bool = False
    """It was ended by something that speaks against what was staged."""

    told_missing: list[int] | None = None
    """Followed: the ranks that the leader waits for, as it has said."""

    told_end: bool = False
    """Its end was told of (`moves`)."""

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
    def doubtful(self) -> bool:
        """Whether it may have been committed by a worker that is dead: until that is known, nothing ends it."""
        return not self.looked and any(r.resumed and r.preparing for r in self.ranks.values())

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
