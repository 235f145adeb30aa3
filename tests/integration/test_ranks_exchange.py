"""Meetings of ranks: over torch.distributed, and over a board of the worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist
from real_worker import wait_until

from asyncckpt import AsyncCheckpointer
from asyncckpt.config import RankInfo
from asyncckpt.distributed import process_group
from asyncckpt.distributed.meetings import Exchange, Save
from asyncckpt.distributed.process_group import GroupExchange, find_exchange, find_rank_info
from asyncckpt.errors import PlanTimeoutError, SaveFailedError

PLACES = ("group", "torchrun's store", "board")


def at(place: str, endpoint: str, what: Callable[[Exchange, int], Any], rank: int) -> Any:
    """Run `what` with the exchange of a place."""
    if place != "board":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(place == "torchrun's store")
        found = find_exchange(find_rank_info(None))
        assert found is not None
        return what(found, rank)
    with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        process: Any = checkpointer._process
        return what(process.board(), rank)


def everywhere(rank: int, place: str, endpoint: str, what: Callable[[Exchange, int], Any]) -> Any:
    return at(place, endpoint, what, rank)


def run(place: str, endpoint: str, world_size: int, what: Callable[[Exchange, int], Any]) -> list[Any]:
    return rank_processes.run(world_size, everywhere, place, endpoint, what, group=place != "board")


def gather_twice(exchange: Exchange, rank: int) -> list[list[bytes]]:
    meeting = exchange.meet_next("a", "save()")
    try:
        first = meeting.gather(bytes([rank]) * rank, time.monotonic() + 30)
        second = meeting.gather(bytes([rank]) * (1_200_000 * (rank == 1)), time.monotonic() + 30)
    finally:
        meeting.close()
    return [first, [data[:1] + str(len(data)).encode() for data in second]]


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_gets_everybodys_bytes_whatever_their_lengths(
    place: str, shared_worker: real_worker.RealWorker
) -> None:
    found = run(place, shared_worker.endpoint, 3, gather_twice)
    expected = [[b"", b"\1", b"\2\2"], [b"0", b"\x011200000", b"0"]]
    assert found == [expected, expected, expected]


def only_rank_one_comes_late(exchange: Exchange, rank: int) -> None:
    if rank == 1:
        rank_processes.talk().hear()
    began = time.monotonic()
    try:
        exchange.meet_next("late", "save()", Save("/late", 0)).gather(b"x", began + (600 if rank else 0.6))
    except (PlanTimeoutError, SaveFailedError) as error:
        found = type(error).__name__, getattr(error, "missing_ranks", None), time.monotonic() - began
        rank_processes.talk().say(found)
    rank_processes.talk().hear()


@pytest.mark.parametrize("place", ["group", "torchrun's store"])
def test_a_rank_that_does_not_come_is_named_after_the_deadline_and_learns_at_once_that_it_is_late(place: str) -> None:
    with rank_processes.running(2, everywhere, place, "", only_rank_one_comes_late) as ranks:
        kind, missing, waited = ranks.receive(0)
        assert (kind, missing) == ("PlanTimeoutError", [1])
        assert 0.5 < waited < 50
        ranks.send(1, "go")
        kind, _, waited = ranks.receive(1)
        assert kind == "SaveFailedError"
        assert waited < 50
        for rank in range(2):
            ranks.send(rank, "end")


def rank_one_does_not_come(rank: int) -> list[int]:
    found = find_exchange(find_rank_info(None))
    assert found is not None
    if rank == 1:
        rank_processes.talk().hear()
        return []
    if rank == 0:
        wait_until(lambda: found.part("absent-1", lambda: None).check(["here/2"]), "rank 2 has come")
    with pytest.raises(PlanTimeoutError) as caught:  # rank 0 has less patience, and gives up for all
        found.meet_next("absent", "save()").gather(b"x", time.monotonic() + (60 if rank else 0.3))
    return list(caught.value.missing_ranks)


def test_all_others_name_the_rank_that_does_not_come_although_one_gives_up_first() -> None:
    with rank_processes.running(3, rank_one_does_not_come) as ranks:
        found = [ranks.receive(rank) for rank in (0, 2)]
        ranks.send(1, "go")
        ranks.receive(1)
    assert found == [[1], [1]]


def alone_then_new_group(exchange: Exchange, rank: int) -> list[int]:
    if rank == 0:
        with pytest.raises(PlanTimeoutError, match="have not called save"):
            exchange.meet_next("alone", "save()").gather(b"x", time.monotonic() + 0.2)
    group = dist.new_group([0, 1])
    value = torch.tensor([rank + 1])
    dist.all_reduce(value, group=group)
    return [int(value)]


def test_a_meeting_that_one_rank_tried_alone_leaves_the_users_groups_in_step() -> None:
    assert run("group", "", 2, alone_then_new_group) == [[3], [3]]


def rank_one_refuses(exchange: Exchange, rank: int) -> str:
    meeting = exchange.meet_next("refused", "save()")
    if rank == 1:
        meeting.refuse("its state cannot be stored")
        exchange.meet_next("after", "save()").gather(
            b"", time.monotonic() + 30
        )  # what a rank has posted goes with its session
        return "refused"
    with pytest.raises(SaveFailedError) as caught:
        meeting.gather(b"x", time.monotonic() + 30)
    assert (caught.value.code, caught.value.rank) == ("withdrawn", 1)
    exchange.meet_next("after", "save()").gather(b"", time.monotonic() + 30)
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_refusal_ends_the_meeting_for_the_others_with_its_reason(
    place: str, shared_worker: real_worker.RealWorker
) -> None:
    found = run(place, shared_worker.endpoint, 2, rank_one_refuses)
    assert "rank 1" in found[0]
    assert "its state cannot be stored" in found[0]


def is_told_of_rank_one(exchange: Exchange, rank: int) -> int | None:
    """Rank 1 refuses; rank 0 hears it and does not come either; rank 2 looks only then."""
    meeting = exchange.meet_next("handed on", "save()")
    if rank == 1:
        meeting.refuse("its state cannot be stored")
    if rank != 1:
        rank_processes.talk().hear()
        with pytest.raises(SaveFailedError) as caught:
            meeting.gather(b"x", time.monotonic() + 30)
        meeting.refuse(repr(caught.value))
    rank_processes.talk().say("done")
    return None if rank == 1 else caught.value.rank


def test_whose_failure_it_was_is_not_forgotten_when_it_is_handed_on() -> None:
    with rank_processes.running(3, everywhere, "group", "", is_told_of_rank_one) as ranks:
        for rank in (1, 0, 2):
            if rank != 1:
                ranks.send(rank, "go")
            assert ranks.receive(rank) == "done"
        assert ranks.results() == [1, None, 1]


def loses_rank_one(rank: int, how: str, n_rounds: int) -> tuple[str, int | None, str]:
    process_group.LEAVE_TIMEOUT_S = 60.0
    found = find_exchange(find_rank_info(None))
    assert found is not None
    meeting = found.meet_next("lost", "save()")
    for _ in range(n_rounds):
        meeting.gather(b"x", time.monotonic() + 60)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    try:
        meeting.gather(b"x", time.monotonic() + (60 if how == "dies" else 2))
    except SaveFailedError as error:
        return error.code, error.rank, str(error)
    finally:
        meeting.close()
    return "met", None, ""


@pytest.mark.parametrize(("how", "n_rounds"), [("dies", 1), ("hangs", 1), ("dies", 2)])
def test_a_rank_that_dies_or_hangs_in_the_middle_of_a_meeting_is_named_by_all_others(how: str, n_rounds: int) -> None:
    with rank_processes.running(5, loses_rank_one, how, n_rounds) as ranks:
        for rank in (0, 2, 3, 4):
            code, culprit, text = ranks.receive(rank)
            assert (code, culprit) == ("exchange", 1) and "ranks [1]" in text


def only_rank_zero(exchange: Exchange, rank: int) -> list[int] | None:
    if rank == 1:
        rank_processes.talk().hear()
        return None
    with pytest.raises(PlanTimeoutError) as caught:
        exchange.meet_next("missing", "save()").gather(b"x", time.monotonic() + 0.3)
    return list(caught.value.missing_ranks)


def test_a_rank_that_is_missing_at_the_board_is_named(shared_worker: real_worker.RealWorker) -> None:
    with rank_processes.running(2, everywhere, "board", shared_worker.endpoint, only_rank_zero, group=False) as ranks:
        assert ranks.receive(0) == [1]
        ranks.send(1, "go")
        assert ranks.receive(1) is None


def open_sockets(exchange: Exchange, rank: int) -> tuple[int, int]:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    meeting = exchange.meet_next("fds", "save()")
    meeting.gather(b"x", time.monotonic() + 30)
    meeting.close()
    dist.barrier()
    return before, count()


def test_a_meeting_leaves_no_connection_open() -> None:
    for before, after in run("group", "", 2, open_sockets):
        assert after <= before + 2  # the barrier's own pair


def test_a_group_of_other_ranks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert find_exchange(RankInfo(0, 2)) is None


def exchange_over(port: int, rank: int) -> Exchange:
    """An exchange over torchrun's store, as a process that torchrun has just started makes it."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return GroupExchange(RankInfo(rank, 2), dist.TCPStore("127.0.0.1", port, is_master=False))


