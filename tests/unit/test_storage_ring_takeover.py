"""storage.ring_takeover: what a dead process has written of a ring counts if it is there; the rest is gone on with."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ring_trainer import Trainer, contents
from storage_samples import FailingFiles, RecordingFiles, Snapshot, flip_byte, shard_paths

from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_job import RankResult
from asyncckpt.storage.reading_back import OtherBytesError

LENGTHS = {f"t{n}": 300_000 + n for n in range(8)}


class Killed(BaseException):
    """The process is gone."""


class Mortal(RecordingFiles):
    """The files of a process that is killed: ahead of its `nth` call, or when `at` says so of what it has freed.

    What it would call afterwards is not done. The trainer does not hear of it any more either.
    """

    def __init__(self, trainer: Trainer, nth: int = 1 << 30, at: Callable[[int], bool] = lambda count: False) -> None:
        super().__init__()
        self.left, self.dead, self.n_calls = nth, False, 0
        self._lives = threading.Lock()
        wrote, freed = Trainer.wrote, Trainer.freed

        def count(number: int) -> None:
            self.step()
            freed(trainer, number)
            self.dead = self.dead or at(number)

        def note(number: int, digests: bytes) -> None:
            self.step()
            wrote(trainer, number, digests)
            self.dead = self.dead or at(0)

        trainer.freed = count  # type: ignore[method-assign]
        trainer.wrote = note  # type: ignore[method-assign]

    def step(self) -> None:
        with self._lives:
            self.n_calls += 1
            self.left -= 1
            if self.left < 0 or self.dead:
                self.dead = True
                raise Killed

    def before(self, name: str, args: Sequence[Any]) -> None:
        if name != "close":  # the kernel closes what a dead one had open
            self.step()


def die(trainer: Trainer, path: Path, call: Any, **how: Any) -> bool:
    """Let a process write, by `call`, and be killed; False: it came to its end before."""
    files = Mortal(trainer, **how)
    try:
        call(path, files)
    except Killed:
        return True
    except BaseException as error:  # a helper that was killed in the middle of another error's clean-up
        assert files.dead, error
        return True
    finally:
        del trainer.freed, trainer.wrote  # type: ignore[attr-defined]
    return files.dead


class Case:
    """A snapshot, the trainer of its ring, and what its files are to hold."""

    def __init__(self, path: Path, n_parts: int = 3, n_blocks: int = 1, n_cells: int = 3) -> None:
        self.path = path / "ring"
        whole = path / "whole"
        self.path.mkdir()
        whole.mkdir(exist_ok=True)
        for old in whole.iterdir():
            old.unlink()
        self.snapshot = Snapshot(LENGTHS, n_parts=n_parts)
        self.wanted = self.snapshot.write(str(whole))
        self.bytes = contents(whole)
        self.trainer = Trainer(self.snapshot, n_blocks, n_cells)
        self.n_segments = len(self.trainer.ring.segments)

    def at_freed(self, count: int) -> None:
        """Let a worker die when so many segments are freed."""
        if count == 0:
            assert die(self.trainer, self.path, self.write, at=lambda found: found == 0)
        else:
            assert die(self.trainer, self.path, self.write, at=lambda found: found == count)
        assert self.freed == count

    @property
    def freed(self) -> int:
        return self.trainer.counts[-1] if self.trainer.counts else 0

    def write(self, path: Path, files: Files) -> RankResult:
        return self.trainer.write(path, files, threads=1)

    def assert_whole(self, result: RankResult) -> None:
        assert contents(self.path) == self.bytes
        assert result.record == self.wanted.record
        assert result.shards_print == self.wanted.shards_print
        assert self.freed == self.n_segments
        assert self.trainer.most_unfreed <= self.trainer.ring.n_cells

    def close(self) -> None:
        self.trainer.close()
        self.snapshot.memory.close()
        for file in self.path.iterdir():
            file.unlink() if not file.is_dir() else file.rmdir()
        self.path.rmdir()


@pytest.fixture
def make(memory_path: Path) -> Iterator[Callable[..., Case]]:
    made: list[Case] = []

    def case(**shape: int) -> Case:
        while made:
            made.pop().close()
        made.append(Case(memory_path, **shape))
        return made[-1]

    yield case
    while made:
        made.pop().close()


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("n_blocks", [1, 2])
def test_whatever_was_freed_when_a_worker_died_the_next_one_goes_on_from_there(
    make: Callable[..., Case], n_parts: int, n_blocks: int
) -> None:
    n_segments = make(n_parts=n_parts, n_blocks=n_blocks).n_segments
    assert n_segments >= 5
    for count in range(n_segments + 1):
        case = make(n_parts=n_parts, n_blocks=n_blocks)
        case.at_freed(count)
        files = RecordingFiles()
        case.assert_whole(case.trainer.take_over(case.path, files))
        written = [where for name, where in files.calls if name == "pwrite" and str(where).endswith("safetensors")]
        assert len(written) == n_segments - count, "what was freed is not written again"


def test_files_of_a_worker_that_had_freed_nothing_are_written_anew(make: Callable[..., Case]) -> None:
    case = make()
    case.at_freed(0)
    assert shard_paths(str(case.path)), "it had begun"
    inode = os.stat(shard_paths(str(case.path))[0]).st_ino
    holder = os.open(shard_paths(str(case.path))[0], os.O_RDONLY)
    case.assert_whole(case.trainer.take_over(case.path))
    assert os.stat(shard_paths(str(case.path))[0]).st_ino != inode
    os.close(holder)


def test_a_worker_that_died_before_it_began_is_followed_by_one_that_begins(make: Callable[..., Case]) -> None:
    case = make()
    case.assert_whole(case.trainer.take_over(case.path))


@pytest.mark.parametrize("threads", [2, 5])
def test_workers_that_are_killed_at_any_call_are_followed_by_others_until_it_is_written(
    make: Callable[..., Case], rng: random.Random, threads: int
) -> None:
    for _ in range(25):
        case = make(n_parts=rng.randrange(1, 4), n_blocks=rng.randrange(1, 3), n_cells=rng.randrange(2, 5))
        call: Any = lambda path, files, case=case: case.trainer.write(path, files, threads=threads)  # noqa: E731
        go_on: Any = lambda path, files, case=case: case.trainer.take_over(path, files, threads=threads)  # noqa: E731
        for _ in range(rng.randrange(1, 4)):
            if not die(case.trainer, case.path, call, nth=rng.randrange(0, 90)):
                break  # it is durable, and the index says so: nobody goes on with it
            call = go_on
        else:
            case.assert_whole(case.trainer.take_over(case.path, threads=threads))


def test_a_worker_that_goes_on_is_killed_at_every_call_and_the_next_one_goes_on(make: Callable[..., Case]) -> None:
    for nth in range(200):
        case = make()
        case.at_freed(4)
        go_on: Any = lambda path, files, case=case: case.trainer.take_over(path, files, threads=1)  # noqa: E731
        if not die(case.trainer, case.path, go_on, nth=nth):
            break
        case.assert_whole(case.trainer.take_over(case.path))
    assert nth > 40


SUPPRESSED = ("unlink", "listdir")
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_call_that_fails_while_one_goes_on_fails_it_and_leaves_nothing(make: Callable[..., Case], code: int) -> None:
    seen = set()
    for nth in range(1, 200):
        case = make()
        case.at_freed(4)
        files = FailingFiles(code, nth=nth, wanted=lambda name, args: name not in SUPPRESSED)
        try:
            result = case.trainer.take_over(case.path, files, threads=1)
        except (OSError, OtherBytesError):
            assert files.failed
            seen.add(files.failed)
            assert list(case.path.iterdir()) == []
        else:
            case.assert_whole(result)
            if files.failed is None:
                break
    assert {"open", "pwrite", "preadv", "fsync", "ftruncate", "fallocate", "lstat", "fstat", "close"} <= seen


@pytest.mark.parametrize("files", [Files, RecordingFiles])
def test_damage_to_any_block_that_was_freed_is_found(make: Callable[..., Case], files: type[Files]) -> None:
    for block in range(6):
        case = make(n_parts=2)
        case.at_freed(6)
        (first, *others), at = shard_paths(str(case.path)), block
        n_first = -(-case.snapshot.parts[0][1] // BLOCK_NBYTES)
        shard = first if block < n_first else others[0]
        at = (block if block < n_first else block - n_first) * BLOCK_NBYTES
        flip_byte(shard, at + 4500)
        with pytest.raises(OtherBytesError, match=f"bytes {at} to"):
            case.trainer.take_over(case.path, files())
        assert list(case.path.iterdir()) == []


def test_a_checksum_that_was_damaged_in_memory_is_found_as_well(make: Callable[..., Case]) -> None:
    case = make()
    case.at_freed(3)
    case.trainer.ledger[2] = bytes(8)
    with pytest.raises(OtherBytesError):
        case.trainer.take_over(case.path)


def _fifo(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path)


def _linked(path: str) -> None:
    os.rename(path, f"{path}.elsewhere")
    os.symlink(f"{path}.elsewhere", path)


def _directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


def _linked_hard(path: str) -> None:
    os.link(path, f"{path}.elsewhere")


CHANGES: dict[str, Callable[[str], Any]] = {
    "missing": os.unlink,
    "shorter": lambda path: os.truncate(path, 5000),
    "longer": lambda path: os.truncate(path, 99 << 20),
    "a link": _linked,
    "a file with another name": _linked_hard,
    "a pipe": _fifo,
    "a directory": _directory,
    "another's": lambda path: Path(path).write_bytes(b"x" * os.stat(path).st_size),
}


@pytest.mark.parametrize("which", [0, 1], ids=["the one that is whole", "the one that is half written"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_what_the_worker_before_had_begun_is_not_gone_on_with(
    make: Callable[..., Case], change: str, which: int
) -> None:
    case = make(n_parts=2)
    n_first = sum(s.part == 0 for s in case.trainer.ring.segments)
    case.at_freed(n_first + 2)
    path = shard_paths(str(case.path))[which]
    before = Path(path).read_bytes()
    CHANGES[change](path)
    with pytest.raises(OtherBytesError):
        case.trainer.take_over(case.path)
    left = {p for p in os.listdir(case.path) if not p.endswith("elsewhere")}
    if change == "a file with another name":
        assert Path(f"{path}.elsewhere").read_bytes() == before, "nothing is written to it"
    assert left == ({os.path.basename(path)} if change == "a directory" else set())


def test_what_was_freed_is_read_past_the_page_cache_after_it_was_flushed(make: Callable[..., Case]) -> None:
    case = make(n_parts=2)
    case.at_freed(case.n_segments - 1)
    files = RecordingFiles()
    case.trainer.take_over(case.path, files, threads=1)
    shards = [(name, where) for name, where in files.calls if str(where).endswith("safetensors")]
    for path in shard_paths(str(case.path)):
        names = [name for name, where in shards if where == path]
        assert names.index("fsync") < names.index("preadv")
        assert "set_direct" in names[names.index("fsync") - 2 : names.index("preadv")]


class Cache(Files):
    """A file system without O_DIRECT that has lost a page of a file: its cache shows it until it is dropped."""

    def __init__(self, lost_at: int | None = None) -> None:
        self.lost_at, self.forgotten = lost_at, 0

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")

    def forget(self, fd: int) -> None:
        self.forgotten += 1
        if self.lost_at is not None and self.forgotten == 1:
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                file.seek(self.lost_at)
                file.write(bytes(4096))


@pytest.mark.parametrize("lost_at", [None, BLOCK_NBYTES + 4096])
def test_without_direct_reads_the_page_cache_is_dropped_before(make: Callable[..., Case], lost_at: int | None) -> None:
    case = make(n_parts=2)
    case.at_freed(4)
    files = Cache(lost_at)
    if lost_at is None:
        case.assert_whole(case.trainer.take_over(case.path, files))
    else:
        with pytest.raises(OtherBytesError):
            case.trainer.take_over(case.path, files)
        assert list(case.path.iterdir()) == []
    assert files.forgotten


class Late(RecordingFiles):
    """A write of the dead one ends only when the file is cut, out of a cell that was used again by then."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def before(self, name: str, args: Sequence[Any]) -> None:
        if name == "ftruncate":
            flip_byte(self.paths[args[0]], self._at)


