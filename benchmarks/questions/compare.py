"""What does a save cost a training, how soon is it on the disk, how long do loads take: ours and other libraries'?

In each round every contender runs once, in a process of its own with a deadline, and the machine's limits are measured
beside them. The first save of a process is "cold", the later ones "warm". What does not fsync gets an fsync. A
contender that fails is shown with its error and not run again. A load is its call, plus how much longer the first write
to all tensors takes than a later one: a loader that maps a file leaves reading it to the training. Each way to load is
checked: all tensors must be those that were saved. The other libraries come with the extra `peers`.

`--only` takes names and groups: "best" has ours and those that are best at something, and `--only ours --against PATH`
compares two versions of ours, stock `dcp.save` included.
"""

from __future__ import annotations

from benchmarks import training_cost, workloads
from benchmarks.contenders import CONTENDERS, OURS
from benchmarks.figures import Row
from benchmarks.limits import measure_apart
from benchmarks.runner import Context, Question

GROUPS = {
    "all": tuple(CONTENDERS),
    "ours": (*OURS, "dcp.save"),
    "best": (*OURS, "safetensors", "dcp.async_save, thread", "torch _experimental"),
}


def run(context: Context) -> Row:
    """Run every contender in turn."""
    names = dict.fromkeys(name for one in context.options.only for name in GROUPS.get(one, (one,)))
    nbytes = context.facts["nbytes"] = workloads.NBYTES[context.options.state]
    limits = measure_apart(context.directory, nbytes)
    return {"limits": limits, "contenders": training_cost.contend(context, "contenders", names)}


QUESTION = Question(
    run,
    [
        "limits/*",
        *training_cost.shown("contenders"),
        "contenders/*/memory_over_state",
        *(f"contenders/*/loads/{load}_s" for load in ("disk/cold", "disk/warm", "memory/warm")),
    ],
    options={
        "state": ("gpt", "small", "large", "tiny"),
        "only": {"": ["all"], "large": ["best"]},
        "saves": {"": 6, "large": 3, "tiny": 2},
    },
    smallest="--state tiny",
    suite=(),
)
