"""Who writes which replica: what the ranks have agreed upon, the same on all of them. Pure; no torch."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from asyncckpt.planning.contributions import Change


class DutyKind(Enum):
    """What a rank does with a tensor that it holds."""

    SHARED = "shared"
    """A replica, claimed and compared: the pieces of the duty are written under the plain name."""
    SOLE = "sole"
    """No other rank holds it: written whole under the plain name."""
    PER_RANK = "per_rank"
    """Other ranks hold another one of that name: written whole under `FQN@rank{n}`."""
    NEWS = "news"
    """Not agreed upon: as `PER_RANK`, and the other ranks must be told."""


class Duty(NamedTuple):
    """What one rank writes of one tensor; `pieces` as (first row, rows) and `split` only matter for `SHARED`.

    Rows count along the first dimension that is larger than 1. `split`: other ranks write other rows of it.
    """

    kind: DutyKind
    pieces: tuple[tuple[int, int], ...] = ()
    split: bool = False


class Agreement:
    """Immutable. All ranks that applied the same changes in the same order hold equal ones.

    Attributes:
        world_size: Number of ranks. With one rank everything is `SOLE` and there is nothing to exchange.
        fingerprint: 16 hex digits; equal where the agreements are.
    """

    world_size: int
    fingerprint: str

    @classmethod
    def start(cls, world_size: int) -> Agreement:
        """Return the agreement of ranks that have not exchanged anything: everything is `NEWS`."""
        raise NotImplementedError

    def extended(self, change: Change, raw: bytes) -> Agreement:
        """Return the agreement after `change`.

        What was agreed stays, except for `change.per_rank`. An FQN that is new is `SOLE` where one rank holds it,
        `SHARED` where all its holders gave equal dtype, shape and digest in this change, else `PER_RANK`.

        Args:
            change: The change.
            raw: Its encoded bytes, for the fingerprint.

        Raises:
            ProtocolError: A contribution of a rank outside the world.
        """
        raise NotImplementedError

    def duty(self, rank: int, fqn: str, dtype: str, shape: tuple[int, ...]) -> Duty:
        """Return what `rank` writes of a tensor that it holds and that is not `PerRank`."""
        raise NotImplementedError
