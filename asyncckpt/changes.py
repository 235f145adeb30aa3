"""Fetches the changes of the run that the worker publishes, in the session's thread, without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgpack

from asyncckpt.coordination import Coordination
from asyncckpt.protocol import messages

_log = logging.getLogger("asyncckpt")

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id; None when there is no session."""


class Changes:
    """Follows the count of changes that every `Saves` message carries, and hands each change over once.

    Args:
        coordination: Receives the changes.
        send: Sends a request.
    """

    def __init__(self, coordination: Coordination, send: Send) -> None:
        self._coordination, self._send = coordination, send
        self._taken = 0
        self._fetching = False

    def seen(self, changes: int) -> None:
        """The worker has published so many changes of this run."""
        if changes > self._taken and not self._fetching and not self._coordination.alone:
            self._fetch(self._taken + 1, b"")

    def _fetch(self, number: int, data: bytes) -> None:
        board = f"change-{self._coordination.run_id}-{number}"
        asked = self._send(lambda n: messages.Fetch(id=n, board=board, rank=0, offset=len(data)))
        self._fetching = asked is not None
        if asked is not None:
            asked.add_done_callback(lambda done: self._fetched(number, data, done))

    def _fetched(self, number: int, data: bytes, done: Future[messages.Message]) -> None:
        self._fetching = False
        try:
            reply = done.result()
            assert isinstance(reply, messages.Fetched)
            data += reply.data
            if reply.data and len(data) < reply.total:
                return self._fetch(number, data)
            found = msgpack.unpackb(data, strict_map_key=False)
            self._coordination.take_change(int(found["effective"]), bytes(found["change"]))
            self._taken = number
        except Exception as error:  # it is asked for again at the next message
            _log.warning("change %d of this run was not understood: %r", number, error)
        return None
