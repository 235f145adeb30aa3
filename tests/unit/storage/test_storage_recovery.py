"""storage.recovery: what a dead writer has left counts if it is provably whole; all else is written anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, FailingFiles, RecordingFiles, Snapshot, failing, manifest_of, shard_paths

from asyncckpt.format.names import index_name, objects_name, temporary_manifest_name
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import check_rank_files
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankResult, RankWriter
from asyncckpt.storage.recovery import is_committed, keep_ring_files, resume_rank_files

LENGTHS = {"a": 700_000, "b": 5}
INDEX, OBJECTS = index_name(SAVE_ID, 0), objects_name(SAVE_ID, 0)
MIRRORS = ["", "s3://bucket/runs/step"]
"""None, and one for which checksums are of smaller blocks."""


def resume(snapshot: Snapshot, path: Path, files: Files | None = None, **changes: Any) -> tuple[RankResult, bool]:
    with ThreadPoolExecutor(4) as pool:
        return resume_rank_files(snapshot.writer(str(path), files, **changes), pool)


def inodes(path: Path) -> dict[str, int]:
    return {os.path.basename(p): os.stat(p).st_ino for p in shard_paths(str(path))}


def assert_whole(path: Path, result: RankResult, snapshot: Snapshot) -> None:
    check_rank_files(str(path), manifest_of(result), store=LocalStore())
    for shard, (offset, nbytes) in zip(shard_paths(str(path)), snapshot.parts, strict=True):
        assert Path(shard).read_bytes() == bytes(snapshot.image[offset : offset + nbytes])


@pytest.mark.parametrize("mirror", MIRRORS)
@pytest.mark.parametrize("fsync", [True, False])
def test_shards_that_are_whole_are_flushed_and_kept(tmp_path: Path, fsync: bool, mirror: str) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), fsync=fsync, mirror=mirror)
        before, files = inodes(tmp_path), RecordingFiles()
        result, kept = resume(snapshot, tmp_path, files, fsync=fsync, mirror=mirror)
        assert kept
        assert inodes(tmp_path) == before
        assert result.record == first.record
        assert [name for name, _ in files.calls].count("fsync") == (5 if fsync else 0)  # shards, small files, directory
        assert_whole(tmp_path, result, snapshot)


def test_small_files_are_written_anew_since_nobody_knows_whether_their_fsync_failed(tmp_path: Path) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.write(str(tmp_path))
        holders = {name: open(tmp_path / name) for name in (INDEX, OBJECTS)}  # noqa: SIM115 keeps the inode's number
        files = RecordingFiles()
        resume(snapshot, tmp_path, files)
        for name, holder in holders.items():
            assert os.fstat(holder.fileno()).st_ino != os.stat(tmp_path / name).st_ino
            holder.close()
        assert sorted(os.listdir(tmp_path)) == sorted([INDEX, OBJECTS, *inodes(tmp_path)])


class Committed(RecordingFiles):
    """Looks, ahead of each call, whether a rank's files are as they were committed."""

    def __init__(self, path: Path, result: RankResult) -> None:
        super().__init__()
        self._path, self._manifest = str(path), manifest_of(result)

    def before(self, name: str, args: Any) -> None:
        check_rank_files(self._path, self._manifest, store=LocalStore())


WAYS = ["from the slot", "of a ring"]


def go_on(how: str, snapshot: Snapshot, path: Path, files: Files, **changes: Any) -> None:
    if how == "of a ring":
        assert keep(snapshot, path, files, **changes) is not None
    else:
        assert resume(snapshot, path, files, **changes)[1]


@pytest.mark.parametrize("how", WAYS)
def test_what_another_nodes_worker_may_have_committed_is_whole_at_every_instant(tmp_path: Path, how: str) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), world_size=2)
        (tmp_path / f"{INDEX}.tmp").write_text("of a worker that died here")
        files = Committed(tmp_path, first)
        go_on(how, snapshot, tmp_path, files, world_size=2)
        assert_whole(tmp_path, first, snapshot)
        assert "rename" in files.names() and not (tmp_path / f"{INDEX}.tmp").exists()


def _is_small(files: RecordingFiles, where: Any) -> bool:
    return str(files.paths.get(where, where)).endswith(".tmp")


@pytest.mark.parametrize("method", ["fsync", "unlink", "open", "pwrite", "rename", "close"])
@pytest.mark.parametrize("how", WAYS)
def test_a_call_that_fails_takes_nothing_from_what_another_nodes_worker_may_have_committed(
    tmp_path: Path, how: str, method: str
) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), world_size=2)
        before = sorted(os.listdir(tmp_path))
        files = FailingFiles(errno.ENOSPC, wanted=lambda name, args: name == method and _is_small(files, args[0]))
        with pytest.raises(OSError, match="No space"):
            go_on(how, snapshot, tmp_path, files, world_size=2)
        check_rank_files(str(tmp_path), manifest_of(first), store=LocalStore())
        assert sorted(os.listdir(tmp_path)) == before


