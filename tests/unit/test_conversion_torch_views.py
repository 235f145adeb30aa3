"""A file of `torch.save` as a file of `torch.save`: objects, views, strides and types are those that torch.load gives.

The readers and writers are torch's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt.conversion import shared_containers, torch_image
from asyncckpt.conversion.torch_image import TorchImage
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.foreign.pickle_values import Tally

pytest.importorskip("numpy")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

Counts = collections.Counter
OLDER = pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])


def torch_state() -> dict[str, Any]:
    """What `torch.load(weights_only=True)` gives back, of every sort that is more than rows of elements and plain."""
    base = torch.arange(24.0).reshape(4, 6)
    learnt = torch.nn.Parameter(torch.randn(3, 4))
    return {
        "learnt": learnt,
        "tied": learnt,
        "same_elements": learnt.detach(),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "strided_parameter": torch.nn.Parameter(torch.randn(6, 8).t()),
        "graph": torch.ones(3, requires_grad=True),
        "base": base,
        "row": base[1],
        "column": base[:, 2],
        "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(1000, 3),
        "empty": torch.empty(0, 3).t(),
        "scalar": base[2, 3],
        "eights": torch.arange(8).to(torch.float8_e4m3fn),
        "sixteens": torch.arange(10).to(torch.uint16).view(2, 5).t(),
        "complex": torch.randn(3, 2, dtype=torch.complex64).t(),
        "seen": Counts(a=2, b=-3),
        "keyed": {(1, 2): Counts({(1,): 4}), (3, 4): collections.OrderedDict([((1,), 2), ((0,), 1)])},
        "layout": torch.strided,
        "layouts": [torch.strided, torch.sparse_coo],
        "pair": (torch.nn.Parameter(torch.ones(3)), Counts(x=1), [Counts()]),
        "module": collections.OrderedDict(weight=base[3]),
    }


def assert_same_tensor(found: Any, tensor: torch.Tensor, name: str) -> None:
    assert type(found) is type(tensor), name
    assert (found.stride(), found.requires_grad) == (tensor.stride(), tensor.requires_grad), name
    dense = torch.contiguous_format
    states.assert_same(found.detach().clone(memory_format=dense), tensor.detach().clone(memory_format=dense), name)


def distances(state: dict[str, Any], names: list[str]) -> dict[tuple[str, str], int]:
    """Bytes between the first elements of tensors that share some."""
    return {
        (a, b): state[b].data_ptr() - state[a].data_ptr()
        for a, b in itertools.combinations(names, 2)
        if max(_span(state[a])[0], _span(state[b])[0]) < min(_span(state[a])[1], _span(state[b])[1])
    }


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + ((last + 1) * tensor.itemsize if tensor.numel() else 0)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@OLDER
def test_objects_views_and_types_are_what_they_were(older: bool, tmp_path: pathlib.Path) -> None:
    state = torch_state()
    torch.save(state, tmp_path / "a", _use_new_zipfile_serialization=not older)
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert report.changed == ()
    found = torch.load(tmp_path / "b", weights_only=True)
    names = [name for name, value in state.items() if torch.is_tensor(value)]
    for name in names:
        assert_same_tensor(found[name], state[name], name)
    assert distances(found, names) == distances(state, names)
    assert found["learnt"] is found["tied"]
    assert found["learnt"] is not found["same_elements"]
    assert found["module"]["weight"].data_ptr() == found["base"][3].data_ptr()
    assert_same_tensor(found["pair"][0], state["pair"][0], "pair.0")
    assert found["pair"][1:] == state["pair"][1:]
    for name in ("seen", "keyed", "layout", "layouts"):
        assert found[name] == state[name], name
    types = [found["seen"], *found["keyed"].values(), found["pair"][1], found["pair"][2][0], found["module"]]
    assert list(map(type, types)) == [Counts, Counts, collections.OrderedDict, Counts, Counts, collections.OrderedDict]
    assert list(found["keyed"][3, 4]) == [(1,), (0,)]


_SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3)
_DTYPES = [torch.float32, torch.float64, torch.uint8, torch.bfloat16, torch.uint16, torch.complex128]
_VIEWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), _SHAPES, st.sampled_from("tpr")), max_size=9)


@given(dtypes=st.lists(st.sampled_from(_DTYPES), min_size=4, max_size=4), views=_VIEWS, older=st.booleans())
def test_any_views_of_any_storages(dtypes: Any, views: Any, older: bool, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("views")
    if older:  # torch.load(weights_only=True) reads no uint16 there
        dtypes = [torch.int16 if dtype is torch.uint16 else dtype for dtype in dtypes]
    storages = [torch.arange(100).to(dtype) for dtype in dtypes]
    state: dict[str, Any] = {}
    for number, (storage, offset, box, sort) in enumerate(views):
        sizes, strides = [n for n, _ in box], [s for _, s in box]
        if offset + sum((n - 1) * s for n, s in box if n) >= 100:
            continue
        tensor = storages[storage].as_strided(sizes, strides, offset)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor = torch.nn.Parameter(tensor) if sort == "p" else tensor.requires_grad_(sort == "r")
        state[f"{number}"] = tensor
        if sort == "t":
            state[f"{number} again"] = tensor
    torch.save(state, path / "a", _use_new_zipfile_serialization=not older)
    report = asyncckpt.convert(path / "a", path / "b", to="torch")
    compact = {name for said in report.changed for name in said.partition(": ")[2].split(", ")}
    assert all(said.startswith("a tensor that was strided otherwise became row-major") for said in report.changed)
    state, found = torch.load(path / "a", weights_only=True), torch.load(path / "b", weights_only=True)
    assert list(found) == list(state)
    apart = distances(state, list(state))
    for name, tensor in state.items():
        if name in compact:
            assert (_span(tensor)[1] - _span(tensor)[0]) > tensor.numel() * tensor.itemsize, "it had gaps"
            others = [state[one] for pair in apart if name in pair for one in pair]
            assert all(_geometry(other) == _geometry(tensor) for other in others), "nothing else was there"
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            tensor = type(tensor)(dense).requires_grad_(tensor.requires_grad)
        assert_same_tensor(found[name], tensor, name)
    assert distances(found, list(state)) == apart
    for a, b in itertools.combinations(state, 2):
        assert (found[a] is found[b]) == (state[a] is state[b]), (a, b)


def test_what_is_chosen_does_not_bring_the_rest_of_its_storage(tmp_path: pathlib.Path) -> None:
    base = torch.arange(1 << 20)
    torch.save({"a": base[100:200], "b": base[150:300], "c": base[::1024], "all": base}, tmp_path / "a")
    report = asyncckpt.convert(
        tmp_path / "a", tmp_path / "b", to="torch", keys=["a", "b", "c"], key_map={"a": "x.a", "c": "every"}
    )
    assert report.changed == ()  # the first of `every` lie among those of the others
    found = torch.load(tmp_path / "b", weights_only=True)
    assert list(found) == ["b", "x.a", "every"]
    assert found["x.a"].data_ptr() + 50 * 8 == found["b"].data_ptr()
    asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch", keys=["a", "b"])
    assert os.path.getsize(tmp_path / "c") < 8192
    found = torch.load(tmp_path / "c", weights_only=True)
    assert torch.equal(found["b"], base[150:300])
    assert found["b"].untyped_storage().nbytes() == 200 * 8


def test_a_tensor_with_gaps_alone_becomes_row_major_and_says_so(tmp_path: pathlib.Path) -> None:
    torch.save({"g": torch.nn.Parameter(torch.randn(1000, 1000)[:, 3]), "h": torch.ones(3)}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert report.changed == ("a tensor that was strided otherwise became row-major: g",)
    found = torch.load(tmp_path / "b", weights_only=True)
    assert (type(found["g"]), found["g"].stride()) == (torch.nn.Parameter, (1,))
    assert os.path.getsize(tmp_path / "b") < 16384


def test_what_an_item_of_dcp_pickles_keeps_its_types(tmp_path: pathlib.Path) -> None:
    base = torch.arange(6.0)
    keyed = {(1, 2): Counts({(1,): 4})}
    pair = (torch.nn.Parameter(torch.ones(3)), Counts(x=1), base[:4], base[2:], keyed)
    state = {"pair": pair, "layout": torch.strided, "w": torch.nn.Parameter(base)}
    torch.save(state, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "dcp", to="dcp")
    assert "a Parameter became a tensor: w" in report.changed
    assert not any("Counter" in said or "layout" in said for said in report.changed)
    report = asyncckpt.convert(tmp_path / "dcp", tmp_path / "b", to="torch")
    assert report.changed == ()
    found = torch.load(tmp_path / "b", weights_only=True)
    assert found["pair"][4] == keyed
    assert type(found["pair"][4][1, 2]) is Counts
    assert found["layout"] is torch.strided
    assert_same_tensor(found["pair"][0], pair[0], "pair.0")
    assert found["pair"][1] == pair[1]
    assert found["pair"][2].data_ptr() + 8 == found["pair"][3].data_ptr()
    assert type(found["w"]) is torch.Tensor


def test_a_flipped_bit_of_shared_elements_is_an_error(tmp_path: pathlib.Path) -> None:
    base = torch.arange(5000.0)
    torch.save({"a": base[:3000], "b": base[2000:]}, tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    at = data.index(base[2500:2510].numpy().tobytes())
    data[at] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert os.listdir(tmp_path) == ["a"]


# ---- containers


def containers_of(value: Any) -> list[Any]:
    """Every dict and list below a value, as often as it stands there."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    found = [value] if isinstance(value, (dict, list, set)) else []
    return found + [container for member in members for container in containers_of(member)]