@pytest.mark.parametrize("cell", [0, 1, 2])
def test_a_write_of_the_dead_one_that_ends_late_over_what_is_written_again_is_found(
    make: Callable[..., Case], cell: int
) -> None:
    case = make(n_parts=1)
    case.at_freed(3)
    with pytest.raises(OtherBytesError, match=f"bytes {(3 + cell) * BLOCK_NBYTES} to"):
        case.trainer.take_over(case.path, Late((3 + cell) * BLOCK_NBYTES + 4500))
    assert list(case.path.iterdir()) == []


class Reluctant(RecordingFiles):
    """Refuses to read by O_DIRECT, though it has taken the flag, and reads less than it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: set[int] = set()

    def after(self, name: str, args: Sequence[Any]) -> None:
        if name == "set_direct":
            self.direct.add(args[0]) if args[1] else self.direct.discard(args[0])
        elif name == "open":
            self.direct.clear()

    def before(self, name: str, args: Sequence[Any]) -> None:
        if name == "preadv" and args[0] in self.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")


class Short(Files):
    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        return super().preadv(fd, [memoryview(buffers[0])[:10_000]], offset, flags)

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")


@pytest.mark.parametrize("files", [Reluctant, Short])
def test_reads_that_are_refused_or_short_are_done_otherwise(make: Callable[..., Case], files: type[Files]) -> None:
    case = make()
    case.at_freed(5)
    case.assert_whole(case.trainer.take_over(case.path, files(), threads=1))


@pytest.mark.parametrize("fsync", [True, False])
def test_a_ring_without_fsync_is_gone_on_with_as_well(make: Callable[..., Case], fsync: bool) -> None:
    case = make()
    case.at_freed(5)
    files = RecordingFiles()
    case.assert_whole(case.trainer.take_over(case.path, files, fsync=fsync))
    assert ("fsync" in files.names()) is fsync


def test_a_trainer_that_gives_up_while_one_goes_on_leaves_no_file(make: Callable[..., Case]) -> None:
    for limit in (0, 3, 9, 14):
        case = make()
        case.at_freed(4)
        left = [limit]

        def check(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise InterruptedError("given up")

        with pytest.raises(InterruptedError):
            case.trainer.take_over(case.path, check=check, threads=1)
        assert list(case.path.iterdir()) == []


def test_other_saves_files_stay(make: Callable[..., Case]) -> None:
    case = make()
    case.at_freed(4)
    (case.path / "notes.txt").write_text("mine")
    case.trainer.take_over(case.path)
    assert (case.path / "notes.txt").read_text() == "mine"
