"""P13: whatever the worker does, a trainer's interpreter ends within five seconds, and what was staged is not lost.

The trainers of a test are forked from one process that has torch imported, and end as every interpreter does. They do
so side by side, since most of what they do is wait.
"""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import textwrap

import torch
from exit_times import EXIT_S, TRIES, interpreter_s
from real_worker import RealWorker, running, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt.protocol import save_phases

DEADLINE_S = 200.0
"""For a dozen interpreters that import torch's parts, and end, on a machine that others use too."""

STAGINGS = ("auto", "blocking", "overlap", "device")
"""With "device" the parameters lie on a simulated one."""

TRAINERS = """
    import atexit, gc, json, os, random, sys, threading, time

    def at_the_very_end():
        if pid == 0:
            with open(f"{root}/{number}.ended", "x") as file:
                file.write(str(time.monotonic()))

    atexit.register(at_the_very_end)  # before ours, so that it runs after it
    import torch
    from asyncckpt import AsyncCheckpointer
    from asyncckpt.staging import copy_engine, cpu_copy, overlap
    from asyncckpt.staging.cpu_copy import SlotImage
    from tests.simulated_device import SimulatedDevice

    NEVER_S = 600
    endpoint, root, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

    def never(*arguments):
        time.sleep(NEVER_S if threading.current_thread().name == "asyncckpt-overlap" else 0)
        return copy(*arguments)

    def block(done):
        called.set()
        assert threading.current_thread() is not threading.main_thread()
        threading.Event().wait(NEVER_S)

    def until(condition):
        deadline = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def train(name, staging, how):
        model = torch.nn.Linear(100, 100)
        with torch.no_grad():
            model.weight.fill_(1.0), model.bias.fill_(2.0)
        device = SimulatedDevice(random.Random(name))
        if staging == "device":
            copy_engine.CudaDevice = lambda: device
            for parameter in model.parameters():
                parameter.data = device.put(parameter.data, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpointer = AsyncCheckpointer(endpoint=endpoint, staging=staging, worker_timeout_s=NEVER_S)
        if staging != "blocking":
            checkpointer.attach(optimizer)
        with checkpointer if how.startswith("within") else open(os.devnull):
            checkpointer.save({"model": model.state_dict()}, f"{root}/{name}-before").written.result(150)
            if how == "called back":  # and it does not return, in the thread that listens to the worker
                handle = checkpointer.save({"model": model.state_dict()}, f"{root}/{name}-more")
                handle.written.add_done_callback(block)
                until(called.is_set)
            open(f"{root}/{name}.ready", "x").close()
            until(lambda: os.path.exists(f"{root}/go"))
            if how == "copying":
                SlotImage.copy, device.frozen = never, True
            handle = checkpointer.save({"model": model.state_dict()}, f"{root}/{name}")
            if how != "copying":
                until(handle.staged.done)
            with open(f"{root}/{name}.left", "x") as file:
                file.write(str(time.monotonic()))
            if how == "within, raises":
                raise KeyError("mine")
            if how == "within, exits":
                sys.exit(7)
        return checkpointer, optimizer

    cpu_copy.MIN_DEFERRED_NBYTES, overlap.has_idle_core = 0, lambda: True
    torch.optim.SGD([torch.ones(1)], lr=1.0)  # which imports much, once for all
    copy, called = SlotImage.copy, threading.Event()
    running, codes = {}, {}
    gc.freeze()  # so that no child searches all that was imported for cycles when it ends: that takes a second
    for number, (staging, how) in enumerate(cases):
        pid = os.fork()
        if pid == 0:
            kept = train(number, staging, how)
            break  # the end of the program, of its interpreter and of this process
        running[pid] = number
    else:
        while running:
            pid, status = os.wait()
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        print(json.dumps(codes))
"""


def ends_of(worker: RealWorker, root: pathlib.Path, cases: list[tuple[str, str]], number: int) -> list[float]:
    """Let trainers end, after the worker has got a signal.

    Returns:
        Of each: seconds until all that is ours had ended, the interpreter's own end not counted.
    """
    root.mkdir()
    program = [sys.executable, "-c", textwrap.dedent(TRAINERS), worker.endpoint, str(root), json.dumps(cases)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainers:
        try:
            names = range(len(cases))
            wait_until(
                lambda: trainers.poll() is not None or all((root / f"{n}.ready").exists() for n in names),
                "every trainer has saved once",
                DEADLINE_S,
            )
            worker.signal(number)
            (root / "go").touch()
            out, err = trainers.communicate(timeout=DEADLINE_S)
        finally:
            trainers.kill()
            worker.signal(signal.SIGCONT)
    assert trainers.returncode == 0, err
    codes = json.loads(out)
    assert [codes[str(n)] for n in names] == [code_of(how) for _, how in cases]
    return [float((root / f"{n}.ended").read_text()) - float((root / f"{n}.left").read_text()) for n in names]


def code_of(how: str) -> int:
    """Return the exit code that a trainer of this kind must have: its own, whatever becomes of the save."""
    return {"within, raises": 1, "within, exits": 7}.get(how, 0)


def late_ones(
    worker: RealWorker, root: pathlib.Path, cases: list[tuple[str, str]], number: int
) -> list[tuple[str, str]]:
    """Return those of `cases` that took longer than promised: they get another try, alone, since others run here."""
    own_s = interpreter_s()
    return [case for case, s in zip(cases, ends_of(worker, root, cases, number), strict=True) if s > EXIT_S + own_s]


HOWS = ("pending", "within, raises", "within, exits", "called back")
"""While a save is pending: at the end of the program, by an exception within the `with` block, by `sys.exit` there, and
while a callback of an earlier save blocks."""

CASES = [("auto", how) for how in HOWS] + [(s, how) for s in STAGINGS if s != "auto" for how in HOWS[:2]]
COPYING = [(staging, "copying") for staging in STAGINGS if staging != "blocking"]
"""And while the state is still being copied."""


def test_no_exit_waits_longer_than_five_seconds_for_a_worker_that_is_frozen(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    cases = CASES + COPYING
    late = late_ones(worker, tmp_path / "0", cases, signal.SIGSTOP)
    for n in range(1, TRIES):
        late = late and late_ones(worker, tmp_path / str(n), late, signal.SIGSTOP)
    assert not late
    for number in range(len(CASES)):
        path = tmp_path / "0" / str(number)
        wait_until((path / "manifest.json").exists, f"what was staged is committed: {cases[number]}")
        model = asyncckpt.load(path)["model"]
        assert torch.equal(model["weight"], torch.full((100, 100), 1.0)), cases[number]
        assert torch.equal(model["bias"], torch.full((100,), 2.0)), cases[number]
    wait_until(lambda: not worker.status()["slots"], "all slots are freed")
    wait_until(lambda: {row["phase"] for row in worker.status()["saves"]} <= save_phases.ENDED, "all saves have ended")
    assert not [n for n in range(len(CASES), len(cases)) if (tmp_path / "0" / str(n) / "manifest.json").exists()]


def test_no_exit_waits_for_a_worker_that_is_gone(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    late = late_ones(worker, tmp_path / "0", CASES, signal.SIGKILL)
    assert not worker.alive
    for n in range(1, TRIES):
        if late:
            stop_whoever_serves(worker.endpoint)  # a trainer may have started one
            with running(worker.endpoint) as another:
                late = late_ones(another, tmp_path / str(n), late, signal.SIGKILL)
    assert not late
