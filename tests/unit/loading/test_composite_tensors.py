"""Subclasses, sparse, quantized and jagged tensors: what comes back, into what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from format_samples import reseal

import asyncckpt
from asyncckpt.errors import (
    AliasMismatchError,
    CorruptCheckpointError,
    LeafTypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.format.checksums import file_checksum
from asyncckpt.interop.diff import compare
from asyncckpt.staging.stager import HostStager
from tests import composite_samples as samples
from tests.composite_samples import Settings, blocks, one_scale, pair, parts, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse BSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse BSC tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Failed to initialize NumPy:UserWarning"),
]

MAKERS = {"blocks": blocks, "one scale": one_scale, "nested": pair}


def save(path: Path, state: dict[Any, Any], **config: Any) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False, **config) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


# ---- Subclasses


@pytest.mark.parametrize("name", MAKERS)
def test_a_subclass_of_the_target_is_filled_in_place(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": [MAKERS[name](0)], "n": 1})
    target = {"a": [MAKERS[name](7)], "n": 0}
    value, own = target["a"][0], parts(target["a"][0])
    asyncckpt.load(path, target)
    assert target["a"][0] is value and all(a is b for a, b in zip(parts(value), own, strict=True))
    assert same(value, MAKERS[name](0)) and target["n"] == 1


@pytest.mark.parametrize("name", MAKERS)
def test_a_registered_subclass_is_made_new(name: str, tmp_path: Path, registered: None) -> None:
    state = {"a": MAKERS[name](0), "b": [MAKERS[name](1)]}
    path = save(tmp_path / "c", state)
    assert same(asyncckpt.load(path), state)
    target: dict[str, Any] = {"a": None, "b": []}
    assert same(asyncckpt.load(path, target), state)


@pytest.mark.parametrize("name", MAKERS)
def test_a_class_that_is_not_registered_is_named_before_anything_changes(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"x": torch.ones(3), "deep": {"a": MAKERS[name](0)}})
    kind = type(MAKERS[name](0))
    with pytest.raises(UnsupportedLeafError, match=rf"register_subclass\({kind.__name__}\)") as caught:
        asyncckpt.load(path)
    assert caught.value.leaf == "deep.a" and caught.value.type_name == f"{kind.__module__}.{kind.__qualname__}"
    target = {"x": torch.zeros(3), "deep": {"a": None}}
    with pytest.raises(UnsupportedLeafError, match=r"'deep.a' was saved as a"):
        asyncckpt.load(path, target)
    assert not target["x"].any() and target["deep"] == {"a": None}
    assert torch.equal(asyncckpt.load(path, keys=["x"])["x"], torch.ones(3))


def test_a_type_in_the_context_must_be_registered_too(tmp_path: Path, registered: None, monkeypatch: Any) -> None:
    from asyncckpt.state_dict import composite_tensors

    path = save(tmp_path / "c", {"a": blocks(0)})
    monkeypatch.delitem(composite_tensors._registered, "tests.composite_samples.Rounding")
    with pytest.raises(UnsupportedLeafError, match=r"needs the type tests.composite_samples.Rounding, .*\(Rounding\)"):
        asyncckpt.load(path)


def test_a_name_in_a_file_imports_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    import sys

    path = save(tmp_path / "c", {"a": blocks(0)})
    monkeypatch.setattr(samples.Blocks, "__module__", "torchao.optim.subclass_8bit")
    known = save(tmp_path / "d", {"a": blocks(0)})
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "tests.composite_samples")
    for one, what in ((path, r"register_subclass\(Blocks\)"), (known, "import torchao.optim.subclass_8bit before")):
        with pytest.raises(UnsupportedLeafError, match=what):
            asyncckpt.load(one)
    assert not {"torchao", "tests.composite_samples"} & sys.modules.keys()


def test_a_known_module_that_is_imported_needs_no_registration(tmp_path: Path, monkeypatch: Any) -> None:
    import sys
    import types

    module = types.ModuleType("torchao.quantization")
    for kind in (samples.Blocks, samples.Settings, samples.Rounding):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    path = save(tmp_path / "c", {"a": blocks(0)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert same(asyncckpt.load(path), {"a": blocks(0)})
    module.Blocks = torch.nn.Linear  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeafError, match=r"import torchao.quantization before"):
        asyncckpt.load(path)


WRONG: dict[str, tuple[Any, type, str]] = {
    "plain": (lambda: torch.zeros(12, 8), LeafTypeMismatchError, r"was saved as a .*Blocks, the target has a tensor"),
    "class": (lambda: one_scale(1), LeafTypeMismatchError, r"was saved as a .*Blocks, the target has a .*OneScale"),
    "context": (lambda: blocks(1, settings=Settings(block=8)), LeafTypeMismatchError, "with the context .*block"),
    "shape": (lambda: blocks(1, (12, 4)), ShapeMismatchError, r"\[12, 8\], the target has \[12, 4\]"),
    "component": (
        lambda: samples.Blocks(torch.zeros(12, 8, dtype=torch.int8), torch.zeros(5), torch.zeros(16), Settings()),
        ShapeMismatchError,
        r"'a.scale' was saved with shape \[24\], the target has \[5\]",
    ),
    "object": (lambda: 5, LeafTypeMismatchError, "the target has an object"),
    "dict": (dict, LeafTypeMismatchError, "the target has a container"),
    "sparse": (lambda: torch.eye(3).to_sparse(), LeafTypeMismatchError, "the target has a sparse_coo"),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_tensor_in_the_target_is_refused_and_nothing_changes(what: str, tmp_path: Path) -> None:
    make, error, text = WRONG[what]
    path = save(tmp_path / "c", {"x": torch.ones(3), "a": blocks(0)})
    target = {"x": torch.zeros(3), "a": make()}
    before = [part.clone() for part in parts(target["a"])] if what not in ("object", "dict", "sparse") else []
    with pytest.raises(error, match=text) as caught:
        asyncckpt.load(path, target)
    assert caught.value.fqn.startswith("a")
    assert not target["x"].any() and all(map(torch.equal, parts(target["a"]), before))
    assert asyncckpt.plan_load(path, target).mismatched[0].fqn.startswith("a")


@pytest.mark.parametrize("saved", [torch.ones(12, 8), 5, {"codes": torch.ones(12, 8)}, one_scale(3)])
def test_a_subclass_in_the_target_takes_only_its_own_class(saved: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": saved})
    target = {"a": blocks(1)}
    with pytest.raises(LeafTypeMismatchError, match=r"'a' was saved as .*, the target has a .*Blocks"):
        asyncckpt.load(path, target)
    assert same(target["a"], blocks(1))


def test_other_names_of_components_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = save(tmp_path / "c", {"a": blocks(0)})
    target = {"a": blocks(1)}
    monkeypatch.setattr(samples.Blocks, "components", ("codes", "scale", "scale2"))
    target["a"].scale2 = target["a"].table
    with pytest.raises(LeafTypeMismatchError, match=r"the components codes, scale, table, the target has .*scale2"):
        asyncckpt.load(path, target)


def test_a_tensor_with_two_names_is_one_tensor_again(tmp_path: Path, registered: None) -> None:
    a = blocks(0)
    path = save(tmp_path / "c", {"a": a, "b": a.detach(), "c": blocks(0)})
    found = asyncckpt.load(path)
    assert found["a"] is found["b"] and found["c"] is not found["a"]
    with asyncckpt.open_checkpoint(path) as opened:
        assert len(opened.stored_tensors) == 6
    target = {"a": blocks(1)}
    target["b"] = target["a"]
    assert same(asyncckpt.load(path, target)["a"], a)


def test_a_tensor_with_two_names_takes_no_two_values(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": blocks(0), "b": blocks(5)})
    target = {"a": blocks(1)}
    target["b"] = target["a"]
    with pytest.raises(AliasMismatchError):
        asyncckpt.load(path, target)
    assert same(target["a"], blocks(1))
    equal = save(tmp_path / "d", {"a": blocks(0), "b": blocks(0)})
    assert same(asyncckpt.load(equal, target)["a"], blocks(0))


def test_a_name_that_was_not_saved_is_filled_through_the_other(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": blocks(0)})
    target = {"a": blocks(1)}
    target["b"] = target["a"]
    assert same(asyncckpt.load(path, target)["b"], blocks(0))


def test_what_was_not_saved_is_named_as_one_leaf(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": {"a": blocks(0)}})
    target = {"m": {"a": blocks(1), "new": blocks(2)}}
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(path, target)
    assert caught.value.keys == ["m.new"]
    asyncckpt.load(path, target, strict=False)
    assert same(target["m"], {"a": blocks(0), "new": blocks(2)})
    plan = asyncckpt.plan_load(path, {"m": {}})
    assert plan.mismatched[0] == ("m.a", "tests.composite_samples.Blocks", "registered") and not plan.fits


def test_names_and_keys_select_a_subclass_as_a_whole(tmp_path: Path, registered: None) -> None:
    path = save(tmp_path / "c", {"m": {"a": blocks(0), "b": torch.ones(2)}})
    assert same(asyncckpt.load(path, keys=["m.a"]), {"m": {"a": blocks(0)}})
    with pytest.raises(MissingKeysError):
        asyncckpt.load(path, keys=["m.a.codes"])
    target = {"w": blocks(1)}
    assert same(asyncckpt.load(path, target, key_map={"w": "m.a"})["w"], blocks(0))


class Holder(torch.nn.Module):
    """Has a parameter and a buffer of a subclass, and a sparse and a quantized buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(blocks(seed), requires_grad=seed > 0)
        self.plain = torch.nn.Parameter(torch.full((3,), float(seed)))
        self.register_buffer("nested", pair(seed))
        self.register_buffer("sparse", torch.full((2, 2), float(seed)).to_sparse())
        self.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1 + seed, seed, torch.qint8))


