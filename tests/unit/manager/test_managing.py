"""The parts of a CheckpointManager: when to save, when to stop, what to tell, without workers and sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_worker import wait_until

torch = pytest.importorskip("torch")

from asyncckpt import RngState, optimal_interval, refresh_master_params  # noqa: E402
from asyncckpt.config import CheckpointerConfig, RankInfo  # noqa: E402
from asyncckpt.errors import (  # noqa: E402
    ConfigError,
    PlanTimeoutError,
    SaveFailedError,
    SignalHandlerError,
    SlotTimeoutError,
)
from asyncckpt.format.names import SaveId  # noqa: E402
from asyncckpt.maintenance.policy import RetentionPolicy  # noqa: E402
from asyncckpt.manager import retention_thread, save_policy, step_agreement  # noqa: E402
from asyncckpt.manager.manager import (  # noqa: E402
    CheckpointManager,
)
from asyncckpt.manager.master_params import MasterParams, master_pairs  # noqa: E402
from asyncckpt.manager.noticeboard import Noticeboard  # noqa: E402
from asyncckpt.manager.preemption import (  # noqa: E402
    Preemption,
    SignalRecorder,
)
from asyncckpt.manager.retention_thread import (  # noqa: E402
    DirectoryHold,
    RetentionThread,
    RootRetention,
)
from asyncckpt.manager.save_policy import (  # noqa: E402
    AFTER_SAVES,
    IntervalAdvisor,
    LocalClock,
    SavePolicy,
    SharedClock,
)
from asyncckpt.manager.step_agreement import (  # noqa: E402
    NoticeboardPoller,
    StopAgreement,
)
from asyncckpt.save_handle import SaveHandle, SaveReport  # noqa: E402


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# ---- when to save ---------------------------------------------------------------------------------------------------


def test_seconds_count_from_the_last_save_whatever_its_reason() -> None:
    now = Clock()
    clock = LocalClock(10.0, now)
    policy = SavePolicy(None, None, None, clock)
    found = []
    for step in range(30):
        now.now += 1.0
        if policy.is_due(step) or step == 13:
            clock.save_begun()
            found.append(step)
    assert found == [9, 13, 23]


# ---- what goes behind the training


def removing(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RootRetention, threading.Event]:
    """Return what removes checkpoints behind the training, in the middle of a removal, and what ends that."""
    begun, ended = threading.Event(), threading.Event()

    def slow(*given: Any, **more: Any) -> None:
        begun.set()
        assert ended.wait(60)

    monkeypatch.setattr(retention_thread, "prune", slow)
    house = RootRetention(str(root), RetentionPolicy(max_to_keep=1), None, is_leader=True, dead_after_s=1.0)
    save = DirectoryHold("a")
    house.save_begins(save, 60.0)
    house.save_ended(save, is_committed=True)
    assert begun.wait(60)
    return house, ended


def test_a_save_waits_for_removals_and_only_once_for_those_that_never_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house, ended = removing(tmp_path, monkeypatch)
    house.save_begins(DirectoryHold("b"), 0.01)
    house.save_begins(DirectoryHold("c"), 60.0)  # it has been waited for in vain: not again
    assert caplog.text.count("cannot remove checkpoints as fast") == 1
    waiting = threading.Thread(target=house.wait, args=(60.0,))
    waiting.start()
    ended.set()
    waiting.join(60)
    assert not waiting.is_alive()
    house.save_begins(DirectoryHold("d"), 60.0)
    house.close(60.0)


def test_a_save_does_not_wait_for_removals_once_there_is_a_hurry(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal that comes while it waits leaves the grace to the snapshot."""
    house, ended = removing(tmp_path, monkeypatch)
    asked = itertools.count()
    house.save_begins(DirectoryHold("b"), 1e6, lambda: next(asked) > 0)
    assert "cannot remove checkpoints as fast" not in caplog.text
    ended.set()
    house.close(60.0)


@pytest.mark.parametrize(("is_leader", "is_said"), [(True, True), (False, False)])
def test_in_an_empty_root_nobody_is_warned_of(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_leader: bool,
    is_said: bool,
) -> None:
    house = RootRetention(str(tmp_path), RetentionPolicy(), None, is_leader=is_leader, dead_after_s=1.0)
    house.warn_of_others()
    assert not caplog.text
    monkeypatch.setattr(house, "all_steps", lambda: [3, 90_000])
    house.warn_of_others()
    assert ("up to step 90000" in caplog.text) is is_said
    house.close(60.0)


