"""What a conversion cannot keep of containers, values and tensors is said, with names."""

from __future__ import annotations

import collections
from pathlib import PurePosixPath
from typing import Any

import pytest
import states
import torch
from conversions import KINDS, Workdir, read_by_stock_tools

import asyncckpt
from asyncckpt import PerRank

np = pytest.importorskip("numpy")
pytest.importorskip("safetensors")

ONE, FLAT, TIED = torch.ones(1), torch.arange(32.0), torch.ones(3)
X, Y, Z = (torch.full((2,), float(n)) for n in range(3))
ONCE, PLAIN, ODD, EMPTY = {"w": torch.ones(2), "n": 1}, [1, 2], [torch.strided, 1], dict[str, Any]()
WITH_EXTRA: Any = collections.OrderedDict(w=ONE)
WITH_EXTRA._metadata, WITH_EXTRA.extra = collections.OrderedDict({"": {"version": 1}}), 5

VIEWS = "views of the same elements are stored apart: "
SHARED = "containers that were one object are stored apart: "
APART = "tied tensors are stored apart, for each tuple that holds one: "
WITHOUT_DICTS = ("dcp", "safetensors", "hf")

# state, kinds of target, options, and all that is said
SAID: dict[str, tuple[Any, tuple[str, ...], dict[str, Any], set[str]]] = {
    "empty dicts": (
        {"x": ONE, "state": {}, "model": {"sub": {}}},
        WITHOUT_DICTS,
        {},
        {"empty dicts are not kept: model.sub, state"},
    ),
    "empty dicts in lists": (
        {"a": [{}], "b": [[{}, X]], "c": [1, {}], "whole": ({}, ONE), "full": [{"x": Z}], "d": {"e": {}}},
        ("dcp",),
        {},
        {
            "lists lost the members that were empty dicts, or are missing if they held nothing else: a, b, b.0, c",
            "empty dicts are not kept: a.0, b.0.0, c.1, d.e",
        },
    ),
    "empty dicts that stay": ({"a": [{}], "b": [[{}, ONE]], "d": {"e": {}}}, ("torch", "asyncckpt"), {}, set()),
    "what holds a chosen leaf": (
        {"c": collections.Counter(a=ONE, b=2), "d": collections.Counter("x")},
        ("dcp",),
        {"keys": ["c.a"]},
        {"a Counter became a dict: c"},
    ),
    "views of one storage": (
        {"q": FLAT[:12], "k": FLAT[8:16], "v": FLAT[16:20], "w": FLAT[20:].view(3, 4), "wt": FLAT[20:].view(3, 4).t()},
        KINDS,
        {},
        {VIEWS + "k, q, w, wt", "a tensor that was strided otherwise became row-major: wt"},
    ),
    "views in a tuple": ({"two": (FLAT[:10], FLAT[5:20])}, ("dcp",), {}, {VIEWS + "two.0, two.1"}),
    "ties by name": (
        {"tied": TIED, "again": TIED, "none": FLAT[:0]},
        ("safetensors", "hf"),
        {},
        {"tied tensors are stored once for each name: again (= tied)"},
    ),
    "ties across a tuple": (
        {"a": (X, 1), "b": X, "c": (Y, Y), "d": Z, "e": {"f": Z}},
        ("dcp",),
        {},
        {APART + "a.0, b"},
    ),
    "ties that stay": ({"tied": TIED, "again": TIED, "none": FLAT[:0]}, ("asyncckpt", "torch", "dcp"), {}, set()),
    "a list that lacks members": (
        {"l": [X, frozenset("a"), Y]},
        ("torch",),
        {"partial": True},
        {"lists that lack members became dicts of their numbers: l"},
    ),
    "a list that lacks members in DCP": (
        {"l": [X, frozenset("a"), Y]},
        ("dcp",),
        {"partial": True},
        {"lists that lack members became dicts of texts of their numbers: l"},
    ),
    "slices in a list of ours": ({"l": [X, slice(1, 2), Y]}, ("asyncckpt",), {"partial": True}, set()),
    "a list that is a file": (
        [X, Y, Z],
        ("torch",),
        {"keys": ["1"]},
        {"a list became a dict of its members' numbers: the top level"},
    ),
    "numpy arrays": (
        {"a": np.arange(5.0), "big": bytes(100_000)},
        ("torch", "dcp"),
        {},
        {"numpy arrays became tensors: a"},
    ),
    "numpy arrays that stay": ({"a": np.arange(5.0), "big": bytes(100_000)}, ("asyncckpt",), {}, set()),
    "containers that are one object": (
        {
            "model": {"a": ONCE, "b": ONCE, "l": [PLAIN, PLAIN]},
            **{"o": {"x": ONCE}, "u": ODD, "v": ODD, "z": [ODD, 3], "apart": [[1, 2], [1, 2]]},
        },
        ("asyncckpt", "torch", "dcp"),
        {"key_map": lambda fqn: fqn.removeprefix("model.")},
        {SHARED + "model.a, model.b, model.l, o.x, u, v, z", "a torch.layout became a text: u, v, z"},
    ),
    "empty containers that are one object": (
        {"a": EMPTY, "b": EMPTY, "c": {}},
        ("asyncckpt",),
        {},
        {SHARED + "a, b"},
    ),
    "containers in a tuple": ({"t": (ONCE, ONCE, ONE)}, ("dcp",), {}, {SHARED + "t.0, t.1"}),
    "a layout and an ordered dict": (
        {"layout": torch.strided, "m": WITH_EXTRA, "keyed": {1j: collections.OrderedDict(a=1)}},
        ("asyncckpt",),
        {},
        {
            "a torch.layout became a text: layout",
            "attributes of OrderedDicts are not kept: m ('extra')",
            "an OrderedDict became a dict: keyed",
        },
    ),
    "parameters, all of them": (
        {f"p{n}": torch.nn.Parameter(torch.ones(1)) for n in range(300)},
        ("safetensors",),
        {},
        {"a Parameter became a tensor: " + ", ".join(f"p{n}" for n in range(300))},
    ),
    "the order of a dict": (
        {
            name: torch.ones(3, dtype=dtype)
            for name, dtype in zip("zby", (torch.int8, torch.float64, torch.bool), strict=True)
        },
        ("safetensors", "hf"),
        {},
        set(),
    ),
}


