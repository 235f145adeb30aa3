"""From `torch.save` to `torch.save`, whatever the views and containers: what is kept, and what is listed as lost."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import states
import torch

import asyncckpt

pytest.importorskip("numpy")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

Counts = collections.Counter
VIEWS = "views of the same elements are stored apart"
SHARED = "containers that were one object are stored apart"


def listed(report: Any, said: str) -> set[str]:
    """The names that a report lists behind a sentence."""
    found = [text.removeprefix(f"{said}: ") for text in report.changed if text.startswith(f"{said}: ")]
    return {name for names in found for name in names.split(", ")}


def assert_same_values(found: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    assert type(found) is torch.Tensor, name
    assert not found.requires_grad, name
    assert found.is_contiguous(), name
    states.assert_same(found, tensor.detach().clone(memory_format=torch.contiguous_format), name)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of a tensor's elements."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + ((last + 1) * tensor.itemsize if tensor.numel() else 0)


_SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3)
_DTYPES = [torch.float32, torch.float64, torch.uint8, torch.bfloat16, torch.uint16, torch.complex128]
_VIEWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), _SHAPES, st.sampled_from("tpr")), max_size=9)


@given(dtypes=st.lists(st.sampled_from(_DTYPES), min_size=4, max_size=4), views=_VIEWS, older=st.booleans())
def test_any_views_of_any_storages_have_their_values_and_are_listed(
    dtypes: Any, views: Any, older: bool, tmp_path_factory: Any
) -> None:
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
    found = torch.load(path / "b", weights_only=True)
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert_same_values(found[name], tensor, name)
        if name.endswith(" again"):
            assert found[name] is found[name.removesuffix(" again")]
    shares = {
        name
        for name, tensor in state.items()
        for other, view in state.items()
        if max(span_of(tensor)[0], span_of(view)[0]) < min(span_of(tensor)[1], span_of(view)[1])
        and found[name].data_ptr() != found[other].data_ptr()
    }
    assert shares <= listed(report, VIEWS), "and what lies between them"
    assert listed(report, VIEWS) <= set(state)
    if not shares:
        assert not listed(report, VIEWS)


_MEMBERS = st.lists(st.integers(0, 9), max_size=4)
_CONTAINERS = st.lists(st.tuples(st.sampled_from("ldoc"), _MEMBERS), min_size=1, max_size=6)


def containers_of(value: Any) -> list[Any]:
    """Every dict and list below a value, as often as it stands there."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    found = [value] if isinstance(value, (dict, list, set)) else []
    return found + [container for member in members for container in containers_of(member)]


@given(containers=_CONTAINERS, chosen=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_any_containers_keep_their_types_and_shared_ones_are_listed(
    containers: Any, chosen: Any, tmp_path_factory: Any
) -> None:
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
    found = torch.load(root / "b", weights_only=True)
    assert list(map(type, containers_of(found))) == list(map(type, containers_of(state)))
    everything = containers_of(state)
    assert bool(listed(report, SHARED)) == (len({id(one) for one in everything}) < len(everything))
    assert len(report.changed) == bool(listed(report, SHARED))
