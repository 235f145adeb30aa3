"""Modules as targets: each loads what `module.load_state_dict(saved, strict)` of torch would have made of it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from torch import nn

import asyncckpt
from asyncckpt import CheckpointManager, SyncCheckpointer
from asyncckpt.errors import AliasMismatchError, AsyncCkptError, MissingKeysError, ShapeMismatchError, StateLoadError

Make = Callable[[], nn.Module]


def save(path: Path, state: Any) -> str:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


# ---- modules with load hooks: each case is (what is saved, what it is loaded into) -------------------------------


def with_hook(module: nn.Module, hook: Callable[[dict[str, Any], str], None]) -> nn.Module:
    """`hook` gets the state, which it may change, and the prefix."""
    module.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: hook(state, prefix))  # type: ignore[no-untyped-call]
    return module


def renames(old: str, new: str) -> Callable[[dict[str, Any], str], None]:
    def hook(state: dict[str, Any], prefix: str) -> None:
        for name in list(state):
            if name.startswith(prefix + old):
                state[prefix + new + name[len(prefix + old) :]] = state.pop(name)

    return hook


def swaps(one: str, other: str) -> Callable[[dict[str, Any], str], None]:
    def hook(state: dict[str, Any], prefix: str) -> None:
        state[prefix + one], state[prefix + other] = state[prefix + other], state[prefix + one]

    return hook


def linear(**names: Any) -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names or {"a": 0}))


class Fused(nn.Module):
    """Fuses three projections of older checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        with_hook(self, self.fuse)

    @staticmethod
    def fuse(state: dict[str, Any], prefix: str) -> None:
        for kind in ("weight", "bias"):
            if f"{prefix}q.{kind}" in state:
                state[f"{prefix}qkv.{kind}"] = torch.cat([state.pop(f"{prefix}{name}.{kind}") for name in "qkv"])


class Split(nn.Module):
    """Splits one projection of older checkpoints, by an own method."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            if f"{prefix}qkv.{kind}" in state:
                parts = state.pop(f"{prefix}qkv.{kind}").chunk(3)
                state.update({f"{prefix}{name}.{kind}": part for name, part in zip("qkv", parts, strict=True)})
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


class Versioned(nn.Module):
    """Its first version stored the weight transposed, and no scale."""

    _version = 2

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self._version = 1 if first else 2
        if not first:
            self.register_buffer("scale", torch.full((1,), 3.0))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
            state[prefix + "scale"] = torch.full((1,), 9.0)
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[no-untyped-call]


class Quantised(nn.Module):
    """Stores integers and a scale; takes floats too, and does not call its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(4, 4, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(4, 1))

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: Any, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        if prefix + "weight" in state:
            weight = state.pop(prefix + "weight")
            scale = weight.abs().amax(1, keepdim=True) / 127
            state[prefix + "packed"], state[prefix + "scale"] = (weight / scale).round().to(torch.int8), scale
        for name in ("packed", "scale"):
            if prefix + name in state:
                getattr(self, name).copy_(state[prefix + name])
            else:
                missing.append(prefix + name)


class KeepsItsOwn(nn.Module):
    """What it has is right, whatever was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.randn(5))
        self.weight = nn.Parameter(torch.randn(3))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "index"] = self.index
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


class Forgiving(nn.Module):
    """A hook behind the load says that a name may lack."""

    def __init__(self, has_extra: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        if has_extra:
            self.adapter = nn.Linear(2, 2)
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, keys: [keys.missing_keys.remove(k) for k in list(keys.missing_keys) if "adapter" in k] and None
        )


class Renaming(nn.Linear):
    """Its own `load_state_dict` changes names before it calls torch's."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k.removeprefix("old_"): v for k, v in state_dict.items()}, strict, assign)


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old_weight, self.old_bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))