class Killed(BaseException):
    """The process is gone."""


class Dying(Committed):
    """Its process is killed ahead of the `nth` call: neither that nor a later one is done."""

    def __init__(self, path: Path, result: RankResult, nth: int) -> None:
        super().__init__(path, result)
        self.left = nth

    def before(self, name: str, args: Any) -> None:
        super().before(name, args)
        if name != "close":  # the kernel closes what a dead one had open
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.mark.parametrize("how", WAYS)
def test_a_worker_that_is_killed_at_any_call_is_followed_by_one_that_keeps_the_same_files(
    tmp_path: Path, how: str
) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), world_size=2)
        before, names = inodes(tmp_path), sorted(os.listdir(tmp_path))
        for nth in range(100):
            files = Dying(tmp_path, first, nth)
            try:
                go_on(how, snapshot, tmp_path, files, world_size=2)
            except Killed:
                assert_whole(tmp_path, first, snapshot)
            else:
                break
        assert nth > 20
        go_on(how, snapshot, tmp_path, RecordingFiles(), world_size=2)
        assert_whole(tmp_path, first, snapshot)
        assert inodes(tmp_path) == before
        assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(("method", "error"), [("preadv", errno.EIO), ("open", errno.ESTALE), ("lstat", errno.EIO)])
@pytest.mark.parametrize("how", WAYS)
def test_nothing_is_removed_where_it_cannot_be_found_out_what_stands(
    tmp_path: Path, how: str, method: str, error: int
) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), world_size=2)
        before = inodes(tmp_path)
        with pytest.raises(OSError) as caught:
            go_on(how, snapshot, tmp_path, failing(method, error), world_size=2)
        assert caught.value.errno == error
        check_rank_files(str(tmp_path), manifest_of(first), store=LocalStore())
        assert inodes(tmp_path) == before


def _damage_value(path: Path) -> None:
    """The slot's bytes are others: see the test."""


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "nothing was written": lambda path: [p.unlink() for p in path.iterdir()],
    "no index": lambda path: (path / INDEX).unlink(),
    "half an index": lambda path: os.truncate(path / INDEX, 100),
    "an index of zeros": lambda path: (path / INDEX).write_bytes(bytes((path / INDEX).stat().st_size)),
    "a longer index": lambda path: (path / INDEX).write_bytes((path / INDEX).read_bytes() + b"x"),
    "no shard": lambda path: Path(shard_paths(str(path))[0]).unlink(),
    "a shorter shard": lambda path: os.truncate(shard_paths(str(path))[0], 4096),
    "a longer shard": lambda path: os.truncate(shard_paths(str(path))[0], 1 << 20),
    "other bytes in memory": _damage_value,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_not_provably_whole_is_written_anew(tmp_path: Path, damage: str) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.write(str(tmp_path))
        DAMAGES[damage](tmp_path)
        if damage == "other bytes in memory":
            offset, nbytes = snapshot.parts[0]
            snapshot.image[offset + nbytes - 1] ^= 1
        result, kept = resume(snapshot, tmp_path)
        assert not kept
        assert_whole(tmp_path, result, snapshot)


def test_an_index_of_another_request_is_not_believed(tmp_path: Path) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.write(str(tmp_path), world_size=2)
        result, kept = resume(snapshot, tmp_path)
        assert not kept
        assert_whole(tmp_path, result, snapshot)


def test_files_of_other_saves_and_ranks_are_left_alone(tmp_path: Path) -> None:
    with Snapshot(LENGTHS, save_id=OTHER_ID) as other, Snapshot(LENGTHS) as snapshot:
        other.write(str(tmp_path))
        snapshot.write(str(tmp_path))
        (tmp_path / INDEX).unlink()
        strangers = [tmp_path / index_name(SAVE_ID, 1), tmp_path / "notes.txt"]
        for path in strangers:
            path.write_text("mine")
        before = {p.name for p in tmp_path.iterdir() if str(OTHER_ID) in p.name}
        resume(snapshot, tmp_path)
        assert {p.name for p in tmp_path.iterdir() if str(OTHER_ID) in p.name} == before
        assert [p.read_text() for p in strangers] == ["mine", "mine"]


