"""Containers and keys come back as the types that they were: in a new dict, in a target, and in an object."""

from __future__ import annotations

import logging
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import asyncckpt  # noqa: E402
from asyncckpt import SyncCheckpointer  # noqa: E402
from asyncckpt.errors import DuplicateNameError, ShapeMismatchError, UnsupportedLeafError  # noqa: E402
from asyncckpt.format.objects import decode_value  # noqa: E402
from asyncckpt.format.state_tree import checked  # noqa: E402

Pair = namedtuple("Pair", ["left", "right"])


def tensor(n: float) -> torch.Tensor:
    return torch.full((3,), float(n))


def versioned() -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict(b=tensor(1), a=tensor(2))
    found._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return found


CONTAINERS: dict[str, Callable[[], Any]] = {
    "counter": lambda: Counter({2: 1, 4: 3, "x": -1}),
    "counter of tensors": lambda: Counter({"a": tensor(1)}),
    "empty counter": Counter,
    "ordered": lambda: OrderedDict(b=1, a=tensor(1)),
    "ordered with versions": versioned,
    "empty ordered": OrderedDict,
    "defaultdict of lists": lambda: defaultdict(list, {"a": [1, 2], "b": [tensor(1)]}),
    "defaultdict of ints": lambda: defaultdict(int, {"a": 1}),
    "defaultdict of dicts": lambda: defaultdict(dict, {3: {"m": tensor(3)}}),
    "defaultdict without": lambda: defaultdict(None, {"a": 1}),
    "defaultdict of deques": lambda: defaultdict(deque, {"a": deque([1])}),
    "empty defaultdict": lambda: defaultdict(float),
    "deque": lambda: deque([1, 2.5, None, "x"], 7),
    "deque without end": lambda: deque([3, [4, (5,)]]),
    "deque of tensors": lambda: deque([tensor(1), tensor(2)], 2),
    "deque of dicts": lambda: deque([{"a": 1}, {"b": tensor(2)}], 5),
    "empty deque": lambda: deque(maxlen=3),
    "list": lambda: [1, tensor(2), [3]],
    "tuple": lambda: (1, tensor(2), (3,)),
    "all of them": lambda: {
        "c": Counter({1: 2}),
        "d": [deque([defaultdict(list, {"z": [Counter(), tensor(9)]}), (tensor(8), OrderedDict(k=deque([1], 4)))], 9)],
    },
}


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in types, order, keys and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        if getattr(a, "_metadata", None) != getattr(b, "_metadata", None):
            return False
        return all(map(same, a, b)) and len(a) == len(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)):
        if isinstance(a, deque) and a.maxlen != b.maxlen:
            return False
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return bool(a == b)


def saved(state: Any, path: pathlib.Path, **config: Any) -> str:
    with SyncCheckpointer(**config) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


class Holder:
    """An object that keeps whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_comes_back_in_a_new_dict_as_the_type_that_it_was(
    tmp_path: pathlib.Path, name: str, layout: str
) -> None:
    state = {"at": CONTAINERS[name](), "in": [{"a": CONTAINERS[name](), "w": tensor(7)}]}
    try:
        path = saved(state, tmp_path / "a", layout=layout)
    except UnsupportedLeafError as error:
        assert layout == "dcp", error
        assert "deque" in error.message or "tuple with tensors" in error.message
        return
    assert same(asyncckpt.load(path), state)


@pytest.mark.parametrize("name", CONTAINERS)
def test_an_object_is_given_its_containers_as_the_types_that_they_were(tmp_path: pathlib.Path, name: str) -> None:
    path = saved({"o": Holder({"x": CONTAINERS[name]()}), "w": tensor(1)}, tmp_path / "a")
    holder = Holder({})
    asyncckpt.load(path, {"o": holder, "w": tensor(0)})
    assert same(holder.state, {"x": CONTAINERS[name]()})


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name not in ("all of them",)])
def test_a_target_of_the_same_types_is_filled_and_keeps_them(tmp_path: pathlib.Path, name: str) -> None:
    path = saved({"at": CONTAINERS[name](), "w": tensor(1)}, tmp_path / "a")
    target = {"at": zeroed(CONTAINERS[name]()), "w": tensor(0)}
    before = target["at"]
    assert asyncckpt.load(path, target) is target
    assert same(target["at"], CONTAINERS[name]())
    if isinstance(before, dict):
        assert target["at"] is before, "filled in place"


def zeroed(value: Any) -> Any:
    """Return a value with other leaves and the same structure."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = zeroed(value[key])
        return value
    if isinstance(value, deque):
        return deque(map(zeroed, value), value.maxlen)
    return type(value)(map(zeroed, value)) if isinstance(value, (list, tuple)) else 0