class Extra(nn.Linear):
    """With extra state, which a hook renames."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.words: Any = {"a": [1]}
        with_hook(self, renames("words", "_extra_state"))

    def get_extra_state(self) -> Any:
        return self.words

    def set_extra_state(self, state: Any) -> None:
        self.words = state


class Growing(nn.Module):
    """Has nothing until a load says what."""

    def __init__(self) -> None:
        super().__init__()
        with_hook(self, self.grow)

    def grow(self, state: dict[str, Any], prefix: str) -> None:
        for name, value in state.items():
            self.register_buffer(name.removeprefix(prefix), torch.zeros_like(value))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.LazyLinear(3)
        with_hook(self, renames("dense.", "proj."))


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)  # type: ignore[no-any-return]


def observed(channels: int) -> nn.Module:
    from torch.ao.quantization import PerChannelMinMaxObserver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = PerChannelMinMaxObserver()  # type: ignore[no-untyped-call]
    if channels:
        module(torch.randn(channels, 3))
    return module


def sequential(*makes: Make) -> Make:
    return lambda: nn.Sequential(*(make() for make in makes))


def batch_norm() -> nn.Module:
    found = nn.BatchNorm2d(3)
    found(torch.randn(2, 3, 4, 4))
    return found


def without_counter() -> dict[str, Any]:
    state: Any = batch_norm().state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    return state  # type: ignore[no-any-return]


def conv() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2))


def qkv_apart() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "k", "v", "out")})


def qkv_fused() -> nn.Module:
    return nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 4)})


def extra_words() -> dict[str, Any]:
    state = nn.Linear(2, 2).state_dict()
    state["words"] = {"b": [2, 3], "t": torch.ones(2)}  # type: ignore[assignment]
    return state


CASES: dict[str, tuple[Callable[[], Any], Make]] = {
    "plain": (lambda: linear(a=0, b=0), lambda: linear(a=0, b=0)),
    "old weight_norm": (lambda: old_weight_norm(nn.Conv1d(2, 3, 2)), conv),
    "new weight_norm": (conv, conv),
    "old weight_norm into a plain one": (lambda: old_weight_norm(nn.Linear(2, 2)), lambda: nn.Linear(2, 2)),
    "new weight_norm into the old": (conv, lambda: old_weight_norm(nn.Conv1d(2, 3, 2))),
    "old spectral_norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    ),
    "new spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    ),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    ),
    "a plain one into orthogonal": (
        lambda: nn.Linear(3, 3),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    ),
    "batch norm of version 1": (without_counter, batch_norm),
    "batch norm": (batch_norm, batch_norm),
    "batch norm without affine": (lambda: nn.BatchNorm1d(3, affine=False), lambda: nn.BatchNorm1d(3)),
    "instance norm with statistics": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: nn.InstanceNorm1d(3),
    ),
    "attention": (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 2)),
    "attention of other keys": (lambda: nn.MultiheadAttention(4, 2, kdim=3), lambda: nn.MultiheadAttention(4, 2)),
    "a transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), lambda: nn.TransformerEncoderLayer(4, 2, 8)),
    "an LSTM": (lambda: nn.LSTM(2, 3, proj_size=1), lambda: nn.LSTM(2, 3, proj_size=1)),
    "an observer that has seen nothing": (lambda: observed(4), lambda: observed(0)),
    "an observer of fewer channels": (lambda: observed(4), lambda: observed(2)),
    "a name": (lambda: linear(old=0, b=0), lambda: with_hook(linear(new=0, b=0), renames("old.", "new."))),
    "names that change places": (
        lambda: linear(a=0, b=0),
        lambda: with_hook(linear(a=0, b=0), swaps("a.weight", "b.weight")),
    ),
    "a hook that drops a key of older checkpoints": (
        lambda: linear(a=0, gone=0),
        lambda: with_hook(
            linear(a=0), lambda state, prefix: [state.pop(k) for k in list(state) if "gone" in k] and None
        ),
    ),
    "a hook that drops a key that is needed": (
        lambda: linear(a=0, b=0),
        lambda: with_hook(linear(a=0, b=0), lambda state, prefix: state.pop(prefix + "b.bias")),
    ),
    "a hook that transposes": (
        lambda: linear(a=0),
        lambda: with_hook(linear(a=0), lambda s, p: s.update({f"{p}a.weight": s[f"{p}a.weight"].t()})),
    ),
    "a hook that works in place": (
        lambda: linear(a=0),
        lambda: with_hook(linear(a=0), lambda state, prefix: state[prefix + "a.weight"].mul_(2)),
    ),
    "a hook of a submodule": (
        lambda: nn.Sequential(nn.Linear(2, 2), linear(old=0)),
        lambda: nn.Sequential(nn.Linear(2, 2), with_hook(linear(new=0), renames("old.", "new."))),
    ),
    "a hook that adds a default": (
        lambda: linear(a=0),
        lambda: with_hook(
            linear(a=0, b=0), lambda s, p: s.update({f"{p}b.weight": torch.eye(4), f"{p}b.bias": torch.ones(4)})
        ),
    ),
    "three projections into one": (qkv_apart, Fused),
    "one projection": (qkv_fused, Fused),
    "one projection into three": (qkv_fused, Split),
    "three projections": (qkv_apart, Split),
    "nested ones": (sequential(qkv_apart, batch_norm, qkv_fused), sequential(Fused, batch_norm, Split)),
    "the first version": (lambda: Versioned(first=True), Versioned),
    "the second version": (Versioned, Versioned),
    "the first version, inside": (
        sequential(batch_norm, lambda: Versioned(first=True)),
        sequential(batch_norm, Versioned),
    ),
    "floats into integers": (lambda: nn.Linear(4, 4, bias=False), Quantised),
    "integers": (Quantised, Quantised),
    "a value of its own": (KeepsItsOwn, KeepsItsOwn),
    "a name that may lack": (lambda: Forgiving(has_extra=False), Forgiving),
    "a load_state_dict of its own": (Old, lambda: Renaming(4, 4)),
    "extra state of another name": (extra_words, Extra),
    "extra state": (Extra, Extra),
    "one that grows": (lambda: nn.ParameterDict({"x": nn.Parameter(torch.randn(3))}), Growing),
    "a lazy one": (lambda: nn.ModuleDict({"dense": nn.Linear(4, 3)}), Lazy),
    "something missing": (lambda: linear(a=0), lambda: with_hook(linear(a=0, b=0), renames("x", "y"))),
    "something unexpected": (lambda: linear(a=0, b=0), lambda: linear(a=0)),
    "a scalar of one element": (
        lambda: nn.ParameterDict({"s": nn.Parameter(torch.ones(1))}),
        lambda: nn.ParameterDict({"s": nn.Parameter(torch.zeros(()))}),
    ),
}


def stock(module: nn.Module, state: Any) -> tuple[list[str], Exception | None]:
    """Load as torch does; return what is missing, and an error that is not about that."""
    try:
        found = module.load_state_dict(copy.deepcopy(state), strict=False)
    except RuntimeError as error:
        return [], error
    return list(found.missing_keys), None


def ours(path: str, target: dict[str, Any], strict: bool) -> tuple[list[str], Exception | None]:
    try:
        asyncckpt.load(path, target, strict=strict)
    except MissingKeysError as error:
        return list(error.keys), None
    except AsyncCkptError as error:
        return [], error
    return [], None


def comparable(module: nn.Module) -> Any:
    return {name: value for name, value in module.state_dict().items() if not nn.parameter.is_lazy(value)}


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "DataParallel": nn.DataParallel,
    "compiled": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item, return-value]
    "inside a wrapper inside": lambda module: nn.Sequential(
        nn.DataParallel(nn.Sequential(torch.compile(module, backend="eager")))  # type: ignore[arg-type]
    ),
}


WRAPPED = (
    "plain", "batch norm of version 1", "a name", "a hook that adds a default", "nested ones", "a name that may lack",
    "extra state of another name", "something missing", "something unexpected",
)  # fmt: skip
"""Those that each wrapper is tried with: names and versions that go through it, what lacks, and what is too much."""


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("case", "wrap"), [(case, wrap) for case in CASES for wrap in (WRAPS if case in WRAPPED else ["bare"])]
)
def test_a_module_takes_what_a_stock_load_gives_it(tmp_path: Path, case: str, wrap: str, strict: bool) -> None:
    torch.manual_seed(0)
    make_source, make = CASES[case]
    source = make_source()
    state = source.state_dict() if isinstance(source, nn.Module) else source
    expected, target = two_alike(make)
    if "inside" in wrap:
        state = with_prefix(state, "0.0.")
        missing, error = stock(nn.Sequential(nn.Sequential(expected)), state)
    else:
        missing, error = stock(expected, state)
    held = {name: value for name, value in target.named_parameters()}
    path = save(tmp_path / "c", {"l": [{"m": state}], "n": 1})
    outcome = ours(path, {"l": [{"m": WRAPS[wrap](target)}], "n": 0}, strict)
    assert (outcome[1] is None) == (error is None), (outcome[1], error)
    is_lost = bool(missing) and len(missing) == len(target.state_dict())  # nothing of it: always an error
    assert outcome[0] == ([f"l.0.m.{name}" for name in missing] if strict or is_lost else [])
    if error is None and (not missing or not strict):
        states.assert_same(comparable(target), comparable(expected))
        assert all(value is held[name] for name, value in target.named_parameters())
        if isinstance(target, Extra):
            assert isinstance(expected, Extra)
            states.assert_same(target.words, expected.words)


def two_alike(make: Make) -> list[nn.Module]:
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(make())
    return found


def with_prefix(state: Any, prefix: str) -> Any:
    found = OrderedDict((prefix + name, value) for name, value in state.items())
    metadata = getattr(state, "_metadata", {})
    found._metadata = {(prefix + name).removesuffix("."): value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("case", CASES)
def test_hooks_are_shown_the_names_and_values_of_a_stock_load_once(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    make_source, make = CASES[case]
    source = make_source()
    state = source.state_dict() if isinstance(source, nn.Module) else source
    expected, target = two_alike(make)
    shown: dict[str, list[Any]] = {"stock": [], "ours": []}
    for kind, module in (("stock", expected), ("ours", target)):

        def look(given: dict[str, Any], prefix: str, kind: str = kind) -> None:
            values = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            shown[kind].append((prefix, list(given), values))

        with_hook(module, look)
        module._load_state_dict_pre_hooks.move_to_end(next(reversed(module._load_state_dict_pre_hooks)), last=False)
    stock(expected, state)
    ours(save(tmp_path / "c", {"m": state}), {"m": target}, strict=False)
    assert len(shown["ours"]) == len(shown["stock"]) <= 1
    states.assert_same(shown["ours"], shown["stock"])


# ---- what is read where ---------------------------------------------------------------------------------------------


def test_keys_that_name_a_part_show_only_that_part(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": nn.Sequential(qkv_apart(), linear(a=0))})
    target = nn.Sequential(Fused(), linear(a=0))
    before = copy.deepcopy(target.state_dict())
    asyncckpt.load(path, {"m": target}, keys=["m.0"])
    saved = asyncckpt.load(path)["m"]
    assert torch.equal(target[0].qkv.weight, torch.cat([saved[f"0.{n}.weight"] for n in "qkv"]))  # type: ignore[union-attr, arg-type]
    assert torch.equal(target[1].a.weight, before["1.a.weight"])  # type: ignore[union-attr, arg-type]
    with pytest.raises(MissingKeysError) as caught:
        asyncckpt.load(path, {"m": Fused()}, keys=["m.qkv"])
    assert caught.value.keys is not None and "m.qkv.weight" in caught.value.keys


@pytest.mark.parametrize("kind", ["function", "table"])
def test_a_key_map_leads_to_what_the_hooks_are_shown(tmp_path: Path, kind: str) -> None:
    source = qkv_apart()
    path = save(tmp_path / "c", {"net": {"body": source}})
    target, expected = Fused(), Fused()
    expected.load_state_dict(source.state_dict())
    names = {f"m.{name}": f"net.body.{name}" for name in target.state_dict()}
    asyncckpt.load(path, {"m": target}, key_map=names if kind == "table" else lambda k: k.replace("m.", "net.body.", 1))
    states.assert_same(target.state_dict(), expected.state_dict())


def test_a_torch_file_of_one_state_loads_by_key_map(tmp_path: Path) -> None:
    source = sequential(qkv_apart, lambda: Versioned(first=True))()
    torch.save(source.state_dict(), tmp_path / "f.pt")
    target, expected = sequential(Fused, Versioned)(), sequential(Fused, Versioned)()
    expected.load_state_dict(source.state_dict())
    asyncckpt.load(tmp_path / "f.pt", {"m": target}, key_map=lambda k: k.removeprefix("m."))
    states.assert_same(target.state_dict(), expected.state_dict())


def test_versions_are_found_where_a_part_of_a_saved_module_is_loaded(tmp_path: Path) -> None:
    source = sequential(batch_norm, lambda: Versioned(first=True))()
    path = save(tmp_path / "c", {"m": source})
    target, expected = Versioned(), Versioned()
    expected.load_state_dict(source[1].state_dict())  # type: ignore[index]
    asyncckpt.load(path, {"m": {"1": target}})
    states.assert_same(target.state_dict(), expected.state_dict())
    path = save(tmp_path / "d", {"m": {"1": source[1]}})  # type: ignore[index]
    whole = sequential(batch_norm, Versioned)()
    asyncckpt.load(path, {"m": whole}, keys=["m.1"])
    states.assert_same(whole[1].state_dict(), expected.state_dict())  # type: ignore[index]


def test_managers_and_restore_latest_show_hooks_the_saved_names_too(tmp_path: Path) -> None:
    checkpointer = SyncCheckpointer(fsync=False)
    source, expected = qkv_apart(), Fused()
    expected.load_state_dict(source.state_dict())
    with CheckpointManager(tmp_path, checkpointer=checkpointer, preemption_signal=()) as manager:
        manager.save(1, {"m": source})
        manager.wait()
        for restore in (manager.restore, lambda target: asyncckpt.restore_latest(tmp_path, target)):
            target = Fused()
            restore({"m": target})
            states.assert_same(target.state_dict(), expected.state_dict())


def test_parameters_without_loading_code_are_filled_with_no_copy_beside_them(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), old_weight_norm(nn.Linear(64, 64)))
    target = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    )
    path = save(tmp_path / "c", {"m": source})
    made: list[int] = []
    real = torch.empty

    def counted(*args: Any, **kw: Any) -> torch.Tensor:
        found = real(*args, **kw)
        made.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        asyncckpt.load(path, {"m": target})
    assert sum(made) < 64 * 64 * 4 + 64 * 4 + 4096  # weight_v and weight_g, and small things


def test_a_plan_says_what_the_modules_own_code_decides(tmp_path: Path) -> None:
    source = qkv_apart()
    path = save(tmp_path / "c", {"m": source, "b": without_counter()})
    plan = asyncckpt.plan_load(path, {"m": Fused(), "b": batch_norm()})
    assert plan.undecided == ("m.qkv.weight", "m.qkv.bias", "b.num_batches_tracked")
    assert plan.fits and not plan.missing and not plan.unexpected
    assert plan.nbytes == sum(t.nbytes for t in source.state_dict().values()) + 4 * 3 * 4


# ---- what changes, and when -----------------------------------------------------------------------------------------


def test_what_no_code_can_make_is_missing_before_anything_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": nn.Sequential(nn.Linear(2, 2, bias=False), batch_norm()), "w": torch.ones(2)})
    target = {"m": nn.Sequential(nn.Linear(2, 2), batch_norm()), "w": torch.zeros(2)}
    before = copy.deepcopy(target["m"].state_dict())  # type: ignore[union-attr]
    with pytest.raises(MissingKeysError, match="nothing was changed") as caught:
        asyncckpt.load(path, target)
    assert caught.value.keys == ["m.0.bias"]
    states.assert_same(target["m"].state_dict(), before)  # type: ignore[union-attr]
    assert not target["w"].any()  # type: ignore[operator]


def test_what_code_did_not_make_is_missing_before_the_rest_of_the_target_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "m": linear(a=0), "n": 1, "other": nn.Linear(2, 2)})
    other = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    target = {"w": torch.zeros(2), "m": with_hook(linear(a=0, b=0), renames("x", "y")), "n": 0, "other": other}
    with pytest.raises(MissingKeysError, match=r"load_state_dict\(\).*values of this module") as caught:
        asyncckpt.load(path, target)
    assert caught.value.keys == ["m.b.weight", "m.b.bias"]
    assert not target["w"].any() and target["n"] == 0  # type: ignore[union-attr, operator]
    states.assert_same(other.state_dict(), before)


def test_nothing_of_a_module_with_hooks_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2)})
    target = {"w": torch.zeros(2), "m": Fused()}
    for strict in (True, False):
        with pytest.raises(MissingKeysError, match="nothing was changed"):
            asyncckpt.load(path, target, strict=strict)
    assert not target["w"].any()  # type: ignore[operator]


def test_a_size_that_a_modules_code_makes_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": linear(old=0)})
    target = with_hook(nn.Sequential(OrderedDict(new=nn.Linear(4, 5))), renames("old.", "new."))
    with pytest.raises(ShapeMismatchError, match=r"'m\.new\.weight'.*\[4, 4\].*\[5, 4\]") as caught:
        asyncckpt.load(path, {"m": nn.DataParallel(target)})
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("m.new.weight", [4, 4], [5, 4])


def test_a_hook_that_raises_is_named(tmp_path: Path) -> None:
    def hook(state: dict[str, Any], prefix: str) -> None:
        raise KeyError("lost")

    with pytest.raises(StateLoadError, match=r"'m', a Sequential.*KeyError") as caught:
        asyncckpt.load(save(tmp_path / "c", {"m": linear(a=0)}), {"m": with_hook(linear(a=0), hook)})
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("fails", [True, False])
def test_a_module_keeps_no_hook_of_the_load(tmp_path: Path, fails: bool) -> None:
    path = save(tmp_path / "c", {"m": linear(a=0)})
    target = with_hook(linear(a=0, **({"b": 0} if fails else {})), renames("x", "y"))
    hooks = [(len(m._load_state_dict_pre_hooks), len(m._load_state_dict_post_hooks)) for m in target.modules()]
    if fails:
        with pytest.raises(MissingKeysError):
            asyncckpt.load(path, {"m": target})
    else:
        asyncckpt.load(path, {"m": target})
    assert hooks == [(len(m._load_state_dict_pre_hooks), len(m._load_state_dict_post_hooks)) for m in target.modules()]


# ---- other ways to load ---------------------------------------------------------------------------------------------


class Assigning(nn.Linear):
    """Takes the tensors that it is given."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


