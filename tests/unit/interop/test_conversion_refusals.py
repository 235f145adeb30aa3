"""What a kind of checkpoint cannot hold is refused by name, or left out where that is asked for."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable
from typing import Any

import foreign_samples
import pytest
import torch
from conversions import KINDS, Workdir
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncckpt
from asyncckpt.dtypes import DTYPES, SUB_BYTE
from asyncckpt.errors import DuplicateNameError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.state_tree import MAX_KEY_CHARS

np = pytest.importorskip("numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")

TENSORS = ("safetensors", "hf")
PICKLED = ("torch", "dcp")
LONGEST_INT = (1 << 2039) - 1
LONG_NAME = "n" * (MAX_KEY_CHARS + 1)
TIED = torch.arange(3.0)


def safetensors_file(tensors: dict[str, torch.Tensor]) -> Callable[[Workdir], None]:
    return lambda work: foreign_samples.save_safetensors(tensors, work / "a")


def of_torch(state: Any) -> Callable[[Workdir], None]:
    return lambda work: work.torch(state) and None


def of_ours(state: Any) -> Callable[[Workdir], None]:
    return lambda work: work.ours(state) and None


# what writes the source, kinds of target, words of the error, what is left out and what stays
Refused = tuple[Callable[[Workdir], None], tuple[str, ...], tuple[str, ...], set[str], list[Any]]
REFUSED: dict[str, Refused] = {
    "no tensors": (
        of_ours({"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128), "step": 3, "name": "x"}),
        TENSORS,
        ("c: ", "complex128", "step: ", "name: ", "partial"),
        {"c", "step", "name"},
        ["w"],
    ),
    "classes that torch.load does not allow": (
        of_ours({"w": torch.ones(2), "when": datetime.date(2024, 1, 1), "cut": slice(1)}),
        PICKLED,
        ("when: ", "cut: "),
        {"when", "cut"},
        ["w"],
    ),
    "numpy scalars": (
        of_torch({"lr": np.float64(1.5), "deep": [(np.int64(1),)], "x": torch.ones(1)}),
        PICKLED,
        ("numpy.scalar", "lr"),
        {"lr", "deep"},
        ["x"],
    ),
    "ints that torch.load does not read": (
        of_torch({"fits": LONGEST_INT, "least": -LONGEST_INT, "long": LONGEST_INT + 1}),
        PICKLED,
        ("1 of the leaves:\n  long: ", "an int of 256 bytes"),
        {"long"},
        ["fits", "least"],
    ),
    "a name that is too long": (
        safetensors_file({LONG_NAME: torch.ones(1), "w": torch.ones(2)}),
        ("asyncckpt", "dcp", "torch"),
        ("characters",),
        {LONG_NAME},
        ["w"],
    ),
    "one of several names of a tensor": (
        of_torch({"w@rank3": TIED, "b": TIED, "c": TIED}),
        ("asyncckpt",),
        ("w@rank3",),
        {"w@rank3"},
        ["b", "c"],
    ),
    "a name that is metadata": (
        of_torch({"__metadata__": TIED, "b": TIED, "c": TIED}),
        ("asyncckpt", "safetensors"),
        ("__metadata__",),
        {"__metadata__"},
        ["b", "c"],
    ),
    "a value that is the whole file": (of_torch({1j: 5}), TENSORS, (), {""}, []),
    "a dict of tensors that is the whole file": (of_torch({1j: torch.ones(1)}), KINDS, (), {""}, []),
}


@pytest.mark.parametrize(("what", "to"), [(what, to) for what, row in REFUSED.items() for to in row[1]])
def test_what_a_target_cannot_hold_is_refused_by_name_and_left_out_if_told(what: str, to: str, work: Workdir) -> None:
    write, _, words, left_out, stays = REFUSED[what]
    write(work)
    with pytest.raises((UnsupportedLeafError, UnsupportedFormatError)) as caught:
        work.convert(to)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert work.names() == ["a"]
    assert set(work.convert(to, partial=True).left_out) == left_out
    assert list(work.load()) == stays


@pytest.mark.parametrize("key", [1 << 70, -(1 << 64), 2**64, "\ud800"])
@pytest.mark.parametrize(
    "value", [torch.ones(1), {}, [[], {}], collections.OrderedDict(), ({},), {"x": {}}], ids=lambda value: f"{value}"
)
def test_a_key_that_ours_has_not_is_refused_also_where_nothing_is_in_it(key: Any, value: Any, work: Workdir) -> None:
    work.torch({key: value, "a": torch.ones(2)})
    with pytest.raises(UnsupportedLeafError, match="its key"):
        work.convert("asyncckpt")
    left_out = work.convert("asyncckpt", partial=True).left_out
    assert left_out and all(name.startswith(str(key)) for name in left_out)
    assert list(work.load()) == ["a"]


@pytest.mark.parametrize("to", TENSORS)
def test_a_name_that_is_no_utf_8_is_refused(to: str, work: Workdir) -> None:
    work.torch({"a": {"\ud800": torch.ones(1)}})
    with pytest.raises(UnsupportedLeafError, match="UTF-8"):
        work.convert(to)
    assert work.names() == ["a"]


def test_a_key_map_that_makes_a_name_too_long_is_refused(work: Workdir) -> None:
    work.torch({"w": torch.ones(1)})
    with pytest.raises(UnsupportedLeafError, match="characters"):
        work.convert("torch", key_map={"w": LONG_NAME})


@pytest.mark.parametrize("to", ["asyncckpt", "torch", "dcp"])
def test_a_key_that_is_too_long_costs_its_own_leaf_alone(to: str, work: Workdir) -> None:
    long = "k" * (MAX_KEY_CHARS + 1)
    inner = collections.OrderedDict([("y", 2), (long, [torch.ones(3)]), (long[1:] + "x!", 1)])
    work.torch({"w": torch.ones(2), long: torch.ones(1), "in": inner})
    first = f"{long[:80]}... (key 1, {len(long)} characters)"
    names = (first, f"in.{first}", f"in.{long[:80]}... (key 2, {len(long) + 1} characters)")
    with pytest.raises(UnsupportedFormatError, match="too long") as caught:
        work.load("a")
    assert all(name in str(caught.value) for name in names)
    found = work.load("a", keys=["w", "in.y"])
    assert torch.equal(found["w"], torch.ones(2)) and found["in"] == {"y": 2}
    with pytest.raises(UnsupportedFormatError, match="3 of the leaves"):
        work.convert(to)
    assert work.convert(to, partial=True).left_out == names
    assert work.load()["in"] == {"y": 2}


def test_two_keys_that_begin_alike_stay_two_leaves(work: Workdir) -> None:
    long = "k" * (MAX_KEY_CHARS + 1)
    shown = f"{long[:80]}... (key 1, {len(long)} characters)"
    work.torch({shown: torch.ones(2), long: torch.ones(1)})
    assert work.convert("torch", partial=True).left_out == (shown + "'",)
    assert list(torch.load(work / "b", weights_only=True)) == [shown]


def test_all_names_are_in_an_error(work: Workdir) -> None:
    names = [f"p{n}" for n in range(300)]
    work.torch({name: name for name in names})
    with pytest.raises(UnsupportedLeafError) as caught:
        work.convert("safetensors")
    assert all(f"  {name}: " in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"1": torch.ones(1), 1: {"k": torch.ones(2)}}, "1"),
        ({"a": {"1": torch.ones(1), 1: {"k": torch.ones(2)}}}, "a.1"),
        ({"1": {"a": torch.ones(1)}, 1: {"b": torch.ones(2)}}, "1"),
        ({"a": {"1": [(), []], 1: ({},)}}, "a.1"),
        ({1: {}, "1": torch.ones(1)}, "1"),
    ],
)
def test_keys_that_become_one_text_in_dcp_are_refused(state: Any, names: str, work: Workdir) -> None:
    work.torch(state)
    with pytest.raises(DuplicateNameError, match="are the same in DCP directories") as caught:
        work.convert("dcp")
    assert caught.value.fqn == names  # type: ignore[attr-defined]
    assert work.names() == ["a"]
    work.convert("torch")


@pytest.mark.parametrize("to", TENSORS)
@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_that_safetensors_has_is_written_as_its_own_tools_read_it(
    name: str, to: str, work: Workdir
) -> None:
    dtype = getattr(torch, name)
    tensor = torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype).reshape(3, -1)
    state = {"w": tensor, "empty": tensor[:0], "plain": torch.ones(3)}
    work.ours({**state, "none": tensor[0, 0]})
    if name in ("complex32", "complex128", *SUB_BYTE):
        with pytest.raises(UnsupportedLeafError, match=rf"no tensors of dtype {name}\n") as caught:
            work.convert(to)
        assert "w: " in str(caught.value) and "none: " in str(caught.value)
        return
    if name == "float4_e2m1fn_x2":
        with pytest.raises(UnsupportedLeafError, match=r"none: .*without a dimension"):
            work.convert(to)
    else:
        state["none"] = tensor[0, 0]
    assert work.convert(to, keys=list(state)).changed == ()
    stock = safetensors_torch.load_file(work / ("b/model.safetensors" if to == "hf" else "b"))
    for found in (stock, work.load()):
        assert found.keys() == state.keys()
        for key, wanted in state.items():
            assert (found[key].dtype, found[key].shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(found[key].reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    work.convert("asyncckpt", "b", "c")
    assert work.load("c")["w"].dtype is dtype


def test_a_file_that_is_one_leaf_can_be_chosen_and_renamed(work: Workdir) -> None:
    work.torch({1j: 5})
    work.convert("torch", key_map={"": "x.y"})
    assert work.load() == {"x.y": {1j: 5}}
    work.convert("torch", target="c", keys=[""])
    assert work.load("c") == {1j: 5}


@pytest.mark.parametrize("to", PICKLED)
def test_where_torch_makes_no_real_tensors_nothing_is_written(to: str, work: Workdir) -> None:
    work.torch({"a": torch.arange(10.0)})
    with FakeTensorMode(), pytest.raises(UnsupportedLeafError, match="Leave FakeTensorMode"):
        work.convert(to)
    assert work.names() == ["a"]


def test_both_reasons_are_named_at_once(work: Workdir) -> None:
    work.torch({"w": torch.ones(1), "step": 7, "args": collections.deque([1])})
    with pytest.raises(UnsupportedFormatError) as caught:
        work.convert("safetensors")
    assert "step: " in str(caught.value) and "args: collections.deque" in str(caught.value)
    assert set(work.convert("safetensors", partial=True).left_out) == {"step", "args"}
    assert list(asyncckpt.load(work / "b")) == ["w"]
