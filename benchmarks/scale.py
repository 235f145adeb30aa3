"""Planning and commit at the scale of thousands of ranks, without trainers: what one rank, and the committing worker,
compute. `python -m benchmarks.scale` writes `results/scale.json`.

Every rank's contribution is made as that rank would, and then this process does what each rank does with all of them.
Files lie on a tmpfs, so that the commit's own work is measured and not the disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.format.checksum import block_digest, file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.planning.agreement import Agreement, by_shards
from asyncckpt.planning.claims import ShardClaim
from asyncckpt.planning.contributions import Change, Contribution, candidates, decode_contributions, with_digests
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.planner import PlanCache, make_plan, signature_of
from asyncckpt.planning.shard_comparison import compare_shards
from asyncckpt.planning.shard_leaves import ShardLeaf
from asyncckpt.planning.sharding.grid import Grid
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.proof import uncovered
from benchmarks.machine import describe

RESULT = Path(__file__).parent / "results" / "scale.json"
SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096), (4096,), (32000, 4096), (1024, 4096), (128,), (50257, 768))
SAVE_ID = SaveId(1, 0, "0123456789ab")
LAYOUTS = ("plain", "fsdp", "hsdp")
REPLICATE = 8
"""Copies of each shard with "hsdp"."""


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
    change = Change(contributions=with_digests(found, {one: digests[one][:end] for one, end in ends.items()}))
    agreement = start.extended(change, change.encode(), compared=True)
    return make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement)


def timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Return seconds of each call, and what the last returned."""
    seconds, found = [], None
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


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


def structures_of(layout: str, n_ranks: int, n_tensors: int) -> list[bytes]:
    """Return the structures of all ranks, planned one after the other from one agreement."""
    raw, _ = contributions_of(layout, n_ranks, n_tensors)
    found = decode_contributions(raw)
    if layout == "plain":
        digest = {rank: b"\1" * 8 * n_tensors for rank in found}
        found = with_digests(found, digest)
    change = Change(contributions=found)
    agreement = Agreement.start(n_ranks).extended(change, change.encode(), compared=True)
    structures = []
    for rank in range(n_ranks):
        flat = state_of(layout, n_ranks, n_tensors, rank)
        structures.append(
            make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement).structure
        )
    return structures


def commit(layout: str, n_ranks: int, n_tensors: int) -> dict[str, Any]:
    """Measure proof and publication of a checkpoint of all ranks, each with one small shard file."""
    structures = structures_of(layout, n_ranks, n_tensors)
    (proved,), holes = timed(lambda: uncovered(structures), 1)
    assert not holes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        records, nbytes = [], 0
        for rank, structure in enumerate(structures):
            index = write_rank(directory, rank, n_ranks, structure)
            nbytes += len(index)
            records.append(
                RankRecord(
                    rank=rank,
                    index_name=index_name(SAVE_ID, rank),
                    index_nbytes=len(index),
                    index_checksum=file_checksum(index),
                    n_tensors=n_tensors,
                    n_files=3,
                    nbytes=4096,
                )
            )
        manifest = Manifest(
            save_id=SAVE_ID,
            step=1,
            world_size=n_ranks,
            created="2025-01-01T00:00:00.000+00:00",
            fsync=False,
            writer="benchmark",
            ranks=tuple(records),
        )
        seconds, _ = timed(lambda: publish(directory, manifest, files=Files(), umask=0o022), 1)
        manifest_nbytes = os.stat(os.path.join(directory, "manifest.json")).st_size
    return {
        "layout": layout,
        "ranks": n_ranks,
        "tensors": n_tensors,
        "chunks": n_ranks * n_tensors if layout != "plain" else None,
        "first_proof_s": proved,
        "publish_s": seconds[0],
        "index_nbytes_per_rank": nbytes / n_ranks,
        "manifest_nbytes": manifest_nbytes,
    }


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


def main() -> None:
    """Measure everything, print it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    ranks, tensors = options.ranks, options.tensors
    sizes = [
        (ranks // 16, tensors),
        (ranks // 4, tensors),
        (ranks, tensors),
        (ranks, tensors // 4),
        (ranks, 4 * tensors),
    ]
    found: dict[str, Any] = {"machine": describe(Path("/dev/shm")), "planning": [], "commit": []}
    for layout in LAYOUTS:
        for n_ranks, n_tensors in sizes:
            found["planning"].append(planning(layout, n_ranks, n_tensors, options.repeats))
            print(json.dumps(found["planning"][-1]), flush=True)
    found["cached"] = cached(tensors, ranks)
    print(json.dumps(found["cached"]), flush=True)
    for layout, n_ranks, n_tensors in (
        ("plain", ranks, tensors),
        ("fsdp", ranks // 4, tensors // 10),
        ("fsdp", ranks, tensors // 10),
        ("fsdp", ranks, tensors // 4),
    ):
        found["commit"].append(commit(layout, n_ranks, n_tensors))
        print(json.dumps(found["commit"][-1]), flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
