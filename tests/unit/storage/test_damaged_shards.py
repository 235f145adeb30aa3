"""500 shards, each damaged in another way: a load gives exactly what was saved, or says what is wrong; never a hang."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
from collections.abc import Callable

import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

N_DAMAGED = 500
Damage = Callable[[bytearray, bytes, random.Random], None]


def flip(data: bytearray, older: bytes, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data: bytearray, older: bytes, rng: random.Random) -> None:
    del data[rng.choice((0, 1, 4095, 4096, len(data) - 1, rng.randrange(len(data)))) :]


def extend(data: bytearray, older: bytes, rng: random.Random) -> None:
    data += rng.choice((b"\0", bytes(4096), rng.randbytes(rng.randrange(1, 9000))))


def swap(data: bytearray, older: bytes, rng: random.Random) -> None:
    """The shard of an older save of the same structure, and of the same size."""
    assert len(older) == len(data)
    data[:] = older


def disguise(data: bytearray, older: bytes, rng: random.Random) -> None:
    """The same, with this save's id in its header."""
    marker = data[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES]
    data[:] = older
    data[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = marker


def old_pages(data: bytearray, older: bytes, rng: random.Random) -> None:
    """Some pages are those of the older shard: a write that was lost."""
    page = rng.randrange(1, len(data) // 4096) * 4096
    data[page : page + 4096] = older[page : page + 4096]


def lost_pages(data: bytearray, older: bytes, rng: random.Random) -> None:
    page = rng.randrange(len(data) // 4096) * 4096
    data[page : page + 4096] = bytes(len(data[page : page + 4096]))


def exchange_blocks(data: bytearray, older: bytes, rng: random.Random) -> None:
    one, other = rng.sample(range(len(data) // BLOCK_NBYTES), 2)
    a, b = slice(one * BLOCK_NBYTES, (one + 1) * BLOCK_NBYTES), slice(other * BLOCK_NBYTES, (other + 1) * BLOCK_NBYTES)
    data[a], data[b] = data[b], data[a]


def spoil_the_tail(data: bytearray, older: bytes, rng: random.Random) -> None:
    data[-rng.randrange(1, 9)] ^= 1


DAMAGES: list[Damage] = [
    *(flip, flip, cut, extend, swap, disguise, old_pages, lost_pages, exchange_blocks, spoil_the_tail),
]


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (BLOCK_NBYTES // 4 * 3, 50_000, 7, 1)
    return {f"w{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, bytes]:
    """A checkpoint, and the shard of an older save of the same structure."""
    root = tmp_path_factory.mktemp("damaged")
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state(0), root / "older")
        checkpointer.save(state(1), root / "c")
    return root / "c", next((root / "older").glob("*.safetensors")).read_bytes()


def test_a_damaged_shard_is_never_taken_for_a_sound_one(saved: tuple[pathlib.Path, bytes], rng: random.Random) -> None:
    path, older = saved
    shard = next(path.glob("*.safetensors"))
    sound, expected = shard.read_bytes(), state(1)
    refused = 0
    try:
        for number in range(N_DAMAGED):
            damage = DAMAGES[number % len(DAMAGES)]
            data = bytearray(sound)
            damage(data, older, rng)
            if bytes(data) == sound:
                continue
            shard.write_bytes(data)
            keys = None if number % 3 else [f"w{rng.randrange(4)}"]
            try:
                found = asyncckpt.load(path, keys=keys)
            except CorruptCheckpointError as error:
                refused += 1
                assert error.file == shard.name, damage.__name__
            else:
                assert all(torch.equal(found[k], expected[k]) for k in keys or ()), damage.__name__
                assert keys is not None and found, f"{damage.__name__}: a load of everything saw nothing"
            if number % 5 == 0:
                assert verify_checkpoint(str(path), Files()).state == "corrupt", damage.__name__
    finally:
        shard.write_bytes(sound)
    assert refused > N_DAMAGED / 2
    assert all(torch.equal(v, expected[k]) for k, v in asyncckpt.load(path).items())


def test_the_last_byte_of_every_block_is_verified(saved: tuple[pathlib.Path, bytes], tmp_path: pathlib.Path) -> None:
    shutil.copytree(saved[0], tmp_path / "c")
    shard = next((tmp_path / "c").glob("*.safetensors"))
    sound = shard.read_bytes()
    ends = [*range(BLOCK_NBYTES, len(sound), BLOCK_NBYTES), len(sound)]
    assert len(ends) > 2 and len(sound) % BLOCK_NBYTES
    for end in ends:
        data = bytearray(sound)
        data[end - 1] ^= 0x80
        shard.write_bytes(data)
        with pytest.raises(CorruptCheckpointError) as caught:
            asyncckpt.load(tmp_path / "c")
        error = caught.value
        assert error.offset is not None and error.nbytes is not None and error.fqn is not None
        assert error.offset <= end - 1 < error.offset + error.nbytes == end
    assert os.path.getsize(shard) == len(sound)
