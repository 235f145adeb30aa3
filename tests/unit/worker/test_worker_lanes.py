"""Lanes of jobs, each of one file system: threads, their bounds, what becomes of jobs that find none; mount tables."""

from __future__ import annotations

import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import pytest

from asyncckpt_worker.core.events import Event, Tick
from asyncckpt_worker.io import lanes as lanes_module
from asyncckpt_worker.io import mount_table
from asyncckpt_worker.io.lanes import MOUNT_LANES, Job, Lanes
from asyncckpt_worker.io.mount_table import MountTable

DEADLINE_S = 20.0


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    """Lanes that are closed at the end."""
    lanes = Lanes()
    yield lanes
    assert lanes.close(5.0) and lanes.close(5.0)
    lanes.wake()


def collect(lanes: Lanes, count: int) -> list[object]:
    found: list[object] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} results"
        found += lanes.results()
    return found


def test_results_of_jobs_come_back_and_make_the_fd_readable(lanes: Lanes) -> None:
    lanes.submit("memory", Job(lambda _: Tick(now=1.0)))
    lanes.submit("memory", Job(lambda _: None))
    lanes.submit("memory", Job(lambda _: Tick(now=2.0)))
    assert collect(lanes, 2) == [Tick(now=1.0), Tick(now=2.0)]
    lanes.post(Tick(now=3.0))
    assert os.eventfd_read(lanes.fd) >= 1


def test_lane_runs_as_many_jobs_at_once_as_it_has_threads(lanes: Lanes) -> None:
    together = threading.Barrier(MOUNT_LANES["write"])

    def job(_: object) -> Tick:
        together.wait(DEADLINE_S)
        return Tick(now=0.0)

    for _ in range(2 * MOUNT_LANES["write"]):
        lanes.submit("write", Job(job, path="/a"))
    assert len(collect(lanes, 2 * MOUNT_LANES["write"])) == 2 * MOUNT_LANES["write"]


def test_job_that_raises_is_answered_in_its_place(lanes: Lanes) -> None:
    lanes.submit("memory", Job(lambda _: Tick(now=1 / 0), lambda error: Tick(now=float("division" in str(error)))))
    assert collect(lanes, 1) == [Tick(now=1.0)]