def test_a_module_that_takes_the_tensors_themselves_gets_them(tmp_path: Path) -> None:
    source, target = nn.Linear(3, 3), Assigning(3, 3)
    asyncckpt.load(save(tmp_path / "c", {"m": source}), {"m": target})
    states.assert_same(target.state_dict(), source.state_dict())
    assert target.weight.requires_grad and target.weight.is_leaf


@pytest.mark.parametrize("case", ["plain", "three projections into one", "old weight_norm"])
def test_swapping_of_parameters_on_conversion_gives_the_same(tmp_path: Path, case: str) -> None:
    make_source, make = CASES[case]
    source = make_source()
    expected, target = two_alike(make)
    expected.load_state_dict(source.state_dict())
    path = save(tmp_path / "c", {"m": source})
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        asyncckpt.load(path, {"m": target})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    states.assert_same(target.state_dict(), expected.state_dict())


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: with_hook(nn.Linear(4, 4), renames("old_", ""))])
def test_parameters_of_inference_mode_are_filled(tmp_path: Path, make: Make) -> None:
    source = nn.Linear(4, 4)
    with torch.inference_mode():
        target = make()
    asyncckpt.load(save(tmp_path / "c", {"m": source}), {"m": target})
    states.assert_same({k: v.clone() for k, v in target.state_dict().items()}, dict(source.state_dict()))