@pytest.mark.parametrize(("what", "to"), [(what, to) for what, row in SAID.items() for to in row[1]])
def test_what_becomes_something_else_is_said_by_name_and_nothing_more(what: str, to: str, work: Workdir) -> None:
    state, _, options, said = SAID[what]
    assert work.changed(state, to, **options) == said


@pytest.mark.parametrize(
    ("what", "to", "found"),
    [
        ("empty dicts that stay", "torch", lambda found: found["a"] == [{}]),
        ("empty dicts in lists", "dcp", lambda found: found["whole"][0] == {}),
        ("ties across a tuple", "dcp", lambda found: found["a"][0] is not found["b"]),
        ("ties across a tuple", "dcp", lambda found: found["c"][0] is found["c"][1]),
        ("ties across a tuple", "dcp", lambda found: found["d"] is found["e"]["f"]),
        ("a list that lacks members", "torch", lambda found: list(found["l"]) == [0, 2]),
        ("a list that lacks members in DCP", "dcp", lambda found: list(found["l"]) == ["0", "2"]),
        ("a list that is a file", "torch", lambda found: list(found) == [1]),
        ("containers that are one object", "dcp", lambda found: found["z"] == [["torch.strided", 1], 3]),
        ("a layout and an ordered dict", "asyncckpt", lambda found: found["m"]._metadata == {"": {"version": 1}}),
        ("a layout and an ordered dict", "asyncckpt", lambda found: found["keyed"] == {1j: {"a": 1}}),
        ("the order of a dict", "safetensors", lambda found: list(found) == list("zby")),
        ("the order of a dict", "hf", lambda found: list(found) == list("zby")),
    ],
)  # fmt: skip
def test_what_is_read_afterwards_is_what_was_said(what: str, to: str, found: Any, work: Workdir) -> None:
    state, _, options, _ = SAID[what]
    work.changed(state, to, **options)
    assert found(work.load())


def test_what_was_stored_apart_is_apart_in_the_next_conversion(work: Workdir) -> None:
    work.changed({"two": (FLAT[:10], FLAT[5:20]), "t": (ONCE, ONCE, ONE)}, "dcp")
    assert work.convert("asyncckpt", "b", "c").changed == ()


