"""The golden checkpoint of two ranks: it loads for every reader, and its bytes are what is written today."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncckpt.config import RankInfo
from asyncckpt.errors import PerRankUnavailableError
from asyncckpt.loading.load import DefaultReader
from asyncckpt.loading.open_checkpoint import open_checkpoint
from asyncckpt.per_rank import PerRank
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import OK, verify_checkpoint

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
PATH = GOLDEN / "format-v1-ranks"


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_format_v1_ranks", GOLDEN / "make_format_v1_ranks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_still_writes_the_golden_bytes(made: ModuleType) -> None:
    assert {p.name: p.read_bytes() for p in PATH.iterdir()} == made.documents()


def test_the_golden_checkpoint_is_sound() -> None:
    assert verify_checkpoint(str(PATH), Files()).state == OK


@pytest.mark.parametrize("rank", range(2))
def test_each_rank_gets_what_it_saved(made: ModuleType, rank: int) -> None:
    new, missing = DefaultReader(rank_info=RankInfo(rank, 2)).read(PATH)
    expected = bare(made.state_of(rank))
    other = f"only-{1 - rank}"
    expected[other] = made.state_of(1 - rank)[other]
    assert str(sorted(new.items())) == str(sorted(expected.items())) and missing == []
    assert new["model"]["weight"] is new["model"]["tied"]
    assert new["model"]._metadata == {"": {"version": 2}}


def bare(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, PerRank) else value for key, value in state.items()}


def test_another_world_size_gets_what_is_common_and_the_lowest_ranks(made: ModuleType) -> None:
    reader = DefaultReader(rank_info=RankInfo(3, 4))
    with pytest.raises(PerRankUnavailableError) as caught:
        reader.read(PATH)
    assert caught.value.keys == ["rng.cpu", "rng.python", "position"]
    target = bare(made.state_of(1))
    del target["rng"], target["position"]
    reader.read(PATH, target, strict=True)
    assert target["model"]["mean"].tolist() == [0] * 4 and (target["seen"], target["list"][1]["rank"]) == (0.0, 0)
    assert torch.equal(target["model"]["weight"], torch.arange(30.0).reshape(6, 5))


def test_single_tensors_and_objects_of_any_rank_are_found() -> None:
    found = open_checkpoint(PATH)
    assert found.tensor("model.weight", (slice(2, 5), 0)).tolist() == [10, 15, 20]
    assert [found.tensor(f"rng.cpu@rank{rank}", 0).item() for rank in range(2)] == [0, 1]
    assert [found.objects_of(rank)["position"] for rank in range(2)] == [1000, 1001]


def test_any_safetensors_tool_opens_the_shards() -> None:
    safetensors = pytest.importorskip("safetensors")
    names = []
    for shard in sorted(PATH.glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="pt") as file:
            names.append(sorted(file.keys()))
    assert "model.weight" in names[0] and "model.weight" in names[1]
    assert "rng.cpu@rank1" in names[1] and "model.mean@rank0" in names[0]
