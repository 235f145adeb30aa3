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
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import torch

from asyncckpt.format.checksums import block_digest, file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.planning.contributions import Contribution, candidates, decode_contributions, with_digests
from asyncckpt.planning.planner import PlanCache, make_plan, signature_of
from asyncckpt.planning.replica_checks import compare_shards
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.planning.write_agreement import Agreement, by_shards
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.shard_claims import ShardClaim
from asyncckpt.state_dict.flatten import Flattened, ShardLeaf
from asyncckpt.storage.commit import publish
from asyncckpt.storage.coverage import seed_of, tally_of
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


def shapes(n_tensors: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model, with a few hundred different ones among a thousand."""
    return [tuple(size + n // 16 for size in SHAPES[n % len(SHAPES)]) for n in range(n_tensors)]


def grid_of(layout: str, n_ranks: int) -> Grid | None:
    """Return how tensors lie on the ranks."""
    ranks = tuple(range(n_ranks))
    if layout == "fsdp":
        return Grid((n_ranks,), ranks, ((0,),))
    if layout == "hsdp":
        return Grid((REPLICATE, n_ranks // REPLICATE), ranks, ((), (0,)))
    return None


def state_of(layout: str, n_ranks: int, n_tensors: int, rank: int) -> Flattened:
    """Return a rank's flattened state; its tensors have no memory of their own."""
    grid = grid_of(layout, n_ranks)
    names = [f"model.layers.{n // 8}.part{n % 8}.weight" for n in range(n_tensors)]
    tree = ("d", tuple(item for n, name in enumerate(names) for item in (name, ("T", n))))
    tensors, shards = [], {}
    for n, shape in enumerate(shapes(n_tensors)):
        held = shape
        if grid is not None:
            boxes = grid.boxes(shape, grid.coordinate(rank))
            shards[n] = ShardLeaf(shape, grid, boxes, (n,) * len(boxes), True)
            held = boxes[0][1] if boxes else (0,)
        tensors.append(torch.empty(1, dtype=torch.bfloat16).expand(held))
    return Flattened(tree, tensors, [], shards=shards)


def contributions_of(layout: str, n_ranks: int, n_tensors: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return what all ranks send in the first exchange: contributions, then digests."""
    grid, sizes = grid_of(layout, n_ranks), shapes(n_tensors)
    names = [f"model.layers.{n // 8}.part{n % 8}.weight" for n in range(n_tensors)]
    keys = tuple((name, "bfloat16", shape) for name, shape in zip(names, sizes, strict=True))
    if grid is None:
        data = Contribution(tensors=keys, own_nbytes=0, digests=(b"",) * n_tensors).encode()
        equal = b"".join(block_digest(name.encode()) for name in names)
        return dict.fromkeys(range(n_ranks), data), dict.fromkeys(range(n_ranks), equal)
    claims = tuple(ShardClaim(*key, grid, ()) for key in keys)
    data = Contribution(tensors=(), own_nbytes=0, digests=(), shards=claims).encode()
    digests = dict.fromkeys(range(n_ranks), b"")
    if grid.n_replicas > 1:
        n_shards = n_ranks // REPLICATE
        each = [b"".join(block_digest(f"{name}{s}".encode()) for name in names) for s in range(n_shards)]
        digests = {rank: bytes(bytearray(each[rank % n_shards])) for rank in range(n_ranks)}  # no object is shared
    return {rank: bytes(bytearray(data)) for rank in range(n_ranks)}, digests


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
    agreement = start.after(with_digests(found, {one: digests[one][:end] for one, end in ends.items()}))
    return make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement)


def shard_structure(grid: Grid, n_tensors: int, rank: int) -> bytes:
    """Return a rank's structure with its shard of every tensor, one behind the other.

    Planning four million chunks would take minutes. That these cover every tensor is proved when they are committed.
    """
    at, tensors, leaves = 4096, [], []
    for n, shape in enumerate(shapes(n_tensors)):
        name = f"model.layers.{n // 8}.part{n % 8}.weight"
        chunks = []
        for offsets, sizes in grid.boxes(shape, grid.coordinate(rank)):
            nbytes = 2 * math.prod(sizes)
            chunks.append([0, at, nbytes, offsets, sizes])
            at += nbytes
        tensors.append([name, "bfloat16", shape, chunks])
        leaves += [name, ["T", n]]
    found = {"structure": 1, "parts": [at], "tensors": tensors, "n_objects": 0, "tree": ["d", leaves]}
    return bytes(msgpack.packb(found))


def requests_of(structures: Sequence[bytes]) -> list[SaveRequest]:
    """Return what the committing worker has of every rank."""
    same: dict[str, Any] = {"save_id": str(SAVE_ID), "step": 1, "path": "/runs/a/step-1", "world_size": len(structures)}
    same |= {"parts": (), "objects": b"", "n_tensors": 0, "metadata": "{}", "fsync": False, "overwrite": False}
    same |= {"umask": 0o022, "write_threads": 0, "package": "benchmark", "commit_timeout_s": 1800.0}
    same |= {"hook_timeout_s": 0.0, "plan": "", "samples": b"", "changed": False}
    return [SaveRequest(rank=rank, structure=structure, **same) for rank, structure in enumerate(structures)]


def commit(n_ranks: int, n_tensors: int) -> Row:
    """Measure proof and publication of a checkpoint of all ranks, each with a shard of every tensor."""
    grid = Grid((n_ranks,), tuple(range(n_ranks)), ((0,),))
    structures = [shard_structure(grid, n_tensors, rank) for rank in range(n_ranks)]
    requests, seed = requests_of(structures), seed_of(SAVE_ID)
    few = requests[:: max(1, len(requests) // 16)]
    (beside,), _ = seconds_of(lambda: [Prover().check(request) for request in few])
    tallies = [tally_of(request.structure, request.rank, seed) for request in requests]
    (proof,), holes = seconds_of(lambda: Prover().faults(requests, tallies))
    assert not holes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        records = []
        about: dict[str, Any]
        for rank, structure in enumerate(structures):
            index = write_rank(directory, rank, n_ranks, structure)
            about = {"index_nbytes": len(index), "index_checksum": file_checksum(index), "n_tensors": n_tensors}
            name = index_name(SAVE_ID, rank)
            records.append(RankRecord(rank=rank, index_name=name, n_files=3, nbytes=4096, **about))
        about = {"save_id": SAVE_ID, "step": 1, "world_size": n_ranks, "created": "2025-01-01T00:00:00.000+00:00"}
        manifest = Manifest(fsync=False, writer="benchmark", ranks=tuple(records), **about)
        (published,), _ = seconds_of(lambda: publish(directory, manifest, store=LocalStore()))
    found = {"check_s_per_rank": beside / len(few), "first_proof_s": proof, "publish_s": published}
    return found | {"first_commit_s": proof + published}


def write_rank(directory: str, rank: int, n_ranks: int, structure: bytes) -> bytes:
    """Write one rank's files, sparse where nothing reads them; returns its index."""
    shard, objects = shard_name(SAVE_ID, rank, 0), objects_name(SAVE_ID, rank)
    for name in (shard, objects):
        with open(os.path.join(directory, name), "wb") as file:
            file.truncate(4096)
    index = RankIndex(
        save_id=SAVE_ID,
        rank=rank,
        world_size=n_ranks,
        block_nbytes=262144,
        shards=(ShardRecord(name=shard, nbytes=4096, digests=b"12345678"),),
        objects=ObjectsRecord(name=objects, nbytes=4096, checksum=f"xxh3_128:{zlib.crc32(b''):032x}"),
        structure=structure,
    )
    data = encode_index(index)
    with open(os.path.join(directory, index_name(SAVE_ID, rank)), "wb") as file:
        file.write(data)
    return data


def planning(layout: str, n_ranks: int, n_tensors: int, repeats: int) -> Row:
    """Measure one rank's planning."""
    raw, digests = contributions_of(layout, n_ranks, n_tensors)
    flat = state_of(layout, n_ranks, n_tensors, n_ranks - 1)
    seconds, plan = seconds_of(lambda: plan_once(raw, digests, flat, n_ranks - 1), repeats)
    assert not plan.news
    return {"plan_s": statistics.median(seconds), "plan_s_worst": max(seconds)}


def cached(n_tensors: int, n_ranks: int) -> Row:
    """Measure how long it takes to find the plan of a known structure, of DTensors and of plain tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    mesh = init_device_mesh("cpu", (n_ranks,))
    plain = [torch.zeros(4, 8) for _ in range(n_tensors)]
    sharded = [DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for tensor in plain]
    plans = PlanCache(files_per_rank=1)
    found: Row = {}
    for name, tensors in (("dtensor", sharded), ("plain", plain)):
        state = {f"w{n}": tensor.detach() for n, tensor in enumerate(tensors)}
        plans.take(state)
        seconds, _ = seconds_of(lambda state=state: plans.take(state), 20)  # type: ignore[misc]
        found[f"{name}_us_per_tensor"] = statistics.median(seconds) / n_tensors * 1e6
    dist.destroy_process_group()
    return found


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
    {
        "planning, s": "planning/*/plan_s",
        "growth over that of the chunks": "growth",
        "a known plan, us a tensor": "cached/*",
        "commit, s": "commit/*/first_commit_s",
        "proof beside a rank, s": "commit/*/check_s_per_rank",
    },
    options={
        "--ranks": {"type": int, "default": 4096},
        "--tensors": {"type": int, "default": 1000},
        "--repeats": {"type": int, "default": 3, "help": "plannings of each size; the median counts"},
    },
    smallest=("--ranks", "128", "--tensors", "20", "--repeats", "1"),
    rounds=1,
)