@pytest.mark.parametrize(
    ("was", "target"),
    [
        (Counter(a=1), lambda: defaultdict(list, a=0)),
        (Counter(a=1), lambda: OrderedDict(a=0)),
        (Counter(a=1), lambda: {"a": 0}),
        ({"a": 1}, lambda: Counter(a=0)),
        (defaultdict(int, a=1), lambda: defaultdict(lambda: 5, a=0)),
        (deque([tensor(1), 2]), lambda: [tensor(0), 0]),
        ([tensor(1), 2], lambda: deque([tensor(0), 0], 4)),
    ],
    ids=lambda value: "" if callable(value) else type(value).__name__,
)
def test_a_container_of_the_target_keeps_its_own_type(tmp_path: pathlib.Path, was: Any, target: Any) -> None:
    path = saved({"at": was, "w": tensor(1)}, tmp_path / "a")
    into = {"at": target(), "w": tensor(0)}
    place = into["at"]
    asyncckpt.load(path, into)
    assert into["at"] is place
    found, wanted = (list(x.values()) if isinstance(x, dict) else list(x) for x in (place, was))
    assert same(found, wanted)


@pytest.mark.parametrize("saved_as", [[tensor(1), 2], deque([tensor(1), 2], 3), [1, 2], deque([1, 2], 3)], ids=repr)
@pytest.mark.parametrize("target", [list, deque, lambda: deque(maxlen=9), lambda: deque(maxlen=1)])
def test_an_empty_list_or_deque_takes_all_of_either_and_loses_no_member(
    tmp_path: pathlib.Path, saved_as: Any, target: Any
) -> None:
    path = saved({"at": saved_as, "w": tensor(1)}, tmp_path / "a")
    into = {"at": target(), "w": tensor(0)}
    place = into["at"]
    asyncckpt.load(path, into)
    assert same(list(into["at"]), list(saved_as))
    if getattr(place, "maxlen", None) != 1:
        assert into["at"] is place


def test_a_deque_that_cannot_hold_what_was_saved_is_refused_and_another_one_grows(tmp_path: pathlib.Path) -> None:
    path = saved({"at": deque([tensor(1), 2, 3])}, tmp_path / "a")
    for value in (deque([tensor(0), 0], 2), deque([tensor(0), 0, 0, 0])):
        with pytest.raises(ShapeMismatchError):
            asyncckpt.load(path, {"at": value})
    into = {"at": deque([tensor(0), 0], 3)}
    asyncckpt.load(path, into)
    assert same(into["at"], deque([tensor(1), 2, 3], 3))


def test_what_makes_missing_values_is_taken_from_a_list_and_another_is_said_to_be_gone(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"known": defaultdict(set, a=1), "own": defaultdict(lambda: 5, b=tensor(2)), "w": tensor(1)}
    path = saved(state, tmp_path / "a")
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        found = asyncckpt.load(path)
    assert found["known"].default_factory is set
    assert type(found["own"]) is defaultdict and found["own"].default_factory is None
    (record,) = [r.getMessage() for r in caplog.records if "default_factory" in r.getMessage()]
    assert "'own'" in record and "known" not in record
    caplog.clear()
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        asyncckpt.load(path, {"known": defaultdict(set, a=0), "own": (own := defaultdict(lambda: 5, b=tensor(0)))})
    assert own["new"] == 5 and not [r for r in caplog.records if "default_factory" in r.getMessage()]


def test_subclasses_come_back_as_what_they_extend(tmp_path: pathlib.Path) -> None:
    kinds = {base: type(f"Own{base.__name__}", (base,), {}) for base in (Counter, OrderedDict, deque, dict)}
    state = {base.__name__: kinds[base]([("a", 1)] if base is not deque else [1]) for base in kinds}
    state["Counter"] = kinds[Counter](a=1)
    state["proxy"] = MappingProxyType({"a": 1})
    found = asyncckpt.load(saved({**state, "w": tensor(1)}, tmp_path / "a"))
    assert {name: type(value) for name, value in found.items() if name != "w"} == {
        **{base.__name__: base for base in kinds},
        "proxy": dict,
    }


