"""Save and load of one process against the machine's limits: stall, durable, memory, load cold and warm.

    python -m benchmarks.save_load [--state gpt|small|large] [--rounds 5] [--saves 6] [--budget-s 900] [--dir D]

Interleaved rounds: the limits are measured again beside every round of saves and loads. Nothing else should run.

`large` (4.3 GB) takes 18 GB of memory: state, slot, and as much twice for the limits. It is loaded into itself, and
saved three times a round unless more are asked for.
"""

from __future__ import annotations

import argparse
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
from typing import Any

import psutil

import asyncckpt
from benchmarks import kept, machine, quiet, sources, states
from benchmarks.limits import Limits, fresh_s

SAVES_PER_ROUND = 6
SAVES_OF_LARGE = 3
STATES = ("gpt", "small", "large")
RESULTS = Path(__file__).parent / "results"
TARGETS = {
    "written / write limit": 1.15,
    "stall / warm copy": 1.2,
    "memory over the state": 1.02,
    "load cold / read limit": 1.1,
}
"""For `gpt` and `large`, with nothing else running."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, help="in a round (default: 6, of `large` 3)")
    parser.add_argument("--budget-s", type=float, default=900.0, help="no round is begun that would not end within it")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file (default: named after the state)")
    args = parser.parse_args()
    saves = args.saves or (SAVES_OF_LARGE if args.state == "large" else SAVES_PER_ROUND)
    target = args.out or RESULTS / f"save_load-{args.state}.json"
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "save_load", "state": args.state, "machine": machine.describe(directory)}
    head |= {
        "code": sources.code_of("save_load"),
        "saves": saves,
        "rounds_asked": args.rounds,
        "budget_s": args.budget_s,
    }
    file = kept.Kept(target, head)
    try:
        state = getattr(states, args.state)()
        file.end(measure(state, directory, file, kept.Budget(args.budget_s), in_place=args.state == "large"))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    report(file.result)
    print(f"kept in {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


def measure(
    state: dict[str, Any], directory: Path, file: kept.Kept, budget: kept.Budget, *, in_place: bool = False
) -> str:
    """Put every round into the result file; returns why no more are made.

    Args:
        state: What is saved.
        directory: Where.
        file: Says how many rounds, and how many "saves" in each.
        budget: For all rounds.
        in_place: Load into `state` itself, for want of memory for another.
    """
    nbytes = states.nbytes(state)
    target = state if in_place else _zeros_like(state)
    with ExitStack() as ended:
        limits = Limits(directory, nbytes)
        ended.callback(limits.close)
        started = _worker_start(directory)
        before = _pss(os.getpid())
        checkpointer = ended.enter_context(asyncckpt.AsyncCheckpointer())
        first = _save(checkpointer, state, directory / "first")
        _remove(directory / "first")
        file.result |= {"nbytes": nbytes, "best": limits.best, "worker": started, "first_save": first}

        def make() -> dict[str, Any]:
            number = len(file.rounds)
            row: dict[str, Any] = {"limits": limits.measure(), "saves": []}
            for turn in range(file.result["saves"]):
                path = directory / f"{number}-{turn}"
                # Beside each save: a machine's memory is shared, and its speed goes up and down.
                copy_s = limits.copy_s()
                row["saves"].append(_save(checkpointer, state, path) | {"copy_s": copy_s})
                if turn:
                    _remove(path)
            row["memory"] = _memory(before, nbytes, checkpointer)
            row["load_cold_s"] = _load(directory / f"{number}-0", target, cold=True)
            _cache(directory / f"{number}-0")
            row["load_warm_s"] = _load(directory / f"{number}-0", target, cold=False)
            _remove(directory / f"{number}-0")
            return row

        return file.grow(budget, make)


def _save(checkpointer: asyncckpt.AsyncCheckpointer, state: dict[str, Any], path: Path) -> dict[str, Any]:
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    stall = time.perf_counter() - began
    report = handle.written.result(300)
    return {"stall_s": stall, "written_s": time.perf_counter() - began, "phases_s": report.seconds}


def _remove(path: Path) -> None:
    shutil.rmtree(path)
    quiet.until_discarded(path.parent)


def _load(path: Path, target: dict[str, Any], *, cold: bool) -> float:
    if cold:
        _drop_cache(path)
    began = time.perf_counter()
    asyncckpt.load(path, target, strict=True, source="disk")
    return time.perf_counter() - began


def _zeros_like(state: Any) -> Any:
    """A second state, its pages touched, to load into."""
    if isinstance(state, dict):
        return {k: _zeros_like(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_zeros_like(v) for v in state]
    return state.clone().zero_() if hasattr(state, "clone") else state


def _drop_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as opened:
            while opened.read(16 << 20):
                pass


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


def _memory(before: int, nbytes: int, checkpointer: asyncckpt.AsyncCheckpointer) -> dict[str, float]:
    worker = _status()["pid"]
    after = _pss(os.getpid()) + _pss(worker)
    own = _status()["process"]["private_nbytes"]
    return {"over_state": (after - before - own) / nbytes, "worker_own_nbytes": own}


def _status() -> dict[str, Any]:
    command = [sys.executable, "-m", "asyncckpt", "worker", "status", "--json"]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def _worker_start(directory: Path) -> dict[str, float]:
    """Time a worker from its start until it answers, and weigh it."""
    from asyncckpt import launcher

    socket_directory = directory / "w"
    socket_directory.mkdir(mode=0o700)
    times, rss = [], 0
    for number in range(5):
        endpoint = f"ipc://{socket_directory}/{number}.sock"
        began = time.perf_counter()
        launcher.start_worker(endpoint)
        checkpointer = asyncckpt.AsyncCheckpointer(endpoint=endpoint)
        times.append(time.perf_counter() - began)
        os.environ["ASYNCCKPT_ENDPOINT"] = endpoint
        rss = max(rss, _status()["process"]["rss_nbytes"])
        checkpointer.close()
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=True)
        del os.environ["ASYNCCKPT_ENDPOINT"]
    return {"ready_s": statistics.median(times), "ready_max_s": max(times), "rss_nbytes": rss}


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return the medians over all rounds, as ratios where a target is one."""
    rounds = result["rounds"]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    write = median([r["limits"]["write_s"] for r in rounds])
    read = median([fresh_s(r["limits"]) for r in rounds])
    pairs = [(s["stall_s"], s.get("copy_s", r["limits"]["copy_s"])) for r in rounds for s in r["saves"]]
    stall, copy = median([s for s, _ in pairs]), median([c for _, c in pairs])
    written = median([s["written_s"] for r in rounds for s in r["saves"]])
    cold, warm = median([r["load_cold_s"] for r in rounds]), median([r["load_warm_s"] for r in rounds])
    return {
        "write limit s": write,
        "read limit s": read,
        "warm copy s": copy,
        "stall s": stall,
        "written s": written,
        "load cold s": cold,
        "load warm s": warm,
        "first save stall s": result["first_save"]["stall_s"],
        "written / write limit": written / write,
        "stall / warm copy": median([s / c for s, c in pairs]),
        "memory over the state": max(r["memory"]["over_state"] for r in rounds),
        "load cold / read limit": cold / read,
        "worker ready s": result["worker"]["ready_s"],
        "worker rss MB": result["worker"]["rss_nbytes"] / 1e6,
    }


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    print(
        f"{result['state']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds of "
        f"{len(result['rounds'][0]['saves'])} saves"
    )
    for name, value in summary(result).items():
        target = TARGETS.get(name) if result["state"] != "small" else None
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:24s} {value:8.3f}{verdict}")


if __name__ == "__main__":
    main()
