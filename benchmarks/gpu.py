"""What saving costs a training on a GPU: stall, step time while a save is under way, and how fast the copy is.

    python -m benchmarks.gpu [--rounds 5] [--saves 6] [--budget-s 1500] [--tests] [--dir D] [--out FILE]

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state. Compared, in the same run and in turn: copies behind
the training, a copy on the GPU first, copies in front of the training, and `torch.distributed.checkpoint.async_save`
with pinned memory. Each save begins behind a step that the GPU has not ended, and steps go on until it is written.

How fast the copy is, is measured apart, with nothing else on the GPU: a save, and beside it one `Tensor.copy_` of as
many bytes into pinned memory. `--tests` runs the tests that need a GPU first; what became of them is in the result
file. Without a GPU nothing is measured: exit code 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from benchmarks import gpu_tests, kept, machine, quiet, sources, states
from benchmarks.gpu_training import Loop, Pinned, nothing
from benchmarks.spread import quartiles

RESULTS = Path(__file__).parent / "results"
QUIET_STEPS = 20
KINDS = ("overlap", "device", "blocking", "dcp_async")
DEADLINE_S = 600.0
TARGETS = {"stall_overlap_s": 0.005, "stall_device_s": 0.005, "step_ratio": 1.03}
"""At most; the speed of the copy is to be at least `D2H_AT_LEAST`."""
D2H_AT_LEAST = 0.9

Begin = Callable[[Path, dict[str, Any]], Any]
"""Begins a save of a state, and returns the future of its files."""


def main() -> int:
    """Measure, print, and keep the result file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6, help="of each kind in a round")
    parser.add_argument("--budget-s", type=float, default=1500.0, help="no round is begun that would not end within it")
    parser.add_argument("--tests", action="store_true", help="run tests/gpu first")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file (default: named after the GPU)")
    args = parser.parse_args()
    tests = gpu_tests.run() if args.tests else None  # before this process has memory on the GPU
    if not torch.cuda.is_available():
        print("torch finds no GPU here, so nothing was measured.", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "gpu", "state": "gpt", "gpu": gpu, "cuda": torch.version.cuda, "tests": tests}
    head |= {"machine": machine.describe(directory), "code": sources.code_of("gpu")}
    head |= {"saves": args.saves, "rounds_asked": args.rounds, "budget_s": args.budget_s}
    file = kept.Kept(args.out or RESULTS / f"gpu-{'-'.join(gpu.lower().split())}.json", head)
    try:
        file.end(measure(Loop("cuda"), directory, file, kept.Budget(args.budget_s)))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    report(file.result)
    return 0 if tests is None or tests["exit_code"] == 0 else 1


def measure(loop: Loop, directory: Path, file: kept.Kept, budget: kept.Budget) -> str:
    """Put every round into the result file; returns why no more are made."""
    result = file.result
    nbytes = result["nbytes"] = states.nbytes(loop.state())
    pinned, warnings = Pinned(loop.device, nbytes), _Warnings()
    logging.getLogger("asyncckpt").addHandler(warnings)
    result["warnings"] = warnings.texts  # a copy that was not pinned, or found no room on the GPU, is another figure
    with (
        asyncckpt.AsyncCheckpointer(staging="overlap") as behind,
        asyncckpt.AsyncCheckpointer(staging="device") as apart,
        asyncckpt.AsyncCheckpointer(staging="blocking") as before,
        ExitStack() as ended,
    ):
        ended.callback(logging.getLogger("asyncckpt").removeHandler, warnings)
        loop.attach(behind.attach)
        for checkpointer in (behind, apart, before):
            checkpointer.prepare(loop.state())
        begins = {kind: _ours(of) for kind, of in zip(KINDS, (behind, apart, before), strict=False)}
        begins["dcp_async"] = _dcp(loop, ended)
        result["first_save"] = {kind: _save(loop, begins[kind], directory / f"first-{kind}") for kind in KINDS}

        def make() -> dict[str, Any]:
            row: dict[str, Any] = {"quiet_step_s": [loop.quiet_step_s(QUIET_STEPS)], "alone": []}
            for turn in range(result["saves"]):
                row["alone"].append(_copy_alone(loop, behind, pinned, directory / "alone"))
                for kind in _turned(KINDS, turn + len(file.rounds)):
                    row.setdefault(kind, []).append(_save(loop, begins[kind], directory / kind))
            row["quiet_step_s"].append(loop.quiet_step_s(QUIET_STEPS))
            result["figures"] = figures([*file.rounds, row])
            return row

        return file.grow(budget, make)


class _Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _turned(kinds: tuple[str, ...], number: int) -> tuple[str, ...]:
    first = number % len(kinds)
    return kinds[first:] + kinds[:first]


def _ours(checkpointer: asyncckpt.AsyncCheckpointer) -> Begin:
    return lambda path, state: checkpointer.save(state, path).written


