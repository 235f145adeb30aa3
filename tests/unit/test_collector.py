"""Python's cyclic collector is off while a plan or a load is built, and as it was afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.basics.gc_control import collect_garbage, gc_paused
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.planning import planner


def test_it_is_off_inside_and_on_behind() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_behind_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), gc_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_walks_everything_now_unless_somebody_has_switched_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: walks.append(1))
    collect_garbage()
    assert walks == [1]
    gc.disable()
    try:
        collect_garbage()
    finally:
        gc.enable()
    assert walks == [1]


def test_it_is_off_while_a_plan_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    make = planner.make_plan

    def noted(*given: Any, **kw: Any) -> Any:
        seen.append(gc.isenabled())
        return make(*given, **kw)

    monkeypatch.setattr(planner, "make_plan", noted)
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"a": torch.ones(2)}, tmp_path / "1")
    assert seen == [False]
    assert gc.isenabled()


def test_it_is_on_again_when_a_state_is_refused(tmp_path: Path) -> None:
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        with pytest.raises(UnsupportedLeafError):
            checkpointer.save({"a": torch.ones(2, device="meta")}, tmp_path / "1")
        assert gc.isenabled()
