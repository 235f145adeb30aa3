"""Overlap: what is copied behind the training, what waits for it, and what a checkpoint then holds."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import states
import torch
from overlapping import Gate, backward, linear, state_of
from real_worker import DEADLINE_S, RealWorker, slots_of, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import ConfigError
from asyncckpt.staging import cpu_copy, overlap


def frozen(state: Any) -> Any:
    """Return a deep copy in which views and aliases stay such; `copy.deepcopy` takes parameters apart from theirs."""
    return _frozen(state, {}, {})


def _frozen(value: Any, storages: dict[int, torch.UntypedStorage], empties: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            storage = value.untyped_storage()
            if not value.data_ptr():
                return empties.setdefault(id(value), value.detach().clone())
            copied = storages.setdefault(storage.data_ptr(), storage.clone())
            return torch.empty(0, dtype=value.dtype).set_(copied, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, dict):
        made = copy.copy(value)
        for key in made:
            made[key] = _frozen(value[key], storages, empties)
        if hasattr(value, "_metadata"):
            made._metadata = copy.deepcopy(value._metadata)  # type: ignore[attr-defined]
        return made
    if type(value) in (list, tuple):
        return type(value)(_frozen(member, storages, empties) for member in value)
    if type(value) is deque:
        return deque((_frozen(member, storages, empties) for member in value), value.maxlen)
    return copy.deepcopy(value)


# ---- what is copied when


def test_auto_copies_behind_the_training_once_an_optimizer_is_attached(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    before = checkpointer.save(state_of(model, optimizer), tmp_path / "before")
    assert before.staged.done(), "nothing is attached yet"
    checkpointer.attach(optimizer)
    state = state_of(model, optimizer)
    expected = frozen(state)
    handle = checkpointer.save(state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    assert not handle.staged.done()
    assert handle.phase == "staging"
    assert checkpointer.pending()[-1] is handle
    gate.open()
    report = handle.staged.result(DEADLINE_S)
    assert set(report.seconds) == {"plan", "acquire", "copy", "seal"}
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)
    checkpointer.detach()
    assert checkpointer.save(state, tmp_path / "b").staged.done()


@pytest.mark.parametrize("staging", ["auto", "overlap"])
def test_on_cores_that_are_all_busy_auto_copies_before_save_returns_and_overlap_does_not(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    monkeypatch.setattr(overlap, "has_idle_core", lambda: False)
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging=staging) as checkpointer:
        checkpointer.attach(optimizer)
        state = state_of(model, optimizer)
        expected = frozen(state)
        handle = checkpointer.save(state, tmp_path / "a")
        assert handle.staged.done() is (staging == "auto")
        gate.open()
        backward(model)
        optimizer.step()
        written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)


def test_small_tensors_are_copied_before_save_returns_large_ones_behind_it(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_copy, "MIN_DEFERRED_NBYTES", cpu_copy.LARGE_NBYTES)
    small = torch.nn.Parameter(torch.arange(1000.0))
    large = torch.nn.Parameter(torch.arange(cpu_copy.LARGE_NBYTES / 4))
    optimizer = torch.optim.SGD([small, large], lr=1.0)
    checkpointer.attach(optimizer)
    expected = frozen({"small": small.detach(), "large": large.detach()})
    handle = checkpointer.save({"small": small.detach(), "large": large.detach()}, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S) and not handle.staged.done()
    with torch.no_grad():
        small.fill_(-1.0)  # past all hooks: its copy has been made
    gate.open()
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)
    assert checkpointer.save({"small": small.detach()}, tmp_path / "b").staged.done()


def test_overlap_by_name_copies_everything_later_and_the_fence_says_when(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    state = {"a": torch.arange(1000.0), "n": [1], "b": b"x" * 100_000}
    expected = frozen(state)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap") as checkpointer:
        handle = checkpointer.save(state, tmp_path / "a")
        state["n"].append(2)  # type: ignore[attr-defined]
        assert not handle.staged.done()
        with gate.held_back(checkpointer.fence):
            assert not handle.staged.done()
        assert handle.staged.done()
        state["a"].fill_(-1)  # type: ignore[attr-defined]
        written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_leaf_that_is_copied_behind_the_training_comes_back_bit_for_bit(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate
) -> None:
    state = states.every_leaf()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap") as checkpointer:
        handle = checkpointer.save(state, tmp_path / "a")
        assert gate.reached.wait(DEADLINE_S) and not handle.staged.done()
        gate.open()
        written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)


# ---- what waits


class Twice(torch.optim.AdamW):
    """Fires its hooks twice in one step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """As some frameworks wrap optimizers: `Optimizer.__init__()` never runs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Changed:
    """Attached, with a state and a change of it: each method makes another one and returns what does the change.

    Attributes:
        state: What is saved.
        at_once: The most tensors of it that are copied before `save()` returns; None: any number.
    """

    def __init__(self, checkpointer: AsyncCheckpointer, path: pathlib.Path) -> None:
        self.checkpointer, self.path = checkpointer, path
        self.at_once: int | None = None

    def attached(
        self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> torch.optim.Optimizer:
        """Make a model and an attached optimizer with state."""
        self.model = torch.nn.Linear(8, 8)
        optimizer = kind(self.model.parameters(), **{"lr": 0.1, **options})
        for _ in range(2):
            backward(self.model)
            optimizer.step()
        self.checkpointer.attach(optimizer, optimizer, self.model)
        self.state = state_of(self.model, optimizer)
        return optimizer

    def adamw(self) -> Any:
        return self.attached().step

    def adamw_fused(self) -> Any:
        return self.attached(fused=True).step

    def adamw_foreach(self) -> Any:
        return self.attached(foreach=True).step

    def sgd(self) -> Any:
        return self.attached(torch.optim.SGD, momentum=0.9).step

    def hooks_that_fire_twice(self) -> Any:
        return self.attached(Twice).step

    def a_scaler(self) -> Any:
        optimizer, scaler = self.attached(), torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        return lambda: scaler.step(optimizer)

    def a_schedule(self) -> Any:
        optimizer = self.attached()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return lambda: [optimizer.step(), schedule.step()]

    def compiled(self, **options: Any) -> Any:
        optimizer = self.attached(**options)

        def train_step() -> None:
            optimizer.step()

        return torch.compile(train_step, backend="eager")

    def compiled_and_fused(self) -> Any:
        return self.compiled(fused=True)

    def lbfgs(self) -> Any:
        """Its state has lists of tensors."""
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        self.checkpointer.attach(optimizer)
        self.state = state_of(model, optimizer)
        return lambda: optimizer.step(closure)  # type: ignore[arg-type]

    def inside_of_a_wrapper(self) -> Any:
        return Wrapper(self.attached()).step

    def a_shallow_copy(self) -> Any:
        self.optimizer = self.attached(fused=True)
        other = copy.copy(self.optimizer)
        assert not other._optimizer_step_pre_hooks
        return other.step

    def a_shallow_copy_of_one_that_is_gone(self) -> Any:
        optimizer = self.attached(fused=True)

        def step() -> None:  # after the save
            nonlocal optimizer
            other = copy.copy(optimizer)
            del optimizer
            gc.collect()
            other.step()

        return step

    def another_optimizer_of_the_same_parameters(self) -> Any:
        self.optimizer = self.attached()
        other = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        backward(self.model)
        return other.step

    def the_optimizer_s_load_state_dict(self) -> Any:
        optimizer = self.attached()
        state = copy.deepcopy(optimizer.state_dict())
        return lambda: optimizer.load_state_dict(state)

    def the_module_s_load_state_dict(self) -> Any:
        self.optimizer = self.attached()
        return lambda: self.model.load_state_dict({k: torch.zeros_like(v) for k, v in self.state["model"].items()})

    def a_submodule_s_load_state_dict(self) -> Any:
        self.model, self.optimizer = linear()
        self.checkpointer.attach(self.optimizer, self.model)
        self.state = state_of(self.model, self.optimizer)
        part = self.model.get_submodule("0")
        return lambda: part.load_state_dict({"weight": torch.ones(64, 64), "bias": torch.ones(64)})

    def a_load_into_the_tensors(self) -> Any:
        self.optimizer = self.attached()
        with asyncckpt.SyncCheckpointer() as other:
            other.save({"model": {k: torch.zeros_like(v) for k, v in self.state["model"].items()}}, self.path)
        return lambda: self.checkpointer.load(self.path, {"model": self.model.state_dict()})

    def state_and_groups_that_come_later(self) -> Any:
        model, added = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        self.checkpointer.attach(optimizer)
        optimizer.add_param_group({"params": added.parameters()})
        for one in (model, added):
            backward(one)
        optimizer.step()
        self.state, self.at_once = state_of(model, optimizer, added=added.state_dict()), 0
        return optimizer.step

    def lazy_modules(self) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.checkpointer.attach(optimizer, model)
        backward(model)
        self.state, self.at_once = state_of(model, optimizer), 0
        return optimizer.step

    def ties_and_views(self) -> Any:
        flat = torch.nn.Parameter(torch.arange(100_000.0))
        optimizer = torch.optim.SGD([flat], lr=1.0)
        flat.grad = torch.ones_like(flat)
        self.checkpointer.attach(optimizer)
        row = flat.detach().view(100, 1000)[7]
        self.state, self.at_once = (
            {"flat": flat.detach(), "again": flat.detach(), "row": row, "data": flat.data[5:9]},
            0,
        )
        return optimizer.step

    def flat_and_tied_weights(self) -> Any:
        model = torch.nn.Module()
        model.embedding, model.rnn, model.head = (
            torch.nn.Embedding(9, 30),
            torch.nn.LSTM(30, 30),
            torch.nn.Linear(30, 9),
        )
        model.head.weight = model.embedding.weight
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        self.checkpointer.attach(optimizer)
        self.state, self.at_once = state_of(model, optimizer), 0
        return optimizer.step

    def state_of_every_dtype_and_layout(self) -> Any:
        weight, flat = torch.nn.Parameter(torch.randn(300, 700).t()), torch.arange(1000.0)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.state[weight] = {
            **{str(dtype): states.tensor_of(dtype, (7, 300), 5) for dtype in states.ALL_DTYPES},
            "transposed": torch.randn(400, 300).t(),
            "strided": torch.randn(400, 300)[::2, 1::3],
            "expanded": torch.arange(3.0).expand(4, 3),
            "zero_dim": torch.tensor(3, dtype=torch.int64),
            "empty": torch.empty(0, 4),  # it has no memory, and so no owner
            "overlapping": [flat[:600], flat[400:]],
            "same": [flat, flat],
        }
        self.checkpointer.attach(optimizer)
        weight.grad = torch.ones_like(weight)
        self.state, self.at_once = {"w": weight.detach(), "optim": optimizer.state_dict()}, 1
        return optimizer.step


CHANGES = [name for name in vars(Changed) if name != "attached" and not name.startswith("_")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # the compiler's own
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("by", CHANGES)
def test_a_change_by_the_optimizer_waits_for_the_copies(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate, by: str
) -> None:
    changed = Changed(checkpointer, tmp_path / "other")
    change = getattr(changed, by)()
    expected = frozen(changed.state)
    before = [states.bits_of(tensor) for tensor in tensors_of(changed.state)]
    handle = checkpointer.save(changed.state, tmp_path / "a")
    assert gate.reached.wait(DEADLINE_S)
    (slot,) = slots_of(checkpointer)
    now, _ = slot.views.split(slot.views._split[0])
    assert changed.at_once is None or len(now.large) + len(now.small) <= changed.at_once
    with gate.held_back(change):
        assert [states.bits_of(tensor) for tensor in tensors_of(changed.state)] == before
        assert not handle.staged.done()
    assert handle.staged.done()
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)


def test_forward_backward_zero_grad_and_other_optimizers_wait_for_nothing(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    other_model, other = linear()
    checkpointer.attach(optimizer)
    state = state_of(model, optimizer)
    expected = frozen(state)
    handle = checkpointer.save(state, tmp_path / "a")
    optimizer.zero_grad()
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    backward(other_model)
    other.step()
    assert not gate.waited.is_set()
    assert not handle.staged.done()
    gate.open()
    written(handle)
    states.assert_same(asyncckpt.load(tmp_path / "a"), expected)


def assert_no_hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not any(m._load_state_dict_pre_hooks for m in model.modules())


def test_detaching_waits_and_leaves_no_hook(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer, model, model)
    checkpointer.attach(model.get_submodule("0"), torch.nn.Sequential(model))
    handle = checkpointer.save(state_of(model, optimizer), tmp_path / "a")
    with gate.held_back(checkpointer.detach):
        assert not handle.staged.done()
    assert_no_hooks(model, optimizer)
    checkpointer.detach()
    written(handle)


def test_what_is_attached_can_be_copied_and_pickled_and_has_no_hooks_once_it_is_closed(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    model, optimizer = linear()
    with AsyncCheckpointer(endpoint=shared_worker.endpoint) as checkpointer:
        checkpointer.attach(optimizer, model)
        copied = [copy.deepcopy(model), copy.deepcopy(optimizer)]
        for other_model, other in (
            copied,
            copy.deepcopy((model, optimizer)),
            pickle.loads(pickle.dumps((model, optimizer))),
        ):
            assert not other._optimizer_step_pre_hooks
            other_model.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
        written(checkpointer.save(state_of(model, optimizer), tmp_path / "a"))
    assert_no_hooks(model, optimizer)
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("wrong", [3, None, torch.zeros(1), torch.nn.Linear, Wrapper])
def test_only_optimizers_and_modules_can_be_attached(checkpointer: AsyncCheckpointer, wrong: Any) -> None:
    model, optimizer = linear()
    is_wrapper = wrong is Wrapper
    with pytest.raises(ConfigError, match=r"Wrapper .* attach that one" if is_wrapper else "attach") as caught:
        checkpointer.attach(model, optimizer, Wrapper(optimizer) if is_wrapper else wrong)
    assert caught.value.field == "attach"
    assert_no_hooks(model, optimizer)  # all or none


# ---- point in time


def test_a_second_save_waits_its_turn_and_both_are_right(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path, gate: Gate
) -> None:
    model, optimizer = linear()
    checkpointer.attach(optimizer)
    state = state_of(model, optimizer, note="first")
    expected = frozen(state)
    first = checkpointer.save(state, tmp_path / "1")
    second = checkpointer.save({**state, "note": "second"}, tmp_path / "2")
    order: list[int] = []
    first.staged.add_done_callback(lambda done: order.append(1))
    second.staged.add_done_callback(lambda done: order.append(2))
    assert checkpointer.pending() == [first, second]
    with gate.held_back(lambda: checkpointer.wait(DEADLINE_S) if checkpointer.fence() is None else None):
        assert not first.staged.done() and not second.staged.done()
    assert first.written.exception(0) is None and second.written.exception(0) is None
    wait_until(lambda: len(order) == 2, "all callbacks ran")
    assert order == [1, 2]
    states.assert_same(asyncckpt.load(tmp_path / "1"), expected)
    states.assert_same(asyncckpt.load(tmp_path / "2"), {**expected, "note": "second"})


class Case:
    """A random training state, and every way to change it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.maker = states.StateMaker(rng)
        layers = [torch.nn.Linear(width, width) for width in rng.choices([3, 8, 200], k=rng.randrange(1, 4))]
        self.models = [torch.nn.Sequential(layer, torch.nn.BatchNorm1d(layer.in_features)) for layer in layers]
        self.optimizers = [self._optimizer(model) for model in self.models]
        self.owned = rng.sample(self.optimizers, rng.randrange(1, len(self.optimizers) + 1))
        self.extra = self.maker.state()
        log = [1, "a", {"x": [2]}, {rng.random()}, bytearray(rng.randbytes(9)), *states.every_array().values()]
        self.counters = {"step": rng.randrange(99), "lr": torch.tensor(0.1), "log": log}

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        kinds: list[tuple[Any, dict[str, Any]]] = [
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.AdamW, {}),
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
            (torch.optim.RMSprop, {"centered": True}),
            (torch.optim.Adagrad, {}),
        ]
        kind, options = self.rng.choice(kinds)
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1, **options)
        for _ in range(self.rng.randrange(3)):
            backward(model)
            optimizer.step()
        return optimizer

    def state(self) -> dict[str, Any]:
        """Return the state dict of now."""
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "extra": self.extra,
            "counters": self.counters,
            "rng": {"torch": torch.get_rng_state(), "python": self.rng.getstate()[1][:9]},
        }

    def change_unowned(self, state: dict[str, Any]) -> None:
        """Change every tensor and every object of `state` that no attached optimizer owns."""
        kept = {t.untyped_storage().data_ptr() for t in self.owned_tensors()}
        for tensor in tensors_of(state):
            if tensor.untyped_storage().data_ptr() not in kept:
                spoil(tensor)
        change_objects(state)

    def owned_tensors(self) -> list[torch.Tensor]:
        """Return what the attached optimizers own."""
        found = [p for o in self.owned for g in o.param_groups for p in g["params"]]
        return [*found, *(t for o in self.owned for t in tensors_of(list(o.state.values())))]

    def change_owned(self) -> None:
        """Change every tensor that attached optimizers own, as the loop's next step would; it waits by itself."""
        states_of = [(optimizer, copy.deepcopy(optimizer.state_dict())) for optimizer in self.owned]
        if self.rng.random() < 0.3:  # so does loading
            for optimizer, state in states_of:
                optimizer.load_state_dict(state)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if optimizer in self.owned:
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
        for tensor in self.owned_tensors():
            spoil(tensor)


