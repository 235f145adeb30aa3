"""When a session gives its worker up, and when it must not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import codec, messages
from asyncckpt.session import Session, greeting


class Sent:
    """Stands for the socket: keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list[messages.Message] = []

    def send_multipart(self, frames: list[bytes], _: int) -> None:
        self.messages.append(codec.decode(frames, messages.REQUESTS))


@pytest.fixture
def session() -> Iterator[Session]:
    one = Session(
        "ipc:///nowhere/w.sock",
        hello=greeting(0, 1, "0"),
        worker_timeout_s=3.0,
        pending=lambda: [],
        on_saves=lambda _: None,
        on_lost=lambda _: None,
    )
    one._welcome.set_result(messages.Welcome(id=0, package="0", pid=1, pid_start=1, instance="0" * 16, heartbeat_s=1.0))
    yield one
    os.close(one._wake)


def test_a_silent_worker_is_given_up(session: Session) -> None:
    now = time.monotonic()
    session._silent_since, session._turned = now - 100, now
    with pytest.raises(WorkerUnavailableError, match="has not answered for 3 s"):
        session._beat(Sent())  # type: ignore[arg-type]


def test_a_thread_that_was_late_itself_asks_again_before_it_judges(session: Session) -> None:
    now = time.monotonic()
    session._silent_since, session._turned = now - 100, now - 100  # stopped in the middle of a turn
    session._next_heartbeat = now + 100
    socket: Any = Sent()
    session._beat(socket)
    assert [type(m) for m in socket.messages] == [messages.Heartbeat]
    session._turned = time.monotonic()
    session._beat(socket)  # and gives the worker the whole time to answer that
    assert session._silent_since is not None and session._silent_since >= now
