"""Conversions that stack, split, join and cast tensors: what comes out equals what torch makes of the source."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from conversions import KINDS, Workdir, read_by_stock_tools

import asyncckpt
from asyncckpt import TensorRule
from asyncckpt.errors import ConfigError, DuplicateNameError, ShapeMismatchError, UnmatchedTensorsError
from asyncckpt.interop import copy_pipeline

pytest.importorskip("numpy")
save_file = pytest.importorskip("safetensors.torch").save_file

N_EXPERTS, WIDTH, INNER = 3, 6, 4

GATE_UP = "{p*}experts.gate_up"
PAIR = ["{p*}experts.{n}.gate.weight", "{p*}experts.{n}.up.weight"]


def stacked(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        f"layers.{layer}.experts.gate_up": torch.randn(N_EXPERTS, 2 * INNER, WIDTH).to(dtype) for layer in range(2)
    } | {"embed": torch.randn(7, WIDTH).to(dtype)}


def separate(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state with a tensor for each expert's gate, and one for its up."""
    found = {name: tensor for name, tensor in state.items() if not name.endswith("gate_up")}
    for name, tensor in state.items():
        if name.endswith("gate_up"):
            for n in range(len(tensor)):
                base = name.removesuffix("gate_up") + str(n)
                gate, up = tensor[n].chunk(2)
                found |= {f"{base}.gate.weight": gate.contiguous(), f"{base}.up.weight": up.contiguous()}
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("source", ["ours", "torch", "dcp"])
def test_experts_are_separated_and_stacked_again(source: str, to: str, work: Workdir) -> None:
    state = stacked()
    getattr(work, source)(state)
    report = work.convert(to, rules=[TensorRule(GATE_UP, PAIR)])
    assert_equal(read_by_stock_tools(to, work / "b"), separate(state))
    assert any(said.startswith("2 tensors became 12 by rules: layers.0.experts.gate_up") for said in report.changed)
    work.convert(to, "b", "c", rules=[TensorRule(PAIR, GATE_UP)])
    assert_equal(read_by_stock_tools(to, work / "c"), state)


