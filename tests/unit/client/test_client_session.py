"""When a session gives its worker up, and when it must not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.client.connection import Connection
from asyncckpt.client.session import DIED, Session, hello_builder
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.identity import start_ticks, watch
from tests.leak_guard import open_fds

SAVE_ID = "000001-00000000-aaaaaaaaaaaa"


class Sent:
    """Stands for the dealer: keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list[messages.Message] = []

    def send(self, frames: list[bytes]) -> None:
        self.messages.append(codec.decode(frames, messages.REQUESTS))


@pytest.fixture
def session() -> Iterator[Session]:
    one = Session(
        "ipc:///nowhere/w.sock",
        hello=hello_builder(0, 1, "0"),
        worker_timeout_s=3.0,
        pending=lambda: [],
        on_saves=lambda _: None,
        on_lost=lambda _: None,
    )
    one._welcome.set_result(messages.Welcome(id=0, package="0", pid=1, pid_start=1, instance="0" * 16, heartbeat_s=1.0))
    yield one
    os.close(one._wake)


class Queue:
    """Stands for the dealer: messages arrive at each turn; every other call is noted."""

    def __init__(self, turn: Any, done: Any) -> None:
        self.turn, self.done = turn, done
        self.received: list[list[bytes]] = []
        self.seen: list[str] = []

    def wait(self, *_: Any) -> set[int]:
        self.received += self.turn()
        return set()

    def receive(self, *_: Any) -> list[bytes] | None:
        if not self.received:
            self.done()
            return None
        return self.received.pop(0)

    def send(self, frames: list[bytes]) -> None:
        self.seen.append(codec.decode(frames, messages.REQUESTS).name)


def test_a_session_without_a_thread_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    os.chmod(tmp_path, 0o700)
    one = Session(
        f"ipc://{tmp_path}/w.sock",
        hello=hello_builder(0, 1, "0"),
        worker_timeout_s=3.0,
        pending=lambda: [],
        on_saves=lambda _: None,
        on_lost=lambda _: None,
    )
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(WorkerUnavailableError, match="can't start new thread") as caught:
        one.open(time.monotonic() + 60.0, None)
    assert caught.value.detail == "thread"


def test_a_session_whose_thread_outlasts_its_close_leaves_no_descriptor(tmp_path: Path) -> None:
    goes_on, hello = threading.Event(), hello_builder(0, 1, "0")

    def held(number: int, name: str) -> messages.Hello:
        assert goes_on.wait(60)
        return hello(number, name)

    os.chmod(tmp_path, 0o700)
    before = open_fds()
    one = Session(
        f"ipc://{tmp_path}/w.sock",
        hello=held,
        worker_timeout_s=3.0,
        pending=lambda: [],
        on_saves=lambda _: None,
        on_lost=lambda _: None,
    )
    one.thread.start()
    one.close(0.0)
    assert one.thread.is_alive()
    goes_on.set()
    one.thread.join(60)
    assert not one.thread.is_alive() and open_fds() <= before


def test_a_connection_that_gets_no_thread_to_begin_with_is_made_by_the_first_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    connection = Connection(
        "ipc:///nowhere/w.sock",
        named=True,
        config=CheckpointerConfig(),
        hello_for=lambda replaces: hello_builder(0, 1, "0"),
        pending=lambda: [],
        on_saves=lambda _: None,
        on_open=lambda _: None,
        on_lost=lambda session, error: None,
    )
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        connection.connect_soon()
    assert connection.close(1.0)


def test_a_session_has_ended_with_its_worker_s_process_whatever_its_thread_does(session: Session) -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        session._watch = watch(worker.pid, start_ticks(worker.pid) or 0)
        assert session.error is None
        worker.kill()
    assert session.error is not None and session.error.detail == DIED
    session._watch.close()  # type: ignore[union-attr]


def test_answer_of_one_callback_leaves_before_the_next_callback_runs() -> None:
    """Commit hooks run there, for as long as they like, and the worker waits for what each of them says."""
    saves = codec.encode(messages.Saves(id=0, saves=(), run="", outcomes=()))
    welcome = messages.Welcome(
        id=0, package="0", pid=os.getpid(), pid_start=start_ticks(os.getpid()) or 0, instance="0" * 16, heartbeat_s=1.0
    )

    def turn() -> list[list[bytes]]:
        turns.append(1)
        return [codec.encode(welcome)] if len(turns) == 1 else [saves, saves]

    def hook(_: messages.Saves) -> None:
        socket.seen.append("hook")
        one.request(lambda n: messages.Consent(id=n, save_id=SAVE_ID, granted=True, reason=""), 60.0)

    def done() -> None:
        one._stopping = len(turns) > 1

    turns: list[int] = []
    one = Session(
        "ipc:///nowhere/w.sock",
        hello=hello_builder(0, 1, "0"),
        worker_timeout_s=3.0,
        pending=lambda: [],
        on_saves=hook,
        on_lost=lambda _: None,
    )
    socket = Queue(turn, done)
    one._loop(socket)  # type: ignore[arg-type]
    assert [s for s in socket.seen if s in ("hook", "consent")] == ["hook", "consent"] * 2
    os.close(one._wake)
    assert one._watch is not None
    one._watch.close()


def test_a_silent_worker_is_given_up(session: Session) -> None:
    now = time.monotonic()
    session._silent_since, session._looped_at = now - 100, now
    with pytest.raises(WorkerUnavailableError, match="has not answered for 3 s"):
        session._send_heartbeat(Sent())  # type: ignore[arg-type]


def test_a_thread_that_was_late_itself_asks_again_before_it_judges(session: Session) -> None:
    now = time.monotonic()
    session._silent_since, session._looped_at = now - 100, now - 100  # stopped in the middle of a turn
    session._next_heartbeat = now + 100
    socket: Any = Sent()
    session._send_heartbeat(socket)
    assert [type(m) for m in socket.messages] == [messages.Heartbeat]
    session._looped_at = time.monotonic()
    session._send_heartbeat(socket)  # and gives the worker the whole time to answer that
    assert session._silent_since is not None and session._silent_since >= now
