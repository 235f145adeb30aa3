"""SIGKILL of trainer, worker or both at random instants, many times, with two saves in flight.

Promises P3, P4 and P5: what was reported committed is there bit for bit; what a trainer had sealed is there when only
it died; whatever else is listed is whole; the next worker at the same place works.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.kill_nursery import snapshot_of
from tests.saving import ENVIRONMENT, ROOT, Saver, fault_of, violations, worker_process

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("ASYNCCKPT_TEST_KILLS", "50"))
"""Of each kind; `make test-fault` raises it."""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kill_nursery"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()
        process.wait(60)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [pytest.param("trainer", marks=pytest.mark.soak), "worker", "both"])
def test_kills_at_random_instants_lose_nothing_that_was_promised(
    nursery: subprocess.Popen[str],
    endpoint: str,
    endpoint_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    rng: random.Random,
    kind: str,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("count", KILLS)
    assert nursery.stdin and nursery.stdout
    listed = promised = 0
    for kill in range(KILLS):
        root, run = tmp_path / str(kill), rng.randbytes(6).hex()
        order = {
            "kind": kind,
            "endpoint": endpoint,
            "root": str(root),
            "run": run,
            "delay_s": rng.choice([rng.uniform(0, 0.02), rng.uniform(0, 0.15)]),
            "first": rng.choice(["trainer", "worker"]),
            "seed": rng.randrange(1000),
        }
        nursery.stdin.write(json.dumps(order) + "\n")
        nursery.stdin.flush()
        ended = json.loads(nursery.stdout.readline())
        assert ended["code"] == (0 if kind == "trainer" else -9), ended
        assert ended["failed"] == []
        must = set(ended["acked"]) | (set(ended["sealed"]) if kind == "trainer" else set())
        paths = [p.name for p in root.iterdir() if p.is_dir()] if root.exists() else []
        for seed in must | {int(name) for name in paths if (root / name / "manifest.json").exists()}:
            fault = fault_of(str(root / str(seed)), snapshot_of(seed, run)[1])
            assert fault == "", f"kill {kill}: {fault}"
            listed += 1
        assert violations({}, [str(root / name) for name in paths]) == []
        promised += len(must)
        shutil.rmtree(root, ignore_errors=True)
    print(f"{KILLS} kills of {kind}, {promised} promised saves, {listed} listed")
    assert promised
    with worker_process(endpoint), Saver(endpoint) as saver:
        assert saver.save(tmp_path / "after", 1) == "committed"
        assert violations(saver.acknowledged) == []
    assert sorted(path.name for path in endpoint_dir.iterdir()) == ["w.sock.lock"], "only the lock's file stays"
