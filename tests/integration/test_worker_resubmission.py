"""Kill -9 of the worker, `on_worker_loss="resubmit"`: another one gets the memory, and the same futures complete."""

from __future__ import annotations

import gc
import itertools
import math
import os
import pathlib
import signal
import threading
from typing import Any

import pytest
import states
from own_worker import STATE, dying_worker, lose, own_worker, saved_once, worker_of
from real_worker import DEADLINE_S, manifest_of, saved_at_last, slots_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import launcher
from asyncckpt.client.failover import MAX_HANDOVERS
from asyncckpt.client.slot_lender import SlotLender
from asyncckpt.errors import CheckpointerClosedError, WorkerUnavailableError
from asyncckpt.staging.cpu_copy import SlotImage

pytestmark = pytest.mark.usefixtures("default_dir")


def test_a_save_in_flight_is_written_by_the_next_worker(tmp_path: pathlib.Path) -> None:
    with saved_once(tmp_path) as checkpointer:
        before = {p.name: p.read_bytes() for p in (tmp_path / "0").iterdir()}
        worker = worker_of(checkpointer)
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            worker.kill()
            report = handle.written.result(DEADLINE_S)
        assert report.details["resubmitted"] == 1
        assert manifest_of(tmp_path / "1")["save_id"] == str(handle.save_id)
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        assert worker_of(checkpointer).pid != worker.pid
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)
        assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "2")
        assert {p.name: p.read_bytes() for p in (tmp_path / "0").iterdir()} == before
        assert [slot.handovers for slot in slots_of(checkpointer)] == [0]


def test_all_saves_in_flight_go_on_in_their_order(tmp_path: pathlib.Path) -> None:
    with saved_once(tmp_path, slots=3) as checkpointer:
        worker = worker_of(checkpointer)
        session = checkpointer._process._connection.session  # type: ignore[attr-defined]
        pool: Any = checkpointer._process.pool  # type: ignore[attr-defined]
        extra = [pool._try_allocate(slots_of(checkpointer)[0].memory.nbytes, math.inf) for _ in range(2)]
        pool._slots += extra
        assert {slot.session for slot in extra} == {session.name}
        with worker.frozen():
            handles = [checkpointer.save({"w": STATE["w"] + n}, tmp_path / f"s-{n}") for n in range(3)]
            ended: list[int] = []
            for n, handle in enumerate(handles):
                handle.written.add_done_callback(lambda _, n=n: ended.append(n))
            worker.kill()
            for handle in handles:
                assert handle.written.result(DEADLINE_S).details["resubmitted"] == 1
        wait_until(lambda: len(ended) == 3, "all callbacks ran")  # they run after those who wait have been woken
        assert ended == [0, 1, 2]
        for n in range(3):
            states.assert_same(asyncckpt.load(tmp_path / f"s-{n}"), {"w": STATE["w"] + n})


def test_an_idle_loss_keeps_the_memory_and_the_next_save_uses_it(tmp_path: pathlib.Path) -> None:
    with saved_once(tmp_path) as checkpointer:
        (slot,) = slots_of(checkpointer)
        token = slot.memory.token
        lose(checkpointer)
        report = checkpointer.save(STATE, tmp_path / "1").written.result(DEADLINE_S)
        assert "resubmitted" not in report.details
        (slot,) = slots_of(checkpointer)
        assert slot.memory.token == token
        assert len(worker_of(checkpointer).status()["slots"]) == 1


@pytest.mark.parametrize("when", ["before the copy", pytest.param("after the copy", marks=pytest.mark.soak)])
def test_a_worker_that_dies_while_a_state_is_staged_costs_nothing(
    when: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = SlotImage.fill
    with saved_once(tmp_path) as checkpointer:

        def lose_and_fill(self: SlotImage, *arguments: Any) -> None:
            if when == "before the copy":
                lose(checkpointer)
            fill(self, *arguments)
            if when == "after the copy":
                lose(checkpointer)

        with monkeypatch.context() as patch:
            patch.setattr(SlotImage, "fill", lose_and_fill)
            handle = checkpointer.save(STATE, tmp_path / "1")
        handle.written.result(DEADLINE_S)
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)


