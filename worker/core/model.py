"""What the core remembers: sessions, slots, saves, runs; and the table that moves a rank's part in a save.

The table is phase x event -> phase, steps: `SaveBook.advance` looks the cell up, changes the phase, and takes the steps
in order; the later ones are left out once one of them has ended the save. A cell that is not there is a bug of ours: it
ends that save, and nothing else.

Events:

    begin           the rank has begun, or its slot is the first that is heard of it
    recover         the same, or it is known already: a dead worker may have written or committed it
    seal            its request was read, sealed
    prepared        the directory is made, and holds no manifest of this save
    written         its files and index are fsynced
    resume_open     the save was not committed; this rank has not sealed it
    resume_sealed   the save was not committed; this rank has sealed it
    commit, fail, abandon, lose
                    the save ends: committed, failed, abandoned, unknown

Steps:

    ADMIT           end the save if it cannot be: another at its path, a rank that is gone, ids that differ
    PREPARE         make the directory, and look for what stands in it
    COMPARE         once sealed, compare it with its session and the other ranks; with the last rank, all samples
    PROCEED         `prepared`, unless the directory is still being made
    STREAM          write what is filled so far, if the trainer streams
    WRITE           write the files, or take what was written before the seal was seen
    COMPLETE        commit, if all ranks are durable and consent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.names import SaveId
from asyncckpt.protocol.fields import MAX_OUTCOMES
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.protocol.save_phases import (
    ABANDONED,
    COMMITTED,
    DURABLE,
    ENDED,
    FAILED,
    OPEN,
    RECOVERING,
    SEALED,
    UNKNOWN,
    WRITING,
)
from asyncckpt.storage.checkpoint_dir import NO_HOME
from asyncckpt.storage.store import DirectoryIdentity
from asyncckpt_worker.core.events import Contents, Peer, SaveKey, Wire

NEW = ""
"""Before the first event."""

ADMIT, PREPARE, COMPARE, PROCEED = "admit", "prepare", "compare", "proceed"
STREAM, WRITE, COMPLETE = "stream", "write", "complete"

Cell = tuple[str, tuple[str, ...]]

TABLE: dict[str, dict[str, Cell]] = {
    NEW: {
        "begin": (OPEN, (ADMIT, PREPARE)),
        "seal": (SEALED, (ADMIT, COMPARE, PREPARE, PROCEED)),
        "recover": (RECOVERING, (PREPARE, ADMIT, COMPARE)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
    },
    OPEN: {
        "seal": (SEALED, (COMPARE, PROCEED)),
        "prepared": (OPEN, (STREAM,)),
        "written": (OPEN, ()),  # before its seal was seen
        "recover": (RECOVERING, ()),
        "commit": (FAILED, ()),  # by a dead worker, without what this rank stages
        "fail": (FAILED, ()),
        "abandon": (ABANDONED, ()),
        "lose": (FAILED, ()),
    },
    SEALED: {
        "prepared": (WRITING, (WRITE,)),
        "written": (SEALED, ()),  # it is being ended
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    WRITING: {
        "written": (DURABLE, (COMPLETE,)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    DURABLE: {
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
    RECOVERING: {
        "seal": (RECOVERING, (COMPARE,)),
        "resume_open": (OPEN, ()),
        "resume_sealed": (SEALED, (PROCEED,)),
        "commit": (COMMITTED, ()),
        "fail": (FAILED, ()),
        "abandon": (FAILED, ()),
        "lose": (UNKNOWN, ()),
    },
}

ENDS = {COMMITTED: "commit", FAILED: "fail", ABANDONED: "abandon", UNKNOWN: "lose"}
"""How a save has ended -> the event that this is for each rank's part."""

STEPS = frozenset(step for row in TABLE.values() for _, steps in row.values() for step in steps)


COMMIT, REMOVE = "commit", "remove"
"""Jobs of a save. Those of a rank's part are named as the steps that begin them."""

