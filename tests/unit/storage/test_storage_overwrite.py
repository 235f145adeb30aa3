"""storage: a checkpoint in the place of an older one, in one step, under a lock."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, failing, manifest_of, shard_paths

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError
from asyncckpt.format.manifest import newest
from asyncckpt.format.names import LOCK_NAME, SaveId, owner_of
from asyncckpt.storage import local
from asyncckpt.storage.catalog import read_manifest, scan
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish, remove_files_of, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint

FILES = Files()
STORE = LocalStore()
OLD, NEW = SAVE_ID, OTHER_ID
LATER_RUN = SaveId(2, 0, "ffffffffffff")


def saved(path: Path, save_id: SaveId, files: Files = FILES, **changes: Any) -> None:
    with Snapshot({"a": 5000, "b": 3}, save_id=save_id, seed=save_id.sequence) as snapshot:
        snapshot.save(str(path), files, fsync=changes.pop("fsync", False), **changes)


def stands(path: Path) -> SaveId:
    """Return the save that is committed at `path`, after a look at every byte of it."""
    assert verify_checkpoint(str(path), FILES).faults == []
    return read_manifest(str(path), STORE).save_id


def owners(path: Path) -> set[SaveId]:
    return {owner for name in os.listdir(path) if (owner := owner_of(name)) is not None}


def test_an_older_checkpoint_is_replaced_and_its_files_go(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    saved(tmp_path, NEW, overwrite=True)
    assert stands(tmp_path) == NEW and owners(tmp_path) == {OLD, NEW}
    remove_leftovers(str(tmp_path), NEW, store=STORE)
    assert stands(tmp_path) == NEW and owners(tmp_path) == {NEW}
    assert LOCK_NAME not in os.listdir(tmp_path)


def test_a_later_run_replaces_what_an_earlier_one_saved_last(tmp_path: Path) -> None:
    saved(tmp_path, NEW)
    saved(tmp_path, LATER_RUN, overwrite=True)
    assert stands(tmp_path) == LATER_RUN


@pytest.mark.parametrize("rival", [SaveId(1, 5, "ffffffffffff"), SaveId(1, 0, "000000000000")])
def test_neither_of_two_runs_of_one_epoch_replaces_what_the_other_saved(tmp_path: Path, rival: SaveId) -> None:
    saved(tmp_path, OLD)  # a worker that was frozen before its run's first file left no mark of that run's epoch
    with pytest.raises(CheckpointExistsError, match="neither is older"):
        saved(tmp_path, rival, overwrite=True)
    assert stands(tmp_path) == OLD
    saved(tmp_path, NEW, overwrite=True)
    assert stands(tmp_path) == NEW


def test_overwriting_where_nothing_stands_is_a_plain_save(tmp_path: Path) -> None:
    files = RecordingFiles()
    saved(tmp_path / "c", NEW, files, overwrite=True)
    assert stands(tmp_path / "c") == NEW
    assert "rename" not in files.names() and "link" in files.names()


def test_every_file_is_flushed_before_the_one_rename_and_the_directory_after_it(tmp_path: Path) -> None:
    path = tmp_path / "c"
    saved(path, OLD)
    files = RecordingFiles()
    saved(path, NEW, files, fsync=True, overwrite=True)
    temporary = str(path / f"manifest.{NEW}.tmp")
    changes = [c for c in files.calls if c[0] in ("fsync", "rename", "link", "unlink", "flock") or c[0] == "pwrite"]
    assert (
        changes[-7:]
        == [
            ("fsync", str(tmp_path)),
            ("unlink", temporary),
            ("pwrite", temporary),
            ("fsync", temporary),
            ("fsync", str(path)),
            ("rename", temporary),
            ("fsync", str(path)),
            ("unlink", str(path / LOCK_NAME)),
        ][-7:]
    )
    flushed = {where for name, where in changes[:-7] if name == "fsync"}
    assert {str(path / name) for name in os.listdir(path) if owner_of(name) == NEW} <= flushed
    assert not any(str(OLD) in str(where) for name, where in changes if name == "unlink")


def test_at_every_call_one_complete_checkpoint_stands(tmp_path: Path) -> None:
    seen: list[SaveId] = []

    class Watched(RecordingFiles):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if threading.current_thread() is threading.main_thread():
                seen.append(stands(tmp_path))

    saved(tmp_path, OLD)
    saved(tmp_path, NEW, Watched(), overwrite=True)
    remove_leftovers(str(tmp_path), NEW, store=LocalStore(Watched()))
    assert seen == sorted(seen) and set(seen) == {OLD, NEW}


@pytest.mark.parametrize("standing", [NEW, LATER_RUN])
def test_a_newer_checkpoint_is_not_replaced(tmp_path: Path, standing: SaveId) -> None:
    saved(tmp_path, standing)
    with pytest.raises(CheckpointExistsError, match="newer") as caught:
        saved(tmp_path, OLD, overwrite=True)
    assert caught.value.existing_save_id == str(standing)
    assert stands(tmp_path) == standing and owners(tmp_path) == {standing}


def test_a_newer_checkpoint_that_comes_while_the_files_are_written_is_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    with Snapshot({"a": 50}, save_id=NEW) as snapshot:
        prepare_directory(str(tmp_path), save_id=NEW, store=STORE, fsync=False, overwrite=True)
        manifest = manifest_of(snapshot.write(str(tmp_path), overwrite=True), save_id=NEW)
        saved(tmp_path, LATER_RUN, overwrite=True)
        with pytest.raises(CheckpointExistsError, match="newer"):
            publish(str(tmp_path), manifest, store=STORE, overwrite=True)
    assert stands(tmp_path) == LATER_RUN
    assert remove_files_of(str(tmp_path), NEW, store=STORE)
    assert stands(tmp_path) == LATER_RUN


def test_a_manifest_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s"}')
    with pytest.raises(CheckpointExistsError, match="cannot be read"):
        saved(tmp_path, NEW, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_publishing_again_what_has_replaced_another_succeeds(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    saved(tmp_path, NEW, overwrite=True)
    publish(str(tmp_path), read_manifest(str(tmp_path), STORE), store=STORE, overwrite=True)
    assert stands(tmp_path) == NEW


def test_foreign_files_stay_when_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    foreign = {"notes.txt", f"rank-00000.{OLD}.index.bak", f"rank-00009.{OLD}.index", f"rank-00008.{OLD}.index"}
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"rank-00000.{OLD}.index.bak").write_text("mine")
    (tmp_path / f"rank-00009.{OLD}.index").mkdir()
    (tmp_path / f"rank-00008.{OLD}.index").symlink_to("notes.txt")
    saved(tmp_path, NEW, overwrite=True)
    remove_leftovers(str(tmp_path), NEW, store=STORE)
    assert {n for n in os.listdir(tmp_path) if owner_of(n) != NEW} == {"manifest.json", *foreign}


def test_leftovers_of_an_overwrite_that_was_cut_short_go_with_the_next_one(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    saved(tmp_path, NEW, overwrite=True)  # and never came to clean up
    (tmp_path / LOCK_NAME).touch()
    saved(tmp_path, LATER_RUN, overwrite=True)
    remove_leftovers(str(tmp_path), LATER_RUN, store=STORE)
    assert owners(tmp_path) == {LATER_RUN} and LOCK_NAME not in os.listdir(tmp_path)


def test_the_newest_checkpoint_is_the_one_that_was_replaced_last(tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b"]):
        saved(tmp_path / name, SaveId(SAVE_ID.epoch, number, SAVE_ID.run_id), step=100 + number)
    saved(tmp_path / "a", SaveId(SAVE_ID.epoch, 2, SAVE_ID.run_id), step=1, overwrite=True)
    found = newest((f.path, f.manifest) for f in scan(str(tmp_path), STORE) if f.manifest)
    assert found is not None and found[0] == str(tmp_path / "a") and found[1].step == 1


# ---- the put itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_refused_rename_leaves_the_old_checkpoint(tmp_path: Path, code: int) -> None:
    saved(tmp_path, OLD)
    with pytest.raises(OSError) as caught:
        saved(tmp_path, NEW, failing("rename", code), overwrite=True)
    assert not isinstance(caught.value, CommitUnknownError)
    assert stands(tmp_path) == OLD and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("method", "nth"), [("rename", 1), ("fsync", 99)])
def test_an_error_at_the_manifest_leaves_the_outcome_unknown_and_deletes_nothing(
    tmp_path: Path, method: str, nth: int
) -> None:
    saved(tmp_path / "c", OLD)
    if method == "fsync":  # the last one: of the directory, behind the rename
        rehearsal = RecordingFiles()
        saved(tmp_path / "r", OLD)
        saved(tmp_path / "r", NEW, rehearsal, fsync=True, overwrite=True)
        nth = rehearsal.names().count("fsync")
    with pytest.raises(CommitUnknownError):
        saved(tmp_path / "c", NEW, failing(method, errno.EIO, nth=nth), fsync=True, overwrite=True)
    assert stands(tmp_path / "c") in (OLD, NEW) and owners(tmp_path / "c") == {OLD, NEW}
    assert len(shard_paths(str(tmp_path / "c"))) == 2


def test_a_rename_that_went_well_and_answered_with_an_error_is_a_success(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    saved(tmp_path, NEW, failing("rename", errno.EIO, late=True), overwrite=True)
    assert stands(tmp_path) == NEW


# ---- inside another -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["x", "x/y/z"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_path_inside_a_committed_checkpoint_is_refused(tmp_path: Path, below: str, overwrite: bool) -> None:
    saved(tmp_path / "c", OLD)
    with pytest.raises(CheckpointExistsError, match="inside the committed checkpoint") as caught:
        saved(tmp_path / "c" / below, NEW, overwrite=overwrite)
    assert caught.value.existing_save_id == str(OLD)
    assert not (tmp_path / "c" / "x").exists()


def test_a_path_below_somebody_elses_manifest_is_taken(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    saved(tmp_path / "c", OLD)
    assert stands(tmp_path / "c") == OLD


# ---- the lock -------------------------------------------------------------------------------------------------------


def held(path: Path) -> int:
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_a_lock_that_is_held_too_long_fails_the_save_and_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    fd = held(tmp_path)
    try:
        with (
            pytest.raises(OSError) as caught,
            LocalStore().lock(str(tmp_path), 0.05),
        ):
            raise AssertionError("it is held by another")
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EWOULDBLOCK
    assert (tmp_path / LOCK_NAME).exists(), "it is the holder's to remove"
    assert stands(tmp_path) == OLD


def test_two_runs_that_overwrite_at_once_come_one_after_the_other(tmp_path: Path) -> None:
    inside, most = [0], [0]
    saved(tmp_path, OLD)

    class Slow(RecordingFiles):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == "rename":
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                threading.Event().wait(0.05)
                inside[0] -= 1

    errors: list[BaseException] = []

    def run(save_id: SaveId) -> None:
        try:
            saved(tmp_path, save_id, Slow(), overwrite=True)
            remove_leftovers(str(tmp_path), save_id, store=STORE)
        except CheckpointExistsError:
            pass  # a later one was quicker
        except BaseException as error:
            errors.append(error)

    ids = [SaveId(2 + n, 0, f"{n:012x}") for n in range(4)]
    threads = [threading.Thread(target=run, args=(save_id,)) for save_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and most == [1]
    assert stands(tmp_path) == ids[-1]
    assert LOCK_NAME not in os.listdir(tmp_path)


def test_a_lock_whose_name_its_holder_took_away_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_POLL_S", 0.001)
    removed: list[int] = []

    class Raced(RecordingFiles):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == "flock" and not removed:  # the holder before us removes it between our open and our lock
                os.unlink(tmp_path / LOCK_NAME)
                removed.append(1)

    files = Raced()
    with LocalStore(files).lock(str(tmp_path), 30.0):
        assert files.names().count("flock") == 2
        assert (tmp_path / LOCK_NAME).exists()
    assert not (tmp_path / LOCK_NAME).exists()


def test_somebody_elses_file_of_the_locks_name_stays(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("mine")
    saved(tmp_path, OLD, overwrite=True)
    assert (tmp_path / LOCK_NAME).read_text() == "mine"


def test_without_locks_nothing_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    with pytest.raises(OSError) as caught:
        saved(tmp_path, NEW, failing("flock", errno.ENOLCK), overwrite=True)
    assert caught.value.errno == errno.ENOLCK
    assert stands(tmp_path) == OLD
