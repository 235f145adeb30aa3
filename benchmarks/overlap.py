"""What saving costs a training loop that goes on: stall, lost time and step time, copies behind it and in front of it.

    python -m benchmarks.overlap [--state gpt|large] [--rounds 5] [--saves 6] [--budget-s 1200] [--dir D] [--out FILE]
                                 [--also threads=1 --also worker=nice0 --also bandwidth=800M,worker=idle ...]

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state; `large` are 4.2 GB, of which a round has three saves
unless more are asked for, and which take 14 GB of memory. In each round, steps without a save, then saves of
every kind, one at a time, with steps until each is written. Nothing else should run.

`--also` adds a kind: copies behind the training with other fields of `Pace`, with the worker at another priority
(`worker=nice0`, `nice10`, `nice19`, `batch`, `idle`), by a worker of its own with `--max-write-bandwidth`
(`bandwidth=800M`), or several of these; to raise a priority again takes root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import asyncckpt
from asyncckpt import launcher
from asyncckpt.protocol.options import bandwidth
from asyncckpt.staging import deferred
from asyncckpt.staging.moving import Pace
from benchmarks import kept, machine, quiet, sources, states, training
from benchmarks.training import Loop

SAVES_PER_ROUND = 6
STATES = {"gpt": SAVES_PER_ROUND, "large": 3}
"""How many saves of each kind a round has."""
QUIET_STEPS = 8
KINDS = ("overlap", "blocking")
RESULTS = Path(__file__).parent / "results"
TARGETS = {"stall, overlap, ms": 5.0, "lost, overlap, ms": 150.0, "lost, blocking, ms": 150.0}
POLICIES = {"batch": os.SCHED_BATCH, "idle": os.SCHED_IDLE}
WORKER_NICENESS = 5
"""As the worker sets it itself."""


class Kind(NamedTuple):
    """One way to save: blocking or not, how copies behind the training work, and the worker.

    `worker` is its priority, `bandwidth` how many bytes per second it may write; 0: as many as it can.
    """

    staging: str = "overlap"
    pace: Pace = deferred.BEHIND
    worker: str = f"nice{WORKER_NICENESS}"
    bandwidth: int = 0


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--saves", type=int, help="of each kind in a round (default: 6, of `large` 3)")
    parser.add_argument("--budget-s", type=float, default=1200.0, help="no round is begun that would not end within it")
    parser.add_argument("--also", action="append", default=[], metavar="FIELD=VALUE,...", help="another kind")
    parser.add_argument("--out", type=Path, help="the result file (default: named after the state)")
    args = parser.parse_args()
    try:
        kinds = {"overlap": Kind(), "blocking": Kind("blocking"), **{text: kind_of(text) for text in args.also}}
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if os.geteuid() and any(kind.worker != Kind().worker for kind in kinds.values()):
        parser.error("worker=... takes root: a priority that was lowered has to be raised again")
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "overlap", "state": args.state, "machine": machine.describe(directory)}
    head |= {"code": sources.code_of("overlap"), "behind": deferred.BEHIND._asdict(), "kinds": list(kinds)}
    head |= {"saves": args.saves or STATES[args.state], "rounds_asked": args.rounds, "budget_s": args.budget_s}
    file = kept.Kept(args.out or RESULTS / f"overlap-{args.state}.json", head)
    try:
        file.end(measure(training.make(args.state), directory, file, kept.Budget(args.budget_s), kinds))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    report(file.result)


def kind_of(text: str) -> Kind:
    """Return the kind that an `--also` names.

    Raises:
        ValueError: There is no such field or priority, or that is no number.
        argparse.ArgumentTypeError: That is no bandwidth.
    """
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    worker = fields.pop("worker", Kind().worker)
    number = worker.removeprefix("nice")
    if worker not in POLICIES and not (worker.startswith("nice") and number.isdecimal() and int(number) < 20):
        raise ValueError(f"worker={worker}: expected nice0 to nice19, {' or '.join(POLICIES)}")
    rate = bandwidth(fields.pop("bandwidth")) if "bandwidth" in fields else 0
    strange = fields.keys() - set(Pace._fields)
    if strange:
        raise ValueError(f"{text}: there is no {sorted(strange)[0]!r}; expected worker, bandwidth, {Pace._fields}")
    pace: dict[str, Any] = {name: int(value) for name, value in fields.items()}
    return Kind(pace=deferred.BEHIND._replace(**pace), worker=worker, bandwidth=rate)


class Ways:
    """The checkpointers of all kinds, each with the worker that it needs; a context manager.

    Args:
        loop: Its optimizer is attached to those that copy behind it.
        kinds: By name.
    """

    def __init__(self, loop: Loop, kinds: dict[str, Kind]) -> None:
        self._kinds = kinds
        self._endpoints: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._checkpointers: dict[tuple[str, int], asyncckpt.AsyncCheckpointer] = {}
        self._ended = ExitStack()
        for kind in kinds.values():
            if (kind.staging, kind.bandwidth) in self._checkpointers:
                continue
            if kind.bandwidth and kind.bandwidth not in self._endpoints:
                self._endpoints[kind.bandwidth] = self._limited(kind.bandwidth)
            made = asyncckpt.AsyncCheckpointer(staging=kind.staging, endpoint=self._endpoints.get(kind.bandwidth))
            self._checkpointers[kind.staging, kind.bandwidth] = self._ended.enter_context(made)
            if kind.staging == "overlap":
                loop.attach(made.attach)
        self._ended.callback(setattr, deferred, "BEHIND", deferred.BEHIND)

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def _limited(self, rate: int) -> str:
        """Start a worker of that bandwidth; returns its endpoint."""
        directory = self._ended.enter_context(tempfile.TemporaryDirectory(prefix="ackpt-"))
        endpoint = f"ipc://{directory}/worker.sock"
        launcher.start_worker(endpoint, options=[f"--max-write-bandwidth={rate}", f"--while-pid={os.getpid()}"])
        command = [sys.executable, "-m", "asyncckpt", "worker", "stop", "--endpoint", endpoint]
        self._ended.callback(subprocess.run, command, capture_output=True, check=False)
        return endpoint

    def prepare(self, state: dict[str, Any]) -> None:
        """Do before the first saves what they would do once."""
        for checkpointer in self._checkpointers.values():
            checkpointer.prepare(state)

    def of(self, name: str) -> asyncckpt.AsyncCheckpointer:
        """Return the checkpointer of a kind, with everything set for its next save."""
        kind = self._kinds[name]
        if any(one.worker != kind.worker for one in self._kinds.values()):
            if kind.bandwidth not in self._pids:
                self._pids[kind.bandwidth] = _worker_pid(self._endpoints.get(kind.bandwidth))
            _prioritise(self._pids[kind.bandwidth], kind.worker)
        deferred.BEHIND = kind.pace
        return self._checkpointers[kind.staging, kind.bandwidth]


def _worker_pid(endpoint: str | None) -> int:
    where = [] if endpoint is None else ["--endpoint", endpoint]
    command = [sys.executable, "-m", "asyncckpt", "worker", "status", "--json", *where]
    return int(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["pid"])


def _prioritise(pid: int, how: str) -> None:
    """Give every thread of a process a niceness or a scheduling policy."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), POLICIES.get(how, os.SCHED_OTHER), os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(task.name), int(how.removeprefix("nice") if how[-1].isdigit() else 5))


