"""Shard files that were damaged in any way: a load gives the saved bits or says what is wrong; `verify` finds it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

N_DAMAGED = 500


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = {"a": 90_000, "b": 7, "c": 70_000}
    return {name: torch.randn(n, generator=generator) for name, n in sizes.items()}


def damage(shard: Path, older: Path, rng: random.Random) -> str:
    """Damage a shard in one of the ways of disks and people, and say how."""
    data, kind = bytearray(shard.read_bytes()), rng.choice(["flip", "zeros", "truncate", "extend", "swap", "move"])
    at = rng.randrange(len(data))
    before = bytes(data)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 2, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += rng.randbytes(rng.choice([1, 4096, 300_000]))
    elif kind == "swap":
        data[:] = older.read_bytes()
    else:  # two pages change places
        pages = [slice(4096 * n, 4096 * (n + 1)) for n in rng.sample(range(len(data) // 4096), 2)]
        data[pages[0]], data[pages[1]] = data[pages[1]], data[pages[0]]
    if data == before:
        data[at] ^= 255
    shard.write_bytes(data)
    return f"{kind} at {at} of {len(before)}"


def test_no_damaged_shard_is_taken_for_what_was_saved(tmp_path: Path, rng: random.Random) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
        checkpointer.save(state_of(1), tmp_path / "older")
        checkpointer.save(state_of(2), tmp_path / "good")
    (older,), (good,) = ((tmp_path / name).glob("*.safetensors") for name in ("older", "good"))
    assert os.path.getsize(older) == os.path.getsize(good)
    wanted, broken = state_of(2), tmp_path / "good" / good.name
    shutil.copy(good, tmp_path / "sound")
    for number in range(N_DAMAGED):
        how = f"damage {number}: {damage(broken, older, rng)}"
        verdict = verify_checkpoint(str(tmp_path / "good"), Files())
        assert verdict.faults and all(good.name in str(fault) for fault in verdict.faults), how
        name = rng.choice([None, *wanted])
        try:
            found = asyncckpt.load(tmp_path / "good", source="disk", keys=None if name is None else [name])
        except CorruptCheckpointError as error:
            assert error.file == good.name, how
        else:
            assert all(torch.equal(value, wanted[key]) for key, value in found.items()), how
            assert name is not None, f"{how}: all of it was loaded, and nothing was found"
        shutil.copy(tmp_path / "sound", broken)
    assert verify_checkpoint(str(tmp_path / "good"), Files()).faults == []


@pytest.mark.parametrize("name", ["older", "good"])
def test_a_shard_of_another_save_of_the_same_values_is_not_taken_for_it(tmp_path: Path, name: str) -> None:
    with SyncCheckpointer(rank_info=RankInfo(0, 1), fsync=False) as checkpointer:
        for one in ("older", "good"):
            checkpointer.save(state_of(1), tmp_path / one)
    shards = {one: next((tmp_path / one).glob("*.safetensors")) for one in ("older", "good")}
    other = shards["good" if name == "older" else "older"]
    shutil.copy(other, shards[name])
    with pytest.raises(CorruptCheckpointError):
        asyncckpt.load(tmp_path / name, source="disk")