def test_a_save_whose_containers_changed_their_type_alone_stores_the_new_type(tmp_path: pathlib.Path) -> None:
    kinds: list[Any] = [{"a": 1}, Counter(a=1), defaultdict(int, a=1), defaultdict(list, a=1), OrderedDict(a=1)]
    kinds += [deque([tensor(1)]), deque([tensor(1)], 2), [tensor(1)], (tensor(1),), deque([1]), [1]]
    with SyncCheckpointer() as checkpointer:
        for n, value in enumerate([*kinds, *reversed(kinds)]):
            checkpointer.save({"x": value, "w": tensor(n)}, tmp_path / str(n))
    for n, value in enumerate([*kinds, *reversed(kinds)]):
        assert same(asyncckpt.load(tmp_path / str(n))["x"], value)


# ---- keys

KEYS: list[Any] = [
    *((0, 0), (0, "a"), (), (1, (2, (None, True))), (1.5, b"x"), ("a.b", "c")),
    *(None, True, False, 0.5, -0.0, math.inf, -math.inf, 1e300, b"raw", b"", "", "text", 7, -7),
]


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_a_key_comes_back_as_what_it_was(tmp_path: pathlib.Path, key: Any, layout: str) -> None:
    state = {"s": {key: {"slow": tensor(1), "n": 3}}, "top": {key: tensor(2)}, "e": {key: {}}}
    found = asyncckpt.load(saved(state, tmp_path / "a", layout=layout))
    assert same(found, state)


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_a_target_with_such_a_key_is_filled_in_place(tmp_path: pathlib.Path, key: Any) -> None:
    path = saved(
        {key: tensor(4), "s": {key: {"slow": tensor(1), "n": 3}}, "h": {key: Holder({key: 1})}}, tmp_path / "a"
    )
    into: dict[Any, Any] = {key: tensor(0), "s": {key: {"slow": tensor(0), "n": 0}}, "h": {key: Holder({})}}
    slow = into["s"][key]["slow"]
    asyncckpt.load(path, into, strict=True)
    assert into["s"][key]["slow"] is slow and torch.equal(slow, tensor(1)) and into["s"][key]["n"] == 3
    assert torch.equal(into[key], tensor(4)) and same(into["h"][key].state, {key: 1})


def test_keys_that_python_takes_for_one_are_told_apart_from_save_to_save(tmp_path: pathlib.Path) -> None:
    keys: list[Any] = [1, True, 1.0, "1", (1,), (True,), (1.0,), ("1",), 0, False, 0.0, -0.0, None, "None", b"1"]
    with SyncCheckpointer() as checkpointer:
        for n, key in enumerate(keys):
            checkpointer.save({"a": {key: tensor(n)}}, tmp_path / str(n))
    for n, key in enumerate(keys):
        assert same(asyncckpt.load(tmp_path / str(n)), {"a": {key: tensor(n)}}), key