def _dcp(loop: Loop, ended: ExitStack) -> Begin:
    """`async_save` with its best options: a thread, pinned memory that is kept, copies in a stream of its own.

    The next `optimizer.step()` waits for its copies, as its documentation says. It does not order them after the
    kernels that are still to run at the call, so that what it copies may be of before the last step; nobody loads it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

    cuda = loop.device.type == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
        )
    )
    ended.callback(stager.close)

    def begin(path: Path, state: dict[str, Any]) -> Any:
        writer = FileSystemWriter(path, thread_count=2)
        response = async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        assert isinstance(response, AsyncSaveResponse)
        loop.before_step = lambda: response.staging_completion.result(DEADLINE_S)
        return response.upload_completion

    return begin


def _save(loop: Loop, begin: Begin, path: Path) -> dict[str, Any]:
    """Save behind a step that the GPU has not ended, and step until the files are written.

    Returns:
        "took_s" from before that step until the GPU has ended the last of "steps"; "save_s" in the call, "wait_s" in
        hooks and in front of `optimizer.step()`.

    Raises:
        TimeoutError: The files are not written.
    """
    loop.settle()
    began = time.perf_counter()
    loop.step()
    state, loop.waited_s, steps = loop.state(), 0.0, 1
    called = time.perf_counter()
    written = begin(path, state)
    save_s = time.perf_counter() - called
    while not written.done():
        if time.perf_counter() - began > DEADLINE_S:
            raise TimeoutError(f"{path} is not written after {DEADLINE_S:g} s")
        loop.step()
        steps += 1
    loop.settle()
    took_s = time.perf_counter() - began
    loop.before_step = nothing
    phases = getattr(written.result(), "seconds", None)  # of ours
    _remove(path)
    return {"save_s": save_s, "wait_s": loop.waited_s, "steps": steps, "took_s": took_s, "phases_s": phases}


def _copy_alone(loop: Loop, checkpointer: asyncckpt.AsyncCheckpointer, pinned: Pinned, path: Path) -> dict[str, Any]:
    """Save with nothing else on the GPU, and copy as many bytes into pinned memory.

    Returns:
        "copy_s": from where the save has its plan and its slot until the whole state is there, without the seal. The
        clock of the copying thread alone would begin when the first copies have been running for a while.
    """
    state = loop.state()
    loop.settle()
    pinned_s = pinned.copy_s()
    called = time.perf_counter()
    handle = checkpointer.save(state, path)
    handle.staged.result(DEADLINE_S)
    staged_s = time.perf_counter() - called
    phases = handle.written.result(DEADLINE_S).seconds
    _remove(path)
    copy_s = staged_s - sum(phases[name] for name in ("plan", "acquire", "seal"))
    return {"pinned_s": pinned_s, "copy_s": copy_s, "staged_s": staged_s, "phases_s": phases}


def _remove(path: Path) -> None:
    shutil.rmtree(path)
    quiet.until_discarded(path.parent)


def figures(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every figure: its values over all saves of all rounds, their median and quartiles.

    `d2h_over_pinned` is a ratio of speeds, of one save and the copy beside it. `step_ratio` (behind the training),
    `step_ratio_device` and so on are what the steps took, from the one in front of `save()` until the one in which the
    files were written, over as many quiet ones of the same round: the stall is in it, as far as the GPU had to wait
    for it. `lost_*_s` is the difference of the two.
    """
    found: dict[str, list[float]] = {
        "d2h_over_pinned": [one["pinned_s"] / one["copy_s"] for row in rounds for one in row["alone"]]
    }
    for kind in KINDS:
        saves = [(save, statistics.mean(row["quiet_step_s"])) for row in rounds for save in row[kind]]
        stall = "dcp_async_stall_s" if kind == "dcp_async" else f"stall_{kind}_s"
        ratio = "step_ratio" if kind == "overlap" else f"step_ratio_{kind}"
        found[stall] = [save["save_s"] + save["wait_s"] for save, _ in saves]
        found[ratio] = [save["took_s"] / (save["steps"] * quiet_s) for save, quiet_s in saves]
        found[f"lost_{kind}_s"] = [save["took_s"] - save["steps"] * quiet_s for save, quiet_s in saves]
    return {name: _spread(values) for name, values in found.items()}


def _spread(values: list[float]) -> dict[str, Any]:
    low, median, high = quartiles(values)
    return {"median": median, "quartiles": [low, high], "values": values}


def verdict(name: str, figure: dict[str, Any]) -> str:
    """Return "reached", "missed" or "within the spread"; nothing for a figure without a target."""
    if name == "d2h_over_pinned":
        reached, excluded = figure["median"] >= D2H_AT_LEAST, figure["quartiles"][1] < D2H_AT_LEAST
    elif name in TARGETS:
        reached, excluded = figure["median"] <= TARGETS[name], figure["quartiles"][0] > TARGETS[name]
    else:
        return ""
    return "reached" if reached else "missed" if excluded else "within the spread"


def report(result: dict[str, Any]) -> None:
    """Print every figure, and each target as reached or missed."""
    print(f"{result['gpu']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds")
    if result["tests"] is not None:
        print(f"  tests: {gpu_tests.text_of(result['tests'])}")
    for text in result["warnings"]:
        print(f"  warned: {text}")
    for name, figure in result.get("figures", {}).items():
        low, high = figure["quartiles"]
        print(f"  {name:24s} {figure['median']:9.4f} ({low:.4f} to {high:.4f})   {verdict(name, figure)}")


if __name__ == "__main__":
    sys.exit(main())
