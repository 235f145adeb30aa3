"""Places of a target that are empty or None take what was saved there; lists of another length; subtrees of nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from many_ranks import save_ranks  # noqa: E402
from states import assert_same  # noqa: E402

import asyncckpt  # noqa: E402
from asyncckpt import PerRank, RankInfo  # noqa: E402
from asyncckpt.errors import (  # noqa: E402
    AliasMismatchError,
    ConfigError,
    LeafTypeMismatchError,
    MissingKeysError,
    PerRankUnavailableError,
    ShapeMismatchError,
)
from asyncckpt.loading.load import DefaultReader  # noqa: E402
from asyncckpt.state_dict.flatten import HOIST_NBYTES  # noqa: E402

pair = namedtuple("pair", "first second")


def save(path: Path, state: dict[Any, Any]) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def all_ways(tmp_path: Path, saved: dict[Any, Any], target: Callable[[], dict[Any, Any]]) -> list[dict[Any, Any]]:
    """Load what was saved into targets, each in another way; every load also fills a tensor."""
    saved = {"w": torch.ones(2), **saved}
    path = save(tmp_path / "r" / "step-1", saved)
    ways: list[Callable[[dict[Any, Any]], Any]] = [
        lambda state: asyncckpt.load(path, state),
        lambda state: asyncckpt.load(path, state, strict=False, low_memory=False),
        lambda state: asyncckpt.load(path, state, key_map={"nothing": "else"}),
        lambda state: asyncckpt.load(path, state, keys=list(map(str, saved))),
        lambda state: asyncckpt.restore_latest(tmp_path / "r", state),
    ]
    states = []
    for way in ways:
        state = {"w": torch.zeros(2), **target()}
        way(state)
        assert bool(state["w"].all())
        states.append(state)
    return states


SAVED: dict[str, Any] = {
    "tensor": torch.arange(3.0),
    "number": 5,
    "text": "x",
    "bytes": bytes(70_000),
    "dict": {"loss": 1.0, "per_task": {"a": torch.ones(2)}, 3: None},
    "ordered": OrderedDict(z=torch.ones(1), a=1),
    "flat list": [1, 2.5, "x"],
    "list": [torch.ones(1), {"l": 2}],
    "list of dicts": [{"l": 1}, {"l": 2}, {"l": 3}],
    "tuple": (torch.ones(1), 3),
    "flat tuple": (0.9, 0.99),
    "empty dict": {},
    "empty list": [],
    "none": None,
}


@pytest.mark.parametrize("kind", SAVED)
def test_none_takes_whatever_was_saved(tmp_path: Path, kind: str) -> None:
    for found in all_ways(tmp_path, {"x": SAVED[kind]}, lambda: {"x": None}):
        assert_same(found["x"], SAVED[kind])


@pytest.mark.parametrize("empty", [{}, OrderedDict(), defaultdict(list), Counter()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", ["dict", "ordered", "empty dict"])
def test_an_empty_dict_takes_what_was_saved_and_stays_the_same_object(tmp_path: Path, kind: str, empty: Any) -> None:
    made: list[Any] = []

    def target() -> dict[str, Any]:
        made.append(empty.copy())
        return {"x": made[-1]}

    for found, one in zip(all_ways(tmp_path, {"x": SAVED[kind]}, target), made, strict=True):
        assert found["x"] is one
        assert_same(dict(one), dict(SAVED[kind]))


@pytest.mark.parametrize("kind", ["flat list", "list", "list of dicts", "empty list"])
def test_an_empty_list_takes_what_was_saved_and_stays_the_same_object(tmp_path: Path, kind: str) -> None:
    made: list[Any] = []

    def target() -> dict[str, Any]:
        made.append([])
        return {"x": made[-1]}

    for found, one in zip(all_ways(tmp_path, {"x": SAVED[kind]}, target), made, strict=True):
        assert found["x"] is one
        assert_same(one, SAVED[kind])


@pytest.mark.parametrize("kind", ["flat list", "list", "list of dicts", "tuple", "flat tuple"])
@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_sequence_takes_any_other(tmp_path: Path, kind: str, empty: Any) -> None:
    for found in all_ways(tmp_path, {"x": SAVED[kind]}, lambda: {"x": empty.copy() if empty == [] else ()}):
        assert_same(found["x"], SAVED[kind])


NESTED: dict[str, tuple[Any, Callable[[], Any]]] = {
    "in a dict": ({"a": {"b": {"c": torch.ones(1)}}}, lambda: {"a": {"b": {}}}),
    "in a list": ([{"c": 1}, torch.ones(1)], lambda: [{}, torch.zeros(1)]),
    "in a tuple": (({"c": 1}, torch.ones(1)), lambda: ({}, torch.zeros(1))),
    "none in a tuple": ((torch.ones(2), torch.ones(1)), lambda: (None, torch.zeros(1))),
    "none in a tuple in a tuple": (((torch.ones(2), 1), torch.ones(1)), lambda: ((None, 0), torch.zeros(1))),
    "none in a list in a tuple": (([torch.ones(2), 1],), lambda: ([None, 0],)),
    "only none": ([torch.ones(2), {"a": 1}], lambda: [None, None]),
    "empty lists in a list": ([[torch.ones(2)], [{}, 1]], lambda: [[], []]),
    "empty in a dict of empties": ({"a": {}, "b": [], "c": {"d": 1}}, lambda: {"a": {}, "b": [], "c": {}}),
}


@pytest.mark.parametrize("case", NESTED)
def test_empty_places_inside_containers_are_filled(tmp_path: Path, case: str) -> None:
    saved, target = NESTED[case]
    for found in all_ways(tmp_path, {"x": saved}, lambda: {"x": target()}):
        assert_same(found["x"], saved)


def test_a_namedtuple_keeps_its_type_where_none_of_it_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": pair(torch.ones(1), {"a": 1})})
    target = {"x": pair(None, {})}
    asyncckpt.load(path, target)
    assert type(target["x"]) is pair and target["x"].second == {"a": 1} and bool(target["x"].first.all())


def test_a_namedtuple_of_scalars_takes_what_was_saved_in_its_place(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": pair(torch.ones(1), b"a"), "y": pair(b"a", 2)})
    target = {"x": pair(None, None), "y": pair(0, 0)}
    asyncckpt.load(path, target)
    assert_same(dict(target), {"x": (torch.ones(1), b"a"), "y": (b"a", 2)})


@pytest.mark.parametrize("saved", [bytes(HOIST_NBYTES), b"short"])
def test_a_list_of_scalars_takes_one_with_bytes_of_any_length(tmp_path: Path, saved: bytes) -> None:
    for found in all_ways(tmp_path, {"x": [1, saved]}, lambda: {"x": [0, 0]}):
        assert found["x"] == [1, saved]


class Held:
    """An object with a state."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return {"of": "its own"}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_of_two_containers_with_one_name_each_fills_the_place_that_it_was_saved_at(tmp_path: Path) -> None:
    """Dots join keys, so that both have the name `x.y`; no leaf in them has the name of another."""
    saved = {"x.y": {"a": 1}, "x": {"y": {"b": torch.ones(2)}}}
    for found in all_ways(tmp_path, saved, lambda: {"x.y": {}, "x": {"y": None}}):
        assert_same({key: found[key] for key in saved}, saved)
    one, two = Held(), Held()
    asyncckpt.load(tmp_path / "r" / "step-1", {"x": {"y": one}, "x.y": two})
    assert_same([one.state, two.state], [{"b": torch.ones(2)}, {"a": 1}])


