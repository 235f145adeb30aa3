"""Targets that are exactly what was saved take a short way; all that only look like it must not."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    AliasMismatchError,
    ConfigError,
    LeafTypeMismatchError,
    ShapeMismatchError,
    UnsupportedLeafError,
)
from asyncckpt.loading import matching

ALONE = asyncckpt.RankInfo(0, 1)


def state(fill: float | None = None) -> dict[str, Any]:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape) if fill is None else torch.full(shape, fill)

    tied = made(4, 3)
    model = OrderedDict({"a.weight": tied, "b.weight": tied, "c": torch.nn.Parameter(made(5)), "none": made(0, 2)})
    return {
        "model": model,
        "optim": {
            "state": {0: {"step": made(), "exp_avg": made(4, 3)}, 1: [made(2), (made(1), 7)]},
            "groups": [1, 2.5],
        },
        "step": 3 if fill is None else 0,
        "name": None,
    }


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each load into a target: whether it went the short way."""
    found: list[bool] = []
    real = matching.exact_placements

    def noted(*args: Any) -> Any:
        fillings = real(*args)
        found.append(fillings is not None)
        return fillings

    monkeypatch.setattr(matching, "exact_placements", noted)
    return found


def saved(tmp_path: Path, value: dict[str, Any]) -> Path:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=ALONE) as checkpointer:
        checkpointer.save(value, tmp_path / "c")
    return tmp_path / "c"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, member in value.items() for k, v in flat(member, f"{name}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for n, member in enumerate(value) for k, v in flat(member, f"{name}/{n}").items()}
    return {name: value}


def assert_equal(one: Any, other: Any) -> None:
    found, wanted = flat(one), flat(other)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def test_the_same_state_again_is_filled_the_short_way(tmp_path: Path, ways: list[bool]) -> None:
    original, target = state(), state(0.0)
    before = {name: id(value) for name, value in flat(target).items() if isinstance(value, torch.Tensor)}
    versions = target["model"]["a.weight"]._version
    asyncckpt.load(saved(tmp_path, original), target, strict=True)
    assert ways == [True]
    assert_equal(target, original)
    assert before == {name: id(value) for name, value in flat(target).items() if isinstance(value, torch.Tensor)}
    assert target["model"]["a.weight"] is target["model"]["b.weight"]
    assert target["model"]["a.weight"]._version > versions


def test_strides_of_the_target_are_its_own(tmp_path: Path, ways: list[bool]) -> None:
    original, target = {"w": torch.randn(6, 4)}, {"w": torch.zeros(4, 6).t()}
    asyncckpt.load(saved(tmp_path, original), target)
    assert ways == [True]
    assert torch.equal(target["w"], original["w"])


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_a_view_that_shows_other_values_than_it_holds_is_filled_itself(
    tmp_path: Path, ways: list[bool], lazy: str
) -> None:
    original = {"w": torch.randn(4, dtype=torch.complex64)} if lazy == "conj" else {"w": torch.randn(4)}
    memory = torch.zeros(4, dtype=torch.complex64)
    target = {"w": memory.conj() if lazy == "conj" else memory.conj().imag}
    asyncckpt.load(saved(tmp_path, original), target)
    assert ways == [False]
    assert torch.equal(target["w"], original["w"])
    assert memory.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s["model"].update(c=torch.zeros(6)), ShapeMismatchError),
        (lambda s: s["model"].update(c=torch.zeros(5, dtype=torch.int64)), LeafTypeMismatchError),
        (lambda s: s["model"].update(c=torch.zeros(1).expand(5)), ConfigError),
        (lambda s: s["model"].update(c=s["optim"]["state"][0]["exp_avg"]), AliasMismatchError),
        (lambda s: s.update(step=torch.zeros(1)), LeafTypeMismatchError),
    ],
)
def test_what_is_refused_is_refused_as_ever(tmp_path: Path, ways: list[bool], change: Any, error: type) -> None:
    original, target = state(), state(0.0)
    original["model"]["c"] = torch.randn(4, 3) if error is AliasMismatchError else original["model"]["c"]
    change(target)
    with pytest.raises(error):
        asyncckpt.load(saved(tmp_path, original), target)
    assert ways == [False]
    assert not target["model"]["a.weight"].any(), "nothing was changed"


@pytest.mark.parametrize("untie", ["target", "saved"])
def test_names_that_share_a_tensor_on_one_side_only_go_the_long_way(
    tmp_path: Path, ways: list[bool], untie: str
) -> None:
    original, target = state(), state(0.0)
    one = target if untie == "target" else original
    one["model"]["b.weight"] = one["model"]["b.weight"].clone()
    path = saved(tmp_path, original)
    if untie == "target":
        asyncckpt.load(path, target)
        assert_equal(target, original)
    else:  # two tensors of equal values
        asyncckpt.load(path, target)
        assert_equal(target["model"], original["model"])
    assert ways == [False]


def test_a_target_whose_storage_was_freed_is_refused_wherever_it_begins(tmp_path: Path, ways: list[bool]) -> None:
    path = saved(tmp_path, {"w": torch.ones(8)})
    for start in (0, 2):
        memory = torch.ones(10)
        target = {"w": memory[start : start + 8]}
        memory.untyped_storage().resize_(0)
        with pytest.raises(UnsupportedLeafError, match="its storage was freed"):
            asyncckpt.load(path, target)
    assert ways == [False, False]


def test_another_dtype_is_converted_and_said(
    tmp_path: Path, ways: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    target = {"w": torch.zeros(4, dtype=torch.float64)}
    original = {"w": torch.randn(4)}
    with caplog.at_level(logging.WARNING):
        asyncckpt.load(saved(tmp_path, original), target)
    assert ways == [False]
    assert torch.equal(target["w"], original["w"].double())
    assert "converted" in caplog.text


def test_a_module_in_the_target_goes_the_long_way(tmp_path: Path, ways: list[bool]) -> None:
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    asyncckpt.load(saved(tmp_path, {"model": one}), {"model": other}, strict=True)
    assert ways == [False]
    assert torch.equal(one.weight, other.weight)


def test_keys_and_key_map_do_not_ask_for_the_short_way(tmp_path: Path, ways: list[bool]) -> None:
    path, target = saved(tmp_path, state()), state(0.0)
    asyncckpt.load(path, target, keys="model")
    asyncckpt.load(path, target, key_map={"x": "y"})
    assert ways == []