def test_where_no_worker_can_be_started_the_futures_fail_and_a_later_save_works(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved_once(tmp_path) as checkpointer:
        worker = worker_of(checkpointer)

        def refuse(endpoint: str, **_: object) -> None:
            raise WorkerUnavailableError("no more processes", endpoint=endpoint)

        with monkeypatch.context() as patch, worker.frozen():
            patch.setattr("asyncckpt.client.launcher.start_worker", refuse)
            handle = checkpointer.save(STATE, tmp_path / "1")
            worker.kill()
            error = handle.written.exception(DEADLINE_S)
        assert isinstance(error, WorkerUnavailableError)
        assert "no more processes" in str(error)
        assert handle.durable.exception(0) is error
        assert slots_of(checkpointer) == []
        numbers = itertools.count(2)  # after a failure each save tries for a second only
        wait_until(
            lambda: checkpointer.save(STATE, tmp_path / str(next(numbers))).written.exception(DEADLINE_S) is None,
            "a save works",
        )


@pytest.mark.parametrize(
    ("kill", "layout", "kept"),
    [
        pytest.param("pwrite:1:9:1", "safetensors", False, id="while it writes"),
        pytest.param("pwrite:1:9:1", "dcp", False, id="dcp while it writes", marks=pytest.mark.soak),
        pytest.param("close:1:9:0", "safetensors", False, id="before the shard is closed", marks=pytest.mark.soak),
        pytest.param("link:1:9:0", "safetensors", True, id="before the manifest stands"),
        pytest.param("link:1:9:0", "dcp", True, id="dcp before the manifest stands", marks=pytest.mark.soak),
        pytest.param("link:1:9:1", "safetensors", None, id="after the manifest stands"),
        # Its manifest counts once `.metadata` stands beside it.
        pytest.param("link:1:9:1", "dcp", True, id="dcp after the manifest stands"),
    ],
)
def test_what_was_durable_is_not_written_again(
    kill: str, kept: bool | None, layout: str, tmp_path: pathlib.Path
) -> None:
    with dying_worker(kill) as endpoint, own_worker(layout=layout) as checkpointer:
        assert checkpointer._process.endpoint == endpoint  # type: ignore[attr-defined]
        first = worker_of(checkpointer)
        handle = checkpointer.save(STATE, tmp_path / "1")
        report = handle.written.result(DEADLINE_S)
        assert not first.alive
        assert report.details["resubmitted"] == 1
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        counters = worker_of(checkpointer).status()["counters"]
        assert report.details.get("kept") is kept
        assert bool(counters.get("written_nbytes")) is (kept is False)
        assert not [p.name for p in (tmp_path / "1").iterdir() if p.name.endswith(".tmp")]
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)


def test_a_save_that_kills_every_worker_fails_with_their_number(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several_s = (1 + MAX_HANDOVERS) * DEADLINE_S  # one budget for all of them, on a machine that may be busy
    with saved_once(tmp_path, worker_start_timeout_s=several_s) as checkpointer:
        killed: list[int] = []
        takeover: Any = checkpointer._process._failover  # type: ignore[attr-defined]
        hand_over = takeover._hand_over

        def kill_and_hand_over(session: Any, slot: Any) -> None:
            if takeover._pending.unfinished(slot.user) is not None and slot.handovers < MAX_HANDOVERS:
                killed.append(session.worker.pid)  # ahead of it: one that has the memory may end the save by that alone
                os.kill(session.worker.pid, signal.SIGKILL)
            hand_over(session, slot)

        with monkeypatch.context() as patch, worker_of(checkpointer).frozen():
            patch.setattr(takeover, "_hand_over", kill_and_hand_over)
            handle = checkpointer.save(STATE, tmp_path / "1")
            lose(checkpointer)
            error = handle.written.exception(several_s)
        assert isinstance(error, WorkerUnavailableError)
        assert f"handed over to {MAX_HANDOVERS + 1} workers" in str(error)
        assert len(killed) == MAX_HANDOVERS
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)
        states.assert_same(asyncckpt.load(tmp_path / "2"), STATE)


def test_a_save_of_a_worker_that_only_hangs_is_given_to_nobody_else(tmp_path: pathlib.Path) -> None:
    with own_worker(worker_timeout_s=1.0) as checkpointer:
        saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / name))
        worker = worker_of(checkpointer)
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            error = handle.written.exception(DEADLINE_S)
            assert isinstance(error, WorkerUnavailableError)
            assert error.detail == "silent"
            assert checkpointer.save(STATE, tmp_path / "2").written.exception(DEADLINE_S) is not None
        last = saved_at_last(lambda name: checkpointer.save(STATE, tmp_path / f"3-{name}"))
        assert worker_of(checkpointer).pid == worker.pid
        assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / f"3-{last}")


def test_a_hook_speaks_once_although_two_workers_ask(tmp_path: pathlib.Path) -> None:
    said: list[str] = []

    class Hook:
        def pre_commit(self, path: str, **kw: Any) -> None:
            said.append(f"pre {os.path.basename(path)}")

        def post_commit(self, path: str, **kw: Any) -> None:
            said.append(f"post {os.path.basename(path)}")

    with dying_worker("link:1:9:0"), own_worker(commit_hook=Hook(), hook_timeout_s=DEADLINE_S) as checkpointer:
        checkpointer.save(STATE, tmp_path / "1").written.result(DEADLINE_S)
        assert said == ["pre 1", "post 1"]