@pytest.mark.parametrize("target", [{}, OrderedDict()])
def test_a_target_that_is_empty_takes_everything(tmp_path: Path, target: Any) -> None:
    saved = {"a": torch.ones(2), "b": {"c": [1, torch.zeros(1)]}, "d": {}}
    path = save(tmp_path / "c", saved)
    assert asyncckpt.plan_load(path, target).nbytes == 12
    assert asyncckpt.load(path, target) is target
    assert_same(dict(target), saved)
    part: dict[str, Any] = {}
    assert_same(asyncckpt.load(path, part, keys=["b"]), {"b": saved["b"]})
    assert asyncckpt.load(path, {}, keys=[]) == {}
    with pytest.raises(MissingKeysError):
        asyncckpt.load(path, {}, keys=["b", "typo"])


@pytest.mark.parametrize(
    ("saved", "wanted", "error"),
    [
        ({"a": 1}, [], LeafTypeMismatchError),
        (torch.ones(1), [], LeafTypeMismatchError),
        (torch.ones(1), (), LeafTypeMismatchError),
        (torch.ones(1), {}, LeafTypeMismatchError),
        (5, {}, LeafTypeMismatchError),
        (None, {}, LeafTypeMismatchError),
        ([], {}, LeafTypeMismatchError),
        ([1, 2], {}, LeafTypeMismatchError),
        ([torch.ones(1)], {}, LeafTypeMismatchError),
        ({}, 5, LeafTypeMismatchError),
        ({}, torch.zeros(1), LeafTypeMismatchError),
        ({}, [torch.zeros(1)], (MissingKeysError, LeafTypeMismatchError)),
        (None, torch.zeros(1), LeafTypeMismatchError),
        (None, {"a": torch.zeros(1)}, LeafTypeMismatchError),
        ([], [torch.zeros(1)], LeafTypeMismatchError),
        ({}, {"a": 1}, MissingKeysError),
        ([1, 2], [{}], LeafTypeMismatchError),
        ([torch.ones(1)], [None, None], ShapeMismatchError),
        ([torch.ones(1)] * 3, [None, None], ShapeMismatchError),
    ],
)
def test_a_place_that_cannot_hold_what_was_saved_is_named(tmp_path: Path, saved: Any, wanted: Any, error: Any) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "x": {"y": saved}})
    target = {"w": torch.zeros(2), "x": {"y": wanted}}
    with pytest.raises(error, match=r"x\.y") as caught:
        asyncckpt.load(path, target)
    assert "nothing was changed" in str(caught.value) and not target["w"].any() and target["x"]["y"] is wanted  # type: ignore[index]
    assert not asyncckpt.plan_load(path, target).fits


