"""A client follows the changes of its run: fetched in pieces, in order, once; another worker starts over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgpack
import pytest

from asyncckpt.changes import Changes
from asyncckpt.config import RankInfo
from asyncckpt.errors import UnknownSaveError
from asyncckpt.links import Links, Worker
from asyncckpt.protocol import messages

LEADER = "1" * 16


class FakeRun:
    rank, run_id, agreement, alone, knows_run = RankInfo(0, 2), "0123456789ab", None, False, True

    def __init__(self) -> None:
        self.taken: list[tuple[int, bytes]] = []
        self.starts = 0
        self.expected: list[tuple[str, int]] = []
        self.links = Links(self.rank, Worker(), 1.0)

    def refuse(self, sequence: int, reason: str) -> None:
        raise AssertionError

    def forget(self, since: int | None = None) -> None:
        raise AssertionError

    def start_over(self) -> None:
        self.starts += 1

    def expect_changes(self, leader: str, number: int) -> None:
        self.expected.append((leader, number))

    def take_change(self, leader: str, number: int, effective: int, raw: bytes) -> None:
        self.taken.append((effective, raw))


class FakeWorker:
    """Answers Fetch from boards, in pieces of ten bytes; `held` answers later."""

    def __init__(self) -> None:
        self.boards: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.connected = True

    def send(self, build: Callable[[int], messages.Message]) -> Future[messages.Message] | None:
        if not self.connected:
            return None
        message, future = build(1), Future[messages.Message]()
        assert isinstance(message, messages.Fetch)
        self.asked.append(message.board)
        data = self.boards.get(message.board)
        if data is None:
            future.set_exception(UnknownSaveError("no such board"))
        else:
            piece = data[message.offset : message.offset + 10]
            future.set_result(messages.Fetched(id=1, missing=(), total=len(data), data=piece))
        return future


def change(effective: int, raw: bytes) -> bytes:
    return bytes(msgpack.packb({"effective": effective, "change": raw}))


@pytest.fixture
def parts() -> tuple[FakeRun, FakeWorker, Changes]:
    run, worker = FakeRun(), FakeWorker()
    return run, worker, Changes(run, worker.send)


def test_each_change_is_fetched_once_and_in_order(parts: tuple[FakeRun, FakeWorker, Changes]) -> None:
    run, worker, changes = parts
    worker.boards = {"change-0123456789ab-1": change(3, b"x" * 50), "change-0123456789ab-2": change(7, b"y")}
    for _ in range(3):
        changes.seen(2, LEADER)
    changes.seen(2, LEADER)
    assert run.taken == [(3, b"x" * 50), (7, b"y")]


def test_a_change_that_is_not_understood_is_asked_for_again(parts: tuple[FakeRun, FakeWorker, Changes]) -> None:
    run, worker, changes = parts
    changes.seen(1, LEADER)
    worker.boards["change-0123456789ab-1"] = b"\xff"
    changes.seen(1, LEADER)
    assert run.taken == []
    worker.boards["change-0123456789ab-1"] = change(3, b"x")
    changes.seen(1, LEADER)
    assert run.taken == [(3, b"x")]


def test_without_a_session_nothing_is_asked_until_there_is_one(parts: tuple[FakeRun, FakeWorker, Changes]) -> None:
    run, worker, changes = parts
    worker.boards["change-0123456789ab-1"] = change(3, b"x")
    worker.connected = False
    changes.seen(1, LEADER)
    worker.connected = True
    changes.seen(1, LEADER)
    assert run.taken == [(3, b"x")]


def test_another_worker_starts_over(parts: tuple[FakeRun, FakeWorker, Changes]) -> None:
    run, worker, changes = parts
    assert changes.connected("session-1", "worker-1") is True
    worker.boards["change-0123456789ab-1"] = change(3, b"x")
    changes.seen(1, "worker-1")
    assert changes.connected("session-1", "worker-1") is False, "the same session"
    assert changes.connected("session-2", "worker-2") is True
    assert run.starts == 1
    worker.boards["change-0123456789ab-1"] = change(9, b"z")
    changes.seen(1, "worker-2")
    assert run.taken == [(3, b"x"), (9, b"z")]


def test_a_run_that_another_worker_decides_goes_on_counting_when_the_own_one_is_another(
    parts: tuple[FakeRun, FakeWorker, Changes],
) -> None:
    run, worker, changes = parts
    run.links.leader, run.links.follows = LEADER, True
    worker.boards["change-0123456789ab-1"] = change(3, b"x")
    changes.connected("session-1", "worker-1")
    changes.seen(1, LEADER)
    changes.connected("session-2", "worker-2")
    changes.seen(1, "")
    changes.seen(1, LEADER)
    assert run.starts == 0 and run.taken == [(3, b"x")]
    changes.seen(1, "2" * 16)
    assert run.starts == 1 and len(run.taken) == 2, "another leader counts from one"


def test_the_same_worker_after_a_break_goes_on_counting(parts: tuple[FakeRun, FakeWorker, Changes]) -> None:
    run, _, changes = parts
    changes.connected("session-1", "worker-1")
    assert changes.connected("session-2", "worker-1") is True
    assert run.starts == 0
