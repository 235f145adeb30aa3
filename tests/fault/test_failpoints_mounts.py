"""Kills, errors and long waits at every named instant of saves on mounts without links and renameat2.

Promises P1, P2, P3, P4 and P10 where a manifest is created exclusively and then filled: the old checkpoint or the new
one, or none; never a success with damage; the next save works, and gc cleans up.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, CommitUnknownError
from asyncckpt.format.manifest import encode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of, temporary_manifest_name
from asyncckpt.maintenance.gc import GarbageRules, collect
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, candidates_in, found_at
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.mounts import probe
from asyncckpt.storage.verification import verify_checkpoint
from tests import mounts
from tests.failing_process import At, fail, killed
from tests.failpoint_groups import MOUNTS
from tests.limited_files import LimitedFiles
from tests.mounts import needs_root
from tests.storage_samples import SAVE_ID, Snapshot, manifest_of, some_of

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("unprobed")]

OLD, NEW, NEXT = (SaveId(1, sequence, SAVE_ID.run_id) for sequence in range(3))
ALL_OLD = GarbageRules(now=4e9, older_than_s=60.0)
Place = tuple[pathlib.Path, Callable[[], Files]]


@pytest.fixture(params=["calls", pytest.param("mount", marks=[pytest.mark.root, needs_root])])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Place]:
    """A directory on a mount without links, and what makes its calls."""
    if request.param == "calls":
        yield tmp_path, lambda: LimitedFiles("links")
        return
    with mounts.fuse(tmp_path / "mounted") as served:
        served.tell(lacks=["links", "cuts"])
        yield served.path, Files


def save(save_id: SaveId, path: pathlib.Path, files: Files, *, overwrite: bool = False) -> None:
    """Save in this process, from a process that knows nothing of the mount."""
    probe._known.clear()
    with Snapshot({"a": 70_000, "b": 3}, save_id=save_id, seed=save_id.sequence) as snapshot:
        snapshot.save(str(path), files, overwrite=overwrite)
    remove_leftovers(str(path), save_id, store=LocalStore(files))


def fresh(path: pathlib.Path, files: Files) -> None:
    save(NEW, path, files)


def over(path: pathlib.Path, files: Files) -> None:
    save(NEW, path, files, overwrite=True)


def collected(path: pathlib.Path, files: Files) -> None:
    probe._known.clear()
    done = collect(str(path), LocalStore(files), ALL_OLD, package="test")
    if done is not None and done.error is not None:
        raise CommitUnknownError("gc") from done.error


def leave_torn(path: pathlib.Path, files: Files) -> None:
    """Leave what a writer leaves that was killed while it filled the manifest."""
    prepare_directory(str(path), save_id=OLD, store=LocalStore(files), fsync=False)
    with Snapshot({"a": 70_000}, save_id=OLD) as snapshot:
        whole = encode_manifest(manifest_of(snapshot.write(str(path), files), save_id=OLD))
    (path / temporary_manifest_name(OLD)).write_bytes(whole)
    (path / MANIFEST_NAME).write_bytes(whole[: len(whole) // 2])


def leave_old(path: pathlib.Path, files: Files) -> None:
    save(OLD, path, files)


def leave_nothing(path: pathlib.Path, files: Files) -> None:
    """Nothing is there."""


Step = Callable[[pathlib.Path, Files], None]
SCENARIOS: dict[str, tuple[Step, Step, SaveId | None, SaveId | None]] = {
    "save": (leave_nothing, fresh, None, NEW),
    "overwrite": (leave_old, over, OLD, NEW),
    "save after a torn one": (leave_torn, fresh, None, NEW),
    "overwrite after a torn one": (leave_torn, over, None, NEW),
    "gc after a torn one": (leave_torn, collected, None, None),
}
"""Name -> what is left before, what is under test, and which save stands before and after."""


def standing(path: pathlib.Path, files: Files) -> SaveId | None:
    """Return the save that is committed at `path`, every byte looked at; None: nothing is listed there."""
    store = LocalStore(files)
    if not path.parent.exists():
        return None
    found = found_at(str(path), store)
    if found is None or found.state in (INCOMPLETE, ABANDONED):
        assert candidates_in(str(path.parent), store) == []
        return None
    assert found.state == COMMITTED and found.manifest is not None, found
    assert verify_checkpoint(str(path), files).faults == []
    return found.manifest.save_id


def check_after(path: pathlib.Path, files: Files, allowed: set[SaveId | None], what: str) -> SaveId | None:
    """Check that one of `allowed` stands, and that the next save works, and leaves nothing of the others."""
    found = standing(path, files)
    assert found in allowed, f"{what}: {found}"
    save(NEXT, path, files, overwrite=True)
    assert standing(path, files) == NEXT, what
    assert {owner_of(name) for name in os.listdir(path)} - {None} == {NEXT}, what
    return found


def trace_of(scenario: str, root: pathlib.Path, files: Callable[[], Files]) -> list[tuple[str, int]]:
    """Return every point that a scenario reaches, as (point, which time)."""
    before, step, *_ = SCENARIOS[scenario]
    before(root / "rehearsal" / "x", files())
    observer = At("trainer: slot taken", lambda: None)
    with observed(observer):
        step(root / "rehearsal" / "x", files())
    assert set(MOUNTS.get(scenario, ())) <= set(observer.trace)
    return [(point, observer.trace[: n + 1].count(point)) for n, point in enumerate(observer.trace)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_point_leaves_the_old_checkpoint_or_the_new_one_or_none(place: Place, scenario: str) -> None:
    root, files = place
    before, step, old, new = SCENARIOS[scenario]
    order = []
    for n, (point, visit) in enumerate(trace_of(scenario, root, files)):
        path = root / str(n) / "x"
        before(path, files())
        killed(lambda path=path: step(path, files()), point, visit)  # type: ignore[misc]
        order.append(check_after(path, files(), {old, new}, f"killed at {point!r} ({visit})"))
    assert sum(a != b for a, b in itertools.pairwise(order)) == (old != new), order


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_point_is_never_a_success_with_damage(place: Place, scenario: str) -> None:
    root, files = place
    before, step, old, new = SCENARIOS[scenario]
    for n, (point, visit) in enumerate(trace_of(scenario, root, files)):
        path = root / str(n) / "x"
        before(path, files())
        try:
            with observed(At(point, lambda: fail(errno.EIO), visit)):
                step(path, files())
        except CommitUnknownError:
            allowed = {old, new}
        except (AsyncCkptError, OSError):
            # What fails once the save is durable, when files of others are removed, is not the save's failure.
            allowed = {new} if point == "leftovers: removing" else {old}
        else:
            allowed = {new}
        check_after(path, files(), allowed, f"EIO at {point!r} ({visit})")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whoever_looks_while_a_point_is_held_finds_the_old_checkpoint_or_the_new_one_or_none(
    place: Place, scenario: str
) -> None:
    root, files = place
    before, step, old, new = SCENARIOS[scenario]
    for n, (point, visit) in enumerate(trace_of(scenario, root, files)):
        path, seen = root / str(n) / "x", list[SaveId | None]()
        before(path, files())
        with observed(At(point, lambda path=path, seen=seen: seen.append(standing(path, files())), visit)):  # type: ignore[misc]
            step(path, files())
        assert len(seen) == 1 and seen[0] in (old, new), f"{point}: {seen}"
        assert standing(path, files()) == new


@pytest.mark.parametrize("scenario", ["save", "save after a torn one"])
def test_gc_cleans_up_after_a_kill_at_any_point(place: Place, scenario: str) -> None:
    root, files = place
    before, step, *_ = SCENARIOS[scenario]
    for n, (point, visit) in enumerate(trace_of(scenario, root, files)):
        path = root / str(n) / "x"
        before(path, files())
        killed(lambda path=path: step(path, files()), point, visit)  # type: ignore[misc]
        stands = standing(path, files())
        if path.exists():
            collected(path, files())
            assert {owner_of(name) for name in os.listdir(path)} - {None} <= {stands}, point
        assert standing(path, files()) == stands


class FailingMount(LimitedFiles):
    """A mount without links whose `nth` call, from 1, fails; `late`: it is done all the same."""

    def __init__(self, nth: int, code: int, *, late: bool) -> None:
        super().__init__("links")
        self.nth, self.code, self.late = nth, code, late

    def fails(self, late: bool) -> None:
        if late == self.late and len(self.calls) == self.nth:
            raise OSError(self.code, "injected")

    def before(self, name: str, args: Sequence[Any]) -> None:
        super().before(name, args)
        self.fails(late=False)

    def after(self, name: str, args: Sequence[Any]) -> None:
        try:
            self.fails(late=True)
        except OSError:
            for fd in [fd for fd, path in self.paths.items() if name == "open" and path == args[0]]:
                os.close(fd)
                del self.paths[fd]
            raise


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EPERM])
@pytest.mark.parametrize("scenario", ["save", "save after a torn one"])
def test_a_failure_of_any_call_is_never_a_success_with_damage(
    tmp_path: pathlib.Path, rng: random.Random, scenario: str, code: int, late: bool
) -> None:
    before, _, old, new = SCENARIOS[scenario]

    def publishes(path: pathlib.Path, files: Files) -> None:  # what is removed afterwards fails no save
        probe._known.clear()
        with Snapshot({"a": 70_000, "b": 3}, save_id=NEW) as snapshot:
            snapshot.save(str(path), files)

    files = LimitedFiles("links")
    before(tmp_path / "rehearsal" / "x", files)
    n_before = len(files.calls)
    publishes(tmp_path / "rehearsal" / "x", files)
    for nth in some_of(len(files.calls) - n_before, rng):
        path = tmp_path / str(nth) / "x"
        before(path, LimitedFiles("links"))
        try:
            publishes(path, FailingMount(nth, code, late=late))
        except CommitUnknownError:
            allowed = {old, new}
        except (AsyncCkptError, OSError):
            allowed = {old}
        else:
            allowed = {new}
        check_after(path, LimitedFiles("links"), allowed, f"call {nth} fails")


def test_of_processes_that_save_to_one_path_at_once_one_wins(place: Place) -> None:
    root, files = place
    for n in range(5):
        path, (gate, opener) = root / str(n) / "x", os.pipe()
        works = [functools.partial(compete, sequence, path, files(), (gate, opener)) for sequence in range(3)]
        pids = [forked(work) for work in works]
        os.close(gate)
        os.close(opener)  # now they go
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert sorted(codes) == [WON, LOST, LOST], codes
        found = standing(path, files())
        assert found is not None and found.sequence == codes.index(WON)


WON, LOST = 10, 11


def forked(work: Callable[[], int]) -> int:
    """Do `work` in a child that ends with what it returns, and return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return pid


def compete(sequence: int, path: pathlib.Path, files: Files, gate: tuple[int, int]) -> int:
    """Write the files of a save, wait for the gate, and try to commit it."""
    os.close(gate[1])
    save_id = SaveId(1, sequence, SAVE_ID.run_id)
    with Snapshot({"a": 10}, save_id=save_id) as snapshot:
        try:
            prepare_directory(str(path), save_id=save_id, store=LocalStore(files), fsync=True)
            manifest = manifest_of(snapshot.write(str(path), files), save_id=save_id)
            os.read(gate[0], 1)
            publish(str(path), manifest, store=LocalStore(files))
        except CheckpointExistsError:
            return LOST
    return WON
