"""SIGKILL, an error, a long wait at every named instant of what follows a worker's death.

Promises P1, P3, P4 and P6: what the dead one has left is committed whole, by whoever takes the save up, or it is not
listed; whoever dies over that leaves it to the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import rank_processes
import torch
from own_worker import own_worker, worker_of
from real_worker import DEADLINE_S, stop_whoever_serves, wait_until
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.client import launcher
from asyncckpt.errors import AsyncCkptError, CommitUnknownError
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.names import index_name
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files, read_small_file
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.recovery import is_committed, keep_ring_files, resume_rank_files
from asyncckpt.storage.verification import verify_checkpoint
from tests.failing_process import ACTIONS, At, fail, kill, killed
from tests.failpoint_groups import HANDED_OVER, RESUMED, SENT, cases
from tests.saving import ENVIRONMENT, ROOT
from tests.storage_samples import SAVE_ID, RecordingFiles, Snapshot, manifest_of, shard_paths

pytestmark = pytest.mark.fault

CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE]
LENGTHS = {"a": 700_000, "b": 5}


# ---- the files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot() -> Iterator[Snapshot]:
    with Snapshot(LENGTHS, n_parts=2) as found:
        yield found


def leave(way: str, snapshot: Snapshot, path: pathlib.Path) -> None:
    """Leave what a worker has that dies in the middle of a save."""
    path.mkdir()
    result = snapshot.write(str(path))
    if "torn" in way:
        os.truncate(shard_paths(str(path))[1], 4096)
    elif "committed" in way:
        publish(str(path), manifest_of(result), store=LocalStore(RecordingFiles()))


def go_on(way: str, snapshot: Snapshot, path: pathlib.Path) -> bool:
    """Take the save up, as the next worker does; says whether it is committed in the end."""
    files = RecordingFiles()
    writer = snapshot.writer(str(path), files)
    if is_committed(str(path), SAVE_ID, store=LocalStore(files)):
        return True
    if way.startswith("ring"):  # of which nothing is in memory
        result = keep_ring_files(writer)
        if result is None:
            return False
    else:
        with ThreadPoolExecutor(2) as pool:
            result, _ = resume_rank_files(writer, pool)
    publish(str(path), manifest_of(result), store=LocalStore(files))
    return True


def stands(snapshot: Snapshot, path: pathlib.Path) -> bool:
    """Whether it is listed; then it is what was staged."""
    if not (path / "manifest.json").exists():
        return False
    assert verify_checkpoint(str(path), Files()).faults == []
    for shard, (offset, nbytes) in zip(shard_paths(str(path)), snapshot.parts, strict=True):
        assert pathlib.Path(shard).read_bytes() == bytes(snapshot.image[offset : offset + nbytes])
    return True


def trace_of(way: str, snapshot: Snapshot, path: pathlib.Path) -> list[tuple[str, int]]:
    leave(way, snapshot, path)
    observer = At("resumed: whole", lambda: None)
    with observed(observer):
        assert go_on(way, snapshot, path)
    assert set(RESUMED[way]) <= set(observer.trace)
    return [(point, observer.trace[: n + 1].count(point)) for n, point in enumerate(observer.trace)]


@pytest.mark.parametrize("action", ["kill", "raise", "hold"])
@pytest.mark.parametrize("way", RESUMED)
def test_what_a_dead_worker_has_left_is_committed_whole_or_not_listed(
    snapshot: Snapshot, tmp_path: pathlib.Path, rng: random.Random, way: str, action: str
) -> None:
    for n, (point, visit) in enumerate(trace_of(way, snapshot, tmp_path / "rehearsal")):
        path, what = tmp_path / str(n), f"{action} at {point!r} ({visit})"
        leave(way, snapshot, path)
        if action == "kill":
            killed(lambda path=path: go_on(way, Snapshot(LENGTHS, n_parts=2), path), point, visit)  # type: ignore[misc]
            was_said = False
        elif action == "raise":
            code, was_said = rng.choice(CODES), False
            fault = At(point, lambda code=code: fail(code), visit)  # type: ignore[misc]
            with contextlib.suppress(OSError, CommitUnknownError), observed(fault):
                was_said = go_on(way, snapshot, path)
        else:
            seen: list[bool] = []
            look = At(point, lambda path=path, seen=seen: seen.append(stands(snapshot, path)), visit)  # type: ignore[misc]
            with observed(look):
                was_said = go_on(way, snapshot, path)
            assert len(seen) == 1 and was_said, what
        assert stands(snapshot, path) or not was_said, what
        is_done = go_on(way, snapshot, path)
        assert stands(snapshot, path) is is_done, what
        if not way.startswith("ring") or action == "kill":
            assert is_done, what
        elif not is_done:
            assert [name for name in os.listdir(path) if name.startswith("rank-")] == [], what


@pytest.mark.parametrize("mirror", ["", "s3://bucket/a"])  # checksums are of blocks of 256 or of 32 KiB
@pytest.mark.parametrize("point", ["shard: extent written", "rank: objects written", "rank: index written"])
def test_a_save_whose_worker_is_killed_between_its_shards_and_its_end_is_completed(
    snapshot: Snapshot, tmp_path: pathlib.Path, point: str, mirror: str
) -> None:
    def write() -> None:
        Snapshot(LENGTHS, n_parts=2).write(str(tmp_path), RecordingFiles(), mirror=mirror)

    killed(write, point)
    with ThreadPoolExecutor(2) as pool:
        writer = snapshot.writer(str(tmp_path), RecordingFiles(), mirror=mirror)
        result, kept = resume_rank_files(writer, pool)
    assert kept == (point == "rank: index written")
    publish(str(tmp_path), manifest_of(result), store=LocalStore(RecordingFiles()))
    assert stands(snapshot, tmp_path)
    index = decode_index((tmp_path / index_name(SAVE_ID, 0)).read_bytes())
    assert index.block_nbytes == (32 << 10 if mirror else 256 << 10)


def test_an_index_is_the_old_one_or_the_new_one_while_it_is_replaced(
    snapshot: Snapshot, tmp_path: pathlib.Path
) -> None:
    leave("slot, whole", snapshot, tmp_path / "x")
    name = str(tmp_path / "x" / index_name(SAVE_ID, 0))
    before, seen = read_small_file(Files(), name, MAX_INDEX_NBYTES), []
    for point in ("small file: replacing", "small file: replaced"):
        with observed(At(point, lambda: seen.append(read_small_file(Files(), name, MAX_INDEX_NBYTES)), visit=2)):
            go_on("slot, whole", snapshot, tmp_path / "x")
        (tmp_path / "x" / "manifest.json").unlink()
    assert seen == [before, before]


# ---- the memory -----------------------------------------------------------------------------------------------------

STATE = {"w": torch.arange(100_000.0)}


@pytest.fixture(scope="module", autouse=True)
def _ranks_server() -> None:
    rank_processes.start_server()


@pytest.fixture
def default_dir(endpoint_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The default endpoint lies here; a worker there is started by the checkpointer itself."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    return endpoint_dir


class Successors:
    """Starts the workers that a checkpointer wants, in its stead: `starts`, each once, and then those of always.

    `is_coming`: says whether one that was started may still come; a checkpointer that waits asks for another meanwhile.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[Callable[[str], None]] = []
        self.is_coming: Callable[[], bool] = lambda: False
        self._usual, self._lock = launcher.start_worker, threading.Lock()
        monkeypatch.setattr(launcher, "start_worker", self._start)

    def _start(self, endpoint: str, **options: Any) -> None:
        with self._lock:
            start = self.starts.pop(0) if self.starts else None
        if start is not None:
            start(endpoint)
        elif not self.is_coming():
            self._usual(endpoint, **options)


