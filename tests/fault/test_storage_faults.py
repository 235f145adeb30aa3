"""Every call of the storage seam fails once, in every way: never success with damage.

Either the save raises, and nothing is listed or the outcome is said to be unknown; or it succeeds, and all of it
verifies.
"""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_samples import OTHER_ID, SAVE_ID, SHARE, FailingFiles, RecordingFiles, Snapshot, some_of

from asyncckpt.errors import CheckpointExistsError, CommitUnknownError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.storage.catalog import scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.segment_writer import SegmentWriter
from asyncckpt.storage.verification import verify_checkpoint

pytestmark = pytest.mark.fault

CODES = [
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.ESTALE,
    errno.EINTR,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
]
LENGTHS = {"a": 2_500_000, "b": 700, "c": 0}


class Early(Snapshot):
    """Is written while it is staged: one more segment is filled whenever the writer waits for one."""

    n_filled = 0

    n_cells = 0

    slot: memoryview | None = None

    @property
    def layout(self) -> StreamLayout:
        return StreamLayout(self.parts, BLOCK_NBYTES, self.n_cells)

    def await_filled(self, count: int, _goes_on: Callable[[], bool]) -> int:
        self.n_filled = max(self.n_filled, count + 1)
        return self.n_filled

    def filled(self) -> int:
        return self.n_filled

    def freed(self, count: int) -> None:
        """They are needed no more."""

    def writer(
        self,
        path: str,
        files: Files | None = None,
        check: Callable[[], None] = lambda: None,
        threads: int = 2,
        **changes: Any,
    ) -> SegmentWriter:
        self.n_filled = 0
        request = self.request(path, **changes)
        return SegmentWriter(request, self.slot or self.image, self, files or Files(), check=check, threads=threads)


