"""A target that is loaded holds, leaf by leaf, what was saved under its name, or an error or a warning names it.

Random states of every kind of leaf and container are saved, and loaded into random targets that were made of them:
pruned, extended, emptied, of other types, tied otherwise. What must have come out is said here without any of the
loading code: by the names of what was saved. `ASYNCCKPT_TEST_LOADS` is the number of loads.
"""

from __future__ import annotations

import copy
import datetime
import logging
import os
import random
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from states import assert_same, tensor_of  # noqa: E402

import asyncckpt  # noqa: E402
from asyncckpt import PerRank, RankInfo, ShardedSlice  # noqa: E402
from asyncckpt.errors import (  # noqa: E402
    AliasMismatchError,
    AsyncCkptError,
    ConfigError,
    LeafTypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateLoadError,
    UnsupportedLeafError,
)

try:
    import numpy as np
except ModuleNotFoundError:
    np = None  # type: ignore[assignment]

N_LOADS = int(os.environ.get("ASYNCCKPT_TEST_LOADS", "200"))
LOADS_PER_STATE = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4,), (3, 2), (2, 3), (0, 2), (2, 2, 2))
LONG = 70_000
"""Bytes objects of this length are stored beside the tensors."""

KEYS = ("a", "b", "w.x", "c", 0, 1, -7, "long name", None, 2.5, (1, "a"), b"k")
Pair = namedtuple("Pair", "first second")
ABSENT = object()


