"""P11: what a rank and its worker hold of a host, fds and memory, whatever the state looks like."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, RealWorker, running, wait_until, written

from asyncckpt import AsyncCheckpointer

TRAINER_FDS = 16
WORKER_FDS = 16 + 4
"""With one rank."""

OPEN_FILES = 8
"""Of one save: shards, index, manifest, directories, and what was looked up."""

MEMORY_BOUND = 200_000_000
"""Beside the slots in use."""

STATE_NBYTES = 300_000_000
"""More than `MEMORY_BOUND`: a copy too many does not hide there."""


class Most:
    """The most that a figure has been, looked at all the time. A context manager."""

    def __init__(self, figure: Callable[[], int]) -> None:
        self._figure, self._ended, self.most = figure, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._figure())

    def __enter__(self) -> Most:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self.most = max(self.most, self._figure())


def fds_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> int:
    """Return the bytes of a process's own memory and its part of what is shared with others.

    Pages of files, such as torch's libraries, are left out: whose they are depends on who else runs.
    """
    found = 0
    with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                found += int(value.split()[0]) * 1024
    return found


# ---- fds


def fds_for(n_tensors: int, endpoint: str, root: pathlib.Path) -> tuple[int, int]:
    """Save `n_tensors` three times by a new worker, and return the fds that the trainer and the worker hold then.

    They are those that stay: whoever has just ended a save may hold a file a moment longer.
    """
    state: dict[str, Any] = {str(n): torch.full((100,), float(n)) for n in range(n_tensors)}
    before = fds_of(os.getpid())
    with running(endpoint) as worker, AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        with Most(lambda: fds_of(os.getpid())) as ours, Most(lambda: fds_of(worker.pid)) as theirs:
            for number in range(3):
                written(checkpointer.save(state, root / f"{n_tensors}-{number}"))
        assert ours.most - before <= TRAINER_FDS + OPEN_FILES
        assert theirs.most <= WORKER_FDS + OPEN_FILES
        wait_until(lambda: fds_of(os.getpid()) - before <= TRAINER_FDS, "the trainer holds 16 fds of ours at most")
        wait_until(lambda: fds_of(worker.pid) <= WORKER_FDS, "the worker holds 16 fds and 4 for the rank at most")
        return settled(lambda: fds_of(os.getpid()) - before), settled(lambda: fds_of(worker.pid))


def settled(count: Callable[[], int]) -> int:
    """Return the least of a few counts."""
    counts = []
    for _ in range(10):
        counts.append(count())
        time.sleep(0.02)
    return min(counts)


def test_the_fds_of_trainer_and_worker_do_not_depend_on_the_number_of_tensors(
    endpoint: str, tmp_path: pathlib.Path
) -> None:
    fds_for(1, endpoint, tmp_path)  # what is opened once for a process's life
    found = []
    while not found or found[-1][0] != found[-1][1]:  # on a busy machine a file may be closed late
        assert len(found) < 5, found
        root = tmp_path / str(len(found))
        found.append((fds_for(10, endpoint, root), fds_for(5_000, endpoint, root)))


# ---- memory

TRAINER = """
    import sys, torch
    from asyncckpt import AsyncCheckpointer
    endpoint, directory, keep, nbytes = sys.argv[1:]
    state = {str(n): torch.full((int(nbytes) // 40,), float(n)) for n in range(10)}
    print("ready", flush=True)
    sys.stdin.readline()
    options = {"keep_in_memory": "latest"} if keep == "latest" else {}
    with AsyncCheckpointer(endpoint=endpoint, fsync=False, overwrite=True, **options) as checkpointer:
        for number in range(3):
            state["0"].fill_(float(number))
            checkpointer.save(state, f"{directory}/a", step=number).written.result(60)
        print("saved", flush=True)
        sys.stdin.readline()
"""


@contextlib.contextmanager
def trainer_of(worker: RealWorker, root: pathlib.Path, keep: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has its state, and then follows `told`."""
    program = [sys.executable, "-c", textwrap.dedent(TRAINER), worker.endpoint, str(root), keep, str(STATE_NBYTES)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout and trainer.stdout.readline() == "ready\n"
            yield trainer
            told(trainer)
            assert trainer.wait(DEADLINE_S) == 0
        finally:
            trainer.kill()


def told(trainer: subprocess.Popen[str]) -> None:
    """Let the trainer go on."""
    assert trainer.stdin
    trainer.stdin.write("go\n")
    trainer.stdin.flush()


@pytest.mark.parametrize(("keep", "slots"), [("none", 1), ("latest", 2)])
def test_trainer_and_worker_take_the_slots_in_use_and_200_mb_beside_the_state(
    worker: RealWorker, tmp_path: pathlib.Path, keep: str, slots: int
) -> None:
    with trainer_of(worker, tmp_path, keep) as trainer:
        assert trainer.stdout
        before = memory_of(trainer.pid)
        assert before >= STATE_NBYTES
        with Most(lambda: memory_of(trainer.pid) + memory_of(worker.pid)) as memory:
            told(trainer)
            assert trainer.stdout.readline() == "saved\n"
    taken = memory.most - before
    assert slots * STATE_NBYTES * 0.9 < taken <= slots * STATE_NBYTES + MEMORY_BOUND, taken
