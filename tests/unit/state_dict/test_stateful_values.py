"""Modules, optimizers and all else with a `state_dict()` as values: what is stored, and how they get it back."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from torch import nn

import asyncckpt
from asyncckpt import PerRank, SyncCheckpointer
from asyncckpt.errors import (
    ConfigError,
    LeafTypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.planning.planner import PlanCache, signature_of
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.state_dict.structure_match import flatten_along


def save(path: Path, state: Any) -> str:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for n in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(n))).square().sum().backward()
        optimizer.step()


class Counter:
    """Anything with the two methods."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [torch.full((2,), float(self.value))]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.history = state["history"]


# ---- what is stored -------------------------------------------------------------------------------------------------


def test_a_module_is_stored_as_its_state_dict(tmp_path: Path) -> None:
    model = a_model()
    states.assert_same(asyncckpt.load(save(tmp_path / "a", {"model": model})), {"model": model.state_dict()})


def test_objects_are_found_anywhere(tmp_path: Path) -> None:
    state = {
        "l": [Counter(1), (Counter(2),)],
        "r": PerRank(Counter(3)),
        "u": UserDict(a=Counter(4)),
        "n": {0: Counter(5)},
    }
    found = asyncckpt.load(save(tmp_path / "a", state))
    assert [found["l"][0]["value"], found["l"][1][0]["value"], found["r"]["value"]] == [1, 2, 3]
    assert [found["u"]["a"]["value"], found["n"][0]["value"]] == [4, 5]


def test_states_may_hold_objects_with_states(tmp_path: Path) -> None:
    class Outer:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": Counter(7)}

    assert asyncckpt.load(save(tmp_path / "a", {"o": Outer()}))["o"]["inner"]["value"] == 7


def test_a_state_may_be_something_else_than_a_dict(tmp_path: Path) -> None:
    class Bare(Counter):
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    state = {"t": Bare(torch.ones(2)), "n": Bare(5), "l": Bare([1, torch.zeros(1)]), "none": Bare(None)}
    path = save(tmp_path / "a", state)
    target = {name: Bare("not yet") for name in state}
    asyncckpt.load(path, target, strict=True)
    states.assert_same({k: v.state for k, v in target.items()}, {k: v.state for k, v in state.items()})