@pytest.mark.parametrize("empty", [{}, OrderedDict(), None, [], ()])
def test_an_empty_place_that_the_checkpoint_has_no_name_for_is_missing(tmp_path: Path, empty: Any) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "ema_old": {"w": torch.ones(2)}})
    target = {"w": torch.zeros(2), "ema": empty}
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(path, target)
    assert caught.value.keys == ["ema"] and not target["w"].any()
    asyncckpt.load(path, target, key_map={"ema": "ema_old"} if empty in ({}, None) else {"ema": "w"}, keys="w")
    assert bool(target["w"].all()) and target["ema"] is empty


def test_key_map_renames_empty_places(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"old": {"a": torch.ones(2)}, "more": [1], "one": torch.ones(1)})
    names = {"new": "old", "history": "more", "tensor": "one"}
    for key_map in (names, names.__getitem__):
        target: dict[str, Any] = {"new": {}, "history": [], "tensor": None}
        asyncckpt.load(path, target, key_map=key_map)
        assert_same(target, {"new": {"a": torch.ones(2)}, "history": [1], "tensor": torch.ones(1)})


@pytest.mark.parametrize("empty", [{}, None])
def test_keys_fill_a_part_of_an_empty_place(tmp_path: Path, empty: Any) -> None:
    path = save(tmp_path / "c", {"m": {"a": torch.ones(1), "b": 2, "l": [1, {"c": 3}]}, "n": [{"a": 1}, 2]})
    target = {"m": empty, "n": None}
    asyncckpt.load(path, target, keys=["m.b", "m.l"])
    assert target == {"m": {"b": 2, "l": [1, {"c": 3}]}, "n": None}
    for keys in (["m.l.1"], ["n.0"]):
        with pytest.raises(ConfigError, match="part of a list"):
            asyncckpt.load(path, {"m": None, "n": None}, keys=keys)
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(path, {"m": {}}, keys=["m.b", "m.typo"])
    assert caught.value.keys == ["m.typo"]


