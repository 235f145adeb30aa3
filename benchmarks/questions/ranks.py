"""What does a save cost a training of two ranks, replicated and sharded: ours beside DCP?

A GPT of 124 M parameters with AdamW (1.49 GB) on gloo ranks with one thread each. In each round every contender runs
once in each arrangement, with new processes; the machine's limits are measured beside them. The slower rank counts.

`dcp.async_save` has a process group of its own. In the training's group, the collectives of its thread and those of the
training run in different orders on different ranks: with torch 2.13, sharded ranks abort ("Is there a distributed
collective mismatch in your code?"), and replicated ones never return.
"""

from __future__ import annotations

from benchmarks import training_cost, workloads
from benchmarks.contenders import CONTENDERS
from benchmarks.figures import Row
from benchmarks.limits import measure_apart
from benchmarks.runner import Context, Question

WORLD_SIZE = 2
ARRANGEMENTS = ("ddp", "fsdp2")


def run(context: Context) -> Row:
    """Run every contender in turn, in each arrangement."""
    options = context.options
    nbytes = workloads.NBYTES[options.state]
    context.facts |= {"nbytes": nbytes, "world_size": WORLD_SIZE}
    row: Row = {"limits": measure_apart(context, nbytes)}
    for arrangement in ARRANGEMENTS:
        row[arrangement] = {}
        for name in context.in_turn(options.only):
            earlier = [one[arrangement][name] for one in context.rows]
            given = (name, options.state, arrangement, options.saves, options.contender_s, False)
            row[arrangement][name] = training_cost.contend(context, earlier, given, ranks=WORLD_SIZE)
    return row


QUESTION = Question(
    run,
    {
        "write limit, s": "limits/write_s",
        **{
            f"{arrangement}: {label}": figure
            for arrangement in ARRANGEMENTS
            for label, figure in training_cost.shown(arrangement).items()
        },
    },
    states=("gpt", "tiny"),
    options={
        "--only": {
            "nargs": "+",
            "choices": tuple(CONTENDERS),
            "default": ["asyncckpt", "dcp.save", "dcp.async_save, thread"],
        },
        "--saves": {"type": int, "default": 6, "help": "of a contender in a round; the first is cold"},
        "--contender-s": {"type": float, "default": 180.0, "help": "deadline of a contender in a round"},
    },
    smallest=("--state", "tiny", "--saves", "2"),
    suite=("gpt",),
)