MAX_SESSIONS = 4096
MAX_SLOTS_PER_SESSION = 64
MAX_JOBS = 4096
"""Jobs that may be outstanding; above it, requests that would add one are refused. Chosen, not measured."""

MAX_HISTORY = 1024
"""Ended saves that are remembered, so that late questions and repeated requests find them. As many as one Heartbeat
may ask for."""


@dataclass(slots=True)
class Session:
    """One incarnation of a trainer's client, whose process is watched."""

    name: str
    peer: Peer
    pid: int
    pid_start: int
    rank: int
    world_size: int
    package: str
    replaces: str = ""
    """The session that this one's opening ends."""

    run: str = ""
    """The run that it saves for, or "": not known yet."""

    last: tuple[Save, RankSave] | None = None
    """The save that this rank has begun last, for the status report."""

    durable: tuple[int | None, float] | tuple[()] = ()
    """The step that this rank has made durable last, and when; for the status report."""

    granted: dict[int, int] = field(default_factory=dict)
    """Allocate request id -> slot number, so that a repeated request gets the same slot."""

    slots: set[int] = field(default_factory=set)
    holds: set[int] = field(default_factory=set)
    """Slots of others that it reads."""

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
    """A slot and the session that uses it; the table of its states is in `state`."""

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
    accepted_generation: int = -1
    """The highest generation that was taken up: it is never taken twice."""

    part: tuple[Save, RankSave] | None = None
    """The save that used it last, and the part of its rank: also when that has ended long ago."""

    opened: bool = False
    """When it was read last, a trainer was staging into it."""

    populate: bool = False

    adopted_generation: int = -1
    """The generation that it held when it was taken over from a dead worker, which may have written that; else -1."""

    committed: str = ""
    """Adopted: the save that it holds if that was committed by then, until it has been looked into."""

    writes: set[SaveKey] = field(default_factory=set)
    waiters: list[Waiter] = field(default_factory=list)
    link: str = ""
    """As `Session.link`: then it is nothing that we have."""

    process: tuple[int, int] = (0, 0)
    """PID and start time of the process that has the slot, or had it last."""

    closed_at: float = 0.0
    """When its session ended."""

    said_goodbye: bool = False
    """Its session has said goodbye, and its process may live on."""

    dropped: bool = False
    """It was given back, or up: what it holds is not kept."""

    reopened: bool = False
    """Closing, and it was found to hold something else than what was taken up last: it was opened, and not sealed."""

    kept: bool = False
    held_by: set[str] = field(default_factory=set)
    """Sessions that read the slot's snapshot."""

    @property
    def key(self) -> SaveKey | None:
        """The save and rank that used it last."""
        return None if self.part is None else (self.part[0].save_id, self.part[1].rank)

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
    phase: str = ""
    """One of `part_table.TABLE`, moved by `SaveBook.advance` only."""

    fsync: bool = True
    job: str = ""
    """The job that is under way for it: PREPARE, WRITE or none. It may outlive the phase in which it began."""

    request: SaveRequest | None = None
    """From the seal to the end."""

    contradiction: str = ""
    """How its sealed request contradicts its session or its Begin."""

    result: Any = None
    wrote: bool = False
    """Files of it may stand, which go if the save fails: a job has written them, or some, or its follower has."""

    error: Wire | None = None
    report: dict[str, Any] = field(default_factory=dict)
    durable_at: float | None = None
    link: str = ""
    """As `Session.link`: then its files are written there."""

    acknowledged: str = ""
    """Followed: the phase that the leader has shown, or ""."""

    reported_to: str = ""
    """Followed: instance of the leader that it was reported to first: another one may find it committed by that."""

    consent: tuple[bool, str] | None = None
    """What its hook has said first, and why; None: nothing yet."""

    from_dead_worker: bool = False
    """A worker that is dead may have written its files, or some, or committed it: files may stand, which go if the save
    fails. `link`: or that worker led its save."""

    seen: str = ""
    """The phase that was told of last (`moves`), and `since` when it is in it."""

    since: float = 0.0

    ring_segments: int = 0
    """Above 0: its snapshot goes through a ring of so many segments, and is never whole in memory."""

    stream: SaveRequest | None = None
    """The request of what is written while it is being staged, or was until that failed: not tried twice."""

    streaming: bool = False
    """It is being written, or was, since before it is sealed; or goes through a ring."""

    written_at: float = 0.0
    """When its files were written; of a ring, that may be before it is sealed. With `link`, infinity: its worker
    has said that it is still writing the ring."""

    home: DirectoryIdentity = NO_HOME
    """Its directory, once that was made or could not be."""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def is_open(self) -> bool:
        """Whether it has neither been sealed nor ended."""
        return self.request is None and self.phase not in ENDED

    @property
    def in_flight(self) -> bool:
        """Whether it has been sealed and not ended: the worker reads the slot, or needs it to write again."""
        return self.request is not None

    @property
    def ring(self) -> bool:
        return self.ring_segments > 0

    @property
    def preparing(self) -> bool:
        return self.job == PREPARE

    @property
    def writing(self) -> bool:
        return self.job == WRITE

    @property
    def needs_consent(self) -> bool:
        """Whether the commit waits for what this rank's hook says."""
        return self.request is not None and self.request.hook_timeout_s > 0 and not (self.consent and self.consent[0])