def test_a_directory_is_busy_until_each_of_its_saves_has_ended_however_often_that_is_said(
    tmp_path: pathlib.Path,
) -> None:
    house = RootRetention(str(tmp_path), RetentionPolicy(), None, is_leader=True, dead_after_s=1.0)
    first, second, never = DirectoryHold("a"), DirectoryHold("a"), DirectoryHold("a")
    for save in (first, second):
        house.save_begins(save, 0.0)
    for save in (never, first, first):
        house.save_ended(save, is_committed=False)
        assert house.busy == {"a"}
    house.save_ended(second, is_committed=True)
    assert house.busy == set()
    house.close(60.0)


class Interrupted:
    """Raises a KeyboardInterrupt at the nth place of `CheckpointManager.save`: between its lines, or as a call returns.

    Attributes:
        places: How many there were.
    """

    def __init__(self, nth: int) -> None:
        self._nth, self.places, self._before = nth, 0, sys.gettrace()
        self._codes = {CheckpointManager.save.__code__: "line", RootRetention.save_begins.__code__: "return"}

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        wanted = self._codes.get(frame.f_code)
        if event == wanted:
            self.places += 1
            if self.places == self._nth:
                raise KeyboardInterrupt
        return None if wanted is None else self._trace

    def __enter__(self) -> Interrupted:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


class StandIn:
    """A checkpointer that begins saves and ends none."""

    rank_info, config, exchange = RankInfo(0, 1), CheckpointerConfig(), None
    rank_changes, _coordination = 0, None

    def __init__(self) -> None:
        self.handles: list[SaveHandle] = []

    def save(self, state: Any, path: str, *, step: int, metadata: Any) -> SaveHandle:
        self.handles.append(SaveHandle(step=step, path=path, save_id=SaveId(1, step, "0" * 12)))
        return self.handles[-1]


def test_wherever_a_save_is_interrupted_its_directory_is_busy_for_as_long_as_it_goes_on(tmp_path: pathlib.Path) -> None:
    for nth in itertools.count(1):
        saver: Any = StandIn()
        manager = CheckpointManager(tmp_path, checkpointer=saver)
        with Interrupted(nth) as interrupted, contextlib.suppress(KeyboardInterrupt):
            manager.save(7, {})
        manager._root_lock.release()  # type: ignore[union-attr]
        assert manager._retention.busy == {"step-00000007" for _ in saver.handles}, f"place {nth}"
        for handle in saver.handles:
            handle.fail(TimeoutError("the test's end"))
            handle.written.exception(0.0)
        assert manager._retention.busy == set(), f"place {nth}"
        manager.close()
        if interrupted.places < nth:
            break
    assert nth > 20


def test_only_rank_0_removes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_thread, "prune", lambda *given, **more: pytest.fail("it does"))
    house = RootRetention(str(tmp_path), RetentionPolicy(max_to_keep=1), None, is_leader=False, dead_after_s=1.0)
    save = DirectoryHold("a")
    house.save_begins(save, 0.0)
    house.save_ended(save, is_committed=True)
    house.wait(60.0)
    house.close(60.0)


def test_retention_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work() -> None:
        done.append(len(done))
        if len(done) == 1:
            raise OSError("the disk is away")

    pruner = RetentionThread(work)
    for _ in range(2):
        pruner.request()
        assert pruner.wait(60.0)
    for _ in range(2):
        pruner.close(60.0)
    pruner.request()
    assert done == [0, 1] and "retention failed" in caplog.text


def test_retention_without_a_thread_asks_for_one_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    pruner = RetentionThread(lambda: done.append(1))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        pruner.request()
    assert pruner.wait(0.0) and done == [] and "retention: no thread can be started" in caplog.text
    pruner.request()
    assert pruner.wait(60.0) and done == [1]
    pruner.close(60.0)


# ---- ranks that agree without meeting -------------------------------------------------------------------------------