def test_a_shared_submodule_is_loaded_under_both_names(tmp_path: Path) -> None:
    def made(make: Make) -> nn.Module:
        shared = make()
        return nn.ModuleDict({"a": shared, "b": shared})

    source, target, expected = made(qkv_apart), made(Fused), made(Fused)
    expected.load_state_dict(source.state_dict())
    asyncckpt.load(save(tmp_path / "c", {"m": source}), {"m": target})
    found, wanted = ({name: value.clone() for name, value in m.state_dict().items()} for m in (target, expected))
    states.assert_same(found, wanted)
    assert target["a"] is target["b"]  # type: ignore[index]


def test_a_tied_name_that_was_not_saved_is_filled_with_its_tensor(tmp_path: Path) -> None:
    target = with_hook(linear(a=0, head=0), renames("x", "y"))
    target.head.weight = target.a.weight
    source = linear(a=0, head=0).state_dict()
    del source["head.weight"]
    asyncckpt.load(save(tmp_path / "c", {"m": source}), {"m": target})
    assert torch.equal(target.head.weight, source["a.weight"]) and target.head.weight is target.a.weight


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.parametrize("case", ["nested ones", "old weight_norm", "batch norm of version 1"])
def test_copies_first_or_not_it_is_the_same(tmp_path: Path, case: str, low_memory: bool) -> None:
    make_source, make = CASES[case]
    source = make_source()
    state = source.state_dict() if isinstance(source, nn.Module) else source
    expected, target = two_alike(make)
    expected.load_state_dict(state)
    asyncckpt.load(save(tmp_path / "c", {"m": state}), {"m": target}, low_memory=low_memory, verify=low_memory)
    states.assert_same(comparable(target), comparable(expected))


