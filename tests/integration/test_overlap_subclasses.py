"""Subclasses in the state of an attached optimizer: their components are copied behind the training."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from overlapping import Gate
from real_worker import DEADLINE_S, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import SnapshotTornError
from tests.composite_samples import pair, same


class Momentum(torch.optim.Optimizer):
    """Its state is a subclass with another one in it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for n, p in enumerate(self.param_groups[0]["params"]):
            state = self.state[p]
            if not state:
                state["m"] = pair(n)
            state["m"].inner.codes.add_(1)
            state["m"].bias.add_(1)
            p.add_(1)


def _started(checkpointer: AsyncCheckpointer) -> tuple[Momentum, dict[str, Any]]:
    module = torch.nn.Linear(4, 4)
    optimizer = Momentum(module)
    optimizer.step()
    checkpointer.attach(optimizer)
    return optimizer, {"model": module, "optim": optimizer}


def test_a_step_waits_for_the_copies_of_components(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate, registered: None
) -> None:
    optimizer, state = _started(checkpointer)
    expected = [value["m"].changed(lambda part: part.clone()) for value in optimizer.state.values()]
    for path in ("first", "again"):  # the second save takes the plan of the first
        handle = checkpointer.save(state, tmp_path / path)
        assert gate.reached.wait(DEADLINE_S) and not handle.staged.done()
        with gate.held_back(optimizer.step):
            assert not handle.staged.done()
        written(handle)
        found = asyncckpt.load(tmp_path / path)["optim"]["state"]
        assert all(same(found[n]["m"], value) for n, value in enumerate(expected))
        expected = [value["m"].changed(lambda part: part.clone()) for value in optimizer.state.values()]
        gate.close()


def test_a_component_that_is_changed_during_its_copy_is_noticed(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    optimizer, state = _started(checkpointer)
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    value = next(iter(optimizer.state.values()))["m"]
    with torch.no_grad():
        value.inner.codes.add_(1)
    gate.open()
    with pytest.raises(SnapshotTornError, match=r"m\.inner\.codes"):
        handle.staged.result(DEADLINE_S)


def test_an_asynchronous_save_is_that_of_the_moment(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, registered: None
) -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = Momentum(module)
    optimizer.step()
    expected = [value["m"].changed(lambda part: part.clone()) for value in optimizer.state.values()]
    handle = checkpointer.save({"optim": optimizer}, tmp_path / "a")
    optimizer.step()
    written(handle)
    other = Momentum(module)
    asyncckpt.load(tmp_path / "a", {"optim": other})
    assert all(same(found["m"], value) for found, value in zip(other.state.values(), expected, strict=True))
    other.step()
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