class Wall:
    """What the boards of several ranks hang on."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.posted: dict[str, dict[int, bytes]] = {}


class SimulatedBoard(Noticeboard):
    """One rank's view of a wall."""

    def __init__(self, wall: Wall, rank: int) -> None:
        self._wall, self._rank = wall, rank

    def _on(self, name: str) -> dict[int, bytes]:
        return self._wall.posted.setdefault(name, {})

    def post(self, name: str, data: bytes) -> None:
        assert self._on(name).setdefault(self._rank, data) == data, "another thing was said before"

    def from_rank_0(self, name: str) -> bytes | None:
        return self._on(name).get(0)

    def has_any(self, name: str) -> bool:
        return bool(self._on(name))

    def is_complete(self, name: str) -> bool:
        return not self.missing(name)

    def missing(self, name: str) -> list[int]:
        return [rank for rank in range(self._wall.world_size) if rank not in self._on(name)]

    def value_of(self, name: str, rank: int) -> bytes:
        return self._on(name)[rank]


class Blocked(Exception):
    """The training thread of a simulated rank would wait."""


def blocked() -> None:
    raise Blocked


class SimulatedRank:
    """A rank whose training thread and watch take turns as the schedule has it."""

    def __init__(self, wall: Wall, rank: int, steps: list[int]) -> None:
        self.told: float | None = None
        self.stopping = StopAgreement(wall.world_size, lambda: self.told, blocked, 1.0)
        self.board, self.steps = SimulatedBoard(wall, rank), steps
        self.n = 0
        self.stopped_at: int | None = None

    def train(self) -> None:
        """One step, unless it waits for the others."""
        if self.stopped_at is None and self.n < len(self.steps):
            try:
                if self.stopping.stops_at(self.steps[self.n]):
                    self.stopped_at = self.steps[self.n]
                else:
                    self.n += 1
            except Blocked:
                pass

    def watch(self) -> None:
        self.stopping.poll(self.board)


def test_in_every_schedule_all_ranks_stop_at_the_same_step_which_none_has_passed(rng: random.Random) -> None:
    for _ in range(200):
        world_size, wall = rng.randint(2, 4), None
        wall = Wall(world_size)
        steps = sorted(rng.sample(range(1000), 60))
        ranks = [SimulatedRank(wall, rank, steps) for rank in range(world_size)]
        told_after = rng.randrange(40)
        for n in itertools.count():
            if n == told_after or (n > told_after and rng.random() < 0.02):
                rng.choice(ranks).told = float(n)
            behind = min(rank.n for rank in ranks)
            rank = rng.choice(ranks)
            if rng.random() < 0.5:
                rank.watch()
            elif rank.n <= behind + 1:  # a collective in each step: none is two steps ahead
                rank.train()
            if all(rank.stopped_at is not None for rank in ranks):
                break
            assert n < 50_000, "they never stop"
        assert len({rank.stopped_at for rank in ranks}) == 1
        at = ranks[0].stopped_at
        assert at in steps and all(
            rank.stopping.stops_at(later) for rank in ranks for later in steps if later >= (at or 0)
        )
        assert not any(rank.stopping.stops_at(earlier) for rank in ranks for earlier in steps if earlier < (at or 0))


def test_a_rank_that_has_ended_holds_nobody_up() -> None:
    wall = Wall(2)
    ended, left = (SimulatedRank(wall, rank, [1, 2, 3]) for rank in range(2))
    for _ in range(3):
        ended.train()
    ended.stopping.post_passed(ended.board)
    left.train()
    left.told = 1.0
    left.watch()
    left.watch()
    assert left.stopping.stop_step == 4, "later than what the other one has done"


def test_ranks_that_say_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = StopAgreement(3, lambda: 1.0, lambda: None, 0.01)
    wall = Wall(3)
    SimulatedBoard(wall, 2).post(step_agreement.PASSED, b"7")
    found.poll(SimulatedBoard(wall, 0))
    with pytest.raises(PlanTimeoutError) as caught:
        found.stops_at(5)
    assert caught.value.missing_ranks == [1]


class PlannedRank:
    """A rank with a clock, or without."""

    def __init__(self, wall: Wall, rank: int, interval_s: float, now: Clock) -> None:
        self.plan = SharedClock(interval_s, is_leader=rank == 0, poll_now=lambda: None, poll_often=blocked, now=now)
        self.board = SimulatedBoard(wall, rank)
        self.step = 0
        self.saved: list[int] = []

    def train(self) -> bool:
        """One step, unless it waits for rank 0. Returns whether it was done."""
        try:
            if self.plan.is_due(self.step):
                self.plan.save_begun()
                self.saved.append(self.step)
        except Blocked:
            return False
        self.step += 1
        return True


