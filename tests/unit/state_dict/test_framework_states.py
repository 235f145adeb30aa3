"""torch's own optimizers and schedulers: saved, restored into fresh ones, and trained on as with torch.save."""

from __future__ import annotations

import copy
import io
import logging
import pathlib
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.dcp import StorageWriter

L = torch.optim.lr_scheduler
O = torch.optim  # noqa: E741


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers that step before their optimizers, and deprecated arguments
        yield


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1, bias=False))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: O.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: O.SGD(p, 0.1),
    "Adam": lambda p: O.Adam(p, 0.1, amsgrad=True),
    "Adam with a tensor rate": lambda p: O.Adam(p, torch.tensor(0.1)),
    "Adam fused": lambda p: O.Adam(p, 0.1, fused=True),
    "Adam single": lambda p: O.Adam(p, 0.1, foreach=False),
    "AdamW": lambda p: O.AdamW(p, 0.1),
    "Adamax": lambda p: O.Adamax(p, 0.1),
    "Adadelta": lambda p: O.Adadelta(p, 0.1),
    "Adagrad": lambda p: O.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "ASGD": lambda p: O.ASGD(p, 0.1, t0=2),
    "NAdam": lambda p: O.NAdam(p, 0.1, momentum_decay=0.01),
    "RAdam": lambda p: O.RAdam(p, 0.1),
    "RMSprop": lambda p: O.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: O.Rprop(p, 0.1),
    "Adafactor": lambda p: O.Adafactor(p, 0.1),
    "LBFGS": lambda p: O.LBFGS(list(p), 0.1, max_iter=3, history_size=4),
    "groups": lambda p: O.AdamW([{"params": [q], "lr": 0.01 * (n + 1)} for n, q in enumerate(p)]),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: L.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [2, 4, 4, 7]),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.9),
    "ConstantLR": lambda o: L.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: L.LinearLR(o, 0.1, total_iters=5),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: L.CyclicLR(o, 0.01, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: L.OneCycleLR(o, 0.3, 12),
    "LambdaLR": lambda o: L.LambdaLR(o, lambda n: 0.9**n),
    "LambdaLR of objects": lambda o: L.LambdaLR(o, Decay(0.7)),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda n: 0.95),
    "SequentialLR": lambda o: L.SequentialLR(
        o, [L.LinearLR(o, 0.1, total_iters=3), L.MultiStepLR(o, [2, 4]), L.StepLR(o, 1)], [3, 9]
    ),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.MultiStepLR(o, [1, 3]), L.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, "min", 0.5, patience=1),
    "SWALR": lambda o: O.swa_utils.SWALR(o, 0.01, anneal_epochs=5),
}


class Decay:
    """A callable object, whose `__dict__` a LambdaLR keeps."""

    def __init__(self, base: float) -> None:
        self.base, self.calls, self.seen = base, 0, deque([1], 3)

    def __call__(self, n: int) -> float:
        self.calls += 1
        self.seen.append(n)
        return float(self.base**n)