class Ringed(Early):
    """Goes through a ring whose cells hold all of its segments."""

    def write(self, path: str, *args: Any, **kw: Any) -> RankResult:
        self.n_filled, self.n_cells = 0, sum(-(-nbytes // BLOCK_NBYTES) for _, nbytes in self.parts)
        ring = self.layout
        memory = Memory(-1, ring.cells_nbytes + 2 * PAGE_NBYTES)
        cells = memory.view()
        try:
            for number, segment in enumerate(ring.segments):
                at, offset = ring.offset_of(number), self.parts[segment.part][0]
                piece = self.image[offset + segment.start : offset + segment.end]
                cells[at : at + len(piece)] = piece
            self.slot = cells
            return super().write(path, *args, **kw)
        finally:
            cells.release()
            memory.close()


def every_call(_name: str, _args: Sequence[Any]) -> bool:
    return True


def outcome_of(snapshot: Snapshot, path: Path, files: Files, threads: int) -> str:
    """Save, and check that what is said is what is there."""
    fds = set(os.listdir("/proc/self/fd"))
    try:
        snapshot.save(str(path), files, threads=threads)
    except CommitUnknownError:
        outcome = "unknown"
    except OSError as error:
        assert error.errno is not None or isinstance(error, CheckpointExistsError)
        outcome = "failed"
    else:
        outcome = "saved"
    assert set(os.listdir("/proc/self/fd")) == fds, "a descriptor was left open"
    states = [found.state for found in scan(str(path.parent), LocalStore())] if path.parent.exists() else []
    if outcome == "failed":
        assert "committed" not in states
    if outcome == "saved":
        assert states == ["committed"]
    if "committed" in states:
        assert verify_checkpoint(str(path), Files()).faults == []
    else:
        assert all(state == "incomplete" for state in states)
    return outcome


def number_of_calls(tmp_path: Path, threads: int, parts: int, kind: type[Snapshot] = Snapshot) -> int:
    files = RecordingFiles()
    with kind(LENGTHS, n_parts=parts) as snapshot:
        snapshot.save(str(tmp_path / "rehearsal/deep"), files, threads=threads)
    return len(files.calls)


@pytest.mark.parametrize(
    ("code", "threads", "late", "kind"),
    [
        *((code, 2, False, Snapshot) for code in CODES),
        (errno.EIO, 1, False, Snapshot),
        (errno.EIO, 2, True, Snapshot),
        (errno.ESTALE, 1, True, Snapshot),
        (errno.EINVAL, 2, True, Snapshot),
        *((code, 2, False, kind) for code in CODES[:7] for kind in (Early, Ringed)),
        *((errno.EIO, 2, True, kind) for kind in (Early, Ringed)),
    ],
)
def test_a_failure_of_any_call_never_ends_in_success_with_damage(
    memory_path: Path, rng: random.Random, code: int, threads: int, late: bool, kind: type[Snapshot]
) -> None:
    """`late`: the call is done, and answers with an error all the same."""
    outcomes: dict[str, int] = {}
    total = number_of_calls(memory_path, threads, 2, kind)
    assert total > 50
    with (
        kind(LENGTHS, n_parts=2) as snapshot,
        Snapshot(LENGTHS, n_parts=2, save_id=OTHER_ID, seed=1) as following,
    ):
        for nth in some_of(total, rng):
            path = memory_path / f"try-{nth}" / "deep"
            files = FailingFiles(code, nth=nth, wanted=every_call, late=late)
            outcome = outcome_of(snapshot, path, files, threads)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if outcome == "failed":  # the next save to the same place works
                assert outcome_of(following, path, RecordingFiles(), threads) == "saved"
    assert outcomes.get("failed", 0) > total // SHARE // 8, outcomes


@pytest.mark.parametrize("written", [0, 1, 511, 4096, 300_000])
def test_a_short_write_at_any_call_never_ends_in_success_with_damage(tmp_path: Path, written: int) -> None:
    class Short(RecordingFiles):
        def __init__(self, nth: int) -> None:
            super().__init__()
            self.left = nth

        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            self.left -= 1
            return Files.pwrite(self, fd, buffer[:written] if self.left == 0 else buffer, offset) if buffer else 0

    with Snapshot(LENGTHS) as snapshot:
        for nth in range(1, 12):
            outcome = outcome_of(snapshot, tmp_path / f"{nth}" / "c", Short(nth), 2)
            assert outcome == "saved" or written == 0


def test_a_disk_that_fills_up_in_the_middle_fails_the_save(tmp_path: Path) -> None:
    """No fallocate, short writes at the limit, then ENOSPC: as a full file system behaves."""

    class Full(RecordingFiles):
        room = 1_000_000

        def fallocate(self, fd: int, nbytes: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "no fallocate")

        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, "full")
            count = Files.pwrite(self, fd, buffer[: self.room], offset)
            self.room -= count
            return count

    with Snapshot(LENGTHS) as snapshot:
        assert outcome_of(snapshot, tmp_path / "x" / "c", Full(), 2) == "failed"
    assert os.listdir(tmp_path / "x" / "c") == []


def test_a_file_size_limit_of_the_process_fails_the_save(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with Snapshot(LENGTHS) as snapshot:
            assert outcome_of(snapshot, tmp_path / "x" / "c", Files(), 2) == "failed"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "x" / "c") == []


def test_earlier_checkpoints_are_untouched_by_failing_saves(tmp_path: Path) -> None:
    with Snapshot(LENGTHS) as snapshot:
        snapshot.save(str(tmp_path / "good"))
        before = {name: (tmp_path / "good" / name).read_bytes() for name in os.listdir(tmp_path / "good")}
    with Snapshot(LENGTHS, save_id=OTHER_ID, seed=1) as snapshot:
        for nth in range(1, 60, 7):
            files = FailingFiles(errno.EIO, nth=nth, wanted=every_call)
            with pytest.raises((OSError, CommitUnknownError)):
                snapshot.save(str(tmp_path / "good"), files)
    after = {name: (tmp_path / "good" / name).read_bytes() for name in os.listdir(tmp_path / "good")}
    assert after == before
    assert SAVE_ID.sequence < OTHER_ID.sequence
