"""Ways to damage bytes and documents, from a random generator that the test seeds."""

from __future__ import annotations

import random
from typing import Any

import msgpack

_DEEP: list[Any] = []
for _ in range(100):
    _DEEP = [_DEEP]

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 4095, 4097, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(0.5, float("nan"), float("inf"), "", "x", "\0", "/", "/x" * 3000, b"", b"x", b"\xff" * 16),
    *([], {}, [[]], [{}], {"": {}}, {"x": [1, {"y": None}]}, [1, 2, 3, 4, 5, 6, 7], ["d", []], ["T", 99], _DEEP),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(0, 0)),
)
"""Values in place of which something else was expected."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one random damage; never equal to `data`."""
    while True:
        at, to = sorted((rng.randrange(len(data)), rng.randrange(len(data) + 1)))
        noise = rng.randbytes(rng.randrange(1, 40))
        found = rng.choice(
            (
                data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
                data[:at] + noise[:1] + data[at + 1 :],
                data[:at],
                data + noise,
                data[:at] + data[to:],
                data[:to] + data[at:],
                data[:at] + noise + data[at:],
                data[:at] + bytes(to - at) + data[to:],
                data[to:] + data[:to],
            )
        )
        if found != data:
            return found


def altered(document: Any, rng: random.Random) -> Any:
    """Return a copy of nested lists and dicts with one random member replaced, removed, doubled or added."""
    copy = _thawed(document)
    places = list(_places(copy))
    container, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(key, container[key])
    elif action == 2 and isinstance(container, dict):
        container[rng.choice(("unknown", "must", "m", "v"))] = rng.choice(NASTY)
    elif action == 3 and type(container[key]) is int:
        container[key] += rng.choice((-1, 1, 4096, -4096))
    else:
        container[key] = rng.choice(NASTY)
    return copy


def packed(document: Any) -> bytes:
    """Return msgpack, or what is left of it where msgpack cannot."""
    return bytes(msgpack.packb(document))


def _thawed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _thawed(v) for k, v in value.items()}
    return [_thawed(v) for v in value] if isinstance(value, (list, tuple)) else value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _places(child)
