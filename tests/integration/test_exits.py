"""P13: whatever the worker does, a trainer's interpreter ends within five seconds, and what was staged is not lost.

The trainers of a test are forked from one process that has torch imported, and end as every interpreter does. They do so
side by side, since most of what they do is to wait.
"""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt

EXIT_S = 5.0
SLACK_S = 1.0
"""For processes that end at the same time and wait for a core."""

STAGINGS = ("auto", "blocking", "overlap")

TRAINERS = """
    import atexit, json, os, sys, threading, time
    import torch
    from asyncckpt import AsyncCheckpointer
    from asyncckpt.staging.copy_cpu import SlotImage

    endpoint, root, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

    def never(*arguments):
        time.sleep(60 if threading.current_thread().name == "asyncckpt-overlap" else 0)
        return copy(*arguments)

    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def train(name, staging, how):
        model = torch.nn.Linear(100, 100)
        with torch.no_grad():
            model.weight.fill_(1.0), model.bias.fill_(2.0)
        checkpointer = AsyncCheckpointer(endpoint=endpoint, staging=staging)
        if staging != "blocking":
            checkpointer.attach(torch.optim.SGD(model.parameters(), lr=1.0))
        with checkpointer if how.startswith("within") else open(os.devnull):
            checkpointer.save({"model": model.state_dict()}, f"{root}/{name}-before").written.result(60)
            open(f"{root}/{name}.ready", "x").close()
            until(lambda: os.path.exists(f"{root}/go"))
            if how == "copying":
                SlotImage.copy = never
            elif how == "called back":
                checkpointer.save({"model": model.state_dict()}, f"{root}/{name}-more")
            handle = checkpointer.save({"model": model.state_dict()}, f"{root}/{name}")
            if how != "copying":
                until(handle.staged.done)
            if how == "called back":
                handle.written.add_done_callback(lambda done: threading.Event().wait(60))
            with open(f"{root}/{name}.left", "x") as file:
                file.write(str(time.monotonic()))
            if how == "within, raises":
                raise KeyError("mine")
            if how == "within, exits":
                sys.exit(7)
        return checkpointer

    copy = SlotImage.copy
    children = {}
    for number, (staging, how) in enumerate(cases):
        pid = os.fork()
        if pid == 0:
            kept = train(number, staging, how)
            break  # the end of the program, of its interpreter and of this process
        children[pid] = number
    else:
        ends = {}
        while children:
            pid, status = os.wait()
            ends[children.pop(pid)] = time.monotonic(), os.waitstatus_to_exitcode(status)
        print(json.dumps(ends))
"""


def ends_of(
    worker: RealWorker, root: pathlib.Path, cases: list[tuple[str, str]], number: int
) -> list[tuple[float, int]]:
    """Let trainers end, after the worker has got a signal; return the seconds that each took, and its exit code."""
    program = [sys.executable, "-c", textwrap.dedent(TRAINERS), worker.endpoint, str(root), json.dumps(cases)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainers:
        try:
            names = range(len(cases))
            wait_until(
                lambda: trainers.poll() is not None or all((root / f"{n}.ready").exists() for n in names),
                "every trainer has saved once",
                60,
            )
            worker.signal(number)
            (root / "go").touch()
            out, err = trainers.communicate(timeout=60)
        finally:
            trainers.kill()
            worker.signal(signal.SIGCONT)
    assert trainers.returncode == 0, err
    found = json.loads(out)
    return [(found[str(n)][0] - float((root / f"{n}.left").read_text()), found[str(n)][1]) for n in names]


def code_of(how: str) -> int:
    """Return the exit code that a trainer of this kind must have: its own, whatever becomes of the save."""
    return {"within, raises": 1, "within, exits": 7}.get(how, 0)


@pytest.mark.parametrize("staging", STAGINGS)
def test_no_exit_waits_longer_than_five_seconds_for_a_worker_that_is_frozen(
    worker: RealWorker, tmp_path: pathlib.Path, staging: str
) -> None:
    hows = ["pending", "within, raises", "within, exits", "called back"] + ["copying"] * (staging != "blocking")
    for how, (took_s, code) in zip(hows, ends_of(worker, tmp_path, [(staging, h) for h in hows], signal.SIGSTOP)):
        assert took_s < EXIT_S + SLACK_S, how
        assert code == code_of(how), how
    for number, how in enumerate(hows):
        path = tmp_path / str(number)
        if how == "copying":
            assert not (path / "manifest.json").exists()
            continue
        wait_until((path / "manifest.json").exists, f"what was staged is committed: {how}", DEADLINE_S)
        states.assert_same(
            asyncckpt.load(path), {"model": {"weight": torch.full((100, 100), 1.0), "bias": torch.full((100,), 2.0)}}
        )
    wait_until(lambda: not worker.status()["slots"], "all slots are freed")


@pytest.mark.parametrize("staging", STAGINGS)
def test_no_exit_waits_for_a_worker_that_is_gone(worker: RealWorker, tmp_path: pathlib.Path, staging: str) -> None:
    hows = ["pending", "within, raises", "within, exits", "called back"]
    for how, (took_s, code) in zip(hows, ends_of(worker, tmp_path, [(staging, h) for h in hows], signal.SIGKILL)):
        assert took_s < EXIT_S + SLACK_S, how
        assert code == code_of(how), how
    assert not worker.alive
