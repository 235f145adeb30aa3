"""Random orders of saves that link, kills, failures, retention and gc: what is listed is loaded bit for bit.

P1, P2, P3 and P10 where checkpoints share files. In a directory, a kill is a SIGKILL of a forked process at one of the
named instants of a save; what it had in memory is gone with it. In an object store, where a forked process can do
nothing, no request of the process takes effect any more; and copies may be made after their save was given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from storage_samples import RecordingFiles, Snapshot, manifest_of

import asyncckpt
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.names import SaveId
from asyncckpt.maintenance.gc import GarbageRules, collect
from asyncckpt.maintenance.retention import remove_checkpoint
from asyncckpt.storage import locate
from asyncckpt.storage.catalog import COMMITTED, found_at
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.cloud.object_store import ObjectStore
from asyncckpt.storage.commit import publish, remove_leftovers
from asyncckpt.storage.files import COPY_UNKNOWN, Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.recovery import is_committed, resume_rank_files
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.store import Store
from asyncckpt.storage.verification import verify_checkpoint
from tests import object_servers

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

object_servers.start_runtime()

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


class Answer(NamedTuple):
    """How a store answers a request to copy an object.

    Attributes:
        copies: Whether it has made the copy before it answers.
        copies_late: Whether it makes it, or makes it again, at some time afterwards.
        error: What obstore then raises; "": nothing.
        is_known: Whether `error` says that no copy is made.
    """

    copies: bool
    copies_late: bool
    error: str = ""
    is_known: bool = True


NO_ANSWER = "error sending request"
REFUSED = "Server returned non-2xx status code: 400 Bad Request: too large"
COPIED = Answer(True, False)
LATE = Answer(False, True, NO_ANSWER, is_known=False)
LATE_OF_TWO = Answer(False, True, f"in 2 s, after 3 retries, max_retries: 12 - {REFUSED}", is_known=False)
ANSWERS = (
    COPIED,
    Answer(True, True),
    Answer(False, False, f"in 2 ms - {REFUSED}"),
    Answer(True, False, NO_ANSWER, is_known=False),
    LATE,
    LATE_OF_TWO,
)

Answers = Sequence[Answer]
"""For the shards of a save, in their order."""

ALL_COPIED = (COPIED,) * len(LENGTHS)


class Directory:
    """A directory, processes that save to it, and their deaths.

    Attributes:
        root: Its path.
        store: The store that holds it.
        answers: Of a store that copies, for the next save.
        overwrites: Whether a save may replace a checkpoint.
    """

    overwrites = True

    def __init__(self, root: str) -> None:
        self.root, self.store, self.answers = root, LocalStore(RecordingFiles()), ()

    def files(self) -> Files:
        return RecordingFiles()

    def until_killed(self, visit: int, do: Callable[[], None]) -> None:
        """Do something in a process that is killed at the `visit`-th instant, from 0."""
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

    def end_copies(self) -> None:
        """Make the copies that are late: a link never is."""


class Killed(BaseException):
    """The process that saves was killed."""


class Client:
    """A client of obstore's, of objects in memory, in a process that may be dead.

    Attributes:
        answers: How the store answers the next requests to copy.
        late: Name and content of the copies that it has still to make.
        is_dead: Whether the process is dead, so that its requests do nothing.
        dies_waiting: Whether the process is killed when an answer does not come.
    """

    def __init__(self) -> None:
        self._memory = object_servers.memory_store()
        self.answers: Answers = ()
        self.late: list[tuple[str, bytes]] = []
        self.is_dead = self.dies_waiting = False

    def die(self) -> None:
        self.is_dead = True
        raise Killed

    def memory(self) -> Any:
        """Return the store of obstore's, if the process is alive."""
        if self.is_dead:
            raise Killed
        return self._memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory(), name)

    def copy(self, source: str, target: str) -> None:
        from obstore.exceptions import GenericError

        content = bytes(self.get(source).bytes())
        number = re.search(r"-part-(\d+)\.", target)
        assert number is not None
        answer = self.answers[int(number[1])]
        if answer.copies:
            self.put(target, content)
        if answer.copies_late:
            self.late.append((target, content))
        if not answer.is_known and self.dies_waiting:
            self.die()
        if answer.error:
            raise GenericError(answer.error)