def test_new_values_go_where_default_map_location_says(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": {"w": torch.ones(2)}, "b": torch.ones(1)})
    moved: list[Any] = []

    def location(storage: Any, where: str) -> Any:
        moved.append(where)
        return storage

    asyncckpt.load(path, {"a": {}, "b": None}, default_map_location=location)
    assert moved == ["cpu", "cpu"]


def test_an_array_in_the_place_of_a_list_is_replaced(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    target: dict[str, Any] = {"x": np.arange(3), "y": {"a": np.arange(2)}}
    asyncckpt.load(save(tmp_path / "c", {"x": [1, 2], "y": {"a": None}}), target)
    assert target == {"x": [1, 2], "y": {"a": None}}


FLAT = {"m.a.w": torch.ones(2), "m.a.b": torch.ones(3), "m.c": torch.ones(1), "x": torch.zeros(4)}


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "safetensors", "hf", "dcp"])
@pytest.mark.parametrize("empty", [dict, OrderedDict, lambda: None])
def test_an_empty_place_takes_flat_names_too(tmp_path: Path, to: str, empty: Any) -> None:
    if to in ("safetensors", "hf"):
        pytest.importorskip("safetensors")
    asyncckpt.convert(save(tmp_path / "a", FLAT), tmp_path / "b", to=to)
    target = {"m": empty(), "x": torch.ones(4)}
    assert asyncckpt.plan_load(tmp_path / "b", target).fits
    asyncckpt.load(tmp_path / "b", target)
    assert_same({**target["m"]}, {"a.w": torch.ones(2), "a.b": torch.ones(3), "c": torch.ones(1)})
    part: Any = {"n": {"a": empty(), "c": torch.zeros(1)}}
    asyncckpt.load(tmp_path / "b", part, key_map=lambda name: name.replace("n", "m", 1), keys=["n.a.w", "n.c"])
    assert_same({"a": {**part["n"]["a"]}, "c": part["n"]["c"]}, {"a": {"w": torch.ones(2)}, "c": torch.ones(1)})


def test_a_mapping_that_keeps_its_own_factory_is_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"a": defaultdict(lambda: 0, x=1), "b": defaultdict(lambda: 0, y=defaultdict(lambda: 0, z=1))}
    path, target = save(tmp_path / "a", saved), {"a": defaultdict(lambda: 7), "b": defaultdict(lambda: 8)}
    asyncckpt.load(path, target, keys="a")
    assert not caplog.records and dict(target["a"]) == {"x": 1} and target["a"]["new"] == 7
    asyncckpt.load(path, target, keys="b")
    assert [record.getMessage().split(", ")[1] for record in caplog.records] == ["first 'b.y'"]


def test_an_optimizer_under_two_names_takes_two_saved_ones_that_are_equal(tmp_path: Path) -> None:
    def made() -> Any:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight])
        weight.grad = torch.ones(3)
        optimizer.step()
        return weight, optimizer

    path = save(tmp_path / "a", {"o": made()[1], "p": {"o": made()[1]}})
    weight, optimizer = made()
    optimizer.state[weight]["exp_avg"].zero_()
    assert {"o", "p.o"} <= {*asyncckpt.plan_load(path, {"o": optimizer, "p": {"o": optimizer}}).shared}
    asyncckpt.load(path, {"o": optimizer, "p": {"o": optimizer}})
    assert_same(optimizer.state_dict()["state"][0], made()[1].state_dict()["state"][0])
    other = made()[1]
    other.state[other.param_groups[0]["params"][0]]["exp_avg"][1] += 1
    path = save(tmp_path / "b", {"o": made()[1], "p": {"o": other}})
    with pytest.raises(AliasMismatchError, match="nothing was changed") as caught:
        asyncckpt.load(path, {"o": optimizer, "p": {"o": optimizer}})
    assert (caught.value.fqn, caught.value.other_fqn) == ("o", "p.o")


