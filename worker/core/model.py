"""Records of the core (sessions, slots, saves, runs), and the phase table of a rank's part in a save.

The table maps phase and event to the next phase and steps. `SaveRegistry.advance` looks up the cell, changes the phase,
and takes the steps in order; once a step has ended the save, the later steps are skipped. A missing cell is a bug in
the worker: it ends that save, and nothing else.

Events:

    begin           the rank has begun: by Begin, or by a slot that is written while it is filled
    recover         begin, seal or an existing part, of a save that a dead worker may have written or committed
    seal            its sealed request was read
    prepared        the directory exists, and holds no manifest of this save
    written         its files and index are fsynced
    resume_open     the save was not committed; this rank has not sealed it
    resume_sealed   the save was not committed; this rank has sealed it
    commit, fail, abandon, lose
                    the save ends as committed, failed, abandoned, unknown

Steps:

    ADMIT           end the save if it can never commit: its path is in use, a rank has departed, or IDs differ
    PREPARE         create the directory, and look for existing files
    COMPARE         if sealed, compare it with its session and the other ranks; after the last rank, all samples
    PROCEED         raise `prepared`, unless the directory is still being created
    STREAM          write what is filled so far, if the trainer streams its slot
    WRITE           write the files, or use what was written before the seal
    COMPLETE        commit if all ranks are durable and have consented
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.basics.storage_options import NO_OPTIONS
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
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY
from asyncckpt.storage.store import DirectoryIdentity
from asyncckpt_worker.core.events import ContentDigests, Peer, SaveKey, Wire

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
        "lose": (UNKNOWN, ()),  # its save has ended as unknown, and a dead worker may have committed it
    },
    OPEN: {
        "seal": (SEALED, (COMPARE, PROCEED)),
        "prepared": (OPEN, (STREAM,)),
        "written": (OPEN, ()),  # its files were complete before its seal was read
        "recover": (RECOVERING, ()),
        "commit": (FAILED, ()),  # a dead worker committed it without this snapshot
        "fail": (FAILED, ()),
        "abandon": (ABANDONED, ()),
        "lose": (FAILED, ()),
    },
    SEALED: {
        "prepared": (WRITING, (WRITE,)),
        "written": (SEALED, ()),  # the save is about to end
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
"""Outcome of a save -> the event of each rank's part."""

COMMIT, REMOVE = "commit", "remove"
"""Jobs of a save. The jobs of a rank's part, PREPARE and WRITE, are named like the steps that start them."""

MAX_SESSIONS = 4096
MAX_SLOTS_PER_SESSION = 64
MAX_JOBS = 4096
"""Maximum number of outstanding jobs; beyond it, requests that would add one are refused. Chosen, not measured."""

MAX_HISTORY = 1024
"""Number of ended saves that are remembered, to answer late and repeated requests. One Heartbeat may name as many."""


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
    """The earlier session of the same client, which ends when this one opens."""

    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)
    """Options of object stores, for its saves."""

    run: str = ""
    """ID of its run; "" until it is known."""

    last: tuple[Save, RankSave] | None = None
    """The last save that this rank began; for the status report."""

    durable: tuple[int | None, float] | tuple[()] = ()
    """The last step whose files this rank made durable, and when; for the status report."""

    granted: dict[int, int] = field(default_factory=dict)
    """Allocate request id -> slot number, so that a repeated request gets the same slot."""

    slots: set[int] = field(default_factory=set)
    holds: set[int] = field(default_factory=set)
    """Slots of other sessions that it holds for reading."""

    follower: str = ""
    """ID of the worker of another node that serves this rank (`<instance>.<run>`); "" if this worker does."""


@dataclass(slots=True)
class Waiter:
    """A Submit that will be answered when its slot has been read."""

    peer: Peer
    id: int
    save_id: str
    generation: int