class Training:
    """A model, its optimizer and a scheduler, trained on data that follows from the step."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        self.model = model()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.n = 0

    def train(self, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.n))
            self.n += 1

            def closure(data: torch.Tensor = data) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = (self.model(data) - 1).square().mean()
                loss.backward()
                return loss

            loss = float(self.optimizer.step(closure))
            self.scheduler.step(*[loss] if isinstance(self.scheduler, L.ReduceLROnPlateau) else [])
            seen.append((loss, [float(group["lr"]) for group in self.optimizer.param_groups]))
        return seen

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def types_of(value: Any) -> Any:
    """Return the types and bits in a state."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.detach().reshape(-1).tolist())
    if isinstance(value, dict):
        return type(value), [(key, types_of(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [types_of(member) for member in value], getattr(value, "maxlen", None)
    return type(value), None if callable(value) else value


PAIRS = [(name, "MultiStepLR") for name in OPTIMIZERS] + [("SGD", name) for name in SCHEDULERS]
PAIRS += [("Adam with a tensor rate", "SequentialLR"), ("LBFGS", "ChainedScheduler"), ("groups", "OneCycleLR")]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_restored_training_goes_on_bit_for_bit_as_with_torch_save(
    tmp_path: pathlib.Path, optimizer: str, scheduler: str
) -> None:
    first = Training(optimizer, scheduler)
    first.train(4)
    allow_pickle = _has_functions(first.scheduler.state_dict())
    path = save(tmp_path / "a", first.parts, allow_pickle=allow_pickle)
    held = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in first.parts.items()}, held)
    held.seek(0)
    stock, objects, ours = (Training(optimizer, scheduler) for _ in range(3))
    kept = list(objects.model.parameters())
    states = torch.load(held, weights_only=False)
    asyncckpt.load(path, objects.parts, allow_pickle=allow_pickle, strict=True)
    found = asyncckpt.load(path, allow_pickle=allow_pickle)
    for name, part in stock.parts.items():
        assert types_of(found[name]) == types_of(states[name]), name
        part.load_state_dict(copy.deepcopy(states[name]))  # some take entries out of it
        ours.parts[name].load_state_dict(found[name])
    trainings = (stock, objects, ours)
    assert_alike(*trainings)
    for training in trainings:
        training.n = first.n
    wanted = first.train(4)
    assert [training.train(4) for training in trainings] == [wanted] * 3
    assert_alike(first, *trainings)
    assert all(one is other for one, other in zip(kept, objects.model.parameters(), strict=True))


def assert_alike(first: Training, *others: Training) -> None:
    for name, part in first.parts.items():
        for other in others:
            assert types_of(other.parts[name].state_dict()) == types_of(part.state_dict()), name


def save(path: pathlib.Path, state: Any, **fields: Any) -> str:
    with SyncCheckpointer(fsync=False, **fields) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def _has_functions(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_functions, state.values()))
    return any(map(_has_functions, state)) if isinstance(state, (list, tuple)) else callable(state)


def sparse() -> tuple[Any, Any, Callable[[], Any]]:
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(6, 3, sparse=True)
    optimizer = O.SparseAdam(embedding.parameters(), 0.1)
    return embedding.weight, optimizer, lambda: embedding(torch.tensor([1, 3])).square().sum()


def muon() -> tuple[Any, Any, Callable[[], Any]]:
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) / 12)
    return weight, O.Muon([weight], 0.1), lambda: weight.sin().sum()


@pytest.mark.parametrize("made", [sparse, muon])
def test_the_state_of_an_optimizer_of_some_parameters_only_comes_back(tmp_path: pathlib.Path, made: Any) -> None:
    if made is muon and not hasattr(O, "Muon"):
        pytest.skip("this torch has no Muon")
    first, second = made(), made()

    def step(weight: Any, optimizer: Any, loss: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step(*first)
    asyncckpt.load(save(tmp_path / "a", {"w": first[0], "o": first[1]}), {"w": second[0], "o": second[1]})
    step(*first)
    step(*second)
    assert torch.equal(first[0], second[0])
    assert types_of(first[1].state_dict()) == types_of(second[1].state_dict())


def test_an_averaged_model_and_scalers_come_back(tmp_path: pathlib.Path) -> None:
    def made() -> dict[str, Any]:
        inner = model()
        averaged = O.swa_utils.AveragedModel(
            inner, multi_avg_fn=O.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return {"m": inner, "a": averaged, "s": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)}

    parts = made()
    with torch.no_grad():
        for parameter in parts["m"].parameters():
            parameter += 1
    parts["a"].update_parameters(parts["m"])
    parts["s"].scale(torch.ones(1))
    parts["s"].update(4.0)
    others = made()
    asyncckpt.load(save(tmp_path / "a", parts), others, strict=True)
    for name, part in parts.items():
        assert types_of(part.state_dict()) == types_of(others[name].state_dict()), name


# ---- exactly as it was saved

ENTRIES: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.full((4,), 1.0001),
    "float64": lambda: torch.full((4,), 1.00000001, dtype=torch.float64),
    "float16": lambda: torch.full((4,), 1.001, dtype=torch.float16),
    "NaN": lambda: torch.tensor([float("nan"), 1.0001, float("inf"), -0.0]),
    "int64": lambda: torch.tensor([1 << 40, 2, 3, 257]),
    "bool": lambda: torch.tensor([True, False, True, True]),
    "uint8": lambda: torch.tensor([255, 1, 2, 3], dtype=torch.uint8),
    "0-d": lambda: torch.tensor(1.0001, dtype=torch.float64),
    "in a list": lambda: [torch.full((2,), 1.0001), None, 3],
    "in a tuple": lambda: (torch.full((2,), 1.0001), "x"),
    "in a dict": lambda: {"a": torch.full((2,), 1.0001), "b": {"c": [torch.tensor(257)]}},
    "in an OrderedDict": lambda: OrderedDict(a=torch.full((2,), 1.0001)),
    "in a Counter": lambda: Counter(a=2, b=1),
    "in a defaultdict": lambda: defaultdict(list, a=[torch.full((2,), 1.0001)]),
    "in a deque": lambda: deque([torch.full((2,), 1.0001), 2], 5),
    "text": lambda: "a text",
    "bytes": lambda: b"some bytes",
    "an empty list": list,
    "an int": lambda: 3,
    "None": lambda: None,
}


