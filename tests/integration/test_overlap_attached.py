"""Overlap: odd optimizers and modules that are attached, and copies that cannot be begun."""

from __future__ import annotations

import copy
import gc
import pathlib
import pickle
import threading
import time
from typing import Any

import pytest
import states
import torch
from overlapping import Gate, backward, linear, state_of
from real_worker import DEADLINE_S, RealWorker, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import CheckpointerClosedError, ConfigError, StagingError
from asyncckpt.staging.deferred_copy import BackgroundCopier


class Wrapper(torch.optim.Optimizer):
    """As some frameworks wrap optimizers: `Optimizer.__init__()` never runs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_wrapper_that_was_never_initialised_is_refused_and_its_inside_can_be_attached(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    wrapper = Wrapper(optimizer)
    with pytest.raises(ConfigError, match=r"Wrapper .* attach the one inside") as caught:
        checkpointer.attach(model, optimizer, wrapper)
    assert caught.value.field == "attach"
    assert not optimizer._optimizer_step_pre_hooks, "all or none"
    assert not model._load_state_dict_pre_hooks
    checkpointer.attach(wrapper.inner)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    with gate.held_back(wrapper.step):
        assert not handle.staged.done()
    written(handle)


@pytest.mark.parametrize("original", ["kept", "gone"])
def test_the_step_of_a_shallow_copy_of_an_attached_optimizer_waits(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate, original: str
) -> None:
    model, optimizer = linear(fused=True)
    checkpointer.attach(optimizer)
    state = state_of(model, optimizer)
    expected = {name: value.clone() for name, value in state["model"].items()}
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    other = copy.copy(optimizer)
    assert not other._optimizer_step_pre_hooks
    if original == "gone":
        del optimizer
        gc.collect()
    with gate.held_back(other.step):
        assert not handle.staged.done()
    written(handle)
    states.assert_same(dict(asyncckpt.load(tmp_path / "a", keys=["model"])["model"]), expected)


def test_the_step_of_an_optimizer_of_other_parameters_waits_for_nothing(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    other_model, other = linear()
    checkpointer.attach(optimizer)
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    backward(other_model)
    other.step()
    assert not gate.waited.is_set() and not handle.staged.done()
    gate.open()
    written(handle)


def test_a_module_attached_twice_and_again_as_a_part_has_one_hook_each(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    model, _ = linear()
    checkpointer.attach(model, model)
    checkpointer.attach(model.get_submodule("0"), torch.nn.Sequential(model))
    assert [len(m._load_state_dict_pre_hooks) for m in model.modules()] == [1] * 4
    checkpointer.detach()
    assert [len(m._load_state_dict_pre_hooks) for m in model.modules()] == [0] * 4
    checkpointer.attach(model)
    assert [len(m._load_state_dict_pre_hooks) for m in model.modules()] == [1] * 4, "also after detach()"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules_can_be_attached_before_their_parameters_exist(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer.attach(optimizer, model)
    first = model.get_submodule("0")
    handle = checkpointer.save({"first": first.state_dict()}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    with gate.held_back(optimizer.step):
        assert not handle.staged.done()
    written(handle)
    backward(model)
    gate.close()
    state = state_of(model, optimizer)
    expected = {name: value.clone() for name, value in state["model"].items()}
    handle = checkpointer.save(state, tmp_path / "b")
    with gate.held_back(optimizer.step):
        assert not handle.staged.done(), "what has come to exist is owned"
    written(handle)
    states.assert_same(dict(asyncckpt.load(tmp_path / "b", keys=["model"])["model"]), expected)


@pytest.mark.parametrize("where", ["before it is taken", "where it is taken", "where its thread is started"])
def test_a_copy_that_cannot_be_begun_fails_that_save_only(
    shared_worker: RealWorker, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, optimizer = linear()

    def broken(*_: Any) -> None:
        raise MemoryError("no room for a thread")

    with AsyncCheckpointer(endpoint=shared_worker.endpoint, slots=1, slot_timeout_s=DEADLINE_S) as checkpointer:
        checkpointer.attach(optimizer)
        written(checkpointer.save(state_of(model, optimizer), tmp_path / "before"))
        for n in range(2):
            with monkeypatch.context() as patch:
                if where == "before it is taken":
                    patch.setattr(BackgroundCopier, "submit", broken)
                elif where == "where it is taken":
                    patch.setattr(BackgroundCopier, "_enqueue", broken)
                else:
                    patch.setattr(threading.Thread, "start", broken)
                handle = checkpointer.save(state_of(model, optimizer), tmp_path / f"failed-{n}")
            assert [type(f.exception(0)) for f in handle.futures()] == [StagingError] * 3
            assert isinstance(handle.written.exception(0).__cause__, MemoryError)
            assert checkpointer.pending() == []
            state = state_of(model, optimizer)
            written(checkpointer.save(state, tmp_path / f"next-{n}"))
            states.assert_same(asyncckpt.load(tmp_path / f"next-{n}"), state)
    assert not list(tmp_path.glob("failed-*/manifest.json"))


@pytest.mark.parametrize(("takes_s", "is_staged"), [(1.0, True), (600.0, False)])
def test_leaving_by_an_exception_waits_for_staged_nearly_five_seconds(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, takes_s: float, is_staged: bool
) -> None:
    model, optimizer = linear()
    timer = threading.Timer(takes_s, gate.open)
    timer.daemon = True
    with pytest.raises(ZeroDivisionError), AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        checkpointer.attach(optimizer)
        handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
        assert gate.reached.wait(DEADLINE_S)
        timer.start()
        began = time.monotonic()
        raise ZeroDivisionError
    took_s = time.monotonic() - began
    timer.cancel()
    gate.open()
    timer.join()
    error = handle.staged.exception(DEADLINE_S)
    assert error is None if is_staged else isinstance(error, CheckpointerClosedError)
    assert took_s < 60.0, "5 s, on a machine that others use too"


def test_attached_modules_and_optimizers_can_be_pickled_and_copied(checkpointer: AsyncCheckpointer) -> None:
    model, optimizer = linear()
    checkpointer.attach(model, optimizer)
    for whole in ((model, optimizer), model, optimizer):
        copy.deepcopy(whole)
    found_model, found_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    found_model.load_state_dict(model.state_dict())
    found_optimizer.load_state_dict(optimizer.state_dict())
    states.assert_same(dict(found_model.state_dict()), dict(model.state_dict()))
