"""Planning and commit at the scale of thousands of ranks, without trainers: what one rank, and the committing worker,
compute. `python -m benchmarks.scale` writes `results/scale.json`.

Every rank's contribution is made as that rank would, and then this process does what each rank does with all of them.
Files lie on a tmpfs, so that the commit's own work is measured and not the disk. `first_commit_s` is what the
committing worker computes after the last rank's report, `check_s_per_rank` what the worker beside a rank does before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.planning.agreement import Agreement, by_shards
from asyncckpt.planning.contributions import Change, candidates, decode_contributions, with_digests
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.planner import PlanCache, make_plan, signature_of
from asyncckpt.planning.shard_comparison import compare_shards
from benchmarks import quiet, sources
from benchmarks.machine import describe, timed
from benchmarks.many_commits import commit
from benchmarks.many_states import LAYOUTS, contributions_of, state_of

RESULT = Path(__file__).parent / "results" / "scale.json"


def plan_once(raw: Mapping[int, bytes], digests: Mapping[int, bytes], flat: Flattened, rank: int) -> SavePlan:
    """Do what a rank does from the exchange on."""
    world_size = len(raw)
    found = decode_contributions(raw)
    start = Agreement.start(world_size)
    book = start.shards.extended(by_shards(found), {})
    book.check()
    positions = candidates(found)
    ends = {one: 8 * len(wanted) for one, wanted in positions.items()}
    compare_shards(book, found, {one: digests[one][end:] for one, end in ends.items()})
    change = Change(contributions=with_digests(found, {one: digests[one][:end] for one, end in ends.items()}))
    agreement = start.extended(change, change.encode(), compared=True)
    return make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement)


def planning(layout: str, n_ranks: int, n_tensors: int, repeats: int) -> dict[str, Any]:
    """Measure one rank's planning."""
    raw, digests = contributions_of(layout, n_ranks, n_tensors)
    rank = n_ranks - 1
    flat = state_of(layout, n_ranks, n_tensors, rank)
    seconds, plan = timed(lambda: plan_once(raw, digests, flat, rank), repeats)
    assert not plan.news
    return {
        "layout": layout,
        "ranks": n_ranks,
        "tensors": n_tensors,
        "exchanged_nbytes": sum(len(data) for data in raw.values()) + sum(len(data) for data in digests.values()),
        "plan_s": statistics.median(seconds),
        "plan_s_worst": max(seconds),
        "structure_nbytes": len(plan.structure),
    }


def cached(n_tensors: int, n_ranks: int = 4096) -> dict[str, Any]:
    """Measure how long it takes to find the plan of a structure again, of real DTensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    try:
        mesh = init_device_mesh("cpu", (n_ranks,))
        locals_ = [torch.zeros(4, 8) for _ in range(n_tensors)]
        kept = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in locals_]
        plans = PlanCache(files_per_rank=1)
        found = {}
        for name, values in (("dtensor", kept), ("plain", locals_)):
            state = {f"w{n}": value.detach() for n, value in enumerate(values)}
            plans.take(state)
            seconds, _ = timed(lambda state=state: plans.take(state), 20)  # type: ignore[misc]
            found[f"{name}_us_per_tensor"] = statistics.median(seconds) / n_tensors * 1e6
        return {"ranks": n_ranks, "tensors": n_tensors, **found}
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure everything, print it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", choices=("planning", "commit"))
    options = parser.parse_args()
    ranks, tensors = options.ranks, options.tensors
    sizes = [
        (ranks // 16, tensors),
        (ranks // 4, tensors),
        (ranks, tensors),
        (ranks, tensors // 4),
        (ranks, 4 * tensors),
    ]
    found: dict[str, Any] = {"benchmark": "scale", "machine": describe(Path("/dev/shm"))}
    found |= {"code": sources.code_of("scale"), **quiet.until_idle(), "planning": [], "commit": []}
    for layout in LAYOUTS if options.only != "commit" else ():
        for n_ranks, n_tensors in sizes:
            found["planning"].append(planning(layout, n_ranks, n_tensors, options.repeats))
            print(json.dumps(found["planning"][-1]), flush=True)
    if options.only != "commit":
        found["cached"] = cached(tensors, ranks)
        print(json.dumps(found["cached"]), flush=True)
    for layout, n_ranks, n_tensors in (
        ("plain", ranks, tensors),
        ("fsdp", ranks // 4, tensors // 10),
        ("fsdp", ranks, tensors // 10),
        ("fsdp", ranks, tensors),
    )[: 0 if options.only == "planning" else None]:
        found["commit"].append(commit(layout, n_ranks, n_tensors))
        print(json.dumps(found["commit"][-1]), flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