# ---- what a module has named itself and does not take ----------------------------------------------------------------


class Shows(nn.Module):
    """Its state has other names than its load hooks know; `what` is done with each entry."""

    def __init__(self, what: Callable[[dict[str, Any], str], None], has_code: bool) -> None:
        super().__init__()
        self.a, self.plain = nn.Linear(4, 4), torch.randn(2)
        self.register_buffer("passing", torch.randn(3), persistent=False)
        if has_code:
            self.b = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self._register_state_dict_hook(lambda module, state, prefix, *rest: what(module, state, prefix))  # type: ignore[no-untyped-call]


def renames_copies(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}c.weight"] = state.pop(f"{prefix}a.weight").clone()


def renames_live(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}c.weight"] = state.pop(f"{prefix}a.weight")


def drops(module: Any, state: dict[str, Any], prefix: str) -> None:
    del state[f"{prefix}a.weight"]


def adds_live(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}passing"], state[f"{prefix}plain"] = module.passing, module.plain


def adds_a_count(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}count"] = int(module.plain[0] * 1000)


def adds_a_version(module: Any, state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}version"] = "2"


@pytest.mark.parametrize("has_code", [False, True])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "what, lost",
    [
        (renames_copies, ["c.weight"]),
        (renames_live, []),
        (drops, []),
        (adds_live, []),
        (adds_a_count, ["count"]),
        (adds_a_version, []),
    ],
)
def test_what_a_module_names_itself_and_does_not_take_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: Any, lost: list[str], strict: bool, has_code: bool
) -> None:
    source, target = nn.Sequential(Shows(what, has_code)), nn.Sequential(Shows(what, has_code))
    path = save(tmp_path / "c", {"m": source, "n": 1})
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        missing, error = ours(path, {"m": target, "n": 0}, strict)
    names = [f"m.0.{name}" for name in lost]
    assert error is None and missing == (names if strict else [])
    assert all(name in caplog.text for name in (() if strict else names))
    if not lost:
        states.assert_same(target.state_dict(), source.state_dict())
        assert not caplog.records


