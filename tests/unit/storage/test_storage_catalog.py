"""storage.catalog and contents: what is found, and what is said of what is not sound."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from storage_samples import OTHER_ID, SAVE_ID, Snapshot, failing, flip_byte, shard_paths

from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import encode_manifest
from asyncckpt.format.names import SaveId, index_name
from asyncckpt.storage.catalog import (
    CLOCK_EPOCH_S,
    CLOCK_EPOCHS_SINCE,
    MAX_CLOCK_EPOCH,
    epoch_by_clock,
    next_epoch_beside,
    read_manifest,
    scan,
)
from asyncckpt.storage.contents import read_contents, read_objects
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore

FILES = Files()
STORE = LocalStore()


def save(path: Path, save_id: SaveId = SAVE_ID, step: int = 0) -> Path:
    with Snapshot({"a": 300_000}, save_id=save_id) as snapshot:
        snapshot.save(str(path), step=step, fsync=False)
    return path


def test_a_committed_checkpoint_gives_its_manifest(tmp_path: Path) -> None:
    save(tmp_path / "c", step=12)
    assert read_manifest(str(tmp_path / "c"), STORE).step == 12


@pytest.mark.parametrize("path", ["nowhere", "nowhere/deeper"])
def test_no_directory_is_not_found(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        read_manifest(str(tmp_path / path), STORE)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_manifest(str(tmp_path / "file"), STORE)


@pytest.mark.parametrize("begun", ["empty", "with files"])
def test_a_directory_without_manifest_was_never_committed(tmp_path: Path, begun: str) -> None:
    if begun == "with files":
        with Snapshot({"a": 1}) as snapshot:
            snapshot.write(str(tmp_path))
    said = {"empty": "is an empty directory", "with files": "load an earlier one"}
    with pytest.raises(CheckpointNotCommittedError, match=f"(?=.*never committed).*{said[begun]}"):
        read_manifest(str(tmp_path), STORE)


def test_a_directory_of_other_things_is_not_found_and_the_newest_inside_is_named(tmp_path: Path) -> None:
    save(tmp_path / "step-900", SaveId(1, 9, "a" * 12))
    save(tmp_path / "step-150", SaveId(2, 0, "b" * 12))
    with pytest.raises(CheckpointNotFoundError, match="step-150"):
        read_manifest(str(tmp_path), STORE)


@pytest.mark.parametrize("kind", ["garbage", "empty", "link", "directory", "fifo"])
def test_what_is_no_manifest_is_corrupt(tmp_path: Path, kind: str) -> None:
    target = save(tmp_path / "c") / "manifest.json"
    data = target.read_bytes()
    target.unlink()
    if kind == "link":
        (tmp_path / "real").write_bytes(data)
        target.symlink_to(tmp_path / "real")
    elif kind == "directory":
        target.mkdir()
    elif kind == "fifo":
        os.mkfifo(target)
    else:
        target.write_bytes(b"" if kind == "empty" else b"garbage")
    with pytest.raises(CorruptCheckpointError) as caught:
        read_manifest(str(tmp_path / "c"), STORE)
    assert caught.value.file == "manifest.json"
    assert [found.state for found in scan(str(tmp_path), STORE)] == ["corrupt"]


def test_a_newer_manifest_is_unsupported_not_corrupt(tmp_path: Path) -> None:
    target = save(tmp_path / "c") / "manifest.json"
    target.write_bytes(target.read_bytes().replace(b'"asyncckpt_manifest": 1', b'"asyncckpt_manifest": 99'))
    with pytest.raises(UnsupportedFormatError):
        read_manifest(str(tmp_path / "c"), STORE)
    assert [found.state for found in scan(str(tmp_path), STORE)] == ["unsupported"]


def test_a_manifest_that_cannot_be_read_is_no_verdict(tmp_path: Path) -> None:
    save(tmp_path / "c")
    with pytest.raises(OSError) as caught:
        read_manifest(str(tmp_path / "c"), LocalStore(failing("open", errno.EACCES)))
    assert not isinstance(caught.value, FileNotFoundError)
    assert [found.state for found in scan(str(tmp_path), LocalStore(failing("open", errno.EACCES)))] == ["unreadable"]


def test_scan_finds_one_level_below_and_names_states(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with Snapshot({"a": 1}) as snapshot:
        snapshot.write(str(tmp_path / "b"))
    (tmp_path / "empty").mkdir()
    save(tmp_path / "deep/er")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = {os.path.basename(f.path): f.state for f in scan(str(tmp_path), STORE)}
    assert found == {"a": "committed", "b": "incomplete"}
    deep = {os.path.relpath(f.path, tmp_path) for f in scan(str(tmp_path), STORE, recursive=True)}
    assert deep == {"a", "b", "deep/er"}
    assert [f.path for f in scan(str(tmp_path / "a"), STORE)] == [str(tmp_path / "a")]


def test_an_epoch_by_the_clock_is_above_those_of_ten_minutes_before_and_never_too_large(tmp_path: Path) -> None:
    before = epoch_by_clock(time.time() - CLOCK_EPOCH_S)
    assert before < next_epoch_beside(str(tmp_path / "step-1"), STORE) <= epoch_by_clock(time.time() + 1)
    assert [epoch_by_clock(CLOCK_EPOCHS_SINCE + n * CLOCK_EPOCH_S) for n in (1, 1.9, 2)] == [1, 1, 2]
    assert (epoch_by_clock(0), epoch_by_clock(1e12)) == (1, MAX_CLOCK_EPOCH), "a clock that is wrong"


@pytest.mark.usefixtures("no_clock")
def test_the_next_epoch_is_above_every_sibling(tmp_path: Path) -> None:
    assert next_epoch_beside(str(tmp_path / "new/step-1"), STORE) == 1
    save(tmp_path / "a", SaveId(3, 5, "a" * 12))
    save(tmp_path / "b", SaveId(7, 0, "b" * 12))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("damaged")
    (tmp_path / "circle").symlink_to("circle")
    assert next_epoch_beside(str(tmp_path / "step-1"), STORE) == 8


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    "name",
    ["rank-00000.{}.index", "rank-00003-part-001.{}.safetensors", "manifest.{}.tmp", "rank-00000.{}.objects.json"],
)
def test_the_next_epoch_is_above_what_was_never_committed(tmp_path: Path, name: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / name.format(SaveId(4, 0, "a" * 12))).write_text("")
    assert next_epoch_beside(str(tmp_path / "step-2"), STORE) == 5
    assert next_epoch_beside(str(tmp_path / "step-1"), STORE) == 5


@pytest.mark.usefixtures("no_clock")
def test_a_damaged_manifest_counts_by_its_files(tmp_path: Path) -> None:
    save(tmp_path / "a", SaveId(6, 0, "a" * 12))
    (tmp_path / "a" / "manifest.json").write_text("damaged")
    assert next_epoch_beside(str(tmp_path / "b"), STORE) == 7


@pytest.mark.parametrize(("method", "code"), [("open", errno.EIO), ("open", errno.EACCES), ("listdir", errno.EIO)])
def test_a_sibling_that_cannot_be_read_is_named(tmp_path: Path, method: str, code: int) -> None:
    save(tmp_path / "a")
    with pytest.raises(OSError, match="epochs of earlier runs") as caught:
        next_epoch_beside(str(tmp_path / "b"), LocalStore(failing(method, code, nth=2 if method == "listdir" else 1)))
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "a"))


@pytest.mark.usefixtures("no_clock")
def test_what_another_user_keeps_closed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert next_epoch_beside(str(tmp_path / "b"), LocalStore(failing("listdir", errno.EACCES, nth=2))) == 1


def test_an_epoch_that_no_save_id_can_hold_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", SaveId(999_999, 0, "a" * 12))
    with pytest.raises(SaveFailedError, match="another directory"):
        next_epoch_beside(str(tmp_path / "b"), STORE)


def test_contents_hold_every_tensor(tmp_path: Path) -> None:
    save(tmp_path / "c")
    contents = read_contents(str(tmp_path / "c"), FILES)
    assert {f: t.global_shape for f, t in contents.tensors.items()} == {"a": (300_000,)}
    assert read_objects(contents, 0, FILES) == []


def index_of(path: Path) -> Path:
    return path / index_name(SAVE_ID, 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "missing", "link"])
def test_a_damaged_index_is_named(tmp_path: Path, damage: str) -> None:
    index = index_of(save(tmp_path / "c"))
    if damage == "flip":
        flip_byte(str(index), 40)
    elif damage == "cut":
        os.truncate(index, index.stat().st_size - 1)
    elif damage == "extend":
        index.write_bytes(index.read_bytes() + b"x")
    else:
        os.rename(index, tmp_path / "away")
        if damage == "link":
            index.symlink_to(tmp_path / "away")
    with pytest.raises(CorruptCheckpointError) as caught:
        read_contents(str(tmp_path / "c"), FILES)
    assert caught.value.file == index.name


def test_every_flipped_byte_of_manifest_and_index_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    for file in (path / "manifest.json", index_of(path), path / f"rank-00000.{SAVE_ID}.objects.json"):
        for offset in range(file.stat().st_size):
            flip_byte(str(file), offset)
            with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
                read_objects(read_contents(str(path), FILES), 0, FILES)
            flip_byte(str(file), offset)
    read_objects(read_contents(str(path), FILES), 0, FILES)


def test_an_index_of_another_save_is_refused(tmp_path: Path) -> None:
    """Even with a manifest that vouches for it."""
    path, other = save(tmp_path / "c"), save(tmp_path / "d", OTHER_ID)
    theirs, ours = read_manifest(str(other), STORE), read_manifest(str(path), STORE)
    record = dataclasses.replace(theirs.ranks[0], index_name=ours.ranks[0].index_name)
    shutil.copy(other / theirs.ranks[0].index_name, path / record.index_name)
    (path / "manifest.json").write_bytes(encode_manifest(dataclasses.replace(ours, ranks=(record,))))
    with pytest.raises(CorruptCheckpointError):
        read_contents(str(path), FILES)


def test_a_missing_objects_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    (path / f"rank-00000.{SAVE_ID}.objects.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="it is missing") as caught:
        read_objects(read_contents(str(path), FILES), 0, FILES)
    assert caught.value.file == f"rank-00000.{SAVE_ID}.objects.json"
    assert len(shard_paths(str(path))) == 1