def test_all_points_of_a_handover_are_tried() -> None:
    assert set(HANDED_OVER) == {"trainer", "worker"} and len(cases(HANDED_OVER)) == 3


@pytest.mark.parametrize("action", ["raise", "sleep"])
@pytest.mark.parametrize(("who", "point"), cases(HANDED_OVER))
def test_an_error_or_a_wait_while_memory_is_handed_over_costs_its_save_at_most(
    default_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    who: str,
    point: str,
    action: str,
) -> None:
    successors, here = Successors(monkeypatch), list[Here]()
    observer = At(point, ACTIONS[action])
    with own_worker() as checkpointer, contextlib.ExitStack() as stack:
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        worker = worker_of(checkpointer)
        successors.starts.append(lambda endpoint: here.append(stack.enter_context(contextlib.closing(Here(endpoint)))))
        with observed(observer), worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            worker.kill()
            error = handle.written.exception(DEADLINE_S)
            assert observer.met
        is_refused = action == "raise" and point == "trainer: seeking a worker"  # the next save finds it, then
        assert bool(here) is not is_refused, "the next worker is in this process"
        assert error is None or (action == "raise" and isinstance(error, AsyncCkptError)), error
        if error is None:
            assert torch.equal(asyncckpt.load(tmp_path / "1", source="disk")["w"], STATE["w"])
        else:
            assert not (tmp_path / "1" / "manifest.json").exists()
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)
        assert torch.equal(asyncckpt.load(tmp_path / "0", source="disk")["w"], STATE["w"])
        assert torch.equal(asyncckpt.load(tmp_path / "2", source="disk")["w"], STATE["w"])


