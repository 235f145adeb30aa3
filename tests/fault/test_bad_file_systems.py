"""A real worker on file systems that fill up, freeze, answer late, never, or with errors at close and fsync.

Promises P2, P4, P9 and P13: a save that lost a byte never reports success; it costs that save alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests import mounts
from tests.exit_times import EXIT_S, assert_exits_in_time
from tests.mounts import Fuse, needs_root
from tests.saving import ENVIRONMENT, ROOT, Saver, is_listed, violations, worker_process

pytestmark = [pytest.mark.fault, pytest.mark.root, needs_root]


@pytest.fixture
def bad(tmp_path: pathlib.Path) -> Iterator[Fuse]:
    """A file system that obeys."""
    with mounts.fuse(tmp_path / "bad") as served:
        yield served


@pytest.fixture
def worker(endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    with worker_process(endpoint) as process:
        yield process


# ---- errors ---------------------------------------------------------------------------------------------------------


ON_DEMAND = pytest.mark.soak
ANSWERS = [
    *(
        pytest.param(op, skip, "failed", marks=ON_DEMAND if skip or op in ("WRITE", "CREATE") else ())
        for op in ("FLUSH", "FSYNC", "FSYNCDIR", "WRITE", "CREATE")
        for skip in range(3)
    ),
    pytest.param("LINK", 0, "unknown", marks=ON_DEMAND),
    pytest.param("RELEASE", 0, "committed", marks=ON_DEMAND),
]
"""FLUSH is close(): NFS and quotas tell there what was lost. RELEASE tells nobody, and loses nothing."""


@pytest.mark.parametrize(("op", "skip", "expected"), ANSWERS)
def test_a_file_system_that_answers_with_an_error_once_costs_one_save_at_most(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str, op: str, skip: int, expected: str
) -> None:
    with Saver(endpoint) as saver:
        assert saver.save(bad.path / "before", 0) == "committed"
        bad.tell(op=op, errno=5, skip=skip)
        assert saver.save(bad.path / "x", 1) == expected
        bad.tell(clear=True)
        if expected != "committed":
            assert not is_listed(bad.path / "x")
            assert saver.refused[str(bad.path / "x")]["fields"]["code"] == "EIO"
        assert saver.save(bad.path / "y", 2) == "committed"
        assert violations(saver.acknowledged, [str(bad.path / "x")]) == []


@pytest.mark.parametrize("lacks", [["links"], ["links", "cuts", "modes"]])
def test_a_mount_without_links_commits_and_is_probed_by_its_first_save_alone(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str, lacks: list[str]
) -> None:
    bad.tell(lacks=lacks)
    with Saver(endpoint) as saver:
        assert [saver.save(bad.path / f"{n}", n) for n in range(2)] == ["committed"] * 2
        bad.tell(op="LINK,RENAME,RENAME2", errno=5, count=-1)  # nothing asks for them any more
        assert saver.save(bad.path / "2", 2) == "committed"
        assert violations(saver.acknowledged) == []


def test_a_mount_that_takes_writes_in_order_only_is_refused_by_name_and_the_next_mount_is_not(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str
) -> None:
    bad.tell(lacks=["links", "renames", "random writes", "modes"])
    with Saver(endpoint) as saver:
        for n in range(2):
            assert saver.save(bad.path / f"{n}", n) == "failed"
            refused = saver.refused[str(bad.path / f"{n}")]
            assert refused["code"] == "unsupported_path" and "in order only" in refused["text"]
        assert os.listdir(bad.path) == []
        bad.tell(lacks=["links"])
        assert saver.save(bad.path / "after", 9) == "committed"
        assert violations(saver.acknowledged) == []


@ON_DEMAND
def test_a_file_system_that_refuses_room_at_every_write_fails_every_save_and_recovers(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str
) -> None:
    with Saver(endpoint) as saver:
        bad.tell(op="WRITE", errno=28, count=-1)
        for n in range(3):
            assert saver.save(bad.path / f"{n}", n) == "failed"
            assert saver.refused[str(bad.path / f"{n}")]["fields"]["code"] == "ENOSPC"
            assert not is_listed(bad.path / f"{n}")
        bad.tell(clear=True)
        assert saver.save(bad.path / "after", 9) == "committed"
        assert violations(saver.acknowledged) == []


# ---- slow, stuck, frozen --------------------------------------------------------------------------------------------


@ON_DEMAND
def test_a_slow_disk_makes_saves_late_and_not_wrong(bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str) -> None:
    bad.tell(op="WRITE,FSYNC,FSYNCDIR,FLUSH,CREATE", count=-1, delay_s=0.03)
    with Saver(endpoint, timeout_s=60.0) as saver:
        begun = {bad.path / f"{n}": saver.begin(bad.path / f"{n}", n) for n in range(3)}
        assert [saver.end(path, one) for path, one in begun.items()] == ["committed"] * 3
        bad.tell(clear=True)
        assert violations(saver.acknowledged) == []


def test_a_disk_that_hangs_holds_neither_other_sessions_nor_the_worker_loop(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    bad.tell(op="FSYNC", count=1, hang=True)
    with Saver(endpoint) as stuck, Saver(endpoint) as other:
        begun = stuck.begin(bad.path / "x", 0)
        started = time.monotonic()
        assert other.save(tmp_path / "y", 1) == "committed"
        assert time.monotonic() - started < 50.0
        row = stuck.client.row(begun[0])
        assert row is not None and row["phase"] not in ("committed", "failed")
        assert not is_listed(bad.path / "x")
        bad.tell(clear=True)
        assert stuck.end(bad.path / "x", begun) == "committed"
        assert violations({**stuck.acknowledged, **other.acknowledged}) == []


MANY = 12
"""Saves that wait for one file system: more than it is given threads."""

SLOWER = 20.0
"""How much a save may take longer than alone, on a machine on which others work."""


@pytest.mark.parametrize("through", ["its mount point", "a link"])
def test_file_systems_that_hang_delay_no_save_elsewhere_however_many_saves_wait_for_them(
    bad: Fuse, worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path, through: str
) -> None:
    def took_s(first: int) -> float:
        took = []
        for n in range(first, first + 5):
            began = time.monotonic()
            assert other.save(tmp_path / "fast" / f"{n}", n) == "committed"
            took.append(time.monotonic() - began)
        return min(took)

    with contextlib.ExitStack() as stack:
        worse = stack.enter_context(mounts.fuse(tmp_path / "worse"))
        other = stack.enter_context(Saver(endpoint))
        alone_s = took_s(0)
        waiting = {}
        for served in (bad, worse):
            served.tell(op="LOOKUP,MKDIR", hang=True, count=-1)
            path = served.path
            if through == "a link":
                path = tmp_path / f"{path.name}-link"
                path.symlink_to(served.path)
            for n in range(MANY):
                saver = stack.enter_context(Saver(endpoint))
                waiting[path / f"run-{n}" / "x"] = saver, saver.begin(path / f"run-{n}" / "x", n)
        assert took_s(10) < SLOWER * alone_s
        for served in (bad, worse):
            served.tell(clear=True)
        assert [saver.end(path, begun) for path, (saver, begun) in waiting.items()] == ["committed"] * 2 * MANY


SLACK_S = 30.0
"""For a machine on which others work; what hangs would hang until the file system is thawed."""

CLOSE_S = 1.0
"""The trainer's `worker_shutdown_timeout_s`, which `close()` waits first."""

