"""Loading tensors that several ranks wrote in boxes."""

from __future__ import annotations

import ctypes
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_samples import SAVE_ID, RecordingFiles, manifest_of, request_of

from asyncckpt.config import RankInfo
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, BoxSpec, build_layout, save_id_bytes
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Box, Chunk, Structure, TensorEntry, encode_structure
from asyncckpt.loading.byte_ranges import chunks_near, pieces_to_read, region_of, whole_chunk_piece, whole_region
from asyncckpt.loading.load import DefaultReader, load
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.protocol.request import PartRange
from asyncckpt.sharding.shard_types import FlatShard, ShardedSlice
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish
from asyncckpt.storage.contents import read_contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankResult, RankWriter

FILES = Files()
STORE = LocalStore()
Boxes = dict[int, list[Box]]
"""Boxes of one tensor by rank."""


def save_boxes(
    path: Path, tensors: dict[str, torch.Tensor], boxes: dict[str, Boxes], world_size: int, objects: Any = ()
) -> str:
    """Commit a checkpoint whose ranks hold the given boxes of float tensors."""
    prepare_directory(str(path), save_id=SAVE_ID, store=STORE, fsync=False)
    results = [_write_rank(path, tensors, boxes, rank, world_size, objects) for rank in range(world_size)]
    first = manifest_of(results[0], fsync=False)
    manifest = Manifest(
        save_id=SAVE_ID,
        step=0,
        world_size=world_size,
        created=first.created,
        fsync=False,
        writer="tests",
        ranks=tuple(r.record for r in results),
    )
    publish(str(path), manifest, store=STORE)
    return str(path)


def _write_rank(
    path: Path, tensors: dict[str, torch.Tensor], boxes: dict[str, Boxes], rank: int, world_size: int, objects: Any
) -> RankResult:
    mine = [(fqn, box) for fqn, by_rank in boxes.items() for box in by_rank.get(rank, [])]
    specs = [
        BoxSpec(fqn=f, dtype="float32", global_shape=tuple(tensors[f].shape), offsets=o, sizes=s) for f, (o, s) in mine
    ]
    layout = build_layout(specs)
    memory = Memory(-1, sum(p.padded_nbytes for p in layout.parts) + 8192)
    offsets, at = [], 4096
    image = memory.view()
    for part in layout.parts:
        offsets.append(at)
        image[at : at + len(part.header)] = part.header
        image[at + SAVE_ID_OFFSET : at + SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(SAVE_ID)
        at += part.padded_nbytes
    for (fqn, (start, sizes)), chunk in zip(mine, layout.chunks, strict=True):
        value = tensors[fqn]
        for dim, (o, s) in enumerate(zip(start, sizes, strict=True)):
            value = value.narrow(dim, o, s)
        value = value.contiguous()
        if chunk.nbytes:
            ctypes.memmove(memory.address + offsets[chunk.part] + chunk.offset_bytes, value.data_ptr(), chunk.nbytes)
    held = [fqn for fqn in tensors if rank in boxes[fqn]]
    entries = tuple(
        TensorEntry(
            fqn=fqn,
            dtype="float32",
            global_shape=tuple(tensors[fqn].shape),
            chunks=tuple(c for (f, _), c in zip(mine, layout.chunks, strict=True) if f == fqn),
        )
        for fqn in held
    )
    keys = tuple(m for n, fqn in enumerate(held) for m in (fqn, ("T", n)))
    keys += tuple(m for n in range(len(objects)) for m in (f"object{n}", ("O", n)))
    structure = Structure(
        tree=("d", ("top", ("d", keys), f"only-{rank}", ("d", ()))),
        tensors=entries,
        n_objects=len(objects),
        part_nbytes=tuple(p.nbytes for p in layout.parts),
    )
    request = request_of(
        path=str(path),
        rank=rank,
        world_size=world_size,
        parts=tuple(PartRange(offset, p.nbytes) for offset, p in zip(offsets, layout.parts, strict=True)),
        structure=encode_structure(structure),
        objects=encode_objects(SAVE_ID, [f"{o} of {rank}" for o in objects]),
        n_tensors=len(entries),
        fsync=False,
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            return RankWriter(request, image, FILES).write(pool)
    finally:
        image.release()
        memory.close()


def cut(rng: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Box]:
    long = [d for d, n in enumerate(sizes) if n > 1]
    if not long or not depth:
        return [(offsets, sizes)]
    d = rng.choice(long)
    at = rng.randrange(1, sizes[d])
    low, high, moved = list(sizes), list(sizes), list(offsets)
    low[d], high[d], moved[d] = at, sizes[d] - at, offsets[d] + at
    return cut(rng, offsets, tuple(low), depth - 1) + cut(rng, tuple(moved), tuple(high), depth - 1)


def test_random_boxes_of_several_ranks_make_the_tensor_again(tmp_path: Path, rng: random.Random) -> None:
    tensors, boxes = {}, {}
    for n in range(25):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(0, 4)))
        tensors[f"t{n}"] = torch.randn(shape)
        by_rank: Boxes = {}
        for box in cut(rng, (0,) * len(shape), shape, 3):
            by_rank.setdefault(rng.randrange(3), []).append(box)
        boxes[f"t{n}"] = by_rank
    path = save_boxes(tmp_path / "c", tensors, boxes, 3)
    new = load(path)["top"]
    assert {f: t.tolist() for f, t in new.items()} == {f: t.tolist() for f, t in tensors.items()}
    targets = {
        f: torch.zeros_like(t) if n % 2 else torch.zeros(t.shape, dtype=torch.float64)
        for n, (f, t) in enumerate(tensors.items())
    }
    load(path, {"top": targets}, strict=True)
    assert {f: t.float().tolist() for f, t in targets.items()} == {f: t.tolist() for f, t in tensors.items()}


