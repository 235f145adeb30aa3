"""Overlap with every leaf that a state dict may hold, with several structures in turn, and with torn saves between."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import states
import torch
from overlapping import Gate, backward, linear, state_of
from real_worker import DEADLINE_S, RealWorker, slots_of, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import SnapshotTornError
from asyncckpt.staging.cpu_copy import SlotImage


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("check", ["off", "sample", "hash"])
def test_every_leaf_that_is_copied_behind_the_training_comes_back_bit_for_bit(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, check: str
) -> None:
    state = states.every_leaf()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap", overlap_check=check) as checkpointer:
        handle = checkpointer.save(state, tmp_path / "a")
        assert gate.reached.wait(DEADLINE_S)
        assert not handle.staged.done()
        gate.open()
        written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


def odd_dtypes() -> dict[str, torch.Tensor]:
    return {str(dtype): states.tensor_of(dtype, (7, 300), 5) for dtype in states.ALL_DTYPES}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_optimizer_state_of_every_dtype_and_layout_is_owned_and_copied_later(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 700).t())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    flat = torch.arange(1000.0)
    optimizer.state[weight] = {
        **odd_dtypes(),
        "transposed": torch.randn(400, 300).t(),
        "strided": torch.randn(400, 300)[::2, 1::3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "zero_dim": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "overlapping": [flat[:600], flat[400:]],
        "same": [flat, flat],
    }
    checkpointer.attach(optimizer)
    state = {"w": weight, "optim": optimizer.state_dict()}
    expected = {name: value.clone() for name, value in odd_dtypes().items()}
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    (slot,) = slots_of(checkpointer)
    now, _ = slot.views.split(slot.views._split[0])
    assert not now.large and len(now.small) <= 1, "nothing but what has no memory is copied before save() returns"
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    with gate.held_back(optimizer.step):
        assert not handle.staged.done()
    written(handle)
    found = asyncckpt.load(tmp_path / "a")
    assert torch.equal(found["w"], before)
    saved = found["optim"]["state"][0]
    states.assert_same({name: saved[name] for name in expected}, expected)
    for name in ("transposed", "strided", "expanded", "zero_dim"):
        assert torch.equal(saved[name], optimizer.state[weight][name])
    assert torch.equal(saved["overlapping"][0], flat[:600]) and torch.equal(saved["overlapping"][1], flat[400:])
    assert saved["same"][0] is saved["same"][1]


def test_flat_and_tied_weights_are_owned_and_copied_later(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model = torch.nn.Module()
    model.embedding, model.rnn, model.head = torch.nn.Embedding(70, 30), torch.nn.LSTM(30, 30), torch.nn.Linear(30, 70)
    model.head.weight = model.embedding.weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpointer.attach(optimizer)
    state = {"model": model, "optim": optimizer}  # objects: their states are taken
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    (slot,) = slots_of(checkpointer)
    now, _ = slot.views.split(slot.views._split[0])
    assert not now.large and not now.small
    with gate.held_back(optimizer.step):
        assert not handle.staged.done()
    written(handle)
    found = asyncckpt.load(tmp_path / "a")["model"]
    assert found["head.weight"] is found["embedding.weight"]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- only the save that was torn


def test_a_write_between_two_saves_tears_the_first_only(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=3) as checkpointer:
        checkpointer.attach(optimizer)
        gate.open()
        handles = [checkpointer.save(state_of(model, optimizer), tmp_path / "before")]
        written(handles[0])
        gate.close()
        torn = checkpointer.save(state_of(model, optimizer), tmp_path / "torn")
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        second = checkpointer.save(state_of(model, optimizer), tmp_path / "second")
        gate.open()
        written(second)
        assert isinstance(torn.written.exception(DEADLINE_S), SnapshotTornError)
        written(checkpointer.save(state_of(model, optimizer), tmp_path / "third"))
    for name in ("second", "third"):
        states.assert_same(dict(asyncckpt.load(tmp_path / name, keys=["model"])["model"]), expected)
    assert not (tmp_path / "torn" / "manifest.json").exists()


# ---- several structures


def test_structures_in_turn_allocate_nothing_from_the_third_save_of_each_behind_the_training_too(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, init = [0, 0], SlotImage.__init__

    def image(self: SlotImage, *arguments: Any) -> None:
        made[1] += 1
        init(self, *arguments)

    model, optimizer = linear(200)
    other_model, other = linear(100)
    checkpointer.attach(optimizer, other)
    pool: Any = checkpointer._process.pool  # type: ignore[attr-defined]
    allocate = pool._allocate

    def counted(nbytes: int, within_s: float | None) -> Any:
        made[0] += 1
        return allocate(nbytes, within_s)

    monkeypatch.setattr(SlotImage, "__init__", image)
    monkeypatch.setattr(pool, "_allocate", counted)
    counts: list[tuple[int, int]] = []
    for turn in range(5):
        for name in ("full", "weights", "other"):
            state = state_of(other_model, other) if name == "other" else state_of(model, optimizer)
            expected = {key: value.clone() for key, value in state["model"].items()}
            path = tmp_path / f"{name}-{turn}"
            handle = checkpointer.save({"model": state["model"]} if name == "weights" else state, path)
            for one, by in ((model, optimizer), (other_model, other)):
                by.zero_grad()
                backward(one)
                by.step()
            written(handle)
            states.assert_same(dict(asyncckpt.load(path, keys=["model"])["model"]), expected)
        counts.append((made[0], made[1]))
    assert counts[2:] == [counts[1]] * 3
    assert counts[-1] == (1, 3)
