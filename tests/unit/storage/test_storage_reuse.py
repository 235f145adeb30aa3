"""storage.reuse: shards whose bytes have not changed are linked to the files of an earlier save, all others written."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest
from storage_samples import FailingFiles, RecordingFiles, Snapshot, flip_byte, manifest_of, shard_paths

from asyncckpt.errors import CorruptCheckpointError, SaveFailedError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.index import decode_index
from asyncckpt.format.names import MANIFEST_NAME, SaveId, index_name
from asyncckpt.storage import rank_writer
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import COPY_UNKNOWN, Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.recovery import resume_rank_files
from asyncckpt.storage.reuse import unchanged
from asyncckpt.storage.reuse.shard_history import MAX_HISTORY_NBYTES, ShardHistory, WrittenShard
from asyncckpt.storage.store import UnknownOutcomeError
from asyncckpt.storage.verification import verify_checkpoint

RUN = "0123456789ab"
LENGTHS = {"base": 900_000, "adapter": 5_000}
"""Of two shards: the base fills one, of four blocks."""


def save_id(number: int, run: str = RUN) -> SaveId:
    return SaveId(1, number, run)


def snapshot_of(number: int, *, run: str = RUN, **values: bytes) -> Snapshot:
    """Return the snapshot of a save: the base is always the same, the adapter never; `values`: other ones."""
    snapshot = Snapshot(LENGTHS, save_id=save_id(number, run), n_parts=2)
    fill(snapshot, {"adapter": random.Random(number).randbytes(LENGTHS["adapter"]), **values})
    return snapshot


def fill(snapshot: Snapshot, values: dict[str, bytes]) -> None:
    for fqn, value in values.items():
        chunk = snapshot.chunks[fqn]
        start = snapshot.parts[chunk.part].offset + chunk.offset_bytes
        snapshot.image[start : start + len(value)] = value
        snapshot.values[fqn] = snapshot.values[fqn][:0] + value


def save(
    root: Path,
    number: int,
    history: ShardHistory | None,
    files: Files | None = None,
    *,
    run: str = RUN,
    values: dict[str, bytes] | None = None,
    **changes: Any,
) -> RankResult:
    """Save to a directory of its own, and commit; each byte of it is verified."""
    path = str(root / f"step-{number}")
    with snapshot_of(number, run=run, **(values or {})) as snapshot:
        result = commit(path, snapshot, history, files or RecordingFiles(), **changes)
        assert_holds(path, snapshot)
    return result


def commit(path: str, snapshot: Snapshot, history: ShardHistory | None, files: Files, **changes: Any) -> RankResult:
    fsync, store = changes.get("fsync", True), LocalStore(files)
    prepare_directory(path, save_id=snapshot.save_id, store=store, fsync=fsync, overwrite=False)
    result = snapshot.write(path, files, history=history, **changes)
    publish(path, manifest_of(result, save_id=snapshot.save_id, fsync=fsync), store=store, overwrite=False)
    return result


def assert_holds(path: str, snapshot: Snapshot) -> None:
    verdict = verify_checkpoint(path, Files())
    assert verdict.faults == []
    assert verdict.contents is not None
    for fqn, value in snapshot.values.items():
        ((_, chunk),) = verdict.contents.tensors[fqn].chunks
        data = Path(shard_paths(path)[chunk.part]).read_bytes()
        assert data[chunk.offset_bytes : chunk.offset_bytes + chunk.nbytes] == value


def linked(root: Path, number: int) -> list[int]:
    """Return the numbers of the shards of a save that have other names too."""
    return [n for n, path in enumerate(shard_paths(str(root / f"step-{number}"))) if os.stat(path).st_nlink > 1]


def origins(root: Path, number: int) -> list[SaveId | None]:
    data = (root / f"step-{number}" / index_name(save_id(number), 0)).read_bytes()
    return [shard.origin for shard in decode_index(data).shards]


BASE, ADAPTER = 0, 1
URL = "s3://bucket/runs/step"
"""A mirror, for which checksums are of smaller blocks."""


def test_what_is_unchanged_is_linked_and_what_has_changed_is_written(tmp_path: Path) -> None:
    history = ShardHistory()
    results = [save(tmp_path, number, history) for number in range(3)]
    inodes = [[os.stat(p).st_ino for p in shard_paths(str(tmp_path / f"step-{n}"))] for n in range(3)]
    assert len({found[BASE] for found in inodes}) == 1 and len({found[ADAPTER] for found in inodes}) == 3
    assert [result.reused_nbytes > LENGTHS["base"] for result in results] == [False, True, True]
    assert origins(tmp_path, 0) == [None, None]
    assert origins(tmp_path, 1) == origins(tmp_path, 2) == [save_id(0), None], "the ID that is in the file"


def test_nothing_is_linked_and_the_index_is_as_ever_without_a_history(tmp_path: Path) -> None:
    for number in range(2):
        assert save(tmp_path, number, None).reused_nbytes == 0
    assert linked(tmp_path, 0) == linked(tmp_path, 1) == []
    raw = msgpack.unpackb((tmp_path / "step-1" / index_name(save_id(1), 0)).read_bytes())
    assert "origins" not in raw and "must" not in raw


@pytest.mark.parametrize("mirror", ["", URL])
@pytest.mark.parametrize("at", [0, 1, 262_143, 500_000, LENGTHS["base"] - 1])
def test_one_byte_that_has_changed_anywhere_is_not_lost(tmp_path: Path, at: int, mirror: str) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history, mirror=mirror)
    with Snapshot(LENGTHS) as first:
        changed = bytearray(first.values["base"])
    changed[at] ^= 1
    assert save(tmp_path, 1, history, values={"base": bytes(changed)}, mirror=mirror).reused_nbytes == 0
    assert linked(tmp_path, 1) == []


def test_with_a_mirror_in_a_store_checksums_are_of_the_same_blocks_so_that_shards_are_linked(tmp_path: Path) -> None:
    history = ShardHistory()
    for number, mirror in enumerate(("", URL, "")):
        save(tmp_path, number, history, mirror=mirror)
        index = decode_index((tmp_path / f"step-{number}" / index_name(save_id(number), 0)).read_bytes())
        assert index.block_nbytes == BLOCK_NBYTES
    assert [origins(tmp_path, number)[BASE] for number in range(3)] == [None, save_id(0), save_id(0)]


def test_a_value_that_comes_back_is_linked_to_the_save_before_the_last(tmp_path: Path) -> None:
    history = ShardHistory()
    with Snapshot(LENGTHS) as first:
        other = bytes(len(first.values["base"]))
    for number, values in enumerate(({}, {"base": other}, {})):
        save(tmp_path, number, history, values=values)
    assert origins(tmp_path, 2) == [save_id(0), None]


REFUSALS = (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EIO)


def links_of_shards(name: str, args: Sequence[Any]) -> bool:
    return name == "link" and str(args[0]).endswith(".safetensors")


@pytest.mark.parametrize("code", REFUSALS)
def test_where_links_are_refused_everything_is_written(tmp_path: Path, code: int) -> None:
    history = ShardHistory()
    for number in range(2):
        files = FailingFiles(code, wanted=links_of_shards)
        assert save(tmp_path, number, history, files).reused_nbytes == 0
        assert files.failed == (None, "link")[number]
    assert linked(tmp_path, 1) == [] and origins(tmp_path, 1) == [None, None]


def test_a_link_that_was_made_although_the_call_failed_is_one(tmp_path: Path) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    files = FailingFiles(errno.ETIMEDOUT, wanted=links_of_shards, late=True)
    assert save(tmp_path, 1, history, files).reused_nbytes > 0
    assert files.failed == "link" and linked(tmp_path, 1) == [BASE]


class UnknownStore(LocalStore):
    """One whose links may still be made after they have failed."""

    def link(self, source: str, target: str, version: str) -> None:
        raise UnknownOutcomeError(errno.EREMOTEIO, "no answer", target)


def test_a_link_that_may_still_be_made_ends_the_save_and_the_next_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    with monkeypatch.context() as patch:
        patch.setattr(rank_writer, "store_over", lambda files, umask: UnknownStore(files, umask=umask))
        with pytest.raises(SaveFailedError) as caught:
            save(tmp_path, 1, history)
        assert caught.value.code == COPY_UNKNOWN and "save again" in str(caught.value)
        assert shard_paths(str(tmp_path / "step-1")) == []
        assert save(tmp_path, 2, history).reused_nbytes == 0
    assert save(tmp_path, 3, history).reused_nbytes > 0


def test_that_links_are_refused_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "_told", set())
    history = ShardHistory()
    for number in range(4):
        code = (errno.EPERM, errno.EPERM, errno.EPERM, errno.ENOENT)[number]
        save(tmp_path, number, history, FailingFiles(code, wanted=links_of_shards))
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "cannot be linked" in warnings[0].getMessage()


def base_file(root: Path, number: int) -> str:
    return shard_paths(str(root / f"step-{number}"))[BASE]


def append(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def replace_by_a_link(path: str) -> None:
    os.rename(path, f"{path}.away")
    os.symlink(f"{path}.away", path)


def replace_by_a_copy(path: str) -> None:
    shutil.copy2(path, f"{path}.new")
    os.rename(f"{path}.new", path)


def put_back(path: str) -> None:
    shutil.copy2(path, f"{path}.away")
    os.unlink(path)
    shutil.copy2(f"{path}.away", path)


DISTURBANCES: dict[str, Callable[[str], None]] = {
    "removed": os.unlink,
    "longer": append,
    "shorter": lambda path: os.truncate(path, os.path.getsize(path) - 1),
    "written to": lambda path: flip_byte(path, 300_000),
    "a symbolic link": replace_by_a_link,
    "replaced by a copy with its time": replace_by_a_copy,
    "removed and put back with its time": put_back,
    "of other permissions": lambda path: os.chmod(path, 0o600),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_a_file_that_is_not_what_was_written_is_not_linked(tmp_path: Path, what: str) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    before = os.stat(base_file(tmp_path, 0)).st_mtime_ns
    DISTURBANCES[what](base_file(tmp_path, 0))
    if what == "written to":
        assert os.stat(base_file(tmp_path, 0)).st_mtime_ns != before
    assert save(tmp_path, 1, history).reused_nbytes == 0
    assert origins(tmp_path, 1) == [None, None]


def test_a_file_of_a_failed_save_is_gone_and_that_of_the_save_before_is_linked(tmp_path: Path) -> None:
    history = ShardHistory()
    for number in range(2):
        save(tmp_path, number, history)
    for path in shard_paths(str(tmp_path / "step-1")):
        os.unlink(path)
    assert save(tmp_path, 2, history).reused_nbytes > 0
    assert linked(tmp_path, 2) == [BASE]


def test_a_file_is_written_anew_after_a_number_of_links_so_that_damage_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "MAX_LINKS", 3)
    history = ShardHistory()
    save(tmp_path, 0, history)
    path = base_file(tmp_path, 0)
    before = os.stat(path)
    flip_byte(path, 300_000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if the disk had done it
    reused = []
    for number in range(1, 10):
        with snapshot_of(number) as snapshot:
            result = commit(str(tmp_path / f"step-{number}"), snapshot, history, Files())
        reused.append(result.reused_nbytes > 0)
    assert reused == [True, True, True, False] * 2 + [True]
    faulty = [n for n in range(10) if verify_checkpoint(str(tmp_path / f"step-{n}"), Files()).faults]
    assert faulty == [0, 1, 2, 3]


def test_the_number_of_links_is_that_of_the_guide() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "unchanged-data.md"
    assert f"anew after {unchanged.MAX_LINKS} links" in guide.read_text()


def test_a_checkpoint_is_whole_when_all_others_are_gone(tmp_path: Path) -> None:
    history = ShardHistory()
    for number in range(3):
        save(tmp_path, number, history)
    for number in range(2):
        for path in (tmp_path / f"step-{number}").iterdir():
            path.unlink()
    with snapshot_of(2) as snapshot:
        assert_holds(str(tmp_path / "step-2"), snapshot)


def test_a_file_that_was_never_flushed_is_not_linked_by_a_save_that_flushes(tmp_path: Path) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history, fsync=False)
    assert save(tmp_path, 1, history).reused_nbytes == 0
    assert save(tmp_path, 2, history, fsync=False).reused_nbytes > 0


def test_another_run_beside_it_is_linked_and_other_directories_and_ranks_are_not(tmp_path: Path) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    assert save(tmp_path, 1, history, run="ba9876543210").reused_nbytes > 0
    (tmp_path / "other").mkdir()
    assert save(tmp_path / "other", 1, history).reused_nbytes == 0
    (tmp_path / "step-2").mkdir()
    with snapshot_of(2) as snapshot:
        assert snapshot.write(str(tmp_path / "step-2"), history=history, rank=1, world_size=2).reused_nbytes == 0


def test_the_name_is_flushed_before_the_index_counts_and_the_file_is_not(tmp_path: Path) -> None:
    history, files = ShardHistory(), RecordingFiles()
    save(tmp_path, 0, history)
    save(tmp_path, 1, history, files)
    path = str(tmp_path / "step-1")
    link = next(n for n, call in enumerate(files.calls) if call == ("link", base_file(tmp_path, 0)))
    index = next(n for n, (name, where) in enumerate(files.calls) if name == "open" and str(where).endswith(".index"))
    manifest = next(n for n, (_, where) in enumerate(files.calls) if "manifest" in str(where) and n > index)
    flushes = [n for n, call in enumerate(files.calls) if call == ("fsync", path)]
    assert link < index and any(index < n < manifest for n in flushes)
    assert ("fsync", base_file(tmp_path, 1)) not in files.calls, "its own save has flushed it"


def test_a_save_that_fails_removes_its_names_only(tmp_path: Path) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    files = FailingFiles(errno.ENOSPC, wanted=lambda name, args: name == "open" and str(args[0]).endswith(".index"))
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 1, history, files)
    assert shard_paths(str(tmp_path / "step-1")) == [] and linked(tmp_path, 0) == []
    with snapshot_of(0) as snapshot:
        assert_holds(str(tmp_path / "step-0"), snapshot)
    assert save(tmp_path, 2, history).reused_nbytes > 0


def test_an_image_that_may_not_be_used_any_more_is_not_compared_to_the_end(tmp_path: Path) -> None:
    history = ShardHistory()
    save(tmp_path, 0, history)
    (tmp_path / "step-1").mkdir()
    calls = iter(range(1000))

    def check() -> None:
        if next(calls) >= 1:
            raise InterruptedError("the slot was reopened")

    with snapshot_of(1) as snapshot, pytest.raises(InterruptedError):
        snapshot.write(str(tmp_path / "step-1"), check=check, history=history)
    assert list((tmp_path / "step-1").iterdir()) == []


# ---- after the death of the process that linked ---------------------------------------------------------------------


def resume(root: Path, number: int, history: ShardHistory | None = None, mirror: str = "") -> tuple[RankResult, bool]:
    with snapshot_of(number) as snapshot, ThreadPoolExecutor(4) as pool:
        writer = snapshot.writer(str(root / f"step-{number}"), RecordingFiles(), history=history, mirror=mirror)
        return resume_rank_files(writer, pool)


def leave_complete(root: Path, mirror: str = "") -> None:
    """Leave the files of a save with a linked shard that was not committed."""
    history = ShardHistory()
    for number in range(2):
        save(root, number, history, mirror=mirror)
    (root / "step-1" / MANIFEST_NAME).unlink()


@pytest.mark.parametrize("mirror", ["", URL])
def test_linked_shards_of_a_dead_process_are_kept(tmp_path: Path, mirror: str) -> None:
    leave_complete(tmp_path, mirror=mirror)
    index = tmp_path / "step-1" / index_name(save_id(1), 0)
    before = index.read_bytes()
    result, kept = resume(tmp_path, 1, ShardHistory(), mirror=mirror)
    assert kept and result.reused_nbytes > 0 and index.read_bytes() == before
    assert linked(tmp_path, 1) == [BASE]


@pytest.mark.parametrize("origin", [save_id(7), None])
def test_an_index_with_another_origin_is_not_believed(tmp_path: Path, origin: SaveId | None) -> None:
    leave_complete(tmp_path)
    index = tmp_path / "step-1" / index_name(save_id(1), 0)
    raw = msgpack.unpackb(index.read_bytes())
    raw["origins"][BASE] = origin and str(origin)
    index.write_bytes(msgpack.packb(raw))
    result, kept = resume(tmp_path, 1, ShardHistory())
    assert not kept and result.reused_nbytes == 0
    assert linked(tmp_path, 1) == [] and origins(tmp_path, 1) == [None, None]


class CopyingStore(LocalStore):
    """One that may still be making the links of a dead process."""

    links_may_end_late = True


@pytest.mark.parametrize("reuse", [True, False])
def test_where_a_copy_may_still_be_made_shards_of_a_dead_process_are_kept_or_the_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    monkeypatch.setattr(rank_writer, "store_over", lambda files, umask: CopyingStore(files, umask=umask))
    leave_complete(tmp_path)
    assert resume(tmp_path, 1, ShardHistory())[1]
    (tmp_path / "step-1" / index_name(save_id(1), 0)).unlink()
    if not reuse:
        assert not resume(tmp_path, 1)[1]
        return
    before = sorted(os.listdir(tmp_path / "step-1"))
    with pytest.raises(SaveFailedError, match="save again") as caught:
        resume(tmp_path, 1, ShardHistory())
    assert caught.value.code == COPY_UNKNOWN
    assert sorted(os.listdir(tmp_path / "step-1")) == before


# ---- what readers make of it ----------------------------------------------------------------------------------------


def test_readers_that_do_not_know_origins_must_refuse_the_index(tmp_path: Path) -> None:
    history = ShardHistory()
    for number in range(2):
        save(tmp_path, number, history)
    raw = msgpack.unpackb((tmp_path / "step-1" / index_name(save_id(1), 0)).read_bytes())
    assert raw["must"] == ["origins"]


def test_a_linked_shard_with_another_save_id_than_its_origin_is_refused(tmp_path: Path) -> None:
    history = ShardHistory()
    for number in range(2):
        save(tmp_path, number, history)
    path = base_file(tmp_path, 1)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    assert data[46:74] == str(save_id(0)).encode()
    data[46:74] = str(save_id(1)).encode()
    os.unlink(path)
    Path(path).write_bytes(data)
    faults = verify_checkpoint(str(tmp_path / "step-1"), Files(), fast=True).faults
    assert [type(fault) for fault in faults] == [CorruptCheckpointError]
    assert f"expected {save_id(0)}" in str(faults[0])


# ---- the history ----------------------------------------------------------------------------------------------------


def shard(number: int, n_blocks: int = 1) -> WrittenShard:
    digests, prints = bytes(8 * n_blocks), bytes(16 * n_blocks)
    return WrittenShard(f"/{number}", n_blocks, save_id(0), True, "", digests, prints)


def test_a_history_has_the_last_two_saves_of_a_rank_the_newest_first() -> None:
    history = ShardHistory()
    for number in range(3):
        history.add(f"/a/{number}", 0, [shard(number)])
    assert [one.path for one in history.shards("/a/9", 0)] == ["/2", "/1"]
    assert history.shards("/a/9", 1) == history.shards("/b/9", 0) == []


def test_a_history_counts_what_a_shard_takes_besides_its_digests() -> None:
    history = ShardHistory(max_nbytes=MAX_HISTORY_NBYTES)
    for rank in range(300):
        history.add("/a/1", rank, [shard(number) for number in range(1000)])
    kept = sum(len(history.shards("/a/2", rank)) for rank in range(300))
    assert 50_000 < kept <= MAX_HISTORY_NBYTES / 600


def test_what_a_history_holds_is_counted_right_whatever_is_added_and_forgotten() -> None:
    rng, history = random.Random(0), ShardHistory(max_nbytes=20_000)
    for _ in range(2000):
        rank = rng.randrange(6)
        if rng.random() < 0.1:
            history.forget("/a/1", rank)
        else:
            history.add("/a/1", rank, [shard(n, rng.randrange(1, 60)) for n in range(rng.randrange(4))])
        held = [one for other in range(6) for one in history.shards("/a/1", other)]
        assert history.nbytes == sum(one.history_nbytes for one in held) <= 20_000


def test_a_history_has_bounded_memory_and_keeps_the_last_save_of_each_rank_longest() -> None:
    history = ShardHistory(max_nbytes=(600 + 24 * 25) * 4)

    def add(rank: int, n_blocks: int = 25) -> list[int]:
        history.add("/a/1", rank, [shard(rank, n_blocks)])
        return [len(history.shards("/a/2", rank)) for rank in range(6)]

    assert [add(rank) for rank in (0, 1, 0, 2)][-1] == [2, 1, 1, 0, 0, 0]
    assert add(3) == [1, 1, 1, 1, 0, 0], "the save before the last of rank 0 goes first"
    assert add(4) == [1, 0, 1, 1, 1, 0], "then the rank that has not saved for longest"
    assert add(5, 200) == [0] * 6