def same_objects(containers: list[Any]) -> list[int]:
    """For each the place of the first that is the same object."""
    return [next(n for n, other in enumerate(containers) if other is one) for one in containers]


_MEMBERS = st.lists(st.integers(0, 9), max_size=4)
_CONTAINERS = st.lists(st.tuples(st.sampled_from("ldoc"), _MEMBERS), min_size=1, max_size=6)


@given(containers=_CONTAINERS, chosen=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_any_containers_that_are_one_stay_one(containers: Any, chosen: Any, tmp_path_factory: Any) -> None:
    root, made = tmp_path_factory.mktemp("x"), list[Any]()
    for kind, numbers in containers:
        members: list[Any] = [made[n % len(made)] for n in numbers] if made else []
        if kind == "l":
            made.append([torch.ones(2), *members])  # of plain values alone it would be one leaf
        elif kind == "c":
            made.append(Counts({f"k{n}": n for n in numbers}))
        else:
            kept: dict[str, Any] = collections.OrderedDict() if kind == "o" else {}
            made.append(kept)
            kept.update({f"m{n}": member for n, member in enumerate(members)})
    state = {f"s{n}": made[place % len(made)] for n, place in enumerate(chosen)}
    torch.save(state, root / "a")
    report = asyncckpt.convert(root / "a", root / "b", to="torch")
    assert report.changed == ()
    found = torch.load(root / "b", weights_only=True)
    assert list(map(type, containers_of(found))) == list(map(type, containers_of(state)))
    assert same_objects(containers_of(found)) == same_objects(containers_of(state))


def apart(report: Any) -> list[str]:
    said = "containers that were one object are stored apart: "
    return [text.removeprefix(said) for text in report.changed if text.startswith(said)]


def test_containers_that_cannot_stay_one_are_named(tmp_path: pathlib.Path) -> None:
    once, plain, few = {"q": 1, "w": torch.ones(2)}, [1, 2], {3}
    state = {"a": once, "b": once, "p": plain, "t": (plain, plain), "n": [plain, plain], "f": few, "g": few}
    torch.save(state, tmp_path / "a")
    assert apart(asyncckpt.convert(tmp_path / "a", tmp_path / "torch", to="torch")) == ["n, p, t"]
    found = torch.load(tmp_path / "torch", weights_only=True)
    assert found["a"] is found["b"]
    assert found["f"] is found["g"]
    for to in ("asyncckpt", "dcp"):
        assert apart(asyncckpt.convert(tmp_path / "a", tmp_path / to, to=to)) == ["a, b, f, g, n, p, t"]
    assert not apart(asyncckpt.convert(tmp_path / "a", tmp_path / "st", to="safetensors", partial=True))
    # One that was chosen alone is apart from nothing.
    assert not apart(asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="asyncckpt", keys=["a", "f"]))


