"""What does a save cost a training loop that goes on, copied behind the training and in front of it?

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state; `large` has 4.3 GB and needs 14 GB of memory. A round
has saves of both kinds in turn, each with steps until it is written and one without a save behind it. The first save of
each kind comes after `prepare()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks import workloads
from benchmarks.contenders import Contender, ours
from benchmarks.figures import Row
from benchmarks.runner import Context, Question
from benchmarks.training_cost import save_in_turn
from benchmarks.workloads import Loop

Kinds = Mapping[str, Callable[[Loop], Contender]]
KINDS: Kinds = {kind: partial(ours, prepared=True, staging=kind) for kind in ("overlap", "blocking")}


def run(context: Context) -> Row:
    """Train, and save with both kinds in turn."""
    return alternate(context, workloads.loop(context.options.state), KINDS)


def alternate(context: Context, loop: Loop, kinds: Kinds, quiet_steps: int = 1) -> Row:
    """Save with all kinds in turn, beside one loop, after the work of their first save that can be done in advance."""
    loop.step()
    context.facts["nbytes"] = workloads.nbytes_of(loop.state())
    with ExitStack() as ended:
        contenders = {kind: make(loop) for kind, make in kinds.items()}
        for contender in contenders.values():
            ended.callback(contender.close)
            contender.prepare()
        names = [kind for turn in range(context.options.saves + 1) for kind in context.in_turn(kinds, turn)]
        quiet, saves = save_in_turn(loop, contenders, names, context.directory / "save", quiet_steps)
    row: Row = {"quiet_step_s": quiet, "first_save": {kind: rows[0] for kind, rows in saves.items()}}
    return row | {kind: rows[1:] for kind, rows in saves.items()}


QUESTION = Question(
    run,
    ["quiet_step_s", "overlap/*", "blocking/*", "first_save/*/stall_s", "first_save/*/lost_s"],
    options={"state": ("gpt", "small", "large", "tiny"), "saves": {"": 6, "large": 3}},
    smallest="--state tiny --saves 1",
    suite=("gpt", "large"),
)
