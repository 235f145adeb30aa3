"""The CRC-32s of a source's zip archives: a flipped bit in it is an error that names file and tensor."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import states
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.interop import copy_pipeline, source_reader
from asyncckpt.interop.sources import verify
from asyncckpt.storage.files import Files

pytest.importorskip("numpy")
pytest.importorskip("safetensors")

TARGETS = ("asyncckpt", "torch", "hf")
MARK = -77.25
DEADLINE_S = 60.0
LARGE = torch.arange(3 * BLOCK_NBYTES // 4 + 5, dtype=torch.float32)


def marked(*shape: int) -> torch.Tensor:
    return torch.full(shape, MARK)


def states_by_name() -> dict[str, dict[str, torch.Tensor]]:
    """How elements may lie in the storages of an archive; what is flipped is in `w`, and in the state once."""
    several = torch.cat([torch.zeros(10), marked(500), torch.ones(10)])
    large = LARGE.clone()
    large[-200:-100] = MARK
    return {
        "small": {"a": torch.zeros(9), "w": marked(500), "z": torch.ones(3)},
        "large": {"a": torch.zeros(9), "w": large},
        "views": {"a": several[:10], "w": several[10:510], "z": several[510:]},
        "a part": {"a": torch.zeros(9), "w": several[10:510]},
        "columns": {"w": marked(20, 30).t()},
        "overlapping": {"a": several[:300], "w": several[10:510]},
        "tied": dict.fromkeys(("w", "x"), marked(500)),
    }


def save_torch(state: dict[str, Any], path: Path) -> Path:
    torch.save(state, path)
    return path


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)
    return path / "__0_0.distcp"


SAVES: dict[str, Callable[[dict[str, Any], Path], Path]] = {"torch": save_torch, "dcp": save_dcp}


def flip(file: Path, found: bytes, rng: Random) -> None:
    """Flip one bit in a place whose bytes are known."""
    data = bytearray(file.read_bytes())
    at = data.find(found)
    assert at >= 0
    data[at + rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", list(states_by_name()))
@pytest.mark.parametrize("kind", list(SAVES))
def test_a_flipped_bit_of_the_source_is_named_and_leaves_no_target(
    kind: str, name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: Random
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    state = states_by_name()[name]
    file = SAVES[kind](state, tmp_path / "source")
    asyncckpt.convert(tmp_path / "source", tmp_path / "sound", to=to)
    found = asyncckpt.load(tmp_path / "sound")
    for key, tensor in state.items():
        states.assert_same(found[key], tensor.contiguous(), key)
    flip(file, struct.pack("<f", MARK) * 50, rng)
    with pytest.raises(CorruptCheckpointError, match="CRC-32") as caught:
        asyncckpt.convert(tmp_path / "source", tmp_path / "out", to=to)
    assert caught.value.file == file.name
    assert caught.value.fqn in state
    assert caught.value.fqn == "w" or name not in ("small", "large", "columns")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "sound"}


@pytest.mark.parametrize("kind", list(SAVES))
def test_a_flipped_bit_of_a_value_that_is_no_tensor_is_found(kind: str, tmp_path: Path, rng: Random) -> None:
    file = SAVES[kind]({"w": torch.ones(2), "name": "a text that is long enough"}, tmp_path / "source")
    flip(file, b"a text that is long enough", rng)
    with pytest.raises(CorruptCheckpointError) as caught:
        asyncckpt.convert(tmp_path / "source", tmp_path / "out", to="torch")
    assert file.name in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptCheckpointError):
        asyncckpt.load(tmp_path / "source")


@pytest.mark.parametrize("kind", list(SAVES))
def test_what_is_not_chosen_may_be_damaged(kind: str, tmp_path: Path, rng: Random) -> None:
    file = SAVES[kind]({"a": torch.arange(9.0), "w": marked(500)}, tmp_path / "source")
    flip(file, struct.pack("<f", MARK) * 50, rng)
    asyncckpt.convert(tmp_path / "source", tmp_path / "out", to="torch", keys=["a"])
    states.assert_same(asyncckpt.load(tmp_path / "out"), {"a": torch.arange(9.0)})


@pytest.mark.parametrize("kind", list(SAVES))
def test_an_archive_whose_writer_left_them_out_is_converted(kind: str, tmp_path: Path) -> None:
    state = {"a": torch.arange(9.0), "w": marked(500)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        SAVES[kind](state, tmp_path / "source")
    finally:
        torch.serialization.set_crc32_options(before)
    asyncckpt.convert(tmp_path / "source", tmp_path / "out", to="safetensors")
    states.assert_same(asyncckpt.load(tmp_path / "out"), state)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["large", "views", "tied"])
@pytest.mark.parametrize("kind", list(SAVES))
def test_what_passes_in_its_order_is_not_read_again(
    kind: str, name: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    SAVES[kind](states_by_name()[name], tmp_path / "source")
    monkeypatch.setattr(source_reader, "crc_of", lambda *_: pytest.fail("an entry was read again"))
    asyncckpt.convert(tmp_path / "source", tmp_path / "out", to=to)
    assert verify.verify_any(str(tmp_path / "out"), Files()).state == "ok"
