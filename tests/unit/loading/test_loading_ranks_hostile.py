"""Checkpoints of several ranks that contradict themselves: typed errors that name the tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from many_ranks import SAVE_ID, checkpoint_files, save_ranks
from test_loading_hostile import changed

from asyncckpt import PerRank
from asyncckpt.config import RankInfo
from asyncckpt.errors import (
    CorruptCheckpointError,
    MissingKeysError,
    PerRankUnavailableError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.manifest import decode_manifest, encode_manifest
from asyncckpt.format.names import index_name
from asyncckpt.format.structure import Box
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.open_checkpoint import open_checkpoint
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import CORRUPT, verify_checkpoint


def forged(path: Path, states: Sequence[Mapping[str, Any]], rank: int, change: Callable[[dict[str, Any]], None]) -> str:
    """Write a checkpoint of which one rank's structure was changed under a manifest that vouches for it."""
    files = checkpoint_files(states)
    name = index_name(SAVE_ID, rank)
    index = msgpack.unpackb(files[name])
    structure = msgpack.unpackb(index["structure"])
    change(structure)
    files[name] = msgpack.packb({**index, "structure": msgpack.packb(structure)})
    manifest = decode_manifest(files["manifest.json"])
    records = list(manifest.ranks)
    records[rank] = dataclasses.replace(
        records[rank], index_nbytes=len(files[name]), index_checksum=file_checksum(files[name])
    )
    files["manifest.json"] = encode_manifest(dataclasses.replace(manifest, ranks=tuple(records)))
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return os.fspath(path)


def read_in_every_way(path: str, rng: random.Random) -> None:
    """Load it as several readers, and parts of all its tensors one by one."""
    for rank, world_size in ((0, 1), (1, 2)):
        with contextlib.suppress(PerRankUnavailableError):
            DefaultReader(rank_info=RankInfo(rank, world_size)).read(path)
        with contextlib.suppress(PerRankUnavailableError, MissingKeysError):
            target = {"own": PerRank(None, reshard=lambda values, *_: values)}
            DefaultReader(rank_info=RankInfo(rank, world_size + 1)).read(path, target)
    found = open_checkpoint(path)
    for name, info in {**found.stored_tensors, **found.tensors}.items():
        slices = tuple(slice(rng.randrange(4), None, rng.randrange(1, 4)) for _ in info.shape)
        found.tensor(name, slices, verify=rng.random() < 0.5)
    for rank in range(found.world_size):
        dict(found.objects_of(rank))


def refused(path: str) -> CorruptCheckpointError:
    """Read it in every way; return the error of a load."""
    assert verify_checkpoint(path, Files(), fast=True).state == CORRUPT
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path)
    target = {"w": torch.zeros(4)}
    with pytest.raises(CorruptCheckpointError):
        DefaultReader(rank_info=RankInfo(0, 2)).read(path, target)
    assert not bool(target["w"].any())
    with pytest.raises(CorruptCheckpointError) as caught:
        DefaultReader(rank_info=RankInfo(0, 1)).read(path)
    return caught.value


CUTS: dict[str, dict[int, list[Box]]] = {
    "hole": {0: [((0,), (1,))], 1: [((2,), (2,))]},
    "overlap": {0: [((0,), (3,))], 1: [((2,), (2,))]},
    "twice": {0: [((0,), (4,))], 1: [((0,), (4,))]},
    "nobody": {},
    "overlap as large as the hole": {0: [((0,), (2,))], 1: [((1,), (2,))]},
}


@pytest.mark.parametrize("boxes", CUTS.values(), ids=CUTS)
def test_pieces_that_do_not_make_the_tensor_are_refused(tmp_path: Path, boxes: dict[int, list[Box]]) -> None:
    path = save_ranks(tmp_path / "c", [{"w": torch.ones(4)}] * 2, cut=lambda fqn, shape, holders: boxes)
    assert refused(path).fqn == "w"


