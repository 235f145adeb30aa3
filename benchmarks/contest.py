"""One contender in one process: saves beside a training loop, then loads. Part of `benchmarks.compare`.

    python -m benchmarks.contest NAME --state gpt --saves 6 [--saves-s S] [--saves-only] [--when-gone D] --dir D

Prints where it is, line by line, and in the end one line of JSON: what it measured, or the error that ended it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import loads, machine, states, training
from benchmarks.contender import Contender, Saved, remove
from benchmarks.contenders import CONTENDERS
from benchmarks.pss import pss
from benchmarks.quiet import until_discarded

QUIET_STEPS = 1
"""Before the saves; one more after each, while its files are removed."""

SAVE_S = 120.0
"""A save that takes longer is an error of the contender; `compare` sets a deadline for all that it does."""

SAMPLE_S = 0.05
MEMORY_SAVES = 3
MEMORY_S = 15.0
"""So many saves have their memory measured; none but the first is begun later than this after it."""

FEWEST_SAVES = 3
"""Of which the first is `cold`; however long they take."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--state", default="gpt")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--saves-s", type=float, help=f"no save after {FEWEST_SAVES} is begun later than this")
    parser.add_argument("--saves-only", action="store_true", help="measure neither memory nor loads")
    parser.add_argument("--when-gone", type=Path, help="no save begins before this has been removed")
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    extent = Extent(args.saves, args.saves_s, args.saves_only, args.when_gone)
    try:
        found = measure(args.name, args.state, extent, args.dir)
    except Exception as error:  # the peer's, whatever it is: it goes into the table
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        found = {"error": f"{type(error).__name__}: {text}"[:300]}
    print(json.dumps(found), flush=True)
    os._exit(0)  # whatever a peer has left running


class Extent(NamedTuple):
    """How much is measured.

    Attributes:
        saves: So many, the first included.
        saves_s: None is begun later than this after the first, unless there are fewer than `FEWEST_SAVES`; None: all.
        saves_only: Neither memory nor loads.
        when_gone: What is being removed meanwhile: no save begins before it is.
    """

    saves: int
    saves_s: float | None = None
    saves_only: bool = False
    when_gone: Path | None = None

    def goes_on(self, made: int, since_s: float) -> bool:
        """Return whether there is to be one more save."""
        return made < self.saves and (made < FEWEST_SAVES or self.saves_s is None or since_s < self.saves_s)


def measure(name: str, state: str, extent: Extent, directory: Path) -> dict[str, Any]:
    """Return every figure of one contender."""
    steps = machine.Steps()
    steps.begin("making the state")
    loop = training.make(state)
    loop.step()
    steps.begin("making the checkpointer")
    process = psutil.Process()
    fds = process.num_fds()
    contender = CONTENDERS[name](loop)
    nbytes = states.nbytes(loop.state())
    steps.begin("quiet steps")
    quiet = [loop.step() for _ in range(QUIET_STEPS)]
    before = pss()  # of everybody here: a step's own memory is there, and nothing of a checkpoint
    steps.begin("preparing")
    prepared_s = contender.prepare()
    if prepared_s is not None:
        quiet.append(loop.step())  # as a training goes on
    steps.begin("waiting for the disk")
    _wait_until_gone(extent.when_gone)
    until_discarded(directory)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    while extent.goes_on(len(rows), time.perf_counter() - began):
        steps.begin("saving", f" {len(rows) + 1}")
        path = directory / f"{len(rows)}"
        rows.append(save(contender, path))
        steps.begin("quiet steps")
        removing = threading.Thread(target=remove, args=(path,))
        removing.start()  # it waits for the disk, and takes no processor from the step
        quiet.append(loop.step())
        steps.begin("removing")
        removing.join()
        until_discarded(directory)
    added_fds = process.num_fds() - fds
    found: dict[str, Any] = {}
    if not extent.saves_only:
        steps.begin("a save whose memory is measured")
        peaks = [peak - before for peak in _peaks(contender, directory / "kept")]
        until_discarded(directory)
        steps.begin("loading")
        ways = sorted(contender.loads().items(), key=lambda way: way[0] != contender.fresh)
        loaded = {how: loads.measure(loop, load, directory / "kept") for how, load in ways}
        found = {
            "memory_over_state": max(peaks) / nbytes,
            "memory_noise": (max(peaks) - min(peaks)) / nbytes,
            "fresh_load": contender.fresh,
            **{f"load_{name}": seconds for name, seconds in loaded[""].items()},
            "other_loads": {how: seconds for how, seconds in loaded.items() if how},
        }
    steps.begin("closing")
    contender.close()
    quiet_s = statistics.median(quiet)
    for row in rows:
        row["lost_s"] = row.pop("until_s") - row["steps"] * quiet_s
    return {
        "nbytes": nbytes,
        "fsyncs": contender.fsyncs,
        "verifies": contender.verifies,
        "outlives": contender.outlives,
        "added_fds": added_fds,
        "prepare_s": prepared_s,
        "quiet_step_s": quiet,
        "cold": rows[0],
        "warm": rows[1:],
        **found,
        "phases_s": steps.end(),
    }


