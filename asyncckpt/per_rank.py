"""PerRank: marks a part of a state dict that belongs to one rank, such as random number states and data positions."""

from __future__ import annotations

from typing import Any


class PerRank:
    """Marks a subtree of a state dict as belonging to the rank that saves it.

    It is stored for every rank, and loaded by the rank with the same number. Inside another `PerRank` it has no effect.

    Args:
        value: Any value that a state dict may hold. It may be replaced at any time.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
