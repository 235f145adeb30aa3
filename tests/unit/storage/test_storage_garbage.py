"""storage: what gc finds and removes, that it can stop at any call, and that what it removed is never committed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, manifest_of

from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import Tombstone, decode_manifest, decode_tombstone, encode_tombstone
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, owner_of, temporary_manifest_name
from asyncckpt.maintenance import gc
from asyncckpt.maintenance.gc import (
    ATTEMPT,
    BROKEN,
    LEFTOVERS,
    LOCK,
    TOMBSTONE,
    CollectionResult,
    Garbage,
    GarbageRules,
    collect,
    garbage_in,
)
from asyncckpt.storage.catalog import (
    ABANDONED,
    COMMITTED,
    INCOMPLETE,
    MAX_CLOCK_EPOCH,
    found_at,
    next_epoch_beside,
    read_manifest,
    scan,
)
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish, remove_files_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.verification import verify_checkpoint

FILES = Files()
STORE = LocalStore()
EARLIER, MIDDLE, LATER = SAVE_ID, OTHER_ID, SaveId(2, 0, "ffffffffffff")
NOW = time.time() + 1000.0
ALL = GarbageRules(now=NOW, older_than_s=0.0)
EVERYTHING = GarbageRules(now=NOW, older_than_s=0.0, tombstones=True, locks=True, broken=True)


class DeadFiles(RecordingFiles):
    """The process is killed ahead of the `nth` call, from 1: neither this one nor any later one is done."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._left = nth
        self.is_dead = False

    def before(self, name: str, args: Sequence[Any]) -> None:
        self._left -= 1
        if self._left <= 0:
            self.is_dead = True
        if self.is_dead:
            raise OSError(errno.EIO, "killed")


class MeanwhileFiles(Files):
    """Runs `then` once, ahead of the first call of `method`."""

    def __init__(self, method: str, then: Callable[[], object]) -> None:
        self._then: Callable[[], object] | None = then
        real = getattr(self, method)

        def call(*args: Any, **kw: Any) -> Any:
            first, self._then = self._then, None
            if first is not None:
                first()
            return real(*args, **kw)

        setattr(self, method, call)


def begun(path: Path, save_id: SaveId) -> Any:
    """Write the files of a save that is never committed, and return what committing it would take."""
    path.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as elsewhere:  # as if it had been written before all that stands there
        with Snapshot({"a": 5000, "b": 3}, save_id=save_id, seed=save_id.sequence) as snapshot:
            manifest = manifest_of(snapshot.write(elsewhere, fsync=False), save_id=save_id, fsync=False)
        shutil.copytree(elsewhere, path, dirs_exist_ok=True)
    return manifest


def committed(path: Path, save_id: SaveId, **changes: Any) -> None:
    with Snapshot({"a": 5000, "b": 3}, save_id=save_id, seed=save_id.sequence) as snapshot:
        snapshot.save(str(path), fsync=False, **changes)


def commit(path: Path, manifest: Any, files: Files = FILES, **changes: Any) -> None:
    publish(str(path), manifest, store=LocalStore(files), **changes)


def collected(path: Path, files: Files = FILES, rules: GarbageRules = ALL) -> CollectionResult | None:
    return collect(str(path), LocalStore(files), rules, package="test")


def owners(path: Path) -> set[SaveId]:
    return {owner for name in os.listdir(path) if (owner := owner_of(name)) is not None}


def found_in(root: Path, rules: GarbageRules = ALL) -> dict[str, Garbage]:
    return {os.path.basename(one.path): one for one in garbage_in(str(root), STORE, rules)}


def is_sound(path: Path) -> bool:
    return not verify_checkpoint(str(path), FILES).faults


