"""Digests of tensors: whole ones for the first exchange, windows for the samples of each save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncckpt.planning.contributions import Contribution
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.state_dict import Flattened


class Samples(NamedTuple):
    """Digests of windows of replicas at one save: names, one byte each that says whether it is split, 8 bytes each."""

    names: list[str]
    split: bytes
    digests: bytes

    def encode(self) -> bytes:
        """Return msgpack {"names", "split", "digests"}; b"" without any."""
        raise NotImplementedError


def digests_for(flat: Flattened, positions: Sequence[int]) -> bytes:
    """Return 8 bytes for each of the tensors at `positions` of `contribution_of(flat).tensors`.

    Blocks for reading those tensors; several threads share large ones.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    raise NotImplementedError


def news_of(plan: SavePlan, flat: Flattened, *, compare: bool = True) -> Contribution:
    """Return the contribution that goes with a save whose plan has news, with digests of what is new.

    It reads these tensors whole, so a trainer sends it with the first save of a structure, and again only
    when the change did not come.

    Args:
        plan, flat: As `PlanCache.take` gave them.
        compare: False leaves the digests out (`replicated="assume"`).

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    raise NotImplementedError


def sample_digests(plan: SavePlan, flat: Flattened, sequence: int) -> Samples:
    """Digest the windows that every rank compares at save `sequence`.

    Args:
        plan: With its agreement; without one there is nothing to compare.
        flat: The state, as `PlanCache.take` gave it with `plan`; not changed since.
        sequence: Of the save id.

    Raises:
        RuntimeError: From torch, when a tensor cannot be read.
    """
    raise NotImplementedError