@pytest.mark.parametrize("make, make_target, places", [
    (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False), ["bias"]),
    (lambda: nn.Linear(2, 2, bias=False), lambda: nn.Linear(2, 2, bias=False), []),
    (lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(1, 1)),
     lambda: nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(1, 1)), ["0.weight", "0.bias"]),
    (lambda: nn.ModuleDict({"x": nn.ModuleList([nn.Linear(1, 1)]), "y": nn.Linear(1, 1)}),
     lambda: nn.ModuleDict({"x": nn.ModuleList(), "y": nn.Linear(1, 1)}), ["x"]),
    (lambda: nn.ParameterDict({"a": torch.ones(2)}), nn.ParameterDict, [""]),
    (lambda: nn.Linear(2, 2), nn.Sequential, [""]),
    (nn.Sequential, nn.Sequential, []),
    (lambda: nn.Linear(2, 2), lambda: with_hook(nn.Linear(2, 2, bias=False), lambda s, p: s.pop(p + "bias", None)),
     []),
])  # fmt: skip
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_place_of_a_module_that_is_empty_and_cannot_take_what_was_saved_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make, make_target: Make, places: list[str], is_flat: bool
) -> None:
    path = save(tmp_path / "c", {"m": make(), "n": 1})
    if is_flat:
        torch.save({f"m.{name}": value for name, value in make().state_dict().items()} | {"n": 1}, tmp_path / "f")
        path = str(tmp_path / "f")
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        asyncckpt.load(path, {"m": nn.DataParallel(make_target()), "n": 0})
    said = [
        record.getMessage() for record in caplog.records if "is not loaded: the module has None" in record.getMessage()
    ]
    assert len(said) == bool(places)
    assert all(f"m.{name}".removesuffix(".") in said[0].split(" for ")[1] for name in places)


