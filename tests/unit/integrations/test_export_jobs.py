"""Jobs of the exporter: what a job file may say, and what is removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import mounts
import pytest

from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.integrations._export import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    MIN_PAUSE_FACTOR,
    ExporterProcess,
    Retries,
    finish_exports,
)
from asyncckpt.integrations._export_queue import (
    QUEUE_NAME,
    WILL_RETRY,
    ExportJob,
    job_for,
    jobs_in,
    read_job,
    remove_target,
)


def staged(root: Path, target: str = "one", *, committed: bool = True) -> ExportJob:
    """Return a job on disk; its checkpoint is committed, but damaged."""
    job = job_for(str(root / target), f"{target}.x.1")
    os.makedirs(job.native)
    if committed:
        Path(job.native, MANIFEST_NAME).write_text("{}")
    os.close(job.write())
    return job


def test_a_directory_that_was_moved_with_its_jobs_leads_to_itself_only(tmp_path: Path) -> None:
    staged(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    (found,) = jobs_in(str(tmp_path / "b" / QUEUE_NAME))
    assert found.target == str(tmp_path / "b" / "one")
    assert found.native == str(tmp_path / "b" / QUEUE_NAME / "one.x.1")


def test_a_job_of_somebody_else_removes_and_publishes_nothing_outside_its_directory(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("long work")
    queue = tmp_path / "downloaded" / QUEUE_NAME
    queue.mkdir(parents=True)
    facts = {"path": "", "native": str(precious), "target": str(precious), "kind": "directory"}
    (queue / "x.job").write_text(json.dumps(facts))
    assert finish_exports(str(queue), timeout_s=1.0) == []
    assert (precious / "thesis").read_text() == "long work" and not queue.exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", '{"target": 1}', "[" * 100_000, "\ud800"),
        *(json.dumps({"target": name, "kind": "directory"}) for name in ("/", "/x/..", QUEUE_NAME)),
        *(os.mkfifo, os.mkdir, lambda path: path.symlink_to(staged(path.parent).path)),
    ],
)
def test_what_is_no_job_is_none_and_is_not_waited_for(text: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.job"
    path.write_bytes(text.encode(errors="surrogatepass")) if isinstance(text, str) else text(path)
    assert read_job(str(path)) is None


def test_what_is_staged_for_a_job_that_we_do_not_understand_stays(tmp_path: Path) -> None:
    job = staged(tmp_path)
    Path(job.path).write_text('{"version": 9}')
    assert finish_exports(os.path.dirname(job.path), timeout_s=1.0) == []
    assert job.is_committed and job.is_open


def test_one_that_fails_stays_and_the_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = staged(tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise IndexError("a plan that makes no sense")

    monkeypatch.setattr("asyncckpt.integrations._export.export", broken)
    assert finish_exports(os.path.dirname(job.path), timeout_s=1.0) == []
    assert "a plan that makes no sense" in caplog.text and job.is_committed and job.is_open


def test_one_that_its_exporter_has_not_begun_with_is_left_to_it_and_removed_when_the_exporter_is_killed(
    tmp_path: Path,
) -> None:
    first, second, exporter = (
        staged(tmp_path, "first", committed=False),
        staged(tmp_path, committed=False),
        ExporterProcess(),
    )
    for job in (first, second):
        pid = exporter.submit(job, job.lock(), timeout_s=600.0)
    queue = os.path.dirname(first.path)
    assert finish_exports(queue, timeout_s=0.2) == [] and first.is_open and second.is_open
    os.kill(pid or 0, signal.SIGKILL)
    exporter.close(60.0)
    assert finish_exports(queue, timeout_s=60.0) == [] and os.listdir(tmp_path) == []


def test_a_directory_that_is_called_like_the_package_hides_nothing_from_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, exporter, start = staged(tmp_path), ExporterProcess(), subprocess.Popen
    (tmp_path / "root" / "asyncckpt").mkdir(parents=True)
    (tmp_path / "root" / "asyncckpt" / "__init__.py").write_text("raise SystemExit('of somebody else')")

    def started_there(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        return start(command, **{**settings, "cwd": tmp_path / "root"})

    monkeypatch.setattr(subprocess, "Popen", started_there)
    exporter.submit(job, job.lock(), timeout_s=1.0)
    exporter.close(60.0)
    assert os.path.exists(job.failure_path), "it was tried, and found to be damaged"


def test_what_a_kill_leaves_of_a_removal_has_no_name_and_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "one"
    (target / "sub").mkdir(parents=True)
    with monkeypatch.context() as killed:
        killed.setattr("asyncckpt.interop.publish.remove", lambda path: None)
        remove_target(str(target))
    assert os.listdir(tmp_path) == [QUEUE_NAME]
    assert finish_exports(str(tmp_path / QUEUE_NAME), timeout_s=1.0) == []
    assert os.listdir(tmp_path) == []


def test_a_removal_leaves_nothing_whatever_it_removes(tmp_path: Path) -> None:
    (tmp_path / "directory" / "sub").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("directory", "file", "link", "nothing"):
        remove_target(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


@mounts.needs_root
def test_a_disk_that_is_too_full_for_another_directory_is_made_room_on(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "disk", "nr_inodes=16") as disk:
        (disk / "one").mkdir()
        with contextlib.suppress(OSError):
            for n in itertools.count():
                (disk / "one" / f"{n}").write_bytes(b"x")
        remove_target(str(disk / "one"))
        assert os.listdir(disk) == []


class Disk:
    """What an exporter writes to; the clock is the test's."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.now = 100.0
        self.done: list[tuple[str, float]] = []
        self.retries = Retries(self.do, lambda: self.now)

    def do(self, job: ExportJob) -> None:
        self.done.append((os.path.basename(job.target), self.now - 100.0))
        if self.errors:
            raise self.errors.pop(0)
        job.close()


