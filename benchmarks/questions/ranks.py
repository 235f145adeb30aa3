"""What does a save cost a training of two ranks, replicated and sharded: ours beside DCP?

A GPT of 124 M parameters with AdamW (1.49 GB) on gloo ranks with one thread each. In each round every contender runs
once in each arrangement, with new processes; the machine's limits are measured beside them. The slower rank counts.

`dcp.async_save` has a process group of its own. In the training's group, the collectives of its thread and those of the
training run in different orders on different ranks: with torch 2.13, sharded ranks abort ("Is there a distributed
collective mismatch in your code?"), and replicated ones never return.
"""

from __future__ import annotations

from benchmarks import training_cost, workloads
from benchmarks.figures import Row
from benchmarks.limits import measure_apart
from benchmarks.runner import Context, Question

WORLD_SIZE = 2
ARRANGEMENTS = ("ddp", "fsdp2")


def run(context: Context) -> Row:
    """Run every contender in turn, in each arrangement."""
    nbytes = workloads.NBYTES[context.options.state]
    context.facts |= {"nbytes": nbytes, "world_size": WORLD_SIZE}
    row: Row = {"limits": measure_apart(context.directory, nbytes)}
    return row | {kind: training_cost.contend(context, kind, context.options.only, WORLD_SIZE) for kind in ARRANGEMENTS}


QUESTION = Question(
    run,
    ["limits/*", *(figure for arrangement in ARRANGEMENTS for figure in training_cost.shown(arrangement))],
    options={"state": ("gpt", "tiny"), "only": ["asyncckpt", "dcp.save", "dcp.async_save, thread"], "saves": 6},
    smallest="--state tiny --saves 2",
    suite=("gpt",),
)