class Popping(O.SGD):
    """Keeps something of its own, and gives the rest to torch."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": {(0, 1): torch.ones(2)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict.pop("own", None)
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [O.SGD, Popping])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_an_optimizer_keeps_of_a_parameter_is_exactly_what_was_saved(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, dtype: Any, has_state: bool, kind: Any
) -> None:
    def made(entries: Any) -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = kind([weight], 0.1, momentum=0.9)
        if entries is not None:
            optimizer.state[weight].update({"momentum_buffer": torch.zeros(4, dtype=dtype), **entries})
        return weight, optimizer

    weight, optimizer = made({name: make() for name, make in ENTRIES.items()})
    path = save(tmp_path / "a", {"w": weight, "o": optimizer})
    other, restored = made({name: make() for name, make in ENTRIES.items()} if has_state else None)
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        asyncckpt.load(path, {"w": other, "o": restored})
    for name, make in ENTRIES.items():
        assert repr(types_of(restored.state[other][name])) == repr(types_of(make())), name
    assert restored.state[other]["momentum_buffer"].dtype == dtype
    assert not caplog.records


def test_the_tensors_of_a_state_are_filled_in_place_and_stay_in_their_own_dtype(tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = O.SGD([weight], 0.1, momentum=0.9)
    moment = optimizer.state[weight]["momentum_buffer"] = torch.full((4,), 1.0001)
    save(tmp_path / "a", {"o": optimizer})
    moment.zero_()
    asyncckpt.load(tmp_path / "a", {"o": optimizer})
    assert optimizer.state[weight]["momentum_buffer"] is moment and torch.equal(moment, torch.full((4,), 1.0001))


def test_where_the_parameters_are_converted_their_state_is_too_which_is_said(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(dtype: Any) -> tuple[Any, Any]:
        inner = model().to(dtype)
        return inner, O.Adam(inner.parameters(), 0.1)

    def step(inner: Any, optimizer: Any) -> None:
        inner(torch.ones(2, 4, dtype=next(inner.parameters()).dtype)).sum().backward()
        optimizer.step()

    inner, optimizer = made(torch.float32)
    step(inner, optimizer)
    save(tmp_path / "a", {"m": inner, "o": optimizer})
    other, restored = made(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        asyncckpt.load(tmp_path / "a", {"m": other, "o": restored})
    assert {state["exp_avg"].dtype for state in restored.state.values()} == {torch.bfloat16}
    (said,) = [record.getMessage() for record in caplog.records if "load_state_dict() of 'o'" in record.getMessage()]
    assert "float32" in said and "bfloat16" in said and "o.state.0.exp_avg" in said
    step(other, restored)


class Halving:
    """Converts what it is given, as a quantizing optimizer or an EMA in half precision does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [self.tensor], "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["shadow"][0].half()


