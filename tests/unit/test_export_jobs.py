"""Jobs of the exporter: what a job file may say, and what is removed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib

import pytest

from asyncckpt.format.names import MANIFEST_NAME
from asyncckpt.integrations.exporter import FIRST_RETRY_S, LAST_RETRY_S, Retries, finish_exports
from asyncckpt.integrations.pending_saves import remove
from asyncckpt.integrations.spool import AGAIN, SPOOL_NAME, Job, job_for, jobs_in, read_job


def staged(root: pathlib.Path, target: str = "one", *, committed: bool = True) -> Job:
    """Return a job on disk; its checkpoint is committed, but damaged."""
    job = job_for(str(root / target), f"{target}.x.1", is_directory=True)
    os.makedirs(job.native)
    if committed:
        pathlib.Path(job.native, MANIFEST_NAME).write_text("{}")
    job.write()
    return job


def test_a_job_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    job = staged(tmp_path)
    assert read_job(job.path) == job and jobs_in(os.path.dirname(job.path)) == [job]


def test_a_directory_that_was_moved_with_its_jobs_leads_to_itself_only(tmp_path: pathlib.Path) -> None:
    staged(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    (found,) = jobs_in(str(tmp_path / "b" / SPOOL_NAME))
    assert found.target == str(tmp_path / "b" / "one")
    assert found.native == str(tmp_path / "b" / SPOOL_NAME / "one.x.1")


def test_a_job_of_somebody_else_removes_and_publishes_nothing_outside_its_directory(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("long work")
    spool = tmp_path / "downloaded" / SPOOL_NAME
    spool.mkdir(parents=True)
    facts = {"path": "", "native": str(precious), "target": str(precious), "is_directory": True, "moved": False}
    (spool / "x.job").write_text(json.dumps(facts))
    assert finish_exports(str(spool), timeout_s=1.0) == []
    assert (precious / "thesis").read_text() == "long work" and not spool.exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", '{"target": 1}', "[" * 100_000, "\ud800"),
        *(json.dumps({"target": name, "is_directory": True, "moved": False}) for name in ("/", "/x/..", SPOOL_NAME)),
    ],
)
def test_what_is_no_job_is_none(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.job"
    path.write_bytes(text.encode(errors="surrogatepass"))
    assert read_job(str(path)) is None


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_what_is_no_file_is_no_job_and_is_not_waited_for(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.job"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(staged(tmp_path).path)
    else:
        path.mkdir()
    assert read_job(str(path)) is None


def test_what_is_staged_for_a_job_that_we_do_not_understand_stays(tmp_path: pathlib.Path) -> None:
    job = staged(tmp_path)
    pathlib.Path(job.path).write_text('{"version": 9}')
    assert finish_exports(os.path.dirname(job.path), timeout_s=1.0) == []
    assert job.is_committed and job.is_open


def test_one_that_fails_stays_and_the_start_goes_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = staged(tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise IndexError("a plan that makes no sense")

    monkeypatch.setattr("asyncckpt.integrations.exporter.export", broken)
    assert finish_exports(os.path.dirname(job.path), timeout_s=1.0) == []
    assert "a plan that makes no sense" in caplog.text and job.is_committed and job.is_open


def test_one_that_was_never_committed_is_removed(tmp_path: pathlib.Path) -> None:
    job = staged(tmp_path, committed=False)
    assert finish_exports(os.path.dirname(job.path), timeout_s=1.0) == []
    assert os.listdir(tmp_path) == []


def test_what_a_kill_leaves_of_a_removal_has_no_name_and_goes_at_the_next_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "one"
    (target / "sub").mkdir(parents=True)
    with monkeypatch.context() as killed:
        killed.setattr("asyncckpt.integrations.pending_saves.shutil.rmtree", lambda *_, **__: None)
        remove(str(target))
    assert os.listdir(tmp_path) == [SPOOL_NAME]
    assert finish_exports(str(tmp_path / SPOOL_NAME), timeout_s=1.0) == []
    assert os.listdir(tmp_path) == []


def test_a_removal_leaves_nothing_whatever_it_removes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "directory" / "sub").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("directory", "file", "link", "nothing"):
        remove(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


class Disk:
    """What an exporter writes to; the clock is the test's."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.now = 100.0
        self.done: list[tuple[str, float]] = []
        self.retries = Retries(self.do, lambda: self.now)

    def do(self, job: Job) -> None:
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
    tmp_path: pathlib.Path,
) -> None:
    job, disk = staged(tmp_path), Disk(*(full() for _ in range(9)))
    assert not disk.retries.attempt(job)
    assert pathlib.Path(job.failure_path).read_text().endswith(AGAIN)
    while len(disk.retries):
        disk.now += 0.5
        disk.retries.turn()
    times = [at for _, at in disk.done]
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert waits[0] == FIRST_RETRY_S and waits[1] == 2 * FIRST_RETRY_S and waits[-1] == LAST_RETRY_S
    assert not job.is_open and not os.path.exists(job.failure_path)


def test_what_will_not_pass_is_not_tried_again(tmp_path: pathlib.Path) -> None:
    job, disk = staged(tmp_path), Disk(full(errno.ENOTDIR))
    assert not disk.retries.attempt(job) and not len(disk.retries)
    assert not pathlib.Path(job.failure_path).read_text().endswith(AGAIN) and job.is_open


def test_at_the_end_each_is_tried_once_more_unless_a_newer_one_has_taken_its_place(tmp_path: pathlib.Path) -> None:
    old, new, disk = staged(tmp_path, "old"), staged(tmp_path, "new"), Disk(full(), full())
    disk.retries.attempt(old)
    disk.retries.attempt(new)
    old.close()
    disk.retries.turn(last=True)
    assert disk.done[2:] == [("new", 0.0)] and not len(disk.retries)
