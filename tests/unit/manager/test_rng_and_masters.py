"""What a resumed training needs beside its state dicts: random numbers, and float32 masters of its weights."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from asyncckpt import RngState, refresh_master_params  # noqa: E402
from asyncckpt.manager.master_params import MasterParams, master_pairs  # noqa: E402

# ---- random numbers -------------------------------------------------------------------------------------------------


def drawn() -> list[Any]:
    found: list[Any] = [random.random(), random.gauss(0, 1), torch.rand(3).tolist(), torch.randperm(5).tolist()]
    if "numpy" in sys.modules:
        import numpy

        found += [numpy.random.rand(), numpy.random.randn()]
    return found


@pytest.fixture
def own_generators() -> Iterator[None]:
    """Generators that may be set: afterwards they are as before."""
    before = RngState().state_dict()
    yield
    RngState().load_state_dict(before)


def test_all_generators_are_captured_and_put_back(own_generators: None) -> None:
    random.gauss(0, 1)  # leaves a second one behind
    state = RngState().state_dict()
    first = drawn()
    assert drawn() != first
    RngState().load_state_dict(state)
    assert drawn() == first


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_a_numpy_that_draws_from_another_generator_goes_on_as_well(own_generators: None, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, kind)(3))
    try:
        numpy.random.standard_normal()
        state = RngState().state_dict()
        expected = numpy.random.standard_normal(3).tolist()
        RngState().load_state_dict(state)
        assert numpy.random.standard_normal(3).tolist() == expected
    finally:
        numpy.random.set_bit_generator(before)


def test_what_a_state_lacks_keeps_its_place(own_generators: None) -> None:
    state = RngState().state_dict()
    torch_only = {"torch": state["torch"]}
    expected = torch.rand(2).tolist()
    after = random.random()
    RngState().load_state_dict(state)
    random.random()
    RngState().load_state_dict(torch_only)
    assert torch.rand(2).tolist() == expected and random.random() != after


# ---- masters --------------------------------------------------------------------------------------------------------


class MixedPrecision:
    """An optimizer of bfloat16 weights with float32 masters, as Megatron-LM has it; its state dict may lack them."""

    def __init__(self, weights: list[torch.nn.Parameter], *, saves_masters: bool) -> None:
        self.float16_groups = [weights]
        self.fp32_from_float16_groups = [[w.detach().float().requires_grad_() for w in weights]]
        self.optimizer = torch.optim.AdamW(self.fp32_from_float16_groups[0], lr=0.01)
        self.saves_masters = saves_masters

    def step(self) -> None:
        for weight, master in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            master.grad = torch.ones_like(master) * weight.float().cos()
        self.optimizer.step()
        for weight, master in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            weight.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        masters = {"masters": self.fp32_from_float16_groups} if self.saves_masters else {}
        return {"optimizer": self.optimizer.state_dict(), **masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for group, saved in zip(self.fp32_from_float16_groups, state.get("masters", []), strict=False):
                for master, value in zip(group, saved, strict=True):
                    master.copy_(value)


def mixed(seed: int, *, saves_masters: bool) -> tuple[torch.nn.Parameter, MixedPrecision]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(50, generator=generator).bfloat16())
    return weight, MixedPrecision([weight], saves_masters=saves_masters)


def test_masters_that_were_loaded_stay_to_the_last_bit() -> None:
    weight, optimizer = mixed(0, saves_masters=True)
    for _ in range(3):
        optimizer.step()
    other, restored = mixed(1, saves_masters=True)
    masters = MasterParams([restored])
    restored.load_state_dict(optimizer.state_dict())
    other.data.copy_(weight)
    assert masters.refresh() == 0
    expected = optimizer.fp32_from_float16_groups[0][0]
    assert not torch.equal(expected, weight.float()), "it knows more than the weight"
    assert torch.equal(restored.fp32_from_float16_groups[0][0], expected)


def test_a_master_whose_rounding_is_the_weight_is_left_alone() -> None:
    weight, optimizer = mixed(0, saves_masters=False)
    optimizer.step()
    before = optimizer.fp32_from_float16_groups[0][0].clone()
    assert refresh_master_params(optimizer) == 0
    assert torch.equal(optimizer.fp32_from_float16_groups[0][0], before)
    weight.data.add_(1)
    assert refresh_master_params(optimizer) == 1
    assert torch.equal(optimizer.fp32_from_float16_groups[0][0], weight.float())


def apex(weight: Any, master: Any) -> Any:
    return SimpleNamespace(fp16_groups=[[weight]], fp32_from_fp16_groups=[[master]])


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "apex": apex,
    "amp": lambda weight, master: SimpleNamespace(_amp_stash=apex(weight, master)),
    "flat": lambda weight, master: SimpleNamespace(fp16_groups_flat=[weight], fp32_groups_flat=[master]),
    "fused": lambda weight, master: SimpleNamespace(
        param_groups=[{"params": [weight]}], param_groups_master=[{"params": [master]}]
    ),
    "in its state": lambda weight, master: SimpleNamespace(state={weight: {"master_param": master}}),
    "its own": lambda weight, master: SimpleNamespace(master_param_pairs=lambda: [(weight, master)]),
    "wrapped": lambda weight, master: SimpleNamespace(optimizer=FORMS["in its state"](weight, master)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_known_form_of_masters_is_understood_and_those_that_are_spared_stay(form: str) -> None:
    weight, master = torch.ones(3, dtype=torch.float16), torch.zeros(3)
    optimizer = FORMS[form](weight, master)
    assert len(master_pairs(optimizer)) == 1
    assert refresh_master_params(optimizer, but=[master]) == 0 and torch.equal(master, torch.zeros(3))
    assert refresh_master_params(optimizer) == 1 and torch.equal(master, torch.ones(3))


def test_a_plain_optimizer_keeps_none() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert master_pairs(optimizer) == []
