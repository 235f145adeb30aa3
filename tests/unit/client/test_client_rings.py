"""What the trainer tells its workers of a ring, and what it tells the copy that fills it, when one dies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.client.pending_saves import PendingSaves
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import CheckpointerClosedError, SaveFailedError, WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.protocol import messages

SAVE = SaveId(1, 2, "0" * 12)
DIED = WorkerUnavailableError("it has died", detail="died")


class FakeSession:
    def __init__(self, name: str) -> None:
        self.name, self.error = name, None
        self.said: list[Any] = []
        self.futures: list[Future[Any]] = []

    def request(self, build: Any, timeout_s: float, on_answer: Any = None) -> Future[Any]:
        self.said.append(build(len(self.said) + 1))
        self.futures.append(Future())
        if on_answer is not None:
            self.futures[-1].add_done_callback(on_answer)
        return self.futures[-1]

    @property
    def kinds(self) -> list[type]:
        return [type(message) for message in self.said]


class Trainer(WorkerClient):
    """With a ring in a slot, and a session; nobody is found unless the test says so."""

    def __init__(self, *, is_ring: bool = True) -> None:
        rank = RankInfo(0, 1)
        run: Any = SimpleNamespace(rank=rank, alone=True, links=SimpleNamespace(start_options=tuple))
        super().__init__(CheckpointerConfig(), run, endpoint="ipc:///e", named=True, package="0")
        self.one: Any = FakeSession("a" * 16)
        self.slot = Slot(number=1, memory=SlotMemory.create(16384), session=self.one.name, is_ring=is_ring)
        self.pool = SlotPool(self.config, lambda nbytes, within_s: self.slot, lambda slot: None)
        self._pending = PendingSaves(self._lock, commit_timeout_s=60.0, free=self.pool.free)
        self._connection: Any = SimpleNamespace(session=self.one, is_ready=True)
        self.begun: list[Any] = []
        self._failover: Any = SimpleNamespace(start=self.begun.append, is_under_way=False)
        self._withdrawals: Any = SimpleNamespace(send_for_run=lambda run: None)
        self.slot.generation = 1
        self.begin(SAVE, self.slot, step=1, path="/x", nbytes=1, umask=0)
        self.slot.memory.control.open(1)

    def is_streamed(self) -> None:
        self.slot.memory.control.stream(b"request", 4096)

    def dies(self, *, is_handed_over: bool = True) -> None:
        self.one.error = DIED
        self._note_loss(self.one.name, is_handed_over=is_handed_over)

    def is_found(self) -> Any:
        """Another worker has got the slot."""
        other: Any = FakeSession("b" * 16)
        self._connection.session, self.slot.session = other, other.name
        found = self._pending.unfinished(SAVE, told=True)
        assert found is not None
        self._announce(other, found, self.slot)
        return other

    def end(self) -> None:
        self.slot.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.end()


def test_while_its_worker_lives_a_ring_is_only_filled(trainer: Trainer) -> None:
    trainer.is_streamed()
    check = trainer.stream(SAVE, trainer.slot)
    assert trainer.one.kinds == [messages.Begin, messages.Submit]
    assert check() is False
    assert not trainer.begun


def test_a_checkpointer_that_is_closed_while_another_worker_is_found_lets_a_ring_wait_no_longer(
    trainer: Trainer,
) -> None:
    trainer.is_streamed()
    check = trainer.stream(SAVE, trainer.slot)
    trainer.dies()
    trainer._failover.is_under_way = trainer._is_closing = True
    with pytest.raises(CheckpointerClosedError, match=str(SAVE)):
        check()


def test_when_its_worker_dies_another_is_looked_for_and_told_of_the_save(trainer: Trainer) -> None:
    trainer.is_streamed()
    check = trainer.stream(SAVE, trainer.slot)
    trainer.dies()
    assert check() is True
    assert trainer.begun
    trainer._failover.is_under_way = True
    assert check() is True
    assert len(trainer.begun) == 1, "it is asked for once"
    other = trainer.is_found()
    assert other.kinds == [messages.Begin, messages.Submit]
    assert [m.generation for m in other.said] == [1, 1]
    assert check() is False


def test_a_worker_that_dies_before_the_doorbell_is_followed_by_one_that_hears_it(trainer: Trainer) -> None:
    trainer.is_streamed()
    trainer.dies()
    check = trainer.stream(SAVE, trainer.slot)
    assert check() is True
    assert trainer.is_found().kinds == [messages.Begin, messages.Submit]


def test_a_worker_that_comes_before_the_request_stands_hears_the_doorbell_later(trainer: Trainer) -> None:
    trainer.dies()
    other = trainer.is_found()
    assert other.kinds == [messages.Begin]
    trainer.is_streamed()
    trainer.stream(SAVE, trainer.slot)
    assert other.kinds == [messages.Begin, messages.Submit]


def test_of_a_whole_slot_that_is_being_filled_the_next_worker_hears_no_doorbell_before_the_seal() -> None:
    trainer = Trainer(is_ring=False)
    trainer.is_streamed()
    trainer.dies()
    assert trainer.is_found().kinds == [messages.Begin]
    trainer.end()


def test_whether_anybody_hears_of_a_whole_slot_that_is_being_filled_ends_nothing() -> None:
    trainer = Trainer(is_ring=False)
    trainer.is_streamed()
    trainer.stream(SAVE, trainer.slot)
    assert trainer.one.kinds == [messages.Begin, messages.Submit]
    trainer.one.futures[-1].set_exception(SaveFailedError("refused", code="x"))
    assert trainer.early_error(SAVE) is None
    trainer.dies(is_handed_over=False)
    trainer.stream(SAVE, trainer.slot)
    assert len(trainer.one.said) == 2
    trainer.end()


def test_a_ring_that_was_sealed_when_its_worker_died_is_announced_by_its_slot_alone(trainer: Trainer) -> None:
    trainer.is_streamed()
    trainer.slot.memory.control.finish()
    trainer.dies()
    assert trainer.is_found().kinds == []


@pytest.mark.parametrize("how", ["handed to nobody", "given up"])
def test_a_ring_that_nobody_takes_over_ends_the_copy(trainer: Trainer, how: str) -> None:
    trainer.is_streamed()
    check = trainer.stream(SAVE, trainer.slot)
    trainer.dies(is_handed_over=how == "given up")
    if how == "given up":
        trainer.slot.orphaned = True
    with pytest.raises(WorkerUnavailableError):
        check()


def test_what_the_worker_has_said_of_the_save_ends_the_copy(trainer: Trainer) -> None:
    trainer.is_streamed()
    check = trainer.stream(SAVE, trainer.slot)
    refused = SaveFailedError("no room", code="ENOSPC")
    trainer._pending.end(str(SAVE), refused, None)
    with pytest.raises(SaveFailedError) as caught:
        check()
    assert caught.value is refused
