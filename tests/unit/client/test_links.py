"""A rank links its worker with those of the other nodes: in the first save, and again with every worker after that."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import msgpack
import pytest
from simulated_workers import KEY, SECRET

from asyncckpt.client.worker_links import Build, WorkerAccess, WorkerLinks
from asyncckpt.config import RankInfo
from asyncckpt.errors import EndpointError, RanksDisagreeError, WorkerUnavailableError
from asyncckpt.protocol import messages

RUN = "0123456789ab"
FIRST, SECOND = "1" * 16, "2" * 16
ADDRESS = "tcp://10.0.0.1:7400"
TOLD = msgpack.packb([ADDRESS, KEY, KEY, SECRET])


class FakeWorker(WorkerAccess):
    """Answers Lead and Follow; what it was asked is kept."""

    def __init__(self, instance: str) -> None:
        self.name, self.asked, self.error = instance, list[Any](), None
        self.public = KEY

    def instance(self) -> str:
        return self.name

    def answer(self, build: Build) -> messages.Message:
        self.asked.append(build(7))
        if isinstance(self.asked[-1], messages.Lead):
            return messages.Leading(id=7, address=ADDRESS, server_public=self.public, server_secret=SECRET)
        return messages.Following(id=7, leader=FIRST)

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        if self.error is not None:
            raise self.error
        return self.answer(build)

    def send(self, build: Build) -> Future[messages.Message]:
        future = Future[messages.Message]()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.answer(build))
        return future


def rank(number: int, instance: str = "") -> tuple[FakeWorker, WorkerLinks]:
    worker = FakeWorker(instance or (FIRST, SECOND)[number])
    return worker, WorkerLinks(RankInfo(number, 2), worker, 1.0)


def gathers(first: bytes = TOLD) -> Any:
    return lambda mine: [first or mine, b""]


def test_a_worker_in_the_place_of_the_leader_is_started_where_the_others_look_for_it() -> None:
    for number, address, options in (
        (0, ADDRESS, ("--advertise", "10.0.0.1")),
        (0, "tcp://[fe80::1]:7400", ("--advertise", "fe80::1")),
        (1, ADDRESS, ()),
    ):
        _, links = rank(number)
        assert links.start_options() == ()
        links.link(RUN, [FIRST, SECOND], gathers(msgpack.packb([address, KEY, KEY, SECRET])))
        assert links.start_options() == options


def test_ranks_of_one_worker_ask_nothing_and_exchange_nothing() -> None:
    worker, links = rank(1, FIRST)
    links.link(RUN, [FIRST, FIRST], lambda _: pytest.fail("nothing is to be said"))
    links.relink(worker.send)
    assert not worker.asked


def test_rank_zero_leads_and_hands_over_all_that_the_others_need() -> None:
    worker, links = rank(0)
    said: list[bytes] = []
    links.link(RUN, [FIRST, SECOND], lambda mine: said.append(mine) or [mine, b""])  # type: ignore[func-returns-value]
    (lead,) = worker.asked
    address, server_public, client_public, client_secret = msgpack.unpackb(said[0])
    assert (lead.run, lead.port, lead.server_secret, lead.client_public) == (RUN, 0, "", client_public)
    assert (address, server_public) == (ADDRESS, KEY) and client_secret != client_public


def test_another_worker_of_rank_zero_takes_port_and_key_of_the_first() -> None:
    worker, links = rank(0)
    links.link(RUN, [FIRST, SECOND], gathers())
    links.relink(worker.send)
    again = worker.asked[-1]
    assert (again.port, again.server_secret) == (7400, SECRET)
    assert again.client_public == worker.asked[0].client_public


def test_another_rank_follows_and_every_attempt_is_a_later_one() -> None:
    worker, links = rank(1)
    links.link(RUN, [FIRST, SECOND], gathers())
    links.relink(worker.send)
    assert [type(a) for a in worker.asked] == [messages.Follow] * 2
    assert [(a.address, a.client_secret, a.attempt) for a in worker.asked] == [(ADDRESS, SECRET, n) for n in (1, 2)]


def test_a_rank_without_a_worker_is_named() -> None:
    _, links = rank(0)
    with pytest.raises(WorkerUnavailableError, match="rank 2"):
        links.link(RUN, [FIRST, SECOND, ""], gathers())


def test_a_port_that_is_taken_is_raised_before_the_others_are_met() -> None:
    worker, links = rank(0)
    worker.error = EndpointError("taken")  # type: ignore[assignment]
    with pytest.raises(EndpointError):
        links.link(RUN, [FIRST, SECOND], lambda _: pytest.fail("the others are told by the meeting's end"))


@pytest.mark.parametrize("told", [b"nonsense", msgpack.packb([]), msgpack.packb(["ipc:///x", KEY, KEY, SECRET])])
def test_nonsense_of_rank_zero_is_a_typed_error(told: bytes) -> None:
    _, links = rank(1)
    with pytest.raises(RanksDisagreeError, match="cannot be decoded"):
        links.link(RUN, [FIRST, SECOND], gathers(told))


@pytest.mark.parametrize("how", ["refused", "other_keys"])
def test_a_worker_that_cannot_take_the_place_of_the_first_is_said(how: str, caplog: pytest.LogCaptureFixture) -> None:
    worker, links = rank(0)
    links.link(RUN, [FIRST, SECOND], gathers())
    worker.public = "0" * 40
    worker.error = EndpointError("taken") if how == "refused" else None  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        links.relink(worker.send)
    assert "other nodes" in caplog.text
