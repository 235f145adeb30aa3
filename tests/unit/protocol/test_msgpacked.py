"""msgpack bombs: what announces more than it holds is refused before room is made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.index import decode_index
from asyncckpt.format.structure import decode_structure
from asyncckpt.planning.contributions import decode_contributions
from asyncckpt.protocol.codec import unpack
from asyncckpt.protocol.messages import REQUESTS
from asyncckpt.protocol.request import decode_request
from asyncckpt.protocol.samples import decode_samples

N = 1 << 18
BOMB = b"\x81\xa1m" + (b"\xdd" + N.to_bytes(4, "big")) * 500 + bytes(N)
"""500 arrays, one inside the other, each of which says that it has 262,144 members."""


READERS: dict[str, Callable[[bytes], Any]] = {
    "index": decode_index,
    "structure": decode_structure,
    "message": lambda data: unpack(data, REQUESTS),
    "request": lambda data: decode_request(data, 1 << 30),
    "samples": decode_samples,
    "contributions": lambda data: decode_contributions({0: data}),
}


@pytest.mark.parametrize("reader", READERS)
def test_arrays_that_announce_what_is_not_there_are_refused_before_room_is_made(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpackb(*args: Any, **settings: Any) -> Any:
        raise AssertionError("this makes the room")

    monkeypatch.setattr(msgpack, "unpackb", unpackb)
    with pytest.raises((AsyncCkptError, ValueError)):
        READERS[reader](BOMB)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000 + b"\x01", b"\x92\x01", b"\x01\x01", b"\x81\x01\x01"])
def test_what_is_no_single_whole_value_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_strict(data)


def test_values_come_back_with_tuples_for_lists() -> None:
    assert unpack_strict(msgpack.packb({"a": [1, [b"x", "y"]]})) == {"a": (1, (b"x", "y"))}
    assert unpack_strict(msgpack.packb({1: 2}), strict_map_key=False) == {1: 2}
