"""SIGKILL of the worker at every named instant of a copy to a mirror, and at random ones.

The mirror shows the old checkpoint or the new one, whole, and every copy is made in the end.
"""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, manifest_of, running, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import launcher
from asyncckpt.format.names import owner_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.failpoint_groups import MIRRORS, cases
from tests.fault_table import record_kills
from tests.saving import ENVIRONMENT, ROOT

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "0")) // 5 or 8
"""`make test-fault` asks for 100."""

SOON = "--drain-timeout-s=1"


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((200_000,), float(step * 10 + n)) for n in range(3)}


def listed(mirror: pathlib.Path) -> dict[str, str]:
    """Return what a reader of the mirror sees: name -> state."""
    found = {}
    for path in mirror.iterdir() if mirror.is_dir() else ():
        if (path / "manifest.json").exists():
            found[path.name] = verify_checkpoint(str(path), Files()).state
    return found


def without_manifest(mirror: pathlib.Path) -> set[pathlib.Path]:
    """Return the files of copies whose manifest is not there."""
    found = set()
    for directory in mirror.iterdir() if mirror.is_dir() else ():
        newest = manifest_of(directory)["save_id"] if (directory / "manifest.json").exists() else ""
        found |= {path for path in directory.iterdir() if (owner_of(path.name) or "") > newest}
    return found


@pytest.mark.parametrize(("way", "point"), cases(MIRRORS))
def test_a_copy_whose_worker_is_killed_is_finished_by_the_next(
    endpoint: str, tmp_path: pathlib.Path, way: str, point: str
) -> None:
    command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "kill", "1", point]
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as dying:
        wait_until(lambda: RealWorker(endpoint), "the worker answers")
        with AsyncCheckpointer(endpoint=endpoint, files_per_rank=3) as checkpointer:
            mirror = tmp_path / "mirror"
            handle = checkpointer.save(state_of(1), tmp_path / "runs" / "1", step=1, mirror=mirror / "1")
            handle.written.result(DEADLINE_S)
            assert dying.wait(DEADLINE_S) == -9
            assert listed(mirror) == ({"1": "ok"} if point == "mirror: committed" else {})
            with running(endpoint, SOON):
                report = handle.mirrored.result(DEADLINE_S)
                assert listed(mirror) == {"1": "ok"}
                assert (report.details["copied_nbytes"] == report.nbytes) == (point == "mirror: begun") or (
                    point == "mirror: shard written"
                )


def test_kills_at_random_instants_leave_old_or_new_and_every_copy_is_made_in_the_end(
    endpoint: str, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, mirror, newest = random.Random(seed), tmp_path / "mirror", {}
    before_manifest = 0

    def start() -> RealWorker:
        launcher.start_worker(endpoint, options=(SOON,))
        return RealWorker(endpoint)

    try:
        worker = start()
        with AsyncCheckpointer(endpoint=endpoint, files_per_rank=3, overwrite=True) as checkpointer:
            for number in range(KILLS):
                name = str(number % 5)  # later ones replace earlier copies
                handle = checkpointer.save(
                    state_of(number), tmp_path / "runs" / name, step=number, mirror=mirror / name
                )
                handle.written.result(DEADLINE_S)
                newest[name] = number, handle
                earlier = without_manifest(mirror)
                time.sleep(rng.random() * 0.08)
                worker.kill()
                before_manifest += bool(without_manifest(mirror) - earlier)
                assert set(listed(mirror).values()) <= {"ok"}, f"after kill {number}, seed {seed}"
                worker = start()
            record_kills(record_property, "worker, copies", KILLS, before_manifest)
            for name, (number, handle) in newest.items():
                assert handle.mirrored is not None
                handle.mirrored.result(DEADLINE_S)
                found = asyncckpt.load(mirror / name)
                assert all(torch.equal(found[fqn], value) for fqn, value in state_of(number).items())
    finally:
        stop_whoever_serves(endpoint)