def test_one_empty_container_in_two_places_becomes_two(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": {"x": 1}, "b": {"x": 2}, "l": [1], "m": [2]})
    one: dict[str, Any] = {}
    many: list[Any] = []
    target = {"a": one, "b": one, "l": many, "m": many}
    asyncckpt.load(path, target)
    assert target == {"a": {"x": 1}, "b": {"x": 2}, "l": [1], "m": [2]} and target["a"] is one


# ---- one container under two names ----------------------------------------------------------------------------------


class Counted:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


SHARED: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"n": 0, "w": torch.zeros(1)},
    "a dict of an object": lambda: {"n": 0},
    "a tuple in a dict": lambda: {"n": (0, {"m": 1})},
    "a mark": lambda: PerRank(0),
    "an object": Counted,
}


@pytest.mark.parametrize("kind", SHARED)
def test_one_container_or_object_under_two_names_is_refused_unless_both_are_equal(tmp_path: Path, kind: str) -> None:
    def saved(n: int) -> Any:
        made = SHARED[kind]()
        if isinstance(made, dict):
            return {**made, "n": n if made["n"] == 0 else (n, {"m": 1})}
        return Counted(n) if kind == "an object" else PerRank(n)

    one, equal = (save(tmp_path / str(n), {"w": torch.ones(1), "a": saved(1), "b": saved(n)}) for n in (2, 1))
    held = SHARED[kind]()
    target = {"w": torch.zeros(1), "a": held, "b": held}
    if kind != "a dict":  # two tensors may differ
        asyncckpt.load(equal, target)
        assert bool(target["w"].all())
        target["w"].zero_()
    with pytest.raises(AliasMismatchError) as caught:
        asyncckpt.load(one, target)
    assert (caught.value.fqn[0], caught.value.other_fqn[0]) == ("a", "b") and not target["w"].any()
    assert {name[0] for name in asyncckpt.plan_load(one, target).shared} == {"a", "b"}


# ---- what cannot take it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [1, {"b": 2}, torch.ones(2)])
def test_a_place_in_a_mapping_that_cannot_be_changed_is_named_before_anything_changes(
    tmp_path: Path, saved: Any
) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(1), "f": {"t": torch.ones(1), "x": (saved, 1)}})
    target = {"w": torch.zeros(1), "f": MappingProxyType({"t": torch.zeros(1), "x": (None, 1)})}
    with pytest.raises(ConfigError, match=r"'f\.x.*mappingproxy") as caught:
        asyncckpt.load(path, target)
    assert caught.value.value.startswith("f.x") and not target["w"].any()  # type: ignore[attr-defined]
    asyncckpt.load(path, target, keys=["w", "f.t"])
    assert bool(target["f"]["t"].all())  # type: ignore[index]


def test_an_empty_dict_in_a_mapping_that_cannot_be_changed_is_filled(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"f": {"x": {"a": 1}, "t": ({"b": 2}, torch.ones(1))}, "g": {"x": {"a": 3}}})
    target = {"f": MappingProxyType({"x": {}, "t": ({}, torch.zeros(1))})}
    asyncckpt.load(path, target)
    assert target["f"]["x"] == {"a": 1} and target["f"]["t"][0] == {"b": 2}
    one: dict[str, Any] = {}
    with pytest.raises(ConfigError, match=r"g\.x"):
        asyncckpt.load(path, {"f": {"x": one}, "g": MappingProxyType({"x": one})})
    assert one == {}


# ---- lists of another length ----------------------------------------------------------------------------------------


