"""A thousand saves, and a hundred dead workers: what trainer and worker hold stays as it is.

Promises P6, P11 and P12.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from real_worker import stop_whoever_serves

import asyncckpt
from tests.saving import ENVIRONMENT, ROOT, worker_process

pytestmark = [pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(900)]

SAVES = int(os.environ.get("ASYNCCKPT_TEST_SAVES", "1000"))
MAX_SLOPE_KB = 20.0
"""Of RSS, per save: the figure of the promise."""
WARM = 0.2
"""The part of the samples that is left out: allocators, histories and caches fill up to their bounds."""


def samples_of(endpoint: str, root: pathlib.Path, saves: int, every: int, kill_every: int, **env: str) -> list[Any]:
    """Run the program and return its samples; the newest checkpoint is loaded."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.soaking", endpoint, str(root)]
    path = f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT / 'tests'}"
    done = subprocess.run(
        [*command, str(saves), str(every), str(kill_every)],
        env={**ENVIRONMENT, "PYTHONPATH": path, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    newest = asyncckpt.latest_checkpoint(root)
    assert newest is not None and asyncckpt.load(newest)["step"] >= saves - 3
    return [json.loads(line) for line in done.stdout.splitlines()]


def slope(samples: list[Any], side: str, what: str) -> float:
    """Return the slope of a line through the samples (least squares), per save."""
    points = [(sample["n"], sample[side][what]) for sample in samples[int(len(samples) * WARM) :]]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return float(above / sum((x - mean_x) ** 2 for x, _ in points))


def grown(samples: list[Any], side: str, what: str) -> int:
    """Return by how much the last samples exceed the first ones."""
    values = [sample[side][what] for sample in samples[int(len(samples) * WARM) :]]
    return int(max(values[-3:]) - max(values[:3]))


def report(samples: list[Any], record: Callable[[str, object], None]) -> None:
    last = samples[-1]
    record("count", last["n"])
    kb = {side: round(slope(samples, side, "rss_kb"), 2) for side in ("trainer", "worker")}
    record("figures", {"rss_kb_per_save": kb, "last": {k: v for k, v in last.items() if k != "endpoint"}})
    for side in ("trainer", "worker"):
        slopes = ", ".join(f"{what} {slope(samples, side, what):+.3f}" for what in last[side])
        print(f"{side}: per save {slopes}; at the end {last[side]}")
    print(f"written {last['written']}, failed {last['failed']}, slowest {last['slowest_s']:.2f} s")


def test_a_thousand_saves_leave_descriptors_threads_mappings_and_memory_as_they_were(
    endpoint: str, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
) -> None:
    with worker_process(endpoint):
        samples = samples_of(endpoint, tmp_path, SAVES, 10, 0)
    report(samples, record_property)
    assert samples[-1]["written"] == SAVES
    for side in ("trainer", "worker"):
        assert slope(samples, side, "rss_kb") < MAX_SLOPE_KB
        assert grown(samples, side, "shared_kb") <= 0
        assert grown(samples, side, "slots") <= 0
        assert grown(samples, side, "fds") <= 1
        assert grown(samples, side, "threads") <= 1
        assert abs(slope(samples, side, "mappings")) < 0.05


def test_a_hundred_dead_workers_leave_the_trainer_as_it_was(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
) -> None:
    """The trainer starts each next worker by itself; every future completes or fails with a typed error."""
    saves = min(SAVES, 300)
    samples = samples_of("", tmp_path, saves, 10, 3, XDG_RUNTIME_DIR=str(endpoint_dir))
    stop_whoever_serves(samples[-1]["endpoint"])
    report(samples, record_property)
    last = samples[-1]
    assert last["n"] > saves - 20, "the last sample is of a save that met no dead worker"
    assert last["written"] + last["failed"] == last["n"] and last["written"] >= last["n"] * 2 // 3 - 1
    assert last["slowest_s"] < 12.0
    assert slope(samples, "trainer", "rss_kb") < MAX_SLOPE_KB * 3, "per save; a third of them meet a dead worker"
    assert grown(samples, "trainer", "fds") <= 1
    assert grown(samples, "trainer", "threads") <= 1
    assert grown(samples, "trainer", "slots") <= 1


def test_trainer_and_worker_that_are_stopped_and_continued_go_on_as_if_nothing_had_been(
    endpoint: str, tmp_path: pathlib.Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    """SIGSTOP for less than `worker_timeout_s`: a debugger, a checkpointed container, a machine that swaps."""
    saves, stops = 60, 20
    record_property("count", stops)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.soaking", endpoint, str(tmp_path), str(saves), "5", "0"]
    with (
        worker_process(endpoint) as worker,
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer,
    ):
        assert trainer.stdout
        lines = [trainer.stdout.readline()]
        for _ in range(stops):
            for victim in rng.sample([trainer, worker], rng.choice([1, 2])):
                if victim.poll() is None:
                    victim.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.0, 0.2))
            for victim in (trainer, worker):
                victim.send_signal(signal.SIGCONT)
            time.sleep(rng.uniform(0.0, 0.05))
        lines += trainer.stdout.read().splitlines()
        assert trainer.wait(60) == 0
        assert worker.poll() is None
    assert json.loads(lines[-1])["written"] == saves
    newest = asyncckpt.latest_checkpoint(tmp_path)
    assert newest is not None and asyncckpt.load(newest)["step"] == saves - 1
