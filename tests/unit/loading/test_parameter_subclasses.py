"""Parameters and buffers whose class is a subclass: filled where they are, with their types and attributes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from torch import nn

import asyncckpt
from asyncckpt import CheckpointManager, PerRank, ShardedSlice, SyncCheckpointer
from asyncckpt.errors import ShapeMismatchError, UnsupportedLeafError
from asyncckpt.planning.planner import PlanCache


def save(path: Path, state: Any) -> str:
    with SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


class TPParam(nn.Parameter):
    """As those of tensor parallel frameworks: with attributes."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, tp_dim: int = 0) -> TPParam:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.tp_dim = tp_dim  # type: ignore[attr-defined]
        return made


class Watching(TPParam):
    """With a `__torch_function__` of its own, as quantised parameters have: every result is of this class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]


class Packed(TPParam):
    """Of integers, and with a `__new__` that asks for more than the data."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, quant_type: str = "nf4") -> Packed:
        made = TPParam.__new__(cls, data.to(torch.uint8), False)
        made.quant_type = quant_type  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


class OwnBuffer(nn.Buffer):
    """A buffer of a class of its own."""

    def __new__(cls, data: torch.Tensor, *, persistent: bool = True) -> OwnBuffer:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.persistent = persistent  # type: ignore[attr-defined]
        made._is_buffer = True  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]


def _inference(data: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return TPParam(data.clone(), requires_grad=False)


MAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with attributes": lambda data: TPParam(data, tp_dim=1),
    "frozen": lambda data: TPParam(data, requires_grad=False),
    "with a function of its own": Watching,
    "of integers": Packed,
    "a buffer": OwnBuffer,
    "not contiguous": lambda data: TPParam(data.t().contiguous().t()),
    "a view of a larger one": lambda data: TPParam(torch.stack([data, data])[1]),
    "of complex numbers": lambda data: TPParam(torch.complex(data, data).conj()),
    "of float8": lambda data: TPParam(data.to(torch.float8_e4m3fn), requires_grad=False),
    "inference": _inference,
}


class Model(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], value: float) -> None:
        super().__init__()
        self.w, self.b = make(torch.full((3, 4), value) + torch.arange(4)), nn.Parameter(torch.full((3,), value))


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "a module": lambda model: model,
    "a compiled module": lambda model: torch.compile(model, backend="eager"),
    "its state": lambda model: model.state_dict(),
    "its variables": lambda model: model.state_dict(keep_vars=True),
    "a dict": lambda model: {"w": model.w, "b": model.b},
    "a list": lambda model: [model.w, (model.b,)],
    "of a rank": lambda model: PerRank({"w": model.w}),
}


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that is an ordinary tensor."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return value.detach().clone().resolve_conj().as_subclass(torch.Tensor)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", MAKES)
def test_a_parameter_of_a_subclass_is_filled_where_it_is(tmp_path: Path, kind: str, wrap: str) -> None:
    source, target = Model(MAKES[kind], 1.0), Model(MAKES[kind], 5.0)
    path = save(tmp_path / "c", {"m": WRAPS[wrap](source)})
    held, attributes = target.w, dict(vars(target.w))
    address = plain_address(held)
    if kind == "inference":
        with torch.inference_mode():
            asyncckpt.load(path, {"m": WRAPS[wrap](target)}, strict=True)
    else:
        asyncckpt.load(path, {"m": WRAPS[wrap](target)}, strict=True)
    assert target.w is held and type(held) is type(source.w) and vars(held) == attributes
    assert plain_address(held) == address
    states.assert_same(plain(held), plain(source.w))