def wrapped_models() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def inside(model: nn.Module) -> nn.Module:
        model[2] = torch.compile(nn.DataParallel(model[2]))  # type: ignore[index, operator]
        return nn.Sequential(OrderedDict(model.named_children()))

    return {
        "DataParallel": nn.DataParallel,
        "compile": torch.compile,  # type: ignore[dict-item]
        "both": lambda m: torch.compile(nn.DataParallel(m)),  # type: ignore[return-value]
        "the other way": lambda m: nn.DataParallel(torch.compile(m)),  # type: ignore[arg-type]
        "a submodule": inside,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", wrapped_models())
def test_wrappers_leave_no_trace_and_are_loaded_through(tmp_path: Path, how: str) -> None:
    wrap, model = wrapped_models()[how], a_model()
    expected = copy.deepcopy(model.state_dict())
    path = save(tmp_path / "a", {"model": wrap(model)})
    states.assert_same(asyncckpt.load(path), {"model": expected})
    fresh = a_model(1)
    held = {name: parameter for name, parameter in fresh.named_parameters()}
    asyncckpt.load(path, {"model": wrap(fresh)}, strict=True)
    bare = a_model(2)
    asyncckpt.load(path, {"model": bare}, strict=True)
    states.assert_same(bare.state_dict(), expected)
    assert all(torch.equal(held[name], expected[name]) for name in held)


def test_distributed_data_parallel_is_taken_off(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(a_model())
        assert list(flatten({"m": model}).fqns) == list(flatten({"m": model.module}).fqns)
    finally:
        torch.distributed.destroy_process_group()


def test_a_class_and_a_type_with_the_method_are_no_objects_with_a_state() -> None:
    class Named(tuple):
        __slots__ = ()

        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    assert flatten({"x": Named((1, 2))}).objects == [(1, 2)]


def test_a_state_dict_that_raises_is_named() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise OSError("no disk")

    with pytest.raises(UnsupportedLeafError, match=r"'a.b'.*state_dict\(\) raised OSError: no disk") as caught:
        flatten({"a": {"b": Broken()}})
    assert isinstance(caught.value.__cause__, OSError)
    assert flatten_along(*signature_of(flatten({"b": {"x": 1}})), {"b": Broken()}) is None


def test_a_state_dict_that_returns_itself_is_refused() -> None:
    class Loop:
        def state_dict(self) -> Any:
            return Loop()

    class Ring:
        def state_dict(self) -> Any:
            return {"again": self}

    with pytest.raises(UnsupportedLeafError, match="which has one itself"):
        flatten({"x": Loop()})
    with pytest.raises(UnsupportedLeafError, match="inside itself"):
        flatten({"x": Ring()})


def test_a_state_is_taken_once_per_save_and_matches_the_plan() -> None:
    class Costly(Counter):
        taken = 0

        def state_dict(self) -> dict[str, Any]:
            self.taken += 1
            return super().state_dict()

    cache = PlanCache(files_per_rank=1)
    for n in range(5):
        cache.plan_for({"other": n, "t": torch.ones(n)})
    costly = Costly(1)
    first, _ = cache.plan_for({"x": costly, "m": a_model()})
    assert costly.taken == 1
    costly.value = 2
    second, flat = cache.plan_for({"x": costly, "m": a_model()})
    assert second is first and costly.taken == 2
    assert cache.n_plans_made == 6
    assert 2 in flat.objects and flat.tree is first.signature[0]


@pytest.mark.parametrize("other", [5, torch.ones(2), [1], {"value": 1}, object(), None])
def test_something_else_in_the_place_of_an_object_does_not_match(other: Any) -> None:
    signature = signature_of(flatten({"x": Counter()}))
    assert flatten_along(*signature, {"x": Counter()}) is not None
    assert flatten_along(*signature, {"x": other}) is None
    if not isinstance(other, (torch.Tensor, dict)):
        assert flatten_along(*signature_of(flatten({"x": other})), {"x": Counter()}) is None


# ---- loading --------------------------------------------------------------------------------------------------------


def schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    lr = torch.optim.lr_scheduler
    return {
        "step": lambda o: lr.StepLR(o, 2),
        "milestones": lambda o: lr.MultiStepLR(o, [1, 2, 2]),
        "cosine": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
        "one cycle": lambda o: lr.OneCycleLR(o, 0.5, total_steps=20),
        "plateau": lr.ReduceLROnPlateau,
        "lambda": lambda o: lr.LambdaLR(o, lambda n: 0.5**n),
        "chain": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], milestones=[2]),
    }


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2),
}


@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k != "lbfgs"])
def test_a_fresh_optimizer_goes_on_where_the_saved_one_was(tmp_path: Path, kind: str) -> None:
    model = a_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer)
    path = save(tmp_path / "a", {"model": model, "optim": optimizer, "step": 2})
    resumed = a_model(1)
    other = OPTIMIZERS[kind](resumed.parameters())
    held = list(resumed.parameters())
    target = {"model": resumed, "optim": other, "step": 0}
    assert asyncckpt.load(path, target, strict=True) is target
    assert target["model"] is resumed and target["optim"] is other and target["step"] == 2
    assert all(a is b for a, b in zip(held, resumed.parameters(), strict=True))
    states.assert_same(other.state_dict(), optimizer.state_dict())
    for one in ((model, optimizer), (resumed, other)):
        trained(*one, 3)
    states.assert_same(resumed.state_dict(), model.state_dict())


