"""Bytes that somebody made up, under a manifest that vouches for them: typed errors, never a crash."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from format_samples import reseal

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.loading.load import load

TYPED = (CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "c"
    state = {"a": torch.randn(50), "b": {"c": torch.ones(3, 4, dtype=torch.int16), "d": [1, {"x": 2}]}, "e": None}
    state["f"] = [torch.ones(2), b"x" * 70_000]  # type: ignore[assignment]
    state["g"] = torch.eye(3).to_sparse()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return path


def changed(value: Any, rng: random.Random) -> Any:
    """Return a decoded document with one value somewhere replaced."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    return rng.choice(
        [None, True, -1, 0, 1, 3, 1 << 62, (1 << 64) - 1, 1.5, "", "T", "x", b"", b"x", [], [0], {}, ["T", 0]]
    )


def test_indexes_and_structures_with_any_value_replaced_end_in_typed_errors(
    checkpoint: Path, rng: random.Random
) -> None:
    index_path = next(checkpoint.glob("*.index"))
    index, manifest = index_path.read_bytes(), (checkpoint / "manifest.json").read_bytes()
    refused = 0
    try:
        for _ in range(600):
            document = msgpack.unpackb(index)
            if rng.random() < 0.7:
                structure = changed(msgpack.unpackb(document["structure"]), rng)
                document["structure"] = msgpack.packb(structure)
            else:
                document = changed(document, rng)
            reseal(checkpoint, msgpack.packb(document))
            try:
                load(checkpoint)
            except TYPED:
                refused += 1
    finally:
        index_path.write_bytes(index)
        (checkpoint / "manifest.json").write_bytes(manifest)
    assert refused > 200
    assert len(load(checkpoint)) == 5


def test_indexes_with_random_bytes_changed_end_in_typed_errors(checkpoint: Path, rng: random.Random) -> None:
    index_path = next(checkpoint.glob("*.index"))
    index, manifest = index_path.read_bytes(), (checkpoint / "manifest.json").read_bytes()
    try:
        for _ in range(600):
            damaged = bytearray(index)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            reseal(checkpoint, bytes(damaged))
            with contextlib.suppress(*TYPED):
                load(checkpoint, verify=False)
    finally:
        index_path.write_bytes(index)
        (checkpoint / "manifest.json").write_bytes(manifest)