def spoil(tensor: torch.Tensor) -> None:
    """Overwrite a tensor's whole storage, past every version counter."""
    if tensor.untyped_storage().nbytes():
        tensor.untyped_storage().fill_(1)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for member in members for tensor in tensors_of(member)]


def change_objects(value: Any) -> None:
    """Change everything in `value` that can be changed in place."""
    if isinstance(value, set):
        value.add("later")
    elif isinstance(value, bytearray):
        value += b"later"
    elif hasattr(value, "flags") and hasattr(value, "fill") and value.flags.writeable:  # numpy's, where it is installed
        value.fill(1)
    elif isinstance(value, dict):
        for key, member in list(value.items()):
            change_objects(member)
            if not isinstance(member, (dict, list, tuple, torch.Tensor)) and not hasattr(member, "fill"):
                value[key] = "changed"
        value["added"] = "later"
    elif isinstance(value, (list, tuple)):
        for member in value:
            change_objects(member)
        if isinstance(value, list):
            value.append("later")


CASES = int(os.environ.get("ASYNCCKPT_TEST_CASES", "25"))
"""Random ones for each test below, four times as many of either kind; `make test-fault` takes more."""


@pytest.mark.parametrize("staging", ["blocking", "auto"])
@pytest.mark.parametrize("part", range(4))
def test_no_change_after_save_ever_shows(
    shared_worker: RealWorker, tmp_path: pathlib.Path, seed: int, staging: str, part: int
) -> None:
    """Compared bit for bit with a deep copy."""
    rng = random.Random(seed * 10 + part)
    torch.manual_seed(seed)
    expected, handles = {}, {}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging=staging) as checkpointer:
        while len(expected) < CASES:
            case = Case(rng)
            state = case.state()
            name = str(len(expected))
            expected[name] = frozen(state)
            checkpointer.attach(*case.owned)
            handles[name] = checkpointer.save(state, tmp_path / name)
            if staging == "auto" and rng.random() < 0.3:
                checkpointer.save(state, tmp_path / f"{name}-again")
            if staging == "auto":
                case.change_unowned(state)
                case.change_owned()
            else:
                for tensor in tensors_of(state):
                    spoil(tensor)
                change_objects(state)
            torch.manual_seed(rng.randrange(99))
            checkpointer.detach()
        for name, handle in handles.items():
            written(handle)
            states.assert_same(asyncckpt.load(tmp_path / name), expected[name], f"case {name} of seed {seed}, {part}")