def test_tensors_that_an_optimizer_has_are_filled_where_they_are(tmp_path: Path) -> None:
    model, other = a_model(), a_model(1)
    optimizer, warm = (torch.optim.Adam(m.parameters(), amsgrad=m is other) for m in (model, other))
    trained(model, optimizer)
    trained(other, warm)
    path = save(tmp_path / "a", {"o": optimizer})
    states_of = list(warm.state.values())
    held = [s["exp_avg"] for s in states_of]
    half = states_of[0]
    half["exp_avg_sq"] = half["exp_avg_sq"].double()
    half["step"] = states_of[1]["step"]
    shared = states_of[2]["exp_avg_sq"] = next(iter(warm.param_groups[0]["params"][2:])).data.view(-1)[:4]
    weights = copy.deepcopy(other.state_dict())
    asyncckpt.load(path, {"o": warm}, strict=True)
    states.assert_same(warm.state_dict(), optimizer.state_dict())
    assert all(s["exp_avg"] is t for s, t in zip(warm.state.values(), held, strict=True))
    states.assert_same(other.state_dict(), weights)
    assert shared.numel() == 4


def test_an_optimizer_of_closures_keeps_its_history(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))

    def stepped(p: nn.Parameter, o: torch.optim.Optimizer) -> None:
        def closure() -> Any:
            o.zero_grad()
            loss = (p**4).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        o.step(closure)  # type: ignore[arg-type]

    optimizer = OPTIMIZERS["lbfgs"]([parameter])
    stepped(parameter, optimizer)
    path = save(tmp_path / "a", {"p": parameter, "o": optimizer})
    other = nn.Parameter(torch.zeros(2))
    resumed = OPTIMIZERS["lbfgs"]([other])
    asyncckpt.load(path, {"p": other, "o": resumed}, strict=True)
    stepped(parameter, optimizer)
    stepped(other, resumed)
    assert torch.equal(parameter, other)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", schedulers())
def test_a_scheduler_goes_on_where_the_saved_one_was(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, schedulers()[kind](optimizer)

    def stepped(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))
        return [group["lr"] for group in optimizer.param_groups]

    first = made()
    stepped(*first)
    path = save(tmp_path / "a", {"o": first[0], "s": first[1]})
    second = made()
    asyncckpt.load(path, dict(zip("os", second, strict=True)), strict=True)
    assert [stepped(*second) for _ in range(12)] == [stepped(*first) for _ in range(12)]


def test_a_gradient_scaler_comes_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=123.0)
    path = save(tmp_path / "a", {"on": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)})
    target = {"on": torch.amp.GradScaler("cpu"), "off": torch.amp.GradScaler("cpu", enabled=False)}
    asyncckpt.load(path, target, strict=True)
    assert target["on"].state_dict() == scaler.state_dict() != {}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    model, fresh = Tied(), Tied()
    path = save(tmp_path / "a", {"m": model})
    new = asyncckpt.load(path)["m"]
    assert new["embedding.weight"] is new["head.weight"]
    asyncckpt.load(path, {"m": fresh}, strict=True)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, model.head.weight)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_flat_weights_of_an_rnn_are_those_that_were_loaded(tmp_path: Path, kind: Any) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return kind(3, 4, num_layers=2, bidirectional=True)

    model, fresh, inputs = made(0), made(1), torch.randn(5, 2, 3)
    path = save(tmp_path / "a", {"rnn": model})
    fresh.flatten_parameters()
    asyncckpt.load(path, {"rnn": fresh}, strict=True)
    assert torch.equal(fresh(inputs)[0], model(inputs)[0])
    assert all(
        one is getattr(fresh, name) for one, name in zip(fresh._flat_weights, fresh._flat_weights_names, strict=True)
    )


def test_parametrized_weights_come_back(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        return nn.Sequential(linear, nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))

    model, fresh, inputs = made(0), made(1), torch.randn(2, 3)
    asyncckpt.load(save(tmp_path / "a", {"m": model}), {"m": fresh}, strict=True)
    assert torch.equal(model(inputs), fresh(inputs))


def test_lazy_modules_take_the_shapes_that_were_saved(tmp_path: Path) -> None:
    model, fresh = nn.LazyLinear(4), nn.LazyLinear(4)
    model(torch.ones(1, 3))
    asyncckpt.load(save(tmp_path / "a", {"m": model}), {"m": fresh}, strict=True)
    assert torch.equal(model(torch.ones(1, 3)), fresh(torch.ones(1, 3)))