# ---- what is found --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A committed one; one with leftovers of an earlier and of a later save; an attempt beside foreign things."""
    committed(tmp_path / "good", EARLIER)
    begun(tmp_path / "replaced", EARLIER)
    committed(tmp_path / "replaced", MIDDLE)
    begun(tmp_path / "replaced", LATER)
    begun(tmp_path / "attempt", EARLIER)
    begun(tmp_path / "attempt", MIDDLE)
    (tmp_path / "attempt" / "notes.txt").write_text("mine")
    (tmp_path / "attempt" / f"rank-00009.{EARLIER}.index.bak").write_text("mine too")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "target").write_text("not to be touched")
    os.symlink(tmp_path / "elsewhere" / "target", tmp_path / "attempt" / f"rank-00001.{EARLIER}.index")
    (tmp_path / "attempt" / f"rank-00002.{EARLIER}.index").mkdir()
    os.symlink(tmp_path / "attempt", tmp_path / "link")
    return tmp_path


FOREIGN = {"notes.txt", f"rank-00009.{EARLIER}.index.bak", f"rank-00001.{EARLIER}.index", f"rank-00002.{EARLIER}.index"}


def test_attempts_and_leftovers_are_found_and_nothing_else(root: Path) -> None:
    found = found_in(root)
    assert {name: (one.kind, one.save_ids) for name, one in found.items()} == {
        "attempt": (ATTEMPT, (EARLIER, MIDDLE)),
        "replaced": (LEFTOVERS, (EARLIER, LATER)),
    }
    assert not FOREIGN & set(found["attempt"].names) and not any(one.kept for one in found.values())


def test_what_is_removed_is_what_was_found_and_foreign_things_stay(root: Path) -> None:
    found = found_in(root)
    for name in ("attempt", "replaced"):
        done = collected(root / name)
        assert done is not None and done.error is None and set(done.removed) == set(found[name].names)
    assert set(os.listdir(root / "attempt")) == {*FOREIGN, MANIFEST_NAME}
    assert owners(root / "replaced") == {MIDDLE} and is_sound(root / "replaced") and is_sound(root / "good")
    assert (root / "elsewhere" / "target").read_text() == "not to be touched"
    assert found_in(root) == {} and collected(root / "attempt") is None


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (GarbageRules(now=NOW, older_than_s=3600.0), "may be in progress"),
        (
            GarbageRules(now=time.time() - 86400.0, older_than_s=0.0),
            "may be in progress",
        ),  # of the future: clocks differ
        ("busy", "the worker writes"),
    ],
)
def test_what_may_be_under_way_is_left_alone(root: Path, rules: Any, why: str) -> None:
    if rules == "busy":
        rules = GarbageRules(
            now=NOW, older_than_s=0.0, busy=[os.path.realpath(root / name) for name in ("attempt", "replaced")]
        )
    assert all(why in one.kept for one in found_in(root, rules).values())
    before = sorted(os.listdir(root / "attempt"))
    done = collected(root / "attempt", rules=rules)
    assert done is not None and done.garbage.kept and not done.removed
    assert sorted(os.listdir(root / "attempt")) == before


def test_one_young_file_keeps_the_whole_attempt(root: Path) -> None:
    for file in (root / "attempt").iterdir():
        if file.is_file() and not file.is_symlink():
            os.utime(file, (1.0, 1.0))
    os.utime(root / "attempt", (1.0, 1.0))
    rules = GarbageRules(now=time.time(), older_than_s=3600.0)
    assert not found_in(root, rules)["attempt"].kept
    next(file for file in (root / "attempt").iterdir() if owner_of(file.name) == MIDDLE).touch()
    assert found_in(root, rules)["attempt"].kept