def test_an_object_that_converts_what_it_is_given_is_named(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", {"ema": Halving(torch.full((3,), 1.0001))})
    holder = Halving(torch.zeros(3))
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        asyncckpt.load(tmp_path / "a", {"ema": holder})
    (said,) = [record.getMessage() for record in caplog.records]
    assert holder.tensor.dtype == torch.float16
    assert "'ema', a Halving" in said and "'ema.shadow.0' was saved as float32 and is float16 now" in said


class Gathering:
    """Its `state_dict()` waits for all ranks, `load_state_dict()` for none."""

    def __init__(self) -> None:
        self.n_asked, self.state = 0, {"a": torch.ones(2), "b": [torch.ones(1)]}

    def state_dict(self) -> Any:
        self.n_asked += 1
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class GatheringSGD(O.SGD):
    n_asked = 0

    def state_dict(self) -> Any:
        self.n_asked += 1
        return super().state_dict()


def test_no_state_dict_is_called_that_may_wait_for_other_ranks(tmp_path: pathlib.Path) -> None:
    def made() -> Any:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = GatheringSGD([weight], 0.1, momentum=0.9)
        optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 2.0)
        return {"e": Gathering(), "o": optimizer}

    save(tmp_path / "a", made())
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        target = made()
        target["o"].state.clear()
        asyncckpt.plan_load(tmp_path / "a", target)
        asyncckpt.load(tmp_path / "a", target)
    finally:
        torch.distributed.destroy_process_group()
    assert (target["e"].n_asked, target["o"].n_asked) == (0, 0)
    (state,) = target["o"].state.values()
    assert state["momentum_buffer"].tolist() == [2, 2, 2] and torch.equal(target["e"].state["a"], torch.ones(2))


# ---- what stock dcp.save makes of the numbers of parameters ---------------------------------------------------------


def _two_groups() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return model, O.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}])


def _written_by_dcp(how: str, state: dict[str, Any], at: pathlib.Path) -> str:
    if how == "our writer":
        dcp.save(state, storage_writer=StorageWriter(at / "a", use_worker=False), no_dist=True)
        return str(at / "a")
    if how == "converted to dcp":
        with asyncckpt.SyncCheckpointer() as checkpointer:
            checkpointer.save(state, at / "a")
        asyncckpt.convert(at / "a", at / "b", to="dcp")
        return str(at / "b")
    dcp.save(state, checkpoint_id=str(at / "a"), no_dist=True)
    if how == "stock":
        return str(at / "a")
    target = at / ("b.pt" if how == "torch" else "b")
    asyncckpt.convert(at / "a", target, to=how)
    return str(target)


@pytest.mark.parametrize("how", ["stock", "our writer", "converted to dcp", "torch", "asyncckpt"])
def test_a_state_that_dcp_saved_goes_to_the_parameters_that_it_is_of(tmp_path: pathlib.Path, how: str) -> None:
    model, optimizer = _two_groups()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = _written_by_dcp(how, {"o": optimizer.state_dict(), "step": 1}, tmp_path)
    for target in ("an optimizer", "one that has stepped", "a fresh dict", "{}", "None", "nothing"):
        other, fresh = _two_groups()
        if target == "one that has stepped":
            other(torch.randn(1, 2)).sum().backward()
            fresh.step()
        if target in ("an optimizer", "one that has stepped"):
            asyncckpt.load(path, {"o": fresh})
        else:
            value = {"a fresh dict": fresh.state_dict(), "{}": {}}.get(target)
            found = asyncckpt.load(path, None if target == "nothing" else {"o": value})
            fresh.load_state_dict(found["o"])
        assert [type(key) for key in fresh.state] == [torch.nn.Parameter] * 2, target
        for key, parameter in (("weight", other.weight), ("bias", other.bias)):
            saved = optimizer.state[getattr(model, key)]
            assert torch.equal(fresh.state[parameter]["exp_avg"], saved["exp_avg"]), (target, key)
        assert fresh.param_groups[1]["lr"] == 0.5, target


def test_parameters_that_a_state_knows_by_names_keep_them_also_if_these_are_digits(tmp_path: pathlib.Path) -> None:
    state = {"o": {"state": {"0": {"m": torch.ones(1)}}, "param_groups": [{"params": ["0"]}]}}
    dcp.save(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    found = asyncckpt.load(tmp_path / "a")["o"]
    assert list(found["state"]) == ["0"] and found["param_groups"][0]["params"] == ["0"]