def full(number: int = errno.ENOSPC) -> Exception:
    """The error of a full disk, wrapped as ours are."""
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        found = RuntimeError("cannot be written")
        found.__cause__ = error
        return found


def test_what_failed_for_a_reason_that_may_pass_is_tried_again_ever_later_and_then_published(
    tmp_path: Path,
) -> None:
    job, disk = staged(tmp_path), Disk(*(full() for _ in range(9)))
    disk.retries.attempt(job)
    assert Path(job.failure_path).read_text().endswith(WILL_RETRY)
    while job.is_open:
        disk.now += 0.5
        disk.retries.retry_due()
    times = [at for _, at in disk.done]
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert waits[0] == FIRST_RETRY_S and waits[1] == 2 * FIRST_RETRY_S and waits[-1] == LAST_RETRY_S
    assert not job.is_open and not os.path.exists(job.failure_path)


def test_what_will_not_pass_is_not_tried_again(tmp_path: Path) -> None:
    job, disk = staged(tmp_path), Disk(full(errno.ENOTDIR))
    disk.retries.attempt(job)
    disk.retries.retry_due(last=True)
    assert len(disk.done) == 1
    assert not Path(job.failure_path).read_text().endswith(WILL_RETRY) and job.is_open


def test_a_try_that_takes_long_is_followed_by_a_longer_rest(tmp_path: Path) -> None:
    job, disk = staged(tmp_path), Disk(full())

    def slow(job: ExportJob) -> None:
        disk.now += 1000.0
        disk.do(job)

    retries = Retries(slow, lambda: disk.now)
    retries.attempt(job)
    disk.now += MIN_PAUSE_FACTOR * 1000.0 - 1.0
    retries.retry_due()
    assert len(disk.done) == 1
    disk.now += 1.0
    retries.retry_due()
    assert len(disk.done) == 2


@pytest.mark.parametrize("before", ["replace", "open"])
def test_a_job_is_written_although_another_process_removes_the_empty_queue(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, removed = getattr(os, before), list[str]()

    def after_a_removal(source: Any, *arguments: Any, **more: Any) -> Any:
        if not removed and str(source).endswith(".job.tmp"):
            removed.append(os.path.dirname(source))
            shutil.rmtree(removed[0])
        return call(source, *arguments, **more)

    job, descriptors = job_for(str(tmp_path / "one"), "one.x.1"), os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, before, after_a_removal)
        fd = job.write()
    os.close(fd)
    assert read_job(job.path) == job and removed and os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("kind", ["no call", "no support", "NFS"])
def test_a_job_is_locked_where_that_can_be_done_and_else_done_all_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def of_another(fd: int, how: int) -> None:
        if kind != "NFS":
            number = errno.ENOSYS if kind == "no call" else errno.EOPNOTSUPP
            raise OSError(number, os.strerror(number))
        if how & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "flock(2): on NFS an exclusive lock needs a file that is open for writing")
        flock(fd, how)

    monkeypatch.setattr("asyncckpt.integrations._export_queue.fcntl.flock", of_another)
    fd = staged(tmp_path).lock()
    assert fd is not None
    os.close(fd)


def test_at_the_end_each_is_tried_once_more_unless_a_newer_one_has_taken_its_place(tmp_path: Path) -> None:
    old, new, disk = staged(tmp_path, "old"), staged(tmp_path, "new"), Disk(full(), full())
    disk.retries.attempt(old)
    disk.retries.attempt(new)
    old.close()
    disk.retries.retry_due(last=True)
    assert disk.done[2:] == [("new", 0.0)] and not new.is_open
