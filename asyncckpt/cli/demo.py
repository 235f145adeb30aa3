"""`asyncckpt demo`: a rank is killed between `staged` and `written`, all resume, and the weights end bit-identical."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from asyncckpt.checkpoints import latest_checkpoint
from asyncckpt.cli import demo_children as children
from asyncckpt.cli.demo_children import RANKS, DemoFailedError, heartbeat, show
from asyncckpt.cli.demo_crash import Crash
from asyncckpt.cli.output import EXIT_CORRUPT, EXIT_FAILED, EXIT_OK
from asyncckpt.format.layout import PAGE_NBYTES

HELP = "show on this machine that a killed training loses nothing"
EXAMPLES = (
    "asyncckpt demo",
    "asyncckpt demo --dir /scratch/demo",
)
STEPS, EVERY, CRASH_AT = 40, 10, 20
STALL_NBYTES = 200_000_000
ROOM_NBYTES = 1_000_000_000
"""What the demo has on the disk at once: 8 checkpoints of 37 MB, a copy of one, and a save of 2 x 200 MB."""

LITTLE_NBYTES = 64_000_000
"""With less than this left, a failure of the demo is blamed on the disk: its checkpoints are about as large."""

INTRODUCTION = f"""\
This takes 1 to 2 minutes on two cores, longer the first time. It trains a small GPT on {RANKS} ranks and proves that
  - a rank killed between `staged` and `written` loses nothing: the worker commits the checkpoint without any trainer;
  - the restarted ranks resume from it and end with the same weights, bit for bit, as a training that nothing disturbs;
  - every checkpoint verifies, and one flipped byte is found.
It ends with what a save costs a training loop, beside torch.save and dcp.async_save.
"""
_TRAIN, _CRASH = "asyncckpt.examples.train_gpt", "asyncckpt.examples.train_gpt_crash"
_STALLS = "asyncckpt.examples.stalls"
_ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning",  # torch warns where numpy is not installed
    "OMP_NUM_THREADS": "1",  # torchrun warns where it is not set
    # Or restarted ranks read, in the store of torchrun, where those before them listened: pytorch issue 135712.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--dir", help="where to put the checkpoints (default: a temporary directory, removed after)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 when any check fails."""
    directory = Path(args.dir or tempfile.mkdtemp(prefix="asyncckpt-demo-")).absolute()
    # Bytecode is written whatever the environment says: without it each of some 20 processes compiles torch anew.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    show(INTRODUCTION)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if lack := _lack_of_room(directory, ROOM_NBYTES):
            raise DemoFailedError(lack)
        with heartbeat():
            _play(directory, {**inherited, **_ENVIRONMENT})
    except (DemoFailedError, OSError) as error:
        lack = _lack_of_room(directory, LITTLE_NBYTES)
        print(f"\nDEMO FAILED: {lack or error}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if not args.dir:
            shutil.rmtree(directory, ignore_errors=True)
    return EXIT_OK


def _lack_of_room(directory: Path, nbytes: int) -> str | None:
    """Return a message if the disk has fewer than so many bytes left; None: it has them, or cannot be asked."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return None
    if free >= nbytes:
        return None
    return (
        f"the disk that holds {directory} is full: {free / 1e6:.0f} MB are free, and the demo needs "
        f"{ROOM_NBYTES / 1e6:.0f} MB; make room, or name a directory on another disk by --dir"
    )


def _play(directory: Path, environment: Mapping[str, str]) -> None:
    plain, crashed, stalls = directory / "uninterrupted", directory / "crashed", directory / "stalls"
    for old in (plain, crashed, stalls):
        if old.exists():
            raise DemoFailedError(f"{old} exists already; choose an empty --dir")
    options = ("--steps", str(STEPS), "--every", str(EVERY))

    show(f"1. asyncckpt run -- torchrun, {RANKS} ranks: a training of {STEPS} steps that nothing disturbs")
    expected = _weights(children.train(children.with_a_worker(_TRAIN, "--dir", str(plain), *options), environment))

    show(f"\n2. the same with --max-restarts 1; after the save of step {CRASH_AT} is staged one rank is SIGKILLed")
    crash = Crash(crashed / f"step-{CRASH_AT:06d}")
    command = children.with_a_worker(_CRASH, str(CRASH_AT), "--dir", str(crashed), *options, restarts=1)
    try:
        lines = children.train(command, environment, on_line=crash.read)
    finally:
        crash.thaw()
    if not crash.happened:
        raise DemoFailedError("no rank has crashed")
    for rank in range(RANKS):
        if not any(re.fullmatch(rf"rank {rank}: resumed from .* at step {CRASH_AT}", line) for line in lines):
            raise DemoFailedError(f"rank {rank} did not resume at step {CRASH_AT}")
    found = _weights(lines)
    show(f"\n   uninterrupted {expected}\n   crashed       {found}")
    if found != expected:
        raise DemoFailedError("the final weights differ from the uninterrupted training's")
    show("   final weights are equal bit for bit")

    show("\n3. every checkpoint verifies; one flipped byte is found")
    checkpoints = sorted(str(p) for root in (plain, crashed) for p in root.iterdir())
    if len(checkpoints) != 2 * STEPS // EVERY:
        raise DemoFailedError(f"{2 * STEPS // EVERY} checkpoints expected, there are: {', '.join(checkpoints)}")
    children.verify(checkpoints, EXIT_OK)
    show(f"   {len(checkpoints)} checkpoints verify")
    show("   " + _flip(Path(latest_checkpoint(crashed) or ""), directory / "damaged"))

    show(f"\n4. what a save costs the training loop, {STALL_NBYTES // 10**6} MB of state on each of {RANKS} ranks")
    table = children.train(
        children.with_a_worker(_STALLS, "--dir", str(stalls), "--nbytes", str(STALL_NBYTES)), environment
    )
    if not any(line.startswith("asyncckpt ") for line in table):
        raise DemoFailedError("the stalls were not measured")
    show("\nall checks hold")


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
    with shard.open("r+b") as file:
        file.seek(PAGE_NBYTES * 100)
        byte = file.read(1)[0]
        file.seek(PAGE_NBYTES * 100)
        file.write(bytes([byte ^ 1]))
    said = children.verify([str(copy)], EXIT_CORRUPT)
    if shard.name not in said:
        raise DemoFailedError(f"verify did not name the damaged file:\n{said}")
    return next(line for line in said.splitlines() if shard.name in line).strip().replace(f"{copy}/", "")
