"""The mark on what belongs to one rank: random number states, positions in the data."""

from __future__ import annotations

from typing import Any


class PerRank:
    """Marks a subtree of a state dict as belonging to the rank that saves it.

    It is stored for every rank and given back to the same rank number. One inside another means nothing more.

    Args:
        value: Anything that a state dict may hold. It may be replaced at any time.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
