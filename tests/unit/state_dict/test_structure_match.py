"""The quick comparison with a plan: it takes apart what `flatten` would, exactly so, or says that it cannot."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
import states
import torch

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.planning.planner import PlanCache, signature_of
from asyncckpt.state_dict.flatten import HOIST_NBYTES, Flattened, flatten
from asyncckpt.state_dict.structure_match import flatten_along
from tests import composite_samples


def assert_equal_parts(found: Flattened, expected: Flattened) -> None:
    assert found.tree == expected.tree
    assert len(found.tensors) == len(expected.tensors)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one is other or states.bits_of(one) == states.bits_of(other)
    assert len(found.objects) == len(expected.objects)
    for left, right in zip(found.objects, expected.objects, strict=True):
        assert left is right or left == right


def check(state: Any, changed: Any) -> bool:
    """Whether `changed` matches the plan of `state`; proves that a match is what `flatten` says."""
    found = flatten_along(*signature_of(flatten(state)), changed)
    try:
        expected = flatten(changed)
    except UnsupportedLeafError:
        assert found is None
        return False
    if found is not None:
        assert_equal_parts(found, expected)
    return found is not None


def test_the_same_structure_matches() -> None:
    state = states.every_leaf()
    for name in ("conj", "neg"):  # `flatten` resolves these
        del state["tensors"][name]
    del state["tied"]["row"]
    del state["tensors"]["narrowed"]
    assert check(state, state)


def test_random_structures_match_themselves_or_are_left_to_flatten(rng: random.Random) -> None:
    matched = 0
    for _ in range(200):
        state = states.StateMaker(rng).state()
        matched += check(state, state)
    assert matched > 50, "the quick way is hardly ever taken"


def test_a_match_after_any_mutation_is_what_flatten_says(rng: random.Random) -> None:
    matched = 0
    for _ in range(100):
        maker = states.StateMaker(rng)
        state = maker.state()
        for _ in range(8):
            matched += check(state, maker.mutated(state))
    assert matched > 20, "the mutations change too much to test anything"


BASE = torch.arange(6.0)
EMPTY = torch.empty(0)


def a_state() -> dict[Any, Any]:
    return {
        "w": torch.zeros(2, 3),
        "b": torch.ones(3),
        "n": {"lr": 0.1, 0: [1, 2]},
        "o": OrderedDict(x=torch.ones(1)),
        "s": [torch.ones(2), 5],
        "h": bytes(HOIST_NBYTES),
    }


MISFITS: dict[str, dict[Any, Any]] = {
    "another key": {**{k: v for k, v in a_state().items() if k != "b"}, "c": torch.ones(3)},
    "one key more": {**a_state(), "c": 1},
    "one key less": {k: v for k, v in a_state().items() if k != "h"},
    "another order": dict(reversed(a_state().items())),
    "another shape": {**a_state(), "w": torch.zeros(3, 2)},
    "another dtype": {**a_state(), "w": torch.zeros(2, 3, dtype=torch.float64)},
    "an object for a tensor": {**a_state(), "b": 1.0},
    "a tensor for an object": {**a_state(), "n": {"lr": torch.tensor(0.1), 0: [1, 2]}},
    "an int key as text": {**a_state(), "n": {"lr": 0.1, "0": [1, 2]}},
    "a bool key": {**a_state(), "n": {"lr": 0.1, False: [1, 2]}},
    "a dict for an OrderedDict": {**a_state(), "o": {"x": torch.ones(1)}},
    "an OrderedDict for a dict": {**a_state(), "n": OrderedDict({"lr": 0.1, 0: [1, 2]})},
    "a tuple for a list": {**a_state(), "s": (torch.ones(2), 5)},
    "a longer list": {**a_state(), "s": [torch.ones(2), 5, 6]},
    "a flat list for a nested one": {**a_state(), "s": [1, 5]},
    "a nested list for a flat one": {**a_state(), "n": {"lr": 0.1, 0: [1, torch.ones(1)]}},
    "longer hoisted bytes": {**a_state(), "h": bytes(HOIST_NBYTES + 1)},
    "hoisted bytes for an object": {**a_state(), "n": {"lr": bytes(HOIST_NBYTES), 0: [1, 2]}},
    "small bytes for hoisted ones": {**a_state(), "h": b"x"},
    "a sparse tensor": {**a_state(), "b": torch.ones(3).to_sparse()},
    "a meta tensor": {**a_state(), "b": torch.ones(3, device="meta")},
    "a negated view": {**a_state(), "b": torch.zeros(3, dtype=torch.complex64).conj().imag},
    "metadata made": {**a_state(), "o": torch.nn.ParameterList([torch.ones(1)]).state_dict()},
}


@pytest.mark.parametrize("what", sorted(MISFITS))
def test_another_structure_does_not_match(what: str) -> None:
    assert check(a_state(), a_state())
    assert not check(a_state(), MISFITS[what])


class Odd(torch.Tensor):
    """A tensor of another kind."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("what", ["nested", "subclass", "freed", "view of freed"])
