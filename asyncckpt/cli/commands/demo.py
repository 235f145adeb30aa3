"""Demonstrate on this machine that a killed training loses nothing.

A rank is killed between `staged` and `written`, all ranks resume, and the final weights are bit-identical.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from asyncckpt.cli.output import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, path_argument
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.protocol.identity import start_ticks
from asyncckpt.storage.catalog import latest_checkpoint

EXAMPLES = (
    "asyncckpt demo",
    "asyncckpt demo --dir /scratch/demo",
)
RANKS = 2
STEPS, EVERY, CRASH_AT = 40, 10, 20
STALL_NBYTES = 200_000_000
NEEDED_NBYTES = 1_000_000_000
"""Disk space that the demo needs: 8 checkpoints of 37 MB, a copy of one, and a save of 2 x 200 MB."""

FULL_DISK_NBYTES = 64_000_000
"""With less free space than this, about two checkpoints, a failure of the demo is reported as a full disk."""

RUN_TIMEOUT_S = 300.0
"""Timeout of one training, and of one check of the checkpoints; on two cores they take 20 s and 1 s."""

END_TIMEOUT_S = 20.0
"""Time that a terminated training has to end, before it and all its descendants are killed."""

KILL_TIMEOUT_S = 60.0
"""Time for killed processes to end: a moment, unless they wait for a disk."""

DEATH_TIMEOUT_S = 60.0
"""torchrun gives the other ranks 30 s to end before it kills them."""

COMMIT_TIMEOUT_S = 30.0
SAY_EVERY_S = 4.0
"""How often a line shows that the demo is still running."""

INTRODUCTION = f"""\
This takes 1 to 2 minutes on two cores, longer the first time. It trains a small GPT on {RANKS} ranks and proves that
  - a rank killed between `staged` and `written` loses nothing: the worker commits the checkpoint without any trainer;
  - the restarted ranks resume from it and end with the same weights, bit for bit, as a training that nothing disturbs;
  - every checkpoint verifies, and one flipped byte is found.
