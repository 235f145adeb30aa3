"""SIGKILL of the real trainer: what was staged is committed without it, what was not is never listed."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import real_worker
import states
import torch
from real_worker import RealWorker, wait_until

import asyncckpt
from asyncckpt import cli
from asyncckpt.errors import CheckpointNotCommittedError

pytestmark = pytest.mark.fault

KILLS = 5
NUMEL = 3_000_000

NURSERY = """
import json, os, signal, sys, time
import torch
from asyncckpt import AsyncCheckpointer
from asyncckpt.staging import cpu_copy

def train(order, told):
    checkpointer = AsyncCheckpointer(endpoint=order["endpoint"])
    state = {"w": torch.full((order["numel"],), float(order["seed"])), "b": [torch.arange(7), {"seed": order["seed"]}]}
    if order["die"] == "before_seal":
        fill = cpu_copy.SlotImage.fill
        def partly(self, tensors, save_id, share=None):
            checkpointer._process.flush(10.0)  # Begin is acknowledged
            if order["filled"]:
                fill(self, tensors, save_id, share)
            os.kill(os.getpid(), signal.SIGKILL)
        cpu_copy.SlotImage.fill = partly
    handle = checkpointer.save(state, order["path"], step=order["seed"], metadata={"seed": order["seed"]})
    assert handle.staged.done(), handle
    os.write(told, b"s")
    while True:  # training goes on, until it is killed
        state["w"].add_(1)
        state["b"][0].add_(1)

for line in sys.stdin:
    order = json.loads(line)
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(order, told)
        finally:
            os._exit(1)
    os.close(told)
    if os.read(heard, 1):
        time.sleep(order["delay_s"])
        os.kill(pid, signal.SIGKILL)
    os.close(heard)
    print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
"""


class Nursery:
    """A process that has torch imported, and forks a trainer for each order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **order: Any) -> int:
        """Let one trainer live and die; returns its exit code."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"delay_s": 0.0, "filled": False, "numel": NUMEL, **order}) + "\n")
        self._process.stdin.flush()
        code: int = json.loads(self._process.stdout.readline())["code"]
        return code

    def close(self) -> None:
        """End it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture
def worker(endpoint: str) -> Iterator[RealWorker]:
    with real_worker.running(endpoint) as found:
        yield found


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


def expected(seed: int) -> dict[str, Any]:
    return {"w": torch.full((NUMEL,), float(seed)), "b": [torch.arange(7), {"seed": seed}]}


def test_what_was_staged_is_committed_without_its_trainer(
    worker: RealWorker, nursery: Nursery, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    for seed in range(KILLS):
        path = tmp_path / str(seed)
        delay_s = rng.choice([0.0, rng.uniform(0, 0.005), rng.uniform(0, 0.1)])
        code = nursery.run(endpoint=worker.endpoint, path=str(path), seed=seed, die="later", delay_s=delay_s)
        assert code == -9
        wait_until((path / "manifest.json").exists, f"the worker commits {path}")
        assert cli.main(["verify", str(path)]) == 0
        states.assert_same(asyncckpt.load(path), expected(seed))
        assert json.loads((path / "manifest.json").read_text())["metadata"] == {"seed": seed}
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / str(KILLS - 1))
    assert_nothing_is_held(worker)


@pytest.mark.parametrize("filled", [False, True])
def test_what_was_not_sealed_is_never_listed(
    worker: RealWorker, nursery: Nursery, tmp_path: pathlib.Path, filled: bool
) -> None:
    for seed in range(KILLS):
        path = tmp_path / str(seed)
        assert nursery.run(endpoint=worker.endpoint, path=str(path), seed=seed, die="before_seal", filled=filled) == -9
        wait_until(path.exists, "the directory that Begin makes")
        assert_nothing_is_held(worker)
        with pytest.raises(CheckpointNotCommittedError):
            asyncckpt.load(path)
        assert cli.main(["verify", str(path)]) == 3
    assert asyncckpt.latest_checkpoint(tmp_path) is None
    assert {row["phase"] for row in worker.status()["saves"]} == {"abandoned"}


def assert_nothing_is_held(worker: RealWorker) -> None:
    wait_until(lambda: not worker.status()["sessions"] and not worker.status()["slots"], "slots of the dead are freed")
