"""storage.commit: the directory before, the manifest last, leftovers after."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, failing, manifest_of, shard_paths

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.checkpoint_dir import prepare_directory, remove_made
from asyncckpt.storage.commit import publish, remove_files_of, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

FILES = Files()
STORE = LocalStore()


def written(path: Path, save_id: SaveId = SAVE_ID) -> object:
    """Write a rank's files below `path` and return the manifest that commits them."""
    path.mkdir(exist_ok=True)
    with Snapshot({"a": 5000}, save_id=save_id) as snapshot:
        return manifest_of(snapshot.write(str(path), fsync=False), save_id=save_id)


def put(path: Path, manifest: object, files: Files = FILES) -> None:
    publish(str(path), manifest, store=LocalStore(files))  # type: ignore[arg-type]


def test_missing_parents_are_made_and_each_name_is_flushed(tmp_path: Path) -> None:
    files = RecordingFiles()
    prepare_directory(str(tmp_path / "a/b/c"), save_id=SAVE_ID, store=LocalStore(files, umask=0o027), fsync=True)
    flushed = [where for name, where in files.calls if name == "fsync"]
    assert flushed == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")]
    assert stat.S_IMODE((tmp_path / "a/b/c").stat().st_mode) == 0o750


@pytest.mark.parametrize(("method", "nth"), [("fchmod", 1), ("fsync", 2), ("mkdir", 3)])
def test_directories_of_a_refused_save_are_gone_again_and_others_stay(tmp_path: Path, method: str, nth: int) -> None:
    (tmp_path / "theirs").mkdir()
    path, files = f"{tmp_path}/theirs/a/b/c", failing(method, errno.EIO, nth=nth)
    with pytest.raises(OSError):
        prepare_directory(path, save_id=SAVE_ID, store=LocalStore(files, umask=0), fsync=True)
    assert os.listdir(tmp_path / "theirs") == []


def test_a_directory_that_was_made_and_used_meanwhile_stays(tmp_path: Path) -> None:
    made = prepare_directory(f"{tmp_path}/a/b/c", save_id=SAVE_ID, store=LocalStore(umask=0), fsync=False)
    assert made == [f"{tmp_path}/a", f"{tmp_path}/a/b", f"{tmp_path}/a/b/c"]
    (tmp_path / "a/b/notes").touch()
    remove_made(made, STORE)
    assert os.listdir(tmp_path / "a/b") == ["notes"]
    assert prepare_directory(f"{tmp_path}/a/b", save_id=SAVE_ID, store=LocalStore(umask=0), fsync=False) == []


def test_an_existing_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    files = RecordingFiles()
    tmp_path.chmod(0o700)
    prepare_directory(str(tmp_path), save_id=SAVE_ID, store=LocalStore(files, umask=0), fsync=True)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert not {"mkdir", "fsync", "fchmod"} & set(files.names())


