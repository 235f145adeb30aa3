"""Which attempt of a job this process belongs to, so that ranks do not read what a dead attempt has written.

torchrun's store outlives the ranks that it restarts. Nothing that torchrun tells its ranks names the attempt: each
agent counts the restarts of its own ranks only, so the counts differ between nodes, and a restart after a change of
membership raises none. So rank 0 names it: it publishes a token, and counts until all other ranks have it. Another rank
takes the token once it has seen the count change, since only a living process counts. All keys of an attempt begin with
its token.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.config import RankInfo

BEAT_S = 0.02
"""Seconds between two counts of rank 0. Chosen: a rank waits for one of them, once."""

_TOKEN = "asyncckpt/attempt"
"""Key of the token of the newest attempt."""

_log = logging.getLogger("asyncckpt")
_lock = threading.Lock()
_attempts: weakref.WeakKeyDictionary[Any, Attempt] = weakref.WeakKeyDictionary()
"""By store of a process group. It is another one if the group is destroyed and made again."""


def attempt_of(rank: RankInfo, store: Any) -> Attempt:
    """Return the attempt that this process belongs to. On rank 0, this begins it.

    Args:
        rank: Rank of this process in the process group.
        store: The group's store, which outlives its ranks.

    Raises:
        RuntimeError: The store is gone.
    """
    with _lock:
        if store not in _attempts:
            _attempts[store] = _AttemptOfRank0(rank, store) if rank.rank == 0 else Attempt()
        found = _attempts[store]
    if isinstance(found, _AttemptOfRank0):
        found.count_on(store)
    return found


class Attempt:
    """An attempt of the job, for ranks other than 0."""

    def __init__(self) -> None:
        self._token, self._taking = "", threading.Lock()

    def token(self, store: Any, wait: Callable[[], None]) -> str:
        """Return the token; wait for rank 0 if it is not known that the process that published it lives.

        Args:
            store: As for `attempt_of`.
            wait: Sleeps for a moment; raises an error if there is no time left.

        Raises:
            RuntimeError: The store is gone.
            Exception: From `wait`: rank 0 has not called a function of this package that exchanges data.
        """
        seen = ("", -1)
        while (newest := _read(store)) != self._token or not newest:
            now = (newest, store.add(_counter(newest), 0) if newest else -1)
            if newest and now[0] == seen[0] and now[1] != seen[1]:
                self._take(newest, store)
                break
            seen = now
            wait()
        return self._token

    def _take(self, token: str, store: Any) -> None:
        with self._taking:  # two threads may do so, and rank 0 counts ranks
            if self._token != token:
                self._token = token
                store.add(_n_joined(token), 1)


class _AttemptOfRank0(Attempt):
    """An attempt of the job, for rank 0, which names it."""

    def __init__(self, rank: RankInfo, store: Any) -> None:
        super().__init__()
        self._n_others = rank.world_size - 1
        self._token = secrets.token_hex(8)
        self._ends = threading.Event()
        self._thread: BackgroundThread | None = None
        store.set(_TOKEN, self._token)

    def token(self, store: Any, wait: Callable[[], None]) -> str:
        return self._token

    def count_on(self, store: Any) -> None:
        """Start the thread that counts, once. If none can be started, that is logged, and the next call tries again."""
        with self._taking:
            if self._thread is None:
                thread = BackgroundThread(self._count, "asyncckpt-attempt", (weakref.ref(store),), end=self._ends.set)
                try:
                    thread.start()
                except RuntimeError as error:  # can't start new thread
                    _log.warning("the other ranks cannot find this one for now: %s", error)
                else:
                    self._thread = thread

    def _count(self, find: Callable[[], Any]) -> None:
        """Count until all other ranks have the token, or the process group is gone."""
        while (store := find()) is not None and not self._ends.is_set():
            try:
                store.add(_counter(self._token), 1)
                if store.add(_n_joined(self._token), 0) >= self._n_others:
                    return
            except RuntimeError:  # the store is gone, and so are the other ranks
                return
            del store
            self._ends.wait(BEAT_S)


def _read(store: Any) -> str:
    return bytes(store.get(_TOKEN)).decode() if store.check([_TOKEN]) else ""


def _counter(token: str) -> str:
    return f"asyncckpt/{token}/count"


def _n_joined(token: str) -> str:
    return f"asyncckpt/{token}/joined"