class BucketStore(ObjectStore):
    """Of a `Client`, whose uploads are those of obstore."""

    def _open_upload(self, name: str, part_nbytes: int, at_a_time: int) -> Any:
        return ObjectStore(self.root, client=self._client.memory())._open_upload(name, part_nbytes, at_a_time)


class Bucket:
    """An object store, processes that save to it, and their deaths. Attributes as of `Directory`."""

    root = "gs://bucket/runs"
    overwrites = False

    def __init__(self) -> None:
        self._client = Client()
        self.store = BucketStore("gs://bucket", client=self._client)

    @property
    def answers(self) -> Answers:
        return self._client.answers

    @answers.setter
    def answers(self, given: Answers) -> None:
        self._client.answers = given

    def files(self) -> Files:
        return self.store.as_files()

    def until_killed(self, visit: int, do: Callable[[], None]) -> None:
        """Do something in a process that is killed at the `visit`-th instant, or while it waits for a copy."""
        client = self._client
        client.dies_waiting = visit % 2 == 0
        try:
            with contextlib.suppress(Killed), observed(at_visit(visit, client.die)):
                do()
        finally:
            client.is_dead = client.dies_waiting = False

    def end_copies(self) -> None:
        """Make the copies that are late."""
        for target, content in self._client.late:
            self._client.put(target, content)
        self._client.late.clear()


Place = Directory | Bucket


@contextlib.contextmanager
def in_a_directory() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as directory:
        yield Directory(directory)


@contextlib.contextmanager
def in_a_bucket() -> Iterator[Place]:
    place = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "_stores", {})
        patch.setattr(locate, "_opened", lambda *_: place.store)
        yield place