@dataclass(slots=True)
class Slot:
    """A slot and the session that uses it; its states are described in `machine`."""

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
    """The highest generation whose sealed snapshot was accepted; none at or below it is accepted again."""

    last: tuple[Save, RankSave] | None = None
    """The last save that used it, and its rank's part; kept after the save has ended."""

    opened: bool = False
    """At the last read, a trainer was staging into it."""

    populate: bool = False
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)
    """Storage options, copied from the session because the slot may outlive it."""

    adopted_generation: int = -1
    """Its generation when it was adopted; the dead worker may have written generations up to it. -1: not adopted."""

    committed: str = ""
    """Adopted: ID of the save in it that the trainer knows as committed; "" once the slot has been read."""

    writes: set[SaveKey] = field(default_factory=set)
    waiters: list[Waiter] = field(default_factory=list)
    follower: str = ""
    """As `Session.follower`. Not "": a placeholder for a slot of another node."""

    process: tuple[int, int] = (0, 0)
    """PID and start time of the process that last used the slot."""

    closed_at: float = 0.0
    """When its session ended."""

    said_goodbye: bool = False
    """Its session has sent Goodbye, and its process may still run."""

    dropped: bool = False
    """It was released, or its memory is needed: its snapshot is not kept."""

    reopened: bool = False
    """Closing, and it no longer holds the snapshot that was accepted last: a trainer opened it and did not seal it."""

    kept: bool = False
    held_by: set[str] = field(default_factory=set)
    """Sessions that read the slot's snapshot."""

    @property
    def key(self) -> SaveKey | None:
        """The save and rank that used it last."""
        return None if self.last is None else (self.last[0].save_id, self.last[1].rank)

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
    """A row of `TABLE`; only `SaveRegistry.advance` changes it."""

    fsync: bool = True
    storage: Mapping[str, str] = field(default=NO_OPTIONS, repr=False)
    """As `Session.storage`."""

    job: str = ""
    """Its outstanding job: PREPARE, WRITE, or "". It may outlast the phase in which it started."""

    request: SaveRequest | None = None
    """The sealed request; None before the seal and after the end."""

    contradiction: str = ""
    """How its sealed request contradicts its session or its Begin."""

    result: Any = None
    wrote: bool = False
    """It may have files on disk, which are removed if the save fails: a job or its follower has begun to write."""

    error: Wire | None = None
    report: dict[str, Any] = field(default_factory=dict)
    durable_at: float | None = None
    follower: str = ""
    """As `Session.follower`. Not "": that follower writes its files."""

    acknowledged: str = ""
    """Followed: the last phase of this part that the leader has acknowledged, or ""."""

    reported_to: str = ""
    """Followed: instance of the first leader that it was reported to, which may have committed the save."""

    consent: tuple[bool, str] | None = None
    """The first answer of its `pre_commit` hook, and the reason; None until there is one."""

    from_dead_worker: bool = False
    """A dead worker (the rank's own, or the leader) may have written its files or committed the save. Its files are
    removed if the save fails."""

    seen: str = ""
    """The phase in the last `status.PhaseChange`; `since`: when that phase began."""

    since: float = 0.0

    ring_segments: int = 0
    """Number of segments of its ring; the snapshot is never completely in memory. 0: no ring."""

    stream: SaveRequest | None = None
    """The unsealed request of a slot that is written while it is filled. It stays after a failure: one attempt only."""

    streaming: bool = False
    """Its write job started before the seal, or writes a ring."""

    written_at: float = 0.0
    """When its files were complete; for a ring, that may be before the seal. With `follower`, infinity: the follower
    reports that it is still writing the ring."""

    directory_identity: DirectoryIdentity = NO_IDENTITY
    """Identity of its directory, set when PREPARE ends, also with an error."""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def is_open(self) -> bool:
        """Whether it is neither sealed nor ended."""
        return self.request is None and self.phase not in ENDED

    @property
    def in_flight(self) -> bool:
        """Whether it is sealed and has not ended: the worker needs its slot."""
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
    def has_consented(self) -> bool:
        """Whether it has a hook, and this has consented."""
        return self.request is not None and self.request.hook_timeout_s > 0 and not self.needs_consent

    @property
    def needs_consent(self) -> bool:
        """Whether the commit waits for this rank's `pre_commit` hook."""
        return self.request is not None and self.request.hook_timeout_s > 0 and not (self.consent and self.consent[0])


