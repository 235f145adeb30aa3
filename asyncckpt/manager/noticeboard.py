"""Where the ranks of a manager lay down a few bytes for one another and look for the others', without any collective.

On the store of the default process group, or on a board of the worker where there is none: as in a first save
(`distributed.rendezvous`). Nothing here waits for another rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from asyncckpt.client.worker_board import BoardExchange
from asyncckpt.config import RankInfo
from asyncckpt.distributed.process_group import GroupExchange
from asyncckpt.distributed.rendezvous import Exchange
from asyncckpt.errors import AsyncCkptError, SaveFailedError


class Noticeboard(ABC):
    """See the module. Used by one thread at a time; each name is used once.

    Every method raises an AsyncCkptError when the store or the worker cannot be reached, and blocks for its answer.
    """

    @abstractmethod
    def post(self, name: str, data: bytes) -> None:
        """Lay this rank's bytes down; the same again is fine."""

    @abstractmethod
    def heard(self, name: str) -> bytes | None:
        """Return what rank 0 has posted; None: nothing yet. The other ranks do not post under such a name."""

    @abstractmethod
    def anybody(self, name: str) -> bool:
        """Whether any rank has posted."""

    @abstractmethod
    def is_complete(self, name: str) -> bool:
        """Whether all ranks have posted: then `take` gives anybody's."""

    @abstractmethod
    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not posted."""

    @abstractmethod
    def take(self, name: str, rank: int) -> bytes:
        """Return what `rank` has posted; all ranks have."""


class StoreNoticeboard(Noticeboard):
    """On the store of the default process group.

    Args:
        rank: Of this process.
        store: A part of it that is this manager's own.
    """

    def __init__(self, rank: RankInfo, store: Any) -> None:
        self._rank, self._store = rank, store
        self._posted: set[str] = set()

    def post(self, name: str, data: bytes) -> None:
        if name in self._posted:  # it would be counted twice
            return
        self._posted.add(name)

        def put() -> None:
            # IMPORTANT: the counter last. Who finds a name counted finds its bytes.
            self._store.set(f"{name}/{self._rank.rank}", b"=" + data)
            if self._store.add(f"{name}/count", 1) == self._rank.world_size:
                self._store.set(f"{name}/all", b"1")

        _reach(put)

    def heard(self, name: str) -> bytes | None:
        there = _reach(lambda: self._store.check([f"{name}/0"]))
        return self.take(name, 0) if there else None

    def anybody(self, name: str) -> bool:
        return bool(_reach(lambda: self._store.check([f"{name}/count"])))

    def is_complete(self, name: str) -> bool:
        return bool(_reach(lambda: self._store.check([f"{name}/all"])))

    def missing(self, name: str) -> list[int]:
        def look() -> list[int]:
            return [r for r in range(self._rank.world_size) if not self._store.check([f"{name}/{r}"])]

        found: list[int] = _reach(look)
        return found

    def take(self, name: str, rank: int) -> bytes:
        return bytes(_reach(lambda: self._store.get(f"{name}/{rank}")))[1:]


class WorkerNoticeboard(Noticeboard):
    """On boards of the worker that all ranks have.

    Args:
        rank: Of this process.
        exchange: That leads there.
        prefix: Of all names: this manager's own.
    """

    def __init__(self, rank: RankInfo, exchange: BoardExchange, prefix: str) -> None:
        self._rank, self._exchange, self._prefix = rank, exchange, prefix
        self._heard_for = ""

    def post(self, name: str, data: bytes) -> None:
        self._exchange.post(self._prefix + name, b"=" + data)

    def heard(self, name: str) -> bytes | None:
        if self._heard_for != name:  # a board is read once all ranks are on it
            self.post(name, b"")
            self._heard_for = name
        return self.take(name, 0) if self.is_complete(name) else None

    def anybody(self, name: str) -> bool:
        return len(self.missing(name)) < self._rank.world_size

    def is_complete(self, name: str) -> bool:
        return not self.missing(name)

    def missing(self, name: str) -> list[int]:
        return self._exchange.missing(self._prefix + name)

    def take(self, name: str, rank: int) -> bytes:
        return self._exchange.take(self._prefix + name, rank)[1:]


def noticeboard_of(rank: RankInfo, exchange: Exchange, name: str) -> Noticeboard:
    """Return the noticeboard of some ranks.

    Args:
        rank: Of this process.
        exchange: Where they meet.
        name: Of the noticeboard, the same on all ranks, and used once.

    Raises:
        SaveFailedError: Code "several_machines": ranks of several nodes have no process group.
        TypeError: An exchange of somebody else.
    """
    if isinstance(exchange, GroupExchange):
        return StoreNoticeboard(rank, exchange.part(name))
    if isinstance(exchange, BoardExchange):
        exchange.refuse_several_nodes(rank.world_size, exchange.environ)
        return WorkerNoticeboard(rank, exchange, f"{name}/")
    raise TypeError(f"{type(exchange).__name__} has no place for notices")


def _reach(ask: Any) -> Any:
    try:
        return ask()
    except AsyncCkptError:
        raise
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        raise SaveFailedError(
            f"the process group's store is gone: {error}", code="exchange", detail=str(error)[:1000]
        ) from error