def test_what_a_choice_or_new_names_part_is_several_objects(tmp_path: pathlib.Path) -> None:
    once = {"q": 1, "w": torch.ones(2)}
    torch.save({"a": once, "b": once, "c": once}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch", keys=["a.q", "b", "c"])
    assert apart(report) == ["a, b, c"]
    found = torch.load(tmp_path / "b", weights_only=True)
    assert [list(found[name]) for name in "abc"] == [["q"], ["q", "w"], ["q", "w"]]
    assert found["b"] is found["c"]
    asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch", key_map={"a.q": "a.z"})
    found = torch.load(tmp_path / "c", weights_only=True)
    assert sorted(found["a"]) == ["w", "z"]
    assert found["b"] is found["c"]
    assert sorted(found["b"]) == ["q", "w"]


@pytest.mark.parametrize("to", ["torch", "asyncckpt", "dcp"])
def test_containers_that_new_names_part_are_named_as_in_the_source(to: str, tmp_path: pathlib.Path) -> None:
    once, plain, odd = {"w": torch.ones(2), "n": 1}, [1, 2], [torch.strided, 1]
    state = {"model": {"a": once, "b": once, "l": [plain, plain]}, "o": {"x": once}, "u": odd, "v": odd, "z": [odd, 3]}
    torch.save(state, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to, key_map=lambda fqn: fqn.removeprefix("model."))
    assert apart(report) == ["model.a, model.b, model.l, o.x, u, v, z"]


def test_empty_containers_that_are_stored_apart_are_named(tmp_path: pathlib.Path) -> None:
    empty: dict[str, Any] = {}
    torch.save({"a": empty, "b": empty, "c": {}}, tmp_path / "a")
    assert apart(asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="asyncckpt")) == ["a, b"]
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "c", to="torch").changed == ()
    found = torch.load(tmp_path / "c", weights_only=True)
    assert found["a"] is found["b"]
    assert found["a"] is not found["c"]


