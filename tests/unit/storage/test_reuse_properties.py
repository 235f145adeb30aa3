"""Random orders of saves that link, kills, failures, retention and gc: what is listed is loaded bit for bit.

P1, P2, P3 and P10 where checkpoints share files. A kill is a SIGKILL of a forked process at one of the named instants
of a save; what it had in memory is gone with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from storage_samples import RecordingFiles, Snapshot, manifest_of

import asyncckpt
from asyncckpt.basics.failpoints import observed
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.gc import GarbageRules, collect
from asyncckpt.maintenance.retention import remove_checkpoint
from asyncckpt.storage.catalog import COMMITTED, found_at
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.recovery import is_committed, resume_rank_files
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.verification import verify_checkpoint

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LENGTHS = {"base": 300_000, "head": 40_000, "adapter": 500}
"""Of a shard each."""

RUNS = ("0123456789ab", "ba9876543210")
MAX_POINTS = 40
"""A save comes by fewer."""

Values = tuple[int, int, int]
"""Which of its values each tensor has."""


def at_visit(visit: int, do: Callable[[], None]) -> Callable[[str], None]:
    """Return an observer that does something at the `visit`-th instant, from 0."""
    left = [visit]

    def observe(point: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            do()

    return observe


def fail() -> None:
    raise OSError(5, "failed at a named instant")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_process_that_is_killed(visit: int, do: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with observed(at_visit(visit, kill)):
                do()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, -signal.SIGKILL)


class Root:
    """A directory of checkpoints, and what must be in it.

    Attributes:
        expected: Path -> the save that must be committed there, and its values.
        n_linked: Shards that were linked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.expected: dict[str, tuple[SaveId, Values]] = {}
        self.n_linked = 0
        self._count, self._mirror = 0, ""
        self._history = ShardHistory()
        self._store = LocalStore(RecordingFiles())

    def save(self, run: int, values: Values, over: bool, how: str, visit: int) -> None:
        """Save, undisturbed or not; `over`: replace an earlier checkpoint of the run, if there is one."""
        self._count += 1
        save_id = SaveId(1 + run, self._count, RUNS[run])
        older = [path for path, (found, _) in self.expected.items() if found.run_id == RUNS[run]]
        path = older[visit % len(older)] if over and older else str(self.path / f"step-{self._count}")

        def write(resumed: bool = False) -> None:
            with snapshot_of(save_id, values) as snapshot:  # a forked process has no such memory
                self._write(path, snapshot, resumed)

        if how in ("killed", "killed, continued"):
            in_a_process_that_is_killed(visit, write)
            self._history = ShardHistory()
            if how == "killed, continued":
                write(resumed=True)
        elif how == "failed":
            with contextlib.suppress(OSError), observed(at_visit(visit, fail)):
                write()
        else:
            write()
        found = found_at(path, self._store)
        if found is not None and found.state == COMMITTED and found.manifest and found.manifest.save_id == save_id:
            self.expected[path] = (save_id, values)
        else:
            assert how in ("killed", "failed")

    def _write(self, path: str, snapshot: Snapshot, resumed: bool) -> None:
        store, save_id = self._store, snapshot.save_id
        if not (resumed and is_committed(path, save_id, store=store)):
            prepare_directory(path, save_id=save_id, store=store, fsync=True, overwrite=True, resumed=resumed)
            writer = snapshot.writer(path, RecordingFiles(), history=self._history, overwrite=True, mirror=self._mirror)
            with ThreadPoolExecutor(2) as pool:
                result = resume_rank_files(writer, pool)[0] if resumed else writer.write(pool)
            publish(path, manifest_of(result, save_id=save_id), store=store, overwrite=True)
            self.n_linked += sum(shard.origin is not None for shard in writer.shards)
        remove_leftovers(path, save_id, store=store)

    def retain(self, number: int) -> None:
        """Remove one checkpoint, whichever it is."""
        if self.expected:
            path = sorted(self.expected)[number % len(self.expected)]
            save_id, _ = self.expected.pop(path)
            assert remove_checkpoint(path, save_id, self._store, package="test")

    def collect(self) -> None:
        """Remove what was never committed."""
        for path in self.path.iterdir():
            collect(str(path), self._store, GarbageRules(now=time.time() + 3600, older_than_s=60), package="test")

    def restart(self) -> None:
        """Replace the process that saves."""
        self._history = ShardHistory()

    def change_mirror(self) -> None:
        """Let the next saves have a mirror in an object store, or none: blocks with one checksum of another size."""
        self._mirror = "" if self._mirror else "s3://bucket/a"

    def check(self) -> None:
        """Load every checkpoint that is listed: it is what must be, bit for bit."""
        for path in map(str, self.path.iterdir()):
            found = found_at(path, self._store)
            is_listed = found is not None and found.state == COMMITTED
            assert is_listed == (path in self.expected)
            if is_listed:
                save_id, values = self.expected[path]
                assert found is not None and found.manifest is not None and found.manifest.save_id == save_id
                with snapshot_of(save_id, values) as snapshot:
                    check_loads(path, snapshot)
        assert all(map(os.path.isdir, self.expected))

    def verify(self) -> None:
        """Check that nothing is wrong with the files of a checkpoint either that no load reads."""
        for path in self.expected:
            assert verify_checkpoint(path, Files()).faults == []


def snapshot_of(save_id: SaveId, values: Values) -> Snapshot:
    snapshot = Snapshot(LENGTHS, save_id=save_id, n_parts=3)
    for (fqn, chunk), value in zip(snapshot.chunks.items(), values, strict=True):
        # one byte differs: that the rest is equal must not be enough
        snapshot.values[fqn] = snapshot.values[fqn][:-1] + bytes([value])
        start = snapshot.parts[chunk.part].offset + chunk.offset_bytes
        snapshot.image[start : start + chunk.nbytes] = snapshot.values[fqn]
    return snapshot


def check_loads(path: str, snapshot: Snapshot) -> None:
    found = asyncckpt.load(path, source="disk")
    assert list(found) == list(snapshot.values)
    for fqn, value in snapshot.values.items():
        assert (found[fqn].dtype, found[fqn].shape) == (torch.uint8, (len(value),))
        assert ctypes.string_at(found[fqn].data_ptr(), len(value)) == value


HOW = st.sampled_from(["whole", "whole", "whole", "failed", "killed", "killed, continued"])
VALUES = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 3))
SAVE = st.tuples(st.just("save"), st.integers(0, 1), VALUES, st.booleans(), HOW, st.integers(0, MAX_POINTS))
OTHER = st.one_of(
    st.tuples(st.just("retain"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["collect", "restart", "change_mirror"])),
)


@settings(deadline=None, max_examples=int(os.environ.get("ASYNCCKPT_TEST_ORDERS", "40")))
@given(st.lists(st.one_of(SAVE, SAVE, SAVE, OTHER), min_size=2, max_size=14))
def test_every_listed_checkpoint_is_whole_whatever_happened_around_it(steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Root(Path(directory))
        for name, *arguments in steps:
            getattr(root, name)(*arguments)
            root.check()
        root.verify()


def test_such_orders_link_shards(tmp_path: Path) -> None:
    root, rng = Root(tmp_path), random.Random(0)
    for number in range(12):
        root.save(0, (0, number % 2, number % 3), False, "whole", 0)
        if number % 3 == 2:
            root.retain(rng.randrange(9))
        root.check()
    root.verify()
    assert root.n_linked > 12
