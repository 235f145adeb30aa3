"""The examples as trainings that are started, interrupted and started again."""

from __future__ import annotations

import importlib
import os
import pathlib
import random
import re
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import rank_processes
import real_worker

TIMEOUT_S = 200.0
SOONEST_STEP = 2


def free_port() -> int:
    """Return a port of this machine at which nobody listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def train(rank: int, example: str, arguments: Sequence[str], log: str | None) -> Any:
    """Run an example in this process; what it prints goes to `log`."""
    warnings.simplefilter("ignore")
    if os.environ["WORLD_SIZE"] != "1":
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
        os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", TORCHELASTIC_RESTART_COUNT="0")
    else:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    with open(log or os.devnull, "a", buffering=1) as said:
        sys.stdout = sys.stderr = said
        return importlib.import_module(f"examples.{example}").main(list(arguments))


def _options(endpoint: str) -> dict[str, Any]:
    environ = {
        "ASYNCCKPT_ENDPOINT": endpoint,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    return {"group": False, "environ": environ}


def result(example: str, arguments: Sequence[str], endpoint: str, *, world_size: int = 1) -> list[Any]:
    """Train to the end; return what each rank returned."""
    return rank_processes.run(world_size, train, example, arguments, None, timeout_s=TIMEOUT_S, **_options(endpoint))


def interrupt(
    example: str, arguments: Sequence[str], endpoint: str, log: pathlib.Path, at_step: int, number: signal.Signals
) -> None:
    """Train, and send a signal once a step is done; returns when the process has ended, by that or by itself."""
    with rank_processes.running(1, train, example, arguments, str(log), **_options(endpoint)) as ranks:

        def has_come() -> bool:
            if not ranks.processes[0].is_alive():
                return True
            found = re.findall(r"step (\d+)\n", log.read_text() if log.exists() else "")
            return bool(found) and int(found[-1]) >= at_step

        real_worker.wait_until(has_come, f"step {at_step}", TIMEOUT_S)
        ranks.kill(number=number)
        ranks.processes[0].join(TIMEOUT_S)
        assert not ranks.processes[0].is_alive(), f"the training goes on after {number.name}"


def interrupt_one_of_two(
    example: str, arguments: Sequence[str], endpoint: str, tmp_path: pathlib.Path, rng: random.Random
) -> str:
    """Train with two ranks, and send SIGTERM to one of them; returns what both have printed when both have ended."""
    log = tmp_path / "log"
    with rank_processes.running(2, train, example, arguments, str(log), **_options(endpoint)) as ranks:
        at_step = rng.randint(SOONEST_STEP, 10)

        def has_come() -> bool:
            found = re.findall(r"step (\d+)\n", log.read_text() if log.exists() else "")
            return bool(found) and int(found[-1]) >= at_step

        real_worker.wait_until(has_come, f"step {at_step}", TIMEOUT_S)
        os.kill(ranks.processes[rng.randrange(2)].pid or 0, signal.SIGTERM)
        for process in ranks.processes:
            process.join(TIMEOUT_S)
            assert not process.is_alive(), "the training goes on after SIGTERM"
    return log.read_text()


def interrupted(
    example: str, arguments: Sequence[str], endpoint: str, tmp_path: pathlib.Path, rng: random.Random, last_step: int
) -> Any:
    """Train with a SIGKILL and a SIGTERM at random steps, each followed by a new start; return what the last gave."""
    signals = [signal.SIGKILL, signal.SIGTERM]
    rng.shuffle(signals)
    for n, number in enumerate(signals):
        at_step = rng.randint(SOONEST_STEP, last_step)
        interrupt(example, arguments, endpoint, tmp_path / f"log-{n}", at_step, number)
    return result(example, arguments, endpoint)[0]
