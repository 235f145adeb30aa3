"""What is read through is brought into the page cache in large pages and copied from there, or read as before."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.index import ShardRecord
from asyncckpt.loading import spreading
from asyncckpt.loading.sinks import BoxSink
from asyncckpt.storage import block_reader, bringing, cached_copies, read_plan
from asyncckpt.storage.block_reader import read_shards
from asyncckpt.storage.bringing import UNIT_NBYTES, bring
from asyncckpt.storage.files import Files
from asyncckpt.storage.gathering import MAX_RANGES, gather
from asyncckpt.storage.quicker import TRIALS, Quicker
from asyncckpt.storage.read_plan import Runs, ShardRequest, Wanted

ROWS, ROW, HALF = 900, 16_384, 8192
START = 4999
NBYTES = START + ROWS * ROW


class Noting(Files):
    """Says that nothing is cached yet; counts what was brought and how much was copied from the page cache."""

    def __init__(self) -> None:
        self.brought = self.gathered = 0

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        return False

    def bring(self, fd: int, offset: int, nbytes: int) -> bool:
        self.brought += 1
        return super().bring(fd, offset, nbytes)

    def gather(self, fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
        done = super().gather(fd, target, offset, nbytes, every, times, apart)
        self.gathered += done * nbytes
        return done


@pytest.fixture(params=["sifted", "gathered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways by which the same runs are copied."""
    always(request.param == "sifted", monkeypatch)
    return str(request.param)


def always(sifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs copied in one of the two ways."""
    known = Quicker()
    for n in range(TRIALS):
        for first in (False, True):
            known.took((HALF, ROW), float(first != sifted) + n, first=first)
    monkeypatch.setattr(cached_copies, "SIFTING", known)


@pytest.fixture(autouse=True)
def in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bring in large pages whatever that takes."""

    class Always(Quicker):
        def is_first(self, kind: Hashable) -> bool:
            return True

    monkeypatch.setattr(block_reader, "Quicker", Always)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(NBYTES))
    return path


def columns_of(
    path: Path, files: Files, *, dtype: torch.dtype = torch.uint8, threads: int = 1, width: int = HALF
) -> torch.Tensor:
    """Read the second half of every row, into rows of `width`."""
    target = torch.zeros(ROWS, width, dtype=dtype)[:, :HALF]
    span = (ROWS - 1) * ROW + HALF
    sink = BoxSink(target, (0, 0), (ROWS, HALF), torch.uint8, span, (ROW, 1))
    wanted = Wanted(START + HALF, span, "w", sink, 1, ROW)
    request = ShardRequest(
        shard=ShardRecord(name=path.name, nbytes=NBYTES, digests=b""), block_nbytes=4096, wanted=[wanted]
    )
    read_shards(str(path.parent), None, [request], files=files, threads=threads, verify=False)
    return target


