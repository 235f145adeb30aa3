"""Ours and the peers, side by side: what a save costs a training, how soon it is on the disk, memory, and loads.

    python -m benchmarks.compare [--state gpt|small|large|tiny] [--rounds 5] [--saves N] [--only NAME ...|best|all]
                                 [--resume] [--budget-s S] [--deadline-s S] [--peer-saves-s S] [--dir D] [--out FILE]

In each round every contender runs once, in a process of its own and in another order; the machine's limits are measured
beside every round. The first save of a process is `cold` (it takes fresh pages from the kernel), the later ones `warm`.
What does not fsync gets an fsync from us, and is marked. A contender that fails, or has not ended by the deadline, is
shown with its error and not run again. A load is its call, and what the first write to what it loaded takes longer than
a later one: who maps a file leaves reading it to the training. Memory and loads of the peers are measured in the first
two rounds, ours in all; with `--peer-saves-s` a slow peer makes fewer saves in a round, at least three. No round is
begun that would not end within the budget; the result says how many were left out. The file is written after every
round; with `--resume` a later run adds rounds until there are as many as asked, if machine, versions, code and options
are the same. Peers are installed by the extra `peers`. Nothing else should run. `tiny` shows that all of it works.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import kept, machine, sources
from benchmarks.contenders import CONTENDERS
from benchmarks.contest_results import OURS, RESULTS, report
from benchmarks.rounds import STATES, Rounds, Setting

DEADLINES_S = {"gpt": 90.0, "small": 120.0, "large": 180.0, "tiny": 60.0}
"""One contender, one round: three times what the slowest takes on two cores, and for `small` half as much again."""

BUDGETS_S = {"gpt": 1800.0, "small": 1000.0, "large": 2400.0, "tiny": 300.0}
"""Five rounds on two quiet cores: of `gpt` 280 to 330 s each, of `small` 150, of `large` seven minutes."""

PEER_SAVES_S = {"small": 15.0}
"""Three saves of 20,000 files or so take longer; six would take most of the time."""

BEST = (*OURS, "safetensors", "dcp.async_save, thread", "torch _experimental")
"""`--only best`: ours and the peers that are best at something."""

ONLY: dict[str, tuple[str, ...]] = {"large": BEST}
"""Who runs unless it is said, where it is not everybody: a round of `large` takes long."""

SAVES = {"gpt": 6, "small": 6, "large": 3, "tiny": 3}
"""In a round. As many of `large` as six contenders make in seven minutes, with those whose memory is measured."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5, help="in all, those of a file that is resumed included")
    parser.add_argument("--saves", type=int, help="of a contender in a round (default: by state)")
    parser.add_argument("--only", nargs="+", choices=(*CONTENDERS, "best", "all"), help="default: by state")
    parser.add_argument("--resume", action="store_true", help="add rounds to the result file, if it is there")
    parser.add_argument("--budget-s", type=float, help="for all rounds of this run (default: by state)")
    parser.add_argument("--deadline-s", type=float, help="for one contender in one round (default: by state)")
    parser.add_argument("--peer-saves-s", type=float, help="for a peer's saves in a round (default: by state)")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    names = asked_for(args.state, args.only)
    setting = Setting(
        args.state,
        args.saves or SAVES[args.state],
        args.deadline_s or DEADLINES_S[args.state],
        args.peer_saves_s or PEER_SAVES_S.get(args.state),
    )
    budget = kept.Budget(args.budget_s or BUDGETS_S[args.state])
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        head: dict[str, Any] = {"benchmark": "compare", "state": args.state, "machine": machine.describe(directory)}
        head |= {
            "code": sources.code_of("compare"),
            "contenders": names,
            "saves": setting.saves,
            "peer_saves_s": setting.peer_saves_s,
        }
        head |= {"deadline_s": setting.deadline_s, "rounds_asked": args.rounds, "budget_s": budget.budget_s}
        file = kept.Kept(args.out or RESULTS / f"compare-{args.state}.json", head)
        if args.resume:
            file.resume()
        rounds = Rounds(setting, directory, budget, file.result.get("best"))

        def make() -> dict[str, Any] | None:
            row = rounds.make(names, file.rounds, args.rounds)
            file.result["best"] = rounds.best
            return row

        file.end(file.grow(budget, make))
        rounds.settle()
    except kept.NotTheSameError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report(file.result)


def asked_for(state: str, only: Sequence[str] | None) -> list[str]:
    """Return the contenders that are to run; `only` is what was said."""
    some: Sequence[str] = only or ONLY.get(state, ("all",))
    if "all" in some:
        return list(CONTENDERS)
    return [name for name in CONTENDERS if name in some or ("best" in some and name in BEST)]


if __name__ == "__main__":
    main()