@pytest.mark.parametrize(("dtype", "shape"), [("float64", [4]), ("int32", [4]), ("float32", [2, 2]), ("float32", [8])])
def test_a_tensor_that_another_rank_has_as_another_is_refused(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    def change(structure: dict[str, Any]) -> None:
        structure["tensors"][0][1:] = [dtype, shape, []]

    path = forged(tmp_path / "c", [{"w": torch.ones(4)}] * 2, 1, change)
    assert refused(path).fqn == "w"


@pytest.mark.parametrize("name", ["own@rank0", "own@rank2", "own@rank01", "own@rank" + "9" * 5000])
def test_a_name_of_another_rank_is_refused(tmp_path: Path, name: str) -> None:
    def change(structure: dict[str, Any]) -> None:
        structure["tensors"][1][0] = name

    states = [{"w": torch.ones(4), "own": PerRank(torch.ones(2))}] * 2
    path = forged(tmp_path / "c", states, 1, change)
    assert refused(path).fqn == name


def test_a_mark_inside_a_mark_is_refused(tmp_path: Path) -> None:
    def change(structure: dict[str, Any]) -> None:
        tree = structure["tree"]
        tree[1][3] = ["r", ["d", ["x", tree[1][3]]]]

    states = [{"w": torch.ones(4), "own": PerRank(torch.ones(2))}] * 2
    path = forged(tmp_path / "c", states, 1, change)
    assert "inside another" in str(refused(path))


@pytest.mark.parametrize(
    "node",
    [["r"], ["r", None], ["r", ["T", 0], 1], ["r", ["T", 9]], ["-"], ["r", ["-"]], ["E"], ["E", 9], ["E", 0, 0]],
)
def test_malformed_marks_are_refused(tmp_path: Path, node: Any) -> None:
    def change(structure: dict[str, Any]) -> None:
        structure["tree"][1][1] = node

    refused(forged(tmp_path / "c", [{"w": torch.ones(4)}] * 2, 1, change))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["w", "own"])
def test_a_part_without_elements_that_has_some_is_refused(tmp_path: Path, rank: int, key: str) -> None:
    def change(structure: dict[str, Any]) -> None:
        tree, names = structure["tree"], [entry[0].partition("@")[0] for entry in structure["tensors"]]
        tree[1][2 * names.index(key) + 1] = ["E", names.index(key)]

    path = forged(tmp_path / "c", [{"w": torch.ones(4), "own": PerRank(torch.ones(2))}] * 2, rank, change)
    for reader in (RankInfo(0, 1), RankInfo(0, 2), RankInfo(1, 2)):
        with pytest.raises(CorruptCheckpointError, match="marked as a part without elements, and has some") as caught:
            DefaultReader(rank_info=reader).read(path)
        assert caught.value.file == index_name(SAVE_ID, rank)
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path)


def test_an_index_of_another_rank_is_refused(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"w": torch.ones(4)}] * 2)
    zero, one = (tmp_path / "c" / index_name(SAVE_ID, rank) for rank in range(2))
    one.write_bytes(zero.read_bytes())
    refused(path)


def test_a_structure_with_any_value_replaced_ends_in_a_typed_error(tmp_path: Path, rng: random.Random) -> None:
    states = [
        {
            "w": torch.arange(40.0).reshape(10, 4),
            "own": PerRank({"t": torch.ones(3), "s": r}),
            "l": [torch.ones(2), {"x": r}],
        }
        for r in range(2)
    ]
    caught = 0
    for n in range(300):

        def change(structure: dict[str, Any]) -> None:
            key = rng.choice(["tree", "tree", "tensors", "n_objects", "parts"])
            structure[key] = changed(structure[key], rng)

        try:
            read_in_every_way(forged(tmp_path / str(n), states, rng.randrange(2), change), rng)
        except (CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError):
            caught += 1
    assert caught > 100