@pytest.mark.parametrize(
    ("state", "fqn"),
    [
        ({None: tensor(1), "None": tensor(2)}, "None"),
        ({(0, 1): tensor(1), "(0, 1)": tensor(2)}, "(0, 1)"),
        ({1.5: tensor(1), 1: {5: tensor(2)}}, "1.5"),
        ({True: tensor(1), "True": tensor(2)}, "True"),
        ({b"x": tensor(1), "b'x'": tensor(2)}, "b'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_keys_with_one_text_are_refused_by_name(tmp_path: pathlib.Path, state: Any, fqn: str) -> None:
    with SyncCheckpointer() as checkpointer:
        with pytest.raises(DuplicateNameError) as caught:
            checkpointer.save(state, tmp_path / "a")
        assert caught.value.fqn == fqn
        checkpointer.save({"w": tensor(1)}, tmp_path / "a")


def test_numpy_s_numbers_as_keys_are_python_s(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    state = {numpy.int64(3): tensor(1), numpy.float32(0.5): 2, numpy.bool_(True): 4, (numpy.int32(1), "a"): tensor(5)}
    path = saved({"a": state, "b": {numpy.str_("t"): 1}}, tmp_path / "a")
    assert same(asyncckpt.load(path), {"a": {3: tensor(1), 0.5: 2, True: 4, (1, "a"): tensor(5)}, "b": {"t": 1}})
    into = {"a": {numpy.int64(3): tensor(0), (1, "a"): tensor(0)}}
    asyncckpt.load(path, into)
    assert torch.equal(into["a"][3], tensor(1)) and torch.equal(into["a"][1, "a"], tensor(5))


def test_such_keys_are_named_in_keys_and_key_map_and_by_an_open_checkpoint(tmp_path: pathlib.Path) -> None:
    path = saved({"a": {(0, 1): {"x": tensor(1), "n": 2}, None: tensor(3)}, "b": {0.5: tensor(4)}}, tmp_path / "a")
    assert same(asyncckpt.load(path, keys=["a.(0, 1)"]), {"a": {(0, 1): {"x": tensor(1), "n": 2}}})
    assert same(asyncckpt.load(path, keys=["b.0.5"]), {"b": {0.5: tensor(4)}})
    into = {"y": tensor(0), "z": {(0, 1): {"x": tensor(0)}}}
    asyncckpt.load(path, into, key_map={"y": "a.None", "z.(0, 1).x": "a.(0, 1).x"})
    assert same(into, {"y": tensor(3), "z": {(0, 1): {"x": tensor(1)}}})
    with asyncckpt.open_checkpoint(path) as opened:
        assert set(opened.keys()) == {"a.(0, 1).x", "a.(0, 1).n", "a.None", "b.0.5"}
        assert opened.objects["a.(0, 1).n"] == 2
        assert torch.equal(opened.tensor("a.None"), tensor(3))
    plan = asyncckpt.plan_load(path, {"a": {(0, 1): {"x": tensor(0)}, None: tensor(0)}, "b": {0.5: tensor(0)}})
    assert not plan.missing and not plan.mismatched


ODD = {
    "w": tensor(1),
    "k": {(0, 1): tensor(2), None: {"n": 3}, 0.5: tensor(4), True: 5, b"x": tensor(6)},
    "c": Counter(a=1),
    "d": defaultdict(list, a=[1], b=tensor(7)),
    "q": deque([tensor(8), 9], 4),
}
PLAIN = {**ODD, "d": dict(ODD["d"]), "q": list(ODD["q"])}


def test_a_file_for_torch_has_the_keys_and_says_which_containers_it_has_not(tmp_path: pathlib.Path) -> None:
    report = asyncckpt.convert(saved(ODD, tmp_path / "a"), tmp_path / "b", to="torch")
    assert set(report.changed) == {"a defaultdict became a dict: d", "a deque became a list: q"}
    assert same(torch.load(tmp_path / "b", weights_only=True), PLAIN)
    assert same(asyncckpt.load(tmp_path / "b"), PLAIN)
    into = {"k": {(0, 1): tensor(0), 0.5: tensor(0)}}
    assert same(asyncckpt.load(tmp_path / "b", into), {"k": {(0, 1): tensor(2), 0.5: tensor(4)}})
    again = asyncckpt.convert(tmp_path / "b", tmp_path / "c", to="asyncckpt")
    assert again.changed == () and same(asyncckpt.load(tmp_path / "c"), PLAIN)


def test_other_targets_say_what_became_of_keys_and_containers(tmp_path: pathlib.Path) -> None:
    path = saved(ODD, tmp_path / "a")
    assert asyncckpt.convert(path, tmp_path / "b", to="asyncckpt").changed == ()
    assert same(asyncckpt.load(tmp_path / "b"), ODD)
    report = asyncckpt.convert(path, tmp_path / "dcp", to="dcp")
    lost = {"a Counter became a dict: c", "a defaultdict became a dict: d", "a deque became a list: q"}
    assert set(report.changed) == {*lost, "keys that are no texts became texts in: k"}
    found = asyncckpt.load(tmp_path / "dcp")["k"]
    assert same(found, {"(0, 1)": tensor(2), "None": {"n": 3}, "0.5": tensor(4), "True": 5, "b'x'": tensor(6)})
    report = asyncckpt.convert(path, tmp_path / "s.safetensors", to="safetensors", partial=True)
    assert lost <= set(report.changed)
    assert set(asyncckpt.load(tmp_path / "s.safetensors")) == {
        *("w", "k.(0, 1)", "k.0.5", "k.b'x'", "d.b", "q.0"),
    }


def test_a_file_of_torch_gives_its_containers_and_keys(tmp_path: pathlib.Path) -> None:
    torch.save({**ODD, "q": [1]}, tmp_path / "a")
    assert same(asyncckpt.load(tmp_path / "a"), {**ODD, "q": [1]})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_what_has_such_keys_and_containers_under_their_names(tmp_path: pathlib.Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {name: value for name, value in ODD.items() if name != "q"}
    path = saved(state, tmp_path / "a", layout="dcp")
    into: dict[str, Any] = {"k": {(0, 1): tensor(0), 0.5: tensor(0)}, "c": Counter(a=0)}
    dcp.load(into, checkpoint_id=path)
    assert same(into["k"], {(0, 1): tensor(2), 0.5: tensor(4)}) and into["c"] == Counter(a=1)
    assert same(asyncckpt.load(path), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_our_reader_gives_stock_dcp_what_was_saved_under_the_same_names(tmp_path: pathlib.Path) -> None:
    import torch.distributed.checkpoint as dcp

    path = saved(ODD, tmp_path / "a")
    into: dict[str, Any] = {"k": {(0, 1): tensor(0), 0.5: tensor(0)}, "d": defaultdict(list, b=tensor(0))}
    dcp.load(into, storage_reader=asyncckpt.dcp.StorageReader(path))
    assert same(into["k"], {(0, 1): tensor(2), 0.5: tensor(4)}) and torch.equal(into["d"]["b"], tensor(7))


def test_commands_name_such_keys(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncckpt.cli import main

    path, other = saved(ODD, tmp_path / "a"), saved({**ODD, "k": {**ODD["k"], None: {"n": 4}}}, tmp_path / "b")
    assert main(["inspect", path]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("k.(0, 1)", "k.None.n", "k.0.5", "k.True", "k.b'x'"))
    assert main(["diff", path, other]) == 1
    assert "k.None.n" in capsys.readouterr().out
    assert main(["verify", path]) == 0


def test_a_key_longer_than_the_limit_or_with_more_than_63_bits_is_refused(tmp_path: pathlib.Path) -> None:
    with SyncCheckpointer() as checkpointer:
        for key in (("x" * 5000,), (1 << 63,), ("\ud800",), b"y" * 5000, (((((((((1,),),),),),),),),)):
            with pytest.raises(UnsupportedLeafError):
                checkpointer.save({"a": {key: tensor(1)}}, tmp_path / "a")
        checkpointer.save({"a": {(1,): tensor(1)}}, tmp_path / "a")


# ---- what a file may not hold


@pytest.mark.parametrize(
    "node",
    [
        *(
            ("d", (key, ("O", 0)))
            for key in (None, True, 1.5, b"x", (), ("z",), ("n", 1), ("b", 1), ("b",), ("f", 1.5))
        ),
        *(("d", (("f", text), ("O", 0))) for text in ("", "3ff", "7ff8000000000000", "3FF8000000000000", "x" * 16)),
        *(("d", (("y", "text"), ("O", 0))), ("d", (("t", None), ("O", 0))), ("d", (("t", ("t", ("b", 2))), ("O", 0)))),
        ("d", (("y", b"x" * 5000), ("O", 0))),
        ("d", (("t", "x" * 4097), ("O", 0))),
        *(("d", (1, ("O", 0), key, ("O", 0))) for key in (("b", True), ("f", "3ff0000000000000"))),
        ("d", (("t", 1), ("O", 0), ("t", ("b", True)), ("O", 0))),
        *(("d", (), form) for form in (None, "Counter", (), ("Counter", 1), ("counter",), ("dict",), ("OrderedDict",))),
        *(("d", (), ("defaultdict", name)) for name in ("os.system", "builtins.list", "Counter", 1, ("list",), "")),
        *(("d", (), ("defaultdict",)), ("d", (), ("defaultdict", None, None)), ("d", (), ("deque", None))),
        *(("l", (("O", 0),), form) for form in (("deque", 0), ("deque", -1), ("deque", True), ("deque", 1 << 63))),
        *(("l", (), form) for form in (None, ("deque",), ("list", None), ("Counter",), "deque", ("deque", "1"))),
        *(("t", (), ("deque", None)), ("r", ("d", ()), ("deque", None)), ("l", 5, ("deque", None))),
    ],
    ids=repr,
)
def test_a_tree_with_a_key_or_form_that_nobody_writes_is_refused(node: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        checked(node, 0, 1)


def test_keys_that_were_made_to_have_one_hash_are_refused() -> None:
    members: list[Any] = []
    for n in range(1200):  # the hash of an int is its remainder
        members += (("t", n * ((1 << 61) - 1)), ("O", 0))
    with pytest.raises(ValueError, match="same hash"):
        checked(("d", tuple(members)), 0, 1)
    assert len(checked(("d", tuple(members[:1600])), 0, 1)[1]) == 1600


@pytest.mark.parametrize(
    "raw",
    [
        {"$": "deque", "v": v}
        for v in (
            None,
            [],
            [1],
            [1, 2],
            ["2", []],
            [True, [1]],
            [0, [1]],
            [-1, []],
            [1 << 63, []],
            [None, {}],
            [2, [], 3],
        )
    ],
    ids=repr,
)
def test_a_deque_that_nobody_writes_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError):
        decode_value(raw)
