"""A noticeboard: ranks post small values by name, and read those of other ranks, without a collective.

The values are in the store of the default process group, or in the worker if there is no process group, as in a first
save (`distributed.meetings`). No call waits for another rank.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from asyncckpt.client.worker_board import BoardExchange
from asyncckpt.config import RankInfo
from asyncckpt.distributed.meetings import POLL_S, Exchange
from asyncckpt.distributed.process_group import GroupExchange
from asyncckpt.errors import AsyncCkptError, SaveFailedError

RANK_0_TIMEOUT_S = 2.0
"""How long one look for the noticeboard waits for rank 0. Less than a poller may take to end (`CLOSE_TIMEOUT_S`)."""


class Noticeboard(ABC):
    """Values that ranks post by name. Each name is used once. Used by one thread at a time.

    Each method raises an AsyncCkptError if the store or the worker cannot be reached, and blocks for its answer.
    """

    @abstractmethod
    def post(self, name: str, data: bytes) -> None:
        """Post this rank's value under `name`. Idempotent."""

    @abstractmethod
    def from_rank_0(self, name: str) -> bytes | None:
        """Return the value of rank 0; None: it has posted none yet. Only for names under which no other rank posts."""

    @abstractmethod
    def has_any(self, name: str) -> bool:
        """Return whether any rank has posted under `name`."""

    @abstractmethod
    def is_complete(self, name: str) -> bool:
        """Return whether all ranks have posted under `name`, so that `value_of` may be called."""

    @abstractmethod
    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not posted under `name`."""

    @abstractmethod
    def value_of(self, name: str, rank: int) -> bytes:
        """Return the value of `rank`. All ranks must have posted."""


class StoreNoticeboard(Noticeboard):
    """A noticeboard in the store of the default process group.

    Args:
        rank: Rank of this process, and the number of ranks.
        store: A `torch.distributed.PrefixStore` of this noticeboard's own.
    """

    def __init__(self, rank: RankInfo, store: Any) -> None:
        self._rank, self._store = rank, store
        self._posted: set[str] = set()

    def post(self, name: str, data: bytes) -> None:
        if name in self._posted:  # else this rank would be counted twice
            return
        self._posted.add(name)

        def put() -> None:
            # IMPORTANT: add to the counter last: a rank that reads the counter must find the values.
            self._store.set(f"{name}/{self._rank.rank}", b"=" + data)
            if self._store.add(f"{name}/count", 1) == self._rank.world_size:
                self._store.set(f"{name}/all", b"1")

        _reach(put)

    def from_rank_0(self, name: str) -> bytes | None:
        there = _reach(lambda: self._store.check([f"{name}/0"]))
        return self.value_of(name, 0) if there else None

    def has_any(self, name: str) -> bool:
        return bool(_reach(lambda: self._store.check([f"{name}/count"])))

    def is_complete(self, name: str) -> bool:
        return bool(_reach(lambda: self._store.check([f"{name}/all"])))

    def missing(self, name: str) -> list[int]:
        def look() -> list[int]:
            return [r for r in range(self._rank.world_size) if not self._store.check([f"{name}/{r}"])]

        found: list[int] = _reach(look)
        return found

    def value_of(self, name: str, rank: int) -> bytes:
        return bytes(_reach(lambda: self._store.get(f"{name}/{rank}")))[1:]


class WorkerNoticeboard(Noticeboard):
    """A noticeboard that the worker keeps, which all ranks share.

    Args:
        rank: Rank of this process, and the number of ranks.
        exchange: Exchange with that worker.
        prefix: Prefix of all names, of this noticeboard's own.
    """

    def __init__(self, rank: RankInfo, exchange: BoardExchange, prefix: str) -> None:
        self._rank, self._exchange, self._prefix = rank, exchange, prefix
        self._posted_for = ""

    def post(self, name: str, data: bytes) -> None:
        self._exchange.post(self._prefix + name, b"=" + data)

    def from_rank_0(self, name: str) -> bytes | None:
        if self._posted_for != name:  # the worker returns values only after all ranks have posted
            self.post(name, b"")
            self._posted_for = name
        return self.value_of(name, 0) if self.is_complete(name) else None

    def has_any(self, name: str) -> bool:
        return len(self.missing(name)) < self._rank.world_size

    def is_complete(self, name: str) -> bool:
        return not self.missing(name)

    def missing(self, name: str) -> list[int]:
        return self._exchange.missing(self._prefix + name)

    def value_of(self, name: str, rank: int) -> bytes:
        return self._exchange.take(self._prefix + name, rank)[1:]


def noticeboard_of(rank: RankInfo, exchange: Exchange, name: str) -> Noticeboard:
    """Return a noticeboard for the ranks of an exchange.

    Args:
        rank: Rank of this process, and the number of ranks.
        exchange: The exchange through which the ranks communicate.
        name: Name of the noticeboard, the same on all ranks, and used once.

    Raises:
        SaveFailedError: Code "several_machines": the ranks are on several nodes and have no process group. Code
            "exchange": rank 0 has not come, or the store cannot be reached.
        TypeError: `exchange` is of an unknown class.

    Blocks: up to `RANK_0_TIMEOUT_S`, until rank 0 has come.
    """
    if isinstance(exchange, GroupExchange):
        deadline = time.monotonic() + RANK_0_TIMEOUT_S
        return StoreNoticeboard(rank, _reach(lambda: exchange.part(name, lambda: _wait_for_rank_0(deadline))))
    if isinstance(exchange, BoardExchange):
        exchange.refuse_several_nodes(rank.world_size, exchange.environ)
        return WorkerNoticeboard(rank, exchange, f"{name}/")
    raise TypeError(f"{type(exchange).__name__} cannot keep a noticeboard")


def _wait_for_rank_0(deadline: float) -> None:
    if time.monotonic() >= deadline:
        text = "rank 0 has no checkpointer, manager or training of asyncckpt yet"
        raise SaveFailedError(text, code="exchange", rank=0, detail=text)
    time.sleep(POLL_S)


def _reach(ask: Any) -> Any:
    try:
        return ask()
    except AsyncCkptError:
        raise
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        raise SaveFailedError(
            f"the process group's store cannot be reached: {error}", code="exchange", detail=str(error)[:1000]
        ) from error
