"""A session against a worker that drops, doubles, refuses, talks nonsense, or says nothing."""

from __future__ import annotations

import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from real_worker import DEADLINE_S, wait_until

from asyncckpt.client import session
from asyncckpt.client.session import Session, hello_builder
from asyncckpt.errors import InsufficientMemoryError, ProtocolError, WorkerUnavailableError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.codec import decode, encode
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import start_ticks


class FakeWorker:
    """A ROUTER in a thread; `answer` says what frames follow a message. It is this process: its pidfd never ends."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.heard: list[m.Message] = []
        self.answer: Callable[[m.Message], list[list[bytes]]] = self.usual
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def usual(self, message: Any) -> list[list[bytes]]:
        """Answer as a worker does."""
        if isinstance(message, m.Hello):
            pid = os.getpid()
            welcome = m.Welcome(
                id=message.id,
                package="x",
                pid=pid,
                pid_start=start_ticks(pid) or 0,
                instance="0" * 16,
                heartbeat_s=0.05,
            )
            return [encode(welcome)]
        if isinstance(message, m.Heartbeat):
            return [encode(m.Saves(id=message.id, run="", outcomes=(), saves=()))]
        return [encode(m.Ok(id=message.id))]

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(10):
                peer, *frames = self._socket.recv_multipart()
                message = decode(frames, m.REQUESTS)
                self.heard.append(message)
                for reply in self.answer(message):
                    self._socket.send_multipart([peer, *reply])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()
        pathlib.Path(socket_path(self.endpoint)).unlink(missing_ok=True)


class Trainer:
    """A session and what it was told."""

    def __init__(self, endpoint: str, timeout_s: float = DEADLINE_S) -> None:
        self.rows: list[Any] = []
        self.lost: list[WorkerUnavailableError] = []
        self.session = Session(
            endpoint,
            hello=hello_builder(0, 1, "x"),
            worker_timeout_s=timeout_s,
            pending=lambda: [],
            on_saves=lambda reply: self.rows.extend(reply.saves),
            on_lost=self.lost.append,
        )

    def open(self) -> Trainer:
        self.session.open(time.monotonic() + DEADLINE_S, None)
        return self


@pytest.fixture
def fake(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorker]:
    monkeypatch.setattr(session, "RESEND_S", 0.02)
    found = FakeWorker(endpoint)
    yield found
    found.close()


@pytest.fixture
def trainer(fake: FakeWorker) -> Iterator[Trainer]:
    found = Trainer(fake.endpoint).open()
    yield found
    found.session.close()


def release(number: int) -> m.Message:
    return m.Release(id=number, slot=1)


def of_kind(fake: FakeWorker, kind: type[m.Message]) -> list[Any]:
    return [message for message in fake.heard if isinstance(message, kind)]


def test_a_request_is_repeated_with_its_id_until_it_is_answered(fake: FakeWorker, trainer: Trainer) -> None:
    def deaf(message: Any) -> list[list[bytes]]:
        return [] if len(of_kind(fake, m.Release)) < 4 and isinstance(message, m.Release) else fake.usual(message)

    fake.answer = deaf
    assert isinstance(trainer.session.call(release, DEADLINE_S), m.Ok)
    assert len({message.id for message in of_kind(fake, m.Release)}) == 1
    assert len(of_kind(fake, m.Release)) >= 4


def test_answers_that_come_twice_or_late_or_to_nobody_do_no_harm(fake: FakeWorker, trainer: Trainer) -> None:
    fake.answer = lambda message: fake.usual(message) * 3 + [encode(m.Ok(id=999_999))]
    for _ in range(3):
        assert isinstance(trainer.session.call(release, DEADLINE_S), m.Ok)
    assert trainer.session.error is None


HEAD = b"ACKP" + m.PROTOCOL_VERSION.to_bytes(2, "little")


@pytest.mark.parametrize(
    "nonsense",
    [[b""], [b"", b""], [b"ACKP"], [HEAD, b""], [HEAD, b"\xc1"], [HEAD, b"\x90"],
     [HEAD, b"\x81\xa1m\xa5hello"], [b"x" * 100_000] * 5],
)  # fmt: skip
def test_nonsense_is_ignored(fake: FakeWorker, trainer: Trainer, nonsense: list[bytes]) -> None:
    fake.answer = lambda message: [nonsense, *fake.usual(message)]
    assert isinstance(trainer.session.call(release, DEADLINE_S), m.Ok)
    assert trainer.session.error is None


def test_a_refusal_raises_the_error_that_it_carries(fake: FakeWorker, trainer: Trainer) -> None:
    error = to_wire(InsufficientMemoryError("no room", nbytes=5))
    fake.answer = lambda message: (
        [encode(m.Refused(id=message.id, error=error))] if isinstance(message, m.Release) else fake.usual(message)
    )
    with pytest.raises(InsufficientMemoryError, match="no room") as caught:
        trainer.session.call(release, DEADLINE_S)
    assert caught.value.nbytes == 5
    assert trainer.session.error is None


def test_an_unanswered_request_fails_at_its_deadline_and_the_session_lives_on(
    fake: FakeWorker, trainer: Trainer
) -> None:
    fake.answer = lambda message: [] if isinstance(message, m.Release) else fake.usual(message)
    with pytest.raises(WorkerUnavailableError):
        trainer.session.call(release, 0.1)
    fake.answer = fake.usual
    assert isinstance(trainer.session.call(release, DEADLINE_S), m.Ok)


def test_a_silent_worker_is_lost_once_and_outstanding_requests_fail(fake: FakeWorker) -> None:
    trainer = Trainer(fake.endpoint, timeout_s=0.3).open()
    fake.answer = lambda message: []
    future = trainer.session.request(release, DEADLINE_S)
    assert isinstance(future.exception(DEADLINE_S), WorkerUnavailableError)
    wait_until(lambda: trainer.lost, "the loss is told")
    assert trainer.session.error is trainer.lost[0]
    assert trainer.lost[0].detail == "silent"
    with pytest.raises(WorkerUnavailableError):
        trainer.session.call(release, DEADLINE_S)
    trainer.session.close()
    assert len(trainer.lost) == 1


def test_a_refused_heartbeat_ends_the_session(fake: FakeWorker, trainer: Trainer) -> None:
    error = to_wire(ProtocolError("no such session"))
    fake.answer = lambda message: [encode(m.Refused(id=0, error=error))]
    wait_until(lambda: trainer.lost, "the session ends")
    assert "refused this session: no such session" in str(trainer.lost[0])


def test_a_refused_hello_fails_the_opening(fake: FakeWorker) -> None:
    fake.answer = lambda message: [encode(m.Refused(id=0, error=to_wire(WorkerUnavailableError("draining"))))]
    trainer = Trainer(fake.endpoint)
    with pytest.raises(WorkerUnavailableError, match="draining"):
        trainer.open()
    assert trainer.lost == []


def test_a_hello_that_was_lost_is_repeated(fake: FakeWorker) -> None:
    fake.answer = lambda message: [] if len(fake.heard) < 3 else fake.usual(message)
    trainer = Trainer(fake.endpoint).open()
    assert len({message.session for message in of_kind(fake, m.Hello)}) == 1
    trainer.session.close()


def test_rows_reach_the_table_asked_for_or_not(fake: FakeWorker, trainer: Trainer) -> None:
    row = {"save_id": "000001-00000000-000000000000", "phase": "durable"}
    fake.answer = lambda message: [encode(m.Saves(id=0, run="", outcomes=(), saves=(row,)))]
    wait_until(lambda: trainer.rows, "the row arrives")
    assert trainer.rows[0] == row


def test_closing_fails_what_is_outstanding_and_tells_no_loss(fake: FakeWorker, trainer: Trainer) -> None:
    fake.answer = lambda message: [] if isinstance(message, m.Release) else fake.usual(message)
    future = trainer.session.request(release, DEADLINE_S)
    trainer.session.close()
    trainer.session.close()
    assert isinstance(future.exception(0), WorkerUnavailableError)
    assert trainer.lost == []
    assert isinstance(trainer.session.request(release, DEADLINE_S).exception(0), WorkerUnavailableError)
