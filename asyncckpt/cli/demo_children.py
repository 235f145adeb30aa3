"""The demo's child processes: each has a deadline, and whatever is left of one that is late is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import psutil

from asyncckpt.protocol.identity import start_ticks

RUN_TIMEOUT_S = 300.0
"""For one training, and for one look at the checkpoints; on two cores they take 20 s and 1 s."""

END_TIMEOUT_S = 20.0
"""How long a training that is ended has for that, before it and all its descendants are killed."""

KILL_TIMEOUT_S = 60.0
"""How long the kernel has to end what was killed: a moment, unless it waits for a disk."""

QUIET_S = 4.0
"""When nothing was printed for so long, a line says that the demo goes on."""

RANKS = 2
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
ASYNCCKPT = (sys.executable, "-m", "asyncckpt")


class DemoFailedError(Exception):
    """A check of the demo did not hold; the message says which."""


_printed_at = [0.0]


def show(line: str) -> None:
    """Print a line of the demo."""
    _printed_at[0] = time.monotonic()
    print(line, flush=True)


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Within the block, print how long the demo has been running whenever it has printed nothing for `QUIET_S`."""
    began, ended = time.monotonic(), threading.Event()
    _printed_at[0] = began

    def beat() -> None:
        while not ended.wait(max(0.1, _printed_at[0] + QUIET_S - time.monotonic())):
            if time.monotonic() - _printed_at[0] >= QUIET_S:
                show(f"   ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, name="asyncckpt-demo-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def with_a_worker(*words: str, restarts: int = 0) -> list[str]:
    """Return the command that runs a module on all ranks, with a worker beside them."""
    return [*ASYNCCKPT, "run", "--", *TORCHRUN, f"--max-restarts={restarts}", "-m", *words]


def train(
    command: Sequence[str], environment: Mapping[str, str], *, on_line: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Run a command to its end, showing what it prints.

    Args:
        command: To run.
        environment: For it.
        on_line: Called with each line, before the next one is read.

    Returns:
        The lines of its stdout.

    Raises:
        DemoFailedError: It took longer than `RUN_TIMEOUT_S`, or failed; what it said on stderr is shown.
    """
    lines, late = list[str](), threading.Event()

    def give_up() -> None:
        late.set()
        end(process)

    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        timer = threading.Timer(RUN_TIMEOUT_S, give_up)
        timer.start()
        try:
            for line in process.stdout:
                show(f"   | {line.rstrip()}")
                lines.append(line.rstrip("\n"))
                on_line(lines[-1])
            process.wait()
        except BaseException:
            end(process)
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():
            _show(said)
            raise DemoFailedError(f"the training took longer than {RUN_TIMEOUT_S:g} s, and was killed")
        if process.returncode != 0:
            _show(said)
            raise DemoFailedError(f"the training ended with {process.returncode}")
    return lines


def _show(said: IO[bytes]) -> None:
    said.seek(0)
    print(said.read().decode(errors="replace"), file=sys.stderr)


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all its descendants: in order, and after `END_TIMEOUT_S` by SIGKILL.

    Blocks: Until they are gone, for at most `END_TIMEOUT_S` and `KILL_TIMEOUT_S`.
    """
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        thaw(*(p.pid for p in family))
        process.terminate()
        _, alive = psutil.wait_procs(family, END_TIMEOUT_S)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        # Not psutil's wait: a zombie that nobody reaps has ended, too.
        while any(start_ticks(one.pid) is not None for one in alive) and time.monotonic() < deadline:
            time.sleep(0.01)


def thaw(*pids: int) -> None:
    """Let frozen processes go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def verify(paths: Sequence[str], code: int) -> str:
    """Run `asyncckpt verify`; returns what it printed.

    Raises:
        DemoFailedError: It did not end with `code`, or took too long.
    """
    try:
        done = subprocess.run(
            [*ASYNCCKPT, "verify", *paths], capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DemoFailedError(f"verify took longer than {RUN_TIMEOUT_S:g} s, and was killed") from error
    if done.returncode != code:
        raise DemoFailedError(f"verify ended with {done.returncode}, expected {code}:\n{done.stdout}{done.stderr}")
    return done.stdout
