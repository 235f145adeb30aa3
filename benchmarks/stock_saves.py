"""`dcp.save` and `dcp.async_save` of stock torch: with its own `FileSystemWriter`, and with ours.

    python -m benchmarks.stock_saves [--rounds 5] [--state gpt] [--dir D]

Each round runs every writer in a process of its own, in turn: `dcp.save` to one path after the other, as a training
does with one writer, and then `dcp.async_save` while a thread of the caller would train on. The first save of a process
is told apart: it makes the memory that the later ones use. Stock's files are flushed too (`sync_files`, its default);
it checks no sums. What a writer has written is removed, and discarded by the disk, before the next one begins.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from asyncckpt.dcp import StorageWriter
from benchmarks import machine, quiet, sources, states
from benchmarks.spread import text_of

RESULTS = Path(__file__).parent / "results"
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt": states.gpt,
    "small": states.small,
    "tiny": lambda: states.small(count=20),
}
SAVES = 4
"""Of each kind in a process."""

RING_SHARE = 8
"""The ring is one part in so many of the state."""

WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "stock": lambda path, nbytes: FileSystemWriter(str(path)),
    "stock, 2 threads": lambda path, nbytes: FileSystemWriter(str(path), thread_count=2, single_file_per_rank=False),
    "ours, worker": lambda path, nbytes: StorageWriter(path),
    "ours, ring": lambda path, nbytes: StorageWriter(path, arena_limit_bytes=max(32 << 20, nbytes // RING_SHARE)),
    "ours, in process": lambda path, nbytes: StorageWriter(path, use_worker=False),
}
DEADLINE_S = 300.0
"""For a writer in a round."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state", choices=sorted(STATES), default="gpt")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--writer", choices=sorted(WRITERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.writer is not None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(save_with(args.writer, STATES[args.state](), args.dir)))
        return
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    try:
        result = {
            "benchmark": "stock_saves",
            "machine": machine.describe(directory),
            "code": sources.code_of("stock_saves"),
            "state": args.state,
            "nbytes": states.nbytes(STATES[args.state]()),
            "rounds": [_round(directory, args.state, number) for number in range(args.rounds)],
        }
    finally:
        shutil.rmtree(directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "stock_saves.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def save_with(name: str, state: dict[str, Any], directory: Path) -> dict[str, list[float]]:
    """Return seconds of each `dcp.save`, of each call of `dcp.async_save`, and until each of these was written.

    Args:
        name: Of the writer.
        state: What is saved; `step` in it is counted up.
        directory: Where to write; nothing is left there.
    """
    found: dict[str, list[float]] = {"save_s": [], "async_call_s": [], "async_written_s": []}
    writer = WRITERS[name](directory / "none", states.nbytes(state))
    for number in range(2 * SAVES):
        state["step"], path = number, directory / str(number)
        began = time.perf_counter()
        if number < SAVES:
            save(state, checkpoint_id=str(path), storage_writer=writer)
            found["save_s"].append(time.perf_counter() - began)
        else:
            pending: Any = async_save(state, checkpoint_id=str(path), storage_writer=writer)
            found["async_call_s"].append(time.perf_counter() - began)
            pending.result(DEADLINE_S)
            found["async_written_s"].append(time.perf_counter() - began)
        shutil.rmtree(path)
        quiet.until_discarded(directory)
    return found


def _round(directory: Path, state: str, number: int) -> dict[str, Any]:
    """Return one round, whose first writer is another than that of the round before."""
    names = list(WRITERS)
    turned = names[number % len(names) :] + names[: number % len(names)]
    row: dict[str, Any] = quiet.until_idle() | {"writers": {}}
    for name in turned:
        row["writers"][name] = _in_a_process(name, state, directory)
    return row


def _in_a_process(name: str, state: str, directory: Path) -> dict[str, list[float]]:
    """Return what `save_with` measures in a process of its own, whose worker is its own too."""
    environment = os.environ | {"ASYNCCKPT_JOB": f"bench-{secrets.token_hex(4)}"}
    environment.pop("ASYNCCKPT_ENDPOINT", None)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stock_saves", "--writer", name]
    command += ["--state", state, "--dir", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    finally:
        stop = [sys.executable, "-m", "asyncckpt", "worker", "stop"]
        subprocess.run(stop, capture_output=True, timeout=60, env=environment, check=False)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(result: dict[str, Any]) -> None:
    """Print medians and quartiles over all rounds."""
    print(f"{result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds; seconds, median (quartiles)")
    print(f"{'':18s} {'first save':22s} {'later saves':22s} {'async_save, the call':22s} until written")
    for name in WRITERS:
        rows = [row["writers"][name] for row in result["rounds"]]
        cells = [[row["save_s"][0] for row in rows], [s for row in rows for s in row["save_s"][1:]]]
        cells += [[s for row in rows for s in row[of]] for of in ("async_call_s", "async_written_s")]
        print(f"{name:18s} " + " ".join(f"{text_of(values):22s}" for values in cells))


if __name__ == "__main__":
    main()