@pytest.mark.parametrize("replaces", [False, True])
def test_a_live_save_that_has_only_links_to_old_files_is_left_alone(tmp_path: Path, replaces: bool) -> None:
    history, first, path = ShardHistory(), tmp_path / "first", tmp_path / "next"
    two_days_ago, found = time.time() - 2 * 86400, []
    with Snapshot({"a": 300_000, "b": 5}, save_id=EARLIER, n_parts=2) as snapshot:
        snapshot.save(str(first), history=history)
        if replaces:
            snapshot.save(str(path))
    for file in [*first.iterdir(), *tmp_path.glob("next/*"), *tmp_path.glob("next")]:
        os.utime(file, (two_days_ago, two_days_ago))
    shards = [one._replace(version=STORE.link_version(one.path)) for one in history.shards(str(path), 0)]
    history.forget(str(path), 0)
    history.add(str(first), 0, shards)

    def collect_once(point: str) -> None:
        if point == "shard: linked" and not found:
            found.append(collected(path, rules=GarbageRules(now=time.time(), older_than_s=86400.0)))

    with Snapshot({"a": 300_000, "b": 5}, save_id=MIDDLE, n_parts=2) as snapshot, observed(collect_once):
        snapshot.save(str(path), history=history, overwrite=replaces)
    assert [(one.removed, "may be in progress" in one.garbage.kept) for one in found] == [((), True)]
    assert is_sound(path)


def test_a_link_that_is_made_while_gc_waits_for_the_lock_keeps_the_save(root: Path) -> None:
    path = root / "attempt"
    names = [name for name in os.listdir(path) if owner_of(name) == MIDDLE and name.endswith(".safetensors")]
    os.rename(path / names[0], root / "unchanged")
    files = MeanwhileFiles("flock", lambda: os.link(root / "unchanged", path / names[0]))
    done = collected(path, files)
    assert done is not None and not done.removed and "added meanwhile" in done.garbage.kept
    assert MANIFEST_NAME not in os.listdir(path)


@pytest.mark.parametrize("text", ["{}", "", '{"name": "an app"}', '{"asyncckpt_manifest": 99}'])
def test_beside_a_manifest_that_cannot_be_read_everything_stays(root: Path, text: str) -> None:
    (root / "attempt" / MANIFEST_NAME).write_text(text)
    assert "manifest" in found_in(root)["attempt"].kept
    done = collected(root / "attempt")
    assert done is not None and not done.removed


def test_lock_files_and_temporary_names_go_only_on_request(root: Path) -> None:
    (root / "good" / LOCK_NAME).touch()
    (root / "good" / temporary_manifest_name(EARLIER)).write_text("of a commit that was killed at its last call")
    assert "good" not in found_in(root)
    assert found_in(root, EVERYTHING)["good"].kind == LOCK
    done = collected(root / "good", rules=EVERYTHING)
    assert done is not None and set(done.removed) == {LOCK_NAME, temporary_manifest_name(EARLIER)}
    assert is_sound(root / "good") and not {LOCK_NAME, temporary_manifest_name(EARLIER)} & set(
        os.listdir(root / "good")
    )


def test_somebody_elses_lock_file_stays(root: Path) -> None:
    (root / "good" / LOCK_NAME).write_text("not empty")
    assert "good" not in found_in(root, EVERYTHING)


def test_broken_ones_go_only_on_request_and_while_a_committed_one_is_beside(root: Path) -> None:
    committed(root / "was", LATER)
    os.rename(root / "was", root / "was.broken-1")
    assert "was.broken-1" not in found_in(root)
    assert found_in(root, EVERYTHING)["was.broken-1"].kind == BROKEN
    done = collected(root / "was.broken-1", rules=EVERYTHING)
    assert done is not None and done.error is None and not (root / "was.broken-1").exists()
    committed(root / "alone" / "was", LATER)
    os.rename(root / "alone" / "was", root / "alone" / "was.broken-1")
    done = collected(root / "alone" / "was.broken-1", rules=EVERYTHING)
    assert done is not None and "no committed checkpoint" in done.garbage.kept
    assert (root / "alone" / "was.broken-1" / MANIFEST_NAME).exists()


# ---- the tombstone --------------------------------------------------------------------------------------------------


def test_a_tombstone_says_what_it_is_to_every_reader(root: Path) -> None:
    collected(root / "attempt")
    path = str(root / "attempt")
    with pytest.raises(CheckpointNotCommittedError, match="given up"):
        read_manifest(path, STORE)
    found = found_at(path, STORE)
    assert found is not None and found.state == ABANDONED and found.manifest is None
    data = (root / "attempt" / MANIFEST_NAME).read_bytes()
    tombstone = decode_tombstone(data)
    assert tombstone is not None and tombstone.save_id == MIDDLE and tombstone.writer == "asyncckpt test"
    with pytest.raises(CheckpointNotCommittedError):
        decode_manifest(data)


