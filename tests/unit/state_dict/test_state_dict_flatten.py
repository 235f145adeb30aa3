"""A state dict taken apart and put together again: types, order, aliases and bits as they were."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import random
from collections import ChainMap, OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import pytest
import states
import torch

from asyncckpt import ShardedSlice
from asyncckpt.errors import DuplicateNameError, UnsupportedLeafError
from asyncckpt.format import state_tree as trees
from asyncckpt.format.structure import decode_structure
from asyncckpt.planning.planner import PlanCache
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.state_dict.leaf_codecs import decode_leaf, encode_leaves
from asyncckpt.state_dict.unflatten import unflatten
from tests import composite_samples

Pair = namedtuple("Pair", ["left", "right"])


def rebuilt(state: Any) -> Any:
    """Take `state` apart, send tree and objects the way that they go, and put it together."""
    flat = flatten(state)
    raw = json.loads(json.dumps(encode_leaves(flat), allow_nan=False))
    tree = trees.checked(msgpack.unpackb(msgpack.packb(flat.tree), strict_map_key=False), len(flat.tensors), len(raw))
    return unflatten(tree, [copy_of(t) for t in flat.tensors], [decode_leaf(r, no_pickle) for r in raw])


def no_pickle(kind: str, data: bytes) -> Any:
    """Nothing here was pickled."""
    raise AssertionError(kind)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(bytearray(states.bits_of(tensor)), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def test_everything_comes_back_as_it_was() -> None:
    state = states.every_leaf()
    states.assert_same(rebuilt(state), state)


def test_random_structures_come_back_as_they_were(rng: random.Random) -> None:
    for _ in range(150):
        state = states.StateMaker(rng).state()
        states.assert_same(rebuilt(state), state)


def test_module_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    found = rebuilt({"model": state})["model"]
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    torch.nn.Linear(2, 3).load_state_dict(found)


def test_metadata_that_is_no_mapping_comes_back_as_it_was() -> None:
    state: OrderedDict[str, Any] = OrderedDict(a=1)
    state._metadata = 5  # type: ignore[attr-defined]
    assert rebuilt(state)._metadata == 5


def test_metadata_that_cannot_be_stored_is_named() -> None:
    state: OrderedDict[str, Any] = OrderedDict(a=1)
    state._metadata = {"": {"version": object()}}  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeafError, match=r"'model\._metadata'"):
        encode_leaves(flatten({"model": state, "b": 2}))


def test_mappings_become_dict_and_namedtuples_become_tuple() -> None:
    class Lazy(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            return iter("ab")

        def __len__(self) -> int:
            return 2

    state = {"chain": ChainMap({"a": 1}, {"b": 2}), "lazy": Lazy(), "pair": Pair(torch.ones(1), 2), "flat": Pair(1, 2)}
    found = rebuilt(state)
    assert {k: type(v) for k, v in found.items()} == {"chain": dict, "lazy": dict, "pair": tuple, "flat": tuple}
    assert found["lazy"] == {"a": 1, "b": 1}
    assert found["flat"] == (1, 2)


def test_str_and_int_subclasses_as_keys_become_plain() -> None:
    class Name(str):
        __slots__ = ()

    class Number(int):
        pass

    found = rebuilt({Name("a"): 1, Number(7): 2})
    assert [(type(k), k) for k in found] == [(str, "a"), (int, 7)]


def test_a_tensor_under_several_names_is_stored_once() -> None:
    tensor = torch.ones(3)
    flat = flatten({"a": tensor, "b": {"c": tensor.detach()}, "d": tensor[:2], "e": tensor.clone()})
    assert len(flat.tensors) == 3
    assert flat.fqns == ["a", "d", "e"]


def test_views_of_other_dtype_shape_strides_or_sign_are_no_aliases() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.complex64)
    same_address = [tensor, tensor.t(), tensor.view(torch.float32), tensor[:2], tensor.conj(), tensor.view(16)]
    flat = flatten({str(n): t for n, t in enumerate(same_address)})
    assert len(flat.tensors) == len(same_address)


def test_a_hoisted_value_is_a_snapshot_of_its_own() -> None:
    state = {"x": bytes(1 << 17)}
    assert flatten(state).tensors[0].data_ptr() != flatten(state).tensors[0].data_ptr()


# ---- refusals -------------------------------------------------------------------------------------------------------


class Custom:
    """A type that nobody knows."""


class Subclass(torch.Tensor):
    """A tensor of another kind."""


def _view_of_freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    view = tensor[2:]
    tensor.untyped_storage().resize_(0)
    return view


def _view_of_shrunk() -> torch.Tensor:
    tensor = torch.ones(10, 100)
    view = tensor.t()[1::2, 1::2]
    tensor.untyped_storage().resize_(3992)  # up to its last element but one
    return view


def _quint4x2() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4, 4), 1.0, 0, torch.quint4x2)


def _without_components() -> torch.Tensor:
    found = composite_samples.blocks(0)
    found.components = ()
    return found


def _with_a_number() -> torch.Tensor:
    found = composite_samples.blocks(0)
    found.scale = 5
    return found


def _deep(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"d": leaf}
    return leaf


REFUSED = {
    "custom object": Custom,
    "class": lambda: torch.nn.Linear,
    "function": lambda: print,
    "generator": lambda: iter([]),
    "object in a list": lambda: [1, Custom()],
    "object in a set": lambda: {Custom()},
    "part of a packed tensor": lambda: _quint4x2()[1:],
    "context of a subclass": lambda: composite_samples.one_scale(0, note=Custom()),
    "subclass without components": _without_components,
    "component that is no tensor": _with_a_number,
    "component of no memory": lambda: composite_samples.Pair(torch.ones(2, device="meta"), torch.ones(2)),
    "meta": lambda: torch.ones(2, device="meta"),
    "tensor subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "lazy parameter": torch.nn.parameter.UninitializedParameter,
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "freed storage": lambda: states.resized(0),
    "view of freed storage": _view_of_freed,
    "shrunk storage": lambda: states.resized(3999),
    "view of shrunk storage": _view_of_shrunk,
    "shard in shrunk storage": lambda: ShardedSlice(states.resized(3999), (2000,), (0,)),
    "subclass of str": lambda: type("S", (str,), {})("x"),
    "subclass of float": lambda: type("F", (float,), {})(1.0),
}


def store(state: Any) -> None:
    """Do all that a save does before it copies."""
    _, flat = PlanCache(files_per_rank=1).plan_for(state)
    encode_leaves(flat)


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("what", sorted(REFUSED))
def test_unsupported_leaf_is_refused_with_its_path(what: str) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        store({"model": {"layers": [torch.ones(1), {3: REFUSED[what]()}]}})
    assert caught.value.leaf.startswith("model.layers.1.3")
    assert repr(caught.value.leaf) in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("state", [None, 5, [torch.ones(1)], torch.ones(1), "abc", torch.nn.Linear(1, 1)])
def test_a_state_that_is_no_mapping_is_refused(state: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="expected a dict"):
        flatten(state)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 1


UNFORMED: list[Any] = [torch.float32, frozenset({1}), 1j, Colour.RED, Frozen(), math.nan, datetime.date(2024, 1, 1)]
UNFORMED += [(1, math.nan), (1, frozenset())]


@pytest.mark.parametrize("key", UNFORMED, ids=str)
def test_keys_that_have_no_form_are_refused_by_path_and_type(key: Any) -> None:
    for allow_pickle in (False, True):
        with pytest.raises(
            UnsupportedLeafError, match="a key must be a str, an int of 63 bits, a float except NaN, a bool"
        ) as caught:
            flatten({"a": {key: 1}}, allow_pickle=allow_pickle)
        assert caught.value.leaf == f"a.{key!r}"
        assert caught.value.type_name == type(key).__name__


@pytest.mark.parametrize("key", [1 << 20_000, (1, -(1 << 20_000))], ids=["a number", "in a tuple"])
def test_numbers_of_more_digits_than_python_writes_out_are_refused_as_keys(key: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="a key must be a str, an int of 63 bits"):
        flatten({"a": {key: 1}})


@pytest.mark.parametrize("value", [torch.ones(1), {}], ids=["a leaf", "a container without any"])
@pytest.mark.parametrize("key", [1 << 63, -(1 << 63), "x" * 5000, "\ud800"])
def test_keys_that_the_index_cannot_hold_are_refused(key: Any, value: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="out of range"):
        store({"a": {key: value}})


@pytest.mark.parametrize(
    ("make", "said"), [(dict, "inside itself"), (lambda: [torch.ones(1)], "inside itself"), (lambda: [1], None)]
)
def test_cycles_are_refused(make: Any, said: str | None) -> None:
    loop = make()
    loop.append(loop) if isinstance(loop, list) else loop.update(self=loop)
    with pytest.raises(UnsupportedLeafError, match=said):
        store({"x": loop})


@pytest.mark.parametrize("leaf", [1, torch.ones(1), [[[[1]]]], [b"x"]])
def test_what_is_not_too_deep_can_be_read_back_and_the_rest_is_refused(leaf: Any) -> None:
    refused = 0
    for levels in range(40, 90):
        state = _deep(levels, leaf)
        try:
            plan, flat = PlanCache(files_per_rank=1).plan_for(state)
            raw = json.loads(json.dumps(encode_leaves(flat)))
        except UnsupportedLeafError:
            refused += 1
            continue
        assert not refused
        tree = decode_structure(plan.structure).tree
        unflatten(tree, flat.tensors, [decode_leaf(r, no_pickle) for r in raw])
    assert refused


@pytest.mark.parametrize("state", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}, {"a": [torch.ones(1)], "a.0": 2}])
def test_two_leaves_of_one_fqn_are_refused(state: Any) -> None:
    with pytest.raises(DuplicateNameError) as caught:
        store(state)
    assert caught.value.fqn in ("a.b", "1", "a.0")
