"""At every named instant of a save, a commit, an overwrite, a clean-up and a load: SIGKILL, an error, a long wait.

Promises P1, P2, P3, P4 and P10: checkpoints that stood before load as before; the one under test loads bit for bit,
or is not listed; it is never said to be written when it is not; the next save works.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from real_worker import running, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointerConfig, RankInfo, SyncCheckpointer
from asyncckpt.basics.failpoints import POINTS, observed
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CommitUnknownError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId, owner_of
from asyncckpt.maintenance.gc import GarbageRules, collect
from asyncckpt.maintenance.retention import remove_checkpoint
from asyncckpt.memory.slot import SlotControl
from asyncckpt.protocol import messages
from asyncckpt.storage.catalog import found_at
from asyncckpt.storage.checkpoint_dir import manifest_if_readable
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from asyncckpt.sync.writer import SyncWriter
from asyncckpt_worker.config import WorkerConfig
from asyncckpt_worker.service.daemon import Daemon
from tests.failing_process import ACTIONS, At, fail, kill, killed
from tests.failpoint_groups import grouped
from tests.storage_samples import RecordingFiles, failing
from tests.torch_free_client import Client, Snapshot

pytestmark = pytest.mark.fault

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / '.typing'}"}
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EINTR]
EARLIER, OLD, NEW, NEXT = range(4)


def state(n: int) -> dict[str, Any]:
    return {"n": n, "w": torch.full((3000,), n), "b": [torch.arange(7) + n]}


def is_state(found: Any, n: int) -> bool:
    return bool(
        found["n"] == n and torch.equal(found["w"], state(n)["w"]) and torch.equal(found["b"][0], state(n)["b"][0])
    )


def save(n: int, path: pathlib.Path, files: Files | None = None, hook: object = None, **fields: Any) -> None:
    """Save in this process: the same storage steps as a worker's. Its fsync does nothing."""
    config = CheckpointerConfig(**{"rank_info": RankInfo(0, 1), **fields})
    ranks = Coordination(RankInfo(0, 1), config, lambda: pytest.fail("no ranks here"), package="test")
    writer = SyncWriter(config, ranks, HookRunner(hook), files or RecordingFiles())
    with SyncCheckpointer(writer, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state(n), path)


# ---- the scenarios --------------------------------------------------------------------------------------------------


def fresh(path: pathlib.Path) -> None:
    save(NEW, path)


class Hook:
    """One that has nothing against it."""

    def pre_commit(self, path: str, **kw: object) -> None:
        """Agree."""


def hooked(path: pathlib.Path) -> None:
    save(NEW, path, hook=Hook())


def over(path: pathlib.Path) -> None:
    save(NEW, path, overwrite=True)


def dcp(path: pathlib.Path) -> None:
    save(NEW, path, layout="dcp")


def dcp_over(path: pathlib.Path) -> None:
    save(NEW, path, layout="dcp", overwrite=True)


def fails(path: pathlib.Path) -> None:
    save(NEW, path, failing("open", errno.EIO, at=".index"))


def collected(path: pathlib.Path) -> None:
    rules = GarbageRules(now=time.time() + 3600, older_than_s=60)
    done = collect(str(path), LocalStore(RecordingFiles()), rules, package="test")
    if done is not None and done.error is not None:
        raise CommitUnknownError("gc") from done.error


def retired(path: pathlib.Path) -> None:
    """What retention does with a checkpoint that may go."""
    standing = manifest_if_readable(str(path), LocalStore())
    assert standing is not None
    try:
        remove_checkpoint(str(path), standing.save_id, LocalStore(RecordingFiles()), package="test")
    except OSError as error:
        raise CommitUnknownError("retention") from error


def leave_garbage(scenario: str, path: pathlib.Path) -> None:
    """Leave what `gc` is for: beside the checkpoint, or in its place."""
    if scenario == "gc of an attempt":
        (path / "manifest.json").unlink()
    elif scenario == "gc beside a checkpoint":
        save(NEXT, path.with_name("other"))
        for file in path.with_name("other").glob("rank-*"):
            file.rename(path / file.name)
        shutil.rmtree(path.with_name("other"))


