"""What the brain remembers of a run. Part of `records`."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncckpt.protocol.relay import Declined
from asyncckpt_worker.events import Wire
from asyncckpt_worker.freshness import Committed

MAX_DIRECTORIES = 64
"""Directories of a run whose epochs are remembered: until all of its ranks have asked. Chosen, not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """What a run committed last, and when."""

    step: int | None
    path: str
    at: float


@dataclass(slots=True)
class Run:
    """The ranks that save together, and what they were told. `changes`: what was published, first to last."""

    run_id: str
    world_size: int
    members: dict[int, str] = field(default_factory=dict)
    """Rank -> its session."""

    gone: dict[int, str] = field(default_factory=dict)
    """Rank -> how its session ended; its slots have been read since."""

    highest: int = -1
    """The highest sequence that was heard of."""

    withdrawn: dict[int, Wire] = field(default_factory=dict)
    """Sequence -> why that save can never be."""

    spoke: dict[int, float] = field(default_factory=dict)
    """Rank -> when one of its hooks spoke last. A rank's hooks run one after another, in any order of the saves."""

    epochs: dict[str, int] = field(default_factory=dict)
    """Directory -> the epoch of this run's checkpoints in it."""

    changes: list[bytes] = field(default_factory=list)
    effective: int = 0
    """The sequence from which on the last change holds."""

    followed: bool = False
    """Another worker leads it."""

    inherited: bool = False
    """Another worker may have led it before this one, which leads it."""

    estranged: bool = False
    """Another worker leads it, and cannot be followed from here."""

    leader: str = ""
    """Followed: the leader's instance, once it has spoken."""

    declined: list[Declined] = field(default_factory=list)
    """Followed: what the leader was told of saves that a rank takes no part in, the latest."""

    committed: Committed | None = None
    """What was committed last, to be compared with what comes next."""

    newest: Newest | None = None
    """What was committed last, for the status report."""

    names: dict[str, int | None] = field(default_factory=dict)
    """FQNs to be stored for each rank -> from which sequence on, once that was published."""

    def remember_epoch(self, directory: str, epoch: int) -> None:
        """Add a directory; the oldest ones are forgotten."""
        self.epochs[directory] = epoch
        for old in list(self.epochs)[:-MAX_DIRECTORIES]:
            del self.epochs[old]
