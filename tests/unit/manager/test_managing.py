"""The parts of a CheckpointManager: when to save, when to stop, what to tell, without workers and sockets."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from simulated_boards import SimulatedBoard, Wall

from asyncckpt import SyncCheckpointer, optimal_interval
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import ConfigError, PlanTimeoutError, SaveFailedError
from asyncckpt.format.manifest import decode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId
from asyncckpt.maintenance import retention
from asyncckpt.maintenance.policy import RetentionPolicy, manager_metadata
from asyncckpt.manager import retention_thread, save_policy, step_agreement
from asyncckpt.manager.manager import CheckpointManager
from asyncckpt.manager.retention_thread import DirectoryHold, RetentionThread, RootRetention
from asyncckpt.manager.save_policy import (
    AFTER_SAVES,
    IntervalAdvisor,
    LocalClock,
    SavePolicy,
    SharedClock,
)
from asyncckpt.manager.step_agreement import StopAgreement
from asyncckpt.save_handle import SaveHandle


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


def removing(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RootRetention, threading.Event]:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal that comes while it waits leaves the grace to the snapshot."""
    house, ended = removing(tmp_path, monkeypatch)
    asked = itertools.count()
    house.save_begins(DirectoryHold("b"), 1e6, lambda: next(asked) > 0)
    assert "cannot remove checkpoints as fast" not in caplog.text
    ended.set()
    house.close(60.0)


def test_a_directory_is_busy_until_each_of_its_saves_has_ended_however_often_that_is_said(
    tmp_path: Path,
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


@pytest.mark.parametrize("place", ["runs", "mirror"])
def test_what_a_rollback_has_abandoned_is_tried_last_in_the_root_and_in_the_mirror(tmp_path: Path, place: str) -> None:
    """The newest checkpoint is in one place only: it was not copied yet, or the disk is an older one."""
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    with SyncCheckpointer(fsync=False) as before:
        for step in (10, 20, 30):
            before.save({"n": step}, runs / f"step-{step}", step=step, metadata=manager_metadata((), None))
    shutil.copytree(runs, mirror)
    origin = decode_manifest((runs / "step-20" / MANIFEST_NAME).read_bytes()).save_id
    with SyncCheckpointer(fsync=False) as after:
        newest = tmp_path / place / "step-25"
        after.save({"n": 25}, newest, step=25, metadata=manager_metadata((origin,), None))
    house = RootRetention(str(runs), RetentionPolicy(), None, is_leader=True, dead_after_s=1e9, mirror=str(mirror))
    tried = [one.path for one in house.candidates(str(runs))]
    sound = [f"{root}/step-{step}" for step in (20, 10) for root in (runs, mirror)]
    assert tried == [str(newest), *sound, f"{runs}/step-30", f"{mirror}/step-30"]
    house.close(60.0)


def test_what_an_earlier_run_still_copies_to_the_mirror_is_not_given_up(tmp_path: Path) -> None:
    """A large file shows nothing while it is uploaded, and the worker of the earlier run may be on another node."""
    mirror, names = tmp_path / "mirror", []
    for step in (1, 2):
        with SyncCheckpointer(fsync=False) as run:
            run.save({"n": step}, mirror / f"step-{step}", step=step)
    (mirror / "step-1" / MANIFEST_NAME).unlink()  # not committed there yet
    for path in (mirror / "step-1").iterdir():
        os.utime(path, (time.time() - 600.0,) * 2)
        names.append(path.name)
    os.utime(mirror / "step-1", (time.time() - 600.0,) * 2)
    for dead_after_s in (1800.0, 60.0):
        house = RootRetention(
            str(tmp_path / "runs"),
            RetentionPolicy(),
            None,
            is_leader=True,
            dead_after_s=dead_after_s,
            mirror=str(mirror),
            mirror_policy=RetentionPolicy(max_to_keep=1),
        )
        house.request_prune()
        house.close(60.0)
        left = sorted(path.name for path in (mirror / "step-1").iterdir())
        assert left == (sorted(names) if dead_after_s > 600 else [MANIFEST_NAME]), "a tombstone"


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_stays_in_the_mirror_is_not_compared_with_what_came_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """To compare it, a whole checkpoint is read back, maybe from an object store."""
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    reads: list[str] = []
    with SyncCheckpointer(fsync=False) as before:
        before.save({"n": 1}, mirror / "step-1", step=1, metadata=manager_metadata((), None))
    origin = decode_manifest((mirror / "step-1" / MANIFEST_NAME).read_bytes()).save_id
    with SyncCheckpointer(fsync=False) as after:
        for step in (2, 3, 4):
            after.save({"n": step}, mirror / f"step-{step}", step=step, metadata=manager_metadata((origin,), None))
    shutil.copytree(mirror, runs)
    house = RootRetention(
        str(runs),
        RetentionPolicy(),
        None,
        is_leader=True,
        dead_after_s=1e9,
        mirror=str(mirror),
        mirror_policy=RetentionPolicy(max_to_keep=2),
    )
    if is_pinned:
        house.pin(str(runs / "step-1"))

    def refuse(path: str, *arguments: Any, **options: Any) -> bool:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    verify = retention.verify_checkpoint
    monkeypatch.setattr(
        retention,
        "verify_checkpoint",
        lambda path, *more, **options: reads.append(path) or verify(path, *more, **options),
    )
    monkeypatch.setattr(retention, "remove_checkpoint", refuse)
    for _ in range(3):
        house.request_prune()
        assert house._mirror_thread.wait(60.0)
    monkeypatch.undo()
    assert len(reads) == (0 if is_pinned else 1)
    house.request_prune()
    house.close(60.0)
    assert sorted(path.name for path in mirror.iterdir()) == [*["step-1"] * is_pinned, "step-3", "step-4"]


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


def test_wherever_a_save_is_interrupted_its_directory_is_busy_for_as_long_as_it_goes_on(tmp_path: Path) -> None:
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


def test_only_rank_0_removes_and_warns_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention_thread, "prune", lambda *given, **more: pytest.fail("it does"))
    house = RootRetention(str(tmp_path), RetentionPolicy(max_to_keep=1), None, is_leader=False, dead_after_s=1.0)
    monkeypatch.setattr(house, "all_steps", lambda: [3, 90_000])
    house.warn_of_others()
    assert not caplog.text
    save = DirectoryHold("a")
    house.save_begins(save, 0.0)
    house.save_ended(save, is_committed=True)
    house.wait(60.0)
    house.close(60.0)


