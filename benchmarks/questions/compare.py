"""What does a save cost a training, how soon is it on the disk, how long do loads take: ours and other libraries'?

In each round every contender runs once, in a process of its own with a deadline, and the machine's limits are measured
beside them. The first save of a process is "cold", the later ones "warm". What does not fsync gets an fsync. A
contender that fails is shown with its error and not run again. A load is its call, plus how much longer the first write
to all tensors takes than a later one: a loader that maps a file leaves reading it to the training. Each way to load is
checked: all tensors must be those that were saved. Memory and loads of the other libraries are measured in the first
two rounds, ours in all; a slow library makes fewer saves in a round, at least three. The other libraries come with the
extra `peers`. `--only ours --against PATH` compares two versions of ours, stock `dcp.save` included.
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
"""Groups for `--only`; "best" has ours and the libraries that are best at something."""

ROUNDS_OF_LOADS = 2
"""In how many rounds memory and loads of the other libraries are measured."""

SLOW_S = 15.0
"""Another library begins no save later than this after its first, but for the three that it makes at least."""


def run(context: Context) -> Row:
    """Run every contender in turn."""
    options = context.options
    wanted = {name for one in options.only for name in GROUPS.get(one, (one,))}
    context.facts["nbytes"] = workloads.NBYTES[options.state]
    row: Row = {"limits": measure_apart(context, context.facts["nbytes"]), "contenders": {}}
    for name in context.in_turn([name for name in CONTENDERS if name in wanted]):
        earlier = [one["contenders"][name] for one in context.rows]
        ours = name in OURS
        saves_s = options.contender_s if ours else SLOW_S
        given = (name, options.state, "", options.saves, saves_s, ours or context.number < ROUNDS_OF_LOADS)
        row["contenders"][name] = training_cost.contend(context, earlier, given)
    return row


QUESTION = Question(
    run,
    {
        "write limit, s": "limits/write_s",
        **training_cost.shown("contenders"),
        "memory over the state": "contenders/*/memory_over_state",
        "load, cold, s": "contenders/*/loads/disk/cold_s",
        "load, warm, s": "contenders/*/loads/disk/warm_s",
        "load from the worker's memory, s": "contenders/*/loads/memory/warm_s",
    },
    states=("gpt", "small", "large", "tiny"),
    options={
        "--only": {"nargs": "+", "choices": (*CONTENDERS, *GROUPS), "default": {"": ["all"], "large": ["best"]}},
        "--saves": {"type": int, "default": {"": 6, "large": 3, "tiny": 2}, "help": "of a contender in a round"},
        "--contender-s": {"type": float, "default": 180.0, "help": "deadline of a contender in a round"},
    },
    smallest=("--state", "tiny"),
    suite=(),
    budget_s=2700.0,
    deadline_s=1500.0,
)