class Extra(nn.Module):
    """With state that is no tensor, and grows."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words, self.weight = words, nn.Parameter(torch.full((2,), float(len(words))))

    def get_extra_state(self) -> Any:
        return {"words": self.words, "lengths": torch.tensor([len(w) for w in self.words])}

    def set_extra_state(self, state: Any) -> None:
        self.words = list(state["words"])
        assert state["lengths"].tolist() == [len(w) for w in self.words]


def test_extra_state_of_another_structure_is_given_to_the_module(tmp_path: Path) -> None:
    path, fresh = save(tmp_path / "a", {"m": nn.Sequential(Extra(["a", "bc"]))}), Extra([])
    asyncckpt.load(path, {"m": nn.Sequential(fresh)}, strict=True)
    assert fresh.words == ["a", "bc"] and fresh.weight.tolist() == [2, 2]


def test_extra_state_that_was_not_saved_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, fresh = save(tmp_path / "a", {"m": {"weight": torch.ones(2)}}), Extra(["mine"])
    asyncckpt.load(path, {"m": fresh}, strict=False)
    assert fresh.words == ["mine"] and fresh.weight.tolist() == [1, 1]
    assert "m._extra_state" in caplog.text


def test_hooks_of_a_module_are_called(tmp_path: Path) -> None:
    class Doubled(nn.Linear):
        """Stores something else than its parameters."""

        def state_dict(self, *args: Any, **kw: Any) -> Any:
            return {k: v.detach() * 2 for k, v in super().state_dict(*args, **kw).items()}

        def load_state_dict(self, state: Any, *args: Any, **kw: Any) -> Any:
            return super().load_state_dict({k: v / 2 for k, v in state.items()}, *args, **kw)

    class Plain(nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            return {"w": self.weight.detach().clone()}

        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
            self.weight.data.copy_(state["w"])

    for kind in (Doubled, Plain):
        model, fresh = kind(2, 2), kind(2, 2)
        asyncckpt.load(save(tmp_path / kind.__name__, {"m": model}), {"m": fresh}, strict=True)
        assert torch.equal(model.weight, fresh.weight)


def test_an_object_and_its_state_dict_are_the_same_to_a_checkpoint(tmp_path: Path) -> None:
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    path = save(tmp_path / "dicts", {"m": model.state_dict(), "o": optimizer.state_dict()})
    fresh = a_model(1)
    other = torch.optim.Adam(fresh.parameters())
    asyncckpt.load(path, {"m": fresh, "o": other}, strict=True)
    states.assert_same(other.state_dict(), optimizer.state_dict())
    path = save(tmp_path / "objects", {"m": model, "o": optimizer})
    states.assert_same(asyncckpt.load(path), {"m": model.state_dict(), "o": optimizer.state_dict()})


def test_objects_inside_containers_and_marks_get_their_state(tmp_path: Path) -> None:
    def made(value: int) -> Any:
        return {"l": [Counter(value), (Counter(value + 1), 7)], "r": PerRank([Counter(value + 2), a_model(value)])}

    state, target = made(1), made(11)
    kept = [target["l"][0], target["l"][1][0], *target["r"].value]
    asyncckpt.load(save(tmp_path / "a", state), target, strict=True)
    assert kept == [target["l"][0], target["l"][1][0], *target["r"].value]
    assert [c.value for c in kept[:3]] == [1, 2, 3]
    states.assert_same(kept[3].state_dict(), state["r"].value[1].state_dict())


def test_what_a_module_has_and_the_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"m": nn.Linear(3, 4, bias=False)})
    model = nn.Linear(3, 4)
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(path, {"m": model, "o": Counter(), "c": {"d": Counter()}}, strict=True)
    assert caught.value.keys == ["m.bias", "o", "c.d"]
    bias = model.bias.clone()
    asyncckpt.load(path, {"m": model}, strict=False)
    assert torch.equal(model.bias, bias)


def test_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"c": Counter(1), "m": nn.Linear(3, 4)})
    counter = Counter(9)
    with pytest.raises(ShapeMismatchError, match=r"'m\.weight'"):
        asyncckpt.load(path, {"c": counter, "m": nn.Linear(3, 5)})
    assert counter.value == 9


def test_keys_select_objects_whole(tmp_path: Path) -> None:
    model = a_model()
    path = save(tmp_path / "a", {"m": model, "o": Counter(4)})
    fresh, counter = a_model(1), Counter()
    before = copy.deepcopy(fresh.state_dict())
    asyncckpt.load(path, {"m": fresh, "o": counter}, keys="o", strict=True)
    assert counter.value == 4
    states.assert_same(fresh.state_dict(), before)
    asyncckpt.load(path, {"m": fresh, "o": Counter()}, keys=["m.0"], strict=True)
    assert torch.equal(fresh.state_dict()["0.weight"], model.state_dict()["0.weight"])
    assert torch.equal(fresh.state_dict()["2.weight"], before["2.weight"])
    with pytest.raises(ConfigError, match=r"'o'.*as a whole"):
        asyncckpt.load(path, {"m": fresh, "o": Counter()}, keys=["o.value"])


def test_key_map_renames_objects(tmp_path: Path) -> None:
    path, counter = save(tmp_path / "a", {"old": Counter(4), "w": a_model()}), Counter()
    fresh = a_model(1)
    names = {"new": "old"} | {f"m.{k}": f"w.{k}" for k in fresh.state_dict()}
    asyncckpt.load(path, {"new": counter, "m": fresh}, key_map=names, strict=True)
    assert counter.value == 4 and torch.equal(fresh[0].weight, a_model()[0].weight)  # type: ignore[index]


def test_a_refusal_of_the_object_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    model = a_model()
    path = save(tmp_path / "a", {"o": torch.optim.SGD(model.parameters(), lr=0.1), "n": 5})
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    target = {"o": other, "n": 0}
    with pytest.raises(StateLoadError, match=r"'o', a SGD.*ValueError") as caught:
        asyncckpt.load(path, target)
    assert (caught.value.fqn, caught.value.type_name) == ("o", "SGD")
    assert isinstance(caught.value.__cause__, ValueError) and target["n"] == 5


def test_an_object_that_takes_no_state_is_refused(tmp_path: Path) -> None:
    class ReadOnly:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    path = save(tmp_path / "a", {"x": ReadOnly()})
    with pytest.raises(LeafTypeMismatchError, match="'x'"):
        asyncckpt.load(path, {"x": ReadOnly()})


def test_a_plan_counts_what_objects_would_be_given(tmp_path: Path) -> None:
    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    path = save(tmp_path / "a", {"m": model, "o": optimizer, "left": torch.ones(1)})
    fresh = a_model(1)
    before = copy.deepcopy(fresh.state_dict())
    plan = asyncckpt.plan_load(path, {"m": fresh, "o": torch.optim.Adam(fresh.parameters()), "more": Counter()})
    assert (plan.missing, plan.unexpected, plan.mismatched) == (("more",), ("left",), ())
    expected = [
        *model.state_dict().values(),
        *(t for s in optimizer.state_dict()["state"].values() for t in s.values()),
    ]
    assert plan.nbytes == sum(t.nbytes for t in expected)
    states.assert_same(fresh.state_dict(), before)


def test_new_tensors_of_a_state_go_where_the_map_says(tmp_path: Path) -> None:
    counter, seen = Counter(), list[str]()

    def moved(storage: torch.UntypedStorage, location: str) -> None:
        seen.append(location)

    path = save(tmp_path / "a", {"o": Counter(4), "m": a_model()})
    asyncckpt.load(path, {"o": counter, "m": a_model(1)}, default_map_location=moved)
    assert seen == ["cpu"] and counter.history[0].tolist() == [4, 4]


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        yield