def test_retention_that_fails_is_tried_again_and_a_storage_that_stays_away_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = OSError(errno.EIO, "away", "/mirror")
    outcomes: list[Exception | None] = [away, away, away, None, away, ValueError("a mistake")]

    def work() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    pruner = RetentionThread(work)
    while outcomes:
        pruner.request()
        assert pruner.wait(60.0)
    for _ in range(2):
        pruner.close(60.0)
    pruner.request()  # nothing is left to run
    failures = [record for record in caplog.records if "retention failed" in record.getMessage()]
    assert [record.exc_info is None for record in failures] == [True, True, False]
    assert "/mirror" in failures[0].getMessage()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_that_raises_ends_no_later_retention_and_no_save_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def refused(*arguments: object) -> None:
        raise ValueError("of a handler")

    def work() -> None:
        done.append(len(done))
        raise RuntimeError("a mistake")

    pruner = RetentionThread(work)
    monkeypatch.setattr(retention_thread._log, "exception", refused)
    for _ in range(2):
        pruner.request()
        assert pruner.wait(60.0)
    pruner.close(60.0)
    assert done == [0, 1]


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
        self.step = self.turns = 0
        self.saved: list[int] = []

    def train(self, restore_at: int | None = None) -> bool:
        """One step, unless it waits for rank 0; goes back to step 0 after `restore_at` of them. Returns whether."""
        try:
            if self.plan.is_due(self.step):
                self.plan.save_begun()
                self.saved.append(self.step)
        except Blocked:
            return False
        self.step += 1
        self.turns += 1
        if self.turns == restore_at:
            self.plan.restored()
            self.step = 0
        return True


def test_in_every_schedule_all_ranks_save_at_the_same_steps_when_it_is_time(rng: random.Random) -> None:
    for _ in range(40):
        now, wall, pace_s = Clock(), Wall(3), 10 ** rng.uniform(-2, 1)
        interval_s = rng.uniform(20, 200)
        ranks = [PlannedRank(wall, rank, interval_s, now) for rank in range(3)]
        waited, turns, restore_at = 0, 0, rng.randrange(100, 300)
        while min(rank.turns for rank in ranks) < 400:
            turns += 1
            assert turns < 100_000
            if rng.random() < 0.002:
                pace_s = min(10.0, max(0.01, pace_s * rng.choice([0.2, 5.0])))
            behind = min(rank.turns for rank in ranks)
            rank = rng.choice(ranks)
            if rng.random() < 0.6:
                rank.plan.poll(rank.board)
            elif rank.turns <= behind + 1:
                done = rank.train(restore_at)
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


def test_after_a_restore_of_an_earlier_step_saves_come_as_before() -> None:
    now = Clock()
    rank = PlannedRank(Wall(1), 0, 60.0, now)
    for _ in range(3000):
        now.now += 0.25
        assert rank.train(restore_at=2000)
    before, after = [n for n in rank.saved[:8] if n > 900], rank.saved[-3:]
    assert before and all(n < 1000 for n in after) and len(rank.saved) >= 11, rank.saved


def test_without_a_word_of_rank_0_training_goes_on_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(save_policy, "WAIT_S", 0.0)
    plan = SharedClock(1.0, is_leader=False, poll_now=lambda: None, poll_often=lambda: None)
    assert [plan.is_due(step) for step in range(3)] == [False] * 3
    assert caplog.text.count("rank 0 has not decided") == 1


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