class Root:
    """A place of checkpoints, and what must be in it.

    Attributes:
        expected: Path -> the save that must be committed there, and its values.
        n_linked: Shards that were linked.
    """

    def __init__(self, place: Place) -> None:
        self.expected: dict[str, tuple[SaveId, Values]] = {}
        self.n_linked = 0
        self._place = place
        self._store: Store = place.store
        self._count, self._mirror = 0, ""
        self._runs: dict[str, int] = {}  # by path, also where nothing was committed
        self._history = ShardHistory()

    def save(self, run: int, values: Values, over: bool, how: str, visit: int, answers: Answers) -> None:
        """Save, undisturbed or not; `over`: to a path of an earlier save of the run, if there is one."""
        self._count += 1
        save_id = SaveId(1 + run, self._count, RUNS[run])
        older = [path for path, saved in self._runs.items() if saved == run and self._may_save_to(path)]
        path = older[visit % len(older)] if over and older else f"{self._place.root}/step-{self._count}"
        self._runs[path], self._place.answers = run, answers
        try:
            self._save(path, save_id, values, how, visit)
            is_failed = how in ("killed", "failed")
        except SaveFailedError as error:
            # Nobody knows whether the store will copy; or whether the dead process has asked it to.
            assert error.code == COPY_UNKNOWN and self._store.links_may_end_late
            assert how == "killed, continued" or not all(answer.is_known for answer in answers)
            is_failed = True
        found = found_at(path, self._store)
        if found is not None and found.state == COMMITTED and found.manifest and found.manifest.save_id == save_id:
            self.expected[path] = (save_id, values)
        else:
            assert is_failed

    def _may_save_to(self, path: str) -> bool:
        return self._place.overwrites or path not in self.expected

    def _save(self, path: str, save_id: SaveId, values: Values, how: str, visit: int) -> None:
        def write(resumed: bool = False) -> None:
            with snapshot_of(save_id, values) as snapshot:  # a forked process has no such memory
                self._write(path, snapshot, resumed)

        if how in ("killed", "killed, continued"):
            self._place.until_killed(visit, write)
            self._history = ShardHistory()
            if how == "killed, continued":
                write(resumed=True)
        elif how == "failed":
            with contextlib.suppress(OSError), observed(at_visit(visit, fail)):
                write()
        else:
            write()

    def _write(self, path: str, snapshot: Snapshot, resumed: bool) -> None:
        store, save_id, overwrite = self._store, snapshot.save_id, self._place.overwrites
        if not (resumed and is_committed(path, save_id, store=store)):
            prepare_directory(path, save_id=save_id, store=store, fsync=True, overwrite=overwrite, resumed=resumed)
            files, mirror = self._place.files(), self._mirror
            writer = snapshot.writer(path, files, history=self._history, overwrite=overwrite, mirror=mirror)
            with ThreadPoolExecutor(2) as pool:
                result = resume_rank_files(writer, pool)[0] if resumed else writer.write(pool)
            publish(path, manifest_of(result, save_id=save_id), store=store, overwrite=overwrite)
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
        for path in self._paths():
            collect(path, self._store, GarbageRules(now=time.time() + 3600, older_than_s=60), package="test")

    def restart(self) -> None:
        """Replace the process that saves."""
        self._history = ShardHistory()

    def change_mirror(self) -> None:
        """Let the next saves have a mirror in an object store, or none: blocks with one checksum of another size."""
        self._mirror = "" if self._mirror else "s3://bucket/a"

    def end_copies(self) -> None:
        """Let the store make the copies that are late."""
        self._place.end_copies()

    def _paths(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):  # a prefix is there if an object is
            return [f"{self._place.root}/{name}" for name in self._store.names(self._place.root)]
        return []

    def check(self) -> None:
        """Load every checkpoint that is listed: it is what must be, bit for bit, also in files that no load reads."""
        paths = self._paths()
        for path in paths:
            found = found_at(path, self._store)
            is_listed = found is not None and found.state == COMMITTED
            assert is_listed == (path in self.expected)
            if is_listed:
                save_id, values = self.expected[path]
                assert found is not None and found.manifest is not None and found.manifest.save_id == save_id
                with snapshot_of(save_id, values) as snapshot:
                    check_loads(path, snapshot)
                assert verify_checkpoint(path, self._place.files()).faults == []
        assert self.expected.keys() <= set(paths)


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
SAVE = st.tuples(
    st.just("save"),
    st.integers(0, 1),
    VALUES,
    st.booleans(),
    HOW,
    st.integers(0, MAX_POINTS),
    st.one_of(st.just(ALL_COPIED), st.tuples(*(st.sampled_from(ANSWERS) for _ in LENGTHS))),
)
OTHER = st.one_of(
    st.tuples(st.just("retain"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["collect", "restart", "change_mirror", "end_copies"])),
)
STEP = st.sampled_from([SAVE, SAVE, SAVE, OTHER]).flatmap(lambda one: one)  # `one_of` takes each of them once


def saved_twice(how: str, answer: Answer) -> list[tuple]:
    """Return the steps of two saves of the same values, of which something happens to the second."""
    values, never = (0, 0, 0), MAX_POINTS
    first = ("save", 0, values, False, "whole", never, ALL_COPIED)
    return [first, ("save", 0, values, False, how, never, (answer,) * len(LENGTHS))]


EVERYWHERE = pytest.mark.parametrize("where", [in_a_directory, in_a_bucket])


@EVERYWHERE
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@settings(deadline=None, max_examples=int(os.environ.get("ASYNCCKPT_TEST_ORDERS", "30")))
@given(steps=st.lists(STEP, min_size=2, max_size=14))
@example(steps=saved_twice("whole", LATE))
@example(steps=saved_twice("whole", LATE_OF_TWO))
@example(steps=saved_twice("killed, continued", LATE))
def test_every_listed_checkpoint_is_whole_whatever_happened_around_it(where: Any, steps: list[tuple]) -> None:
    with where() as place:
        root = Root(place)
        for name, *arguments in (*steps, ("end_copies",)):
            getattr(root, name)(*arguments)
            root.check()


@EVERYWHERE
def test_such_orders_link_shards(where: Any) -> None:
    with where() as place:
        root, rng = Root(place), random.Random(0)
        for number in range(12):
            root.save(0, (0, number % 2, number % 3), False, "whole", 0, ALL_COPIED)
            if number % 3 == 2:
                root.retain(rng.randrange(9))
            root.check()
        assert root.n_linked > 12
