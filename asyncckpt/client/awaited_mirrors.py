"""The copies to mirrors that this process waits for, and the completion of their futures.

With every heartbeat the worker is asked for those that are not done. A worker that does not know of a copy begins it,
so the next worker after a death goes on with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial

from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.client.save_outcomes import Send
from asyncckpt.errors import AsyncCkptError, from_wire
from asyncckpt.protocol import messages
from asyncckpt.protocol.fields import DONE, FAILED
from asyncckpt.save_handle import SaveReport

ASK_EVERY_S = 0.5
MAX_ASKED = 16
"""Copies that are asked for at a time."""

MAX_AWAITED = 1024
"""Copies that are waited for. Above it, the oldest futures fail; the worker goes on with their copies."""

_log = logging.getLogger("asyncckpt.client")


class AwaitedMirrors:
    """The table of copies that are not done. Thread-safe; futures complete outside the lock.

    Args:
        send: Sends a request.
        lock: The lock of the client's tables.
    """

    def __init__(self, send: Send, lock: threading.RLock) -> None:
        self._send, self._lock = send, lock
        self._awaited: OrderedDict[str, StagedSnapshot] = OrderedDict()
        self._asked: set[str] = set()
        self._ask_at = 0.0
        self._closed_by: AsyncCkptError | None = None

    def __bool__(self) -> bool:
        """Whether a copy is waited for."""
        return bool(self._awaited)

    def add(self, snapshot: StagedSnapshot) -> None:
        """Wait for the copy of a save that was committed, if it has a mirror."""
        if snapshot.mirrored is None:
            return
        dropped = []
        with self._lock:
            if self._closed_by is not None:
                return _fail(snapshot, self._closed_by)
            self._awaited[str(snapshot.save_id)] = snapshot
            while len(self._awaited) > MAX_AWAITED:
                dropped.append(self._awaited.pop(min(self._awaited)))  # the oldest: save IDs sort as text
        for old in dropped:
            _fail(old, AsyncCkptError(f"more than {MAX_AWAITED} checkpoints wait for their mirrors"))

    def ask(self) -> None:
        """Ask the worker for the next copies in turn, at most every `ASK_EVERY_S`. Does not wait."""
        now = time.monotonic()
        with self._lock:
            if now < self._ask_at:
                return
            self._ask_at = now + ASK_EVERY_S
            wanted = [(name, one) for name, one in self._awaited.items() if name not in self._asked][:MAX_ASKED]
            self._asked |= {name for name, _ in wanted}
            for name, _ in wanted:
                self._awaited.move_to_end(name)  # the next ones have their turn, too
        for name, snapshot in wanted:
            asked = self._send(partial(_mirror, name, snapshot.path, snapshot.mirror))
            if asked is None:
                self._asked.discard(name)
            else:
                asked.add_done_callback(partial(self._on_answer, name))

    def _on_answer(self, name: str, done: Future[messages.Message]) -> None:
        self._asked.discard(name)
        reply = done.result() if done.exception() is None else None
        if not isinstance(reply, messages.Mirrored) or reply.phase not in (DONE, FAILED):
            return  # it is asked for again
        with self._lock:
            snapshot = self._awaited.pop(name, None)
        if snapshot is None or snapshot.mirrored is None:
            return
        if reply.phase == FAILED:
            error = from_wire(reply.error)
            _log.warning("save of step %d to %s: %s", snapshot.step, snapshot.path, error)
            _fail(snapshot, error)
        elif not snapshot.mirrored.done():
            facts = dict(reply.report)
            seconds = {"mirror": float(facts.pop("seconds_mirror", 0.0))}
            seconds["total"] = time.perf_counter() - snapshot.began
            nbytes = int(facts.pop("nbytes", snapshot.nbytes))
            snapshot.mirrored.set_result(
                SaveReport(save_id=str(snapshot.save_id), nbytes=nbytes, seconds=seconds, details=facts)
            )

    def close(self, error: AsyncCkptError) -> None:
        """Fail the futures that are left, and those that come later."""
        self._closed_by = error
        self.fail_all(error)

    def fail_all(self, error: AsyncCkptError) -> None:
        """Fail the futures that are left: nobody can be asked."""
        with self._lock:
            left = list(self._awaited.values())
            self._awaited.clear()
        for snapshot in left:
            _fail(snapshot, error)


def _fail(snapshot: StagedSnapshot, error: AsyncCkptError) -> None:
    if snapshot.mirrored is not None and not snapshot.mirrored.done():
        snapshot.mirrored.set_exception(error)


def _mirror(save_id: str, path: str, mirror: str, number: int) -> messages.Message:
    return messages.Mirror(id=number, save_id=save_id, path=path, mirror=mirror)
