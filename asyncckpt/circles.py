"""Circles: some of the ranks of a meeting, who pass bytes on to one another; and how they are connected.

Part of the door to torch.distributed: only `process_group` uses it. gloo waits for all ranks of a group in its own
code, as long as the group's timeout is, and does not notice that one of them has ended. So that waiting is done here,
in the store that gloo is given. Meanwhile the meeting's own group, which ends with any of its processes, goes round:
in each round every rank says whether it is still connecting, has done that, or has failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from asyncckpt.exchange import POLL_S
from asyncckpt.failpoints import reach

MIN_TIMEOUT_S = 1.0
"""gloo is given this much although the ranks came at the last moment."""

CONNECT_TIMEOUT_S = 60.0
"""For a connection to a rank whose address is known: its kernel answers, however busy it is."""

_BUSY, _DONE, _FAILED = range(3)


class RoundLostError(Exception):
    """A round has broken down: a rank's process has ended, or it is too late."""


class _OtherFailedError(Exception):
    """Another rank has failed, and will say how."""


class Circle:
    """Some of the ranks.

    Args:
        group: Of them.
        store: What the group was made with, for as long as it lives.
        deadline: `time.monotonic()` after which every call fails.
    """

    def __init__(self, group: Any, store: object, deadline: float) -> None:
        self._group, self._store, self._deadline = group, store, deadline

    def broadcast(self, message: torch.Tensor, root: int) -> None:
        """Send `message` from the `root`-th of the circle to all others, who get it in theirs, of the same length.

        Raises:
            RuntimeError: One of them is gone, or too late.

        Blocks: until this one's part is done, at most until the deadline.
        """
        options: Any = dist.distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=max(self._deadline - time.monotonic(), MIN_TIMEOUT_S))
        self._group.broadcast([message], options).wait()

    def close(self) -> None:
        """End its connections: whoever still waits for this rank fails. May be called twice."""
        self._group = None
        self._store = None


class Rounds:
    """See the module.

    Args:
        group: Of all ranks.
        world_size: How many they are.
        deadline: `time.monotonic()` after which a round fails.
    """

    def __init__(self, group: Any, world_size: int, deadline: float) -> None:
        self._group, self._world_size, self._deadline = group, world_size, deadline
        self._work: Any = None
        self._said: list[torch.Tensor] = []
        self._next = time.monotonic() + POLL_S

    def look(self) -> None:
        """See how the others are, while this rank is connecting. Does not wait.

        Raises:
            RoundLostError: A process has ended.
            _OtherFailedError: A rank has failed.
        """
        if self._work is None and time.monotonic() >= self._next:
            self._begin(_BUSY)
        if self._work is not None and self._work.is_completed() and _FAILED in self._finish():
            raise _OtherFailedError

    def end(self, how: int) -> bool:
        """Say how this rank has ended, until all have; returns whether all are connected.

        Raises:
            RoundLostError: A process has ended, or it is too late.

        Blocks: for the slowest rank, at most until the deadline.
        """
        if self._work is not None and _FAILED in self._finish():
            return False
        while True:
            self._begin(how)
            said = self._finish()
            if _FAILED in said or _BUSY not in said:
                return _FAILED not in said
            time.sleep(POLL_S)

    def drop(self) -> None:
        """Hold nothing of the group any more: its connections end with it. May be called twice."""
        self._group = self._work = None

    def _begin(self, how: int) -> None:
        options: Any = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.timeout = timedelta(seconds=max(self._deadline - time.monotonic(), MIN_TIMEOUT_S))
        self._said = [torch.zeros(1, dtype=torch.uint8, device="cpu") for _ in range(self._world_size)]
        mine = torch.tensor([how], dtype=torch.uint8, device="cpu")
        try:
            self._work = self._group.allgather([self._said], [mine], options)
        except RuntimeError as error:
            raise RoundLostError(str(error)) from error

    def _finish(self) -> list[int]:
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise RoundLostError(str(error)) from error
        self._next = time.monotonic() + POLL_S
        return [int(one) for one in self._said]


class _PatientStore(Store):
    """A store whose waiting is done here; gloo calls it."""

    def __init__(self, store: Any, rounds: Rounds, deadline: float) -> None:
        super().__init__()
        self._store, self._deadline = store, deadline
        self.rounds: Rounds | None = rounds

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self._store.check(keys):
            if time.monotonic() >= self._deadline:
                raise RuntimeError("the other ranks have not begun to connect in time")
            if self.rounds is not None:
                self.rounds.look()
            time.sleep(POLL_S)


def connect_circles(
    store: Any, rank: int, wanted: Sequence[Sequence[int]], rounds: Rounds, deadline: float, *, one_machine: bool
) -> list[Circle]:
    """Connect this rank's circles; all ranks of the meeting come here, also those that are in none.

    Args:
        store: For these ranks alone.
        rank: This one.
        wanted: The ranks of each circle, in one order on all ranks.
        rounds: Of all ranks, of which this is the one use.
        deadline: `time.monotonic()` by which all of it must be done, and what is done in the circles.
        one_machine: As of `gloo_group`.

    Returns:
        The circles; none where another rank has failed, which will say how.

    Raises:
        RoundLostError: A rank's process has ended, or it is too late.
        RuntimeError, OSError: This rank cannot be connected. The others know that it has failed.

    Blocks: for the slowest rank, at most until the deadline.
    """
    made: list[Circle] = []
    is_connected = False
    try:
        for ranks in wanted:
            reach("load: connecting")
            part = PrefixStore("circle/" + "-".join(map(str, ranks)), store)
            patient = _PatientStore(part, rounds, deadline)
            until = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
            try:
                group = gloo_group(patient, ranks.index(rank), len(ranks), until, one_machine)
            finally:
                patient.rounds = None
            made.append(Circle(group, patient, deadline))
        is_connected = rounds.end(_DONE)
    except _OtherFailedError:
        pass
    except RoundLostError:
        raise
    except Exception:
        rounds.end(_FAILED)  # raises where a rank was lost: that is why, then
        raise
    finally:
        rounds.drop()
        if not is_connected:
            for circle in made:
                circle.close()
    return made if is_connected else []


def gloo_group(store: Any, rank: int, world_size: int, deadline: float, one_machine: bool) -> Any:
    """Return a gloo group that belongs to nobody else.

    Args:
        store, rank, world_size: Of the group.
        deadline: `time.monotonic()` by which it must be there.
        one_machine: All its ranks are on this one.

    Raises:
        RuntimeError: It has not come about.

    Blocks: until all ranks have come.
    """
    gloo: Any = dist.ProcessGroupGloo  # its options are not in torch's type stubs
    timeout = timedelta(seconds=max(deadline - time.monotonic(), MIN_TIMEOUT_S))
    if not one_machine:  # as the user's own groups: GLOO_SOCKET_IFNAME, else the host's name
        return gloo(store, rank, world_size, timeout)
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, world_size, options)
