"""plan_load: what a load would do, and that it reads no data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import save_ranks
from storage_samples import RecordingFiles

import asyncckpt
from asyncckpt import PerRank, plan_load
from asyncckpt.config import RankInfo
from asyncckpt.errors import AsyncCkptError, CheckpointNotFoundError, ConfigError, UnsupportedLeafError
from asyncckpt.loading import plan_load as plan_load_module

SAVED = {
    "model": {"w": torch.ones(4, 3), "b": torch.ones(3)},
    "step": 7,
    "long": b"x" * 70_000,
    "list": [torch.ones(1)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ranks(tmp_path_factory.mktemp("plan") / "c", [SAVED] * 2)


def target() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(4, 3), "b": torch.zeros(3)}, "step": 0, "long": b"", "list": [torch.zeros(1)]
    }  # fmt: skip


def test_a_target_that_fits_is_said_to_fit(path: str) -> None:
    plan = plan_load(path, target())
    assert (plan.missing, plan.unexpected, plan.mismatched, plan.unavailable) == ((), (), (), ())
    assert plan.nbytes == 48 + 12 + 70_000 + 4 and plan.fits
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.nbytes = 0  # type: ignore[misc]


def test_a_place_that_does_not_fit_is_listed_once(path: str) -> None:
    plan = plan_load(path, {"step": {"x": torch.zeros(1), "y": torch.zeros(1)}})
    assert plan.mismatched == (("step", "object", "container"),)


def test_everything_that_does_not_fit_is_listed_at_once(path: str) -> None:
    wanted = target()
    wanted["model"] = {"w": torch.zeros(3, 4), "new": torch.zeros(1), "b": 5}
    wanted["step"], wanted["list"] = {"x": torch.zeros(1)}, 3
    plan = plan_load(path, wanted)
    assert plan.missing == ("model.new",)
    assert plan.unexpected == ("list.0",)
    assert plan.mismatched == (
        ("model.w", (4, 3), (3, 4)), ("model.b", "tensor", "object"), ("step", "object", "container"),
        ("list", "container", "object"),
    )  # fmt: skip
    assert plan.nbytes == 70_000 and not plan.fits
    assert plan.mismatched[0].saved == (4, 3)


def test_unexpected_keys_do_not_keep_a_target_from_fitting(path: str) -> None:
    plan = plan_load(path, {"step": 0})
    assert plan.unexpected == ("model.w", "model.b", "long", "list.0") and plan.fits and plan.nbytes == 0


def test_keys_limit_what_is_looked_at(path: str) -> None:
    plan = plan_load(path, {"model": {"b": torch.zeros(3)}, "other": 1}, keys=["model", "typo"])
    assert (plan.missing, plan.unexpected, plan.nbytes) == (("typo",), ("model.w",), 12)


@pytest.mark.parametrize("key_map", [{"net.w": "model.w"}, lambda fqn: fqn.replace("net", "model")])
def test_key_map_renames(path: str, key_map: Any) -> None:
    plan = plan_load(path, {"net": {"w": torch.zeros(4, 3)}}, None, key_map)
    assert plan.missing == () and "model.w" not in plan.unexpected and plan.nbytes == 48


def test_a_tensor_counts_once_however_many_names_it_has(tmp_path: Path) -> None:
    tied = torch.ones(5)
    path = save_ranks(tmp_path / "c", [{"a": tied, "b": tied, "c": torch.ones(5)}])
    assert plan_load(path, {"a": torch.zeros(5), "b": torch.zeros(5)}).nbytes == 20
    both = torch.zeros(5)
    plan = plan_load(path, {"a": both, "c": both})
    assert (plan.mismatched, plan.shared, plan.nbytes) == ((), ("a", "c"), 40)
    assert plan_load(path, {"a": both, "b": both}).shared == ()
    matrix = torch.zeros(5, 2)
    assert plan_load(path, {"a": matrix[:, 0], "c": matrix[:, 1]}).shared == ()
    assert plan_load(path, {"a": both, "c": torch._neg_view(both)}).shared == ("a", "c")


def test_values_of_other_ranks_are_told_apart(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "c", [{"rng": PerRank({"s": r}), "x": torch.ones(2)} for r in range(2)])
    wanted = {"rng": {"s": 0}, "x": torch.zeros(2)}
    assert plan_load(path, wanted, rank_info=RankInfo(1, 2)).fits
    plan = plan_load(path, wanted)
    assert (plan.unavailable, plan.missing, plan.fits) == (("rng.s",), (), False)


def test_no_data_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RecordingFiles()
    monkeypatch.setattr(plan_load_module, "files_at", lambda path: files)
    plan_load(path, target())
    opened = [str(where) for name, where in files.calls if name == "open"]
    assert len(opened) == 3 and all(name.endswith((".index", "manifest.json")) for name in opened)


def test_a_plan_and_a_load_agree(path: str) -> None:
    cases: list[dict[str, Any]] = [
        target(), {"model": {"w": torch.zeros(1)}}, {"model": 1}, {"step": torch.zeros(1)}, {"nothing": 1},
        {"list": {"0": torch.zeros(1)}}, {"long": 1},
    ]  # fmt: skip
    for case in cases:
        plan = plan_load(path, case)
        try:
            asyncckpt.load(path, case, strict=True)
        except AsyncCkptError:
            assert not plan.fits
        else:
            assert plan.fits


def test_what_cannot_be_planned_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        plan_load(tmp_path / "nothing", {})
    with pytest.raises(UnsupportedLeafError):
        plan_load(path, {frozenset(): 1})
    with pytest.raises(ConfigError, match="keys holds 1"):
        plan_load(path, {}, keys=[1])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="expanded"):
        plan_load(path, {"model": {"b": torch.zeros(1).expand(3)}})