SCENARIOS: dict[str, tuple[Callable[[pathlib.Path], None], dict[str, Any] | None]] = {
    "fresh": (fresh, None),
    "with a hook": (hooked, None),
    "overwrite": (over, {}),
    "dcp": (dcp, None),
    "dcp over dcp": (dcp_over, {"layout": "dcp"}),
    "dcp over safetensors": (dcp_over, {}),
    "a save that fails": (fails, None),
    "gc of an attempt": (collected, {}),
    "gc beside a checkpoint": (collected, {}),
    "retention": (retired, {}),
    "retention of dcp": (retired, {"layout": "dcp"}),
}
"""Name -> what is under test, and with what fields the save was made that stands there before; None: none does."""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """For each scenario a root with what stands before it."""
    base = tmp_path_factory.mktemp("templates")
    made = {}
    for number, (name, (_, before)) in enumerate(SCENARIOS.items()):
        made[name] = base / str(number)
        save(EARLIER, made[name] / "earlier")
        if before is not None:
            save(OLD, made[name] / "x", **before)
            (made[name] / "x" / "notes.txt").write_text("mine")
            leave_garbage(name, made[name] / "x")
    return made


def standing(path: pathlib.Path) -> int | None:
    """Return which state stands at `path`, read and compared bit for bit; None where nothing is listed."""
    found = found_at(str(path), LocalStore())
    if found is None or found.state in ("incomplete", "abandoned"):
        with pytest.raises((CheckpointNotFoundError, CheckpointNotCommittedError)):
            asyncckpt.load(path)
        return None
    assert found.state == "committed", found
    assert verify_checkpoint(str(path), Files()).faults == []
    loaded = asyncckpt.load(path)
    assert is_state(loaded, loaded["n"])
    return int(loaded["n"])


def check_after(root: pathlib.Path, allowed: set[int | None], what: str, *, goes_on: bool = True) -> int | None:
    """The invariants, and that the next save works."""
    found = standing(root / "x")
    assert found in allowed, f"{what}: {found}"
    assert is_state(asyncckpt.load(root / "earlier"), EARLIER), what
    newest = root / ("earlier" if found is None else "x")
    assert asyncckpt.latest_checkpoint(root) == str(newest), what
    if goes_on:
        save(NEXT, root / "x", overwrite=True)
        assert standing(root / "x") == NEXT, what
        if found is not None and found == OLD:
            assert (root / "x" / "notes.txt").read_text() == "mine"
    return found


