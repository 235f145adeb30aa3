"""A program whose checkpointer was never closed ends with its own exit code, whatever is going on when it ends.

Each child is forked from a process that has imported torch, and ends as every interpreter does: exit handlers run,
daemon threads are left behind, modules are torn down. ASYNCCKPT_TEST_EXITS of them for each kind of end, five times as
many for the kinds that were seen to abort most often.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_worker import RealWorker
from warm_python import WarmPython

EXITS = int(os.environ.get("ASYNCCKPT_TEST_EXITS", "2"))
AT_ONCE = 4
OFTEN = ("20,000 tensors, a local that was dropped", "a callback that drops tensors")

SETUP = """
import gc, os, random, sys, threading, time
import torch
import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager
endpoint, root, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
count = iter(range(10**6))

def make(**fields):
    return AsyncCheckpointer(endpoint=endpoint, **fields)

def state(n=50, numbers=10):
    return {f"w{i}": torch.ones(numbers) for i in range(n)}

def save(checkpointer, *arguments):
    return checkpointer.save(state(*arguments), f"{root}/{next(count)}")

def a_moment():
    time.sleep(rng.choice((0.0, 0.0005, 0.001, 0.002, 0.005)))
"""

ENDS = {
    "idle, a local that was dropped": (
        """
        def main():
            checkpointer = make()
            save(checkpointer).written.result(60)
        main()
        """,
        0,
    ),
    "20,000 tensors, a local that was dropped": (
        """
        def main():
            checkpointer = make()
            save(checkpointer, 20_000).written.result(60)
        main()
        """,
        0,
    ),
    "20,000 tensors, dropped while they are written": (
        """
        def main():
            save(make(), 20_000)
        main()
        """,
        0,
    ),
    "idle, a global": ("checkpointer = make(); handle = save(checkpointer); handle.written.result(60)", 0),
    "saving, a global": ("checkpointer = make(); handle = save(checkpointer, 5_000)", 0),
    "just made": (
        """
        from asyncckpt.client import launcher
        launcher.start_worker = lambda *_, **__: time.sleep(0.3)  # as long as starting one takes
        os.environ["XDG_RUNTIME_DIR"] = root
        kept = make(), AsyncCheckpointer(), AsyncCheckpointer().pending()
        """,
        0,
    ),
    "in a cycle with tensors": (
        """
        class Trainer:
            pass
        def main():
            trainer = Trainer()
            trainer.me, trainer.state, trainer.checkpointer = trainer, state(5_000), make()
            trainer.handle = trainer.checkpointer.save(trainer.state, f"{root}/cycle")
            trainer.handle.written.add_done_callback(lambda done: trainer.state)
            trainer.handle.staged.result(60)
        main()
        """,
        0,
    ),
    "several": (
        """
        def main():
            ended = [make() for _ in range(3)]
            for one in ended:
                save(one, 2_000).written.result(60)
        main()
        kept = [make(staging="overlap"), make(keep_in_memory="latest"), make(events=True)]
        handles = [save(one, 2_000) for one in kept]
        """,
        0,
    ),
    "behind the training": (
        """
        def main():
            model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(100)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            checkpointer = make(staging="overlap")
            checkpointer.attach(optimizer)
            views = {f"v{i}": torch.ones(40, 40).t() for i in range(200)}
            checkpointer.save({"model": model, "views": views}, f"{root}/behind")
            return rng.choice((None, checkpointer))
        kept = main()
        """,
        0,
    ),
    "a ring": (
        """
        def main():
            checkpointer = make(arena_limit_bytes=2_000_000, staging=rng.choice(("auto", "overlap")))
            handle = save(checkpointer, 300, 10_000)
            return rng.choice((None, checkpointer))
        kept = main()
        """,
        0,
    ),
    "in threads": (
        """
        def once():
            save(make(), 2_000)
        def on_and_on():
            checkpointer, ours = make(), state(2_000)
            while True:
                checkpointer.save(ours, f"{root}/on-{next(count)}").staged.exception(60)
                time.sleep(0.001)
        threading.Thread(target=once).start()
        threading.Thread(target=on_and_on, daemon=True).start()
        time.sleep(0.1)
        """,
        0,
    ),
    "in a forked child": (
        """
        checkpointer = make()
        handle = save(checkpointer, 2_000)
        pid = os.fork()
        if pid == 0:
            del handle
            own = make()
            save(own, 2_000).staged.result(60)
            a_moment()
            sys.exit(7)
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 or os._exit(99)
        """,
        0,
    ),
    "sys.exit": ("checkpointer = make(); save(checkpointer, 5_000); sys.exit(5)", 5),
    "an exception": (
        """
        def main():
            checkpointer, mine = make(), state(5_000)
            handle = checkpointer.save(mine, f"{root}/raises")
            raise KeyError("mine")
        main()
        """,
        1,
    ),
    "a callback that drops tensors": (
        """
        def main():
            checkpointer = make()
            mine = [state(5_000)]
            handle = save(checkpointer, 100)
            handle.written.add_done_callback(lambda done: mine.clear())
        main()
        """,
        0,
    ),
    "a manager": (
        """
        manager = CheckpointManager(root, max_to_keep=1, checkpointer=make())
        for step in range(3):
            manager.save(step, state(1_000))
        """,
        0,
    ),
    "a load": (
        """
        def main():
            checkpointer = make(keep_in_memory="latest")
            save(checkpointer, 2_000).written.result(60)
            os.environ["ASYNCCKPT_ENDPOINT"] = endpoint
            return asyncckpt.load(f"{root}/0")
        kept = main()
        """,
        0,
    ),
    "later exit handlers": (
        """
        import atexit
        from asyncckpt.basics import process_lifecycle
        os.environ["XDG_RUNTIME_DIR"] = root
        checkpointer, late = make(), []
        def after_ours():
            late.append(AsyncCheckpointer())
            late.append(save(late[0]))
            isinstance(late[1].written.exception(5), asyncckpt.errors.WorkerUnavailableError) or os._exit(99)
        atexit.unregister(process_lifecycle._at_exit)
        atexit.register(after_ours)
        atexit.register(process_lifecycle._at_exit)
        save(checkpointer)
        """,
        0,
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ENDS)
def test_every_exit_without_close_has_the_code_of_the_program(
    shared_worker: RealWorker, tmp_path: pathlib.Path, warm_python: WarmPython, how: str
) -> None:
    body, wanted = ENDS[how]
    program = f"{SETUP}\n{textwrap.dedent(body)}\na_moment()\n"
    seeds = [random.randrange(1 << 30) for _ in range(EXITS * (5 if how in OFTEN else 1))]

    def end(seed: int) -> tuple[int, str]:
        root = tmp_path / str(seed)
        root.mkdir()
        done = warm_python.run(program, shared_worker.endpoint, str(root), str(seed), timeout_s=150)
        return done.returncode, "" if done.returncode == wanted else f"seed {seed}: {done.stderr[-2000:]}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = collections.Counter(pool.map(end, seeds))
    assert found == {(wanted, ""): len(seeds)}


def test_an_interpreter_of_its_own_ends_as_forked_ones_do(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    body, _ = ENDS["20,000 tensors, a local that was dropped"]
    program = f"{SETUP}\n{textwrap.dedent(body)}\n"
    command = [sys.executable, "-c", program, shared_worker.endpoint, str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr) == (0, "")