def test_what_flatten_refuses_does_not_match(what: str) -> None:
    if what == "nested":
        bad = torch.nested.nested_tensor([torch.ones(3)])
    elif what == "subclass":
        bad = torch.ones(3).as_subclass(Odd)
    else:
        bad = torch.ones(5)[2:] if what == "view of freed" else torch.ones(3)  # a freed view's `data_ptr()` is not 0
        bad.untyped_storage().resize_(0)
    matched = check(a_state(), {**a_state(), "b": bad})  # apart: pytest would print a tensor without memory
    assert not matched


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([BASE, BASE.clone()], [BASE, BASE]),
        ([BASE, BASE], [BASE, BASE.clone()]),
        ([BASE, BASE], [BASE, BASE.detach()]),
        ([BASE, BASE], [BASE, BASE.view(2, 3)]),
        ([BASE, BASE.clone()], [BASE, BASE.detach()]),
        ([BASE[:2], BASE.clone()], [BASE[:2], BASE]),
        ([EMPTY, torch.empty(0)], [EMPTY, EMPTY]),
        ([EMPTY, EMPTY], [EMPTY, torch.empty(0)]),
        ([EMPTY, EMPTY], [EMPTY, EMPTY]),
    ],
)
def test_aliases_made_and_broken_are_noticed(before: list[Any], after: list[Any]) -> None:
    check(dict(enumerate(before)), dict(enumerate(after)))


def test_a_conjugated_alias_is_no_alias() -> None:
    tensor = torch.ones(3, dtype=torch.complex64)
    assert not check({"a": tensor, "b": tensor}, {"a": tensor, "b": tensor.conj()})


def test_plans_are_made_once_per_structure() -> None:
    cache = PlanCache(files_per_rank=1)
    first, _ = cache.plan_for(a_state())
    second, flat = cache.plan_for(a_state())
    assert first is second
    assert flat.tree is first.signature[0]
    other, _ = cache.plan_for({"w": torch.ones(1)})
    assert other is not first
    assert cache.plan_for(a_state())[0] is first
    assert cache.n_plans_made == 2


def test_the_plan_used_last_survives_many_others() -> None:
    cache = PlanCache(files_per_rank=1)
    first, _ = cache.plan_for(a_state())
    for n in range(3 * PlanCache.MAX_PLANS):
        cache.plan_for({"t": torch.ones(n)})
        assert cache.plan_for(a_state())[0] is first
    assert len(cache._plans) <= PlanCache.MAX_PLANS


def test_a_plan_is_found_again_when_the_quick_way_cannot_decide() -> None:
    state = {"a": torch.ones(2, dtype=torch.complex64).conj()}
    cache = PlanCache(files_per_rank=1)
    assert cache.plan_for(state)[0] is cache.plan_for(state)[0]
    assert cache.n_plans_made == 1


def _with_composites(seed: int) -> dict[str, Any]:
    first = composite_samples.blocks(seed)
    sparse = torch.eye(3).to_sparse()
    return {
        "a": first,
        "tied": [first, composite_samples.pair(seed)],
        "sparse": {"x": sparse, "y": sparse},
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, seed, torch.qint8),
        "plain": torch.ones(2),
    }


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_composite_tensors_match_by_class_and_components_whatever_their_context() -> None:
    state = _with_composites(0)
    assert check(state, state) and check(state, _with_composites(5))
    tree = flatten(state)
    found = flatten_along(*signature_of(tree), _with_composites(5))
    assert found is not None and found.objects != tree.objects  # the contexts are those of the moment
    for change in (
        {"a": composite_samples.one_scale(0)},
        {"a": composite_samples.blocks(0, (6, 16))},
        {"a": torch.ones(12, 8)},
        {"tied": [composite_samples.blocks(0), composite_samples.pair(0)]},
        {"sparse": {"x": torch.ones(3, 3).to_sparse(), "y": state["sparse"]["y"]}},
        {"quantized": torch.ones(3)},
        {"plain": composite_samples.blocks(0)},
    ):
        assert not check(state, {**state, **change})