def trace_of(scenario: str, templates: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> list[tuple[str, int]]:
    """Return every point that a scenario reaches, as (point, which time)."""
    root = tmp_path / "rehearsal"
    shutil.copytree(templates[scenario], root)
    observer = At("trainer: slot taken", lambda: None)
    with observed(observer), contextlib.suppress(OSError):
        SCENARIOS[scenario][0](root / "x")
    shutil.rmtree(root)
    return [(point, observer.trace[: n + 1].count(point)) for n, point in enumerate(observer.trace)]


def before_and_after(scenario: str) -> tuple[int | None, int | None]:
    old = None if SCENARIOS[scenario][1] is None or scenario == "gc of an attempt" else OLD
    if scenario.startswith("retention"):
        return old, None
    return old, (old if scenario == "a save that fails" or scenario.startswith("gc ") else NEW)


# ---- all points, and all of them reached ----------------------------------------------------------------------------


def calls_of(name: str) -> list[tuple[pathlib.Path, ast.Call]]:
    found = []
    for package in ("asyncckpt", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and name in (
                    getattr(node.func, "id", ""),
                    getattr(node.func, "attr", ""),
                ):
                    found.append((path, node))
    return found


def test_every_point_is_in_the_code_once_and_every_one_in_the_code_is_named() -> None:
    named = []
    for path, call in calls_of("reach"):
        assert len(call.args) == 1 and isinstance(call.args[0], ast.Constant), f"{path}:{call.lineno}"
        named.append(call.args[0].value)
    assert sorted(named) == sorted(POINTS)


def test_nothing_but_tests_can_arm_a_point() -> None:
    assert calls_of("observed") == []
    source = (ROOT / "asyncckpt" / "basics" / "failpoints.py").read_text()
    assert "environ" not in source and "import os" not in source
    for package in ("asyncckpt", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "failpoints.py":
                assert "failpoints import reach\n" in path.read_text() or "failpoints" not in path.read_text(), path


def test_every_point_is_reached(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what is under test here; the others by the tests that `tests.failpoint_groups` names: each sees to that."""
    reached = {point for scenario in SCENARIOS for point, _ in trace_of(scenario, templates, tmp_path)}
    seen = At("trainer: withdrawing", lambda: None)
    with serving(endpoint), observed(seen), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        checkpointer.save(state(NEW), tmp_path / "a").written.result(60)
        asyncckpt.load(tmp_path / "a")
        put_aside_the_broken(broken_root(templates, tmp_path / "broken"))
        monkeypatch.setattr(SlotControl, "open", lambda *_: fail())
        assert checkpointer.save(state(NEW), tmp_path / "b").written.exception(60) is not None
    assert reached | set(seen.trace) | grouped() == set(POINTS)


# ---- storage: kill, raise, hold -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_point_leaves_the_old_checkpoint_or_the_new_one(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, scenario: str
) -> None:
    before, after = before_and_after(scenario)
    order = []
    for n, (point, visit) in enumerate(trace_of(scenario, templates, tmp_path)):
        root = tmp_path / str(n)
        shutil.copytree(templates[scenario], root)
        pid = os.fork()
        if pid == 0:
            try:
                with observed(At(point, kill, visit)):
                    SCENARIOS[scenario][0](root / "x")
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{point} was not reached"
        order.append(check_after(root, {before, after}, f"killed at {point!r} ({visit})"))
        shutil.rmtree(root)
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == (before != after), f"the old one up to an instant, the new one from there on: {order}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_any_point_is_never_a_success_with_damage(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, scenario: str, rng: random.Random
) -> None:
    before, after = before_and_after(scenario)
    for n, (point, visit) in enumerate(trace_of(scenario, templates, tmp_path)):
        root, code = tmp_path / str(n), rng.choice(CODES)
        shutil.copytree(templates[scenario], root)
        what = f"{errno.errorcode[code]} at {point!r} ({visit})"
        try:
            with observed(At(point, lambda code=code: fail(code), visit)):  # type: ignore[misc]
                SCENARIOS[scenario][0](root / "x")
        except CommitUnknownError:
            allowed: set[int | None] = {before, after}
        except AsyncCkptError:
            allowed = {before}
        else:
            allowed = {after}
        check_after(root, allowed, what)
        shutil.rmtree(root)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whoever_looks_while_a_point_is_held_finds_the_old_checkpoint_or_the_new_one(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, scenario: str
) -> None:
    """The long wait: the save stands still as long as the reader takes. And nothing comes of it in the end."""
    before, after = before_and_after(scenario)
    looking = threading.local()

    for n, (point, visit) in enumerate(trace_of(scenario, templates, tmp_path)):
        root = tmp_path / str(n)
        shutil.copytree(templates[scenario], root)
        seen: list[int | None] = []

        def hold(root: pathlib.Path = root, point: str = point, seen: list[int | None] = seen) -> None:
            if not getattr(looking, "now", False):
                looking.now = True
                seen.append(check_after(root, {before, after}, f"held at {point!r}", goes_on=False))
                looking.now = False

        with observed(At(point, hold, visit)), contextlib.suppress(AsyncCkptError):
            SCENARIOS[scenario][0](root / "x")
        assert seen, point
        check_after(root, {after}, f"after it was held at {point!r}")
        shutil.rmtree(root)


# ---- what is left over ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name.startswith("gc ")])
def test_what_a_killed_gc_leaves_the_next_one_removes(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, scenario: str
) -> None:
    points = trace_of(scenario, templates, tmp_path)
    assert {"gc: nothing removed", "gc: removing"} <= {point for point, _ in points}
    for n, (point, visit) in enumerate(points):
        root = tmp_path / str(n)
        shutil.copytree(templates[scenario], root)
        killed(lambda root=root: SCENARIOS[scenario][0](root / "x"), point, visit)  # type: ignore[misc]
        collected(root / "x")
        left = sorted(name for name in os.listdir(root / "x") if owner_of(name) is not None)
        stands = before_and_after(scenario)[1]
        assert standing(root / "x") == stands
        assert stands is not None or left == [], f"{point}: {left}"
        assert len({owner_of(name) for name in left}) == (stands is not None), f"{point}: {left}"
        assert (root / "x" / "notes.txt").read_text() == "mine"
        shutil.rmtree(root)


def broken_root(templates: dict[str, pathlib.Path], root: pathlib.Path) -> pathlib.Path:
    """Return a directory with a sound checkpoint and a newer one of which a byte was lost."""
    shutil.copytree(templates["overwrite"], root)
    (shard,) = (root / "x").glob("rank-*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    return root


def put_aside_the_broken(root: pathlib.Path) -> asyncckpt.RestoredCheckpoint:
    return asyncckpt.restore_latest(root, quarantine=True)


@pytest.mark.parametrize("point", [p for p in POINTS if p.startswith("quarantine: ")])
@pytest.mark.parametrize("action", ["kill", "raise", "sleep"])
def test_whatever_meets_a_quarantine_the_broken_one_has_one_of_two_names_and_the_good_one_is_loaded(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, action: str, point: str
) -> None:
    root = broken_root(templates, tmp_path / "root")
    if action == "kill":
        killed(lambda: put_aside_the_broken(root), point)
    else:
        observer = At(point, ACTIONS[action])
        with observed(observer):
            found = put_aside_the_broken(root)
        assert observer.met and is_state(found.state_dict, EARLIER)
    is_moved = action == "sleep" or point == "quarantine: renamed"
    name = "x.broken-1" if is_moved else "x"
    assert sorted(os.listdir(root)) == sorted(["earlier", name])
    assert (root / name / "notes.txt").read_text() == "mine"
    again = put_aside_the_broken(root)
    assert is_state(again.state_dict, EARLIER) and len(again.skipped) == (not is_moved)
    assert sorted(os.listdir(root)) == ["earlier", "x.broken-1"]


# ---- loads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["kill", "raise", "sleep"])
def test_a_load_gives_the_saved_values_or_a_typed_error_whatever_meets_it(
    templates: dict[str, pathlib.Path], tmp_path: pathlib.Path, action: str, rng: random.Random
) -> None:
    root = tmp_path / "root"
    shutil.copytree(templates["overwrite"], root)
    recorder = At("trainer: slot taken", lambda: None)
    with observed(recorder):
        asyncckpt.load(root / "x")
    points = [p for p in POINTS if p.startswith("load: ") and p not in grouped()]
    assert set(points) == set(recorder.trace)
    for point, code in ((p, rng.choice(CODES)) for p in points):
        if action == "kill":
            pid = os.fork()
            if pid == 0:
                try:
                    with observed(At(point, kill)):
                        asyncckpt.load(root / "x")
                finally:
                    os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
        elif action == "raise":
            goes_on = (point, code) == ("load: shard opened", errno.EMFILE)  # with fewer files open at once
            with observed(At(point, lambda code=code: fail(code))):  # type: ignore[misc]
                if goes_on:
                    assert is_state(asyncckpt.load(root / "x"), OLD)
                else:
                    with pytest.raises(OSError) as caught:
                        asyncckpt.load(root / "x")
                    assert caught.value.errno == code
        else:  # held while another save takes the place: the old values or the new ones, never of both
            shutil.rmtree(root)
            shutil.copytree(templates["overwrite"], root)
            with observed(At(point, lambda: save(NEW, root / "x", overwrite=True))):
                found = asyncckpt.load(root / "x")
            assert is_state(found, found["n"]), point
            assert standing(root / "x") == NEW
            continue
        check_after(root, {OLD}, f"{action} at {point!r}", goes_on=False)


# ---- trainer and worker ---------------------------------------------------------------------------------------------

LINEAGE = "worker: lineage asked for"
WORKER_POINTS = [p for p in POINTS if p.startswith("worker: ") and p not in grouped()]
TRAINER_POINTS = [
    p for p in POINTS if p.startswith(("trainer: ", "slot: ")) and p not in grouped() and p != "trainer: withdrawing"
]
OF_FIRST_SAVES = ("worker: slot asked for", "worker: filling pages", LINEAGE)
HARMLESS = ("worker: filling pages",)
"""An error there costs no save."""


@contextlib.contextmanager
def serving(endpoint: str) -> Iterator[Daemon]:
    """A worker in a thread of this process: so one observer sees both sides."""
    daemon = Daemon(WorkerConfig(endpoint=endpoint), RecordingFiles())
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        yield daemon
    finally:
        daemon.stop(immediately=True)
        thread.join(60)


@pytest.mark.parametrize("action", ["raise", "sleep"])
def test_an_error_or_a_wait_in_trainer_or_worker_costs_one_save_at_most(
    endpoint: str, tmp_path: pathlib.Path, action: str
) -> None:
    with serving(endpoint), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        for n, point in enumerate([*TRAINER_POINTS, *WORKER_POINTS]):
            path, observer = tmp_path / f"{n}", At(point, ACTIONS[action])
            with contextlib.ExitStack() as stack:
                stack.enter_context(observed(observer))
                user = (
                    stack.enter_context(AsyncCheckpointer(endpoint=endpoint))
                    if point in OF_FIRST_SAVES
                    else checkpointer
                )
                handle = user.save(state(n), path)
                error = handle.written.exception(60)
                assert error is None or isinstance(error, AsyncCkptError), (point, error)
                assert handle.staged.done() and handle.durable.done(), point
                wait_until(lambda observer=observer: observer.met, point)  # type: ignore[misc]
            assert (error is None) == (action == "sleep" or point in HARMLESS), (point, error)
            if error is None:
                assert is_state(asyncckpt.load(path), n)
            else:
                assert not (path / "manifest.json").exists(), point
            checkpointer.save(state(n), tmp_path / f"{n}-next").written.result(60)
            assert is_state(asyncckpt.load(tmp_path / f"{n}-next"), n)


class Bereaved(Client):
    """A client that waits for a worker as long as that lives."""

    def __init__(self, endpoint: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(endpoint)
        self._process = process

    def receive(self, timeout_s: float) -> messages.Message | None:
        """As `Client.receive`, or raise once the worker is dead."""
        if self._process.poll() is not None:
            raise WorkerUnavailableError("it is dead", endpoint=self.endpoint)
        return super().receive(min(timeout_s, 0.05))


def killed_worker(endpoint: str, path: pathlib.Path, point: str, visit: int = 1) -> None:
    """Save by a torch-free client through a worker that dies at `point`, and then through one that does not."""
    snapshot, save_id = Snapshot(nbytes=300_000), SaveId(1, 0, "0123456789ab")
    command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "kill", str(visit), point]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        with Bereaved(endpoint, process) as client, contextlib.suppress(AsyncCkptError, OSError):
            client.hello()
            slot = client.allocate(snapshot.slot_nbytes(), populate=True)
            client.stage(slot, snapshot, save_id, str(path))
            client.submit(slot, save_id)
        assert process.wait(60) == -signal.SIGKILL, point
    stands = (path / "manifest.json").exists()
    if stands:
        verdict = verify_checkpoint(str(path), Files())
        assert verdict.state == "ok" and verdict.faults == [], point
    command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "none", "1", point]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        with Client(endpoint) as client:
            client.hello()
            slot = client.allocate(snapshot.slot_nbytes())
            row = client.save(slot, snapshot, str(path.with_name(path.name + "-next")))
            assert row["phase"] == "committed", point
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("action", ["raise", "sleep"])
def test_what_meets_a_withdrawal_costs_no_other_save(endpoint: str, tmp_path: pathlib.Path, action: str) -> None:
    observer = At("trainer: withdrawing", ACTIONS[action])
    announced = At("trainer: announced", fail)

    def both(point: str) -> None:
        observer(point)
        announced(point)

    with serving(endpoint), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        with observed(both):
            handle = checkpointer.save(state(NEW), tmp_path / "x")
            assert isinstance(handle.written.exception(60), (AsyncCkptError, OSError))
        assert observer.met and announced.met
        checkpointer.save(state(NEXT), tmp_path / "x").written.result(60)
        assert is_state(asyncckpt.load(tmp_path / "x"), NEXT)


def test_a_worker_killed_while_it_looks_for_the_lineage_costs_one_save(endpoint: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "kill", "1", LINEAGE]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: os.path.exists(endpoint.removeprefix("ipc://")), "it listens")
        with AsyncCheckpointer(endpoint=endpoint, on_worker_loss="fail") as checkpointer:
            error = checkpointer.save(state(NEW), tmp_path / "x").written.exception(60)
        assert isinstance(error, AsyncCkptError) and process.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "x" / "manifest.json").exists()
    with serving(endpoint), AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        checkpointer.save(state(NEW), tmp_path / "x").written.result(60)


@pytest.mark.parametrize("point", [p for p in WORKER_POINTS if p != LINEAGE])
def test_a_worker_killed_at_its_points_lists_nothing_broken(endpoint: str, tmp_path: pathlib.Path, point: str) -> None:
    killed_worker(endpoint, tmp_path / "x", point)
    assert not (tmp_path / "x" / "manifest.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    "point",
    [
        p
        for p in POINTS
        if p.startswith(("directory: ", "shard: ", "rank: ", "commit: ", "put: "))
        and not ("metadata" in p or "items" in p or p in grouped())
    ],
)
def test_a_worker_killed_at_any_point_of_storage_lists_nothing_broken(
    endpoint: str, tmp_path: pathlib.Path, point: str
) -> None:
    killed_worker(endpoint, tmp_path / "x", point)
    assert (tmp_path / "x" / "manifest.json").exists() == (point in ("commit: put", "commit: durable"))


def test_a_trainer_killed_at_any_of_its_points_loses_nothing_that_was_sealed(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.failing_process", "trainers"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with running(endpoint) as worker, subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, **pipes) as nursery:
        assert nursery.stdin and nursery.stdout
        for seed, point in enumerate(TRAINER_POINTS):
            path = tmp_path / str(seed)
            order = {
                "endpoint": endpoint,
                "path": str(path),
                "seed": seed,
                "point": point,
                "action": "kill",
                "visit": 1,
            }
            nursery.stdin.write(json.dumps(order) + "\n")
            nursery.stdin.flush()
            assert json.loads(nursery.stdout.readline())["code"] == -signal.SIGKILL, point
            wait_until(lambda: not worker.status()["sessions"] and not worker.status()["slots"], "the dead is gone")
            wait_until(lambda: not worker.status()["jobs"], "its save has ended")
            assert (path / "manifest.json").exists() == (point == "slot: sealed"), point
            if point == "slot: sealed":
                assert torch.equal(asyncckpt.load(path)["w"], torch.full((1000,), float(seed)))
        with Client(endpoint) as client:
            client.hello()
            snapshot = Snapshot()
            assert client.save(client.allocate(snapshot.slot_nbytes()), snapshot, str(tmp_path / "next"))
        nursery.stdin.close()