@dataclass(slots=True)
class Save:
    """A save that is open, or has a job outstanding. `outcome`: an ended phase, or None."""

    save_id: SaveId
    world_size: int
    ranks: dict[int, RankSave] = field(default_factory=dict)
    """Rank -> its part. Empty once the save was archived in `Tables.ended` and only a slot still refers to it."""

    paths: set[str] = field(default_factory=set)
    """Paths that its ranks have named."""

    declarations: dict[tuple[Any, ...], RankSave] = field(default_factory=dict)
    """Settings that all ranks must share (`agreement`) -> the first rank with them. One part while all ranks agree."""

    sealed: set[int] = field(default_factory=set)
    """Ranks that have sealed it and whose part has not ended."""

    n_durable: int = 0
    """Number of durable ranks."""

    jobs: int = 0
    """Number of outstanding jobs: its own and those of its ranks."""

    timeout_s: float = float("inf")
    """Commit timeout: the smallest of its ranks."""

    next_deadline_at: float = float("inf")
    """Lower bound of its next deadline (`saves.deadline`)."""

    meet: bool = False
    """A rank has tensors or objects that the plan does not contain: the ranks meet again after this save."""

    outcome: str | None = None
    error: Wire | None = None
    job: str = ""
    """Its own outstanding job: COMMIT, REMOVE, or ""."""

    sealed_since: float | None = None
    """When the first sealed snapshot was accepted; from then on the other ranks have `timeout_s` to seal."""

    waiting_since: float | None = None
    """When the first rank became durable."""

    failed_locally: bool = False
    """Followed: it failed on this node, and the failure is reported to the leader, which ends it."""

    known_uncommitted: bool = False
    """The directory was checked: no dead worker has committed it, and only this worker can."""

    pending_failure: tuple[str, Wire] | None = None
    """Outcome and error that end it when its recovery shows that it was not committed. Followed: its local failure."""

    complete: bool = False
    """All ranks have sealed it and agree."""

    leader_missing: list[int] | None = None
    """Followed: the ranks that the leader waits for, by its last message."""

    end_reported: bool = False
    """A `status.PhaseChange` with its end was created."""

    hooks_since: float = 0.0
    """When the last earlier save of the run ended. Hook timeouts start no earlier, as hooks run one after another."""

    def has_sealed(self, rank: int) -> bool:
        """Whether the sealed snapshot of `rank` was accepted and its part has not ended."""
        return rank in self.sealed

    @property
    def awaits_seals(self) -> bool:
        """Whether it is open and a rank has not sealed it."""
        return self.outcome is None and len(self.sealed) < self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not sealed it; empty once it has ended."""
        if not self.awaits_seals:
            return []
        return [rank for rank in range(self.world_size) if rank not in self.sealed]

    @property
    def may_be_committed(self) -> bool:
        """Whether a dead worker may have committed it, as far as it is known here."""
        return not self.known_uncommitted and any(r.phase == RECOVERING for r in self.ranks.values())

    @property
    def is_recovering(self) -> bool:
        """Whether its directory is being checked, since a dead worker may have committed it; nothing may end it yet."""
        return not self.known_uncommitted and any(r.phase == RECOVERING and r.preparing for r in self.ranks.values())

    @property
    def committing(self) -> bool:
        return self.job == COMMIT

    @property
    def unfinished(self) -> bool:
        """Whether a rank has sealed it and it has not ended, or a job is outstanding."""
        return self.jobs > 0 or bool(self.sealed)

    def add(self, part: RankSave) -> None:
        """Add a rank's part."""
        self.ranks[part.rank] = part
        self.paths.add(part.path)
        self.timeout_s = min(self.timeout_s, part.commit_timeout_s)

    def count_phase(self, part: RankSave, was: str) -> None:
        """Update `sealed` and `n_durable` after a phase change from `was`."""
        if part.in_flight:
            self.sealed.add(part.rank)
        else:
            self.sealed.discard(part.rank)
        self.n_durable += (part.phase == DURABLE) - (was == DURABLE)


MAX_DIRECTORIES = 64
"""Number of directories of a run whose epochs are remembered. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The last committed save of a run, to compare the next one with."""

    sequence: int
    step: int
    digests: ContentDigests


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """The last committed save of a run, for the status report."""

    step: int | None
    path: str
    at: float


@dataclass(slots=True)
class Run:
    """The ranks that save together, and the outcomes of their saves."""

    run_id: str
    world_size: int
    members: dict[int, str] = field(default_factory=dict)
    """Rank -> name of its session."""

    departed: dict[int, str] = field(default_factory=dict)
    """Rank -> why its session ended. Its slots have been read since then."""

    withdrawn: dict[int, Wire] = field(default_factory=dict)
    """Sequence -> why that save can never be committed."""

    hook_answered_at: dict[int, float] = field(default_factory=dict)
    """Rank -> when a hook of it answered last. The hooks of a rank run one after another, in any order of its saves."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Directory -> the epoch of this run's checkpoints in it."""

    outcomes: dict[int, bool] = field(default_factory=dict)
    """Sequence of a save that has ended on all ranks -> whether the ranks meet again after it. The latest, in order."""

    followed: bool = False
    """Another worker leads this run, and this worker follows it."""

    leader_unreachable: bool = False
    """Another worker leads this run, and this worker cannot follow it."""

    leader: str = ""
    """Followed: instance of the leader; "" before its first message."""

    found_committed: dict[int, tuple[bool, float]] = field(default_factory=dict)
    """Followed: sequence of a save that was found committed here -> whether one of our ranks requires a meeting, and
    when it was found. Used as the outcome if no leader reports one within `FOUND_S`."""

    declined: list[Mapping[str, Any]] = field(default_factory=list)
    """Followed: the latest withdrawals of its ranks, as rows for the leader."""

    committed: Committed | None = None
    """The last committed save, to compare the next one with; None if it could not be compared."""

    newest: Newest | None = None
    """The last committed save, for the status report."""

    def add_outcome(self, sequence: int, meet: bool) -> bool:
        """Add the outcome of a save and return whether it is new; at most `MAX_OUTCOMES` are kept."""
        if sequence in self.outcomes:
            return False
        self.outcomes[sequence] = meet
        for old in list(self.outcomes)[:-MAX_OUTCOMES]:
            del self.outcomes[old]
        return True

    def remember_epoch(self, directory: str, epoch: int) -> None:
        """Add the epoch of a directory; at most `MAX_DIRECTORIES` are kept."""
        self.epochs[directory] = epoch
        for old in list(self.epochs)[:-MAX_DIRECTORIES]:
            del self.epochs[old]