@pytest.mark.parametrize("values", [(3, 3), (3, 4)])
@pytest.mark.parametrize("is_inside", [False, True])
def test_extra_state_of_one_module_under_two_names_is_what_was_saved_under_both(
    tmp_path: Path, values: tuple[int, int], is_inside: bool
) -> None:
    class Counting(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def get_extra_state(self) -> int:
            return self.n

        def set_extra_state(self, n: int) -> None:
            self.n = n

    def made(one: nn.Module, other: nn.Module) -> Any:
        return {"m": nn.ModuleDict({"a": one, "b": other})} if is_inside else {"a": one, "b": {"c": other}}

    path, target = save(tmp_path / "c", made(*map(Counting, values))), Counting(0)
    assert (asyncckpt.plan_load(path, made(target, target)).shared == ()) is False
    if values[0] == values[1]:
        asyncckpt.load(path, made(target, target))
        assert target.n == 3
    else:
        with pytest.raises(AliasMismatchError, match="nothing was changed"):
            asyncckpt.load(path, made(target, target))
        assert target.n == 0


class Tied(nn.Module):
    def __init__(self, is_tied: bool, hook: Callable[[dict[str, Any], str], None] | None) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.emb.weight
        if hook is not None:
            with_hook(self, hook)


def nothing(state: dict[str, Any], prefix: str) -> None:
    pass


def drops_head(state: dict[str, Any], prefix: str) -> None:
    state.pop(f"{prefix}head.weight")


def doubles(state: dict[str, Any], prefix: str) -> None:
    for name in ("emb", "head"):
        state[f"{prefix}{name}.weight"] = state[f"{prefix}{name}.weight"] * 2


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("hook, factor, refuses", [
    (None, 1, True), (nothing, 1, True), (doubles, 2, True), (drops_head, 1, False),
])  # fmt: skip
def test_a_tied_tensor_that_loading_code_fills_has_what_was_saved_under_both_names(
    tmp_path: Path, hook: Any, factor: int, refuses: bool, differs: bool
) -> None:
    source, target = Tied(False, None), Tied(True, hook)
    if not differs:
        source.head.weight.data.copy_(source.emb.weight)
    path = save(tmp_path / "c", {"x": [source]})
    shared = asyncckpt.plan_load(path, {"x": [target]}).shared
    assert shared == ("x.0.emb.weight", "x.0.head.weight"), "they were saved as two"
    if differs and refuses:
        with pytest.raises(AliasMismatchError) as caught:
            asyncckpt.load(path, {"x": [target]})
        assert (caught.value.fqn, caught.value.other_fqn) == ("x.0.emb.weight", "x.0.head.weight")
        return
    if hook is drops_head:  # what it drops is missing
        with pytest.raises(MissingKeysError, match="head"):
            asyncckpt.load(path, {"x": [target]})
    else:
        asyncckpt.load(path, {"x": [target]})
    assert torch.equal(target.emb.weight, source.emb.weight * factor)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("kind", ["a module", "a module with code", "a tensor"])
def test_a_tensor_that_loading_code_and_another_place_fill_has_what_was_saved_for_both(
    tmp_path: Path, kind: str, is_equal: bool, first: bool
) -> None:
    def state(one: Any, weight: Any) -> dict[str, Any]:
        other = nn.Linear(3, 5, bias=False)
        other.weight = weight
        if kind == "a module with code":
            with_hook(other, nothing)
        places = [("m", one), ("o", weight if kind == "a tensor" else other)]
        return dict(places if first else reversed(places))

    source, target = Tied(False, None), Tied(False, nothing)
    weight = nn.Parameter(source.head.weight.detach().clone() + (0 if is_equal else 1))
    path = save(tmp_path / "c", state(source, weight))
    before = copy.deepcopy(target.state_dict())
    if is_equal:
        asyncckpt.load(path, state(target, target.head.weight))
        states.assert_same(target.state_dict(), source.state_dict())
    else:
        assert asyncckpt.plan_load(path, state(target, target.head.weight)).shared
        with pytest.raises(AliasMismatchError, match="nothing was changed"):
            asyncckpt.load(path, state(target, target.head.weight))
        states.assert_same(target.state_dict(), before)


def test_a_state_of_nested_dicts_is_given_whole_as_it_was_saved(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight, self.words = nn.Parameter(torch.full((2,), value)), {"value": value}

        def state_dict(self) -> Any:  # type: ignore[override]
            return {"inner": {"w": self.weight.detach().clone()}, "words": self.words}

        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
            self.weight.data.copy_(state["inner"]["w"])
            self.words = state["words"]

    target = Nested(5.0)
    asyncckpt.load(save(tmp_path / "c", {"m": Nested(1.0)}), {"m": nn.DataParallel(target)})
    assert target.weight.tolist() == [1, 1] and target.words == {"value": 1.0}


def test_buffers_that_are_not_stored_any_more_are_left_alone(tmp_path: Path) -> None:
    def made(persistent: bool, value: float) -> nn.Module:
        module = with_hook(nn.Linear(2, 2), renames("x", "y"))
        module.register_buffer("freqs", torch.full((2,), value), persistent=persistent)
        return module

    target = made(False, 5.0)
    asyncckpt.load(save(tmp_path / "c", {"m": made(True, 1.0)}), {"m": target})
    assert target.freqs.tolist() == [5, 5]


# ---- sharded parameters ---------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", ["plain", "a name", "three projections into one", "names that change places"])
@pytest.mark.parametrize("source_is_sharded", [False, True])
def test_sharded_modules_take_what_whole_ones_take(
    tmp_path: Path, mesh: Any, case: str, source_is_sharded: bool
) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    make_source, make = CASES[case]
    source = nn.Sequential(make_source())
    expected, target = two_alike(lambda: nn.Sequential(make()))
    expected.load_state_dict(source.state_dict())
    if source_is_sharded:
        fully_shard(source, mesh=mesh)
    for child in target.children():
        fully_shard(child, mesh=mesh)
    fully_shard(target, mesh=mesh)
    asyncckpt.load(save(tmp_path / "c", {"m": source}), {"m": target})
    assert all(isinstance(p, DTensor) for p in target.parameters())
    found = {name: p.to_local() for name, p in target.state_dict().items()}
    states.assert_same(found, dict(expected.state_dict()))


def test_missing_names_of_a_sharded_module_are_known_before_anything_changes(tmp_path: Path, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    path = save(tmp_path / "c", {"m": linear(a=0)})
    target = linear(a=0, b=0)
    fully_shard(target, mesh=mesh)
    with pytest.raises(MissingKeysError, match="nothing was changed"):
        asyncckpt.load(path, {"m": target})


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        yield