@pytest.mark.parametrize("to", ["torch", "dcp", "asyncckpt"])
def test_what_is_read_as_something_plainer_is_reported(to: str, work: Workdir) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.is_sharded, parameter.group = True, "x"  # type: ignore[attr-defined]
    defaults: Any = collections.defaultdict(list)
    defaults["x"] = torch.ones(1)
    path = PurePosixPath
    state = {
        "p": parameter,
        "seen": collections.Counter("aab"),
        "defaults": defaults,
        "run": {"out": path("/data/a"), "all": [path("a/b"), path()]},
        "by_path": {path("/x"): torch.ones(3)},
        "flat": [collections.Counter("b"), {"k": {path("y")}}],
        "plain": {"w": torch.ones(1)},
    }
    lost = set() if to == "asyncckpt" else {"a defaultdict became a dict: defaults"}
    lost |= {"a Counter became a dict: flat.0, seen"} if to == "dcp" else set()
    assert work.changed(state, to) == {
        *lost,
        "a Parameter became a tensor: p",
        "attributes of tensors are not kept: p (is_sharded, group)",
        "a path became a text: run.out, run.all, by_path, flat.1.k",
    }
    found = work.load()
    assert found["run"] == {"out": "/data/a", "all": ["a/b", "."]}
    assert type(found["run"]["out"]) is type(next(iter(found["by_path"]))) is str
    assert (found["seen"], type(found["seen"])) == ({"a": 2, "b": 1}, dict if to == "dcp" else collections.Counter)
    assert type(found["defaults"]) is (collections.defaultdict if to == "asyncckpt" else dict)
    assert to != "asyncckpt" or found["defaults"].default_factory is list
    assert found["flat"] == [{"b": 1}, {"k": {"y"}}]
    assert not work.convert(to, target="c", keys=["plain"]).changed


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([X], "a list became a dict of its members' numbers"),
        ((X, Y), "a tuple became a dict of its members' numbers"),
        (X, "what was no dict is its member 'value'"),
        (collections.Counter(a=X), "a Counter became a dict"),
    ],
    ids=["list", "tuple", "tensor", "counter"],
)
def test_what_the_top_level_was_is_reported(value: Any, said: str, to: str, work: Workdir) -> None:
    expected = {f"{said}: the top level"}
    if isinstance(value, dict):
        expected = expected if to not in ("torch", "asyncckpt") else set()
    elif to == "dcp" and not torch.is_tensor(value):
        expected.add("keys that are no texts became texts in: the top level")
    changed = work.changed(value, to, keys=["a"] if isinstance(value, dict) else None)
    assert {line for line in changed if line.endswith(": the top level")} == expected


@pytest.mark.parametrize("to", KINDS)
def test_what_a_tensor_was_besides_its_elements_is_reported_once(to: str, work: Workdir) -> None:
    base = torch.arange(48.0)
    state = {
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "graph": torch.ones(3, requires_grad=True),
        "image": base.view(1, 4, 3, 4).contiguous(memory_format=torch.channels_last),
        "learnt": torch.nn.Parameter(base.view(6, 8).t()),
        "plain": base[:4],
        "every_second": base[::2],
        "same": torch.ones(1).expand(5),
        "turned": torch.arange(8.0).to(torch.bfloat16).view(2, 4).t(),
        "eights": torch.arange(8).to(torch.float8_e4m3fn),
    }
    assert work.changed(state, to) == {
        "a Parameter became a tensor: frozen, learnt",
        "requires_grad is not kept: graph",
        "a tensor that was strided otherwise became row-major: image, learnt, every_second, same, turned",
        VIEWS + "every_second, learnt, plain",
    }
    for name, tensor in read_by_stock_tools(to, work / "b").items():
        states.assert_same(tensor, state[name].detach().contiguous())
    again = work.convert("torch", "b", "c").changed
    assert [said for said in again if "metadata" not in said] == []