def test_rows_of_two_ranks_go_straight_into_place(tmp_path: Path) -> None:
    value = torch.randn(1000, 300)
    boxes: Boxes = {0: [((0, 0), (400, 300))], 1: [((400, 0), (600, 300))]}
    path = save_boxes(tmp_path / "c", {"w": value}, {"w": boxes}, 2)
    assert torch.equal(load(path)["top"]["w"], value)


def test_columns_of_two_ranks_are_put_side_by_side(tmp_path: Path) -> None:
    value = torch.randn(300, 1000)
    boxes: Boxes = {0: [((0, 0), (300, 400))], 1: [((0, 400), (300, 600))]}
    path = save_boxes(tmp_path / "c", {"w": value}, {"w": boxes}, 2)
    target = torch.zeros(1000, 300).t()
    load(path, {"top": {"w": target}})
    assert torch.equal(load(path)["top"]["w"], value) and torch.equal(target, value)


@pytest.mark.parametrize(
    "by_rank",
    [
        {0: [((0,), (4,))], 1: [((5,), (5,))]},
        {0: [((0,), (6,))], 1: [((5,), (5,))]},
        {0: [((0,), (10,))], 1: [((0,), (10,))]},
        {0: [((0,), (5,))], 1: [((0,), (5,))]},
    ],
    ids=["hole", "overlap", "twice", "the same half twice"],
)
def test_a_tensor_that_is_not_covered_exactly_once_is_refused_by_name(tmp_path: Path, by_rank: Boxes) -> None:
    path = save_boxes(tmp_path / "c", {"w": torch.ones(10)}, {"w": by_rank}, 2)
    files = RecordingFiles()
    with pytest.raises(CorruptCheckpointError, match="'w'") as caught:
        read_contents(path, files)
    assert caught.value.fqn == "w"
    target = {"top": {"w": torch.zeros(10)}}
    with pytest.raises(CorruptCheckpointError):
        load(path, target)
    assert not bool(target["top"]["w"].any())