def test_a_worker_that_is_killed_while_it_takes_memory_over_leaves_it_to_the_next(
    default_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    successors, processes = Successors(monkeypatch), list[subprocess.Popen[bytes]]()
    (point,) = HANDED_OVER["worker"]

    def start(endpoint: str) -> None:
        command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "kill", "1", point]
        processes.append(subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL))

    successors.is_coming = lambda: bool(processes) and processes[-1].poll() is None
    with own_worker() as checkpointer:
        checkpointer.save(STATE, tmp_path / "0").written.result(DEADLINE_S)
        worker = worker_of(checkpointer)
        successors.starts.append(start)
        with worker.frozen():
            handle = checkpointer.save(STATE, tmp_path / "1")
            worker.kill()
            handle.written.result(DEADLINE_S)
        assert processes.pop().wait(DEADLINE_S) == -signal.SIGKILL
        assert torch.equal(asyncckpt.load(tmp_path / "1", source="disk")["w"], STATE["w"])
        checkpointer.save(STATE, tmp_path / "2").written.result(DEADLINE_S)


@pytest.mark.parametrize("action", [pytest.param("kill", marks=pytest.mark.soak), "sleep"])
@pytest.mark.parametrize("point", SENT["worker"])
def test_a_worker_that_is_killed_before_any_of_its_messages_costs_no_save_or_says_so(
    endpoint: str, tmp_path: pathlib.Path, point: str, action: str
) -> None:
    """A kernel loses none of them: so each is followed by the next, or by the worker's end."""
    for visit in range(1, 100):
        path = tmp_path / str(visit)
        command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, action, str(visit), point]
        with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: os.path.exists(endpoint.removeprefix("ipc://")), "the worker listens")
            error: BaseException | None = None
            try:
                with AsyncCheckpointer(endpoint=endpoint, on_worker_loss="fail") as checkpointer:
                    error = checkpointer.save(STATE, path).written.exception(DEADLINE_S)
            except AsyncCkptError as caught:
                error = caught
            assert error is None or (action == "kill" and isinstance(error, AsyncCkptError)), error
            is_listed = (path / "manifest.json").exists()
            assert is_listed or error is not None
            assert not is_listed or torch.equal(asyncckpt.load(path, source="disk")["w"], STATE["w"])
            process.terminate()
            code = process.wait(DEADLINE_S)
        pathlib.Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        if error is None or action == "sleep":
            break
        assert code == -signal.SIGKILL
    assert visit > 3 or action == "sleep"


@pytest.mark.parametrize("point", SENT["worker"])
def test_a_message_that_cannot_be_sent_to_a_trainer_costs_one_save_at_most(
    endpoint: str, tmp_path: pathlib.Path, point: str
) -> None:
    """Each of them in turn: its save ends by a deadline, or well, and the next one works."""
    with contextlib.closing(Here(endpoint)):
        for visit in range(1, 100):
            path, observer = tmp_path / str(visit), At(point, fail, visit)
            error: BaseException | None = None
            with observed(observer):
                try:
                    with AsyncCheckpointer(endpoint=endpoint, worker_timeout_s=3.0) as checkpointer:
                        error = checkpointer.save(STATE, path).written.exception(DEADLINE_S)
                except AsyncCkptError as caught:
                    error = caught
                was_met = observer.met
            assert error is None or isinstance(error, AsyncCkptError), error
            is_listed = (path / "manifest.json").exists()
            assert is_listed or error is not None
            assert not is_listed or torch.equal(asyncckpt.load(path, source="disk")["w"], STATE["w"])
            with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
                checkpointer.save(STATE, tmp_path / f"next{visit}").written.result(DEADLINE_S)
            if not was_met:
                break
    assert visit > 3


def hands_over(rank: int, root: str, point: str) -> None:
    """Be a trainer that is killed while it gives its memory to the next worker."""
    checkpointer = AsyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1), worker_start_timeout_s=DEADLINE_S)
    checkpointer.save(STATE, f"{root}/0").written.result(DEADLINE_S)
    worker = worker_of(checkpointer)
    os.kill(worker.pid, signal.SIGSTOP)
    checkpointer.save(STATE, f"{root}/1")
    with observed(At(point, kill)):
        os.kill(worker.pid, signal.SIGKILL)
        checkpointer.wait(DEADLINE_S)


@pytest.mark.parametrize("point", HANDED_OVER["trainer"])
def test_a_trainer_that_is_killed_while_it_hands_memory_over_lists_nothing_of_that_save(
    default_dir: pathlib.Path, tmp_path: pathlib.Path, point: str
) -> None:
    with own_worker() as checkpointer:
        endpoint = checkpointer._process.endpoint  # type: ignore[attr-defined]
        with rank_processes.running(
            1, hands_over, str(tmp_path), point, group=False, environ=dict(os.environ)
        ) as ranks:
            ranks.processes[0].join(DEADLINE_S)
            assert ranks.processes[0].exitcode == -signal.SIGKILL
        assert torch.equal(asyncckpt.load(tmp_path / "0", source="disk")["w"], STATE["w"])
        assert not (tmp_path / "1" / "manifest.json").exists()
        wait_until(lambda: checkpointer.save(STATE, tmp_path / "2").written.exception(DEADLINE_S) is None, "it works")
        stop_whoever_serves(endpoint)
