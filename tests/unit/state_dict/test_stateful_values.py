"""Modules, optimizers and all else with a `state_dict()` as values: what is stored, and how they get it back."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
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


def test_objects_are_found_anywhere_and_get_their_state(tmp_path: Path) -> None:
    def made(value: int) -> Any:
        held = [Counter(value + 2), a_model(value)]
        inside = {"u": UserDict(a=Counter(value + 3)), "n": {0: Counter(value + 4)}}
        return {"l": [Counter(value), (Counter(value + 1), 7)], "r": PerRank(held), **inside}

    def objects(state: Any) -> list[Any]:
        return [state["l"][0], state["l"][1][0], *state["r"].value, state["u"]["a"], state["n"][0]]

    state, target = made(1), made(11)
    path, kept = save(tmp_path / "a", state), objects(target)
    found = asyncckpt.load(path)
    assert [found["l"][0]["value"], found["l"][1][0]["value"], found["r"][0]["value"]] == [1, 2, 3]
    assert [found["u"]["a"]["value"], found["n"][0]["value"]] == [4, 5]
    asyncckpt.load(path, target, strict=True)
    assert all(one is other for one, other in zip(objects(target), kept, strict=True))
    assert [one.value for one in kept if isinstance(one, Counter)] == [1, 2, 3, 4, 5]
    states.assert_same(kept[3].state_dict(), state["r"].value[1].state_dict())


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


def test_distributed_data_parallel_is_taken_off() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def assert_it_is_taken_off() -> None:
        model = nn.parallel.DistributedDataParallel(a_model())
        assert list(flatten({"m": model}).fqns) == list(flatten({"m": model.module}).fqns)

    try:
        assert_it_is_taken_off()  # the model goes before the group: what frees a group last must not hold the GIL
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

    with pytest.raises(UnsupportedLeafError, match="which has a state_dict"):
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


def lazy(seed: int) -> nn.Module:
    model = nn.LazyLinear(4)
    if seed == 0:  # another one takes the shapes that were saved
        model(torch.ones(1, 3))
    return model


def parametrized(seed: int) -> nn.Module:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return nn.Sequential(linear, nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)))


class Doubled(nn.Linear):
    """Stores something else than its parameters."""

    def state_dict(self, *args: Any, **kw: Any) -> Any:
        return {k: v.detach() * 2 for k, v in super().state_dict(*args, **kw).items()}

    def load_state_dict(self, state: Any, *args: Any, **kw: Any) -> Any:
        return super().load_state_dict({k: v / 2 for k, v in state.items()}, *args, **kw)


class Plain(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {"w": self.weight.detach().clone(), "b": self.bias.detach().clone()}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.weight.data.copy_(state["w"])
        self.bias.data.copy_(state["b"])


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "LSTM": lambda seed: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "GRU": lambda seed: nn.GRU(3, 4, num_layers=2, bidirectional=True),
    "RNN": lambda seed: nn.RNN(3, 4, num_layers=2, bidirectional=True),
    "lazy": lazy,
    "parametrized": parametrized,
    "doubled": lambda seed: Doubled(3, 2),
    "plain": lambda seed: Plain(3, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_what_the_saved_one_does(tmp_path: Path, name: str) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return MODULES[name](seed)

    model, fresh, inputs = made(0), made(1), torch.randn(5, 2, 3)
    asyncckpt.load(save(tmp_path / "a", {"m": model}), {"m": fresh}, strict=True)
    found, expected = fresh(inputs), model(inputs)
    assert torch.equal(*((found[0], expected[0]) if isinstance(found, tuple) else (found, expected)))
    for weight, of in zip(getattr(fresh, "_flat_weights", ()), getattr(fresh, "_flat_weights_names", ()), strict=True):
        assert weight is getattr(fresh, of)


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