def measure(loop: Loop, directory: Path, file: kept.Kept, budget: kept.Budget, kinds: dict[str, Kind]) -> str:
    """Put every round into the result file; returns why no more are made."""
    loop.step()
    with Ways(loop, kinds) as ways:
        began = time.perf_counter()
        ways.prepare(loop.state())
        file.result |= {"nbytes": states.nbytes(loop.state()), "prepare_both_s": time.perf_counter() - began}
        first = {name: _save(loop, ways.of(name), directory / "first") for name in kinds}
        file.result["first_save"] = {name: first[name] for name in KINDS}  # others may share a checkpointer with one

        def make() -> dict[str, Any]:
            row: dict[str, Any] = {"quiet_step_s": [loop.step() for _ in range(QUIET_STEPS)]}
            for turn in range(file.result["saves"]):
                for name in kinds:
                    saved = _save(loop, ways.of(name), directory / f"{len(file.rounds)}-{turn}")
                    row.setdefault(name, []).append(saved)
            row["quiet_step_s"] += [loop.step() for _ in range(QUIET_STEPS)]
            return row

        return file.grow(budget, make)


def _save(loop: Loop, checkpointer: asyncckpt.AsyncCheckpointer, path: Path) -> dict[str, Any]:
    state = loop.state()
    loop.waited_s, steps = 0.0, []
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    returned = time.perf_counter()
    while not handle.written.done():
        steps.append(loop.step())
    ended = time.perf_counter()
    report = handle.written.result()
    shutil.rmtree(path)
    quiet.until_discarded(path.parent)
    return {
        "save_s": returned - began,
        "wait_s": loop.waited_s,
        "steps_s": steps,
        "until_written_s": ended - began,
        "phases_s": report.seconds,
    }


def lost_s(save: dict[str, Any], quiet_s: float) -> float:
    """Return how much later the loop is for a save: until it was written, less the steps as they would have been."""
    return float(save["until_written_s"]) - len(save["steps_s"]) * quiet_s


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return medians over all rounds; lost time against the same round's quiet steps."""
    rounds = result["rounds"]
    found = {"quiet step, ms": 1e3 * statistics.median(s for r in rounds for s in r["quiet_step_s"])}
    for kind in result.get("kinds", KINDS):
        saves = [s for r in rounds for s in r[kind]]
        lost = [lost_s(s, statistics.median(r["quiet_step_s"])) for r in rounds for s in r[kind]]
        slower = [t / statistics.median(r["quiet_step_s"]) for r in rounds for s in r[kind] for t in s["steps_s"]]
        found |= {
            f"stall, {kind}, ms": 1e3 * statistics.median(s["save_s"] + s["wait_s"] for s in saves),
            f"of it in save(), {kind}, ms": 1e3 * statistics.median(s["save_s"] for s in saves),
            f"worst stall, {kind}, ms": 1e3 * max(s["save_s"] + s["wait_s"] for s in saves),
            f"step while saving, {kind}, ms": 1e3 * statistics.median(t for s in saves for t in s["steps_s"]),
            f"step while saving over quiet, {kind}, x": statistics.median(slower),
            f"lost, {kind}, ms": 1e3 * statistics.median(lost),
            f"written, {kind}, ms": 1e3 * statistics.median(s["phases_s"]["total"] for s in saves),
        }
        if kind in result["first_save"]:
            found[f"first save after prepare(), {kind}, ms"] = 1e3 * result["first_save"][kind]["save_s"]
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    saves = result.get("saves", SAVES_PER_ROUND)
    print(f"{result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds of {saves} saves of every kind")
    for name, value in summary(result).items():
        target = TARGETS.get(name) if result.get("state", "gpt") == "gpt" else None
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:42s} {value:9.{2 if name.endswith('x') else 1}f}{verdict}")


if __name__ == "__main__":
    main()
