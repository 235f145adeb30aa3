"""Lazily conjugated and negated views by way of a worker: copied by their values at `save()`, whatever comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import states
import torch
import views
from overlapping import Gate
from real_worker import DEADLINE_S, RealWorker, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.dcp import StorageWriter


def expected_of(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: states.bits_of(views.value_of(leaf)) for name, leaf in state.items()}


def found_in(path: Path) -> dict[str, bytes]:
    return {name: states.bits_of(leaf) for name, leaf in asyncckpt.load(path, source="disk").items()}


@pytest.mark.parametrize("kind", ["plain", "slice", "flat"])
def test_lazy_views_are_staged_by_their_values_and_may_change_at_once(
    checkpointer: AsyncCheckpointer, tmp_path: Path, kind: str
) -> None:
    for n in range(3):
        state = views.lazy_state(views.WRAPPERS[kind], seed=n)
        expected = expected_of(state)
        handle = checkpointer.save(state, tmp_path / str(n))
        base = state["base"].tensor if kind != "plain" else state["base"]
        base.zero_()
        written(handle)
        assert found_in(tmp_path / str(n)) == expected


@pytest.mark.parametrize("kind", ["plain", "slice"])
def test_lazy_views_of_a_parameter_hold_its_values_at_the_save_though_the_rest_is_copied_later(
    checkpointer: AsyncCheckpointer, tmp_path: Path, gate: Gate, kind: str
) -> None:
    parameter = torch.nn.Parameter(torch.randn(9, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    checkpointer.attach(optimizer)
    wrap = views.WRAPPERS[kind]
    state = {"base": wrap(parameter.detach()), "conj": wrap(parameter.detach().conj())}
    state["imag"] = wrap(parameter.detach().conj().imag)
    expected = expected_of(state)
    handle = checkpointer.save(state, tmp_path / "c")
    assert gate.reached.wait(DEADLINE_S) and not handle.staged.done(), "the parameter is copied behind the training"
    gate.open()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    written(handle)
    assert found_in(tmp_path / "c") == expected
    assert expected_of({"base": parameter.detach()})["base"] != expected["base"]


def test_stock_saves_through_a_worker_store_the_values_of_lazy_views(shared_worker: RealWorker, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", endpoint=shared_worker.endpoint)
    try:
        state = views.lazy_state(views.WRAPPERS["plain"])
        expected = expected_of(state)
        dcp_calls.save(state, writer)
        assert found_in(tmp_path / "c") == expected
    finally:
        writer.close()
