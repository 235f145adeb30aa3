"""Jobs of the worker over a storage that fails at any one call: what they report is never worse than what is there."""

from __future__ import annotations

import errno
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from asyncckpt.errors import CorruptCheckpointError, UnsupportedPathError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import Files
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.io import job_runner
from asyncckpt_worker.io import writer as writer_module
from asyncckpt_worker.io.job_runner import JobRunner
from asyncckpt_worker.io.lanes import Job, Lanes
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


def commit(snapshot: Snapshot, path: pathlib.Path) -> ac.Commit:
    """Return the commit of a save of one rank, whose files are at `path`."""
    return ac.Commit(
        save_id=str(snapshot.save_id),
        requests=(snapshot.request(str(path)),),
        results=(snapshot.write(str(path)),),
    )


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
        assert found.committed or files.failed != "unlink", "what earlier saves have left is no part of it"
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


def test_a_store_that_cannot_be_opened_is_why_a_save_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    action = replace(look(pathlib.Path("unused")), path="az://box/run/step-1")
    result = result_of(action, Files())
    assert isinstance(from_wire(result.error), UnsupportedPathError) and not result.known_uncommitted


@pytest.mark.parametrize("late", [False, True])
def test_a_save_whose_manifest_is_published_never_ends_as_failed(tmp_path: pathlib.Path, late: bool) -> None:
    for n, files in enumerate(each_failure(late=late)):
        path = tmp_path / str(n)
        path.mkdir()
        with Snapshot(LENGTHS) as earlier:
            earlier.write(str(path))
        with Snapshot(LENGTHS, save_id=OTHER_ID) as snapshot:
            found = result_of(commit(snapshot, path), files)
        assert isinstance(found, ev.Published)
        if (path / "manifest.json").exists():
            assert found.error is None or found.unknown, f"{files.failed}: {found.error}"
    assert found.error is None and len(list(path.glob("*"))) == 4, "what the earlier save has left is removed"


@pytest.mark.parametrize("part", ["remove_leftovers", "digests_of"])
def test_a_bug_behind_the_commit_ends_no_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    module = writer_module if part == "remove_leftovers" else job_runner
    monkeypatch.setattr(module, part, broken)
    with Snapshot(LENGTHS) as snapshot:
        path = tmp_path / "a"
        path.mkdir()
        found = result_of(commit(snapshot, path), Files())
    assert found.error is None and (path / "manifest.json").exists()
    if part == "remove_leftovers":
        assert result_of(look(path), Files()).committed


@pytest.mark.parametrize("stands", ["the reported one", "another one"])
def test_an_index_of_another_node_counts_only_as_its_rank_has_reported_it(tmp_path: pathlib.Path, stands: str) -> None:
    """Another one: of an earlier attempt of the rank, say, that this node still sees."""
    path, elsewhere = tmp_path / "a", tmp_path / "b"
    path.mkdir()
    elsewhere.mkdir()
    with Snapshot({"a": 5000}) as zero, Snapshot({"c": 10}) as one, Snapshot({"d": 10}) as other:
        first = zero.write(str(path), world_size=2)
        second = one.write(str(path), rank=1, world_size=2)
        earlier = other.write(str(elsewhere), rank=1, world_size=2)
        assert second.record.index_nbytes == earlier.record.index_nbytes
        if stands == "another one":
            name = second.record.index_name
            (path / name).write_bytes((elsewhere / name).read_bytes())
        action = ac.Commit(
            save_id=str(SAVE_ID),
            requests=(
                zero.request(str(path), world_size=2),
                one.request(str(path), rank=1, world_size=2, structure=b"", objects=b""),
            ),
            results=(first, replace(second, tally=None)),
            remote=(1,),
        )
        structures = Writer(Files(), cast("Any", None), (), 0).structures(action)
        if stands == "the reported one":
            assert structures[1] == one.structure
        else:  # before coverage is proved by it
            with pytest.raises(CorruptCheckpointError, match="checksum"):
                structures[1]
        found = result_of(action, Files())
    assert (path / "manifest.json").exists() is (stands == "the reported one"), found
    assert (found.error is None) is (stands == "the reported one")
