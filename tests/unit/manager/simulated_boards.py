"""The notices that ranks leave for each other, in memory."""

from __future__ import annotations

from asyncckpt.manager.noticeboard import Noticeboard


class Wall:
    """What the boards of several ranks hang on."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.posted: dict[str, dict[int, bytes]] = {}


class SimulatedBoard(Noticeboard):
    """One rank's view of a wall."""

    def __init__(self, wall: Wall, rank: int) -> None:
        self._wall, self._rank = wall, rank

    def _on(self, name: str) -> dict[int, bytes]:
        return self._wall.posted.setdefault(name, {})

    def post(self, name: str, data: bytes) -> None:
        assert self._on(name).setdefault(self._rank, data) == data, "another thing was said before"

    def from_rank_0(self, name: str) -> bytes | None:
        return self._on(name).get(0)

    def has_any(self, name: str) -> bool:
        return bool(self._on(name))

    def is_complete(self, name: str) -> bool:
        return not self.missing(name)

    def missing(self, name: str) -> list[int]:
        return [rank for rank in range(self._wall.world_size) if rank not in self._on(name)]

    def value_of(self, name: str, rank: int) -> bytes:
        return self._on(name)[rank]
