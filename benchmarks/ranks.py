"""What a save costs a training of two ranks, replicated and sharded: ours beside DCP.

    python -m benchmarks.ranks [--rounds 5] [--saves 6] [--only NAME ...] [--resume] [--budget-s 1800] [--dir D]
                               [--out FILE]

A GPT of 124 M parameters with AdamW (1.49 GB) on gloo ranks with one thread each. In each round every contender runs
once for each arrangement, its ranks in processes of their own; the machine's limits are measured beside every round.
Stall, lost time and time to disk are those of the slower rank. No round is begun that would not end within the budget;
the file is written after every round, and `--resume` adds rounds to it, as in `benchmarks.compare`. What has failed
once is not run again. Nothing else should run.

`dcp.async_save` has a process group of its own. In the training's group its thread's collectives (`gather_object`, when
all ranks have written) and those of the training come in another order on each rank, and gloo takes one for the other:
sharded, rank 0 aborts ("7087872 vs 4 ... Is there a distributed collective mismatch in your code?"); replicated, both
ranks wait for ever, one thread in `gather_object`, the other in `backward` (torch 2.13).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import contest_results, kept, machine, sources
from benchmarks.contenders import CONTENDERS
from benchmarks.on_rank import ARRANGEMENTS
from benchmarks.rounds import Rounds, Setting

WORLD_SIZE = 2
DEFAULT = ("asyncckpt", "dcp.save", "dcp.async_save, thread")
MEASURES = ("stall cold", "stall", "lost cold", "lost warm", "durable cold", "durable warm")
DEADLINE_S = 180.0
"""For one contender in one round."""

TARGETS = {"fds added, per rank": 16, "fds of the worker": 16 + 4 * WORLD_SIZE}


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="in all, those of a file that is resumed included")
    parser.add_argument("--saves", type=int, default=6, help="of a contender in a round; the first is `cold`")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(DEFAULT))
    parser.add_argument("--resume", action="store_true", help="add rounds to the result file, if it is there")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="for all rounds of this run")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=contest_results.RESULTS / "ranks.json", help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    budget = kept.Budget(args.budget_s)
    try:
        head: dict[str, Any] = {
            "benchmark": "ranks",
            "machine": machine.describe(directory),
            "code": sources.code_of("ranks"),
        }
        head |= {"world_size": WORLD_SIZE, "contenders": args.only, "saves": args.saves}
        head |= {"rounds_asked": args.rounds, "budget_s": budget.budget_s}
        file = kept.Kept(args.out, head)
        if args.resume:
            file.resume()
        limits = Rounds(Setting("gpt", args.saves, DEADLINE_S), directory, budget, file.result.get("best"))

        def make() -> dict[str, Any]:
            row = _round(limits.limits(), file.rounds, args.only, args.saves, directory)
            file.result["best"] = limits.best
            return row

        file.end(file.grow(budget, make))
    except kept.NotTheSameError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report(file.result)


def _round(
    limits: dict[str, float], before: list[Any], names: list[str], saves: int, directory: Path
) -> dict[str, Any]:
    """Return one round: every contender in each arrangement, those first that were last in the round before."""
    row: dict[str, Any] = {"limits": limits}
    shift = len(before) % len(names)
    for arrangement in ARRANGEMENTS:
        row[arrangement] = {}
        for name in [*names[shift:], *names[:shift]]:
            failed = [r[arrangement][name] for r in before if "error" in r[arrangement][name]]
            row[arrangement][name] = failed[0] if failed else _contest(name, arrangement, saves, directory)
            print(f"round {len(before) + 1}, {arrangement}: {name}", file=sys.stderr)
    return row


def _contest(name: str, arrangement: str, saves: int, directory: Path) -> dict[str, Any]:
    """Run one contender on all ranks, each a process of one process group; whatever it leaves behind is ended."""
    place = directory / "run"
    place.mkdir()
    environment = os.environ | {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.on_rank", name, arrangement]
    command += ["--saves", str(saves), "--dir", str(place)]
    processes: list[subprocess.Popen[bytes]] = []
    began = time.monotonic()
    log = directory / "stderr"
    try:
        with log.open("wb") as stderr:
            for rank in range(WORLD_SIZE):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                processes.append(
                    subprocess.Popen(
                        command, env=environment | numbers, stdout=out, stderr=stderr, start_new_session=True
                    )
                )
        try:
            output, _ = processes[0].communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return {"error": f"not ended after {DEADLINE_S:.0f} s"}
        lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("[")]
        if lines:
            return {"ranks": json.loads(lines[-1]), "took_s": time.monotonic() - began}
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"error": f"ended with {processes[0].returncode}{': ' + said[-1][:200] if said else ''}"}
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=DEADLINE_S)
        if name.startswith("asyncckpt"):
            stop = [sys.executable, "-m", "asyncckpt", "worker", "stop"]
            subprocess.run(stop, capture_output=True, check=False, timeout=DEADLINE_S)
        shutil.rmtree(place, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def values(result: dict[str, Any], arrangement: str, name: str) -> dict[str, list[float]] | str:
    """Return every value of each measure for one contender, those of the slower rank, or its error."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for row in result["rounds"]:
        one = row[arrangement][name]
        if "error" in one:
            return str(one["error"]).splitlines()[0]
        quiet_s = [statistics.median(rank["quiet_step_s"]) for rank in one["ranks"]]
        for number, saves in enumerate(zip(*(rank["saves"] for rank in one["ranks"]), strict=True)):
            heat = "warm" if number else "cold"
            lost = [save["until_s"] - save["steps"] * step for save, step in zip(saves, quiet_s, strict=True)]
            found[f"lost {heat}"].append(max(lost))
            found[f"durable {heat}"].append(max(save["durable_s"] for save in saves))
            found["stall" if number else "stall cold"].append(max(save["stall_s"] for save in saves))
    return found


def fds(result: dict[str, Any], name: str = "asyncckpt") -> dict[str, list[int]]:
    """Return how many file descriptors each rank had more after its saves, and how many the worker had."""
    rows = [row[a].get(name, {}) for row in result["rounds"] for a in ARRANGEMENTS]
    every = [rank for row in rows for rank in row.get("ranks", ())]
    if not every:
        return {}
    return {
        "fds added, per rank": [rank["added_fds"] for rank in every],
        "fds of the worker": [count for rank in every for count in rank["worker_fds"]],
    }


def written_nbytes(result: dict[str, Any], arrangement: str) -> int:
    """Return the bytes of a checkpoint: those of one rank where all hold the same, else of all."""
    ranks = next(one["ranks"] for one in result["rounds"][0][arrangement].values() if "ranks" in one)
    return int(ranks[0]["nbytes"] if arrangement == "ddp" else sum(rank["nbytes"] for rank in ranks))


def report(result: dict[str, Any]) -> None:
    """Print the medians, and each target as reached or missed."""
    print(f"{len(result['rounds'])} rounds in {result['took_s']:.0f} s; limits {contest_results.limits(result)}")
    for arrangement in ARRANGEMENTS:
        for name in result["rounds"][0][arrangement]:
            found = values(result, arrangement, name)
            text = found if isinstance(found, str) else ""
            for measure, numbers in found.items() if isinstance(found, dict) else ():
                text += f"  {measure} {statistics.median(numbers):.3f}"
            print(f"{arrangement:6s} {name:24s} {text}")
    for name, counts in fds(result).items():
        count = max(counts)
        print(f"{name}: {count}   target {TARGETS[name]}: {'reached' if count <= TARGETS[name] else 'MISSED'}")


if __name__ == "__main__":
    main()