class Holder:
    """An object with a state, as an optimizer is one."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"held": self.state}

    def load_state_dict(self, state: Any) -> None:
        if type(state) is not dict:
            raise TypeError(f"a {type(state).__name__} is no state of mine")
        self.state = state["held"]


# ---- states ---------------------------------------------------------------------------------------------------------


class States:
    """Makes random states."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.tensors = rng, [torch.zeros(3)]

    def state(self) -> dict[Any, Any]:
        return {f"k{n}": self.value(1) for n in range(self.rng.randrange(2, 6))}

    def value(self, depth: int) -> Any:
        if depth < 4 and self.rng.random() < 0.45:
            return self.container(depth)
        return self.leaf()

    def container(self, depth: int) -> Any:
        rng = self.rng
        members = [self.value(depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
        keys: list[Any] = rng.sample(KEYS, len(members))
        kind = rng.randrange(15)
        if kind < 5:
            return dict(zip(keys, members, strict=True))
        if kind == 5:
            return OrderedDict(zip(keys, members, strict=True))
        if kind < 8:
            return members
        if kind == 8:
            return tuple(members)
        if kind == 9:
            return Pair(*([*members, None, None])[:2])
        if kind == 10:
            return {"state": dict(zip(keys, members, strict=True)), "param_groups": [{"lr": rng.random()}]}
        if kind == 11:
            return Counter({key: rng.randrange(9) for key in keys})
        if kind == 12:
            return defaultdict(rng.choice([list, None, int]), zip(keys, members, strict=True))
        if kind == 13:
            return deque(members, rng.choice([None, 3, 9]))
        state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.BatchNorm1d(3))
        return rng.choice([state, state.state_dict()])

    def leaf(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.5:
            return self.tensor()
        if kind < 0.58:
            return Holder(rng.choice([rng.randrange(99), {"m": torch.rand(2), "n": []}]))
        if kind < 0.63:
            return PerRank(rng.choice([rng.randrange(99), {"s": rng.random(), "t": torch.rand(2)}, [], {}]))
        if kind < 0.7 and np is not None:
            return rng.choice([np.arange(4.0), np.ones((2, 2), "i2")[:, ::-1], np.float32(rng.random()), np.int64(5)])
        objects: tuple[Callable[[], Any], ...] = (
            lambda: rng.randrange(-(1 << 70), 1 << 70),
            rng.random,
            lambda: rng.choice([True, False, None, None]),
            lambda: f"text {rng.randrange(99)}",
            lambda: rng.randbytes(5),
            lambda: bytes([rng.randrange(256)]) * LONG,
            lambda: complex(rng.random(), -0.0),
            lambda: {rng.randrange(9), "s"},
            lambda: slice(rng.randrange(9)),
            lambda: torch.Size([rng.randrange(4), 2]),
            lambda: rng.choice([torch.float16, torch.device("cpu")]),
            lambda: datetime.timedelta(rng.randrange(99)),
            lambda: [rng.random() for _ in range(rng.randrange(4))],
            lambda: (rng.randrange(9), ["x", [None]]),
            lambda: rng.choice([[], (), {}, OrderedDict(), [[], []], [None], [{}, ()]]),
        )
        return rng.choice(objects)()

    def tensor(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.15:
            return rng.choice(self.tensors)
        value = tensor_of(rng.choice(DTYPES), rng.choice(SHAPES), rng.getrandbits(32))
        if value.is_floating_point() or value.is_complex():
            value = value.nan_to_num()
        if kind < 0.25 and value.dim() == 2:
            value = value.t()
        elif kind < 0.3 and value.is_complex():
            value = value.conj()
        elif kind < 0.35 and value.dtype == torch.float32:
            value = torch.nn.Parameter(value)
        elif kind < 0.42 and value.dim():
            return ShardedSlice(value, tuple(value.shape), (0,) * value.dim())
        self.tensors.append(value)
        return value


def blank(value: Any, rng: random.Random, seen: dict[int, Any]) -> Any:
    """The same structure with other values, tied where it was tied."""
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            new = torch.ones_like(value, requires_grad=False)
            seen[id(value)] = torch.nn.Parameter(new) if isinstance(value, torch.nn.Parameter) else new
        return seen[id(value)]
    if isinstance(value, ShardedSlice):
        full = torch.ones(tuple(value.global_shape), dtype=value.tensor.dtype)
        if rng.random() < 0.5 and full.dim():
            return ShardedSlice(full[: full.shape[0] // 2], tuple(full.shape), (0,) * full.dim())
        return full
    if isinstance(value, torch.nn.Module):
        made = copy.deepcopy(value)
        for tensor in made.state_dict().values():
            tensor.fill_(1)
        return rng.choice([made, torch.nn.DataParallel(made), made.state_dict()])
    if isinstance(value, Holder):
        return Holder(0) if rng.random() < 0.8 else {"held": blank(value.state, rng, seen)}
    if isinstance(value, PerRank):
        return rng.choice([PerRank, lambda v: v])(blank(value.value, rng, seen))
    if isinstance(value, Mapping):
        return like(value, {key: blank(member, rng, seen) for key, member in value.items()})
    if isinstance(value, deque):
        return deque((blank(member, rng, seen) for member in value), value.maxlen)
    if isinstance(value, Pair):
        return Pair(*(blank(member, rng, seen) for member in value))
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)(blank(member, rng, seen) for member in value)
    if np is not None and isinstance(value, np.ndarray):
        return rng.choice([np.zeros_like(value), np.zeros(value.shape, "f8"), np.zeros(3)])
    return rng.choice([value, 7, 0.5, "other", True])


def like(value: Mapping[Any, Any], members: dict[Any, Any]) -> Any:
    """A mapping of the type of `value`."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, members)
    return type(value)(members)  # type: ignore[call-arg]


# ---- changes --------------------------------------------------------------------------------------------------------


def containers(value: Any) -> Iterator[Any]:
    """Yield all containers that can be changed."""
    if isinstance(value, PerRank):
        yield from containers(value.value)
    elif isinstance(value, (dict, list)):
        yield value
        for member in value.values() if isinstance(value, dict) else value:
            yield from containers(member)
    elif isinstance(value, (tuple, deque)):
        for member in value:
            yield from containers(member)


EMPTY: tuple[Callable[[], Any], ...] = (
    *(dict, list, tuple, OrderedDict, Counter, deque),
    *(lambda: defaultdict(list), lambda: deque(maxlen=2), lambda: None),
)


def change(target: dict[Any, Any], rng: random.Random, states: States) -> None:
    """Change one thing in a target."""
    inside = rng.choice(list(containers(target)))
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    kind = rng.randrange(9)
    if kind == 0:  # more than was saved
        new = rng.choice([blank(states.value(3), rng, {}), torch.ones(2), rng.choice(EMPTY)()])
        if isinstance(inside, dict):
            inside[rng.choice(["new", "ema", 99])] = new
        else:
            inside.append(new)
        return
    if not keys:
        return
    key = rng.choice(keys)
    old = inside[key]
    tensors = [v for c in containers(target) for v in (c.values() if isinstance(c, dict) else c) if is_plain(v)]
    if kind == 1:
        del inside[key]
    elif kind == 2:
        inside[key] = rng.choice(EMPTY)()
    elif kind == 3:  # of another kind
        inside[key] = blank(states.value(3), rng, {})
    elif kind == 4 and is_plain(old):  # of another dtype or shape
        other = torch.ones(old.shape, dtype=rng.choice(DTYPES)) if rng.random() < 0.7 else torch.ones(5)
        inside[key] = other.t().contiguous().t() if other.dim() == 2 else other
    elif kind == 4 and isinstance(old, dict):
        made = rng.choice([OrderedDict, lambda v: defaultdict(list, v), dict, MappingProxyType])
        inside[key] = made(old)
    elif kind == 4 and type(old) in (list, tuple):
        inside[key] = rng.choice([list, tuple, deque])(old)
    elif kind == 5 and tensors:  # tied otherwise
        one = rng.choice(tensors)
        flat = one.detach()
        views = [one, flat.view(one.shape), *([flat.t()] if one.dim() == 2 else []), *([flat[:1]] if one.dim() else [])]
        inside[key] = rng.choice(views)
    elif kind == 6:
        other = rng.choice(list(containers(target)))
        if other is not target and not any(c is inside for c in containers(other)):
            inside[key] = other
    elif kind == 7 and isinstance(inside, dict):
        inside[key] = inside.pop(key)
    elif kind == 8 and isinstance(old, torch.Tensor) and not isinstance(old, torch.nn.Parameter):
        inside[key] = old.detach().clone()


def is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter)


# ---- what must come out ---------------------------------------------------------------------------------------------


def opened(value: Any) -> Any:
    """What stands for a value in a state: the state of an object, the value of a mark."""
    while True:
        if isinstance(value, PerRank):
            value = value.value
        elif isinstance(value, torch.nn.DataParallel):
            value = value.module
        elif isinstance(value, (torch.nn.Module, Holder)):
            value = value.state_dict()
        else:
            return value


def is_object(value: Any) -> bool:
    """Whether a list, tuple or deque is one object: it holds scalars, and lists of them."""
    if isinstance(value, (list, tuple, deque)) and type(value) is not torch.Size:
        return all(not isinstance(member, (deque, Pair)) and is_object(member) for member in value)
    scalars = (int, float, bool, str, type(None), complex) + ((np.generic,) if np is not None else ())
    return isinstance(value, scalars)


def is_container(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple, deque)) and type(value) is not torch.Size and not is_object(value)


def members_of(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


class Expected:
    """What was saved, by its names."""

    def __init__(self, state: Any) -> None:
        self.values: dict[str, Any] = {}
        self._walk(state, "")

    def _walk(self, value: Any, name: str) -> None:
        self.values[name] = value = opened(value)
        if is_container(value):
            for key, member in members_of(value):
                self._walk(member, f"{name}.{key}" if name else str(key))

    def get(self, name: str) -> Any:
        return self.values.get(name, ABSENT)


def resolved(value: Any) -> Any:
    """A value without what only says where it comes from: states, marks, slices, types of containers."""
    value = opened(value)
    if isinstance(value, ShardedSlice):
        return value.tensor
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone()
    if isinstance(value, OrderedDict):
        return OrderedDict((key, resolved(member)) for key, member in value.items())
    if isinstance(value, (Counter, defaultdict)):
        made = {key: resolved(member) for key, member in value.items()}
        return type(value).__name__, repr(getattr(value, "default_factory", None)), made
    if isinstance(value, Mapping):
        return {key: resolved(member) for key, member in value.items()}
    if isinstance(value, deque):
        return "deque", value.maxlen, list(map(resolved, value))
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return tuple(map(resolved, value))
    return list(map(resolved, value)) if isinstance(value, list) else value


class Check:
    """Compares a target after a load with what was saved.

    Attributes:
        unlike: What is not what was saved, by name; with the reason.
    """

    def __init__(self, expected: Expected) -> None:
        self.expected, self.unlike = expected, dict[str, str]()
        self._filled: set[Any] = set()
        self._absent: list[tuple[str, Any]] = []

    def finish(self) -> None:
        """Look at the tensors that were not saved: they are filled if they are filled under another name."""
        for name, place in self._absent:
            if place not in self._filled:
                self.unlike[name] = "was not saved"

    def compare(self, before: Any, after: Any, name: str) -> None:
        """`before`: the target's value as it was, of which the containers say what the leaves are."""
        saved = self.expected.get(name)
        if isinstance(before, Holder):
            self._value(after.state, self.expected.get(f"{name}.held"), f"{name}.held", before.state)
            return
        before, after = opened(before), opened(after)
        if not is_container(before) or not before:
            if isinstance(before, (list, deque)) and not before and isinstance(saved, (list, deque)):
                self._value(list(after), list(saved), name, before)
            elif isinstance(before, (torch.Tensor, ShardedSlice)):
                self._tensor(before, after, saved, name)
            elif isinstance(before, Mapping) and isinstance(saved, Mapping):
                self._value(dict(after), dict(saved), name, before)
            else:
                self._value(after, saved, name, before)
            return
        if isinstance(before, (list, tuple, deque)):
            n_saved = len(saved) if is_container(saved) and not isinstance(saved, Mapping) else len(before)
            if len(after) != n_saved:
                self.unlike[name] = f"has {len(after)} members, {n_saved} were saved"
                return
            for n in range(len(before), len(after)):
                self._value(after[n], self.expected.get(f"{name}.{n}"), f"{name}.{n}", ABSENT)
        elif list(map(repr, before)) != list(map(repr, after)):
            self.unlike[name] = f"has the keys {list(after)}, had {list(before)}"
            return
        for key, member in members_of(before):
            self.compare(member, after[key], f"{name}.{key}" if name else str(key))

    def _tensor(self, before: Any, after: Any, saved: Any, name: str) -> None:
        if saved is ABSENT:
            self._absent.append((name, place_of(after)))
            return
        self._filled.add(place_of(after))
        if np is not None and isinstance(saved, np.ndarray):
            saved = torch.from_numpy(saved.copy())
        if isinstance(saved, ShardedSlice):
            saved = saved.tensor
        if not isinstance(saved, torch.Tensor):
            self.unlike[name] = f"was saved as {saved!r}"
            return
        wanted = resolved(saved)
        if isinstance(after, ShardedSlice):
            wanted = wanted[: after.tensor.shape[0]] if wanted.dim() == after.tensor.dim() and wanted.dim() else wanted
        found = resolved(after)
        if found.dtype != wanted.dtype:
            if not torch.can_cast(wanted.dtype, found.dtype):
                self.unlike[name] = f"has {found.dtype}, saved was {wanted.dtype}"
                return
            wanted = wanted.to(found.dtype)
        if found.shape != wanted.shape or not torch.equal(found, wanted):
            self.unlike[name] = f"is {found}, saved was {wanted}"

    def _value(self, after: Any, saved: Any, name: str, before: Any) -> None:
        if np is not None and isinstance(before, np.ndarray):
            if saved is ABSENT:
                self._absent.append((name, place_of(after)))
                return
            self._filled.add(place_of(after))
        if saved is ABSENT:
            self.unlike[name] = "was not saved"
            return
        if np is not None and isinstance(before, np.ndarray) and isinstance(saved, (torch.Tensor, ShardedSlice)):
            saved = resolved(saved)
            saved = saved.numpy() if saved.dtype != torch.bfloat16 else saved
        try:
            assert_same(untied(resolved(after)), untied(resolved(saved)), name)
        except AssertionError as error:
            self.unlike[name] = str(error)


def place_of(value: Any) -> Any:
    """Where the elements of a tensor lie: those of one place are one tensor."""
    if not isinstance(value, torch.Tensor):
        return id(value)
    return (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else id(value)


def untied(value: Any) -> Any:
    """The same with every tensor of its own: which of them are one is said of the whole target, not of a part."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return like(value, {key: untied(member) for key, member in value.items()})
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)(map(untied, value))
    return value


def frozen(value: Any) -> Any:
    """A copy of a target: containers and values, shared by nothing."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().clone()
    if isinstance(value, PerRank):
        return PerRank(frozen(value.value))
    if isinstance(value, ShardedSlice):
        return ShardedSlice(value.tensor.clone(), value.global_shape, value.offsets)
    if isinstance(value, (torch.nn.Module, Holder)):
        return copy.deepcopy(value)
    if isinstance(value, MappingProxyType):
        return MappingProxyType({key: frozen(member) for key, member in value.items()})
    if isinstance(value, Mapping):
        return like(value, {key: frozen(member) for key, member in value.items()})
    if isinstance(value, Pair):
        return Pair(*map(frozen, value))
    if isinstance(value, deque):
        return deque(map(frozen, value), value.maxlen)
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)(map(frozen, value))
    return copy.deepcopy(value)


def identity(value: Any) -> Any:
    """Which objects a target is made of."""
    if isinstance(value, Mapping):
        return id(value), [(repr(key), identity(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple, deque)) and type(value) is not torch.Size:
        return id(value), list(map(identity, value))
    return (id(value), identity(value.value)) if isinstance(value, PerRank) else id(value)


def names_in(error: AsyncCkptError) -> list[str]:
    facts = error.facts()
    found = [*facts.get("keys", []), facts.get("fqn"), facts.get("other_fqn"), facts.get("value"), facts.get("leaf")]
    return [str(name) for name in found if name is not None]


def shown(value: Any) -> str:
    return re.sub(r"(\\x..|.)\1{30,}", r"\1...", repr(resolved(value)))[:2000]


REFUSALS = (
    MissingKeysError,
    ShapeMismatchError,
    LeafTypeMismatchError,
    AliasMismatchError,
    ConfigError,
    UnsupportedLeafError,
)


def test_every_leaf_of_a_target_is_what_was_saved_or_is_named(
    tmp_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt")
    outcomes: dict[str, int] = {}
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        for number in range(N_LOADS):
            if number % LOADS_PER_STATE == 0:
                states, path = States(rng), tmp_path / str(number)
                state = states.state()
                checkpointer.save(state, path)
                expected = Expected(state)
            seed = rng.getrandbits(64)
            case = f"load {number} (seed {seed})"
            outcome = one_load(path, state, states, expected, random.Random(seed), caplog, case)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert len(outcomes) >= 4 or N_LOADS < 100, outcomes
    assert outcomes.get("filled", 0) > N_LOADS // 8, outcomes


def one_load(
    path: Path,
    state: Any,
    states: States,
    expected: Expected,
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> str:
    """Load into a random target; returns how it ended."""
    target = blank(state, rng, {})
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        change(target, rng, states)
    options: dict[str, Any] = {"strict": rng.random() < 0.6, "low_memory": rng.random() < 0.7, "source": "disk"}
    wrapped = rng.random() < 0.2
    root = {"module": target} if wrapped else target
    if not wrapped and rng.random() < 0.15:
        options["keys"] = [name for name in map(str, target) if rng.random() < 0.7]
    if wrapped:
        options["key_map"] = lambda name: name.removeprefix("module.")
    before, made_of = frozen(root), identity(root)
    whole = copy.copy(expected.values)
    if wrapped:
        expected = Expected({})
        expected.values = {f"module.{name}": value for name, value in whole.items() if name}
    check = Check(expected)
    caplog.clear()

    def where() -> str:
        return f"{case}: {options}, saved {shown(state)}, target {shown(before)}"

    try:
        asyncckpt.load(path, root, **options)
    except StateLoadError as error:  # the object's own word; the rest is filled
        assert names_in(error), where()
        return "StateLoadError"
    except REFUSALS as error:
        assert names_in(error), where()
        assert identity(root) == made_of, f"{where()}: something was replaced before {error}"
        if "nothing was changed" not in str(error) and isinstance(error, AliasMismatchError):
            return "shared memory"  # is told by the values; the error says that tensors are filled
        try:
            assert_same(untied(resolved(root)), untied(resolved(before)))
        except AssertionError as unlike:
            raise AssertionError(f"{where()}: {unlike} changed before {error}") from error
        return type(error).__name__
    for name in root if "keys" in options else ():
        if str(name) in options["keys"]:
            check.compare(before[name], root[name], str(name))
    if "keys" not in options:
        check.compare(before, root, "")
    check.finish()
    unnamed = {name: why for name, why in check.unlike.items() if name not in caplog.text}
    if "more: " not in caplog.text and " more" in caplog.text:  # a long list is cut, and its length is said
        unnamed = {name: why for name, why in unnamed.items() if why != "was not saved"}
    assert not unnamed, f"{where()}: {unnamed}; said was {caplog.text!r}"
    assert not check.unlike or not options["strict"], f"{where()}: {check.unlike}"
    return "filled" if not check.unlike else "filled in part"
