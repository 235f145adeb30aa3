"""A signal to the whole process group: the workers of a DataLoader die first; the last step is saved all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import preempted_training
import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt
from tests.warm_python import WarmPython

LAST = 5
"""The step after which no batch comes any more: what is fetched then is never there."""


PROGRAM = "import os, runpy, sys; os.setsid(); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


class Trainer:
    """One rank of a training, with a process group of its own."""

    def __init__(self, warm_python: WarmPython, errors: Path, *arguments: str) -> None:
        self.go = Path(arguments[-1] + ".go")
        self.digests: dict[int, str] = {}
        self._errors = errors
        self._stack = contextlib.ExitStack()
        stderr = self._stack.enter_context(errors.open("wb"))
        talking = warm_python.talking(PROGRAM, preempted_training.__file__, *arguments, stderr=stderr)
        self.process, _, self._stdout = self._stack.enter_context(talking)

    def read_until(self, text: str) -> None:
        """Read what it says, until it has said `text`, or to its end."""
        for line in self._stdout:
            words = line.split()
            if words[:1] == ["step"]:
                self.digests[int(words[1])] = words[2]
            if text and line.startswith(text):
                return
        assert not text, f"it ended without {text!r}: {self._errors.read_text()}"

    def signal_group(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(DEADLINE_S)
        self.read_until("")
        return code, self._errors.read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._stack.close()


@pytest.fixture
def trainers(tmp_path: Path, worker: RealWorker, warm_python: WarmPython) -> Iterator[Any]:
    made, root = list[Trainer](), str(tmp_path / "runs")

    def start(how: str, world: int = 1) -> list[Trainer]:
        for rank in range(world):
            arguments = (how, root, worker.endpoint, str(rank), str(world), root + ".meet")
            made.append(Trainer(warm_python, tmp_path / f"stderr-{rank}", *arguments))
        return made

    yield start
    for one in made:
        one.close()


def wait_for(root: Path, step: int) -> str:
    """Wait until the worker has written the last step; return where it is."""
    expected = str(root / f"step-{step:08d}")
    wait_until(lambda: asyncckpt.latest_checkpoint(root) == expected, "the worker has finished it")
    return expected


def digest_at(root: Path, step: int) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    asyncckpt.load(root / f"step-{step:08d}", {"model": model})
    return preempted_training.digest(model)


@pytest.mark.parametrize("how", ["a loop", "saved at that step", "objects only"])
def test_the_last_step_is_saved_and_the_run_ends_in_order(trainers: Any, tmp_path: Path, how: str) -> None:
    [one] = trainers(how)
    one.read_until(f"step {LAST}")
    one.signal_group()
    code, said = one.end()
    assert code == 0, said
    root = tmp_path / "runs"
    wait_for(root, LAST)
    assert digest_at(root, LAST) == one.digests[LAST]
    assert f"step {LAST} is staged" in said
    found = asyncckpt.restore_latest(root)
    assert found is not None and found.step == LAST


def test_a_death_in_the_middle_of_a_step_ends_after_it(trainers: Any, tmp_path: Path) -> None:
    [one] = trainers("in the middle of a step")
    one.read_until("waiting")
    one.signal_group()
    code, said = one.end()
    assert code == 0, said
    root = tmp_path / "runs"
    wait_for(root, LAST)
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
    trainers: Any, tmp_path: Path, how: str, until: str, why: str
) -> None:
    [one] = trainers(how)
    one.read_until(until)
    if how == "a mistake in the data":
        one.process.send_signal(signal.SIGTERM)  # its workers live
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


def test_ranks_whose_loaders_die_save_the_same_step(trainers: Any, tmp_path: Path) -> None:
    ranks = trainers("a loop", 2)
    _signal_at_last_step(ranks)
    root = tmp_path / "runs"
    assert asyncckpt.open_checkpoint(wait_for(root, LAST)).world_size == 2


@pytest.mark.parametrize("how", ["one rank does not come", "another step"])
def test_ranks_of_which_one_cannot_come_save_nothing_and_say_so(trainers: Any, tmp_path: Path, how: str) -> None:
    ranks = trainers(how, 2)
    ranks[0].read_until(f"step {LAST}")
    ranks[1].read_until("waiting")
    ranks[0].signal_group()
    code, said = ranks[0].end()
    assert code != 0 and "nothing was saved" in said and "ranks [1] have not ended" in said, said
    assert asyncckpt.latest_checkpoint(tmp_path / "runs") is None


def test_where_loader_workers_ignore_the_signal_ranks_that_meet_in_each_backward_save_one_step(
    trainers: Any, tmp_path: Path
) -> None:
    ranks = trainers(preempted_training.IGNORED, 2)
    _signal_at_last_step(ranks)
    last = max(ranks[0].digests)
    root = tmp_path / "runs"
    wait_for(root, last)
    assert max(ranks[1].digests) == last
    assert digest_at(root, last) == ranks[0].digests[last]
