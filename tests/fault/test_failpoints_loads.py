"""SIGKILL, an error, a long wait at the named instants that only some loads come by.

Promise P2: a load gives the saved values, or a typed error or that of the system; whatever meets it, the next one gives
them. A plain load is in test_failpoints.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worker_here import DEADLINE_S, Here

import asyncckpt
from asyncckpt import AsyncCheckpointer, RankInfo, ShardedSlice, SyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import CorruptCheckpointError, SnapshotUnavailableError
from asyncckpt.loading import read_source
from tests.failing_process import At, fail, kill
from tests.failpoint_groups import LOADS, RECALLS, cases
from tests.saving import ENVIRONMENT, ROOT

pytestmark = pytest.mark.fault

CODES = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES]
ROWS, COLUMNS, HALF = 900, 4096, 2048
ALONE = RankInfo(0, 1)


def value(n: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + n


def save(n: int, path: pathlib.Path) -> None:
    with SyncCheckpointer(rank_info=ALONE, fsync=False, overwrite=True) as checkpointer:
        checkpointer.save({"w": value(n), "n": [n]}, path)


def save_foreign(n: int, path: pathlib.Path) -> None:
    torch.save({"w": value(n), "n": [n]}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def half(path: pathlib.Path, **options: Any) -> torch.Tensor:
    target = torch.zeros(ROWS, HALF)
    asyncckpt.load(path, {"w": ShardedSlice(target, (ROWS, COLUMNS), (0, HALF))}, source="disk", **options)
    return target


def copied(path: pathlib.Path) -> torch.Tensor:
    target = {"w": torch.zeros(ROWS, COLUMNS), "n": None}
    try:
        asyncckpt.load(path, target, source="disk", low_memory=False)
    except OSError:
        assert not target["w"].any() and target["n"] is None, "something changed before all was verified"
        raise
    return target["w"][:, HALF:]


def foreign(path: pathlib.Path) -> torch.Tensor:
    found: torch.Tensor = asyncckpt.load(path)["w"]
    return found[:, HALF:]


WAYS: dict[str, tuple[Callable[[int, pathlib.Path], None], Callable[[pathlib.Path], torch.Tensor]]] = {
    "ranges of ours": (save, lambda path: half(path, verify=False)),
    "copied first": (save, copied),
    "another library's": (save_foreign, foreign),
}
"""Name -> how it is saved, and what part of it a load gives."""


def is_of(found: torch.Tensor, n: int) -> bool:
    return torch.equal(found, value(n)[:, HALF:])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's own do not live on in a forked child, which would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("action", ["kill", "raise", "hold"])
@pytest.mark.parametrize(("way", "point"), cases(LOADS))
def test_a_load_gives_the_saved_values_or_an_error_whatever_meets_it(
    tmp_path: pathlib.Path, rng: random.Random, way: str, point: str, action: str
) -> None:
    (put, read), path = WAYS[way], tmp_path / "x"
    put(1, path)
    if action == "kill":
        pid = os.fork()
        if pid == 0:
            try:
                with observed(At(point, kill)):
                    read(path)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
    elif action == "raise":
        code = rng.choice(CODES)
        observer = At(point, lambda: fail(code))
        with observed(observer):
            try:
                found = read(path)
            except OSError as error:
                assert error.errno == code
            else:  # with fewer files open at once
                assert is_of(found, 1) and code == errno.EMFILE
        assert observer.met
    else:  # while another save takes the place: the old values or the new ones, never of both
        observer = At(point, lambda: put(2, path))
        with observed(observer), contextlib.suppress(CorruptCheckpointError):
            found = read(path)
            assert is_of(found, 1) or is_of(found, 2)
        assert observer.met
        assert is_of(read(path), 2)
        return
    assert is_of(read(path), 1)


# ---- out of a worker's memory ---------------------------------------------------------------------------------------


@pytest.fixture
def saver(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncCheckpointer]:
    """A trainer whose worker, everybody's default, is in this process.

    A load that may read the disk gives up a worker that does not answer within `ANSWER_S`, as a busy machine's may not.
    """
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    monkeypatch.setattr(read_source, "ANSWER_S", DEADLINE_S)
    with contextlib.closing(Here(endpoint)), AsyncCheckpointer(slots=1, overwrite=True) as found:
        yield found


def written(saver: AsyncCheckpointer, n: int, path: pathlib.Path) -> None:
    saver.save({"w": torch.full((300_000,), float(n)), "n": n}, path).written.result(DEADLINE_S)


def is_written(found: Any, n: int) -> bool:
    return bool(found["n"] == n and torch.equal(found["w"], torch.full((300_000,), float(n))))


@pytest.mark.parametrize("source", ["auto", "memory"])
@pytest.mark.parametrize("point", RECALLS["memory"])
def test_a_recall_that_meets_an_error_reads_the_disk_or_says_so(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, rng: random.Random, source: str, point: str
) -> None:
    written(saver, 1, tmp_path / "x")
    observer, code = At(point, lambda: fail(code)), rng.choice(CODES)
    with observed(observer):
        if source == "auto":
            assert is_written(asyncckpt.load(tmp_path / "x"), 1)
        else:
            with pytest.raises((SnapshotUnavailableError, OSError)):
                asyncckpt.load(tmp_path / "x", source="memory")
    assert observer.met
    assert is_written(asyncckpt.load(tmp_path / "x", source="memory"), 1), "the worker holds it still"
    written(saver, 2, tmp_path / "x")


@pytest.mark.parametrize("point", RECALLS["memory"])
def test_a_recall_that_is_held_while_its_slot_is_used_again_gives_one_save_or_says_so(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path, point: str
) -> None:
    written(saver, 1, tmp_path / "x")
    observer = At(point, lambda: written(saver, 2, tmp_path / "x"))
    with observed(observer):
        found = asyncckpt.load(tmp_path / "x")
    assert observer.met and is_written(found, found["n"])
    written(saver, 3, tmp_path / "x")
    with observed(At(point, lambda: written(saver, 4, tmp_path / "x"))), contextlib.suppress(SnapshotUnavailableError):
        found = asyncckpt.load(tmp_path / "x", source="memory")
        assert is_written(found, found["n"])
    assert is_written(asyncckpt.load(tmp_path / "x", source="memory"), 4)


def test_a_reader_that_is_killed_leaves_worker_and_snapshot_as_they_were(
    saver: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.failing_process", "trainers"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**ENVIRONMENT, "ASYNCCKPT_ENDPOINT": os.environ["ASYNCCKPT_ENDPOINT"]}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as nursery:
        assert nursery.stdin and nursery.stdout
        for n, point in enumerate(RECALLS["memory"]):
            written(saver, n, tmp_path / "x")
            nursery.stdin.write(json.dumps({"load": str(tmp_path / "x"), "point": point, "action": "kill"}) + "\n")
            nursery.stdin.flush()
            assert json.loads(nursery.stdout.readline())["code"] == -signal.SIGKILL, point
            assert is_written(asyncckpt.load(tmp_path / "x", source="memory"), n)
        nursery.stdin.close()
    written(saver, 9, tmp_path / "x")
    assert is_written(asyncckpt.load(tmp_path / "x", source="disk"), 9)