def test_in_every_schedule_all_ranks_save_at_the_same_steps_when_it_is_time(rng: random.Random) -> None:
    for _ in range(40):
        now, wall, pace_s = Clock(), Wall(3), 10 ** rng.uniform(-2, 1)
        interval_s = rng.uniform(20, 200)
        ranks = [PlannedRank(wall, rank, interval_s, now) for rank in range(3)]
        waited = turns = 0
        while min(rank.step for rank in ranks) < 400:
            turns += 1
            assert turns < 100_000
            if rng.random() < 0.002:
                pace_s = min(10.0, max(0.01, pace_s * rng.choice([0.2, 5.0])))
            behind = min(rank.step for rank in ranks)
            rank = rng.choice(ranks)
            if rng.random() < 0.6:
                rank.plan.poll(rank.board)
            elif rank.step <= behind + 1:
                done = rank.train()
                waited += not done
                now.now += pace_s / 3 if done else 0.0
        first = min(len(rank.saved) for rank in ranks)
        assert all(rank.saved[:first] == ranks[0].saved[:first] for rank in ranks)
        assert max(len(rank.saved) for rank in ranks) <= first + 1


def test_at_an_even_pace_a_save_comes_every_interval() -> None:
    now = Clock()
    rank = PlannedRank(Wall(1), 0, 60.0, now)
    for _ in range(3000):
        now.now += 0.25
        assert rank.train()
    gaps = [b - a for a, b in itertools.pairwise(rank.saved)]
    assert len(rank.saved) >= 11 and all(230 <= gap <= 260 for gap in gaps), rank.saved


def test_without_a_word_of_rank_0_training_goes_on_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(save_policy, "WAIT_S", 0.0)
    plan = SharedClock(1.0, is_leader=False, poll_now=lambda: None, poll_often=lambda: None)
    assert [plan.is_due(step) for step in range(3)] == [False] * 3
    assert caplog.text.count("rank 0 has not decided") == 1


class OwnedBy(deque[Any]):
    """A table that may be touched only by who holds `lock`."""

    def __init__(self, lock: threading.Condition, *values: Any) -> None:
        super().__init__(values)
        self.lock, self.touched = lock, 0

    def append(self, value: Any) -> None:
        self.check()
        super().append(value)

    def popleft(self) -> Any:
        self.check()
        return super().popleft()

    def check(self) -> None:
        self.touched += 1
        assert self.lock._is_owned(), "the table was touched without its lock"  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Any:
        self.check()
        return super().__getitem__(index)

    def __len__(self) -> int:
        self.check()
        return super().__len__()


def test_what_rank_0_has_to_say_is_touched_by_the_holder_of_its_lock_only() -> None:
    now = Clock()
    ranks = [PlannedRank(Wall(2), rank, 30.0, now) for rank in range(2)]
    plan = ranks[0].plan
    table = plan._unposted = OwnedBy(plan._changed)
    for _ in range(500):
        now.now += 0.5
        assert ranks[0].train()
        ranks[0].plan.poll(ranks[0].board)
    assert table.touched > 100 and ranks[0].saved


class SlowBoard(SimulatedBoard):
    """Each post stays under way until the test lets it go; the first one fails."""

    def __init__(self, wall: Wall) -> None:
        super().__init__(wall, 0)
        self.reached, self.go, self.posted = threading.Semaphore(0), threading.Semaphore(0), list[str]()

    def post(self, name: str, data: bytes) -> None:
        self.reached.release()
        assert self.go.acquire(timeout=60)
        self.posted.append(name)
        if len(self.posted) == 1:
            raise SaveFailedError("the store is away", code="exchange")
        super().post(name, data)


