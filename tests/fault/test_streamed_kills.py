"""SIGKILL of trainer, worker or both at random instants, while snapshots are written as they are staged.

Some lie whole in their slots, some go through a ring (docs/adr/0036 and 0027). Promises P3 to P6: what was reported
written is there bit for bit; what a trainer had sealed is there when only it died; the saves of a trainer whose worker
died are all committed, but for at most one that went through a ring at each death, which ends with `stream_lost`;
what is offered from memory is what was saved; whatever else is listed is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import states
from real_worker import RealWorker, is_served, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt.client import launcher
from asyncckpt.protocol import save_phases
from asyncckpt.storage.catalog import COMMITTED, found_at
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.verification import verify_checkpoint
from tests.saving import ENVIRONMENT, ROOT
from tests.streamed_trainer import state_of

pytestmark = [pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("ASYNCCKPT_TEST_STREAMED_KILLS", "30"))
"""Of each kind."""
ROWS = (200_000, 1_000_000, 2_000_000)


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.streamed_trainer"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL, **pipes) as process:
        yield process
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def served(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint whose worker, whichever that is, ends with the test."""
    monkeypatch.setenv("ASYNCCKPT_ENDPOINT", endpoint)
    yield endpoint
    stop_whoever_serves(endpoint)


def fields_of(rng: random.Random, rows: int) -> dict[str, Any]:
    """Return settings: half of them lead to a ring."""
    keep = rng.choice(["none", "latest"])
    fields: dict[str, Any] = {"keep_in_memory": keep}
    if rng.random() < 0.5:
        share = rng.choice((0.3, 0.6)) * (2 if keep == "latest" else 1)
        fields["arena_limit_bytes"] = max(4 << 20, int(rows * 4 * 4 * share))
    else:
        fields["slots"] = rng.choice((2, 3) if keep == "latest" else (1, 2))
    fields |= {"layout": "dcp"} if rng.random() < 0.2 else {}
    return fields | ({"files_per_rank": 2} if rng.random() < 0.3 else {})


def said_in(log: pathlib.Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"S": set(), "W": set(), "F": set(), "end": set()}
    for line in log.read_text().splitlines():
        word, *rest = line.split()
        found.setdefault(word, set()).update(int(number) for number in rest[:1])
    found["end"] |= {1} if "\nend\n" in log.read_text() else set()
    return found


def lost_in(log: pathlib.Path) -> set[int]:
    """Return the saves that ended with `stream_lost`."""
    words = [line.split() for line in log.read_text().splitlines()]
    return {int(found[1]) for found in words if found[0] == "F" and found[2] == "stream_lost"}


@pytest.mark.parametrize("kind", ["trainer", "worker", "workers", "both", "worker, then trainer"])
def test_kills_while_a_snapshot_is_written_as_it_is_staged_lose_nothing_that_was_promised(
    nursery: subprocess.Popen[str],
    served: str,
    tmp_path: pathlib.Path,
    rng: random.Random,
    kind: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("count", KILLS)
    first, counts = 0, dict.fromkeys(("listed", "staged", "held", "rings", "lost"), 0)
    for kill in range(KILLS):
        launcher.start_worker(served, options=())  # does nothing where one serves
        worker = RealWorker(served)
        rows, saves = rng.choice(ROWS), rng.choice((1, 3, 5))
        root, log = tmp_path / str(kill), tmp_path / f"{kill}.log"
        order = {"endpoint": served, "root": str(root), "log": str(log), "seed": kill}
        order |= {"rows": rows, "fields": fields_of(rng, rows), "first": first, "saves": saves}
        pid = begin(nursery, order, log)
        time.sleep(rng.choice((rng.uniform(0, 0.05), rng.uniform(0, 0.3), rng.uniform(0, 0.8))))
        if kind in ("trainer", "both"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind != "trainer":
            worker.kill()
        if kind == "worker, then trainer":
            time.sleep(rng.choice((rng.uniform(0, 0.3), rng.uniform(0, 1.5))))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "workers":
            kill_next(served, log, rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.5))))
        assert nursery.stdout is not None
        assert int(nursery.stdout.readline()) in (0, -signal.SIGKILL)
        said, what = said_in(log), f"kill {kill}, {order}: {log.read_text()}"
        if kind in ("worker", "workers"):
            lost = lost_in(log)
            assert said["end"] and said["W"] | lost == set(range(first, first + saves)), what
            deaths = 2 if kind == "workers" else 1
            # With keep_in_memory="latest" a ring gets half of the limit: the next save fills another one beside it.
            rings = 2 if order["fields"]["keep_in_memory"] == "latest" else 1
            assert len(lost) <= (deaths * rings if "arena_limit_bytes" in order["fields"] else 0), what
            counts["lost"] += len(lost)
        found = settled(served, root)
        must = said["W"] | (said["S"] if kind == "trainer" else set())
        assert must <= found and not said["F"] & found, f"{what}; {sorted(found)} are listed"
        for step in found:
            states.assert_same(asyncckpt.load(root / str(step), source="disk"), state_of(step, rows))
            assert verify_checkpoint(str(root / str(step)), Files()).state == "ok", what
        for held in asyncckpt.held_snapshots(root):
            states.assert_same(asyncckpt.load(held.path, source="memory"), state_of(held.step, rows))
            counts["held"] += 1
        if kind == "trainer":  # its worker knows of all that it had begun
            left = [p for p in root.glob("*/rank-*") if int(p.parent.name) not in found]
            assert left == [], f"{what}; {left} are left"
        counts["listed"] += len(found)
        counts["staged"] += len(said["S"])
        counts["rings"] += "arena_limit_bytes" in order["fields"]
        shutil.rmtree(root, ignore_errors=True)
        first += saves
    print(f"{KILLS} kills of {kind}: {counts}")


def kill_next(endpoint: str, log: pathlib.Path, after_s: float) -> None:
    """Kill the worker that follows one that is dead, so long after it answers; none, if the trainer needs none."""
    while not is_served(endpoint):
        if said_in(log)["end"]:
            return
        time.sleep(0.005)
    found = RealWorker(endpoint)
    time.sleep(after_s)
    found.kill()


def begin(nursery: subprocess.Popen[str], order: dict[str, Any], log: pathlib.Path) -> int:
    """Start a trainer; it is about to save when this returns."""
    assert nursery.stdin and nursery.stdout
    nursery.stdin.write(json.dumps(order) + "\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline())
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the trainer has its states")
    return pid


def is_idle(status: Mapping[str, Any]) -> bool:
    """Whether nothing is under way. Between jobs of a save there may be none, and its slot is freed before its end."""
    ended = all(row["phase"] in save_phases.ENDED for row in status["saves"])
    return ended and not status["sessions"] and not status["jobs"]


def settled(endpoint: str, root: pathlib.Path) -> set[int]:
    """Wait until a worker has nothing left to do, and return what is committed."""
    launcher.start_worker(endpoint, options=())
    worker = RealWorker(endpoint)
    wait_until(lambda: is_idle(worker.status()), "nothing is under way")
    looked = {path.name: found_at(str(path), LocalStore()) for path in root.iterdir()} if root.exists() else {}
    return {int(name) for name, one in looked.items() if one is not None and one.state == COMMITTED}
