"""storage.rank_writer and shard_writer: what is written, by whom, and what a failing call does."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, failing, shard_paths

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.format.checksums import BLOCK_NBYTES, block_digest, file_checksum
from asyncckpt.format.index import decode_index
from asyncckpt.protocol.request import PartRange
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_writer import RankWriter
from asyncckpt.storage.shard_writer import FileShardWriter

MIB = 1 << 20


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("length", [1, 4095, 4096, BLOCK_NBYTES - 1, 3 * MIB, 5 * MIB + 17])
def test_a_shard_file_is_its_part_of_the_image_byte_for_byte(tmp_path: Path, length: int) -> None:
    with Snapshot({"a": length, "b": 3}) as snapshot:
        snapshot.write(str(tmp_path))
        offset, nbytes = snapshot.parts[0]
        with open(shard_paths(str(tmp_path))[0], "rb") as shard:
            assert shard.read() == bytes(snapshot.image[offset : offset + nbytes])


def test_a_shard_file_begins_with_a_safetensors_header(tmp_path: Path) -> None:
    with Snapshot({"a": 5000}) as snapshot:
        snapshot.write(str(tmp_path))
    with open(shard_paths(str(tmp_path))[0], "rb") as shard:
        header = json.loads(shard.read(int.from_bytes(shard.read(8), "little")))
    assert header["a"] == {"dtype": "U8", "shape": [5000], "data_offsets": [0, 5000]}
    assert header["__metadata__"]["asyncckpt_save_id"] == str(SAVE_ID)


@pytest.mark.parametrize(
    ("mirror", "block_nbytes"), [("", 256 << 10), ("/mirror", 256 << 10), ("s3://bucket/x", 32 << 10)]
)
def test_the_index_holds_the_digest_of_every_block(tmp_path: Path, mirror: str, block_nbytes: int) -> None:
    with Snapshot({"a": 3 * MIB + 5}) as snapshot:
        record = snapshot.write(str(tmp_path), mirror=mirror).record
    data = (tmp_path / record.index_name).read_bytes()
    assert (len(data), file_checksum(data)) == (record.index_nbytes, record.index_checksum)
    index = decode_index(data)
    shard, content = index.shards[0], (tmp_path / index.shards[0].name).read_bytes()
    blocks = [content[i : i + block_nbytes] for i in range(0, len(content), block_nbytes)]
    assert index.block_nbytes == block_nbytes and shard.digests == b"".join(map(block_digest, blocks))


def test_the_record_counts_all_bytes_and_files(tmp_path: Path) -> None:
    with Snapshot({f"t{i}": 100_000 for i in range(7)}, n_parts=3) as snapshot:
        record = snapshot.write(str(tmp_path)).record
    assert record.n_files == len(names_in(tmp_path)) == 5
    assert record.nbytes == sum((tmp_path / n).stat().st_size for n in names_in(tmp_path))


def test_a_rank_without_tensors_writes_objects_and_index_only(tmp_path: Path) -> None:
    with Snapshot({}) as snapshot:
        result = snapshot.write(str(tmp_path))
    assert result.record.n_files == len(names_in(tmp_path)) == 2


def test_two_threads_write_one_file(tmp_path: Path) -> None:
    """Each of the first two writes waits until the other has begun too."""
    together = threading.Barrier(2, timeout=60)
    writers: set[int] = set()

    class Meeting(Files):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if len(buffer) >= MIB and len(writers) < 2:
                writers.add(threading.get_ident())
                together.wait()
            return super().pwrite(fd, buffer, offset)

    with Snapshot({"a": 8 * MIB}) as snapshot:
        snapshot.write(str(tmp_path), Meeting(), threads=2)
    assert len(writers) == 2


def test_an_error_in_a_pool_thread_alone_fails_the_rank_and_leaves_nothing(tmp_path: Path) -> None:
    caller = threading.get_ident()
    pool_failed = threading.Event()

    class OthersFail(Files):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if threading.get_ident() == caller:
                pool_failed.wait(60)
                return super().pwrite(fd, buffer, offset)
            pool_failed.set()
            raise OSError(errno.EIO, "injected")

    with Snapshot({"a": 8 * MIB}) as snapshot, pytest.raises(OSError, match="injected") as caught:
        snapshot.write(str(tmp_path), OthersFail(), threads=2)
    assert caught.value.errno == errno.EIO
    assert names_in(tmp_path) == []


def test_a_busy_pool_only_slows_the_writing_down(tmp_path: Path) -> None:
    blocked = threading.Event()
    with Snapshot({"a": 8 * MIB}) as snapshot, ThreadPoolExecutor(1) as pool:
        pool.submit(blocked.wait, 20)
        snapshot.writer(str(tmp_path)).write(pool)
        blocked.set()
    assert len(names_in(tmp_path)) == 3


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Short(Files):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            return super().pwrite(fd, buffer[: max(1, len(buffer) // 3)], offset)

    with Snapshot({"a": 2 * MIB + 9}) as snapshot:
        snapshot.write(str(tmp_path), Short())
        offset, nbytes = snapshot.parts[0]
        assert Path(shard_paths(str(tmp_path))[0]).read_bytes() == bytes(snapshot.image[offset : offset + nbytes])


@pytest.mark.parametrize("suffix", [".safetensors", ".index"])
def test_a_write_that_takes_nothing_is_an_error_not_a_hang(tmp_path: Path, suffix: str) -> None:
    class Full(RecordingFiles):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            return 0 if self.paths[fd].endswith(suffix) else super().pwrite(fd, buffer, offset)

    with Snapshot({"a": 100}) as snapshot, pytest.raises(OSError, match="took none"):
        snapshot.write(str(tmp_path), Full())
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("method", ["set_direct", "pwrite"])
def test_a_refused_o_direct_turns_the_same_file_to_buffered_writes(tmp_path: Path, method: str) -> None:
    files = failing(method, errno.EINVAL)
    with Snapshot({"a": 3 * MIB + 1}) as snapshot:
        result = snapshot.write(str(tmp_path), files)
        offset, nbytes = snapshot.parts[0]
        assert Path(shard_paths(str(tmp_path))[0]).read_bytes() == bytes(snapshot.image[offset : offset + nbytes])
    assert not result.direct
    assert len([call for call in files.calls if call[0] == "open" and str(call[1]).endswith("safetensors")]) == 1


def test_memory_that_is_not_page_aligned_is_written_buffered(tmp_path: Path) -> None:
    files = RecordingFiles()
    with Snapshot({"a": MIB}) as snapshot, ThreadPoolExecutor(1) as pool:
        offset, nbytes = snapshot.parts[0]
        image = memoryview(bytearray(b"x" + snapshot.image[offset : offset + nbytes]))[1:]
        request = snapshot.request(str(tmp_path), parts=(PartRange(0, nbytes),))
        result = RankWriter(request, image, files).write(pool)
        assert Path(shard_paths(str(tmp_path))[0]).read_bytes() == bytes(image)
    assert not result.direct
    assert "set_direct" not in files.names()


def test_read_only_memory_is_written_too(tmp_path: Path) -> None:
    with Snapshot({"a": MIB}) as snapshot, ThreadPoolExecutor(1) as pool:
        image = memoryview(bytes(snapshot.image))
        RankWriter(snapshot.request(str(tmp_path)), image, Files()).write(pool)
    assert len(names_in(tmp_path)) == 3


def test_every_file_is_fsynced_through_the_descriptor_that_wrote_it_and_the_directory_last(tmp_path: Path) -> None:
    files = RecordingFiles()
    with Snapshot({"a": 3 * MIB, "b": 3 * MIB}, n_parts=2) as snapshot:
        snapshot.write(str(tmp_path), files)
    for name in names_in(tmp_path):
        calls = [method for method, where in files.calls if where == str(tmp_path / name) and method != "lstat"]
        assert calls.count("open") == 1, name
        assert calls[-2:] == ["fsync", "close"], name
        assert "pwrite" not in calls[calls.index("fsync") :], name
    assert [call for call in files.calls if call[0] == "fsync"][-1] == ("fsync", str(tmp_path))
    assert files.names().count("fsync") == 5


def test_without_fsync_nothing_is_flushed(tmp_path: Path) -> None:
    files = RecordingFiles()
    with Snapshot({"a": 3 * MIB}) as snapshot:
        snapshot.write(str(tmp_path), files, fsync=False)
    assert "fsync" not in files.names()


@pytest.mark.parametrize("method", ["open", "fallocate", "pwrite", "ftruncate", "fsync", "close"])
@pytest.mark.parametrize("file", [".safetensors", ".objects.json", ".index"])
def test_a_failing_call_on_any_file_fails_the_rank_and_leaves_nothing(tmp_path: Path, method: str, file: str) -> None:
    class Failing(RecordingFiles):
        def before(self, name: str, args: object) -> None:
            if name == method and str(self.calls[-1][1]).endswith(file):
                raise OSError(errno.EIO, "injected")

    if file != ".safetensors" and method in ("fallocate", "ftruncate"):
        pytest.skip("small files are neither reserved nor cut")
    with Snapshot({"a": 3 * MIB}) as snapshot, pytest.raises(OSError, match="injected"):
        snapshot.write(str(tmp_path), Failing(), threads=1)
    assert names_in(tmp_path) == []


def test_an_error_names_the_file_and_the_byte_range(tmp_path: Path) -> None:
    with Snapshot({"a": 3 * MIB}) as snapshot, pytest.raises(OSError, match="writing bytes 0 to 3149824") as caught:
        snapshot.write(str(tmp_path), failing("pwrite", errno.EIO), threads=1)
    assert str(caught.value.filename).endswith(".safetensors")


def test_a_full_disk_shows_before_anything_is_written(tmp_path: Path) -> None:
    files = failing("fallocate", errno.ENOSPC)
    with Snapshot({"a": 3 * MIB}) as snapshot, pytest.raises(OSError, match="reserving") as caught:
        snapshot.write(str(tmp_path), files)
    assert caught.value.errno == errno.ENOSPC
    assert "pwrite" not in files.names()


def test_a_file_system_without_fallocate_is_written_all_the_same(tmp_path: Path) -> None:
    with Snapshot({"a": 3 * MIB}) as snapshot:
        snapshot.write(str(tmp_path), failing("fallocate", errno.EOPNOTSUPP))
    assert len(names_in(tmp_path)) == 3


@pytest.mark.parametrize("calls_that_pass", [0, 1, 2, 3, 6])
def test_a_check_that_raises_ends_the_writing_and_leaves_nothing(tmp_path: Path, calls_that_pass: int) -> None:
    class GoneError(Exception):
        pass

    left = [calls_that_pass]

    def check() -> None:
        if not left[0]:
            raise GoneError
        left[0] -= 1

    with Snapshot({f"t{i}": MIB for i in range(3)}, n_parts=3) as snapshot, pytest.raises(GoneError):
        snapshot.write(str(tmp_path), check=check, threads=1)
    assert names_in(tmp_path) == []


def test_an_image_without_the_save_id_is_refused(tmp_path: Path) -> None:
    with Snapshot({"a": 100}) as snapshot, pytest.raises(OSError, match="does not have save id"):
        snapshot.write(str(tmp_path), save_id=OTHER_ID)
    assert names_in(tmp_path) == []


def test_a_part_that_reaches_beyond_the_image_is_refused(tmp_path: Path) -> None:
    with Snapshot({"a": 100}) as snapshot, pytest.raises(OSError):
        snapshot.write(str(tmp_path), parts=(PartRange(4096, 1 << 30),))
    assert names_in(tmp_path) == []


def test_files_that_are_there_already_are_refused_and_kept(tmp_path: Path) -> None:
    with Snapshot({"a": 100}) as snapshot:
        snapshot.write(str(tmp_path))
        before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
        with pytest.raises(FileExistsError):
            snapshot.write(str(tmp_path))
        os.unlink(shard_paths(str(tmp_path))[0])
        with pytest.raises(FileExistsError):
            snapshot.write(str(tmp_path))
    kept = {name: data for name, data in before.items() if not name.endswith(".safetensors")}
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == kept


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    target = tmp_path / "checkpoint"
    target.mkdir()
    with Snapshot({"a": 100}) as snapshot:
        os.symlink(victim, target / f"rank-00000-part-000.{SAVE_ID}.safetensors")
        with pytest.raises(OSError):
            snapshot.write(str(target))
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(("umask", "process_umask"), [(0o022, 0o077), (0o002, 0o022), (0o077, 0o000)])
def test_modes_follow_the_jobs_umask_not_the_process(tmp_path: Path, umask: int, process_umask: int) -> None:
    before = os.umask(process_umask)
    try:
        with Snapshot({"a": 100}) as snapshot:
            snapshot.write(str(tmp_path), umask=umask)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / n).stat().st_mode) for n in names_in(tmp_path)} == {0o666 & ~umask}


def test_a_rank_whose_files_the_winner_of_a_race_removed_says_so(tmp_path: Path) -> None:
    class Overtaken(RecordingFiles):
        done = False

        def before(self, name: str, args: object) -> None:
            if name == "pwrite" and not self.done:
                self.done = True
                with Snapshot({"a": 5000}, save_id=OTHER_ID) as winner:
                    winner.save(str(tmp_path), fsync=False)
                raise FileNotFoundError(errno.ENOENT, "gone", str(tmp_path))

    with Snapshot({"a": 5000}) as snapshot, pytest.raises(CheckpointExistsError):
        snapshot.write(str(tmp_path), Overtaken())
    assert not [name for name in names_in(tmp_path) if str(SAVE_ID) in name]


def test_every_thread_is_told_why_a_file_could_not_be_begun(tmp_path: Path) -> None:
    image = memoryview(bytearray(4096))
    writer = FileShardWriter(
        str(tmp_path / "x"),
        image,
        0,
        4096,
        block_nbytes=BLOCK_NBYTES,
        aligned=False,
        mode=0o600,
        fsync=False,
        files=failing("fallocate", errno.ENOSPC),
    )
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as caught:
            writer.write_extent(0, 4096)
        assert caught.value.errno == errno.ENOSPC
    writer.abandon()
