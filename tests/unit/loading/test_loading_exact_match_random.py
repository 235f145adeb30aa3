"""Loads into random targets end alike, the short way and the long one: the same values, or the same refusal."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import AsyncCkptError
from asyncckpt.loading import matching

ALONE = asyncckpt.RankInfo(0, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
SHAPES = ((), (1,), (5,), (3, 4), (0, 2), (2, 1, 3))
OTHERS = {int: 1, float: 0.0, bool: False, str: "other", complex: 0j}
N_STATES, N_TARGETS = 6, 12


def tensor(rng: random.Random) -> torch.Tensor:
    shape = rng.choice(SHAPES)
    value = torch.tensor([rng.randrange(2) for _ in range(math.prod(shape))]).view(shape).to(rng.choice(DTYPES))
    return torch.nn.Parameter(value) if value.dtype == torch.float32 and rng.random() < 0.3 else value


def leaf(rng: random.Random, made: list[torch.Tensor]) -> Any:
    kind = rng.random()
    if made and kind < 0.1:
        return rng.choice(made)  # one tensor with two names
    if kind < 0.7:
        made.append(tensor(rng))
        return made[-1]
    scalars = (7, -0.0, 2.5, True, None, "text", 1j, b"bytes", [1, 2], (3, "x"), asyncckpt.PerRank(3))
    return rng.choice(scalars)


def container(rng: random.Random, made: list[torch.Tensor], depth: int) -> Any:
    members = [
        container(rng, made, depth + 1) if depth < 3 and rng.random() < 0.3 else leaf(rng, made)
        for _ in range(rng.randrange(5) if depth else 4)
    ]
    kind = rng.choice((dict, OrderedDict, list, tuple)) if depth else dict
    if kind in (list, tuple):
        return kind(members)
    keys = rng.sample(["a", "b", "c", "d", 0, 1, 2, -1], len(members))
    return kind(zip(keys, members, strict=True))


def emptied(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    """The same structure with other values, tied where it was tied."""
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            new = torch.zeros_like(value, requires_grad=False)
            seen[id(value)] = torch.nn.Parameter(new) if isinstance(value, torch.nn.Parameter) else new
        return seen[id(value)]
    if isinstance(value, asyncckpt.PerRank):
        return asyncckpt.PerRank(emptied(value.value, seen))
    if isinstance(value, dict):
        return type(value)((key, emptied(member, seen)) for key, member in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(emptied(member, seen) for member in value)
    return OTHERS.get(type(value), value)


def changed(value: Any, rng: random.Random) -> None:
    """Change one thing somewhere in a target."""
    while True:
        inner = [m for m in value.values() if isinstance(m, dict) and m]
        if not inner or rng.random() < 0.5:
            break
        value = rng.choice(inner)
    key = rng.choice(list(value))
    old = value[key]
    tensors = [m for m in value.values() if isinstance(m, torch.Tensor)]
    made = torch.zeros(3, 4)
    change = rng.randrange(12)
    if change == 0:
        del value[key]
    elif change == 1:
        value["more"] = made
    elif change == 2:
        value[key] = tensor(rng)
    elif change == 3:
        value[key] = 5
    elif change == 4:
        value[key] = {"a": made}
    elif change == 5:
        value[key] = asyncckpt.PerRank(old) if not isinstance(old, asyncckpt.PerRank) else old.value
    elif change == 6 and isinstance(old, torch.Tensor):
        value[key] = old.detach().double() if not old.is_complex() else old.detach().conj()
    elif change == 7 and isinstance(old, torch.Tensor) and old.dim():
        value[key] = old.detach()[:1].expand(old.shape) if old.shape[0] else old
    elif change == 8 and isinstance(old, torch.Tensor) and old.dim() == 2:
        value[key] = old.detach().t().contiguous().t()
    elif change == 9 and tensors:
        value[key] = rng.choice(tensors)
    elif change == 10 and isinstance(old, (list, tuple)):
        value[key] = tuple(old) if isinstance(old, list) else list(old)
    else:
        value[key] = value.pop(key)  # in another order


def described(value: Any) -> Any:
    """A form of a state that compares: types, values, and which names share a tensor."""
    if isinstance(value, torch.Tensor):
        resolved = value.detach().resolve_conj()
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, resolved.tolist()
    if isinstance(value, asyncckpt.PerRank):
        return "PerRank", described(value.value)
    if isinstance(value, dict):
        return type(value).__name__, [(key, described(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(member) for member in value]
    return type(value).__name__, repr(value)


def ended(path: Path, target: dict[Any, Any], **options: Any) -> tuple[Any, Any]:
    """The target after a load, and what was raised."""
    try:
        asyncckpt.load(path, target, source="disk", **options)
    except AsyncCkptError as error:
        return described(target), (type(error), str(error))
    return described(target), None


@pytest.mark.parametrize("strict", [False, True])
def test_the_short_way_ends_as_the_long_one(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    short = matching.exact_placements
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=ALONE) as checkpointer:
        for n in range(N_STATES):
            original = container(rng, [], 0)
            checkpointer.save(original, tmp_path / str(n))
            for _ in range(N_TARGETS):
                changes, seed = rng.choice((0, 1, 1, 2)), rng.getrandbits(64)
                found = []
                for way in (short, lambda *_: None):
                    target, again = emptied(original, {}), random.Random(seed)
                    for _ in range(changes):
                        if target:
                            changed(target, again)
                    monkeypatch.setattr(matching, "exact_placements", way)
                    found.append(ended(tmp_path / str(n), target, strict=strict))
                assert found[0] == found[1]
