"""The commit of thousands of ranks: what is proved beside each of them, and what is left after the last report."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import msgpack

from asyncckpt.format.checksum import file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.format.structure import decode_structure
from asyncckpt.planning.agreement import Agreement
from asyncckpt.planning.contributions import Change, decode_contributions, with_digests
from asyncckpt.planning.planner import make_plan, signature_of
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.tally import seed_of, tally_of
from asyncckpt_worker.provers import Prover
from benchmarks.machine import timed
from benchmarks.many_states import contributions_of, grid_of, shapes, state_of

SAVE_ID = SaveId(1, 0, "0123456789ab")


def structures_of(layout: str, n_ranks: int, n_tensors: int) -> list[bytes]:
    """Return the structures of all ranks: of plain tensors as they are planned, of shards as a few ranks' plans say.

    Every rank has a shard of every tensor, and writes it. Planning that four million times over would take minutes, so
    all structures are made alike, and those of three ranks are compared with what they plan.
    """
    raw, _ = contributions_of(layout, n_ranks, n_tensors)
    found = decode_contributions(raw)
    if layout == "plain":
        digest = {rank: b"\1" * 8 * n_tensors for rank in found}
        found = with_digests(found, digest)
    change = Change(contributions=found)
    agreement = Agreement.start(n_ranks).extended(change, change.encode(), compared=True)

    alike = state_of(layout, n_ranks, n_tensors, 0) if layout == "plain" else None

    def planned(rank: int) -> bytes:
        flat = alike or state_of(layout, n_ranks, n_tensors, rank)
        return make_plan(flat, signature_of(flat), files_per_rank=1, rank=rank, agreement=agreement).structure

    if layout == "plain":
        return [planned(rank) for rank in range(n_ranks)]
    structures = [shard_structure(layout, n_ranks, n_tensors, rank) for rank in range(n_ranks)]
    for rank in (0, n_ranks // 2, n_ranks - 1):
        ours, theirs = decode_structure(structures[rank]), decode_structure(planned(rank))
        for one, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert (one.fqn, one.dtype, one.global_shape) == (other.fqn, other.dtype, other.global_shape)
            boxes = [[(c.offsets, c.sizes) for c in t.chunks if 0 not in c.sizes] for t in (one, other)]
            assert boxes[0] == boxes[1], (rank, one.fqn)
    return structures


def shard_structure(layout: str, n_ranks: int, n_tensors: int, rank: int) -> bytes:
    """Return a rank's structure with its shard of every tensor, one behind the other."""
    grid = grid_of(layout, n_ranks)
    assert grid is not None
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
    return [
        SaveRequest(
            save_id=str(SAVE_ID),
            step=1,
            path="/runs/a/step-1",
            rank=rank,
            world_size=len(structures),
            parts=(),
            structure=structure,
            objects=b"",
            n_tensors=0,
            metadata="{}",
            fsync=False,
            overwrite=False,
            umask=0o022,
            write_threads=0,
            package="benchmark",
            commit_timeout_s=1800.0,
            hook_timeout_s=0.0,
            plan="",
            samples=b"",
            contribution=b"",
        )
        for rank, structure in enumerate(structures)
    ]


def proofs(structures: Sequence[bytes]) -> dict[str, Any]:
    """Measure what is proved beside each rank, what is left for the commit, and both in one place."""
    requests = requests_of(structures)
    seed = seed_of(SAVE_ID)
    few = requests[:: max(1, len(requests) // 16)]
    beside, _ = timed(lambda: [Prover().check(request) for request in few], 1)
    alone, tallies = timed(lambda: [tally_of(r.structure, r.rank, seed) for r in requests], 1)
    prover = Prover()
    (first,), holes = timed(lambda: prover.faults(requests, tallies), 1)
    cached, none = timed(lambda: prover.faults(requests, tallies), 3)
    assert not holes and not none
    return {
        "check_s_per_rank": beside[0] / len(few),
        "tally_s_per_rank": alone[0] / len(requests),
        "tally_nbytes_per_rank": sum(len(t.sums) for t in tallies) / len(tallies),
        "first_proof_s": first,
        "cached_proof_s": statistics.median(cached),
        "proof_in_one_place_s": alone[0] + first,
    }


def commit(layout: str, n_ranks: int, n_tensors: int) -> dict[str, Any]:
    """Measure proof and publication of a checkpoint of all ranks, each with one small shard file."""
    structures = structures_of(layout, n_ranks, n_tensors)
    proved = proofs(structures)
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
        **proved,
        "publish_s": seconds[0],
        "first_commit_s": proved["first_proof_s"] + seconds[0],
        "cached_commit_s": proved["cached_proof_s"] + seconds[0],
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
