"""`asyncckpt demo`: a training is killed between `staged` and `written`, resumes, and ends bit-identical."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from asyncckpt.checkpoints import latest_checkpoint
from asyncckpt.cli.output import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE
from asyncckpt.format.layout import PAGE_NBYTES

HELP = "show on this machine that a killed training loses nothing"
EXAMPLE = "asyncckpt demo"
STEPS, EVERY, CRASH_AT = 40, 10, 20
COMMIT_TIMEOUT_S = 30.0
RUN_TIMEOUT_S = 300.0
"""For one training, and for one look at the checkpoints; on two cores they take 5 s and 1 s."""
DRAIN_TIMEOUT_S = 60.0
_TRAINING = (sys.executable, "-m", "asyncckpt.examples.train_gpt")
_ASYNCCKPT = (sys.executable, "-m", "asyncckpt")


_QUIET = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning"}
"""torch says so at every start where numpy is not installed; nothing here needs it."""


class DemoFailedError(Exception):
    """A check of the demo did not hold; the message says which."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--dir", help="where to put the checkpoints (default: a temporary directory, removed after)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 when any check fails."""
    directory = Path(args.dir or tempfile.mkdtemp(prefix="asyncckpt-demo-")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    # A job of its own: the trainings start their own worker and meet no other.
    environment = {**os.environ, "ASYNCCKPT_JOB": f"demo-{secrets.token_hex(4)}", "PYTHONUNBUFFERED": "1", **_QUIET}
    environment.pop("ASYNCCKPT_ENDPOINT", None)
    code = EXIT_OK
    try:
        _play(directory, environment)
    except DemoFailedError as error:
        print(f"\nDEMO FAILED: {error}", file=sys.stderr)
        code = EXIT_FAILED
    finally:
        if not _drain(environment):
            stop = f"ASYNCCKPT_JOB={environment['ASYNCCKPT_JOB']} asyncckpt worker stop"
            print(f"\nDEMO FAILED: its worker did not end within {DRAIN_TIMEOUT_S:g} s; try {stop}", file=sys.stderr)
            code = EXIT_FAILED
        if not args.dir:
            shutil.rmtree(directory, ignore_errors=True)
    return code


def _drain(environment: dict[str, str]) -> bool:
    """Let the worker finish and exit; whether it has. One that does not answer never was, or has ended before."""
    command = [*_ASYNCCKPT, "worker", "drain", "--timeout-s", f"{DRAIN_TIMEOUT_S:g}"]
    try:
        # Twice the time: the command starts Python and may wait for an answer before it waits for the exit.
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=2 * DRAIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (EXIT_OK, EXIT_UNREACHABLE)


def _play(directory: Path, environment: dict[str, str]) -> None:
    plain, crashed = directory / "uninterrupted", directory / "crashed"
    for old in (plain, crashed):
        if old.exists():
            raise DemoFailedError(f"{old} exists already; choose an empty --dir")
    print(f"1. a training of {STEPS} steps that nothing disturbs")
    expected = _weights(_train(plain, environment))

    print(f"\n2. the same training, SIGKILLed right after the save of step {CRASH_AT} was staged")
    lines = _train(crashed, environment, crash_at=CRASH_AT)
    died = next((line for line in lines if line.startswith("crash at")), "nothing")
    if "staged=True written=False" not in died:
        raise DemoFailedError(f"the crash did not fall between staged and written: {died}")
    checkpoint = crashed / f"step-{CRASH_AT:06d}"
    _wait_for_commit(checkpoint)
    print(f"   the trainer is dead, and the worker has committed {checkpoint.name}")

    print("\n3. a second start resumes from it and goes on to the end")
    lines = _train(crashed, environment)
    if not any(line.startswith("resumed from") and line.endswith(f"at step {CRASH_AT}") for line in lines):
        raise DemoFailedError(f"the second start did not resume at step {CRASH_AT}")
    found = _weights(lines)
    print(f"\n   uninterrupted {expected}\n   crashed       {found}")
    if found != expected:
        raise DemoFailedError("the final weights differ from the uninterrupted training's")
    print("   final weights are equal bit for bit")

    print("\n4. every checkpoint verifies; one flipped byte is found")
    checkpoints = sorted(str(p) for root in (plain, crashed) for p in root.iterdir())
    _verify(checkpoints, 0)
    print(f"   {len(checkpoints)} checkpoints verify")
    print("   " + _flip(Path(latest_checkpoint(crashed) or ""), directory / "damaged"))
    print("\nall checks hold")


def _train(directory: Path, environment: dict[str, str], crash_at: int = -1) -> list[str]:
    """Run a training to its end, and return the lines that it printed. One that takes too long is killed."""
    command = [*_TRAINING, "--dir", str(directory), "--steps", str(STEPS), "--every", str(EVERY)]
    command += ["--crash-at", str(crash_at)]
    lines, late = [], threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        timer = threading.Timer(RUN_TIMEOUT_S, give_up)
        timer.start()
        try:
            for line in process.stdout:
                print(f"   | {line}", end="", flush=True)
                lines.append(line.rstrip("\n"))
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
    if late.is_set():  # looked at first: a crash that was ordered is a SIGKILL too
        raise DemoFailedError(f"the training took longer than {RUN_TIMEOUT_S:g} s, and was killed")
    wanted = -signal.SIGKILL if crash_at >= 0 else 0
    if process.returncode != wanted:
        raise DemoFailedError(f"the training ended with {process.returncode}, expected {wanted}")
    return lines


def _weights(lines: list[str]) -> str:
    return next((line.split()[-1] for line in lines if line.startswith("weights sha256")), "none")


def _wait_for_commit(checkpoint: Path) -> None:
    began = time.monotonic()
    while not (checkpoint / "manifest.json").exists():
        if time.monotonic() - began > COMMIT_TIMEOUT_S:
            raise DemoFailedError(f"the worker did not commit {checkpoint} within {COMMIT_TIMEOUT_S:g} s")
        time.sleep(0.005)


def _verify(paths: list[str], code: int) -> str:
    try:
        done = subprocess.run(
            [*_ASYNCCKPT, "verify", *paths], capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise DemoFailedError(f"verify took longer than {RUN_TIMEOUT_S:g} s, and was killed") from error
    if done.returncode != code:
        raise DemoFailedError(f"verify ended with {done.returncode}, expected {code}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _flip(checkpoint: Path, copy: Path) -> str:
    shutil.copytree(checkpoint, copy)
    shard = next(copy.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(PAGE_NBYTES * 100)
        byte = file.read(1)[0]
        file.seek(PAGE_NBYTES * 100)
        file.write(bytes([byte ^ 1]))
    said = _verify([str(copy)], EXIT_CORRUPT)
    if not re.search(re.escape(shard.name), said):
        raise DemoFailedError(f"verify did not name the damaged file:\n{said}")
    return next(line for line in said.splitlines() if shard.name in line).strip().replace(f"{copy}/", "")
