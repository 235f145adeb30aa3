"""The request in the slot: there and back, and every refusal."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from mutations import NASTY, altered, damaged, packed
from protocol_samples import BODY_END, REQUEST

from asyncckpt.errors import ProtocolError
from asyncckpt.protocol import request
from asyncckpt.protocol.messages import PROTOCOL_VERSION
from asyncckpt.protocol.request import PartRange, decode_request, encode_request
from asyncckpt.protocol.samples import MAX_SAMPLES, MAX_SAMPLES_NBYTES, Sample, decode_samples, encode_samples


def _request(**changes: Any) -> bytes:
    return packed({**msgpack.unpackb(encode_request(REQUEST)), **changes})


def _samples(**changes: Any) -> bytes:
    document = {"names": ["a", "b"], "split": b"\x00\x01", "digests": bytes(16), **changes}
    return _request(samples=packed({k: v for k, v in document.items() if v is not None}))


def test_request_comes_back() -> None:
    assert decode_request(encode_request(REQUEST), BODY_END) == REQUEST
    assert decode_request(_request(colour="red"), BODY_END) == REQUEST
    assert decode_request(_request(parts=[]), BODY_END).parts == ()


def test_parts_that_go_through_a_ring_may_be_longer_than_the_slot() -> None:
    raw = _request(parts=[[4096, 1 << 40]], ring_segments=31, ring_segment_nbytes=262_144)
    found = decode_request(raw, 4096 + 31 * 262_144)
    assert (found.ring_segments, found.ring_segment_nbytes) == (31, 262_144)
    assert found.parts == (PartRange(offset=4096, nbytes=1 << 40),)
    with pytest.raises(ProtocolError):
        decode_request(raw, 4096 + 31 * 262_144 - 1)
    with pytest.raises(ProtocolError):
        decode_request(_request(parts=[[4096, 1 << 40]]), 1 << 26)


BAD = {
    "empty": b"",
    "no map": packed([]),
    "version missing": packed({k: v for k, v in msgpack.unpackb(_request()).items() if k != "v"}),
    "a newer version": _request(v=PROTOCOL_VERSION + 1),
    "version as text": _request(v="1"),
    "rank outside its world": _request(rank=2),
    "world of none": _request(rank=0, world_size=0),
    "world too large": _request(world_size=100_001),
    "relative path": _request(path="a/b"),
    "relative mirror": _request(mirror="a/b"),
    "mirror with a NUL": _request(mirror="/a\0b"),
    "path with NUL": _request(path="/a\0b"),
    "path too long": _request(path="/" + "\u20ac" * 1400),
    "umask beyond permissions": _request(umask=0o1777),
    "threads beyond reason": _request(write_threads=1025),
    "structure as text": _request(structure="x"),
    "metadata that is no JSON": _request(metadata="{"),
    "metadata that is no object": _request(metadata="[]"),
    "metadata with NaN": _request(metadata='{"x": NaN}'),
    "metadata with an infinite number": _request(metadata='{"x": 1e999}'),
    "metadata nested too deeply": _request(metadata='{"x":' + "[" * 65 + "]" * 65 + "}"),
    "metadata nested beyond reason": _request(metadata='{"x":' + "[" * 100_000),
    "metadata too large when indented": _request(metadata='{"x":' + "[" * 60 + "1," * 270_000 + "1" + "]" * 60 + "}"),
    "commit timeout of zero": _request(commit_timeout_s=0),
    "plan that is no fingerprint": _request(plan="abc"),
    "changed that is no flag": _request(changed=1),
    "samples that are no map": _request(samples=b"\x90"),
    "samples that lack digests": _samples(digests=None),
    "samples of another count": _samples(digests=bytes(24)),
    "samples with a name twice": _samples(names=["a", "a"]),
    "samples with names of bytes": _samples(names=[b"a", b"b"]),
    "samples split in more than two ways": _samples(split=b"\x00\x02"),
    "samples split for fewer names": _samples(split=b"\x00"),
    "too many samples": _samples(
        names=[f"t{i}" for i in range(MAX_SAMPLES + 1)],
        split=bytes(MAX_SAMPLES + 1),
        digests=bytes(8 * MAX_SAMPLES + 8),
    ),
    "samples of too many bytes": _samples(names=["a" * (1 << 20), "b"]),
    "parts as map": _request(parts={}),
    "part of one number": _request(parts=[[4096]]),
    "part in the head page": _request(parts=[[0, 1]]),
    "part that begins inside a page": _request(parts=[[4097, 1]]),
    "part of no bytes": _request(parts=[[4096, 0]]),
    "part of negative length": _request(parts=[[4096, -1]]),
    "part as bool": _request(parts=[[4096, True]]),
    "parts that overlap": _request(parts=[[4096, 5000], [8192, 1]]),
    "parts out of order": _request(parts=[[8192, 1], [4096, 1]]),
    "part beyond the body": _request(parts=[[(1 << 23) - 4096, 4097]]),
    "part that overflows": _request(parts=[[4096, (1 << 63) - 1]]),
    "ring of one segment": _request(ring_segments=1, ring_segment_nbytes=262_144),
    "ring of segments that are no blocks": _request(ring_segments=4, ring_segment_nbytes=4096),
    "ring of segments without a length": _request(ring_segments=4, ring_segment_nbytes=0),
    "length of segments that there are none of": _request(ring_segments=0, ring_segment_nbytes=262_144),
    "ring beyond the body": _request(ring_segments=32, ring_segment_nbytes=262_144),
    "part of a ring that overflows": _request(
        parts=[[4096, (1 << 63) - 1]], ring_segments=2, ring_segment_nbytes=262_144
    ),
    "parts of a ring that overlap": _request(
        parts=[[4096, 5000], [8192, 1]], ring_segments=2, ring_segment_nbytes=262_144
    ),
    "too many parts": _request(parts=[[4096 * (i + 1), 1] for i in range(1001)]),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_bad_request_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        decode_request(data, 1 << 23)


@pytest.mark.parametrize("name", [f for f in asdict(REQUEST) if f != "parts"])
def test_field_of_another_type_is_refused(name: str) -> None:
    fits = request._CHECKS[name]
    for value in NASTY:
        if not fits(value):
            with pytest.raises(ProtocolError):
                decode_request(_request(**{name: value}), BODY_END)


@pytest.mark.parametrize("name", list(asdict(REQUEST)))
def test_request_without_a_field_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        decode_request(packed({k: v for k, v in msgpack.unpackb(_request()).items() if k != name}), BODY_END)


def test_damaged_request_is_refused_or_valid(rng: random.Random) -> None:
    good = encode_request(REQUEST)
    document = msgpack.unpackb(good)
    for number in range(6000):
        data = damaged(good, rng) if number % 2 else packed(altered(document, rng))
        try:
            found = decode_request(data, BODY_END)
        except ProtocolError:
            continue
        assert decode_request(encode_request(found), BODY_END) == found


def test_samples_come_back() -> None:
    sent = [("a", False, b"8 bytes!"), ("b\u00e4", True, bytes(8))]
    assert decode_samples(encode_samples(sent)) == {"a": Sample(False, b"8 bytes!"), "b\u00e4": Sample(True, bytes(8))}
    assert encode_samples([]) == b"" and decode_samples(b"") == {}


@pytest.mark.parametrize(("count", "length"), [(5000, 4), (3000, 1000), (2, 2 << 20)])
def test_samples_beyond_the_limits_are_left_out(count: int, length: int) -> None:
    data = encode_samples((f"{i:0{length}d}", True, bytes(8)) for i in range(count))
    assert len(data) <= MAX_SAMPLES_NBYTES
    assert len(decode_samples(data)) == min(count, MAX_SAMPLES, (MAX_SAMPLES_NBYTES - 256) // (length + 14))