def plain_address(value: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return value.data_ptr()


@pytest.mark.parametrize("kind", MAKES)
def test_without_a_target_it_comes_back_as_a_plain_tensor_as_parameters_do(tmp_path: Path, kind: str) -> None:
    source = Model(MAKES[kind], 1.0)
    found = asyncckpt.load(save(tmp_path / "c", {"w": source.w, "b": source.b}))
    assert type(found["w"]) is type(found["b"]) is torch.Tensor
    states.assert_same(found, {"w": plain(source.w), "b": plain(source.b)})


def test_a_manager_restores_a_model_of_such_parameters(tmp_path: Path) -> None:
    source, target = Model(TPParam, 1.0), Model(TPParam, 5.0)
    with CheckpointManager(tmp_path, checkpointer=SyncCheckpointer(fsync=False), preemption_signal=()) as manager:
        manager.save(1, {"m": source, "step": 1})
        manager.wait()
        manager.restore({"m": target, "step": 0})
    assert torch.equal(target.w, source.w) and type(target.w) is TPParam


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"m": Model(TPParam, 1.0)})
    target = TPParam(torch.zeros(4, 3))
    with pytest.raises(ShapeMismatchError) as caught:
        asyncckpt.load(path, {"m": {"w": target}})
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("m.w", [3, 4], [4, 3])
    assert not target.any()


def test_tied_parameters_of_a_subclass_are_one_tensor(tmp_path: Path) -> None:
    one = TPParam(torch.ones(3))
    path = save(tmp_path / "c", {"a": one, "b": one, "c": nn.Parameter(one.data)})
    found = asyncckpt.load(path)
    assert found["a"] is found["b"] is found["c"]
    other = TPParam(torch.zeros(3))
    asyncckpt.load(path, {"a": other, "b": other}, strict=True)
    assert other.all()


def test_the_plan_of_a_save_is_kept_for_the_next() -> None:
    cache = PlanCache(files_per_rank=1)
    for n in range(3):
        cache.plan_for({"m": Model(Watching, float(n)), "w": TPParam(torch.ones(2)), "x": torch.ones(1)})
    assert cache.n_plans_made == 1


def test_an_optimizer_of_such_parameters_goes_on(tmp_path: Path) -> None:
    def trained(model: Model, optimizer: torch.optim.Optimizer) -> None:
        (model.w.square().sum() + model.b.sum()).backward()
        optimizer.step()

    source, target = Model(TPParam, 1.0), Model(TPParam, 5.0)
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (source, target))
    trained(source, first)
    asyncckpt.load(save(tmp_path / "c", {"m": source, "o": first}), {"m": target, "o": second}, strict=True)
    target.w.grad = target.b.grad = None
    source.zero_grad()
    trained(source, first)
    trained(target, second)
    assert torch.equal(source.w, target.w) and type(target.w) is TPParam


def test_a_shard_of_a_parameter_of_a_subclass_is_saved_and_filled(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    path = save(tmp_path / "c", {"w": ShardedSlice(TPParam(whole), (4, 3), (0, 0))})
    part = TPParam(torch.zeros(2, 3))
    asyncckpt.load(path, {"w": ShardedSlice(part, (4, 3), (2, 0))}, strict=True)
    assert torch.equal(part.data, whole[2:])


class Wrapper(torch.Tensor):
    """Says itself what operations do; its elements lie elsewhere."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Dispatching(nn.Parameter):
    """A parameter whose elements need not be what it shows."""

    __torch_dispatch__ = Wrapper.__torch_dispatch__


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapper(torch.ones(3)),
        lambda: torch.Tensor._make_subclass(Dispatching, torch.ones(3)),
        nn.UninitializedParameter,
        nn.UninitializedBuffer,
    ],
    ids=["wrapper", "dispatching parameter", "lazy parameter", "lazy buffer"],
)
def test_what_has_no_ordinary_elements_is_refused_by_name(tmp_path: Path, make: Callable[[], Any]) -> None:
    path = save(tmp_path / "c", {"a": OrderedDict(x=torch.ones(3))})
    with (
        pytest.raises(UnsupportedLeafError, match=r"'a\.x'.*cannot be stored"),
        SyncCheckpointer(fsync=False) as checkpointer,
    ):
        checkpointer.save({"a": {"x": make()}}, tmp_path / "d")
    with pytest.raises(UnsupportedLeafError, match=r"'a\.x'.*cannot be filled"):
        asyncckpt.load(path, {"a": {"x": make()}})