It ends with what a save costs a training loop, beside torch.save and dcp.async_save.
"""
ASYNCCKPT = (sys.executable, "-m", "asyncckpt")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
_TRAIN, _CRASH = "asyncckpt.examples.train_gpt", "asyncckpt.examples.train_gpt_crash"
_STALLS = "asyncckpt.examples.stalls"
_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning",  # torch warns where numpy is not installed
    "OMP_NUM_THREADS": "1",  # torchrun warns where it is not set
    # Or restarted ranks read, in the store of torchrun, where those before them listened: pytorch issue 135712.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class DemoFailedError(Exception):
    """A check of the demo did not hold; the message says which."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=path_argument,
        help="directory for the checkpoints (default: a temporary directory, removed afterwards)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 when any check fails."""
    directory = Path(args.dir or tempfile.mkdtemp(prefix="asyncckpt-demo-")).absolute()
    # Bytecode is written whatever the environment says: without it each of some 20 processes compiles torch anew.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    show(INTRODUCTION)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if lack := _lack_of_space(directory, NEEDED_NBYTES):
            raise DemoFailedError(lack)
        _play(directory, {**inherited, **_ENVIRONMENT})
    except (DemoFailedError, OSError) as error:
        print(f"\nDEMO FAILED: {_lack_of_space(directory, FULL_DISK_NBYTES) or error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if not args.dir:
            shutil.rmtree(directory, ignore_errors=True)
    return EXIT_OK


def _lack_of_space(directory: Path, nbytes: int) -> str:
    """Return a message if fewer than `nbytes` are free on the disk; "": they are free, or it cannot be determined."""
    free = nbytes
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(directory).free
    return (
        ""
        if free >= nbytes
        else (
            f"the disk that holds {directory} is full: {free / 1e6:.0f} MB are free, and the demo needs "
            f"{NEEDED_NBYTES / 1e6:.0f} MB; free space, or name a directory on another disk by --dir"
        )
    )


def _play(directory: Path, environment: Mapping[str, str]) -> None:
    plain, crashed, stalls = directory / "uninterrupted", directory / "crashed", directory / "stalls"
    if there := [old for old in (plain, crashed, stalls) if old.exists()]:
        raise DemoFailedError(f"{there[0]} exists already; choose an empty --dir")
    options = ("--steps", str(STEPS), "--every", str(EVERY))

    show(f"1. asyncckpt run -- torchrun, {RANKS} ranks: a training of {STEPS} steps that nothing disturbs")
    expected = _weights(child(_with_a_worker(_TRAIN, "--dir", str(plain), *options), environment))

    show(f"\n2. the same with --max-restarts 1; after the save of step {CRASH_AT} is staged one rank is SIGKILLed")
    crash = Crash(crashed / f"step-{CRASH_AT:06d}")
    command = _with_a_worker(_CRASH, str(CRASH_AT), "--dir", str(crashed), *options, restarts=1)
    try:
        lines = child(command, environment, on_line=crash.read)
    finally:
        crash.thaw()
    resumed = {
        line.partition(":")[0] for line in lines if line.endswith(f" at step {CRASH_AT}") and ": resumed " in line
    }
    if not crash.happened or resumed != {f"rank {rank}" for rank in range(RANKS)}:
        raise DemoFailedError(f"{RANKS} ranks should crash and resume at step {CRASH_AT}; resumed: {sorted(resumed)}")
    found = _weights(lines)
    show(f"\n   uninterrupted {expected}\n   crashed       {found}")
    if found != expected:
        raise DemoFailedError("the final weights differ from the uninterrupted training's")
    show("   final weights are equal bit for bit")

    show("\n3. every checkpoint verifies; one flipped byte is found")
    checkpoints = sorted(str(p) for root in (plain, crashed) for p in root.iterdir())
    if len(checkpoints) != 2 * STEPS // EVERY:
        raise DemoFailedError(f"{2 * STEPS // EVERY} checkpoints expected, there are: {', '.join(checkpoints)}")
    verify(checkpoints, EXIT_OK)
    show(f"   {len(checkpoints)} checkpoints verify")
    show("   " + _flip(Path(latest_checkpoint(crashed) or ""), directory / "damaged"))

    show(f"\n4. what a save costs the training loop, {STALL_NBYTES // 10**6} MB of state on each of {RANKS} ranks")
    table = child(_with_a_worker(_STALLS, "--dir", str(stalls), "--nbytes", str(STALL_NBYTES)), environment)
    if not any(line.startswith("asyncckpt ") for line in table):
        raise DemoFailedError("the stalls were not measured")
    show("\nall checks hold")


def _with_a_worker(*words: str, restarts: int = 0) -> list[str]:
    """Return the command that runs a module on all ranks, with a worker beside them."""
    return [*ASYNCCKPT, "run", "--", *_TORCHRUN, f"--max-restarts={restarts}", "-m", *words]


def _weights(lines: list[str]) -> str:
    """Return the fingerprint of the final weights, which every rank has printed.

    Raises:
        DemoFailedError: A rank has not, or they differ.
    """
    found = [line.split()[-1] for line in lines if re.match(r"rank \d+: weights sha256 ", line)]
    if len(found) != RANKS or len(set(found)) != 1:
        raise DemoFailedError(f"{RANKS} ranks should end with the same weights; they printed {found}")
    return found[0]


def _flip(checkpoint: Path, copy: Path) -> str:
    shutil.copytree(checkpoint, copy)
    shard = min(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[PAGE_NBYTES * 100] ^= 1
    shard.write_bytes(data)
    said = verify([str(copy)], EXIT_CORRUPT)
    named = [line.strip().replace(f"{copy}/", "") for line in said if shard.name in line]
    if not named:
        raise DemoFailedError(f"verify did not name the damaged file {shard.name}: {said}")
    return named[0]


# ---- what it prints, and its children


def show(line: str) -> None:
    """Print a line of the demo."""
    print(line, flush=True)


def verify(paths: Sequence[str], code: int) -> list[str]:
    """Run `asyncckpt verify`, which is to end with `code`; returns the lines that it printed."""
    return child([*ASYNCCKPT, "verify", *paths], os.environ, what="verify", code=code, on_line=lambda line: None)


def _show_line(line: str) -> None:
    show(f"   | {line}")


def child(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    what: str = "the training",
    code: int = EXIT_OK,
    on_line: Callable[[str], None] = _show_line,
) -> list[str]:
    """Run a command to its end; every `SAY_EVERY_S` a line says that it goes on.

    Args:
        command: To run.
        environment: For it.
        what: It is, in messages.
        code: With which it is to end.
        on_line: Called with each line, before the next one is read.

    Returns:
        The lines of its stdout.

    Raises:
        DemoFailedError: It took longer than `RUN_TIMEOUT_S`, or ended otherwise; what it said on stderr is shown.
    """
    lines, began = list[str](), time.monotonic()
    ended, late = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(min(SAY_EVERY_S, max(0.0, left_s := began + RUN_TIMEOUT_S - time.monotonic()))):
            if left_s <= 0:
                late.set()
                return end(process)
            show(f"   ... {time.monotonic() - began:.0f} s")

    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        watcher = threading.Thread(target=watch, name="asyncckpt-demo-watch", daemon=True)
        watcher.start()
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                on_line(lines[-1])
            process.wait()
        except BaseException:
            end(process)
            raise
        finally:
            ended.set()
            watcher.join()
        if late.is_set() or process.returncode != code:
            said.seek(0)
            print(said.read().decode(errors="replace"), file=sys.stderr)
            how = (
                f"took longer than {RUN_TIMEOUT_S:g} s, and was killed"
                if late.is_set()
                else (f"ended with {process.returncode}, expected {code}")
            )
            raise DemoFailedError(f"{what} {how}")
    return lines


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all its descendants: in order, and after `END_TIMEOUT_S` by SIGKILL.

    Blocks: Until they are gone, for at most `END_TIMEOUT_S` and `KILL_TIMEOUT_S`.
    """
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        _thaw(*(p.pid for p in family))
        process.terminate()
        _, alive = psutil.wait_procs(family, END_TIMEOUT_S)
        for one in alive:
            with contextlib.suppress(psutil.Error):
                one.kill()
        # Not psutil's wait: a zombie that nobody reaps has ended, too.
        _wait(lambda: all(start_ticks(one.pid) is None for one in alive), KILL_TIMEOUT_S)


def _thaw(*pids: int) -> None:
    """Let frozen processes go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _wait(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something holds; returns whether it does."""
    deadline = time.monotonic() + timeout_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


class Crash:
    """The crash, seen from outside: when all trainers are dead, the frozen worker goes on with what they left.

    Args:
        checkpoint: The save that is staged at the crash.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.happened = False
        self._checkpoint = checkpoint
        self._trainers: dict[int, int | None] = {}
        self._worker = 0

    def read(self, line: str) -> None:
        """Show a line of the ranks; at the crash, wait for the trainers' death and let the worker go on.

        Blocks: up to `DEATH_TIMEOUT_S` and `COMMIT_TIMEOUT_S`.

        Raises:
            DemoFailedError: The trainers live on; the crash fell at another moment; the save is not committed.
        """
        _show_line(line)
        found = re.fullmatch(r"rank \d+: (process|freezes worker|crash) (.*)", line)
        if self.happened or found is None:
            return
        if found[1] == "process":
            self._trainers[int(found[2])] = start_ticks(int(found[2]))
        elif found[1] == "freezes worker":
            self._worker = int(found[2])
        else:
            self.happened = True
            self._take_up(line)

    def _take_up(self, line: str) -> None:
        if not line.endswith("staged=True written=False"):
            raise DemoFailedError(f"the crash did not fall between staged and written: {line}")
        if len(self._trainers) != RANKS:
            raise DemoFailedError(f"{len(self._trainers)} ranks have given their process ids, expected {RANKS}")
        if not _wait(self._all_dead, DEATH_TIMEOUT_S):
            raise DemoFailedError(f"the trainers did not end within {DEATH_TIMEOUT_S:g} s")
        manifest, name = self._checkpoint / "manifest.json", self._checkpoint.name
        if manifest.exists():
            raise DemoFailedError(f"{name} was committed before the crash: the worker was not frozen")
        began = time.monotonic()
        self.thaw()
        if not _wait(manifest.exists, COMMIT_TIMEOUT_S):
            raise DemoFailedError(f"the worker did not commit {self._checkpoint} within {COMMIT_TIMEOUT_S:g} s")
        took_s = time.monotonic() - began
        show(f"   all trainers are dead; the worker goes on and commits {name} in {took_s:.2f} s")

    def thaw(self) -> None:
        """Let the worker go on, if it was frozen."""
        if self._worker:
            _thaw(self._worker)

    def _all_dead(self) -> bool:
        return all(ticks is None or start_ticks(pid) != ticks for pid, ticks in self._trainers.items())
