"""What a client tells and asks its worker about the run of several ranks that it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import msgpack

from asyncckpt.config import RankInfo
from asyncckpt.links import Links
from asyncckpt.protocol import messages

NOT_AGREED = "no agreement: "
"""How the reason begins of a rank that withdraws because it has not agreed with the others, who may think it has."""

_log = logging.getLogger("asyncckpt")

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id; None when there is no session."""


class Run(Protocol):
    """The run of this checkpointer's ranks; `coordination.Coordination` is one, which needs torch."""

    rank: RankInfo
    run_id: str
    agreement: Any
    links: Links

    @property
    def alone(self) -> bool:
        """Whether there is but one rank."""

    @property
    def knows_run(self) -> bool:
        """Whether `run_id` is that of all ranks."""

    def forget(self, since: int | None = None) -> None:
        """Agree anew in the next save: another rank has not agreed, in the save `since`."""

    def refuse(self, sequence: int, reason: str) -> None:
        """Tell ranks that wait for this one in their first save that it does not come."""

    def start_over(self) -> None:
        """Forget all changes: there is another worker."""

    def expect_changes(self, leader: str, number: int) -> None:
        """The worker `leader` has published so many changes of the run; they are being fetched."""

    def take_change(self, leader: str, number: int, effective: int, raw: bytes) -> None:
        """Keep a change of the run, the worker `leader`'s `number`-th, for the saves from sequence `effective` on."""


class Changes:
    """Follows the count of changes that every `Saves` message carries, and hands each change over once.

    Fetches them in the session's thread, without waiting.

    Args:
        run: Receives the changes.
        send: Sends a request.
    """

    def __init__(self, run: Run, send: Send) -> None:
        self._run, self._send = run, send
        self._taken: dict[str, int] = {}
        self._fetching = False
        self._session = ""

    def connected(self, session: str, instance: str) -> bool:
        """There is a session, perhaps with another worker; says whether it is new."""
        if self._run.alone or session == self._session:
            return False
        if not self._run.links.follows:
            self._decides(instance)
        self._session = session
        return True

    def _decides(self, instance: str) -> None:
        """This worker decides in the run; each counts its changes from one."""
        links = self._run.links
        if links.leader not in ("", instance):
            self._taken.clear()
            self._run.start_over()
        links.leader = instance

    def seen(self, changes: int, leader: str) -> None:
        """The worker `leader` has published so many changes of this run."""
        links = self._run.links
        if self._run.alone or not leader:
            return
        if not links.follows and links.leader not in ("", leader):
            return  # another worker of ours, which the training thread has not met yet: it may be planning a save
        self._decides(leader)
        taken = self._taken.get(leader, 0)
        self._run.expect_changes(leader, changes)
        if changes > taken and not self._fetching:
            self._fetch(leader, taken + 1, b"")

    def _fetch(self, leader: str, number: int, data: bytes) -> None:
        board = f"change-{self._run.run_id}-{number}"
        asked = self._send(lambda n: messages.Fetch(id=n, board=board, rank=0, offset=len(data)))
        self._fetching = asked is not None
        if asked is not None:
            asked.add_done_callback(lambda done: self._fetched(leader, number, data, done))

    def _fetched(self, leader: str, number: int, data: bytes, done: Future[messages.Message]) -> None:
        self._fetching = False
        if leader != self._run.links.leader:  # the board may have been another's
            return None
        try:
            reply = done.result()
            assert isinstance(reply, messages.Fetched)
            data += reply.data
            if reply.data and len(data) < reply.total:
                return self._fetch(leader, number, data)
            found = msgpack.unpackb(data, strict_map_key=False)
            self._run.take_change(leader, number, int(found["effective"]), bytes(found["change"]))
            self._taken[leader] = number
        except Exception as error:  # it is asked for again at the next message
            _log.warning("change %d of this run was not understood: %r", number, error)
        return None