def test_training_goes_on_while_a_record_is_posted_and_every_record_arrives_in_order() -> None:
    now, wall = Clock(), Wall(2)
    leader, follower = PlannedRank(wall, 0, 5.0, now), PlannedRank(wall, 1, 5.0, now)
    board = SlowBoard(wall)

    def look() -> None:
        with contextlib.suppress(SaveFailedError):
            leader.plan.poll(board)

    def train() -> None:
        for _ in range(40):
            now.now += 0.5
            assert leader.train(), "without waiting for a post"

    for _ in range(6):
        train()
        thread = threading.Thread(target=look)
        thread.start()
        assert board.reached.acquire(timeout=60), "a post is under way"
        train()
        for _ in range(100):
            board.go.release()
        thread.join(60)
        assert not thread.is_alive()
        while board.go.acquire(blocking=False) or board.reached.acquire(blocking=False):
            pass
    leader.plan.poll(leader.board)
    numbers = [int(name.partition("/")[2]) for name in board.posted]
    assert numbers == [0, *range(len(numbers) - 1)], "the one that failed is posted again; then each once"
    follower.plan.poll(follower.board)
    while follower.step < leader.step:
        assert follower.train()
    assert follower.saved == leader.saved != []


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def usual_handler() -> Iterator[list[int]]:
    """A handler for SIGUSR1 that notes each signal."""
    seen: list[int] = []

    def usual(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, usual)
    yield seen
    assert signal.signal(signal.SIGUSR1, before) is usual, "it was not put back"


def test_a_signal_is_noted_passed_on_and_the_handler_put_back(usual_handler: list[int]) -> None:
    preemption = Preemption(signal.SIGUSR1, 25.0, 1, lambda: None)
    assert not preemption.stops_at(1) and preemption.grace_left_s is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert usual_handler == [signal.SIGUSR1]
    assert [preemption.stops_at(step) for step in (2, 2, 1, 3)] == [True, True, False, True]
    assert 0 < (preemption.grace_left_s or 0) <= 25.0
    for _ in range(2):
        preemption.close()


def test_a_step_that_was_passed_is_not_stopped_at_when_the_signal_comes_right_after(usual_handler: list[int]) -> None:
    """Else the loop would end at a step that nobody has saved."""
    preemption = Preemption(signal.SIGUSR1, 25.0, 1, lambda: None)
    assert not preemption.stops_at(5), "should_save"
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [preemption.stops_at(step) for step in (5, 6, 5)] == [False, True, False]
    preemption.close()