def test_trees_of_several_ranks_are_joined_and_objects_are_the_lowest_ranks(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    boxes: dict[str, Boxes] = {"a": {0: [((0,), (2,))]}, "b": {1: [((0,), (3,))]}}
    path = save_boxes(tmp_path / "c", tensors, boxes, 2, objects=["x"])
    new = load(path)
    assert list(new) == ["top", "only-0", "only-1"]
    assert new["top"]["b"].tolist() == [2, 2, 2] and new["top"]["object0"] == "x of 0"
    saved = SavedTree(read_contents(path, FILES), RankInfo(0, 1))
    assert list(saved.leaves) == ["top.a", "top.object0", "top.b"]
    assert saved.node_at("top") is not None and saved.node_at("a") is None


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("low_memory", [True, False])
def test_random_boxes_fill_random_boxes_and_flat_ranges(
    tmp_path: Path, rng: random.Random, verify: bool, low_memory: bool
) -> None:
    tensors, boxes = {}, {}
    for n in range(20):
        shape = tuple(rng.choice([1, 2, 5, 9, 40]) for _ in range(rng.randrange(0, 4)))
        if n == 0:
            shape = (300, 3000)  # more than a block, rows of more than a page
        tensors[f"t{n}"] = torch.randn(shape)
        by_rank: Boxes = {}
        for box in cut(rng, (0,) * len(shape), shape, 3):
            by_rank.setdefault(rng.randrange(3), []).append(box)
        boxes[f"t{n}"] = by_rank
    path = save_boxes(tmp_path / "c", tensors, boxes, 3)
    for _ in range(4):
        target: dict[str, Any] = {}
        for fqn, value in tensors.items():
            shape = tuple(value.shape)
            if rng.random() < 0.3:
                start = rng.randrange(value.numel())
                length = rng.randrange(value.numel() - start + 1)
                target[fqn] = FlatShard(torch.zeros(length), shape, start)
                continue
            offsets, sizes = rng.choice(cut(rng, (0,) * len(shape), shape, 3))
            mine = torch.zeros(sizes, dtype=rng.choice([torch.float32, torch.float64]))
            if mine.dim() > 1 and rng.random() < 0.3:
                mine = torch.zeros((*sizes[1:], sizes[0])).movedim(-1, 0)
            target[fqn] = ShardedSlice(mine, shape, offsets)
        load(path, {"top": target}, strict=True, verify=verify, low_memory=low_memory, threads=rng.choice([1, 3]))
        for fqn, found in target.items():
            value = tensors[fqn]
            if isinstance(found, FlatShard):
                wanted = value.flatten()[found.start : found.start + found.tensor.numel()]
            else:
                wanted = value[tuple(slice(o, o + s) for o, s in zip(found.offsets, found.tensor.shape, strict=True))]
            assert torch.equal(found.tensor.float(), wanted)


def test_a_part_of_thousands_of_chunks_is_found_without_looking_closely_at_each() -> None:
    chunks = [(n, Chunk(part=0, offset_bytes=4096, nbytes=16, offsets=(n * 2, 0), sizes=(2, 2))) for n in range(5000)]
    region = whole_region((100, 0), (4, 2))
    assert [n for n, _ in chunks_near(chunks, region, (10_000, 2))] == [50, 51]
    assert list(chunks_near(chunks, whole_region((0, 0), (10_000, 2)), (10_000, 2))) == chunks
    chunk = chunks[50][1]
    assert whole_chunk_piece(chunk, region) == (0, 4, (0, 0), (2, 2), (2, 1), 1, 0)
    assert (
        whole_chunk_piece(chunks[49][1], region) is None
        and whole_chunk_piece(chunk, region_of((slice(100, 104, 2),), (10_000, 2), "w")) is None
    )


ROWS, COLUMNS = 512, 8192
MESHES: dict[str, list[Box]] = {
    "Shard(0)": [((n * ROWS // 4, 0), (ROWS // 4, COLUMNS)) for n in range(4)],
    "Shard(1)": [((0, n * COLUMNS // 4), (ROWS, COLUMNS // 4)) for n in range(4)],
    "2 x 2": [((a * ROWS // 2, b * COLUMNS // 2), (ROWS // 2, COLUMNS // 2)) for a in range(2) for b in range(2)],
}


@pytest.mark.parametrize("saved", MESHES)
def test_a_rank_of_another_mesh_reads_at_most_a_tenth_more_than_it_needs(tmp_path: Path, saved: str) -> None:
    value = torch.randn(ROWS, COLUMNS)
    by_rank: Boxes = {rank: [box] for rank, box in enumerate(MESHES[saved])}
    path = save_boxes(tmp_path / "c", {"w": value}, {"w": by_rank}, 4)
    for cuts in MESHES.values():
        for offsets, sizes in (cuts[0], cuts[2]):
            for verify in (True, False):
                mine, files = torch.zeros(sizes), RecordingFiles()
                target = {"top": {"w": ShardedSlice(mine, (ROWS, COLUMNS), offsets)}}
                DefaultReader(files).read(path, target, verify=verify)
                rows, columns = (slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert torch.equal(mine, value[rows, columns])
                limit = touched_nbytes(path, offsets, sizes) if verify else mine.numel() * 4
                assert sum(n for at, n in files.read_ranges if n > SAVE_ID_NBYTES) <= 1.1 * limit


@pytest.mark.parametrize(("width", "n_pieces"), [(28_672, 1), (140_000, 8)])
def test_columns_of_small_blocks_are_pieces_only_where_the_gaps_are_long(width: int, n_pieces: int) -> None:
    chunk = Chunk(part=0, offset_bytes=0, nbytes=8 * width * 4, offsets=(0, 0), sizes=(8, width))
    region = whole_region((0, 0), (8, width // 2))
    found = pieces_to_read(chunk, region, itemsize=4, block_nbytes=32 << 10, verify=True)
    assert len(found) == n_pieces


def touched_nbytes(path: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the bytes of the blocks that hold a box of the tensor w."""
    contents, found = read_contents(path, FILES), set()
    for rank, chunk in contents.tensors["w"].chunks:
        (r, c), (height, width) = chunk.offsets, chunk.sizes
        low, high = max(c, offsets[1]), min(c + width, offsets[1] + sizes[1])
        for row in range(max(r, offsets[0]), min(r + height, offsets[0] + sizes[0])) if low < high else ():
            start = chunk.offset_bytes + ((row - r) * width + low - c) * 4
            end = start + (high - low) * 4
            found |= {(rank, block) for block in range(start // BLOCK_NBYTES, (end - 1) // BLOCK_NBYTES + 1)}
    return len(found) * BLOCK_NBYTES
