"""A signal to the whole process group: the workers of a DataLoader die first; the last step is saved all the same."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import preempted_training
import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt

LAST = 5
"""The step after which no batch comes any more: what is fetched then is never there."""


class Trainer:
    """One rank of a training, with a process group of its own."""

    def __init__(
        self, script: pathlib.Path, how: str, root: pathlib.Path, endpoint: str, rank: int, world: int
    ) -> None:
        meet = str(root) + ".meet"
        self.go = pathlib.Path(meet + ".go")
        self.process = subprocess.Popen(
            [sys.executable, str(script), how, str(root), endpoint, str(rank), str(world), meet],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.digests: dict[int, str] = {}

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if words[:1] == ["step"]:
                self.digests[int(words[1])] = words[2]
            if line.startswith(text):
                return
        raise AssertionError(f"it ended without {text!r}: {self.process.stderr and self.process.stderr.read()}")

    def signal_group(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        for line in out.splitlines():
            words = line.split()
            if words[:1] == ["step"]:
                self.digests[int(words[1])] = words[2]
        return self.process.returncode, err

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def trainers(tmp_path: pathlib.Path, worker: RealWorker) -> Iterator[Any]:
    script, made = pathlib.Path(preempted_training.__file__), list[Trainer]()

    def start(how: str, world: int = 1) -> list[Trainer]:
        made.extend(Trainer(script, how, tmp_path / "runs", worker.endpoint, rank, world) for rank in range(world))
        return made

    yield start
    for one in made:
        one.close()


def digest_at(root: pathlib.Path, step: int) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    asyncckpt.load(root / f"step-{step:08d}", {"model": model})
    return preempted_training.digest(model)


@pytest.mark.parametrize("how", ["a loop", "saved at that step", "objects only"])
def test_the_last_step_is_saved_and_the_run_ends_in_order(trainers: Any, tmp_path: pathlib.Path, how: str) -> None:
    [one] = trainers(how)
    one.read_until(f"step {LAST}")
    one.signal_group()
    code, said = one.end()
    assert code == 0, said
    root = tmp_path / "runs"
    expected = str(root / f"step-{LAST:08d}")
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == expected, "the worker has finished it")
    assert digest_at(root, LAST) == one.digests[LAST]
    assert f"step {LAST} is staged" in said
    found = asyncckpt.restore_latest(root)
    assert found is not None and found.step == LAST


def test_a_death_in_the_middle_of_a_step_ends_after_it(trainers: Any, tmp_path: pathlib.Path) -> None:
    [one] = trainers("in the middle of a step")
    one.read_until("waiting")
    one.signal_group()
    code, said = one.end()
    assert code == 0, said
    root = tmp_path / "runs"
    expected = str(root / f"step-{LAST:08d}")
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == expected, "the worker has finished it")
    assert digest_at(root, LAST) == one.digests[LAST]


@pytest.mark.parametrize(
    ("how", "until", "why"),
    [
        ("micro-batches", "waiting", "have changed since step 4"),
        ("asked before the step", f"step {LAST}", "have changed since step 5"),
        ("a stale copy", f"step {LAST}", "may be of an earlier step"),
        ("nobody asks", f"step {LAST}", ""),
        ("a mistake of its own", "waiting", ""),
        ("a mistake in the data", f"step {LAST}", ""),
    ],
)
def test_what_cannot_be_proven_or_is_another_error_is_not_saved_and_passes(
    trainers: Any, tmp_path: pathlib.Path, how: str, until: str, why: str
) -> None:
    [one] = trainers(how)
    one.read_until(until)
    if how == "a mistake in the data":
        one.process.terminate()  # its workers live
    else:
        one.signal_group()
    one.go.touch()
    code, said = one.end()
    assert code != 0 and "ended in order" not in said
    newest = asyncckpt.latest_checkpoint(tmp_path / "runs")
    assert newest is None or not newest.endswith(f"{LAST:08d}"), newest
    assert why in said and ("nothing was saved" in said) == bool(why), said
    assert "is staged" not in said


def _signal_at_last_step(ranks: Sequence[Any]) -> None:
    """Signal all ranks and their loaders when they have come to the last step; all end in order."""
    for one in ranks:
        one.read_until(f"step {LAST}")
    for one in ranks:
        one.signal_group()
    for one in ranks:
        code, said = one.end()
        assert code == 0, said


def test_ranks_whose_loaders_die_save_the_same_step(trainers: Any, tmp_path: pathlib.Path) -> None:
    ranks = trainers("a loop", 2)
    _signal_at_last_step(ranks)
    root = tmp_path / "runs"
    expected = str(root / f"step-{LAST:08d}")
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == expected, "the worker has finished it")
    assert asyncckpt.open_checkpoint(expected).world_size == 2


@pytest.mark.parametrize("how", ["one rank does not come", "another step"])
def test_ranks_of_which_one_cannot_come_save_nothing_and_say_so(
    trainers: Any, tmp_path: pathlib.Path, how: str
) -> None:
    ranks = trainers(how, 2)
    ranks[0].read_until(f"step {LAST}")
    ranks[1].read_until("waiting")
    ranks[0].signal_group()
    code, said = ranks[0].end()
    assert code != 0 and "nothing was saved" in said and "ranks [1] have not ended" in said, said
    assert asyncckpt.latest_checkpoint(tmp_path / "runs") is None


def test_where_loader_workers_ignore_the_signal_ranks_that_meet_in_each_backward_save_one_step(
    trainers: Any, tmp_path: pathlib.Path
) -> None:
    ranks = trainers(preempted_training.IGNORED, 2)
    _signal_at_last_step(ranks)
    last = max(ranks[0].digests)
    root = tmp_path / "runs"
    expected = str(root / f"step-{last:08d}")
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == expected, "the worker has finished it")
    assert max(ranks[1].digests) == last
    assert digest_at(root, last) == ranks[0].digests[last]
