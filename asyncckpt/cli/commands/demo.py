"""Show on this machine that a killed training loses nothing.

A training is killed after a snapshot is staged (copied to the worker's memory) and before it is written to disk. Then
all ranks resume, and the final weights are bit-identical to those of an uninterrupted training.
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
"""With less free space than this (about two checkpoints), a failure of the demo is reported as a full disk."""

RUN_TIMEOUT_S = 300.0
"""Timeout of one training, and of one run of verify; on two cores they take 20 s and 1 s."""

END_TIMEOUT_S = 20.0
"""Time that a training has to end after SIGTERM, before it and all its descendants are killed."""

KILL_TIMEOUT_S = 60.0
"""Timeout for killed processes to end: a moment, unless they wait for a disk."""

DEATH_TIMEOUT_S = 60.0
"""torchrun gives the other ranks 30 s to end before it kills them."""

COMMIT_TIMEOUT_S = 30.0
SAY_EVERY_S = 4.0
"""Interval of the lines that show that the demo is still running."""

INTRODUCTION = f"""\
This takes 1 to 2 minutes on two cores, longer the first time. It trains a small GPT on {RANKS} ranks and shows that
  - a training that is killed after a snapshot is staged (copied to the worker's memory) and before it is written to
    disk loses nothing: the worker process writes and commits the checkpoint without the training;
  - the restarted ranks resume from it and end with the same weights, bit for bit, as an uninterrupted training;
  - every checkpoint passes `asyncckpt verify`, and one changed byte is found.
Finally it measures how long a save stalls a training loop, compared with torch.save and dcp.async_save.
"""
ASYNCCKPT = (sys.executable, "-m", "asyncckpt")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
_TRAIN, _CRASH = "asyncckpt.examples.train_gpt", "asyncckpt.examples.train_gpt_crash"
_STALLS = "asyncckpt.examples.stalls"
_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning",  # torch warns if numpy is not installed
    "OMP_NUM_THREADS": "1",  # torchrun warns if it is not set
    # Without it, restarted ranks read stale addresses from torchrun's store: pytorch issue 135712.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class DemoFailedError(Exception):
    """A check of the demo did not hold; the message says which."""


def _check(holds: bool, otherwise: str) -> None:
    """Raise `DemoFailedError` with the text, unless the first argument is True."""
    if not holds:
        raise DemoFailedError(otherwise)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=path_argument,
        help="directory for the checkpoints (default: a temporary directory, removed afterwards)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 if a check fails."""
    directory = Path(args.dir or tempfile.mkdtemp(prefix="asyncckpt-demo-")).absolute()
    # Write bytecode whatever the environment says: otherwise each of about 20 processes compiles torch again.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    show(INTRODUCTION)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lack = _lack_of_space(directory, NEEDED_NBYTES)
        _check(not lack, lack)
        _play(directory, {**inherited, **_ENVIRONMENT})
    except (DemoFailedError, OSError) as error:
        print(f"\nDEMO FAILED: {_lack_of_space(directory, FULL_DISK_NBYTES) or error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if not args.dir:
            shutil.rmtree(directory, ignore_errors=True)
    return EXIT_OK


def _lack_of_space(directory: Path, nbytes: int) -> str:
    """Return a message if fewer than `nbytes` are free on the disk; else, or if that is not known, ""."""
    free = nbytes
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(directory).free
    said = (
        f"the disk that holds {directory} is full: {free / 1e6:.0f} MB are free, and the demo needs "
        f"{NEEDED_NBYTES / 1e6:.0f} MB; free space, or choose a directory on another disk with --dir"
    )
    return said if free < nbytes else ""


def _play(directory: Path, environment: Mapping[str, str]) -> None:
    plain, crashed, stalls = directory / "uninterrupted", directory / "crashed", directory / "stalls"
    if there := [old for old in (plain, crashed, stalls) if old.exists()]:
        raise DemoFailedError(f"{there[0]} exists already; choose an empty --dir")
    options = ("--steps", str(STEPS), "--every", str(EVERY))

    show(f"1. asyncckpt run -- torchrun, {RANKS} ranks: an uninterrupted training of {STEPS} steps")
    expected = _weights(child(_with_worker(_TRAIN, "--dir", str(plain), *options), environment))

    show(f"\n2. the same with --max-restarts 1; when step {CRASH_AT} is staged, one rank is killed by SIGKILL")
    crash = Crash(crashed / f"step-{CRASH_AT:06d}")
    command = _with_worker(_CRASH, str(CRASH_AT), "--dir", str(crashed), *options, restarts=1)
    try:
        lines = child(command, environment, on_line=crash.read)
    finally:
        crash.thaw()
    resumed = {
        line.partition(":")[0] for line in lines if line.endswith(f" at step {CRASH_AT}") and ": resumed " in line
    }
    _check(
        crash.happened and resumed == {f"rank {rank}" for rank in range(RANKS)},
        f"expected {RANKS} ranks to resume at step {CRASH_AT}; resumed: {sorted(resumed)}",
    )
    found = _weights(lines)
    show(f"\n   uninterrupted {expected}\n   crashed       {found}")
    _check(found == expected, "the final weights differ from those of the uninterrupted training")
    show("   the final weights are equal bit for bit")

    show("\n3. every checkpoint passes `asyncckpt verify`; one changed byte is found")
    checkpoints = sorted(str(p) for root in (plain, crashed) for p in root.iterdir())
    n_expected = 2 * STEPS // EVERY
    _check(len(checkpoints) == n_expected, f"expected {n_expected} checkpoints, found {', '.join(checkpoints)}")
    verify(checkpoints, EXIT_OK)
    show(f"   {len(checkpoints)} checkpoints verify without a fault")
    show("   " + _flip_byte(Path(latest_checkpoint(crashed) or ""), directory / "damaged"))

    show(f"\n4. stall of the training loop by a save of {STALL_NBYTES // 10**6} MB on each of {RANKS} ranks")
    table = child(_with_worker(_STALLS, "--dir", str(stalls), "--nbytes", str(STALL_NBYTES)), environment)
    _check(any(line.startswith("asyncckpt ") for line in table), "the stalls were not measured")
    show("\nall checks hold")


def _with_worker(*words: str, restarts: int = 0) -> list[str]:
    """Return the command that runs a module on all ranks, with a worker beside them."""
    return [*ASYNCCKPT, "run", "--", *_TORCHRUN, f"--max-restarts={restarts}", "-m", *words]


def _weights(lines: list[str]) -> str:
    """Return the fingerprint of the final weights, which every rank prints.

    Raises:
        DemoFailedError: A rank has not printed it, or the fingerprints differ.
    """
    found = [line.split()[-1] for line in lines if re.match(r"rank \d+: weights sha256 ", line)]
    are_alike = len(found) == RANKS and len(set(found)) == 1
    _check(are_alike, f"expected {RANKS} ranks with the same final weights; they printed {found}")
    return found[0]


def _flip_byte(checkpoint: Path, copy: Path) -> str:
    """Change a byte in a copy of a checkpoint, and return the line in which verify names the damaged file."""
    shutil.copytree(checkpoint, copy)
    shard = min(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[PAGE_NBYTES * 100] ^= 1
    shard.write_bytes(data)
    lines = verify([str(copy)], EXIT_CORRUPT)
    named = [line.strip().replace(f"{copy}/", "") for line in lines if shard.name in line]
    _check(bool(named), f"verify did not name the damaged file {shard.name}: {lines}")
    return named[0]


# ---- Output and child processes


def show(line: str) -> None:
    """Print a line of the demo."""
    print(line, flush=True)


def verify(paths: Sequence[str], code: int) -> list[str]:
    """Run `asyncckpt verify`, which must exit with `code`; return the lines that it printed."""
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
    """Run a command to its end. Every `SAY_EVERY_S`, print a line to show that it is still running.

    Args:
        command: The command.
        environment: Its environment.
        what: Name of the command in messages.
        code: The exit code that is expected.
        on_line: Called with each line of its stdout, before the next one is read.

    Returns:
        The lines of its stdout.

    Raises:
        DemoFailedError: It took longer than `RUN_TIMEOUT_S`, or exited with another code; its stderr is printed.

    Blocks: until the command has ended, at most `RUN_TIMEOUT_S` and the timeouts of `end`.
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
                else (f"exited with code {process.returncode}, expected {code}")
            )
            raise DemoFailedError(f"{what} {how}")
    return lines


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all its descendants: by SIGTERM to the process, and after `END_TIMEOUT_S` by SIGKILL to all.

    Blocks: until they have ended, at most `END_TIMEOUT_S` and `KILL_TIMEOUT_S`.
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
        # Not `psutil.wait_procs`, which does not count a zombie as ended.
        _wait(lambda: all(start_ticks(one.pid) is None for one in alive), KILL_TIMEOUT_S)


def _thaw(*pids: int) -> None:
    """Continue stopped processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _wait(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `holds` returns True, at most `timeout_s`; return its last result."""
    deadline = time.monotonic() + timeout_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


class Crash:
    """Controls the crash. The ranks stop the worker first; it is continued when all training processes are dead.

    Args:
        checkpoint: Path of the save that is staged at the crash.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.happened = False
        self._checkpoint = checkpoint
        self._trainers: dict[int, int | None] = {}
        self._worker = 0

    def read(self, line: str) -> None:
        """Print a line of the ranks. At the crash, wait until all trainers are dead and continue the worker.

        Blocks: up to `DEATH_TIMEOUT_S` and `COMMIT_TIMEOUT_S`.

        Raises:
            DemoFailedError: A trainer does not end; the crash was not between staged and written; or the save is not
                committed.
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
            self._continue_worker(line)

    def _continue_worker(self, line: str) -> None:
        is_between = line.endswith("staged=True written=False")
        _check(is_between, f"the crash was not between staged and written: {line}")
        n_trainers = len(self._trainers)
        _check(n_trainers == RANKS, f"{n_trainers} ranks have printed their process IDs, expected {RANKS}")
        are_dead = _wait(self._all_dead, DEATH_TIMEOUT_S)
        _check(are_dead, f"the trainers did not end within {DEATH_TIMEOUT_S:g} s")
        manifest, name = self._checkpoint / "manifest.json", self._checkpoint.name
        _check(not manifest.exists(), f"{name} was committed before the crash: the worker was not stopped")
        began = time.monotonic()
        self.thaw()
        is_committed = _wait(manifest.exists, COMMIT_TIMEOUT_S)
        _check(is_committed, f"the worker did not commit {self._checkpoint} within {COMMIT_TIMEOUT_S:g} s")
        took_s = time.monotonic() - began
        show(f"   all training processes are dead; the worker continues and commits {name} in {took_s:.2f} s")

    def thaw(self) -> None:
        """Continue the worker, if it was stopped."""
        if self._worker:
            _thaw(self._worker)

    def _all_dead(self) -> bool:
        return all(ticks is None or start_ticks(pid) != ticks for pid, ticks in self._trainers.items())