def test_a_list_of_objects_that_was_saved_longer_grows_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [{"l": n, "m": [n]} for n in range(4)]
    path = save(tmp_path / "c", {"history": saved, "w": torch.ones(1)})
    history = [{"l": 9, "m": [7]}]
    target = {"history": history, "w": torch.zeros(1)}
    asyncckpt.load(path, target)
    assert target["history"] is history and history == saved
    assert "history (by 3)" in caplog.text
    assert asyncckpt.plan_load(path, {"history": [{}]}).fits


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ([torch.ones(1)] * 2, [torch.zeros(1)]),
        ([torch.ones(1)], [torch.zeros(1), torch.zeros(1)]),
        ([{"a": 1}], [{"a": 0}, {"a": 0}]),
        ([{"a": 1}, {"a": torch.ones(1)}], [{"a": 0}]),
        ((torch.ones(1), 1), (torch.zeros(1),)),
        (({"a": 1}, {"a": 1}), ({"a": 0},)),
        (pair(torch.ones(1), torch.ones(2)), (torch.zeros(1),)),
        ([[torch.ones(1)] * 2], [[torch.zeros(1)]]),
    ],
)
def test_a_sequence_of_another_length_is_refused(tmp_path: Path, saved: Any, wanted: Any, strict: bool) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(1), "x": saved})
    target = {"w": torch.zeros(1), "x": wanted}
    for options in ({}, {"key_map": {"w": "w"}}, {"keys": ["w", "x"]}):
        with pytest.raises(ShapeMismatchError, match="members, the target has") as caught:
            asyncckpt.load(path, target, strict=strict, **options)  # type: ignore[arg-type]
        assert caught.value.fqn in ("x", "x.0") and not target["w"].any()
    asyncckpt.load(path, target, keys=["w"], strict=strict)


def test_a_list_of_nothing_but_empty_dicts_is_compared_under_its_saved_name(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": {"x": [{}, {"n": torch.ones(1)}]}, "w": 1})
    for key_map in (None, {"w": "w"}, lambda name: name.removeprefix("module.")):
        target: Any = (
            {"a": {"x": [{}]}} if key_map is None or isinstance(key_map, dict) else {"module": {"a": {"x": [{}] * 3}}}
        )
        with pytest.raises(ShapeMismatchError):
            asyncckpt.load(path, target, key_map=key_map)


@pytest.mark.parametrize("n_groups", [(1, 2), (2, 1)])
def test_groups_of_an_optimizers_state_of_another_number_are_refused(tmp_path: Path, n_groups: tuple[int, int]) -> None:
    def state(n: int) -> Any:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1} for _ in range(n)]
        return torch.optim.SGD(groups).state_dict()

    path = save(tmp_path / "c", {"o": state(n_groups[0]), "w": torch.ones(1)})
    with pytest.raises(ShapeMismatchError, match=r"o\.param_groups"):
        asyncckpt.load(path, {"o": state(n_groups[1]), "w": torch.zeros(1)})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, momentum=0.9)])
