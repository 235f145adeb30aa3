"""What do planning and commit of thousands of ranks take, without trainers: in one rank, and in the committing worker?

Every rank's contribution is made as that rank would make it; then this process does what each rank, and the committing
worker, does with all of them. Checkpoints go to a tmpfs, so that the commit's own work is measured and not the disk.
`first_commit_s` is what the committing worker computes after the last rank's report, `check_s_per_rank` what the worker
beside a rank does before.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncckpt.format.checksums import DIGEST_NBYTES, file_checksum
from asyncckpt.format.coverage import seed_of, tally_of
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.planning.contributions import decode_contributions, replica_candidates, with_digests
from asyncckpt.planning.planner import PlanCache, contribution_of, make_plan, signature_of
from asyncckpt.planning.replica_checks import compare_shards
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.planning.write_agreement import Agreement, group_by_shards
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.state_dict.flatten import Flattened, ShardLeaf
from asyncckpt.storage.commit import publish
from asyncckpt.storage.local import LocalStore
from asyncckpt_worker.io.coverage_check import Prover
from benchmarks.figures import Row
from benchmarks.runner import Context, Question

SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096), (4096,), (32000, 4096), (1024, 4096), (128,), (50257, 768))
SAVE_ID = SaveId(1, 0, "0123456789ab")
LAYOUTS = ("plain", "fsdp", "hsdp")
REPLICATE = 8
"""Copies of each shard with "hsdp"."""


def seconds_of(call: Callable[[], Any], repeats: int = 1) -> tuple[list[float], Any]:
    """Return the seconds of each call, and what the last one returned."""
    seconds, found = [], None
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


def tensors_of(n_tensors: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model, with a few hundred different shapes among a thousand."""
    return {
        f"model.layers.{n // 8}.part{n % 8}.weight": tuple(size + n // 16 for size in SHAPES[n % len(SHAPES)])
        for n in range(n_tensors)
    }


def grid_of(layout: str, n_ranks: int) -> Grid | None:
    """Return how tensors lie on the ranks; None: whole on each."""
    ranks = tuple(range(n_ranks))
    if layout == "hsdp":
        return Grid((REPLICATE, n_ranks // REPLICATE), ranks, ((), (0,)))
    return Grid((n_ranks,), ranks, ((0,),)) if layout == "fsdp" else None


def state_of(grid: Grid | None, n_tensors: int, rank: int) -> Flattened:
    """Return a rank's flattened state; its tensors have no memory of their own."""
    tree, tensors, shards = [], [], {}
    for n, (name, shape) in enumerate(tensors_of(n_tensors).items()):
        held = shape
        if grid is not None:
            boxes = grid.boxes(shape, grid.coordinate(rank))
            shards[n] = ShardLeaf(shape, grid, boxes, (n,) * len(boxes), True)
            held = boxes[0][1] if boxes else (0,)
        tensors.append(torch.empty(1, dtype=torch.bfloat16).expand(held))
        tree += [name, ("T", n)]
    return Flattened(("d", tuple(tree)), tensors, [], shards=shards)


def plan_once(raw: Mapping[int, bytes], digests: Mapping[int, bytes], flat: Flattened, rank: int) -> SavePlan:
    """Do what a rank does from the exchange on."""
    found = decode_contributions(raw)
    start = Agreement.start(len(raw))
    ownership = start.shards.extended(group_by_shards(found), {})
    ownership.check()
    ends = {one: DIGEST_NBYTES * len(wanted) for one, wanted in replica_candidates(found).items()}
    compare_shards(ownership, found, {one: digests[one][end:] for one, end in ends.items()})
    agreement = start.after(with_digests(found, {one: digests[one][:end] for one, end in ends.items()}))
    return make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement)


def planning(layout: str, n_ranks: int, n_tensors: int, repeats: int) -> Row:
    """Measure the last rank's planning; each rank sends objects of its own, and replicas equal digests."""
    grid = grid_of(layout, n_ranks)
    flat = state_of(grid, n_tensors, n_ranks - 1)
    contribution = contribution_of(flat).encode()
    raw = {rank: bytes(bytearray(contribution)) for rank in range(n_ranks)}
    n_copies = grid.n_replicas if grid else n_ranks
    nbytes = DIGEST_NBYTES * n_tensors if n_copies > 1 else 0
    digests = {rank: random.Random(rank % (n_ranks // n_copies)).randbytes(nbytes) for rank in range(n_ranks)}
    seconds, plan = seconds_of(lambda: plan_once(raw, digests, flat, n_ranks - 1), repeats)
    assert not plan.unagreed
    return {"plan_s": statistics.median(seconds), "plan_s_worst": max(seconds)}


def cached(n_tensors: int, n_ranks: int) -> Row:
    """Measure how long it takes to find the plan of a known structure, of DTensors and of plain tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    mesh = init_device_mesh("cpu", (n_ranks,))
    plain = [torch.zeros(4, 8) for _ in range(n_tensors)]
    sharded = [DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for tensor in plain]
    plans = PlanCache(files_per_rank=1)
    found: Row = {}
    for name, tensors in (("dtensor", sharded), ("plain", plain)):
        state = {f"w{n}": tensor.detach() for n, tensor in enumerate(tensors)}
        plans.plan_for(state)
        seconds, _ = seconds_of(lambda state=state: plans.plan_for(state), 20)  # type: ignore[misc]
        found[f"{name}_us_per_tensor"] = statistics.median(seconds) / n_tensors * 1e6
    dist.destroy_process_group()
    return found


def structure_of(grid: Grid, n_tensors: int, rank: int) -> bytes:
    """Return a rank's structure with its shard of every tensor, one behind the other.

    Planning four million chunks would take minutes. That these cover every tensor is proved when they are committed.
    """
    at, tensors, leaves = 4096, [], []
    for n, (name, shape) in enumerate(tensors_of(n_tensors).items()):
        chunks = []
        for offsets, sizes in grid.boxes(shape, grid.coordinate(rank)):
            nbytes = 2 * math.prod(sizes)
            chunks.append([0, at, nbytes, offsets, sizes])
            at += nbytes
        tensors.append([name, "bfloat16", shape, chunks])
        leaves += [name, ["T", n]]
    found = {"structure": 1, "parts": [at], "tensors": tensors, "n_objects": 0, "tree": ["d", leaves]}
    return bytes(msgpack.packb(found))


def request_of(rank: int, n_ranks: int, structure: bytes) -> SaveRequest:
    """Return what the committing worker has of a rank."""
    about: dict[str, Any] = {"save_id": str(SAVE_ID), "step": 1, "path": "/runs/a/step-1", "package": "benchmark"}
    about |= {"parts": (), "objects": b"", "n_tensors": 0, "metadata": "{}", "fsync": False, "overwrite": False}
    about |= {"umask": 0o022, "write_threads": 0, "commit_timeout_s": 1800.0, "hook_timeout_s": 0.0, "plan": ""}
    about |= {"samples": b"", "changed": False}
    return SaveRequest(rank=rank, world_size=n_ranks, structure=structure, **about)


def written(directory: Path, rank: int, n_ranks: int, structure: bytes) -> RankRecord:
    """Write one rank's files, empty where nothing reads them; return its line of the manifest."""
    shard, objects = shard_name(SAVE_ID, rank, 0), objects_name(SAVE_ID, rank)
    for name in (shard, objects):
        (directory / name).touch()
    index = RankIndex(
        save_id=SAVE_ID,
        rank=rank,
        world_size=n_ranks,
        shards=(ShardRecord(name=shard, nbytes=0, digests=b""),),
        objects=ObjectsRecord(name=objects, nbytes=0, checksum=file_checksum(b"")),
        structure=structure,
    )
    name, data = index_name(SAVE_ID, rank), encode_index(index)
    (directory / name).write_bytes(data)
    about: dict[str, Any] = {"index_name": name, "index_nbytes": len(data), "index_checksum": file_checksum(data)}
    return RankRecord(rank=rank, n_tensors=0, n_files=3, nbytes=len(data), **about)


def commit(n_ranks: int, n_tensors: int) -> Row:
    """Measure proof and publication of a checkpoint of all ranks, each with a shard of every tensor."""
    grid = Grid((n_ranks,), tuple(range(n_ranks)), ((0,),))
    structures = [structure_of(grid, n_tensors, rank) for rank in range(n_ranks)]
    requests = [request_of(rank, n_ranks, structure) for rank, structure in enumerate(structures)]
    few = requests[:: max(1, n_ranks // 16)]
    (beside,), _ = seconds_of(lambda: [Prover().check(request) for request in few])
    tallies = [tally_of(structure, rank, seed_of(SAVE_ID)) for rank, structure in enumerate(structures)]
    (proof,), holes = seconds_of(lambda: Prover().faults(requests, tallies))
    assert not holes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        records = tuple(written(Path(directory), n, n_ranks, structure) for n, structure in enumerate(structures))
        about: dict[str, Any] = {"step": 1, "world_size": n_ranks, "created": "2025-01-01T00:00:00.000+00:00"}
        manifest = Manifest(save_id=SAVE_ID, fsync=False, writer="benchmark", ranks=records, **about)
        (published,), _ = seconds_of(lambda: publish(directory, manifest, store=LocalStore()))
    found = {"check_s_per_rank": beside / len(few), "first_proof_s": proof, "publish_s": published}
    return found | {"first_commit_s": proof + published}


def run(context: Context) -> Row:
    """Measure every layout and size once; `growth` is that of the time over that of the chunks."""
    ranks, tensors = context.options.ranks, context.options.tensors
    by_ranks = [(ranks // 16, tensors), (ranks // 4, tensors), (ranks, tensors)]
    by_tensors = [(ranks, tensors // 4), (ranks, tensors), (ranks, 4 * tensors)]
    row: Row = {"planning": {}, "growth": [], "cached": cached(tensors, ranks), "commit": {}}
    for layout in LAYOUTS:
        seconds: dict[tuple[int, int], float] = {}
        for size in dict.fromkeys([*by_ranks, *by_tensors]):
            found = planning(layout, *size, context.options.repeats)
            row["planning"][f"{layout}, {size[0]} ranks, {size[1]} tensors"] = found
            seconds[size] = found["plan_s"]
        for less, more in (*itertools.pairwise(by_ranks), *itertools.pairwise(by_tensors)):
            row["growth"].append(seconds[more] / seconds[less] / (math.prod(more) / math.prod(less)))
    for n_ranks, n_tensors in ((ranks // 4, tensors // 10), (ranks, tensors // 10), (ranks, tensors)):
        row["commit"][f"fsdp, {n_ranks} ranks, {n_tensors} tensors"] = commit(n_ranks, n_tensors)
    return row


QUESTION = Question(
    run,
    ["planning/*/plan_s", "growth", "cached/*", "commit/*/first_commit_s", "commit/*/check_s_per_rank"],
    options={"ranks": 4096, "tensors": 1000, "repeats": 3},
    smallest="--ranks 128 --tensors 20 --repeats 1",
    rounds=1,
)