def test_what_was_a_rank_s_own_is_everybody_s_and_named_where_it_is_held(work: Workdir) -> None:
    own = {"none": PerRank({}), "t": PerRank({"x": torch.ones(1), "n": 1}), "raw": PerRank(bytes(70_000))}
    work.ours({"w": torch.ones(2), **own})
    said = "what was the only rank's own (PerRank) is everybody's: "
    for to, names in (("asyncckpt", "none, t, raw"), ("torch", "none, t, raw"), ("dcp", "t, raw")):
        report = work.convert(to, target=to)
        assert any(line.startswith(said) and line.endswith(names) for line in report.changed)
        states.assert_same(work.load(to)["t"], {"x": torch.ones(1), "n": 1})
        assert work.convert(to, target=f"{to}-w", keys=["w"]).changed == ()
    assert said + "t" in work.convert("safetensors", target="s", partial=True).changed
    assert said + "t" in work.convert("torch", target="k", keys=["t.x"], key_map={"t.x": "y"}).changed


# ---- what lies in a file of a module ---------------------------------------------------------------------------------


def versioned(name: str, value: Any, versions: Any) -> Any:
    """Return a state dict of a module with its `_metadata`."""
    made: Any = collections.OrderedDict({name: value})
    made._metadata = collections.OrderedDict({"": versions})
    return made


@pytest.mark.parametrize("source", ["torch", "asyncckpt"])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_versions_that_torch_does_not_read_are_left_out_and_said(to: str, source: str, work: Workdir) -> None:
    bad = versioned("w", torch.ones(1), {"version": 1, "kinds": frozenset("ab")})
    work.torch({"m": {"bad": bad}, "good": versioned("w", torch.ones(1), {"version": 2})})
    if source == "asyncckpt":
        work.convert("asyncckpt", target="ours")
    report = work.convert(to, "ours" if source == "asyncckpt" else "a")
    assert [said for said in report.changed if said.startswith("the _metadata of m.bad, which holds a frozenset")]
    if to == "torch":
        found = torch.load(work / "b", weights_only=True)
        assert found["good"]._metadata == {"": {"version": 2}}
        assert not getattr(found["m"]["bad"], "_metadata", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": ["t"]}, set()),
        ({"key_map": {"model.x": "x"}}, {"the _metadata of model is not kept: renaming left nothing there"}),
        ({"partial": True}, {"the _metadata of model is not kept: all of it was left out"}),
    ],
)
def test_a_state_dict_of_which_nothing_is_left_is_said_to_have_lost_its_versions(
    options: dict[str, Any], said: set[str], work: Workdir
) -> None:
    value = frozenset("a") if "partial" in options else torch.ones(2)
    assert (
        work.changed({"model": versioned("x", value, {"version": 1}), "t": torch.ones(1)}, "torch", **options) == said
    )


def test_module_versions_are_lost_by_name_and_only_where_they_are_lost(work: Workdir) -> None:
    module = torch.nn.BatchNorm1d(2).state_dict()
    work.torch({"model": module, "pair": (module, 2), "flat": collections.OrderedDict(a=1)})
    lost = "the _metadata of modules' state dicts, their versions, are not kept: "
    dicts = "an OrderedDict became a dict: "
    assert {lost + "model", dicts + "flat, model"} <= set(work.convert("dcp").changed)
    assert work.load()["pair"][0]._metadata == module._metadata
    report = work.convert("safetensors", target="c", keys=["model", "pair.0"])
    assert {lost + "model, pair.0", dicts + "model, pair.0"} <= set(report.changed)
    assert any(line.endswith("became names with dots, in: model, pair") for line in report.changed)


def test_of_what_is_chosen_nothing_else_is_reported(work: Workdir) -> None:
    base = torch.arange(1 << 20)
    work.torch({"a": base[100:200], "b": base[150:300], "all": base})
    assert work.convert("torch", keys=["a", "b"], key_map={"a": "x.a"}).changed == (VIEWS + "a, b",)
    found = torch.load(work / "b", weights_only=True)
    assert torch.equal(found["x.a"], base[100:200]) and torch.equal(found["b"], base[150:300])
    assert (work / "b").stat().st_size < 8192, "the rest of the storage does not come along"
    assert asyncckpt.load(work / "b").keys() == {"x.a", "b"}


def test_a_list_of_which_renaming_leaves_nothing_is_not_said_to_be_a_dict(work: Workdir) -> None:
    work.torch({"l": [ONE, X], "t": ONE})
    assert work.convert("torch", keys=["l.0", "t"], key_map={"l.0": "x"}).changed == ()
    assert torch.load(work / "b", weights_only=True).keys() == {"x", "t"}
