"""What does a save cost a training loop that goes on, copied behind the training and in front of it?

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state; `large` has 4.3 GB and needs 14 GB of memory. A round
has steps without a save, then saves of both kinds in turn, each with steps until it is written. The first save of each
kind comes after `prepare()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks import machine, workloads
from benchmarks.contenders import Contender, Ours
from benchmarks.figures import Row
from benchmarks.runner import Context, Question
from benchmarks.training_cost import add_lost, save
from benchmarks.workloads import Loop

QUIET_STEPS = 8
Kinds = Mapping[str, Callable[[Loop], Contender]]
KINDS: Kinds = {kind: partial(Ours, prepared=True, staging=kind) for kind in ("overlap", "blocking")}


def run(context: Context) -> Row:
    """Train, and save with both kinds in turn."""
    loop = workloads.loop(context.options.state)
    return alternate(context, loop, KINDS, lambda: [quiet_step_s(loop, 1) for _ in range(QUIET_STEPS)])


def alternate(context: Context, loop: Loop, kinds: Kinds, quiet: Callable[[], list[float]]) -> Row:
    """Save with all kinds in turn, beside one loop, after the work of their first save that can be done in advance.

    Args:
        context: Its options have the number of saves.
        loop: What trains.
        kinds: Make the contenders.
        quiet: Makes steps without a save, and returns the seconds of each.
    """
    loop.step()
    context.facts["nbytes"] = workloads.nbytes_of(loop.state())
    path = context.directory / "save"
    with ExitStack() as ended:
        contenders = {kind: make(loop) for kind, make in kinds.items()}
        for contender in contenders.values():
            ended.callback(contender.close)
            contender.prepare()

        def one(kind: str) -> Row:
            found = save(contenders[kind], path)
            machine.remove(path)
            return found

        row: Row = {"quiet_step_s": quiet(), "first_save": {kind: one(kind) for kind in context.in_turn(kinds)}}
        row |= {kind: [] for kind in kinds}
        for turn in range(context.options.saves):
            for kind in context.in_turn(kinds, turn):
                row[kind].append(one(kind))
        row["quiet_step_s"] += quiet()
    add_lost([save for kind in kinds for save in (*row[kind], row["first_save"][kind])], row["quiet_step_s"])
    return row


def quiet_step_s(loop: Loop, count: int) -> float:
    """Make steps that begin and end with an idle GPU; return the seconds of one."""
    loop.settle()
    began = time.perf_counter()
    for _ in range(count):
        loop.step()
    loop.settle()
    return (time.perf_counter() - began) / count


def shown(kinds: Iterable[str]) -> list[str]:
    """Return what is printed of some kinds."""
    found = ["quiet_step_s"]
    for kind in kinds:
        found += [f"{kind}/{figure}" for figure in ("stall_s", "save_s", "lost_s", "step_ratio", "durable_s")]
        found += [f"first_save/{kind}/{figure}" for figure in ("stall_s", "lost_s")]
    return found


QUESTION = Question(
    run,
    shown(KINDS),
    states=("gpt", "small", "large", "tiny"),
    options={"saves": {"": 6, "large": 3}},
    smallest="--state tiny --saves 1",
    suite=("gpt", "large"),
    budget_s=1200.0,
)