def dies(rank: int, port: int, who: int, how: str) -> None:
    """The first attempt. Rank `who` dies in the save, and the other one before it."""
    exchange = exchange_over(port, rank)
    if rank == who:
        meeting = exchange.meet_next(AGAIN.series, "save()", AGAIN)
        if how == "refuses":
            meeting.refuse("it dies")
        else:
            with pytest.raises(PlanTimeoutError):
                meeting.gather(b"x", time.monotonic() + (0.5 if how == "gives up" else 60))
    rank_processes.talk().say("dies")
    time.sleep(60)


def meets_again(rank: int, port: int) -> list[bytes]:
    """The second attempt. Rank 0 comes only when rank 1 has looked at what the first one has left."""
    if rank == 0:
        rank_processes.talk().hear()
    exchange = exchange_over(port, rank)
    rank_processes.talk().say("begins")
    return exchange.meet_next(AGAIN.series, "save()", AGAIN).gather(b"%d" % rank, time.monotonic() + 60)


AGAIN = Save("/ckpt/again", 0)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["waits", "gives up", "refuses"])
def test_what_a_dead_attempt_has_written_is_not_taken_for_a_living_ranks(who: int, how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rank_processes.running(2, dies, store.port, who, how, group=False) as ranks:
        ranks.receive(1 - who)
        if how == "waits":
            time.sleep(1)
        else:
            ranks.receive(who)
        ranks.kill()
    with rank_processes.running(2, meets_again, store.port, group=False) as ranks:
        assert ranks.receive(1) == "begins"
        time.sleep(0.5)  # rank 1 looks for rank 0
        ranks.send(0, "come")
        assert ranks.receive(0) == "begins"
        assert ranks.results() == [[b"0", b"1"]] * 2


def waits_for_rank_zero(rank: int, port: int) -> tuple[list[int], bool]:
    if rank == 0:
        rank_processes.talk().hear()
        return [], True
    exchange = exchange_over(port, rank)
    process_group.BRIEF_WAIT_S = 0.2
    began = time.monotonic()
    exchange.meet_next("refused", "save()").refuse("there is nobody to tell")
    exchange.announce_absence(3, "there is nobody to tell")
    with pytest.raises(PlanTimeoutError) as caught:
        exchange.meet_next(AGAIN.series, "save()", AGAIN).gather(b"x", time.monotonic() + 0.2)
    return list(caught.value.missing_ranks), time.monotonic() - began < 20


def test_a_rank_waits_for_rank_zero_until_its_deadline_only() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rank_processes.running(2, waits_for_rank_zero, store.port, group=False) as ranks:
        assert ranks.receive(1) == ([0], True)
        ranks.send(0, "end")


def meets_in_two_groups(rank: int, port: int) -> list[list[bytes]]:
    """The process group is made anew in the same processes: rank 0 comes later to the second one than the others."""
    found = []
    for n in range(2):
        if rank == 0:
            time.sleep(0.5 * n)
        found.append(exchange_over(port, rank).meet_next("a", "save()").gather(b"%d" % n, time.monotonic() + 60))
    return found


def test_a_process_group_that_is_made_anew_is_another_one() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = rank_processes.run(2, meets_in_two_groups, store.port, group=False)
    assert found == [[[b"0", b"0"], [b"1", b"1"]]] * 2
