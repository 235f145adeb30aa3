"""Jobs of the worker over a storage that fails at any one call: what they report is never worse than what is there."""

from __future__ import annotations

import errno
import pathlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import Files
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.io.job_runner import Job, JobRunner, Lanes
from asyncckpt_worker.io.writer import Writer
from tests.storage_samples import OTHER_ID, SAVE_ID, FailingFiles, Snapshot, failing

LENGTHS = {"a": 5000, "b": 5}


class AtOnce:
    """Lanes that run each job when it comes."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def submit(self, name: str, job: Job) -> None:
        """See `Lanes`."""
        self.results.append(job.work(cast("Any", None)))


def result_of(action: ac.Action, files: Files) -> Any:
    """Run the job of an action, and return its result."""
    lanes, unused = AtOnce(), cast("Any", None)
    writer = Writer(files, unused, (), 0)
    JobRunner(cast("Lanes", lanes), unused, writer, unused, lambda name, by: None).submit(action)
    return lanes.results[0]


def each_failure(**about: Any) -> Iterator[FailingFiles]:
    """Yield files of which another call fails each time, until no call is left to fail."""
    for n in range(1, 1000):
        files = FailingFiles(errno.EIO, nth=n, wanted=lambda name, args: name != "close", **about)
        yield files
        if files.failed is None:
            return


def look(path: pathlib.Path, save_id: SaveId = SAVE_ID, *, resumed: bool = True) -> ac.Prepare:
    key = (str(save_id), 0)
    return ac.Prepare(
        key=key, path=str(path), step=0, nbytes=1, umask=0o22, fsync=True, overwrite=False, resumed=resumed
    )


@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_a_dead_worker_has_committed_is_never_taken_for_one_that_it_has_not(
    tmp_path: pathlib.Path, late: bool
) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.save(str(tmp_path / "a"))
    unknown = 0
    for files in each_failure(late=late):
        found = result_of(look(tmp_path / "a"), files)
        assert isinstance(found, ev.Prepared)
        assert found.committed or (found.error is not None and not found.known_uncommitted), files.failed
        unknown += not found.committed
    assert found.committed and unknown, "without a failure, and with some"


def test_a_resumed_save_that_cannot_replace_what_is_at_its_path_is_known_not_to_be_committed(
    tmp_path: pathlib.Path,
) -> None:
    with Snapshot(LENGTHS, save_id=OTHER_ID) as snapshot:
        snapshot.save(str(tmp_path / "a"))
    found = result_of(look(tmp_path / "a"), Files())
    assert found.error["code"] == "checkpoint_exists" and found.known_uncommitted and not found.committed
    found = result_of(look(tmp_path / "b"), failing("mkdir", errno.ENOSPC))
    assert found.error["fields"]["code"] == "ENOSPC" and found.known_uncommitted