@pytest.mark.parametrize("method", ["fsync", "unlink", "open"])
def test_a_call_that_fails_fails_the_save_and_nothing_counts_as_written(tmp_path: Path, method: str) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.write(str(tmp_path))
        nth = 3 if method == "open" else 1  # after the index, and the manifest that is not there
        with pytest.raises(OSError, match="Input/output"):
            resume(snapshot, tmp_path, failing(method, errno.EIO, nth=nth))
        if method != "unlink":
            assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize("standing", ["own", "none", "another's"])
def test_only_its_own_manifest_commits_a_save(tmp_path: Path, standing: str) -> None:
    path = str(tmp_path / "c")
    with Snapshot(LENGTHS) as snapshot, Snapshot(LENGTHS, save_id=OTHER_ID) as other:
        if standing == "none":
            os.mkdir(path)
            snapshot.write(path)
        else:
            (snapshot if standing == "own" else other).save(path)
        assert is_committed(path, SAVE_ID, store=LocalStore()) is (standing == "own")
    assert not is_committed(str(tmp_path / "nowhere"), SAVE_ID, store=LocalStore())


def test_a_commit_that_stands_is_flushed_again_and_what_it_left_goes(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    with Snapshot(LENGTHS) as snapshot:
        snapshot.save(path)
    temporary = tmp_path / "c" / temporary_manifest_name(SAVE_ID)
    temporary.write_text("left")
    files = RecordingFiles()
    assert is_committed(path, SAVE_ID, store=LocalStore(files))
    assert [name for name, _ in files.calls].count("fsync") == 1
    assert not temporary.exists()
    with pytest.raises(OSError, match="Input/output"):
        is_committed(path, SAVE_ID, store=LocalStore(failing("fsync", errno.EIO)))


def test_the_directory_of_a_resumed_save_may_hold_its_own_manifest(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    with Snapshot(LENGTHS) as snapshot:
        snapshot.save(path)
    made = prepare_directory(path, save_id=SAVE_ID, store=LocalStore(), fsync=True, resumed=True)
    assert made == []


# ---- of a ring: nothing is in memory to compare with


class Nowhere:
    """The image of a ring that is over: nobody may read it."""

    is_page_aligned = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice) -> memoryview:
        raise AssertionError("its bytes are in memory no more")


def keep(snapshot: Snapshot, path: Path, files: Files | None = None, **changes: Any) -> RankResult | None:
    request, image = snapshot.request(str(path), **changes), Nowhere(len(snapshot.image))
    return keep_ring_files(RankWriter(request, image, files or Files()))


@pytest.mark.parametrize("mirror", MIRRORS)
@pytest.mark.parametrize("fsync", [True, False])
def test_of_a_ring_what_its_index_says_is_whole_is_flushed_and_kept(tmp_path: Path, fsync: bool, mirror: str) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        first = snapshot.write(str(tmp_path), fsync=fsync, mirror=mirror)
        before, files = inodes(tmp_path), RecordingFiles()
        result = keep(snapshot, tmp_path, files, fsync=fsync, mirror=mirror)
        assert result is not None
        assert result.record == first.record
        assert inodes(tmp_path) == before
        assert [name for name, _ in files.calls].count("fsync") == (5 if fsync else 0)  # shards, small files, directory
        assert_whole(tmp_path, result, snapshot)


@pytest.mark.parametrize("how", ["no index", "half an index", "no shard", "a short shard", "another request"])
def test_of_a_ring_what_is_not_whole_is_not_kept_and_nothing_of_it_is_touched(tmp_path: Path, how: str) -> None:
    with Snapshot(LENGTHS, n_parts=2) as snapshot:
        snapshot.write(str(tmp_path))
        (tmp_path / "another's").touch()
        index, shard = tmp_path / INDEX, Path(shard_paths(str(tmp_path))[1])
        if how == "no index":
            index.unlink()
        elif how == "half an index":
            index.write_bytes(index.read_bytes()[:-9])
        elif how == "no shard":
            shard.unlink()
        elif how == "a short shard":
            os.truncate(shard, shard.stat().st_size - 1)
        changes = {"objects": b"others"} if how == "another request" else {}
        before = inodes(tmp_path)
        assert keep(snapshot, tmp_path, **changes) is None
        assert inodes(tmp_path) == before


def test_two_that_were_kept_do_not_count_as_equal_because_their_first_blocks_were_not_read(tmp_path: Path) -> None:
    prints = set()
    for seed in range(2):
        path = tmp_path / str(seed)
        path.mkdir()
        with Snapshot({"a": 9000}, seed=seed) as snapshot:
            snapshot.write(str(path))
            result = keep(snapshot, path)
            assert result is not None
            prints.add(result.shards_print)
    assert len(prints) == 2