@pytest.mark.parametrize("end", ["leave", pytest.param("close", marks=pytest.mark.soak), "drop"])
def test_a_checkpointer_that_ends_at_once_still_hands_over_what_was_staged(end: str, tmp_path: pathlib.Path) -> None:
    with own_worker() as other:  # its worker outlives the first checkpointer
        checkpointer = AsyncCheckpointer()
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        worker = worker_of(checkpointer)
        with worker.frozen():
            checkpointer.save(STATE, tmp_path / "1")
            lose(checkpointer)
        if end == "leave":
            checkpointer.leave()
        elif end == "close":
            checkpointer.close(0.0)
        else:
            with pytest.warns(ResourceWarning, match="dropped"):
                del checkpointer
                gc.collect()
        wait_until((tmp_path / "1" / "manifest.json").exists, "the next worker commits")
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        other.save(STATE, tmp_path / "2").written.result(DEADLINE_S)


@pytest.mark.parametrize("end", ["leave", "drop"])
def test_a_checkpointer_that_ends_in_the_moment_of_the_loss_hands_over_what_was_staged(
    end: str, tmp_path: pathlib.Path
) -> None:
    goes_on = threading.Event()
    with own_worker() as other:
        checkpointer = AsyncCheckpointer()
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        connection = checkpointer._process._connection  # type: ignore[attr-defined]

        def late(*arguments: Any, report: Any = connection._report_loss) -> None:
            assert goes_on.wait(DEADLINE_S)
            report(*arguments)

        connection._report_loss = late
        with worker_of(checkpointer).frozen():
            checkpointer.save(STATE, tmp_path / "1")
            lose(checkpointer)
        if end == "leave":
            checkpointer.leave(0.2)
        else:
            with pytest.warns(ResourceWarning, match="dropped"):
                del checkpointer
                gc.collect()
        del connection, late
        goes_on.set()
        wait_until((tmp_path / "1" / "manifest.json").exists, "the next worker commits")
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        other.save(STATE, tmp_path / "2").written.result(DEADLINE_S)


def test_a_checkpointer_that_leaves_before_another_worker_was_found_still_hands_over_what_was_staged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, start = threading.Event(), launcher.start_worker

    def late(endpoint: str, **options: Any) -> None:
        assert found.wait(DEADLINE_S)
        start(endpoint, **options)

    with own_worker() as other:
        checkpointer = AsyncCheckpointer()
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        with monkeypatch.context() as patch, worker_of(checkpointer).frozen():
            patch.setattr(launcher, "start_worker", late)
            handle = checkpointer.save(STATE, tmp_path / "1")
            lose(checkpointer)
            checkpointer.leave(0.2)
            assert isinstance(handle.written.exception(0), CheckpointerClosedError)
            checkpointer.close()
            found.set()
        wait_until((tmp_path / "1" / "manifest.json").exists, "the next worker commits")
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        other.save(STATE, tmp_path / "2").written.result(DEADLINE_S)


@pytest.mark.soak
def test_losses_in_turn_leak_neither_fds_nor_mappings_nor_threads(tmp_path: pathlib.Path) -> None:
    def held() -> tuple[int, int, int]:
        maps = pathlib.Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:asyncckpt"), threading.active_count()

    with own_worker() as checkpointer:
        checkpointer.save(STATE, tmp_path / "first").written.result(DEADLINE_S)
        counts = []
        for n in range(6):
            worker = worker_of(checkpointer)
            with worker.frozen():
                handle = checkpointer.save(STATE, tmp_path / f"lost-{n}")
                worker.kill()
            handle.written.result(DEADLINE_S)
            wait_until(lambda: not takeovers(), "the takeover's thread ends")
            counts.append(held())
        assert counts[-1] <= max(counts[:2]), counts
        assert counts[-1][1] == 1


def takeovers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asyncckpt-failover"]


def test_a_save_in_the_moment_of_the_death_needs_a_slot_and_gets_it_from_the_next_worker(
    tmp_path: pathlib.Path,
) -> None:
    with saved_once(tmp_path) as checkpointer:
        with worker_of(checkpointer).frozen():  # the first save keeps its slot, so that the second needs another
            first = checkpointer.save(STATE, tmp_path / "1")
            session = checkpointer._process._connection.session  # type: ignore[attr-defined]
            os.kill(session.worker.pid, 9)
            second = checkpointer.save(STATE, tmp_path / "2")
        for handle in (first, second):
            handle.written.result(DEADLINE_S)


def test_a_slot_that_joins_the_pool_after_the_takeover_goes_to_the_next_worker_as_well(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_worker(keep_in_memory="latest") as checkpointer:  # so another worker is found at once, for the first slot
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        connection = checkpointer._process._connection  # type: ignore[attr-defined]
        lent = SlotLender._allocate

        def lent_late(lender: SlotLender, session: Any, nbytes: int, within_s: float | None) -> Any:
            monkeypatch.setattr(SlotLender, "_allocate", lent)
            slot = lent(lender, session, nbytes, within_s)
            worker_of(checkpointer).kill()
            wait_until(lambda: connection.session is not session and connection.is_ready, "another worker has the rest")
            return slot

        monkeypatch.setattr(SlotLender, "_allocate", lent_late)
        checkpointer.save(STATE, tmp_path / "1").written.result(DEADLINE_S)
        assert SlotLender._allocate is lent
        states.assert_same(asyncckpt.load(tmp_path / "1"), STATE)
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)
