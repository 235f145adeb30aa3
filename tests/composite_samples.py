"""Tensor subclasses with `__tensor_flatten__`, as libraries for quantization have them, and functions that compare."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Rounding(enum.Enum):
    """In a context, as an enum."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclasses.dataclass(frozen=True)
class Settings:
    """In a context, as a dataclass."""

    rounding: Rounding = Rounding.NEAREST
    block: int = 4


class Range(NamedTuple):
    """In a context, as a named tuple."""

    low: float
    high: float


class Sample(torch.Tensor):
    """The base of the samples: a class names its components and its context."""

    components: tuple[str, ...] = ()
    context: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls: Any, *values: Any) -> Any:
        first = values[0]
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32, device=first.device)

    def __init__(self, *values: Any) -> None:
        for name, value in zip((*self.components, *self.context), values, strict=True):
            setattr(self, name, value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.components), {name: getattr(self, name) for name in self.context}

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(tensors[name] for name in cls.components), *(context[name] for name in cls.context))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    def changed(self, change: Any) -> Any:
        """Return the same tensor with other components."""
        made = [change(getattr(self, name)) for name in self.components]
        return type(self)(*made, *(getattr(self, name) for name in self.context))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return value.changed(func)
        if func is aten._to_copy.default:
            return value.changed(lambda part: part.clone())
        if func is aten.copy_.default:
            for name in value.components:
                getattr(value, name).copy_(getattr(args[1], name))
            return value
        if func is aten.view.default and list(args[1]) == list(value.shape):
            return value.changed(lambda part: part)
        if func is aten.slice.Tensor:
            return value.slice(*args[1:])
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class Blocks(Sample):
    """Codes with a scale for each `settings.block` elements in row-major order, and a table that is always the same."""

    components = ("codes", "scale", "table")
    context = ("settings",)

    def slice(self, dim: int, start: int, end: int) -> Blocks:
        width = math.prod(self.shape[1:])
        first, last = (n * width / self.settings.block for n in (start, end))
        if dim or first % 1 or last % 1:
            raise ValueError("only whole blocks")
        return Blocks(self.codes[start:end], self.scale[int(first) : int(last)], self.table.clone(), self.settings)


class OneScale(Sample):
    """Codes with one scale for all elements."""

    components = ("codes", "scale")
    context = ("range", "kept", "note")


class Pair(Sample):
    """Holds another subclass and a plain tensor."""

    components = ("inner", "bias")


def blocks(seed: int, shape: tuple[int, ...] = (12, 8), settings: Settings = Settings()) -> Blocks:
    """Return random `Blocks`."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, shape, dtype=torch.int8, generator=g)
    return Blocks(codes, torch.rand(codes.numel() // settings.block, generator=g), torch.arange(16.0), settings)


def one_scale(seed: int, shape: tuple[int, ...] = (12, 8), note: Any = None) -> OneScale:
    """Return a random `OneScale`."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, shape, dtype=torch.int8, generator=g)
    return OneScale(codes, torch.rand((), generator=g), Range(-1.0, 1.0), torch.bfloat16, note)


def pair(seed: int) -> Pair:
    """Return a random `Pair`."""
    return Pair(blocks(seed), torch.full((12,), float(seed)))


def parts(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors in a tensor, in order."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        return [part for name in value.__tensor_flatten__()[0] for part in parts(getattr(value, name))]
    return [value]


def contexts(value: Any) -> list[Any]:
    """Return the types and contexts in a tensor, in order."""
    if not hasattr(value, "__tensor_flatten__"):
        return []
    names, context = value.__tensor_flatten__()
    return [type(value), context, *(found for name in names for found in contexts(getattr(value, name)))]


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal bit by bit, with classes and contexts."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or contexts(one) != contexts(other):
            return False
        pairs = zip(parts(one), parts(other), strict=True)
        return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in pairs)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