def test_job_of_which_even_the_answer_fails_costs_its_lane_no_thread(
    lanes: Lanes, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> Event | None:
        raise ValueError("simulated")

    lanes.submit("memory", Job(fails))
    lanes.submit("memory", Job(fails, fails))
    lanes.submit("memory", Job(lambda _: Tick(now=1.0)))
    assert collect(lanes, 1) == [Tick(now=1.0)]
    assert "a bug in the worker" in caplog.text and "has no result" in caplog.text


# ---- file systems


def table(tmp_path: pathlib.Path, *points: str) -> MountTable:
    """A table in which each of these directories is a file system of its own."""
    rows = [f"{n} 1 0:{n} / {point} rw,relatime - tmpfs none rw\n" for n, point in enumerate(("/", *points))]
    (tmp_path / "mountinfo").write_text("".join(rows))
    return MountTable(str(tmp_path / "mountinfo"))


@pytest.fixture
def two(tmp_path: pathlib.Path) -> Iterator[Callable[..., Lanes]]:
    """Make lanes for which `a` and `b` are two file systems."""
    made: list[Lanes] = []

    def make(**options: int) -> Lanes:
        made.append(Lanes(mounts=table(tmp_path, str(tmp_path / "a"), str(tmp_path / "b")), **options))
        return made[0]

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    yield make
    assert made[0].close(DEADLINE_S)


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Hanging:
    """Jobs that hang until they are let go."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), 0

    def __call__(self, pool: Executor) -> Event | None:
        self.begun += 1
        assert self.gate.wait(DEADLINE_S)
        return None


@pytest.mark.parametrize("lane", MOUNT_LANES)
def test_jobs_that_hang_on_a_file_system_leave_the_threads_of_others_free(
    two: Callable[..., Lanes], tmp_path: pathlib.Path, lane: str
) -> None:
    lanes, hanging = two(), Hanging()
    for n in range(2 * MOUNT_LANES[lane]):
        lanes.submit(lane, Job(hanging, path=str(tmp_path / "a" / f"{n}")))
    lanes.submit(lane, Job(lambda _: Tick(now=1.0), path=str(tmp_path / "b" / "x")))
    assert collect(lanes, 1) == [Tick(now=1.0)]
    hanging.gate.set()


def test_a_link_to_a_file_system_that_hangs_is_followed_by_a_thread_of_its_own_file_system(
    two: Callable[..., Lanes], tmp_path: pathlib.Path
) -> None:
    lanes, hanging = two(), Hanging()
    (tmp_path / "b" / "link").symlink_to("../a/there")
    for n in range(2 * MOUNT_LANES["write"]):
        lanes.submit("write", Job(hanging, path=str(tmp_path / "b" / "link" / f"{n}")))
    eventually(lambda: hanging.begun == MOUNT_LANES["write"])
    lanes.submit("write", Job(lambda _: Tick(now=1.0), path=str(tmp_path / "b" / "x")))
    assert collect(lanes, 1) == [Tick(now=1.0)]
    hanging.gate.set()


def test_a_job_for_which_all_threads_hang_elsewhere_is_refused_and_says_where(
    two: Callable[..., Lanes], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "THREAD_WAIT_S", 0.05)
    monkeypatch.setattr(lanes_module, "CHECK_INTERVAL_S", 0.01)
    lanes, hanging, refusals = two(max_threads=2), Hanging(), list[str]()
    for n in range(3):
        lanes.submit("write", Job(hanging, path=str(tmp_path / "a" / f"{n}")))

    def refused(error: Exception) -> Event:
        refusals.append(str(error))
        return Tick(now=2.0)

    lanes.submit("write", Job(lambda _: Tick(now=1.0), refused, str(tmp_path / "b" / "x")))
    assert collect(lanes, 1) == [Tick(now=2.0)]
    assert f"{tmp_path / 'a'} (2)" in refusals[0]
    hanging.gate.set()
    lanes.submit("write", Job(lambda _: Tick(now=3.0), path=str(tmp_path / "a" / "y")))
    assert collect(lanes, 1) == [Tick(now=3.0)]


def test_a_job_that_waits_for_a_thread_is_run_when_one_of_another_file_system_has_ended(
    two: Callable[..., Lanes], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "IDLE_S", 0.05)
    monkeypatch.setattr(lanes_module, "CHECK_INTERVAL_S", 0.01)
    lanes = two(max_threads=1)
    lanes.submit("write", Job(lambda _: Tick(now=1.0), path=str(tmp_path / "a" / "x")))
    lanes.submit("write", Job(lambda _: Tick(now=2.0), path=str(tmp_path / "b" / "x")))
    assert collect(lanes, 2) == [Tick(now=1.0), Tick(now=2.0)]
    eventually(lambda: not lanes.results() and not lanes._threads and not lanes._lanes)


def test_a_job_that_has_waited_for_its_turn_longer_than_any_save_does_is_refused(
    two: Callable[..., Lanes], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "CHECK_INTERVAL_S", 0.01)
    lanes, hanging = two(), Hanging()
    for n in range(MOUNT_LANES["commit"]):
        lanes.submit("commit", Job(hanging, path=str(tmp_path / "a" / f"{n}")))
    eventually(lambda: hanging.begun == MOUNT_LANES["commit"])
    monkeypatch.setattr(lanes_module, "JOB_WAIT_S", 0.05)
    lanes.submit("commit", Job(hanging, lambda error: Tick(now=2.0), str(tmp_path / "a" / "late")))
    assert collect(lanes, 1) == [Tick(now=2.0)]
    hanging.gate.set()


def test_helpers_of_one_file_system_leave_those_of_others_free_and_never_take_every_thread(
    two: Callable[..., Lanes], tmp_path: pathlib.Path
) -> None:
    lanes, gate, helped = two(max_threads=8), threading.Event(), list[int]()

    def helping(pool: Executor) -> Event | None:
        for n in range(20):
            pool.submit(lambda n=n: (helped.append(n), gate.wait(DEADLINE_S)))
        return Tick(now=0.0)

    lanes.submit("write", Job(helping, path=str(tmp_path / "a" / "x")))
    assert collect(lanes, 1) == [Tick(now=0.0)]
    eventually(lambda: len(helped) == 4)
    lanes.submit("write", Job(lambda _: Tick(now=1.0), path=str(tmp_path / "b" / "x")))
    assert collect(lanes, 1) == [Tick(now=1.0)]
    gate.set()


def test_a_helper_for_which_there_is_no_thread_waits_and_can_be_called_off(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(pool: Executor) -> Event | None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no thread")))
            future = pool.submit(lambda: None)
        return Tick(now=float(future.cancel()))

    lanes.submit("write", Job(begun, path="/a"))
    assert collect(lanes, 1) == [Tick(now=1.0)]


def test_the_table_finds_mounts_with_spaces_and_the_last_of_two_at_one_place(tmp_path: pathlib.Path) -> None:
    found = table(tmp_path, "/mnt/two\\040words", "/mnt", "/mnt")
    assert found.device_of("/mnt/two words/a") == "0:1"
    assert found.device_of("/mnt/two/../x") == found.device_of("/mnt") == "0:3"
    assert found.device_of("/mntx") == found.device_of("/") == "0:0"
    assert found.name_of("0:3") == "/mnt" and found.name_of("9:9") == "9:9"


def test_without_a_table_all_paths_share_a_device(tmp_path: pathlib.Path) -> None:
    missing = MountTable(str(tmp_path / "none"))
    assert missing.device_of("/a") == missing.device_of("/b/c") == mount_table.UNKNOWN


def test_a_new_mount_is_seen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_table, "MAX_AGE_S", 0.0)
    found = table(tmp_path)
    assert found.device_of("/mnt/a") == "0:0"
    table(tmp_path, "/mnt")
    assert found.device_of("/mnt/a") == "0:1"


def test_links_are_followed_as_far_as_the_next_file_system(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "far").symlink_to("/elsewhere/x")
    (tmp_path / "loop").symlink_to("loop")
    found = table(tmp_path, "/elsewhere")
    assert found.resolve(f"{tmp_path}/link/new/er") == (f"{tmp_path}/real/new/er", "0:0")
    assert found.resolve(f"{tmp_path}/link/far/y") == ("/elsewhere/x/y", "0:1")
    assert found.resolve(f"{tmp_path}/loop/y") == (f"{tmp_path}/loop/y", "0:0")


def test_following_links_looks_at_nothing_above_the_mount_point(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    monkeypatch.setattr(os, "readlink", lambda path: read.append(path) or os.fspath(tmp_path / "none"))
    found = table(tmp_path, str(tmp_path))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mount_table, "MAX_LINKS", 1)
        found.resolve(f"{tmp_path}/a/b")
    assert read == [f"{tmp_path}/a"]