@pytest.mark.parametrize("at", range(0, 220, 7))
def test_a_damaged_tombstone_is_neither_a_tombstone_nor_a_manifest(at: int) -> None:
    data = bytearray(encode_tombstone(Tombstone(save_id=MIDDLE, created="2026-01-01T00:00:00", writer="asyncckpt x")))
    data[at % len(data)] ^= 1
    assert decode_tombstone(bytes(data)) is None
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        decode_manifest(bytes(data))


@pytest.mark.parametrize("save_id", [EARLIER, MIDDLE])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_save_that_was_given_up_and_earlier_ones_are_refused_for_ever(
    tmp_path: Path, save_id: SaveId, overwrite: bool
) -> None:
    manifests = {one: begun(tmp_path / "c", one) for one in (EARLIER, MIDDLE)}
    collected(tmp_path / "c")
    with pytest.raises(CheckpointExistsError, match="given up"):
        prepare_directory(str(tmp_path / "c"), save_id=save_id, store=STORE, fsync=False, overwrite=overwrite)
    begun(tmp_path / "c", save_id)  # a worker that was frozen, and goes on
    with pytest.raises(CheckpointExistsError, match="given up"):
        commit(tmp_path / "c", manifests[save_id], overwrite=overwrite)
    assert found_at(str(tmp_path / "c"), STORE).state == ABANDONED  # type: ignore[union-attr]
    remove_files_of(str(tmp_path / "c"), save_id, store=STORE)
    assert (tmp_path / "c" / MANIFEST_NAME).exists()


def test_a_later_save_takes_its_place_without_being_asked_to_overwrite(tmp_path: Path) -> None:
    begun(tmp_path / "c", MIDDLE)
    collected(tmp_path / "c")
    committed(tmp_path / "c", LATER)
    assert is_sound(tmp_path / "c") and read_manifest(str(tmp_path / "c"), STORE).save_id == LATER


def test_a_later_attempt_beside_a_tombstone_gets_one_too(tmp_path: Path) -> None:
    begun(tmp_path / "c", EARLIER)
    collected(tmp_path / "c")
    manifest = begun(tmp_path / "c", LATER)
    done = collected(tmp_path / "c")
    assert done is not None and done.garbage.kind == ATTEMPT and owners(tmp_path / "c") == set()
    with pytest.raises(CheckpointExistsError):
        commit(tmp_path / "c", manifest)


def test_the_next_run_s_epoch_is_above_that_of_a_tombstone(tmp_path: Path) -> None:
    begun(tmp_path / "c", LATER.with_parts(epoch=MAX_CLOCK_EPOCH))
    collected(tmp_path / "c")
    assert next_epoch_beside(str(tmp_path / "d"), STORE) == MAX_CLOCK_EPOCH + 1


def test_a_directory_with_only_a_tombstone_goes_on_request_and_with_foreign_files_stays(root: Path) -> None:
    begun(root / "other", EARLIER)
    for name in ("attempt", "other"):
        collected(root / name)
    assert {name: one.kind for name, one in found_in(root, EVERYTHING).items() if one.kind == TOMBSTONE} == {
        "attempt": TOMBSTONE,
        "other": TOMBSTONE,
    }
    for name in ("attempt", "other"):
        collected(root / name, rules=EVERYTHING)
    assert not (root / "other").exists() and set(os.listdir(root / "attempt")) == FOREIGN


# ---- at the same time -----------------------------------------------------------------------------------------------


