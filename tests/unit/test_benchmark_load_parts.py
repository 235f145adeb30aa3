"""`benchmarks.load_parts`: what its disk delivers, that a load still compares it, and what is left for whom."""

from __future__ import annotations

import os
import pathlib
import time

import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.files import Files
from benchmarks import bare_load, load_parts
from benchmarks.load_parts import BARE, LOADS, MIB, SPEEDS, MadeUpDisk

SHARD_NBYTES = 5 * MIB + 8192


@pytest.fixture
def shard(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "shard").write_bytes(b"header" + bytes(SHARD_NBYTES - 6))
    return tmp_path / "shard"


def test_its_disk_delivers_what_the_shard_has_whatever_the_buffer_held(shard: pathlib.Path) -> None:
    disk = MadeUpDisk(shard, None)
    with Mapping(-1, 2 * MIB) as memory, shard.open("rb") as file:
        for offset in (0, 2 * MIB, 0):
            with memory.view() as view:
                assert disk.preadv(file.fileno(), [view], offset) == 2 * MIB
                assert bytes(view) == shard.read_bytes()[offset : offset + 2 * MIB]
        assert 0 < disk.first < disk.last


def test_what_is_small_is_read(shard: pathlib.Path) -> None:
    buffer = bytearray(3)
    with shard.open("rb") as file:
        assert MadeUpDisk(shard, None).preadv(file.fileno(), [buffer], 3) == 3
    assert buffer == b"der"


def test_its_disk_takes_the_time_of_its_speed_for_one_read_after_the_other(shard: pathlib.Path) -> None:
    disk, began = MadeUpDisk(shard, 40.0 * MIB), time.perf_counter()
    with Mapping(-1, 2 * MIB) as memory:
        for _ in range(2):
            with memory.view() as view:
                disk.preadv(-1, [view], 0)
    assert time.perf_counter() - began >= 0.1  # never less; how much more is the machine's


@pytest.mark.parametrize("name", LOADS)
def test_a_load_from_it_compares_every_block(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "resident", lambda *_: False)  # a disk is not asked for what the page cache has
    state = {"w": torch.zeros(4 * MIB // 4), "b": torch.zeros(3)}
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, tmp_path / "a")
    path = bare_load.shard_of(tmp_path / "a")
    with Mapping(-1, 192 * MIB) as memory:
        for value in state.values():
            value.fill_(7.0)
        disk = MadeUpDisk(path, None)
        with load_parts.put(os, "preadv", disk.preadv):
            load_parts.load_as(name, tmp_path / "a", state, memory)
        assert disk.last, "nothing of it was asked of the disk"
        assert not any(value.any() for value in state.values())
        disk = MadeUpDisk(path, None)
        disk._head = b"\1" * MIB
        with load_parts.put(os, "preadv", disk.preadv), pytest.raises(CorruptCheckpointError):
            load_parts.load_as(name, tmp_path / "a", state, memory)


def test_what_a_load_takes_over_the_quickest_loop_of_its_round_is_divided() -> None:
    def row(load_s: float, there_s: float, ahead_s: float, *loops_s: float) -> dict[str, dict[str, float]]:
        found = {
            name: {"s": s, "cpu_s": 2 * s, "ahead_s": 9.0, "behind_s": 9.0}
            for name, s in zip(BARE, loops_s, strict=True)
        }
        fresh, there, unasked = LOADS
        found[fresh] = {"s": load_s, "cpu_s": 5.0, "ahead_s": ahead_s, "behind_s": 0.5}
        found[there] = {"s": there_s, "cpu_s": 4.0, "ahead_s": 9.0, "behind_s": 9.0}
        found[unasked] = {"s": load_s - 0.25, "cpu_s": 4.0, "ahead_s": 9.0, "behind_s": 9.0}
        return found

    one, other = row(10.0, 8.0, 0.5, 4.0, 5.0, 6.0), row(9.0, 8.0, 1.5, 7.0, 6.0, 3.0)
    found = load_parts.summary({"rounds": [dict.fromkeys(SPEEDS, one), dict.fromkeys(SPEEDS, other)]})
    for parts in found.values():
        assert parts["asyncckpt.load / the quickest loop"] == [2.5, 3.0]
        assert parts["over the quickest loop"] == [6.0, 6.0]
        assert parts["fresh buffers"] == [2.0, 1.0]
        assert parts["both ends"] == [1.0, 2.0]
        assert parts["asking the page cache"] == [0.25, 0.25]
        assert parts["between"] == [2.75, 2.75]
        assert parts["asyncckpt.load, CPU"] == [5.0, 5.0]