Make = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.mark.parametrize(
    ("rule", "state", "make"),
    [
        (
            TensorRule(["q", "k", "v"], "qkv", dim=1),
            {"q": (3, 4), "k": (3, 2), "v": (3, 1)},
            lambda s: {"qkv": torch.cat([s["q"], s["k"], s["v"]], 1)},
        ),
        (
            TensorRule("qkv", ["q", "k", "v"], dim=1),
            {"qkv": (3, 6)},
            lambda s: dict(zip("qkv", s["qkv"].chunk(3, 1), strict=True)),
        ),
        (
            TensorRule("e.{n}", "e", stack_dim=2),
            {f"e.{n}": (2, 3) for n in range(12)},
            lambda s: {"e": torch.stack([s[f"e.{n}"] for n in range(12)], 2)},
        ),
        (
            TensorRule("e", "e.{n}", stack_dim=1),
            {"e": (2, 5, 3)},
            lambda s: {f"e.{n}": s["e"][:, n] for n in range(5)},
        ),
        (
            TensorRule(["{n}.a", "{n}.b"], "ab", dim=1, stack_dim=1),
            {f"{n}.{x}": (2, 1 + i) for n in range(3) for i, x in enumerate("ab")},
            lambda s: {"ab": torch.stack([torch.cat([s[f"{n}.a"], s[f"{n}.b"]], 1) for n in range(3)], 1)},
        ),
        (
            TensorRule("ab", ["{n}.a", "{n}.b"], dim=1, stack_dim=1),
            {"ab": (2, 3, 4)},
            lambda s: {f"{n}.{x}": s["ab"][:, n, 2 * i : 2 * i + 2] for n in range(3) for i, x in enumerate("ab")},
        ),
        (TensorRule("x{rest}", "y{rest}"), {"x1": (2,), "z": (1,)}, lambda s: {"y1": s["x1"], "z": s["z"]}),
        (TensorRule("s.{n}", "s"), {"s.0": (), "s.1": ()}, lambda s: {"s": torch.stack([s["s.0"], s["s.1"]])}),
        (TensorRule("s", "s.{n}"), {"s": (2,)}, lambda s: {"s.0": s["s"][0], "s.1": s["s"][1]}),
    ],
    ids=["join", "split", "stack last", "unstack", "stack pairs", "unstack pairs", "rename", "scalars", "to scalars"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_each_form_of_a_rule_gives_what_torch_does(
    rule: TensorRule, state: dict[str, tuple[int, ...]], make: Make, transposed: bool, work: Workdir
) -> None:
    """Transposed: elements that are not row-major in their file."""
    made = {name: torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape))))) for name, shape in state.items()}
    work.torch(made if transposed else {name: tensor.contiguous() for name, tensor in made.items()})
    work.convert("safetensors", rules=[rule])
    found = read_by_stock_tools("safetensors", work / "b")
    expected = make(made)
    assert_equal(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("source", ["ours", "torch"])
def test_a_made_tensor_may_span_windows(source: str, work: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", 1 << 18)
    state = {"a": torch.randn(1000, 3, 333), "b": torch.randn(3000, 131)}
    getattr(work, source)(state)
    work.convert("hf", rules=[TensorRule("a", "a.{n}", stack_dim=1)], dtype=torch.bfloat16)
    expected = {f"a.{n}": state["a"][:, n] for n in range(3)} | {"b": state["b"]}
    assert_equal(read_by_stock_tools("hf", work / "b"), {k: v.to(torch.bfloat16) for k, v in expected.items()})


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("source", ["ours", "torch", "dcp"])
def test_tensors_of_floating_point_numbers_are_cast_as_torch_does(source: str, to: str, work: Workdir) -> None:
    values = torch.tensor([0.1, -0.0, 1e-45, 3.3e38, float("nan"), float("inf"), 1 + 2**-8, 1 + 3 * 2**-8])
    state = {
        "wide": values.double(),
        "same": values.bfloat16(),
        "half": values.half(),
        "number": torch.tensor(0.3),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "turned": torch.randn(9, 8).T,
    }
    getattr(work, source)(state)
    report = work.convert(to, dtype="bfloat16")
    found = read_by_stock_tools(to, work / "b")
    for name, tensor in state.items():
        expected = tensor if name in ("ids", "mask") else tensor.to(torch.bfloat16)
        states.assert_same(found[name].contiguous(), expected.contiguous(), name)
    assert any(said.startswith("tensors were cast to bfloat16: ") and "same" not in said for said in report.changed)


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_are_stored_in_shards_are_cut_and_joined(cut: int, dtype: torch.dtype, work: Workdir) -> None:
    """Files as PyTorch's HuggingFaceStorageWriter leaves them: of each tensor a shard in each."""
    state = {"a": torch.randn(4, 6, 5), "b.0": torch.randn(3, 4, 7), "b.1": torch.randn(3, 4, 7)}
    (work / "a").mkdir()
    for rank in range(2):
        shards, offsets = {}, {}
        for name, whole in state.items():
            first = whole.shape[cut] // 3
            start, length = (0, first) if rank == 0 else (first, whole.shape[cut] - first)
            shards[name] = whole.narrow(cut, start, length).contiguous()
            offsets[name] = {"saved_offsets": [start if dim == cut else 0 for dim in range(3)]}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        save_file(shards, work / "a" / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", metadata)
    pair = [TensorRule("a", ["x.{n}", "y.{n}"], stack_dim=1), TensorRule("b.{n}", "b", stack_dim=cut)]
    work.convert("safetensors", rules=pair, dtype=dtype)
    expected = {"b": torch.stack([state["b.0"], state["b.1"]], cut)}
    for n in range(6):
        expected[f"x.{n}"], expected[f"y.{n}"] = state["a"][:, n].chunk(2)
    assert_equal(read_by_stock_tools("safetensors", work / "b"), {k: v.to(dtype) for k, v in expected.items()})


def cuts(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """Cut a dimension into at most three ranges, each a start and a length."""
    inner = sorted(rng.sample(range(1, length), min(rng.randrange(3), length - 1))) if length > 1 else []
    edges = [0, *inner, length]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


def save_in_shards(state: dict[str, torch.Tensor], directory: Path, rng: random.Random) -> None:
    """Write files as PyTorch's HuggingFaceStorageWriter does, with each tensor cut at random in every dimension."""
    shards: dict[int, dict[str, torch.Tensor]] = {}
    offsets: dict[int, dict[str, Any]] = {}
    for name, whole in state.items():
        boxes = itertools.product(*(cuts(rng, length) for length in whole.shape))
        for number, box in enumerate(boxes):
            part = whole[tuple(slice(start, start + length) for start, length in box)]
            shards.setdefault(number, {})[name] = part.contiguous()
            offsets.setdefault(number, {})[name] = {"saved_offsets": [start for start, _ in box]}
    directory.mkdir()
    for number, found in shards.items():
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets[number]), "DCP_VERSION": "1.0"}
        save_file(found, directory / f"shard-{number + 1:05d}-model-00001-of-00001.safetensors", metadata)


@pytest.mark.parametrize("number", range(20))
def test_random_rules_of_random_shards_are_undone_by_their_inverse(
    number: int, work: Workdir, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", 1 << 18)
    n_dims, n_parts, is_numbered = rng.randint(1, 3), rng.randint(1, 3), rng.random() < 0.7
    dim, stack_dim = rng.randrange(n_dims), rng.randint(0, n_dims)
    sizes = [rng.randint(1, 40) for _ in range(n_dims)]
    sizes[dim] *= n_parts
    shape = [*sizes[:stack_dim], rng.randint(1, 5), *sizes[stack_dim:]] if is_numbered else sizes
    state = {f"layers.{n}.x": torch.randn(shape) for n in range(2)} | {"other": torch.randn(5)}
    name = "{p*}part{n}.{i}" if is_numbered else "{p*}part{i}"
    names = [name.replace("{i}", f"i{i}") for i in range(n_parts)]
    rule = TensorRule("{p*}x", names, dim, stack_dim)
    save_in_shards(state, work / "a", rng)
    work.convert("hf", rules=[rule])
    expected = {"other": state["other"]}
    for layer in range(2):
        whole = state[f"layers.{layer}.x"]
        for n, one in enumerate(whole.unbind(stack_dim) if is_numbered else [whole]):
            for i, part in enumerate(one.chunk(n_parts, dim)):
                bound = names[i].replace("{p*}", f"layers.{layer}.").replace("{n}", str(n))
                expected[bound] = part
    assert_equal(read_by_stock_tools("hf", work / "b"), expected)
    work.convert("hf", "b", "again", rules=[rule.inverse()], dtype="float64")
    assert_equal(read_by_stock_tools("hf", work / "again"), {name: one.double() for name, one in state.items()})


def test_rules_that_lack_tensors_name_them(work: Workdir) -> None:
    state = separate(stacked())
    del state["layers.1.experts.1.up.weight"], state["layers.0.experts.0.gate.weight"]
    work.ours(state)
    with pytest.raises(UnmatchedTensorsError) as caught:
        work.convert("hf", rules=[TensorRule(PAIR, GATE_UP), TensorRule("nowhere.{x}", "x.{x}")])
    assert sorted(caught.value.missing) == [
        "layers.0.experts.0.gate.weight",
        "layers.1.experts.1.up.weight",
        "nowhere.{x}",
    ]
    assert all(name in str(caught.value) for name in caught.value.missing)
    assert work.names() == ["a"]


def test_a_number_of_a_billion_is_named_and_not_counted_to(work: Workdir) -> None:
    work.ours({"e.0": torch.zeros(1), "e.999999999": torch.zeros(1)})
    with pytest.raises(UnmatchedTensorsError, match=r"e\.1\n") as caught:
        work.convert("hf", rules=[TensorRule("e.{n}", "e")])
    assert len(caught.value.missing) < 2000


@pytest.mark.parametrize(
    ("state", "rule", "said"),
    [
        ({"x": (3, 4)}, TensorRule("x", ["a", "b"]), r"tensor 'x' to have a dimension 0 that can be cut into 2"),
        ({"x": (3, 4)}, TensorRule("x", "x.{n}", stack_dim=2), r"tensor 'x' to have a dimension 2"),
        ({"x": (0, 4)}, TensorRule("x", "x.{n}"), r"a dimension 0 that is not empty"),
        ({"x.0": (2,), "x.1": (3,)}, TensorRule("x.{n}", "x"), r"tensor 'x.1' to have the shape and dtype of x.0"),
        ({"a": (2, 2), "b": (2, 3)}, TensorRule(["a", "b"], "x"), r"tensor 'b' .* apart from dimension 0"),
        ({"a": (2,), "b": (2,)}, TensorRule(["a", "b"], "x", dim=1), r"tensor 'a' to have a dimension 1"),
        ({"x.0": (2,)}, TensorRule("x.{n}", "x", stack_dim=2), r"at least 2 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_a_rule_are_refused(
    state: dict[str, tuple[int, ...]], rule: TensorRule, said: str, work: Workdir
) -> None:
    work.ours({name: torch.zeros(shape) for name, shape in state.items()})
    with pytest.raises(ShapeMismatchError, match=said):
        work.convert("hf", rules=[rule])
    assert work.names() == ["a"]


def test_tensors_of_different_dtypes_are_not_stacked(work: Workdir) -> None:
    work.ours({"x.0": torch.zeros(2), "x.1": torch.zeros(2, dtype=torch.float16)})
    with pytest.raises(ShapeMismatchError, match=r"it has float16\[2\]"):
        work.convert("hf", rules=[TensorRule("x.{n}", "x")])


def test_two_tensors_of_one_name_are_refused(work: Workdir) -> None:
    work.ours({"a": torch.zeros(2), "x": torch.zeros(2)})
    with pytest.raises(DuplicateNameError, match="'x' by a rule"):
        work.convert("hf", rules=[TensorRule("a", "x")])


def test_a_tensor_belongs_to_the_first_rule_that_matches(work: Workdir) -> None:
    work.ours({"a.x": torch.zeros(2), "b.x": torch.ones(2)})
    work.convert("hf", rules=[TensorRule("a.x", "first"), TensorRule("{any}.x", "second.{any}")])
    assert read_by_stock_tools("hf", work / "b").keys() == {"first", "second.b"}


def test_rules_come_after_key_map_and_keep_ties(work: Workdir) -> None:
    shared = torch.ones(2, 3)
    work.ours({"model": {"a": shared, "b": shared}, "step": torch.zeros(1)})
    work.convert("torch", keys=["model"], key_map=lambda fqn: fqn.removeprefix("model."), rules=[TensorRule("b", "c")])
    found = read_by_stock_tools("torch", work / "b")
    assert found.keys() == {"a", "c"} and found["a"].data_ptr() == found["c"].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((["a", "b"], ["c", "d"]), "must be a single name"),
        (("a.{x}", "b.{y}"), r"only one of \['x', 'y'\]"),
        ((["a.{x}", "b"], "c"), "all sources must have the same placeholders"),
        (("a.{p*}b", "c"), "stands for no number"),
        (("a.{", "b"), "is a name in braces"),
        (("a.{x}.{x}", "b.{x}"), "occurs once"),
        (((), "b"), "expected a name or a list of names"),
        (("a", "b", -1), "dim=-1"),
        (("a", "b", 0, True), "stack_dim=True"),
    ],
)
def test_rules_without_sense_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TensorRule(*arguments)


def test_a_dtype_that_is_not_for_weights_is_refused(work: Workdir) -> None:
    work.ours({"a": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"dtype=torch.int8: expected float64, float32, float16, bfloat16"):
        asyncckpt.convert(work / "a", work / "b", to="hf", dtype=torch.int8)


def test_a_flipped_bit_of_a_part_is_found(work: Workdir) -> None:
    from asyncckpt.errors import CorruptCheckpointError

    work.ours({"e": torch.arange(12.0).view(3, 4)})
    file = next((work / "a").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        work.convert("hf", rules=[TensorRule("e", "e.{n}")])
    assert work.names() == ["a"]