def test_a_module_keeps_its_parameters_and_their_gradients(tmp_path: Path) -> None:
    saved, target = Holder(0), Holder(5)
    path = save(tmp_path / "c", {"m": saved})
    own = dict(target.state_dict(keep_vars=True))
    asyncckpt.load(path, {"m": target})
    found = target.state_dict(keep_vars=True)
    assert all(found[name] is own[name] for name in own)
    assert isinstance(target.w, torch.nn.Parameter) and target.w.requires_grad
    assert same(target.w.data, saved.w.data) and same(target.nested, saved.nested)
    assert torch.equal(target.sparse.to_dense(), saved.sparse.to_dense())
    assert torch.equal(target.quantized.int_repr(), saved.quantized.int_repr())
    assert (target.quantized.q_scale(), target.quantized.q_zero_point()) == (0.1, 0)


class Momentum(torch.optim.Optimizer):
    """Its state is a subclass."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for n, p in enumerate(self.param_groups[0]["params"]):
            state = self.state[p]
            if not state:
                state["m"], state["step"] = pair(n), torch.tensor(0.0)
            state["m"].inner.codes.add_(1)
            state["m"].bias.add_(state["step"])
            state["step"] += 1


def test_an_optimizer_gets_a_new_state_or_its_own_filled(tmp_path: Path, registered: None) -> None:
    module = torch.nn.Linear(2, 3)
    optimizer, other = Momentum(module), Momentum(module)
    for _ in range(3):
        optimizer.step()
    path = save(tmp_path / "c", {"o": optimizer})
    asyncckpt.load(path, {"o": other})
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    kept = [state["m"] for state in other.state.values()]
    other.step()
    optimizer.step()
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    asyncckpt.load(path, {"o": other})
    assert [state["m"] for state in other.state.values()] == kept or all(
        a["m"] is b for a, b in zip(other.state.values(), kept, strict=True)
    )
    other.step()
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_the_state_of_an_optimizer_is_filled_without_registration(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    optimizer, other = Momentum(module), Momentum(module)
    optimizer.step()
    path = save(tmp_path / "c", {"o": optimizer})
    with pytest.raises(UnsupportedLeafError, match="not registered"):
        asyncckpt.load(path, {"o": other})
    other.step()
    other.step()
    asyncckpt.load(path, {"o": other})
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_subclass_in_a_per_rank_mark(tmp_path: Path, registered: None) -> None:
    path = save(tmp_path / "c", {"a": asyncckpt.PerRank(blocks(0))})
    assert same(asyncckpt.load(path), {"a": blocks(0)})
    target = {"a": asyncckpt.PerRank(blocks(1))}
    asyncckpt.load(path, target)
    assert same(target["a"].value, blocks(0))


def test_a_context_that_is_pickled_needs_the_same_permission_again(tmp_path: Path, registered: None) -> None:
    state = {"a": one_scale(0, note=torch.nn.Identity)}
    path = save(tmp_path / "c", state, allow_pickle=True)
    with pytest.raises(asyncckpt.errors.PickledLeafError, match="'a' was stored as a pickle"):
        asyncckpt.load(path)
    assert same(asyncckpt.load(path, allow_pickle=True), state)


def test_a_class_that_refuses_its_components_fails_the_load_by_name(
    tmp_path: Path, registered: None, monkeypatch: Any
) -> None:
    path = save(tmp_path / "c", {"a": blocks(0)})

    def refuse(*_: Any) -> Any:
        raise RuntimeError("another version")

    monkeypatch.setattr(samples.Blocks, "__tensor_unflatten__", refuse)
    with pytest.raises(StateLoadError, match=r"'a', a .*Blocks, cannot be made .*another version") as caught:
        asyncckpt.load(path)
    assert caught.value.fqn == "a"


# ---- Sparse, quantized and jagged tensors, integers of fewer than 8 bits


def _sparse(seed: int, layout: torch.layout, shape: tuple[int, ...] = (4, 6)) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=g).relu()
    block = (2, 3) if "bs" in str(layout) else None
    return dense.to_sparse(layout=layout, blocksize=block)


def _uncoalesced(seed: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 0, 1]], [1.0 + seed, 2.0, 3.0], (2,), check_invariants=True)


def _per_channel(seed: int, dtype: torch.dtype, zero: torch.dtype = torch.long) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    scales, zeros = torch.rand(4, generator=g) + 0.1, torch.arange(4).to(zero)
    return torch.quantize_per_channel(torch.randn(4, 5, generator=g), scales, zeros, 0, dtype)


def _jagged(seed: int) -> torch.Tensor:
    values = torch.full((6, 3), float(seed)) + torch.arange(6.0)[:, None]
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]), min_seqlen=2, max_seqlen=4)


OTHERS = {
    "coo": lambda seed: _sparse(seed, torch.sparse_coo),
    "hybrid": lambda seed: torch.sparse_coo_tensor([[0, 2]], torch.full((2, 3), 1.0 + seed), (4, 3)).coalesce(),
    "uncoalesced": _uncoalesced,
    "csr": lambda seed: _sparse(seed, torch.sparse_csr),
    "csr of two": lambda seed: torch.stack([torch.eye(3) + seed] * 2).to_sparse_csr(),
    "csc": lambda seed: _sparse(seed, torch.sparse_csc),
    "bsr": lambda seed: _sparse(seed, torch.sparse_bsr),
    "bsc": lambda seed: _sparse(seed, torch.sparse_bsc),
    "qint8": lambda seed: torch.quantize_per_tensor(torch.randn(4, 5), 0.1, 2 + seed, torch.qint8),
    "transposed": lambda seed: torch.quantize_per_tensor(torch.randn(4, 5), 0.1, seed, torch.quint8).t(),
    "qint32": lambda seed: torch.quantize_per_tensor(torch.randn(4, 5), 0.001, seed, torch.qint32),
    "per channel": lambda seed: _per_channel(seed, torch.quint8),
    "quint4x2": lambda seed: _per_channel(seed, torch.quint4x2, torch.float),
    "jagged": _jagged,
}


IN_PLACE = ("coo", "hybrid", "uncoalesced", "qint8", "transposed", "qint32", "per channel")
"""The others are replaced, unless they happen to have as many elements."""


def described(value: Any) -> list[Any]:
    """Return all that makes a tensor equal to another one."""
    from asyncckpt.state_dict.composite_tensors import decompose

    found = decompose(value)
    assert found is not None
    tensors = {name: (part.dtype, part.shape, samples.bits(part).tolist()) for name, part in found.tensors.items()}
    return [found.kind, found.rest, tensors, value.dtype, value.layout]


@pytest.mark.parametrize("what", OTHERS)
def test_other_composite_tensors_come_back(what: str, tmp_path: Path) -> None:
    value = OTHERS[what](0)
    path = save(tmp_path / "c", {"a": value, "b": [value]})
    new = asyncckpt.load(path)
    assert described(new["a"]) == described(value) and new["a"] is new["b"][0]
    target = {"a": OTHERS[what](1), "b": None}
    own = target["a"]
    asyncckpt.load(path, target)
    assert described(target["a"]) == described(value)
    assert target["a"] is own or what not in IN_PLACE
    copy = HostStager().stage({"a": value})
    assert described(copy["a"]) == described(value)


@pytest.mark.parametrize("what", OTHERS)
def test_a_plain_tensor_takes_no_other_composite(what: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": OTHERS[what](0)})
    with pytest.raises(LeafTypeMismatchError, match="the target has a tensor there"):
        asyncckpt.load(path, {"a": torch.zeros(4, 5)})
    plain = save(tmp_path / "d", {"a": torch.zeros(4, 5)})
    with pytest.raises(LeafTypeMismatchError, match="'a' was saved as a tensor, the target has a"):
        asyncckpt.load(plain, {"a": OTHERS[what](0)})


OF_OTHER_SHAPES = {
    "coo": lambda: _sparse(1, torch.sparse_coo, (4, 8)),
    "csr": lambda: _sparse(1, torch.sparse_csr, (4, 8)),
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 2, torch.qint8),
}


@pytest.mark.parametrize("what", OF_OTHER_SHAPES)
def test_another_shape_of_a_sparse_or_quantized_target_is_refused_and_nothing_changes(
    what: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "c", {"x": torch.ones(3), "a": OTHERS[what](0)})
    target = {"x": torch.zeros(3), "a": OF_OTHER_SHAPES[what]()}
    own, before = target["a"], described(target["a"])
    with pytest.raises(ShapeMismatchError, match=r"'a', a .*, was saved with shape"):
        asyncckpt.load(path, target)
    assert target["a"] is own and described(own) == before and not target["x"].any()
    assert asyncckpt.plan_load(path, target).mismatched[0].fqn == "a"


def test_a_sparse_tensor_with_two_names_takes_no_two_values(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": OTHERS["coo"](0), "b": OTHERS["coo"](1)})
    target = {"a": OTHERS["coo"](2)}
    target["b"] = target["a"]
    with pytest.raises(AliasMismatchError):
        asyncckpt.load(path, target)
    assert described(target["a"]) == described(OTHERS["coo"](2))


def test_jagged_tensors_of_one_shape_can_be_added_again(tmp_path: Path) -> None:
    a = _jagged(0)
    b = torch.nested.nested_tensor_from_jagged(a.values() + 1, a.offsets())
    found = asyncckpt.load(save(tmp_path / "c", {"a": a, "b": b}))
    assert torch.equal((found["a"] + found["b"]).values(), (a + b).values())


SUB_BYTE = [f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8) if hasattr(torch, f"{sign}int{bits}")]


@pytest.mark.parametrize("name", SUB_BYTE)
def test_integers_of_few_bits_come_back_as_bytes(name: str, tmp_path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8).reshape(6, 8)
    value = raw.view(getattr(torch, name))
    path = save(tmp_path / "c", {"a": value, "t": value.t(), "none": value[:0]})
    found = asyncckpt.load(path)
    assert found["a"].dtype is value.dtype and torch.equal(found["a"].view(torch.uint8), raw)
    assert torch.equal(found["t"].view(torch.uint8), raw.t()) and found["none"].shape == (0, 8)
    target = {"a": torch.zeros(8, 6, dtype=torch.uint8).view(value.dtype).t()}
    own = target["a"]
    asyncckpt.load(path, target)
    assert target["a"] is own and torch.equal(own.view(torch.uint8), raw)
    for other in (torch.zeros(6, 8), torch.zeros(6, 8, dtype=torch.uint8)):
        with pytest.raises(LeafTypeMismatchError, match=f"was saved as {name}"):
            asyncckpt.load(path, {"a": other})


# ---- Reading without a load, and conversions


def test_components_are_read_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": {"a": pair(0), "q": OTHERS["qint8"](0)}})
    with asyncckpt.open_checkpoint(path) as opened:
        assert opened.composites == {
            "m.a": "tests.composite_samples.Pair",
            "m.a.inner": "tests.composite_samples.Blocks",
            "m.q": "per_tensor_affine",
        }
        assert torch.equal(opened.tensor("m.a.inner.codes"), blocks(0).codes)
        assert opened.tensors["m.q.data"].dtype is torch.int8
        with pytest.raises(LeafTypeMismatchError, match=r"was saved as a .*Pair; .*'m.a.inner.codes', .*'m.a.bias'"):
            opened.tensor("m.a")


def test_differences_in_class_context_and_components_are_named(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"x": blocks(0), "y": blocks(1), "z": one_scale(0), "same": pair(1)})
    other = samples.Blocks(blocks(1).codes, blocks(1).scale, blocks(1).table, Settings(samples.Rounding.STOCHASTIC))
    b = save(tmp_path / "b", {"x": blocks(5), "y": other, "z": blocks(0), "same": pair(1)})
    found = {(one.fqn, one.what) for one in compare(a, b).differences}
    assert {
        ("x.codes", "value"),
        ("x.scale", "value"),
        ("y", "value"),
        ("z", "kind"),
        ("z.table", "only in B"),
    } <= found
    assert not any(fqn.startswith("same") for fqn, _ in found)
    assert not compare(a, a).differences


def test_a_conversion_keeps_them_or_writes_their_components_by_name(tmp_path: Path, registered: None) -> None:
    state = {"m": {"a": pair(0), "s": OTHERS["coo"](0), "x": torch.ones(2)}, "n": 1}
    path = save(tmp_path / "c", state)
    report = asyncckpt.convert(path, tmp_path / "d", to="asyncckpt")
    assert not report.changed
    found = asyncckpt.load(tmp_path / "d")
    assert same(found["m"]["a"], pair(0)) and described(found["m"]["s"]) == described(state["m"]["s"])
    report = asyncckpt.convert(path, tmp_path / "e", to="asyncckpt", key_map={"m.a": "other"}, keys=["m.a"])
    assert same(asyncckpt.load(tmp_path / "e"), {"other": pair(0)})
    for to in ("torch", "dcp"):
        report = asyncckpt.convert(path, tmp_path / to, to=to)
        assert "tensors became dicts of their components: m.a (tests.composite_samples.Pair)" in report.changed[0]
        plain = asyncckpt.load(tmp_path / to)["m"]
        assert torch.equal(plain["a"]["inner"]["codes"], blocks(0).codes) and set(plain["s"]) == {"indices", "values"}
    report = asyncckpt.convert(path, tmp_path / "s", to="safetensors", keys=["m"])
    assert torch.equal(asyncckpt.load(tmp_path / "s")["m.a.inner.codes"], blocks(0).codes)


def test_inspect_names_their_classes_and_components(tmp_path: Path, command: Any) -> None:
    path = save(tmp_path / "c", {"m": {"a": pair(0)}, "s": OTHERS["coo"](0)})
    _, out, _ = command("inspect", "--json", path)
    assert json.loads(out)["composites"] == [
        {"fqn": "m.a", "kind": "tests.composite_samples.Pair", "components": ["inner", "bias"]},
        {"fqn": "m.a.inner", "kind": "tests.composite_samples.Blocks", "components": ["codes", "scale", "table"]},
        {"fqn": "s", "kind": "sparse_coo", "components": ["indices", "values"]},
    ]
    code, out, _ = command("inspect", path)
    assert code == 0 and "tensors stored as components: 3" in out
    assert any(line.split() == ["s", "sparse_coo", "indices,", "values"] for line in out.splitlines())
    assert command("verify", path)[0] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_planner_of_torch_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from asyncckpt.dcp import StorageWriter

    with pytest.raises(BaseException, match=r"state dict leaf 'm.a' of type Blocks cannot be stored"):
        dcp.save({"m": {"a": blocks(0)}}, storage_writer=StorageWriter(tmp_path / "c", use_worker=False), no_dist=True)
    assert not list(tmp_path.glob("c/*.distcp")) and not list(tmp_path.glob("c/*.safetensors"))


def test_layout_dcp_refuses_them_by_name(tmp_path: Path) -> None:
    for value in (blocks(0), OTHERS["coo"](0)):
        with pytest.raises(UnsupportedLeafError, match=r"'m.0.a': layout='dcp' cannot store a tensor that stock DCP"):
            save(tmp_path / "c", {"m": [{"a": value}]}, layout="dcp")
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_planner_of_torch_gets_the_components(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from asyncckpt.dcp import StorageReader

    path = save(tmp_path / "c", {"a": blocks(0)})
    target = {"a": {"codes": torch.zeros(12, 8, dtype=torch.int8)}}
    dcp.load(target, storage_reader=StorageReader(path), no_dist=True)
    assert torch.equal(target["a"]["codes"], blocks(0).codes)


# ---- What only damaged or hostile files have


def _tampered(path: str, change: Any) -> None:
    """Rewrite the objects file of a checkpoint of one rank, with its checksums."""
    objects, index = next(Path(path).glob("*.objects.json")), next(Path(path).glob("*.index"))
    document = json.loads(objects.read_bytes())
    document["values"] = change(document["values"])
    data = json.dumps(document).encode()
    objects.write_bytes(data)
    raw = msgpack.unpackb(index.read_bytes())
    raw["objects"] = [objects.name, len(data), file_checksum(data)]
    reseal(Path(path), msgpack.packb(raw))


BAD = {
    "no dict": ("a", lambda v: 5),
    "no context": ("a", lambda v: {"$": "dict", "v": [["size", [1]], ["stride", [1]]]}),
    "size": ("a", lambda v: json.loads(json.dumps(v).replace('["size", [12, 8]]', '["size", ["x"]]'))),
    "instance": ("a", lambda v: json.loads(json.dumps(v).replace('"dataclass"', '"call"'))),
    "enum of a number": ("a", lambda v: json.loads(json.dumps(v).replace('"NEAREST"', "7"))),
    "sparse size": ("s", lambda v: {"$": "dict", "v": [["size", [1, 1]], ["is_coalesced", True]]}),
    "sparse without size": ("s", lambda v: {"$": "dict", "v": [["is_coalesced", True]]}),
    "quantized size": ("q", lambda v: json.loads(json.dumps(v).replace('["size", [4, 5]]', '["size", [4, 6]]'))),
    "quantized dtype": ("q", lambda v: json.loads(json.dumps(v).replace('"qint8"', '"float32"'))),
    "jagged dim": ("j", lambda v: json.loads(json.dumps(v).replace('["ragged_idx", 1]', '["ragged_idx", 9]'))),
}


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_description_is_damage_and_named(what: str, tmp_path: Path, registered: None) -> None:
    state = {"a": blocks(0), "s": OTHERS["coo"](0), "q": OTHERS["qint8"](0), "j": _jagged(0)}
    fqn, change = BAD[what]
    path = save(tmp_path / "c", state)
    number = list(state).index(fqn)
    _tampered(path, lambda values: [change(v) if n == number else v for n, v in enumerate(values)])
    with pytest.raises(CorruptCheckpointError):
        asyncckpt.load(path, keys=[fqn])
    if fqn == "a":
        with pytest.raises(CorruptCheckpointError):
            asyncckpt.load(path, {"a": blocks(1)})


@pytest.mark.parametrize("indices", [[[0, 99], [0, 1]], [[-1, 0], [0, 1]], [[1, 0], [0, 0]]])
def test_indices_outside_of_a_sparse_tensor_are_damage(indices: list[list[int]], tmp_path: Path) -> None:
    value = torch.sparse_coo_tensor([[0, 1], [0, 1]], [1.0, 2.0], (4, 4)).coalesce()
    with torch.no_grad():
        value._indices().copy_(torch.tensor(indices))
    path = save(tmp_path / "c", {"a": value})
    with pytest.raises(CorruptCheckpointError, match="'a', a sparse_coo, cannot be made of its components"):
        asyncckpt.load(path)


@pytest.mark.parametrize("offsets", [[0, 2, 60], [0, -2, 6], [0, 5, 3]])
def test_offsets_outside_of_a_jagged_tensor_are_damage(offsets: list[int], tmp_path: Path) -> None:
    value = _jagged(0)
    with torch.no_grad():
        value.offsets().copy_(torch.tensor(offsets))
    path = save(tmp_path / "c", {"a": value})
    with pytest.raises(CorruptCheckpointError, match="'a', a jagged, cannot be made of its components"):
        asyncckpt.load(path)