@dataclass(slots=True)
class Save:
    """One save that is not over: the ranks that are known so far. `outcome`: an ended phase, or None."""

    save_id: SaveId
    world_size: int
    ranks: dict[int, RankSave] = field(default_factory=dict)
    """Empty once it is only a slot that still holds it: then see `ended`."""

    paths: set[str] = field(default_factory=set)
    """What its ranks have named."""

    declarations: dict[tuple[Any, ...], RankSave] = field(default_factory=dict)
    """What its ranks must say alike (`agreement`) -> the first that has said it: one entry while they agree."""

    sealed: set[int] = field(default_factory=set)
    """The ranks in flight: that have sealed it, and whose part has not ended."""

    n_durable: int = 0
    """How many of these are durable."""

    jobs: int = 0
    """How many jobs are outstanding that touch its files: its own and those of its ranks."""

    timeout_s: float = float("inf")
    """How long its ranks may take: the smallest that one of them has named."""

    next_deadline_at: float = float("inf")
    """No deadline of it passes before (`deadlines`)."""

    meet: bool = False
    """A rank holds something that the plan does not know: all ranks meet again after this save."""

    outcome: str | None = None
    error: Wire | None = None
    job: str = ""
    """The job of its own that is under way: COMMIT, REMOVE or none."""

    sealed_since: float | None = None
    """When the first rank was taken up: from here its other ranks have `commit_timeout_s`."""

    waiting_since: float | None = None
    """When the first rank was durable."""

    failed_locally: bool = False
    """Followed: it cannot go on here, and the leader is told so."""

    known_uncommitted: bool = False
    """It was not committed when this worker looked, and only this one can have committed it since."""

    pending_failure: tuple[str, Wire] | None = None
    """What would end it, and how: for as long as it is recovering. Followed: what it was given up by."""

    complete: bool = False
    """All of its ranks have sealed it, and agree."""

    leader_missing: list[int] | None = None
    """Followed: the ranks that the leader waits for, as it has said."""

    end_reported: bool = False
    """Its end was told of (`moves`)."""

    hooks_since: float = 0.0
    """When the last of the run's earlier saves that were under way ended: hooks are asked one after another."""

    def has_sealed(self, rank: int) -> bool:
        """Whether `rank`'s snapshot was taken up, in a save that has not ended."""
        return rank in self.sealed

    def has_link(self, link: str) -> bool:
        """Whether a rank has this stream."""
        return any(entry.link == link for entry in self.ranks.values())

    @property
    def awaits_seals(self) -> bool:
        """Whether it has not ended and a rank has not sealed it."""
        return self.outcome is None and len(self.sealed) < self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not sealed it yet; none once it has ended."""
        if not self.awaits_seals:
            return []
        return [rank for rank in range(self.world_size) if rank not in self.sealed]

    @property
    def is_recovering(self) -> bool:
        """Whether it may have been committed by a worker that is dead: until that is known, nothing ends it."""
        return not self.known_uncommitted and any(r.phase == RECOVERING and r.preparing for r in self.ranks.values())

    @property
    def committing(self) -> bool:
        return self.job == COMMIT

    @property
    def unfinished(self) -> bool:
        """Whether the save has been submitted by some rank, and not ended; or has a job outstanding."""
        return self.jobs > 0 or bool(self.sealed)

    def add(self, entry: RankSave) -> None:
        """Add a rank that has begun, or sealed without that."""
        self.ranks[entry.rank] = entry
        self.paths.add(entry.path)
        self.timeout_s = min(self.timeout_s, entry.commit_timeout_s)

    def count_phase(self, entry: RankSave, was: str) -> None:
        """Count a rank whose phase has changed."""
        if entry.in_flight:
            self.sealed.add(entry.rank)
        else:
            self.sealed.discard(entry.rank)
        self.n_durable += (entry.phase == DURABLE) - (was == DURABLE)


MAX_DIRECTORIES = 64
"""Directories of a run whose epochs are remembered: until all of its ranks have asked. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What a run remembers of the save that it committed last."""

    sequence: int
    step: int
    contents: Contents


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """What a run committed last, and when."""

    step: int | None
    path: str
    at: float


@dataclass(slots=True)
class Run:
    """The ranks that save together, and the outcomes that were sent to them."""

    run_id: str
    world_size: int
    members: dict[int, str] = field(default_factory=dict)
    """Rank -> its session."""

    departed: dict[int, str] = field(default_factory=dict)
    """Rank -> how its session ended; its slots have been read since."""

    highest: int = -1
    """The highest sequence that was received."""

    withdrawn: dict[int, Wire] = field(default_factory=dict)
    """Sequence -> why that save can never be."""

    hook_answered_at: dict[int, float] = field(default_factory=dict)
    """Rank -> when one of its hooks spoke last. A rank's hooks run one after another, in any order of the saves."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Directory -> the epoch of this run's checkpoints in it."""

    outcomes: dict[int, bool] = field(default_factory=dict)
    """Sequence of a save that has ended on all ranks -> whether they meet again after it: the latest, in that order."""

    followed: bool = False
    """Another worker leads it."""

    leader_unreachable: bool = False
    """Another worker leads it, and cannot be followed from here."""

    leader: str = ""
    """Followed: the leader's instance, once it has spoken."""

    found_committed: dict[int, tuple[bool, float]] = field(default_factory=dict)
    """Followed: sequence of a save that was found committed here -> whether one of our ranks has asked to meet, and
    when. Its outcome is told by that if no leader knows it: the one that did has died."""

    declined: list[Mapping[str, Any]] = field(default_factory=list)
    """Followed: what the leader was told of saves that a rank takes no part in, the latest."""

    committed: Committed | None = None
    """What was committed last, to be compared with what comes next."""

    newest: Newest | None = None
    """What was committed last, for the status report."""

    def add_outcome(self, sequence: int, meet: bool) -> bool:
        """Add a save that has ended, and return whether it is new; the oldest ones are forgotten."""
        if sequence in self.outcomes:
            return False
        self.outcomes[sequence] = meet
        for old in list(self.outcomes)[:-MAX_OUTCOMES]:
            del self.outcomes[old]
        return True

    def remember_epoch(self, directory: str, epoch: int) -> None:
        """Add a directory; the oldest ones are forgotten."""
        self.epochs[directory] = epoch
        for old in list(self.epochs)[:-MAX_DIRECTORIES]:
            del self.epochs[old]