def test_the_state_of_a_fresh_optimizer_takes_the_moments(tmp_path: Path, kind: Any) -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return model, kind(model.parameters())

    def trained(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    model, optimizer = made()
    trained(model, optimizer)
    path = save(tmp_path / "c", {"m": model.state_dict(), "o": optimizer.state_dict()})
    other, fresh = made()
    state = {"m": other.state_dict(), "o": fresh.state_dict()}
    fresh.load_state_dict(asyncckpt.load(path, state)["o"])
    assert_same(fresh.state_dict(), optimizer.state_dict())
    for one in ((model, optimizer), (other, fresh)):
        trained(*one)
    assert_same(other.state_dict(), model.state_dict())


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_marked_values_fill_empty_places_of_their_own_rank(tmp_path: Path) -> None:
    states = [{"rng": PerRank({"s": [r, torch.full((1,), r)]}), "x": {"own": PerRank(r), "all": 1}} for r in range(2)]
    path = save_ranks(tmp_path / "c", states)
    for make in (dict, lambda: None, lambda: PerRank({}), lambda: PerRank(None)):
        target = {"rng": make(), "x": {}}
        mark = target["rng"]
        DefaultReader(rank_info=RankInfo(1, 2)).read(path, target)
        found = target["rng"].value if isinstance(mark, PerRank) else target["rng"]
        assert_same(found, {"s": [1, torch.full((1,), 1)]})
        assert target["x"] == {"own": 1, "all": 1} and (target["rng"] is mark or mark is None)


@pytest.mark.parametrize("target", [{"rng": {}}, {"rng": None}, {"x": {}}, {}])
def test_marked_values_of_other_ranks_are_refused_for_empty_places_too(tmp_path: Path, target: Any) -> None:
    path = save_ranks(tmp_path / "c", [{"rng": PerRank({"s": r}), "x": {"own": PerRank(r), "all": 1}} for r in (0, 1)])
    with pytest.raises(PerRankUnavailableError):
        DefaultReader(rank_info=RankInfo(0, 1)).read(path, target)
    assert not target or not next(iter(target.values()))
    wanted: dict[str, Any] = {"x": {}}
    DefaultReader(rank_info=RankInfo(0, 1)).read(path, wanted, keys=["x.all"])
    assert wanted == {"x": {"all": 1}}


# ---- nothing found of a subtree -------------------------------------------------------------------------------------


def linear() -> Any:
    return torch.nn.Linear(2, 2)


LOST: dict[str, Callable[[], dict[str, Any]]] = {
    "a module": lambda: {"model": linear()},
    "a wrapped module": lambda: {"model": torch.nn.DataParallel(linear())},
    "a module's state": lambda: {"model": linear().state_dict()},
    "a module in a container": lambda: {"parts": {"model": linear(), "step": 0}},
    "a module's state in a container": lambda: {"parts": {"model": linear().state_dict(), "step": 0}},
    "an optimizer": lambda: {"model": torch.optim.SGD(linear().parameters())},
    "an optimizer in a list": lambda: {"parts": {"optimizers": [torch.optim.SGD(linear().parameters())], "step": 0}},
    "an optimizer's state": lambda: {"parts": {"o": torch.optim.SGD(linear().parameters()).state_dict(), "step": 0}},
    "an object": lambda: {"model": Counted()},
    "a subtree": lambda: {"model": {"a": {"w": torch.zeros(1)}, "n": 3}},
    "a list": lambda: {"model": [torch.zeros(1), {"a": 1}]},
    "a dict in a container": lambda: {"parts": {"ema": {"weight": torch.zeros(1)}, "step": 0}},
    "a dict in a list": lambda: {"parts": {"step": 0}, "more": [{"ema": {"a": {"weight": torch.zeros(1)}}}]},
    "a list in a container": lambda: {"parts": {"queue": [torch.zeros(1)], "step": 0}},
}


@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("strict", [True, False])
def test_a_module_object_or_subtree_of_which_nothing_was_saved_is_an_error_either_way(
    tmp_path: Path, case: str, strict: bool
) -> None:
    path = save(tmp_path / "c", {"net": linear().state_dict(), "parts": {"step": 7}, "step": 7})
    target = {**LOST[case](), "step": 0}
    with pytest.raises(MissingKeysError, match="nothing was saved of") as caught:
        asyncckpt.load(path, target, strict=strict)
    assert caught.value.keys and target["step"] == 0
    asyncckpt.load(path, target, strict=strict, keys=["step"])
    assert target["step"] == 7


@pytest.mark.parametrize("saved", [{"model": {"module.a": torch.ones(1)}, "step": 7}, {"model": {"step": 7}}])
@pytest.mark.parametrize("deep", [False, True])
def test_a_part_whose_names_are_all_others_is_an_error_although_its_own_name_was_saved(
    tmp_path: Path, saved: dict[str, Any], deep: bool
) -> None:
    target: dict[str, Any] = {"model": {"a": torch.zeros(1), "b": torch.zeros(1)}}
    saved = {"t": {**saved, "epoch": 3}} if deep else {**saved, "epoch": 3}
    target = {"t": {**target, "epoch": 0}} if deep else {**target, "epoch": 0}
    path = save(tmp_path / "c", saved)
    with pytest.raises(MissingKeysError, match=f"nothing was saved of {'t.' if deep else ''}model "):
        asyncckpt.load(path, target, strict=False)
    assert (target["t"] if deep else target)["epoch"] == 0


@pytest.mark.parametrize(
    "target",
    [
        {"a": torch.zeros(1), "b": 0},
        linear().state_dict(),
        dict(linear().state_dict()),
        {"model": linear().state_dict(), "step": 0},
        torch.optim.SGD(linear().parameters()).state_dict(),
    ],
)
def test_a_target_of_which_nothing_was_saved_is_an_error_either_way(tmp_path: Path, target: dict[str, Any]) -> None:
    path = save(tmp_path / "r" / "step-1", {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)})
    for strict in (True, False):
        with pytest.raises(MissingKeysError, match="nothing was saved of the whole target"):
            asyncckpt.load(path, target, strict=strict)
        with pytest.raises(MissingKeysError, match="nothing was saved of the whole target"):
            asyncckpt.restore_latest(tmp_path / "r", target, strict=strict)