def _wait_until_gone(path: Path | None) -> None:
    until = time.monotonic() + SAVE_S
    while path is not None and path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is still being removed")
        time.sleep(0.02)


def save(contender: Contender, path: Path, all_done: Callable[[bool], bool] = bool) -> dict[str, Any]:
    """Save, and train until everything is on the disk; `all_done` says of ranks whether it is for every one of them.

    `state_s` is what torch takes to make the state dict: part of what is lost by a save, not of the stall.
    """
    loop = contender.loop
    loop.waited_s, steps = 0.0, 0
    asked = time.perf_counter()
    state = loop.state()
    began = time.perf_counter()
    saved = contender.save(path, state)
    stall_s = time.perf_counter() - began
    del state
    flushed = _on_disk(contender, saved, path, began)
    loop.before_step = lambda: _wait(saved.staged)
    try:
        while not all_done(flushed.done()):
            loop.step()
            steps += 1
            if time.perf_counter() - began > SAVE_S:
                raise TimeoutError(f"a save took longer than {SAVE_S:.0f} s")
    finally:
        loop.before_step = lambda: None
    until_s = time.perf_counter() - asked
    stall_s += loop.waited_s
    return {
        "stall_s": stall_s,
        "durable_s": flushed.result(),
        "until_s": until_s,
        "steps": steps,
        "state_s": began - asked,
    }


def _wait(staged: Future[Any]) -> None:
    concurrent.futures.wait([staged], SAVE_S)


def _on_disk(contender: Contender, saved: Saved, path: Path, began: float) -> Future[float]:
    """Return a future of the seconds until the checkpoint is flushed, by the contender or, where it does not, by us."""
    found: Future[float] = Future()

    def end() -> None:
        try:
            saved.written.result(SAVE_S)
            if not contender.fsyncs:
                _fsync(path)
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(time.perf_counter() - began)

    if saved.written.done():  # it has kept the training waiting; so does what is missing
        end()
    else:
        threading.Thread(target=end, daemon=True).start()
    return found


def _fsync(path: Path) -> None:
    """Flush everything below `path`, and the directories."""
    for place, _, files in os.walk(path):
        for name in (*files, "."):
            fd = os.open(os.path.join(place, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def _peaks(contender: Contender, path: Path) -> list[int]:
    """Return the most memory that is in use during each of some saves of which the last one is left."""
    found: list[int] = []
    began = time.perf_counter()
    while not found or (len(found) < MEMORY_SAVES and time.perf_counter() - began < MEMORY_S):
        remove(path)
        found.append(_peak_of_a_save(contender, path))
    return found


def _peak_of_a_save(contender: Contender, path: Path) -> int:
    """Return the most memory that is in use while a save runs and nothing else."""
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(SAMPLE_S):
            peak = max(peak, pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    saved = contender.save(path, contender.loop.state())
    _on_disk(contender, saved, path, began).result(SAVE_S)
    stop.set()
    watcher.join()
    return max(peak, pss())


if __name__ == "__main__":
    main()