def test_a_commit_that_was_frozen_ahead_of_its_last_call_finds_the_tombstone(tmp_path: Path) -> None:
    manifest = begun(tmp_path / "c", EARLIER)
    with pytest.raises(CheckpointExistsError, match="given up"):
        commit(tmp_path / "c", manifest, MeanwhileFiles("link", lambda: collected(tmp_path / "c")))
    assert found_at(str(tmp_path / "c"), STORE).state == ABANDONED  # type: ignore[union-attr]


def test_a_commit_that_comes_first_is_left_whole(tmp_path: Path) -> None:
    manifest = begun(tmp_path / "c", EARLIER)
    done = collected(tmp_path / "c", MeanwhileFiles("link", lambda: commit(tmp_path / "c", manifest)))
    assert done is not None and "committed" in done.garbage.kept and not done.removed
    assert is_sound(tmp_path / "c") and found_in(tmp_path) == {}


def test_while_somebody_holds_the_lock_nothing_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "LOCK_TIMEOUT_S", 0.05)
    with LocalStore().lock(str(root / "replaced"), 30.0):
        done = collected(root / "replaced")
    assert done is not None and done.error is not None and not done.removed
    assert owners(root / "replaced") == {EARLIER, MIDDLE, LATER} and is_sound(root / "replaced")


def test_an_overwrite_whose_files_were_removed_fails_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    committed(tmp_path / "c", EARLIER)
    manifest = begun(tmp_path / "c", LATER)
    collected(tmp_path / "c")
    with pytest.raises(OSError):
        commit(tmp_path / "c", manifest, overwrite=True)
    assert is_sound(tmp_path / "c") and read_manifest(str(tmp_path / "c"), STORE).save_id == EARLIER


# ---- killed at any call ---------------------------------------------------------------------------------------------


def calls_of(path: Path, rules: GarbageRules) -> int:
    files = RecordingFiles()
    collected(path, files, rules)
    return len(files.calls)


@pytest.mark.parametrize("then", ["collect again", "the save goes on"])
def test_killed_at_any_call_an_attempt_is_gone_whole_or_can_be_collected_again(tmp_path: Path, then: str) -> None:
    manifest = begun(tmp_path / "sample", MIDDLE)
    shutil.copytree(tmp_path / "sample", tmp_path / "counted")
    outcomes = set()
    for nth in range(1, calls_of(tmp_path / "counted", ALL) + 1):
        path = tmp_path / str(nth)
        shutil.copytree(tmp_path / "sample", path)
        files = DeadFiles(nth)
        try:
            collected(path, files)
        except OSError as error:  # ahead of its first change
            assert error.errno == errno.EIO
        assert files.is_dead
        assert found_at(str(path), STORE).state in (INCOMPLETE, ABANDONED)  # type: ignore[union-attr]
        if then == "the save goes on":
            try:
                commit(path, manifest)
            except (CheckpointExistsError, FileNotFoundError):
                outcomes.add("refused")
            else:
                outcomes.add("committed")
                assert is_sound(path)
                collected(path)
                assert is_sound(path)
                continue
        done = collected(path)
        assert done is None or done.error is None
        assert owners(path) == set() and set(os.listdir(path)) <= {MANIFEST_NAME, LOCK_NAME}, nth
        assert found_at(str(path), STORE).state == ABANDONED  # type: ignore[union-attr]
    assert outcomes == ({"refused", "committed"} if then == "the save goes on" else set())


def test_killed_at_any_call_beside_a_committed_one_that_stays_whole(root: Path) -> None:
    shutil.copytree(root / "replaced", root / "counted")
    for nth in range(1, calls_of(root / "counted", EVERYTHING) + 1):
        path = root / "killed" / str(nth)
        shutil.copytree(root / "replaced", path)
        files = DeadFiles(nth)
        try:
            collected(path, files, EVERYTHING)
        except OSError as error:
            assert error.errno == errno.EIO
        assert files.is_dead and is_sound(path) and read_manifest(str(path), STORE).save_id == MIDDLE
        collected(path, rules=EVERYTHING)
        assert is_sound(path) and owners(path) == {MIDDLE}, nth
    assert {one.state for one in scan(str(root / "killed"), STORE)} == {COMMITTED}