def expected(value: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return flat[START:].view(ROWS, ROW)[:, HALF:]


@pytest.mark.parametrize("threads", [1, 3])
def test_long_runs_are_copied_from_the_page_cache_to_where_they_go(file: Path, threads: int, way: str) -> None:
    files = Noting()
    assert torch.equal(columns_of(file, files, threads=threads), expected(file.read_bytes()))
    assert files.brought >= 1 and (files.gathered <= ROWS * HALF if way == "gathered" else not files.gathered)


def test_runs_that_go_to_places_apart_are_copied_one_by_one(file: Path) -> None:
    files = Noting()
    assert torch.equal(columns_of(file, files, width=HALF + 8), expected(file.read_bytes()))
    assert 0 < files.gathered <= ROWS * HALF


def test_what_is_in_the_page_cache_is_not_brought_there(file: Path, way: str) -> None:
    class Cached(Noting):
        def resident(self, fd: int, offset: int, nbytes: int) -> bool:
            return True

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            return 1 if flags & os.RWF_NOWAIT else super().preadv(fd, buffers, offset)

    files = Cached()
    assert torch.equal(columns_of(file, files), expected(file.read_bytes()))
    assert files.brought == 0


def test_a_file_that_only_seems_to_be_in_the_page_cache_is_brought_there(file: Path) -> None:
    """The kernel says of every file that the process may not write that it is cached."""

    class Seeming(Noting):
        def resident(self, fd: int, offset: int, nbytes: int) -> bool:
            return True

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if flags & os.RWF_NOWAIT:
                raise OSError(errno.EAGAIN, "not cached")
            return super().preadv(fd, buffers, offset)

    files = Seeming()
    assert torch.equal(columns_of(file, files), expected(file.read_bytes()))
    assert files.brought > 0


@pytest.mark.parametrize(
    "nbytes, every", [(4096, 4096), (4096, 8192), (5000, 9999), (60_000, 61_000), (131_072, 131_073)]
)
@pytest.mark.parametrize("room", [300_000, 2 << 20])
def test_runs_of_any_length_are_copied_whatever_the_buffer_holds(
    file: Path, nbytes: int, every: int, room: int
) -> None:
    times = (NBYTES - START - nbytes) // every + 1
    target, buffer = ctypes.create_string_buffer(times * nbytes), ctypes.create_string_buffer(room)
    fd = os.open(file, os.O_RDONLY)
    try:
        runs = Runs(START, nbytes, every, times, ctypes.addressof(target), nbytes)
        copies = cached_copies.CachedCopies(Files(), fd)
        assert copies.copy(0, NBYTES, [runs], (ctypes.addressof(buffer), room), is_there=True)
    finally:
        os.close(fd)
    value = file.read_bytes()
    assert target.raw == b"".join(value[START + n * every :][:nbytes] for n in range(times))


@pytest.mark.parametrize("slow", ["sifted", "gathered"])
def test_each_way_is_tried_and_the_quicker_one_stays(file: Path, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_copies, "SIFTING", Quicker())
    seen: list[str] = []

    def work(way: str) -> None:
        seen.append(way)
        until = time.thread_time() + 0.02 * (way == slow)
        while time.thread_time() < until:
            pass

    class Slow(Noting):
        def gather(self, fd: int, *arguments: int) -> int:
            work("gathered")
            return Files.gather(self, fd, *arguments)

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if len(buffers) > cached_copies._SIFT_ROWS:
                work("sifted")
            return super().preadv(fd, buffers, offset, flags)

    for _ in range(4):
        assert torch.equal(columns_of(file, Slow()), expected(file.read_bytes()))
    assert set(seen) == {"sifted", "gathered"}
    assert slow not in seen[-3:], seen


@pytest.mark.parametrize("is_slow", [False, True])
def test_large_pages_are_left_where_they_take_more_of_the_processor(
    file: Path, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_reader, "Quicker", Quicker)
    monkeypatch.setattr(read_plan, "THROUGH_EXTENT_NBYTES", 1 << 20)
    monkeypatch.setattr(read_plan, "THROUGH_STEP_NBYTES", 1 << 20)
    seen: list[str] = []

    def work(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    class Hosted(Noting):
        def bring(self, fd: int, offset: int, nbytes: int) -> bool:
            seen.append("large")
            work(0.03 * is_slow)
            return Files.bring(self, fd, offset, nbytes)

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if len(buffers) == 1 and len(buffers[0]) >= 1 << 19:
                seen.append("small")
                work(0.03 * (not is_slow))
            return super().preadv(fd, buffers, offset, flags)

    assert torch.equal(columns_of(file, Hosted()), expected(file.read_bytes()))
    assert set(seen[:2]) == {"large", "small"}
    assert set(seen[-3:]) == {"small" if is_slow else "large"}, seen


def test_where_one_way_is_refused_the_other_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_copies, "SIFTING", Quicker())
    asked: list[int] = []

    class Refusing(Noting):
        def gather(self, fd: int, *arguments: int) -> int:
            asked.append(fd)
            return 0

    for _ in range(TRIALS + 3):
        assert torch.equal(columns_of(file, Refusing()), expected(file.read_bytes()))
    assert len(asked) == TRIALS


def test_a_read_of_many_runs_that_comes_back_short_is_no_copy(file: Path) -> None:
    class Short(Noting):
        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            return super().preadv(fd, buffers[:-1] if len(buffers) > 1 else buffers, offset, flags)

    files = Short()
    assert torch.equal(columns_of(file, files), expected(file.read_bytes()))


def test_what_is_converted_is_read_and_handed_on(file: Path) -> None:
    files = Noting()
    found = columns_of(file, files, dtype=torch.float32)
    assert torch.equal(found, expected(file.read_bytes()).float())
    assert files.gathered == 0 and files.brought >= 1


@pytest.mark.parametrize("works", [False, True])
def test_where_bringing_does_nothing_all_is_read_as_before_and_soon_without_it(
    file: Path, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose faults bring in little, or none."""
    monkeypatch.setattr("asyncckpt.storage.read_plan.THROUGH_EXTENT_NBYTES", 1 << 20)
    monkeypatch.setattr("asyncckpt.storage.cached_copies.BRING_FROM_NBYTES", 1)

    class Idle(Noting):
        def bring(self, fd: int, offset: int, nbytes: int) -> bool:
            self.brought += 1
            return works

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if flags & os.RWF_NOWAIT:
                raise OSError(errno.EAGAIN, "not cached")
            return super().preadv(fd, buffers, offset)

    files = Idle()
    assert torch.equal(columns_of(file, files), expected(file.read_bytes()))
    assert (files.brought, files.gathered) == (8, 0)


@pytest.mark.parametrize("answer", [0, 1])
def test_runs_that_are_not_all_copied_are_read(file: Path, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_copies, "_SIFT_ROWS", 1 << 20)

    class Partly(Noting):
        def gather(self, fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
            ctypes.memset(target, 0xAA, nbytes)
            return min(answer, times - 1)

    assert torch.equal(columns_of(file, Partly()), expected(file.read_bytes()))


def test_a_sandbox_that_refuses_every_copy_is_not_asked_without_end(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_copies, "_SIFT_ROWS", 1 << 20)
    monkeypatch.setattr("asyncckpt.storage.read_plan.THROUGH_EXTENT_NBYTES", 1 << 20)
    monkeypatch.setattr("asyncckpt.storage.cached_copies.BRING_FROM_NBYTES", 1)

    class Refusing(Noting):
        def bring(self, fd: int, offset: int, nbytes: int) -> bool:
            return True

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            return 1 if flags & os.RWF_NOWAIT else super().preadv(fd, buffers, offset)

        def gather(self, fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
            self.brought += 1
            return 0

    files = Refusing()
    assert torch.equal(columns_of(file, files), expected(file.read_bytes()))
    assert files.brought == 8


@pytest.mark.parametrize("cut", [1, 5000, 3 << 20])
@pytest.mark.usefixtures("way")
def test_a_file_that_is_cut_short_in_the_middle_of_a_copy_is_an_error_and_no_zeros(file: Path, cut: int) -> None:
    class Cutting(Noting):
        def bring(self, fd: int, offset: int, nbytes: int) -> bool:
            found = super().bring(fd, offset, nbytes)
            os.truncate(file, NBYTES - cut)
            return found

    with pytest.raises(CorruptCheckpointError, match="ends early"):
        columns_of(file, Cutting())


def test_a_disk_that_fails_is_the_error_of_the_read_behind_it(file: Path) -> None:
    class Broken(Noting):
        def bring(self, fd: int, offset: int, nbytes: int) -> bool:
            return False  # as where a page cannot be read

        def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            raise OSError(errno.EIO, "simulated")

    with pytest.raises(OSError, match="reading bytes") as found:
        columns_of(file, Broken())
    assert found.value.errno == errno.EIO


def test_a_range_is_brought_in_and_what_cannot_be_says_so(file: Path, tmp_path: Path) -> None:
    fd, directory = os.open(file, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    try:
        assert bring(fd, START, NBYTES - START)
        assert not bring(fd, NBYTES + UNIT_NBYTES, 10)  # beyond the end, where an access is a SIGBUS
        assert not bring(directory, 0, 10)
    finally:
        os.close(fd)
        os.close(directory)


def test_a_kernel_without_large_pages_is_not_asked_for_any(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: -1) if name == "madvise" else getattr(real, name)

    real = bringing._libc
    monkeypatch.setattr(bringing, "_libc", Refusing())
    fd = os.open(file, os.O_RDONLY)
    try:
        assert not bring(fd, 0, NBYTES)
    finally:
        os.close(fd)


def test_ranges_are_copied_to_places_apart() -> None:
    times = MAX_RANGES + 5
    source = ctypes.create_string_buffer(bytes(n % 251 for n in range(5 * times)), 5 * times)
    found = ctypes.create_string_buffer(7 * times)
    assert gather(ctypes.addressof(found), ctypes.addressof(source), 2, 5, times, 7) == times
    assert all(found.raw[7 * n : 7 * n + 2] == source.raw[5 * n : 5 * n + 2] for n in range(times))
    assert all(found.raw[7 * n + 2 : 7 * n + 7] == bytes(5) for n in range(times))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_random_boxes_go_run_by_run_where_copies_of_them_would(
    dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreading, "MIN_RUN_NBYTES", 1)
    itemsize = dtype.itemsize
    for _ in range(20):
        whole = tuple(rng.randrange(1, 9) for _ in range(3))
        sizes = tuple(rng.randrange(1, n + 1) for n in whole)
        strides = (whole[1] * whole[2], whole[2], 1)
        span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        value = torch.randint(0, 256, (span * itemsize,), dtype=torch.uint8)
        room = torch.zeros(*(n + rng.randrange(3) for n in sizes), dtype=dtype)
        if rng.randrange(2):
            room = torch.zeros(room.shape[::-1], dtype=dtype).permute(2, 1, 0)
        sink = BoxSink(room, (0, 0, 0), sizes, dtype, span * itemsize, strides)
        at = 0
        while at < span:
            count = rng.randrange(1, span - at + 1)
            runs = sink.runs(at * itemsize, count * itemsize)
            assert runs is not None
            for run in runs:
                for n in range(run.times):
                    source = value.data_ptr() + at * itemsize + run.start + n * run.every
                    ctypes.memmove(run.target + n * run.apart, source, run.nbytes)
            at += count
        box = value.view(dtype).as_strided(sizes, strides)
        found = room[tuple(slice(0, n) for n in sizes)]
        assert bits_of(found) == bits_of(box)


def bits_of(tensor: torch.Tensor) -> bytes:
    fresh = torch.empty(tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor)
    return ctypes.string_at(fresh.data_ptr(), fresh.numel() * fresh.itemsize)


def test_short_runs_and_targets_elsewhere_are_nobody_elses(rng: random.Random) -> None:
    def runs(target: torch.Tensor, dtype: torch.dtype = torch.float32) -> object:
        return BoxSink(target, (0, 0), tuple(target.shape), dtype, 4 * 4 * 4000, (4000, 1)).runs(0, 4 * 4 * 4000)

    assert runs(torch.zeros(4, 2000)) is not None
    assert runs(torch.zeros(4, 1000)) is None
    assert runs(torch.zeros(4, 2000, dtype=torch.float64)) is None
    assert runs(torch.zeros(4, 2000, device="meta")) is None
    assert runs(torch.zeros(4, 2000, dtype=torch.complex64).conj(), torch.complex64) is None


def test_nothing_is_written_beside_a_target_whose_rows_are_one(file: Path) -> None:
    room = torch.zeros(ROWS, HALF, dtype=torch.uint8)  # what would be overwritten lies in it, too
    target, span = room[:1].expand(ROWS, HALF), (ROWS - 1) * ROW + HALF
    sink = BoxSink(target, (0, 0), (ROWS, HALF), torch.uint8, span, (ROW, 1))
    request = ShardRequest(
        shard=ShardRecord(name=file.name, nbytes=NBYTES, digests=b""),
        block_nbytes=4096,
        wanted=[Wanted(START + HALF, span, "w", sink, 1, ROW)],
    )
    assert sink.runs(0, span) is None
    with pytest.raises(RuntimeError, match="single memory location"):
        read_shards(str(file.parent), None, [request], files=Files(), threads=1, verify=False)
    assert not room.any()
