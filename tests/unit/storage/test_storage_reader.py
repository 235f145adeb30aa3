"""storage.reader and read_plan: what is read, and what is refused."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, RecordingFiles, Snapshot, failing, flip_byte, shard_paths

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import SAVE_ID_NBYTES
from asyncckpt.storage import read_plan, reader
from asyncckpt.storage.contents import Contents, read_contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import EXTENT_NBYTES, ShardRequest, Wanted, plan_extents
from asyncckpt.storage.reader import ShardFile, read_shards

MIB = 1 << 20
LENGTHS = {f"t{i:02d}": 150_000 + 1000 * i for i in range(30)}


class Gathered:
    """A sink that keeps what it is given."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.pieces = 0
        self.lock = threading.Lock()

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        piece = ctypes.string_at(address, nbytes)
        with self.lock:
            self.data[position : position + nbytes] = piece
            self.pieces += 1


class Rows(Gathered):
    """A sink that takes whole rows of `every` bytes, or steps of 40,000 where a row is longer."""

    def __init__(self, nbytes: int, every: int) -> None:
        super().__init__(nbytes)
        self.unit = every if every <= 40_000 else 40_000

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        assert position % self.unit == 0
        assert nbytes % self.unit == 0 or position + nbytes == len(self.data)
        super().deliver(position, address, nbytes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """A checkpoint of three shards, and its tensors' bytes."""
    path = str(tmp_path_factory.mktemp("reader") / "c")
    with Snapshot(LENGTHS, n_parts=3) as snapshot:
        snapshot.save(path, fsync=False)
        return path, snapshot.values


@pytest.fixture
def own(saved: tuple[str, dict[str, bytes]], tmp_path: Path) -> str:
    """A copy of that checkpoint, to be damaged."""
    shutil.copytree(saved[0], tmp_path / "c")
    return str(tmp_path / "c")


def requests_for(contents: Contents, fqns: Sequence[str]) -> tuple[list[ShardRequest], dict[str, Gathered]]:
    sinks = {fqn: Gathered(contents.tensors[fqn].global_shape[0]) for fqn in fqns}
    index = contents.ranks[0].index
    requests = []
    for part, shard in enumerate(index.shards):
        wanted = [
            Wanted(chunk.offset_bytes, chunk.nbytes, fqn, sinks[fqn])
            for fqn in fqns
            for _, chunk in contents.tensors[fqn].chunks
            if chunk.part == part
        ]
        requests.append(ShardRequest(shard=shard, block_nbytes=index.block_nbytes, wanted=wanted))
    return requests, sinks


def read(path: str, fqns: Sequence[str] = tuple(LENGTHS), files: Files | None = None, **kw: Any) -> dict[str, bytes]:
    contents = read_contents(path, Files())
    requests, sinks = requests_for(contents, fqns)
    read_shards(path, SAVE_ID, requests, files=files or Files(), **kw)
    return {fqn: bytes(sink.data) for fqn, sink in sinks.items()}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_bytes_come_back(saved: tuple[str, dict[str, bytes]], verify: bool, threads: int) -> None:
    assert read(saved[0], verify=verify, threads=threads) == saved[1]


@pytest.mark.parametrize("fqns", [["t00"], ["t29"], ["t03", "t04", "t20"]])
def test_some_tensors_come_back_alone(saved: tuple[str, dict[str, bytes]], fqns: list[str]) -> None:
    assert read(saved[0], fqns) == {fqn: saved[1][fqn] for fqn in fqns}


def test_cached_files_are_read_from_the_page_cache(own: str, saved: tuple[str, dict[str, bytes]]) -> None:
    files = RecordingFiles()
    for shard in shard_paths(own):  # the copy was written through the page cache; make sure
        Path(shard).read_bytes()
    assert read(own, files=files) == saved[1]
    flags = [c for c in files.calls if c[0] == "open"]
    assert len(flags) == 6  # once to check, once to read; a third time would be for O_DIRECT


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_page_cache_that_lost_the_bytes_meanwhile_is_passed_by(
    own: str, saved: tuple[str, dict[str, bytes]], code: int
) -> None:
    class NeverCached(Files):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if flags & os.RWF_NOWAIT:
                raise OSError(code, "not now")
            return super().preadv(fd, buffers, offset, flags)

    assert read(own, files=NeverCached()) == saved[1]


def test_a_partial_answer_of_the_page_cache_is_not_taken_for_the_whole(
    own: str, saved: tuple[str, dict[str, bytes]]
) -> None:
    class HalfCached(Files):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if flags & os.RWF_NOWAIT:
                buffers = [buffers[0][: len(buffers[0]) // 2]]
            return super().preadv(fd, buffers, offset, flags)

    assert read(own, files=HalfCached()) == saved[1]


class Uncached(RecordingFiles):
    """The page cache holds nothing."""

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        return False


def test_short_reads_are_continued(saved: tuple[str, dict[str, bytes]]) -> None:
    class Short(Uncached):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            room = len(buffers[0])
            return Files.preadv(self, fd, [memoryview(buffers[0])[: max(28, room // 3 // 512 * 512)]], offset, flags)

    assert read(saved[0], files=Short()) == saved[1]


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_without_o_direct_files_are_read_all_the_same(saved: tuple[str, dict[str, bytes]], refused: str) -> None:
    class NoDirect(Uncached):
        def open(self, path: str, flags: int, mode: int = 0o666) -> int:
            if refused == "open" and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return Files.open(self, path, flags, mode)

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if refused == "preadv" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return Files.preadv(self, fd, buffers, offset, flags)

    assert read(saved[0], files=NoDirect()) == saved[1]


def test_only_the_blocks_that_are_needed_are_read(saved: tuple[str, dict[str, bytes]]) -> None:
    chunk = read_contents(saved[0], Files()).tensors["t07"].chunks[0][1]
    first = chunk.offset_bytes // BLOCK_NBYTES
    last = (chunk.offset_bytes + chunk.nbytes - 1) // BLOCK_NBYTES
    files = Uncached()
    read(saved[0], ["t07"], files)
    data_reads = [(at, n) for at, n in files.read_ranges if n != 28]
    assert sum(n for _, n in data_reads) <= (last - first + 1) * BLOCK_NBYTES
    assert min(at for at, _ in data_reads) == first * BLOCK_NBYTES


def test_of_small_blocks_short_gaps_are_read_too_and_damage_in_them_is_none(tmp_path: Path) -> None:
    path, lengths = str(tmp_path / "c"), {"a": 70_000, "b": 200_000, "c": 70_000, "d": 400_000, "e": 70_000}
    with Snapshot(lengths) as snapshot:
        snapshot.save(path, fsync=False, mirror="s3://bucket/c")
        wanted = {fqn: snapshot.values[fqn] for fqn in ("a", "c", "e")}
    for fqn in ("b", "d"):
        flip_byte(shard_paths(path)[0], snapshot.chunks[fqn].offset_bytes + lengths[fqn] // 2)
    files = Uncached()
    assert read(path, list(wanted), files, threads=1) == wanted
    spans = [(at, at + nbytes) for at, nbytes in sorted(files.read_ranges) if nbytes != SAVE_ID_NBYTES]
    places = [(snapshot.chunks[fqn].offset_bytes, lengths[fqn]) for fqn in ("a", "c", "e")]
    first, last = (places[0][0], sum(places[1])), (places[2][0], sum(places[2]))
    for (low, high), (start, end) in zip(spans, (first, last), strict=True):
        assert start - (32 << 10) < low <= start and end <= high < end + (32 << 10)


def test_without_verification_only_the_pages_that_are_needed_are_read(saved: tuple[str, dict[str, bytes]]) -> None:
    chunk = read_contents(saved[0], Files()).tensors["t07"].chunks[0][1]
    files = Uncached()
    read(saved[0], ["t07"], files, verify=False)
    assert sum(n for _, n in files.read_ranges if n != 28) <= chunk.nbytes + 2 * 4096


def test_shards_that_nobody_wants_are_not_opened(saved: tuple[str, dict[str, bytes]]) -> None:
    contents = read_contents(saved[0], Files())
    files = RecordingFiles()
    read(saved[0], ["t07"], files)
    part = contents.tensors["t07"].chunks[0][1].part
    opened = {os.path.basename(where) for name, where in files.calls if name == "open"}
    assert opened == {contents.ranks[0].index.shards[part].name}


def test_several_threads_read_one_file(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=60)
    readers: set[int] = set()

    class Meeting(Uncached):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if len(buffers[0]) >= BLOCK_NBYTES and len(readers) < 2 and threading.get_ident() not in readers:
                readers.add(threading.get_ident())
                together.wait()
            return Files.preadv(self, fd, buffers, offset, flags)

    with Snapshot({"a": 8 * MIB}) as snapshot:
        snapshot.save(str(tmp_path / "c"), fsync=False)
        assert read(str(tmp_path / "c"), ["a"], Meeting(), threads=2) == snapshot.values
    assert len(readers) == 2


@pytest.mark.parametrize("cached", [True, False])
def test_a_flipped_byte_is_named_with_file_tensor_and_range(own: str, cached: bool) -> None:
    contents = read_contents(own, Files())
    chunk = contents.tensors["t11"].chunks[0][1]
    name = contents.ranks[0].index.shards[chunk.part].name
    flip_byte(os.path.join(own, name), chunk.offset_bytes + 5000)
    with pytest.raises(CorruptCheckpointError, match="t11") as caught:
        read(own, ["t11"], Files() if cached else Uncached())
    error = caught.value
    assert (error.file, error.fqn) == (name, "t11")
    assert error.offset is not None and error.nbytes is not None
    assert error.offset <= chunk.offset_bytes + 5000 < error.offset + error.nbytes
    read(own, [fqn for fqn, t in contents.tensors.items() if t.chunks[0][1].part != chunk.part])


def test_every_damaged_block_can_be_reported(own: str) -> None:
    contents = read_contents(own, Files())
    shard = shard_paths(own)[0]
    for block in (1, 3, 4):
        flip_byte(shard, block * BLOCK_NBYTES + 7)
    found: list[CorruptCheckpointError] = []
    requests, _ = requests_for(contents, list(LENGTHS))
    read_shards(own, SAVE_ID, requests, files=Files(), on_corrupt=found.append)
    assert sorted(error.offset or 0 for error in found) == [block * BLOCK_NBYTES for block in (1, 3, 4)]


@pytest.mark.parametrize("damage", ["cut", "extended", "missing", "link", "swapped", "directory"])
def test_a_file_that_is_not_the_right_one_is_refused_before_anything_is_handed_on(
    own: str, tmp_path: Path, damage: str
) -> None:
    contents = read_contents(own, Files())
    shard = shard_paths(own)[-1]
    if damage == "cut":
        os.truncate(shard, os.path.getsize(shard) - 1)
    elif damage == "extended":
        os.truncate(shard, os.path.getsize(shard) + 4096)
    elif damage == "swapped":
        with Snapshot(LENGTHS, n_parts=3, save_id=OTHER_ID, seed=1) as snapshot:
            snapshot.save(str(tmp_path / "other"), fsync=False)
        other = shard_paths(str(tmp_path / "other"))[-1]
        assert os.path.getsize(other) == os.path.getsize(shard)
        shutil.copy(other, shard)
    else:
        os.rename(shard, tmp_path / "away")
        if damage == "link":
            os.symlink(tmp_path / "away", shard)
        elif damage == "directory":
            os.mkdir(shard)
    requests, sinks = requests_for(contents, list(LENGTHS))
    for verify in (True, False):
        with pytest.raises(CorruptCheckpointError) as caught:
            read_shards(own, SAVE_ID, requests, files=Files(), verify=verify)
        assert caught.value.file == os.path.basename(shard)
    assert sum(sink.pieces for sink in sinks.values()) == 0


def test_a_file_that_is_cut_while_it_is_read_is_an_error(own: str) -> None:
    class CutMeanwhile(Uncached):
        def before(self, name: str, args: object) -> None:
            if name == "preadv" and self.names().count("preadv") == 5:
                for shard in shard_paths(own):
                    os.truncate(shard, 8192)

    with pytest.raises(CorruptCheckpointError):
        read(own, files=CutMeanwhile(), threads=1)


def test_a_file_that_is_replaced_while_it_is_open_is_an_error_and_stays_open_nowhere(own: str) -> None:
    class Buffered(Files):  # whatever the file system says to O_DIRECT
        opened = 0

        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            self.opened += 1
            return super().open(path, flags & ~os.O_DIRECT, mode)

        def close(self, fd: int) -> None:
            self.opened -= 1
            super().close(fd)

    files, index = Buffered(), read_contents(own, Files()).ranks[0].index
    shard = index.shards[0]
    with contextlib.closing(ShardFile(own, shard, index.save_id, files)) as file:
        before = Path(own, shard.name).read_bytes()
        Path(own, "new").write_bytes(bytes(len(before)))
        os.replace(Path(own, "new"), Path(own, shard.name))
        found = bytearray(4096)
        with pytest.raises(CorruptCheckpointError, match="replaced while it was read"):
            file.read(memoryview(found), 0, 4096)
        assert files.opened == 1
        file.read(memoryview(found), 0, 4096)  # another thread that has not heard of it
        assert bytes(found) == before[:4096]


def test_a_read_error_names_file_tensor_and_range(saved: tuple[str, dict[str, bytes]]) -> None:
    class Failing(Uncached):
        def before(self, name: str, args: Sequence[Any]) -> None:
            if name == "preadv" and len(args[1][0]) > 28:
                raise OSError(errno.EIO, "injected")

    with pytest.raises(OSError, match=r"t13.*reading bytes \d+ to \d+: injected") as caught:
        read(saved[0], ["t13"], Failing())
    assert (caught.value.errno, str(caught.value.filename)[-11:]) == (errno.EIO, "safetensors")


@pytest.mark.parametrize("method", ["open", "fstat", "preadv", "resident"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 8])
def test_a_failing_call_while_reading_raises_or_does_no_harm(
    saved: tuple[str, dict[str, bytes]], method: str, nth: int
) -> None:
    try:
        assert read(saved[0], files=failing(method, errno.EIO, nth=nth), threads=2) == saved[1]
    except OSError as error:
        assert error.errno == errno.EIO


def test_an_error_of_a_sink_is_raised_when_all_threads_have_stopped(saved: tuple[str, dict[str, bytes]]) -> None:
    class Refusing:
        def deliver(self, position: int, address: int, nbytes: int) -> None:
            raise ZeroDivisionError

    contents = read_contents(saved[0], Files())
    requests, _ = requests_for(contents, ["t05"])
    requests = [
        ShardRequest(shard=r.shard, block_nbytes=r.block_nbytes, wanted=[w._replace(sink=Refusing()) for w in r.wanted])
        for r in requests
    ]
    with pytest.raises(ZeroDivisionError):
        read_shards(saved[0], SAVE_ID, requests, files=Files())


@pytest.mark.parametrize("threads", [1, 2])
def test_only_a_file_that_cannot_be_opened_is_read_again_where_no_descriptor_is_left(
    saved: tuple[str, dict[str, bytes]], threads: int
) -> None:
    class Full:
        def deliver(self, position: int, address: int, nbytes: int) -> None:
            positions.append(position)
            if len(positions) == 1:
                raise OSError(errno.EMFILE, "injected")

    positions, sink = list[int](), Full()
    contents = read_contents(saved[0], Files())
    requests, _ = requests_for(contents, ["t05"])
    requests = [dataclasses.replace(r, wanted=[w._replace(sink=sink) for w in r.wanted]) for r in requests if r.wanted]
    with pytest.raises(OSError, match="injected"):
        read_shards(saved[0], SAVE_ID, requests, files=Files(), threads=threads)
    assert len(set(positions)) == len(positions), "nothing is delivered twice"
    assert read(saved[0], files=failing("open", errno.EMFILE, nth=5), threads=threads) == saved[1]


def test_one_range_may_be_wanted_several_times(saved: tuple[str, dict[str, bytes]]) -> None:
    contents = read_contents(saved[0], Files())
    chunk = contents.tensors["t02"].chunks[0][1]
    index = contents.ranks[0].index
    sinks = [Gathered(chunk.nbytes), Gathered(chunk.nbytes), Gathered(1000)]
    wanted = [
        Wanted(chunk.offset_bytes, chunk.nbytes, "t02", sinks[0]),
        Wanted(chunk.offset_bytes, chunk.nbytes, "t02", sinks[1]),
        Wanted(chunk.offset_bytes + 777, 1000, "t02", sinks[2]),
    ]
    request = ShardRequest(shard=index.shards[chunk.part], block_nbytes=index.block_nbytes, wanted=wanted)
    read_shards(saved[0], SAVE_ID, [request], files=Files())
    value = saved[1]["t02"]
    assert [bytes(s.data) for s in sinks] == [value, value, value[777:1777]]


def test_random_plans_hold_every_wanted_byte_once_and_no_unit_that_nobody_wants(rng: random.Random) -> None:
    for _ in range(300):
        unit = rng.choice([4096, 256 * 1024, 1536 * 1024])
        nbytes = rng.randrange(1, 60 * MIB)
        wanted = []
        for _ in range(rng.randrange(1, 40)):
            offset = rng.randrange(nbytes)
            length = min(rng.choice([0, 1, 5000, 3 * MIB, 40 * MIB]), nbytes - offset)
            wanted.append(Wanted(offset, length, "x", None))
        shard = ShardRecord(name="x", nbytes=nbytes, digests=b"")
        request = ShardRequest(shard=shard, block_nbytes=unit, wanted=wanted)
        extents = plan_extents(request, rng.choice([1, 4]), unit=unit)
        steps = [step for extent in extents for step in extent]
        assert all(a.end <= b.start for a, b in itertools.pairwise(steps))
        assert all(s.start % unit == 0 and (s.end % unit == 0 or s.end == nbytes) for s in steps)
        for extent in extents:
            assert all(a.end == b.start for a, b in itertools.pairwise(extent))
            assert extent[-1].end - extent[0].start <= max(EXTENT_NBYTES, unit)
        for w in wanted:
            taken = [s for s in steps if w in s.wanted]
            assert sum(min(s.end, w.offset + w.nbytes) - max(s.start, w.offset) for s in taken) == w.nbytes
        units = {u for w in wanted if w.nbytes for u in range(w.offset // unit, -(-(w.offset + w.nbytes) // unit))}
        assert sum(s.end - s.start for s in steps) <= len(units) * unit


@pytest.mark.parametrize("unit", [4096, 256 * 1024])
def test_one_reader_with_a_buffer_reads_what_fits_into_it_at_once(unit: int) -> None:
    nbytes = 5 * MIB
    shard = ShardRecord(name="x", nbytes=64 * MIB, digests=b"")
    request = ShardRequest(shard=shard, block_nbytes=unit, wanted=[Wanted(3 * MIB + 77, nbytes, "x", None)])
    assert len(plan_extents(request, 1, unit=unit, extent_nbytes=nbytes + 2 * unit)) == 1
    assert len(plan_extents(request, 4, unit=unit, extent_nbytes=nbytes + 2 * unit)) > 1


# ---- short ranges at equal distances --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "times", "every"), [(1000, 100, 1300), (1, 149_000, 1), (7, 3, 50_000), (9000, 2, 9000)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_ranges_at_equal_distances_come_back_one_behind_the_other(
    saved: tuple[str, dict[str, bytes]], nbytes: int, times: int, every: int, threads: int
) -> None:
    contents = read_contents(saved[0], Files())
    ((_, chunk),) = contents.tensors["t00"].chunks
    sink = Gathered(nbytes * times)
    memory = ctypes.create_string_buffer(nbytes * times)
    index = contents.ranks[0].index
    wanted = [
        Wanted(chunk.offset_bytes + 5, nbytes, "t00", where, times, every) for where in (sink, ctypes.addressof(memory))
    ]
    request = ShardRequest(shard=index.shards[chunk.part], block_nbytes=index.block_nbytes, wanted=wanted)
    files = RecordingFiles()
    read_shards(saved[0], SAVE_ID, [request], files=files, threads=threads, verify=False)
    value = saved[1]["t00"][5:]
    expected = b"".join(value[n * every : n * every + nbytes] for n in range(times))
    assert bytes(sink.data) == memory.raw == expected
    assert sum(n for at, n in files.read_ranges if at >= 4096) == 2 * len(expected)


@pytest.mark.parametrize("cut", [1, 3000, 5000])
def test_ranges_of_a_file_that_was_cut_short_are_not_taken_for_zeros(own: str, cut: int) -> None:
    contents = read_contents(own, Files())
    ((_, chunk),) = contents.tensors["t29"].chunks
    index = contents.ranks[0].index
    shard = index.shards[chunk.part]

    class Cutting(Files):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if offset == first + 1000:
                os.truncate(os.path.join(own, shard.name), shard.nbytes - cut)
            return super().preadv(fd, buffers, offset, flags)

    first = shard.nbytes - 4 * 1000 - 100
    request = ShardRequest(
        shard=shard, block_nbytes=index.block_nbytes, wanted=[Wanted(first, 100, "t29", Gathered(500), 5, 1000)]
    )
    with pytest.raises(CorruptCheckpointError, match="ends early"):
        read_shards(own, SAVE_ID, [request], files=Cutting(), verify=False)


@pytest.mark.parametrize("threads", [1, 2, 4, 6])
def test_as_many_threads_as_were_asked_for_read_from_the_disk_at_once_and_no_more(tmp_path: Path, threads: int) -> None:
    class Slow(Uncached):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.most = self.begun = 0
            self.meeting = threading.Barrier(threads)

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if len(buffers[0]) < MIB:
                return Files.preadv(self, fd, buffers, offset, flags)
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
                self.begun += 1
                first = self.begun <= threads
            if first:
                self.meeting.wait(60)
            with self.lock:
                self.now -= 1
            return Files.preadv(self, fd, buffers, offset, flags)

    path = str(tmp_path / "c")
    with Snapshot({f"t{n}": 2 * MIB for n in range(12)}) as snapshot:
        snapshot.save(path, fsync=False)
        files = Slow()
        fqns = tuple(snapshot.values)
        assert read(path, fqns, files, threads=threads, extent_nbytes=2 * MIB) == snapshot.values
    assert files.most == threads


@pytest.mark.parametrize("said", [False, True], ids=["cold", "cold, and not ours to know"])
@pytest.mark.parametrize(("every", "asked"), [(400, True), (2000, False)])
def test_ranges_that_lie_near_each_other_are_brought_in_together(
    every: int, asked: bool, said: bool, saved: tuple[str, dict[str, bytes]]
) -> None:
    spans = []

    class Advised(Files):
        def resident(self, fd: int, offset: int, nbytes: int) -> bool:
            return said  # the kernel says yes of every file that the process may not write

        def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
            spans.append((offset, offset + nbytes))
            raise OSError(22, "this file system takes no advice")

    contents = read_contents(saved[0], Files())
    ((_, chunk),) = contents.tensors["t00"].chunks
    index = contents.ranks[0].index
    sink = Gathered(500)
    wanted = [Wanted(chunk.offset_bytes, 100, "t00", sink, 5, every)]
    request = ShardRequest(shard=index.shards[chunk.part], block_nbytes=index.block_nbytes, wanted=wanted)
    read_shards(saved[0], SAVE_ID, [request], files=Advised(), verify=False)
    assert bytes(sink.data) == b"".join(saved[1]["t00"][n * every : n * every + 100] for n in range(5))
    assert bool(spans) == asked
    for start, end in spans:
        assert start <= chunk.offset_bytes
        assert end == chunk.offset_bytes + 4 * every + 100
        assert start % 4096 == 0


@pytest.mark.parametrize(
    ("nbytes", "every"), [(140_001, 1), (140_000, 7), (149_000, 16_384), (100_000, 140_000), (150_000, 75_000)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_range_that_is_read_through_comes_in_whole_rows_without_advice(
    saved: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, nbytes: int, every: int, threads: int
) -> None:
    monkeypatch.setattr(read_plan, "BUFFERED_STEP_NBYTES", 40_000)

    class Advised(RecordingFiles):
        advised = 0

        def advise_random(self, fd: int) -> None:
            self.advised += 1

    contents = read_contents(saved[0], Files())
    ((_, chunk),) = contents.tensors["t00"].chunks
    index = contents.ranks[0].index
    nbytes = min(nbytes, chunk.nbytes - 5)
    sink, files = Rows(nbytes, every), Advised()
    wanted = [Wanted(chunk.offset_bytes + 5, nbytes, "t00", sink, 1, every)]
    request = ShardRequest(shard=index.shards[chunk.part], block_nbytes=index.block_nbytes, wanted=wanted)
    read_shards(saved[0], SAVE_ID, [request], files=files, threads=threads, verify=False)
    assert bytes(sink.data) == saved[1]["t00"][5 : 5 + nbytes]
    assert sum(n for at, n in files.read_ranges if at >= 4096) == nbytes
    assert files.advised == 1  # where the file was looked at; the kernel's read-ahead is on where it is read


def test_a_short_read_of_a_range_is_continued_and_an_early_end_named(saved: tuple[str, dict[str, bytes]]) -> None:
    class Short(Files):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            few = len(buffers[0]) if len(buffers[0]) < 30 else 20
            return super().preadv(fd, [memoryview(buffers[0])[:few]], offset, flags)

    contents = read_contents(saved[0], Files())
    ((_, chunk),) = contents.tensors["t00"].chunks
    index = contents.ranks[0].index
    shard = index.shards[chunk.part]

    def wanted(start: int) -> ShardRequest:
        ranges = [Wanted(start, 100, "t00", sink, 3, 200)]
        return ShardRequest(shard=shard, block_nbytes=index.block_nbytes, wanted=ranges)

    sink = Gathered(300)
    read_shards(saved[0], SAVE_ID, [wanted(chunk.offset_bytes)], files=Short(), verify=False)
    value = saved[1]["t00"]
    assert bytes(sink.data) == value[:100] + value[200:300] + value[400:500]
    with pytest.raises(CorruptCheckpointError, match="ends early"):
        read_shards(saved[0], SAVE_ID, [wanted(shard.nbytes - 350)], files=Files(), verify=False)


def test_short_runs_keep_their_own_ends_and_long_ones_are_rounded() -> None:
    wanted = [Wanted(5000, 100, "x", None), Wanted(20_000, 200_000, "x", None), Wanted(7000, 50, "x", None)]
    shard = ShardRecord(name="x", nbytes=1 << 20, digests=b"")
    request = ShardRequest(shard=shard, block_nbytes=4096, wanted=wanted)
    extents = plan_extents(request, 1, unit=4096, exact_below=128 << 10)
    assert [(e[0].start, e[-1].end) for e in extents] == [(5000, 7050), (16_384, 221_184)]


@pytest.mark.parametrize("dense", [True, False])
def test_what_comes_in_rows_is_covered_once_and_between_dense_ranges_nothing_is_read(dense: bool) -> None:
    rows, apart = 300 * MIB, 301 * MIB
    wanted = [Wanted(5 + n * apart, rows, "x", None, 1, 16_384, dense) for n in range(2)]
    shard = ShardRecord(name="x", nbytes=700 * MIB, digests=b"")
    request = ShardRequest(shard=shard, block_nbytes=4096, wanted=wanted)
    extents = plan_extents(request, 1, unit=4096, exact_below=128 << 10)
    steps = [step for extent in extents for step in extent]
    for w in wanted:
        own = [(step.start, step.end) for step in steps if step.wanted == [w]]
        assert (own[0][0], own[-1][1]) == (w.offset, w.offset + rows)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(own))
        assert all((start - w.offset) % 16_384 == 0 for start, _ in own)
    lengths = [extent[-1].end - extent[0].start for extent in extents]
    limit = EXTENT_NBYTES if dense else read_plan.BUFFERED_EXTENT_NBYTES
    assert limit - 2 * MIB <= max(lengths) <= limit
    assert all(read_plan.is_buffered(extent) != dense for extent in extents)
    assert not dense or all(a.end == b.start for extent in extents for a, b in itertools.pairwise(extent))


def test_a_file_that_goes_before_its_batches_are_read_leaves_no_other_open(own: str) -> None:
    contents = read_contents(own, Files())
    index, memories = contents.ranks[0].index, [ctypes.create_string_buffer(200) for _ in range(2)]
    requests = [
        ShardRequest(
            shard=index.shards[part],
            block_nbytes=index.block_nbytes,
            wanted=[Wanted(4096, 10, "t", ctypes.addressof(memory), times=20, every=100)],
        )
        for part, memory in enumerate(memories)
    ]
    last = os.path.join(own, requests[1].shard.name)

    class Vanishing(RecordingFiles):
        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            if path == last and ("open", path) in self.calls:  # it was there when all were looked at
                raise OSError(errno.EIO, "simulated", path)
            return super().open(path, flags, mode)

    with pytest.raises(OSError, match="simulated"):
        read_shards(own, SAVE_ID, requests, files=Vanishing(), threads=2, verify=False)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("nbytes", "every"), [(400_001, 1), (401_000, 4096), (450_000, 150_000), (100, 4)])
def test_dense_rows_come_whole_and_by_whole_pages_wherever_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, every: int, direct: bool
) -> None:
    monkeypatch.setattr(read_plan, "BUFFERED_STEP_NBYTES", 40_000)
    reads: list[tuple[int, int]] = []

    class Cold(Uncached):
        def open(self, path: str, flags: int, mode: int = 0o666) -> int:
            if flags & os.O_DIRECT:
                if not direct:
                    raise OSError(errno.EINVAL, "no O_DIRECT")
                flags &= ~os.O_DIRECT  # not every file system of a test has it
            return super().open(path, flags, mode)

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            reads.append((offset, sum(map(len, buffers))))
            return super().preadv(fd, buffers, offset, flags)

    value = os.urandom(1_000_001)
    (tmp_path / "x").write_bytes(value)
    shard = ShardRecord(name="x", nbytes=len(value), digests=b"")
    at = (4999, len(value) - nbytes)  # the second ends with the file
    sinks = [Rows(nbytes, every) for _ in at]
    wanted = [Wanted(start, nbytes, "t", sink, 1, every, True) for start, sink in zip(at, sinks, strict=True)]
    request = ShardRequest(shard=shard, block_nbytes=4096, wanted=wanted)
    read_shards(str(tmp_path), None, [request], files=Cold(), threads=1, verify=False)
    assert [bytes(sink.data) for sink in sinks] == [value[start : start + nbytes] for start in at]
    if nbytes > 128 << 10:
        assert sum(offset % 4096 == 0 for offset, _ in reads) >= 2


def test_a_dense_range_of_a_file_that_is_cut_short_meanwhile_ends_in_a_named_error(tmp_path: Path) -> None:
    class Cut(Files):
        def resident(self, fd: int, offset: int, nbytes: int) -> bool:
            os.truncate(tmp_path / "x", 200_000)
            return False

    (tmp_path / "x").write_bytes(bytes(400_000))
    shard = ShardRecord(name="x", nbytes=400_000, digests=b"")
    wanted = [Wanted(5, 399_990, "t", Gathered(399_990), 1, 7, True)]
    request = ShardRequest(shard=shard, block_nbytes=4096, wanted=wanted)
    with pytest.raises(CorruptCheckpointError, match="ends early") as caught:
        read_shards(str(tmp_path), None, [request], files=Cut(), verify=False, threads=1)
    assert caught.value.file == "x"


class Resident(Files):
    """All files, or all but one part in the middle, seem to be in the page cache."""

    def __init__(self, hole: int = -1) -> None:
        self.hole = hole

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        return not offset <= self.hole < offset + nbytes


@pytest.mark.parametrize(("hole", "expected"), [(-1, {2}), (13 * MIB, {3, 4, 5, 6})])
def test_what_is_in_memory_is_read_by_no_more_threads_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hole: int, expected: set[int]
) -> None:
    asked = []

    class Pool(reader.ThreadPoolExecutor):
        def __init__(self, threads: int, *rest: Any) -> None:
            asked.append(threads)
            super().__init__(threads, *rest)

    monkeypatch.setattr(reader, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    path = str(tmp_path / "c")
    with Snapshot({f"t{n}": 2 * MIB for n in range(12)}) as snapshot:
        snapshot.save(path, fsync=False)
        files, fqns = Resident(hole), tuple(snapshot.values)
        assert read(path, fqns, files, threads=4, extent_nbytes=2 * MIB) == snapshot.values
    assert set(asked) <= expected and asked


@pytest.mark.parametrize("first", [KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_no_thread_reads_on_when_the_wait_for_it_is_interrupted_again_and_again(
    saved: tuple[str, dict[str, bytes]], first: BaseException
) -> None:
    main, may_go, state = threading.main_thread(), threading.Event(), {"reading": 0, "heard": 0, "done": 0}
    lock, begun = threading.Lock(), threading.Event()

    class Hung(Files):
        def resident(self, fd: int, offset: int, nbytes: int) -> bool:
            return False

        def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if len(buffers[0]) < 4096:
                return super().preadv(fd, buffers, offset, flags)
            if threading.current_thread() is main:
                assert begun.wait(60)
                raise first
            with lock:
                state["reading"] += 1
            begun.set()
            assert may_go.wait(60)
            found = super().preadv(fd, buffers, offset, flags)
            with lock:
                state["reading"] -= 1
            return found

    def interrupt(*_: Any) -> None:
        state["heard"] += 1
        if not state["done"]:
            raise KeyboardInterrupt

    def press() -> None:
        for n in range(4):
            while not state["done"] and (
                not state["reading"] or sys._current_frames()[main.ident or 0].f_code.co_name not in ("wait", "join")
            ):
                may_go.wait(0.001)
            if state["done"]:
                break
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            while state["heard"] == n:
                may_go.wait(0.001)
            may_go.wait(0.02)  # until it waits anew
        may_go.set()

    before, hand = signal.signal(signal.SIGINT, interrupt), threading.Thread(target=press)
    try:
        hand.start()
        with pytest.raises(KeyboardInterrupt):
            read(saved[0], files=Hung(), threads=2, extent_nbytes=MIB)
        state["done"] = 1
        assert (state["reading"], state["heard"]) == (0, 4)
    finally:
        state["done"] = 1
        may_go.set()
        hand.join()
        signal.signal(signal.SIGINT, before)