def test_a_handler_that_came_later_stays(usual_handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    note = SignalRecorder()
    note.install([signal.SIGUSR1])
    signal.signal(signal.SIGUSR1, before)
    note.restore()


def test_a_default_that_ends_the_process_is_put_off() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    assert before is signal.SIG_DFL
    preemption = Preemption([signal.SIGUSR2, "SIGUSR2" and signal.SIGUSR2], 25.0, 1, lambda: None)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert preemption.stops_at(0)
    preemption.close()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_end_of_the_grace_is_said_while_the_save_still_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A process that is killed then has said so."""
    preemption = Preemption((), 0.01, 1, lambda: None)
    with preemption.log_if_late(7):
        pass  # nobody was told to stop
    preemption.request()
    with preemption.log_if_late(8):
        wait_until(lambda: "step 8 was not staged within the grace time of 0.01 s" in caplog.text, "it is said")
    assert "step 7" not in caplog.text


class OldTimeoutError(Exception):
    """As `concurrent.futures.TimeoutError` of Python 3.10: no builtin."""


@pytest.mark.parametrize("of_310", [False, True])
@pytest.mark.parametrize("outcome", ["staged", "late", "SlotTimeoutError", "TimeoutError", "SaveFailedError"])
def test_after_the_signal_what_is_said_of_the_last_save_is_what_became_of_it(
    outcome: str, of_310: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if of_310:
        monkeypatch.setattr(concurrent.futures._base, "TimeoutError", OldTimeoutError)
        monkeypatch.setattr(concurrent.futures, "TimeoutError", OldTimeoutError)
    handle = SaveHandle(step=8, path="/x", save_id=SaveId(0, 1, "aa" * 8))
    errors = {
        "SlotTimeoutError": SlotTimeoutError("no slot", save_id="x", step=8, path="/x", timeout_s=1.0),
        "TimeoutError": TimeoutError("of a device"),
        "SaveFailedError": SaveFailedError("full", code="disk"),
    }
    if outcome == "staged":
        handle.staged.set_result(SaveReport(save_id="x", nbytes=1))
    elif outcome in errors:
        handle.fail(errors[outcome])
    preemption = Preemption((), 0.05, 1, lambda: None)
    preemption.request()
    preemption.await_staged(handle)
    expected = {"staged": "step 8 is staged", "late": "step 8 was not staged within"}
    assert expected.get(outcome, "step 8 could not be staged") in caplog.text
    assert len(caplog.records) == 1


def test_a_save_within_the_grace_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    preemption = Preemption((), 3600.0, 1, lambda: None)
    preemption.request()
    with preemption.log_if_late(8):
        pass
    assert not caplog.text


def _refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_the_last_save_goes_on_without_a_thread_that_watches_the_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preemption = Preemption((), 3600.0, 1, lambda: None)
    preemption.request()
    saved = []
    with monkeypatch.context() as patched:
        _refuse_threads(patched)
        with preemption.log_if_late(8):
            saved.append(8)
    assert saved == [8] and "can't start new thread" in caplog.text


def test_a_watch_without_a_thread_says_so_once_and_asks_for_one_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked, last = threading.Event(), []
    watch = NoticeboardPoller(lambda: SimulatedBoard(Wall(1), 0), [lambda board: looked.set()])
    with monkeypatch.context() as patched:
        _refuse_threads(patched)
        for _ in range(2):
            watch.start()
    assert caplog.text.count("can't start new thread") == 1
    for _ in range(2):
        watch.start()
    assert looked.wait(60)
    watch.close(last.append, 60.0)
    assert len(last) == 1


def test_a_forked_child_is_ended_by_the_signal_as_if_nobody_handled_it() -> None:
    """Pools end their children so, and wait for them."""
    preemption = Preemption(signal.SIGTERM, 25.0, 1, lambda: None)
    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)

    def lives() -> None:
        told.send("up")  # a signal that comes before the interpreter is ready is lost to every handler
        time.sleep(60)

    child = context.Process(target=lives)
    child.start()
    assert heard.poll(60) and heard.recv() == "up"
    child.terminate()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM
    child.close()
    heard.close()
    told.close()
    assert not preemption.stops_at(1)
    preemption.close()


def test_a_forked_child_calls_the_handler_that_was_there() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    preemption = Preemption(signal.SIGUSR1, 25.0, 1, lambda: None)
    child = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGUSR1,))
    child.start()
    child.join(60)
    assert child.exitcode == 7
    child.close()
    preemption.close()
    signal.signal(signal.SIGUSR1, before)


def test_notes_that_are_closed_in_the_order_in_which_they_were_made_hide_no_signal() -> None:
    """The first one finds the second one's handler in its place, and the second one puts the first one's back."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    first, second = (Preemption(signal.SIGUSR1, 25.0, 1, lambda: None) for _ in range(2))
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    assert second.stops_at(1) and not first.stops_at(1) and len(heard) == 1
    second.close()
    signal.raise_signal(signal.SIGUSR1)
    assert len(heard) == 2
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_process_ends_by_the_signal_once_every_note_is_closed(closed: int) -> None:
    def lives() -> None:
        notes = [Preemption(signal.SIGTERM, 25.0, 1, lambda: None) for _ in range(2)]
        for note in notes[:closed]:
            note.close()
        signal.raise_signal(signal.SIGTERM)
        os._exit(7)  # it was put off

    child = multiprocessing.get_context("fork").Process(target=lives)
    child.start()
    child.join(60)
    assert child.exitcode == {1: 7, 2: -signal.SIGTERM}[closed]
    child.close()


def test_a_note_that_is_closed_in_another_thread_hides_no_signal() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    preemption = Preemption(signal.SIGUSR1, 25.0, 1, lambda: None)
    thread = threading.Thread(target=preemption.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] and preemption.grace_left_s is None
    signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_a_handler_is_a_typed_error() -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            Preemption(signal.SIGUSR1, 25.0, 1, lambda: None)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert isinstance(caught[0], SignalHandlerError) and caught[0].signal == "SIGUSR1"


# ---- random numbers -------------------------------------------------------------------------------------------------


def drawn() -> list[Any]:
    found: list[Any] = [random.random(), random.gauss(0, 1), torch.rand(3).tolist(), torch.randperm(5).tolist()]
    if "numpy" in sys.modules:
        import numpy

        found += [numpy.random.rand(), numpy.random.randn()]
    return found


@pytest.fixture
def own_generators() -> Iterator[None]:
    """Generators that may be set: afterwards they are as before."""
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


def test_all_generators_are_captured_and_put_back(own_generators: None) -> None:
    random.gauss(0, 1)  # leaves a second one behind
    state = RngState().state_dict()
    first = drawn()
    assert drawn() != first
    RngState().load_state_dict(state)
    assert drawn() == first


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_a_numpy_that_draws_from_another_generator_goes_on_as_well(own_generators: None, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
    try:
        numpy.random.standard_normal()
        state = RngState().state_dict()
        expected = numpy.random.standard_normal(3).tolist()
        RngState().load_state_dict(state)
        assert numpy.random.standard_normal(3).tolist() == expected
    finally:
        numpy.random.set_bit_generator(before)


def test_what_a_state_lacks_keeps_its_place(own_generators: None) -> None:
    state = RngState().state_dict()
    torch_only = {"torch": state["torch"]}
    expected = torch.rand(2).tolist()
    after = random.random()
    RngState().load_state_dict(state)
    random.random()
    RngState().load_state_dict(torch_only)
    assert torch.rand(2).tolist() == expected and random.random() != after


# ---- masters --------------------------------------------------------------------------------------------------------


class MixedPrecision:
    """An optimizer of bfloat16 weights with float32 masters, as Megatron-LM has it; its state dict may lack them."""

    def __init__(self, weights: list[torch.nn.Parameter], *, saves_masters: bool) -> None:
        self.float16_groups = [weights]
        self.fp32_from_float16_groups = [[w.detach().float().requires_grad_() for w in weights]]
        self.optimizer = torch.optim.AdamW(self.fp32_from_float16_groups[0], lr=0.01)
        self.saves_masters = saves_masters

    def step(self) -> None:
        for weight, master in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            master.grad = torch.ones_like(master) * weight.float().cos()
        self.optimizer.step()
        for weight, master in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            weight.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = {"masters": self.fp32_from_float16_groups} if self.saves_masters else {}
        return {"optimizer": self.optimizer.state_dict(), **masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for group, saved in zip(self.fp32_from_float16_groups, state.get("masters", []), strict=False):
                for master, value in zip(group, saved, strict=True):
                    master.copy_(value)


def mixed(seed: int, *, saves_masters: bool) -> tuple[torch.nn.Parameter, MixedPrecision]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(50, generator=generator).bfloat16())
    return weight, MixedPrecision([weight], saves_masters=saves_masters)


def test_without_masters_in_the_checkpoint_the_next_step_is_that_of_an_optimizer_that_began_with_these_weights() -> (
    None
):
    weight, optimizer = mixed(0, saves_masters=False)
    twin, never_interrupted = mixed(0, saves_masters=False)
    other, restored = mixed(1, saves_masters=False)
    masters = MasterParams([restored, 3, None])
    restored.load_state_dict(optimizer.state_dict())
    other.data.copy_(weight)
    assert masters.refresh() == 1
    restored.step()
    never_interrupted.step()
    assert torch.equal(other, twin), "the first step after the load undoes it"
    optimizer.step()
    assert torch.equal(weight, twin)


def test_masters_that_were_loaded_stay_to_the_last_bit() -> None:
    weight, optimizer = mixed(0, saves_masters=True)
    for _ in range(3):
        optimizer.step()
    other, restored = mixed(1, saves_masters=True)
    masters = MasterParams([restored])
    restored.load_state_dict(optimizer.state_dict())
    other.data.copy_(weight)
    assert masters.refresh() == 0
    expected = optimizer.fp32_from_float16_groups[0][0]
    assert not torch.equal(expected, weight.float()), "it knows more than the weight"
    assert torch.equal(restored.fp32_from_float16_groups[0][0], expected)


def test_a_master_whose_rounding_is_the_weight_is_left_alone() -> None:
    weight, optimizer = mixed(0, saves_masters=False)
    optimizer.step()
    before = optimizer.fp32_from_float16_groups[0][0].clone()
    assert refresh_master_params(optimizer) == 0
    assert torch.equal(optimizer.fp32_from_float16_groups[0][0], before)
    weight.data.add_(1)
    assert refresh_master_params(optimizer) == 1
    assert torch.equal(optimizer.fp32_from_float16_groups[0][0], weight.float())


def _apex(weight: Any, master: Any) -> Any:
    return type("Apex", (), {"fp16_groups": [[weight]], "fp32_from_fp16_groups": [[master]]})()


def _amp(weight: Any, master: Any) -> Any:
    return type("Amp", (), {"_amp_stash": _apex(weight, master)})()


def _flat(weight: Any, master: Any) -> Any:
    return type("Flat", (), {"fp16_groups_flat": [weight], "fp32_groups_flat": [master]})()


def _fused(weight: Any, master: Any) -> Any:
    groups = {"param_groups": [{"params": [weight]}], "param_groups_master": [{"params": [master]}]}
    return type("Fused", (), groups)()


def _in_state(weight: Any, master: Any) -> Any:
    return type("InState", (), {"state": {weight: {"master_param": master}}})()


def _own(weight: Any, master: Any) -> Any:
    return type("Own", (), {"master_param_pairs": lambda self: [(weight, master)]})()


def _wrapped(weight: Any, master: Any) -> Any:
    return type("Wrapper", (), {"optimizer": _in_state(weight, master)})()


@pytest.mark.parametrize("form", [_apex, _amp, _flat, _fused, _in_state, _own, _wrapped])
def test_each_known_form_of_masters_is_understood(form: Callable[[Any, Any], Any]) -> None:
    weight, master = torch.ones(3, dtype=torch.float16), torch.zeros(3)
    assert len(master_pairs(form(weight, master))) == 1
    assert refresh_master_params(form(weight, master)) == 1
    assert torch.equal(master, torch.ones(3))


def test_parameters_that_a_load_does_not_reach_are_counted() -> None:
    """The usual home-made mixed precision: the optimizer has only the copies, and a checkpoint has none of them."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    copies = [one.detach().clone().float() for one in model.parameters()]
    home_made, usual = torch.optim.SGD(copies, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    both = [MasterParams([model, one]) for one in (home_made, usual)]
    model.load_state_dict({name: torch.ones_like(one) for name, one in model.state_dict().items()})
    assert [one.untouched() for one in both] == [2, 0]


def test_masters_that_are_spared_stay() -> None:
    weight, master = torch.ones(3, dtype=torch.float16), torch.zeros(3)
    assert refresh_master_params(_own(weight, master), but=[master]) == 0
    assert torch.equal(master, torch.zeros(3))


def test_a_plain_optimizer_keeps_none() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert master_pairs(optimizer) == []


# ---- how often ------------------------------------------------------------------------------------------------------


def test_the_interval_loses_least_in_all() -> None:
    """Against Daly's own model of the time that a job takes, equation 13, looked through by brute force."""
    for cost_s, mtbf_s in ((1.0, 3600.0), (60.0, 86400.0), (300.0, 7200.0)):
        wasted = {
            tau: mtbf_s * (math.exp((tau + cost_s) / mtbf_s) - 1) / tau
            for tau in (optimal_interval(cost_s, mtbf_s) * (0.3 + 0.01 * n) for n in range(200))
        }
        best = min(wasted, key=lambda tau: wasted[tau])
        assert optimal_interval(cost_s, mtbf_s) == pytest.approx(best, rel=0.03)
    assert optimal_interval(1e-3, 1e6) == pytest.approx(math.sqrt(2 * 1e-3 * 1e6), rel=1e-3)  # Young's
    assert optimal_interval(save_cost_s=100.0, mtbf_s=50.0) == 50.0
    assert optimal_interval(0.0, 50.0) == 0.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_an_interval_of_nonsense_is_refused(cost_s: float, mtbf_s: float) -> None:
    with pytest.raises(ConfigError):
        optimal_interval(cost_s, mtbf_s)


def test_the_advice_comes_once_and_without_the_first_save(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    advice = IntervalAdvisor(7200.0)
    for seconds in (50.0, *[1.0] * (AFTER_SAVES + 3)):
        advice.record_cost(seconds)
    assert len(caplog.records) == 1
    assert f"every {optimal_interval(1.0, 7200.0):.0f} s" in caplog.text
    IntervalAdvisor(None).record_cost(1.0)
    with pytest.raises(ConfigError):
        IntervalAdvisor(-3.0)