def test_a_directory_made_by_another_rank_meanwhile_is_welcome(tmp_path: Path) -> None:
    class Raced(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            if name == "mkdir":
                os.mkdir(str(self.calls[-1][1]))

    prepare_directory(str(tmp_path / "a/b"), save_id=SAVE_ID, store=LocalStore(Raced()), fsync=True)
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize("below", ["", "/inside/it"])
def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        prepare_directory(f"{tmp_path}/file{below}", save_id=SAVE_ID, store=STORE, fsync=True)


def test_a_dangling_link_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        prepare_directory(str(tmp_path / "link"), save_id=SAVE_ID, store=STORE, fsync=True)


def test_a_committed_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with Snapshot({"a": 1}) as snapshot:
        snapshot.save(str(tmp_path / "c"), step=7)
    with pytest.raises(CheckpointExistsError, match="step 7") as caught:
        prepare_directory(str(tmp_path / "c"), save_id=OTHER_ID, store=STORE, fsync=True)
    assert caught.value.existing_save_id == str(SAVE_ID)


def test_the_manifest_is_put_last_and_flushed_around(tmp_path: Path) -> None:
    path = tmp_path / "c"
    manifest = written(path)
    files = RecordingFiles()
    put(path, manifest, files)
    temporary = str(path / f"manifest.{SAVE_ID}.tmp")
    changes = [c for c in files.calls if c[0] in ("fsync", "link", "pwrite", "rename_noreplace") or c[0] == "unlink"]
    assert changes[-8:] == [
        ("fsync", str(tmp_path)),
        ("unlink", temporary),
        ("pwrite", temporary),
        ("fsync", temporary),
        ("fsync", str(path)),
        ("link", temporary),
        ("unlink", temporary),
        ("fsync", str(path)),
    ]
    assert read_manifest(str(path), STORE) == manifest
    assert not os.path.exists(temporary)


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_modes_are_those_of_the_saves_umask_whatever_the_process_has(tmp_path: Path, umask: int) -> None:
    before = os.umask(0o077)
    try:
        prepare_directory(str(tmp_path / "a/b"), save_id=SAVE_ID, store=LocalStore(umask=umask), fsync=False)
        with Snapshot({"x": 9000}) as snapshot:
            result = snapshot.write(str(tmp_path / "a/b"), umask=umask, fsync=False)
        publish(str(tmp_path / "a/b"), manifest_of(result, fsync=False), store=LocalStore(umask=umask))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a/b").iterdir()} == {0o666 & ~umask}
    assert {stat.S_IMODE((tmp_path / d).stat().st_mode) for d in ("a", "a/b")} == {0o777 & ~umask}


def test_publishing_twice_succeeds(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    put(tmp_path, manifest)
    put(tmp_path, manifest)
    assert read_manifest(str(tmp_path), STORE) == manifest


def test_a_temporary_manifest_of_an_earlier_try_is_replaced(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    (tmp_path / f"manifest.{SAVE_ID}.tmp").write_text("half a mani")
    put(tmp_path, manifest)
    assert read_manifest(str(tmp_path), STORE) == manifest


def test_another_saves_manifest_is_left_untouched(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path, OTHER_ID)
    put(tmp_path, first)
    with pytest.raises(CheckpointExistsError):
        put(tmp_path, second)
    assert read_manifest(str(tmp_path), STORE) == first


def test_of_two_manifests_put_at_the_same_time_one_wins(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path, OTHER_ID)

    class Overtaken(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            if name == "link":
                put(tmp_path, first)

    with pytest.raises(CheckpointExistsError):
        put(tmp_path, second, Overtaken())
    assert read_manifest(str(tmp_path), STORE) == first
    assert not list(tmp_path.glob("*.tmp"))


def test_files_that_the_winner_of_a_race_removed_are_no_mystery(tmp_path: Path) -> None:
    first, second = written(tmp_path, OTHER_ID), written(tmp_path)

    class Overtaken(RecordingFiles):
        done = False

        def before(self, name: str, args: object) -> None:
            if name == "open" and not self.done and self.calls[-1][1].endswith(".index"):
                self.done = True
                put(tmp_path, first)
                assert remove_leftovers(str(tmp_path), OTHER_ID, store=STORE)

    with pytest.raises(CheckpointExistsError) as caught:
        put(tmp_path, second, Overtaken())
    assert caught.value.existing_save_id == str(OTHER_ID)
    assert read_manifest(str(tmp_path), STORE) == first


def test_a_damaged_manifest_is_not_replaced(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    (tmp_path / "manifest.json").write_text("damaged")
    with pytest.raises(CheckpointExistsError, match="cannot be read"):
        put(tmp_path, manifest)
    assert (tmp_path / "manifest.json").read_text() == "damaged"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_a_rename_that_does_not_replace_commits(tmp_path: Path, code: int) -> None:
    manifest = written(tmp_path)
    files = failing("link", code)
    put(tmp_path, manifest, files)
    assert "rename_noreplace" in files.names()
    assert read_manifest(str(tmp_path), STORE) == manifest


def test_the_rename_does_not_replace_either(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path, OTHER_ID)

    class Overtaken(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            if name == "link":
                put(tmp_path, first)
                raise OSError(errno.EPERM, "no links here")

    with pytest.raises(CheckpointExistsError):
        put(tmp_path, second, Overtaken())
    assert read_manifest(str(tmp_path), STORE) == first


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_refused_put_is_a_plain_failure(tmp_path: Path, code: int) -> None:
    manifest = written(tmp_path)
    with pytest.raises(OSError) as caught:
        put(tmp_path, manifest, failing("link", code))
    assert not isinstance(caught.value, CommitUnknownError)
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_put_that_nobody_knows_the_end_of_deletes_nothing(tmp_path: Path, code: int) -> None:
    manifest = written(tmp_path)
    with pytest.raises(CommitUnknownError) as caught:
        put(tmp_path, manifest, failing("link", code))
    assert (caught.value.code, caught.value.save_id) == (errno.errorcode[code], str(SAVE_ID))
    assert list(tmp_path.glob("*.tmp"))
    assert len(shard_paths(str(tmp_path))) == 1


def test_a_put_that_went_well_and_answered_with_an_error_is_a_success(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    put(tmp_path, manifest, failing("link", errno.EIO, late=True))
    assert read_manifest(str(tmp_path), STORE) == manifest


def test_a_directory_that_cannot_be_flushed_after_the_put_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    with pytest.raises(CommitUnknownError):
        put(tmp_path, manifest, failing("fsync", errno.EIO, nth=4))
    assert read_manifest(str(tmp_path), STORE) == manifest


def test_a_temporary_name_that_stays_does_not_spoil_the_commit(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    put(tmp_path, manifest, failing("unlink", errno.EIO, nth=2))
    assert read_manifest(str(tmp_path), STORE) == manifest


@pytest.mark.parametrize("damage", ["missing shard", "short shard", "link", "missing index", "changed index"])
def test_a_file_that_is_not_as_recorded_publishes_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    manifest = written(path)
    shard, index = shard_paths(str(path))[0], path / index_name(SAVE_ID, 0)
    if damage == "missing shard":
        os.unlink(shard)
    elif damage == "short shard":
        os.truncate(shard, os.path.getsize(shard) - 1)
    elif damage == "link":
        os.rename(shard, tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", shard)
    elif damage == "missing index":
        index.unlink()
    else:
        index.write_bytes(index.read_bytes()[:-1] + b"x")
    with pytest.raises(OSError):
        put(path, manifest)
    assert not (path / "manifest.json").exists()


def test_leftovers_of_earlier_attempts_go_after_the_commit_and_foreign_files_stay(tmp_path: Path) -> None:
    written(tmp_path)
    manifest = written(tmp_path, OTHER_ID)
    (tmp_path / f"manifest.{SAVE_ID}.tmp").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"rank-00000.{SAVE_ID}.index.bak").write_text("mine")
    (tmp_path / f"rank-00009.{SAVE_ID}.index").mkdir()
    (tmp_path / f"rank-00008.{SAVE_ID}.index").symlink_to("notes.txt")
    assert remove_leftovers(str(tmp_path), OTHER_ID, store=STORE) == []  # nothing is committed yet
    put(tmp_path, manifest)
    removed = remove_leftovers(str(tmp_path), OTHER_ID, store=STORE)
    assert len(removed) == 4 and all(str(SAVE_ID) in name for name in removed)
    left = {n for n in os.listdir(tmp_path) if str(OTHER_ID) not in n}
    assert left == {
        "manifest.json",
        "notes.txt",
        f"rank-00000.{SAVE_ID}.index.bak",
        f"rank-00009.{SAVE_ID}.index",
        f"rank-00008.{SAVE_ID}.index",
    }


def test_the_files_of_a_later_attempt_stay_since_it_may_overwrite(tmp_path: Path) -> None:
    written(tmp_path, OTHER_ID)
    put(tmp_path, written(tmp_path))
    assert remove_leftovers(str(tmp_path), SAVE_ID, store=STORE) == []
    assert len(shard_paths(str(tmp_path))) == 2


def test_leftovers_are_not_removed_in_the_name_of_a_save_that_is_not_the_committed_one(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path))
    assert remove_leftovers(str(tmp_path), OTHER_ID, store=STORE) == []
    assert len(shard_paths(str(tmp_path))) == 1


def test_files_of_a_failed_save_are_removed_and_others_stay(tmp_path: Path) -> None:
    written(tmp_path, OTHER_ID)
    written(tmp_path)
    assert len(remove_files_of(str(tmp_path), OTHER_ID, store=STORE)) == 3
    assert all(str(SAVE_ID) in name for name in os.listdir(tmp_path))


@pytest.mark.parametrize("call", ["lstat", "unlink"])
def test_a_file_that_another_worker_of_the_same_save_removes_meanwhile_keeps_none_of_the_others(
    tmp_path: Path, call: str
) -> None:
    class Raced(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            path = Path(str(self.calls[-1][1]))
            if name == call and path.name.startswith("rank-") and len(os.listdir(tmp_path)) == 3:
                path.unlink()

    written(tmp_path, OTHER_ID)
    assert len(remove_files_of(str(tmp_path), OTHER_ID, store=LocalStore(Raced()))) == 2
    assert os.listdir(tmp_path) == []


def test_a_file_of_a_failed_save_that_cannot_be_removed_keeps_none_of_the_others(tmp_path: Path) -> None:
    written(tmp_path, OTHER_ID)
    assert len(remove_files_of(str(tmp_path), OTHER_ID, store=LocalStore(failing("unlink", errno.EIO, nth=1)))) == 2
    assert len(os.listdir(tmp_path)) == 1


def test_files_of_a_committed_save_are_never_removed(tmp_path: Path) -> None:
    put(tmp_path, written(tmp_path))
    assert remove_files_of(str(tmp_path), SAVE_ID, store=STORE) == []


@pytest.mark.parametrize("content", ["damaged", None])
def test_files_stay_while_nobody_can_tell_what_is_committed(tmp_path: Path, content: str | None) -> None:
    written(tmp_path)
    if content is None:
        files: Files = failing("lstat", errno.EIO)
    else:
        (tmp_path / "manifest.json").write_text(content)
        files = FILES
    assert remove_files_of(str(tmp_path), SAVE_ID, store=LocalStore(files)) == []
    assert len(shard_paths(str(tmp_path))) == 1