@pytest.mark.parametrize("make", [linear, lambda: Renamed(2, 2)], ids=["plain", "with code of its own"])
def test_what_is_missing_beside_a_module_that_was_found_is_a_single_key(
    tmp_path: Path, make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    saved = make()
    path = save(tmp_path / "c", {"a": {"m": {"old_weight" if make is not linear else "weight": saved.weight}}})
    target = {"a": {"m": make(), "n": 1, "o": 2}}
    target["a"]["m"].bias = None
    asyncckpt.load(path, target, strict=False)
    assert torch.equal(target["a"]["m"].weight, saved.weight) and "a.n, a.o" in caplog.text


class Renamed(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old_weight")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_single_keys_that_were_not_saved_stay_if_not_strict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "c", {"model": {"a": {"w": torch.ones(1)}}, "o": {"state": {0: {"m": 1}}, "lr": 1}})
    target = {"model": {"a": {"w": torch.zeros(1)}, "head.w": torch.zeros(1)}, "o": {"state": {1: {"m": 0}}}}
    with pytest.raises(MissingKeysError):
        asyncckpt.load(path, target, strict=False)
    target["o"] = {"state": {0: {"m": 0}, 1: {"m": 0}}}
    asyncckpt.load(path, target, strict=False)
    assert bool(target["model"]["a"]["w"].all()) and not target["model"]["head.w"].any()  # type: ignore[index]
    assert target["o"] == {"state": {0: {"m": 1}, 1: {"m": 0}}} and "model.head.w, o.state.1.m" in caplog.text


# ---- wrappers -------------------------------------------------------------------------------------------------------

WRAPPED = {
    "the checkpoint": ({"module.a.w": 1, "module.b": 2, "step": 3}, {"a.w": 0, "b": 0, "step": 0}),
    "the target": ({"a.w": 1, "b": 2, "step": 3}, {"module.a.w": 0, "module.b": 0, "step": 0}),
    "the checkpoint, below": (
        {"model": {"module.a": 1, "module.b": 2}, "step": 3},
        {"model": {"a": 0, "b": 0}, "step": 0},
    ),
    "the target, below": (
        {"model": {"a": 1, "b": 2}, "module": {"x": 4}},
        {"model": {"module.a": 0, "module.b": 0}, "module": {"x": 0}},
    ),
    "in the middle": (
        {"model": {"layers.0._orig_mod.a": 1, "layers.1._orig_mod.a": 2}},
        {"model": {"layers.0.a": 0, "layers.1.a": 0}},
    ),
    "in the middle of the target": (
        {"model": {"layers.0.a": 1, "layers.1.a": 2}, "x": 1},
        {"model": {"layers.0._orig_mod.a": 0, "layers.1._orig_mod.a": 0}, "x": 0},
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_a_prefix_that_explains_all_is_said_with_the_key_map_that_helps(tmp_path: Path, case: str) -> None:
    saved, target = WRAPPED[case]
    path = save(tmp_path / "c", saved)
    with pytest.raises(MissingKeysError, match="all of them were saved under another name") as caught:
        asyncckpt.load(path, target)
    advice = str(caught.value).partition("pass key_map=")[2].partition("; nothing was changed")[0]
    asyncckpt.load(path, target, key_map=eval(advice))
    values = [value for one in (saved, target) for value in _values(one)]
    assert values[: len(values) // 2] == values[len(values) // 2 :]


def _values(state: Any) -> list[Any]:
    return [v for value in state.values() for v in (_values(value) if isinstance(value, dict) else [value])]