def test_looking_for_what_was_one_takes_no_more_than_a_look_at_each(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, looks = {"w": torch.ones(2)}, list[int]()
    nodes = shared_containers._nodes

    def counted(*arguments: Any) -> Any:
        for found in nodes(*arguments):
            looks.append(1)
            yield found

    monkeypatch.setattr(shared_containers, "_nodes", counted)
    torch.save({"s": {str(n): n for n in range(500)}, "a": once, "b": once}, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    assert 500 < len(looks) < 1500


def test_containers_in_a_tuple_of_dcp_stay_one(tmp_path: pathlib.Path) -> None:
    once = {"q": 1}
    torch.save({"t": (once, once, torch.ones(2)), "v": {"s": set()}}, tmp_path / "a")
    assert asyncckpt.convert(tmp_path / "a", tmp_path / "dcp", to="dcp").changed == ()
    assert asyncckpt.convert(tmp_path / "dcp", tmp_path / "b", to="torch").changed == ()
    found = torch.load(tmp_path / "b", weights_only=True)
    assert found["t"][0] is found["t"][1]


def test_each_tuple_of_dcp_holds_its_own_elements_alone(tmp_path: pathlib.Path) -> None:
    flat = torch.arange(1 << 16).float()
    state = {f"p{n}": (flat[n * 100 : n * 100 + 100],) for n in range(20)}
    torch.save({**state, "all": (flat,), "two": (flat[:10], flat[5:20])}, tmp_path / "a")
    report = asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp", max_shard_bytes=flat.nbytes)
    sizes = [path.stat().st_size for path in (tmp_path / "b").glob("*.distcp")]
    assert sum(sizes) < flat.nbytes + 22 * 2000
    assert len(sizes) == 3, "those before the largest, it, and those behind it"
    assert any(said.startswith("views of the same elements are stored apart: all.0, p0.0") for said in report.changed)
    torch.save({"two": (flat[:10], flat[5:20])}, tmp_path / "c")
    assert asyncckpt.convert(tmp_path / "c", tmp_path / "d", to="dcp").changed == ()
    report = asyncckpt.convert(tmp_path / "d", tmp_path / "e", to="asyncckpt")
    assert "views of the same elements are stored apart: two.0, two.1" in report.changed


def _without_counters(value: Any) -> Any:
    return dict(value) if type(value) is Tally else value


def _broken_node(kind: str) -> Callable[[TorchImage, Any], None]:
    whole = TorchImage._node

    def node(image: TorchImage, node: Any) -> None:
        if node[0] == "V":
            view = node[1]
            ref, found = view.saved.ref, view
            if kind == "parameter" and ref.is_parameter:
                found = view._replace(saved=view.saved._replace(ref=dataclasses.replace(ref, is_parameter=False)))
            elif kind == "gradients" and ref.requires_grad:
                found = view._replace(saved=view.saved._replace(ref=dataclasses.replace(ref, requires_grad=False)))
            elif kind == "stride" and len(view.stride) == 2:
                found = view._replace(stride=view.stride[::-1])
            elif kind == "offset" and view.offset:
                found = view._replace(offset=view.offset - 1)
            elif kind == "object":
                found = view._replace(saved=view.saved._replace(ref=dataclasses.replace(ref)))
                _ALIVE.append(found)
            node = ("V", found)
        elif kind == "counter" and node[2:] == (("Counter",),):
            node = ("d", node[1])
        elif kind == "container" and node[0] == "S":
            node = node[2]
        whole(image, node)

    return node


_ALIVE: list[Any] = []
"""What is written is told apart by identity."""


@pytest.mark.parametrize(
    "kind", ["parameter", "gradients", "stride", "offset", "object", "counter", "container", "value"]
)
def test_what_was_written_otherwise_is_found_before_it_is_in_place(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = torch.arange(16.0).reshape(4, 4)
    tied = torch.nn.Parameter(torch.ones(2))
    state = {"a": base, "b": base[1:, 1:], "c": Counts("xy"), "k": {1j: Counts("z")}, "p": tied, "q": tied}
    state["d"] = state["e"] = {"x": 1}
    torch.save(state, tmp_path / "a")
    if kind == "value":
        written_as = torch_image._written_as
        monkeypatch.setattr(torch_image, "_written_as", lambda value: written_as(_without_counters(value)))
    monkeypatch.setattr(TorchImage, "_node", _broken_node(kind))
    with pytest.raises(CorruptCheckpointError, match=r"is not what it was in the source's pickle|is tied no more"):
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    assert os.listdir(tmp_path) == ["a"]