TRAINER = """
import json, sys, time
import torch
from asyncckpt import AsyncCheckpointer
began = time.monotonic()
checkpointer = AsyncCheckpointer(endpoint=sys.argv[1], on_busy="error", worker_shutdown_timeout_s=1.0)
longest = 0.0
def save(n):
    global longest
    started = time.monotonic()
    handle = checkpointer.save({"w": torch.full((200_000,), n)}, f"{sys.argv[2]}/{n}")
    longest = max(longest, time.monotonic() - started)
    return handle
save(0).written.result(60)
print("saved", flush=True)
sys.stdin.readline()
longest = 0.0
handles = [save(n) for n in range(1, 7)]
errors = [type(h.written.exception(0)).__name__ for h in handles if h.written.done()]
print(json.dumps({"longest": longest, "errors": errors, "staged": sum(h.staged.done() for h in handles)}), flush=True)
if sys.argv[3] == "close":
    checkpointer.close()
"""


@pytest.mark.parametrize("how", [pytest.param("close", marks=ON_DEMAND), "exit"])
def test_a_frozen_file_system_holds_neither_training_nor_exit_longer_than_configured(
    endpoint: str, tmp_path: pathlib.Path, how: str
) -> None:
    """P13: saves go on until the slots are full, then fail by `on_busy`; exit takes at most 5 s more."""
    mounts.make_ext4(tmp_path / "image", 48 << 20)
    with mounts.loop_mounted(tmp_path / "image", tmp_path / "disk") as disk, worker_process(endpoint) as worker:

        def exit_s(number: int) -> float:
            root = disk / str(number)
            took_s = frozen_exit_s(endpoint, root, disk, how)
            # What was staged is written by the worker once the disk answers again.
            deadline = time.monotonic() + 60
            while not all(is_listed(root / str(n)) for n in (0, 1, 2)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return took_s

        assert_exits_in_time(exit_s, EXIT_S + (CLOSE_S if how == "close" else 0.0))
        assert worker.poll() is None


def frozen_exit_s(endpoint: str, root: pathlib.Path, disk: pathlib.Path, how: str) -> float:
    """Let a trainer save to a disk that stands still, and return the seconds from its last save to its end."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, endpoint, str(root), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd=ROOT,
        text=True,
    ) as trainer:
        assert trainer.stdin and trainer.stdout
        assert trainer.stdout.readline() == "saved\n"
        with mounts.frozen(disk):
            trainer.stdin.write("go\n")
            trainer.stdin.flush()
            said = json.loads(trainer.stdout.readline())
            ended = time.monotonic()
            assert trainer.wait(60) == 0
            took_s = time.monotonic() - ended
        assert said["longest"] < 3.0 + SLACK_S, said
        assert said["staged"] == 6, "every save came to an end for the trainer"
        assert said["errors"] == ["SlotBusyError"] * 4, said
    return took_s


# ---- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fsize", [pytest.param(4096, marks=ON_DEMAND), 100_000, pytest.param(250_000, marks=ON_DEMAND)]
)
def test_short_writes_of_a_real_limit_fail_the_save(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path, fsize: int
) -> None:
    with Saver(endpoint) as saver:
        assert saver.save(tmp_path / "before", 0) == "committed"
        mounts.ran("prlimit", "--pid", str(worker.pid), f"--fsize={fsize}:unlimited")
        assert saver.save(tmp_path / "x", 1) == "failed"
        assert not is_listed(tmp_path / "x")
        assert saver.refused[str(tmp_path / "x")]["fields"]["code"] == "EFBIG"
        mounts.ran("prlimit", "--pid", str(worker.pid), "--fsize=unlimited:unlimited")
        assert saver.save(tmp_path / "y", 2) == "committed"
        assert violations(saver.acknowledged) == []


def test_a_small_file_system_that_others_fill_meanwhile_lists_nothing_broken(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    with mounts.tmpfs(tmp_path / "small", "size=3m") as small, Saver(endpoint) as saver:
        stop = threading.Event()

        def hog() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError), open(small / "hog", "wb") as file:
                    for _ in range(40):
                        file.write(bytes(65536))
                        file.flush()
                with contextlib.suppress(OSError):
                    os.unlink(small / "hog")

        thread = threading.Thread(target=hog)
        thread.start()
        try:
            phases = [saver.save(small / f"{n}", n) for n in range(12)]
        finally:
            stop.set()
            thread.join()
        assert "failed" in phases
        assert {error["fields"]["code"] for error in saver.refused.values()} == {"ENOSPC"}
        assert violations(saver.acknowledged, list(saver.refused)) == []
        assert all(not is_listed(pathlib.Path(path)) for path in saver.refused)


def test_a_small_dev_shm_does_not_matter_to_slots(endpoint: str, tmp_path: pathlib.Path) -> None:
    """Containers have 64 MB there by default; slots are memfds, which no such limit holds."""
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]
    with worker_process(endpoint, *command), Saver(endpoint, nbytes=100 << 20, timeout_s=60.0) as saver:
        assert saver.save(tmp_path / "large", 0, fsync=False) == "committed"
        assert violations(saver.acknowledged) == []


# ---- processes that stand still ------------------------------------------------------------------------------------


@ON_DEMAND
def test_a_worker_that_is_stopped_and_continued_loses_nothing(
    worker: subprocess.Popen[bytes], endpoint: str, tmp_path: pathlib.Path
) -> None:
    with Saver(endpoint) as saver:
        for n in range(5):
            begun = saver.begin(tmp_path / f"{n}", n)
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            worker.send_signal(signal.SIGCONT)
            assert saver.end(tmp_path / f"{n}", begun) == "committed"
        assert violations(saver.acknowledged) == []


def memory_cgroup(name: str, limit_nbytes: int) -> pathlib.Path:
    """Make a cgroup with a memory limit, of version 1 or 2."""
    top = pathlib.Path("/sys/fs/cgroup")
    is_first = (top / "memory" / "memory.limit_in_bytes").exists()
    group = top / "memory" / name if is_first else top / name
    limit = group / ("memory.limit_in_bytes" if is_first else "memory.max")
    if not is_first and not (top / "cgroup.controllers").exists():
        pytest.skip("no cgroup memory controller, neither of version 1 nor of version 2")
    try:
        group.mkdir()
        limit.write_text(str(limit_nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no limit of memory can be set in a cgroup of version {1 if is_first else 2}: {error}")
    return group


def test_a_worker_in_a_tight_cgroup_refuses_more_memory_than_its_limit_and_nothing_is_lost(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    """It says no before it touches any of it: nobody is killed."""
    group = memory_cgroup(f"asyncckpt-test-{os.getpid()}", 96 << 20)
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    try:
        with worker_process(endpoint, "sh", "-c", enter, "sh") as worker, Saver(endpoint) as saver:
            assert str(worker.pid) in (group / "cgroup.procs").read_text().split(), "it is not limited"
            assert saver.save(tmp_path / "fits", 0) == "committed"
            with pytest.raises(Exception, match="under the cgroup's limit"):
                saver.client.allocate(512 << 20, populate=True)
            assert saver.save(tmp_path / "after", 1) == "committed"
            assert violations(saver.acknowledged) == []
            assert worker.poll() is None
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
