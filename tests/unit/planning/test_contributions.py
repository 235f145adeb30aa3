"""What ranks tell each other: it comes back as it was given, and junk ends in typed errors."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from asyncckpt.errors import ProtocolError
from asyncckpt.planning.contributions import (
    Contribution,
    decode_contributions,
    encode_contributions,
    replica_candidates,
    with_digests,
)

A, B, C = ("a", "float32", (2, 3)), ("b", "int64", ()), ("c", "uint8", (0, 1 << 40))


def of(*tensors: Any, digests: tuple[bytes, ...] | None = None, own_nbytes: int = 7) -> Contribution:
    return Contribution(tensors=tensors, own_nbytes=own_nbytes, digests=digests or (b"",) * len(tensors))


def test_a_contribution_comes_back() -> None:
    given = of(A, B, C, digests=(b"12345678", b"", b"abcdefgh"))
    assert Contribution.decode(given.encode()) == given
    assert Contribution.decode(of().encode()) == of()


def test_the_bytes_of_all_ranks_do_not_depend_on_order_or_identity() -> None:
    one = {0: of(A, B), 5: of(A, B), 2: of(C)}
    assert encode_contributions(one) == encode_contributions({5: of(*list((A, B))), 2: of(C), 0: of(A, B)})
    assert encode_contributions(one) != encode_contributions({**one, 2: of(B)})


def test_equal_parts_are_kept_once() -> None:
    found = decode_contributions({rank: of(A, B, own_nbytes=rank).encode() for rank in range(3)})
    assert found[0].tensors is found[1].tensors is found[2].tensors
    assert [c.own_nbytes for c in found.values()] == [0, 1, 2]


def packed(tensors: Any = (), own_nbytes: Any = 0, digests: Any = ()) -> bytes:
    return bytes(msgpack.packb([msgpack.packb(tensors), own_nbytes, msgpack.packb(digests)]))


JUNK: dict[str, bytes] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "a number": b"\x01",
    "too few members": bytes(msgpack.packb([b"\x90", 0])),
    "tensors that are no bytes": bytes(msgpack.packb([[], 0, b"\x90"])),
    "tensors that are a map": bytes(msgpack.packb([{}, 0, b"\x90"])),
    "something behind the end": packed() + b"\x00",
    "one digest too many": packed(digests=[b""]),
    "a digest of another length": packed([A], digests=[b"1234567"]),
    "a digest of text": packed([A], digests=["12345678"]),
    "digests in a map": packed(digests={}),
    "a negative size": packed(own_nbytes=-1),
    "a size that is a float": packed(own_nbytes=1.0),
    "a bool for a size": packed(own_nbytes=True),
    "a tensor of two members": packed([A[:2]], digests=[b""]),
    "a name that is bytes": packed([(b"a", "float32", ())], digests=[b""]),
    "an unknown dtype": packed([("a", "float33", ())], digests=[b""]),
    "a dtype that is a list": packed([("a", [], ())], digests=[b""]),
    "a negative length": packed([("a", "float32", (-1,))], digests=[b""]),
    "a huge length": packed([("a", "float32", (1 << 63,))], digests=[b""]),
    "too many dimensions": packed([("a", "float32", (1,) * 65)], digests=[b""]),
    "a shape that is a number": packed([("a", "float32", 3)], digests=[b""]),
    "a name twice": packed([A, A], digests=[b"", b""]),
    "lists without end": b"\x91" * 100_000,
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_no_contribution(name: str) -> None:
    with pytest.raises(ProtocolError):
        Contribution.decode(JUNK[name])
    with pytest.raises(ProtocolError, match="rank 3"):
        decode_contributions({2: of(A).encode(), 3: JUNK[name]})


@pytest.mark.parametrize("raw", [1, [], {"0": of(A).encode()}, {-1: of(A).encode()}, {1 << 40: of(A).encode()}, {0: 1}])
def test_junk_is_no_contributions_of_ranks(raw: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_contributions(raw)


def test_equal_contributions_are_encoded_once() -> None:
    raw = encode_contributions({0: of(A), 2: of(B), 5: of(A), 7: of(A)})
    assert msgpack.unpackb(raw, strict_map_key=False)[7] == 0


def test_cut_or_flipped_bytes_end_in_a_value_or_a_typed_error() -> None:
    data = of(A, B, digests=(b"12345678", b"")).encode()
    for n in range(len(data)):
        with pytest.raises(ProtocolError):
            Contribution.decode(data[:n])
        for bit in range(8):
            try:
                Contribution.decode(data[:n] + bytes([data[n] ^ 1 << bit]) + data[n + 1 :])
            except ProtocolError:
                continue


def test_candidates_are_held_by_several_alike() -> None:
    other_shape = ("b", "int64", (1,))
    found = replica_candidates({0: of(A, B, C), 1: of(C, A, other_shape), 2: of(("lonely", "bool", ()), A)})
    assert found == {0: (0, 2), 1: (0, 1), 2: (1,)}


def test_digests_are_put_where_they_belong() -> None:
    given = {0: of(A, B), 1: of(("x", "bool", ()), A)}
    found = with_digests(given, {0: b"12345678", 1: b"abcdefgh"})
    assert found[0].digests == (b"12345678", b"")
    assert found[1].digests == (b"", b"abcdefgh")


@pytest.mark.parametrize("digests", [{}, {0: b"12345678"}, {0: b"1234567", 1: b"12345678"}, {0: b"", 1: b"1" * 16}])
def test_another_number_of_digests_is_refused_by_rank(digests: dict[int, bytes]) -> None:
    with pytest.raises(ProtocolError, match="rank"):
        with_digests({0: of(A), 1: of(A)}, digests)
