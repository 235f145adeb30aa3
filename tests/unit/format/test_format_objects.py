"""Typed JSON for leaves: exact both ways, and nothing else is believed."""

from __future__ import annotations

import datetime
import json
import math
import random
import struct
from collections import deque, namedtuple
from typing import Any

import pytest
from format_samples import OBJECTS, SAVE_ID, VALUES
from mutations import NASTY, altered, damaged

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import objects
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import (
    Opaque,
    UnknownTypeError,
    context_digest,
    decode_objects,
    decode_value,
    encode_objects,
    encode_value,
    sharded_names,
)

Point = namedtuple("Point", "x y")
NAN = struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type, bits and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    return bool(a == b)


def through_json(value: Any) -> Any:
    """Return what a reader gets."""
    return decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))


EXACT = (
    *(None, True, False, 0, -1, 1 << 53, -(1 << 53), (1 << 53) + 1, 1 << 4000, -(1 << 63)),
    *(0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, NAN),
    *("", "text", "\0", "\u00e4\u20ac\U0001f600", "\ud800", "\ud83d\ude00", '"\\\n'),
    *(b"", b"\0\xff", bytearray(b"x"), 1j, complex(-0.0, math.inf), complex(NAN, 1)),
    *([], [[]], (), ((),), {}, {"a": {}}, set(), {1, 2}, frozenset({"a", ("b",)}), {(1, 2): [3], 4: None, "$": "v"}),
    *(slice(None), slice(1, None, -2), slice("a", (1, 2)), {"$": "int", "v": "7"}, [1, (2, {3}), {4: [5]}]),
    *(datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc)),
    *(datetime.date(2024, 2, 29), datetime.time(23, 59, 59, 999999), datetime.time(1, tzinfo=datetime.timezone.utc)),
    *(datetime.timedelta(days=-1, microseconds=1), datetime.timedelta.max),
    *(deque(), deque([1, (2,), [3]]), deque([1, 2], maxlen=2), deque(maxlen=0)),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))),
    datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(seconds=86399, microseconds=1))),
)


def _name(value: Any) -> str:
    """Name a value; the same in every process, in which the order of a set may be another."""
    shown = sorted(map(ascii, value)) if isinstance(value, (set, frozenset)) else value
    return f"{type(value).__name__}-{ascii(shown)[:30]}"


@pytest.mark.parametrize("value", EXACT, ids=_name)
def test_value_comes_back_exactly(value: Any) -> None:
    assert same(through_json(value), value)


def test_namedtuple_comes_back_as_a_tuple() -> None:
    assert same(through_json(Point(1, [2])), (1, [2]))


class _Own:
    pass


class _Zone(datetime.tzinfo):
    def utcoffset(self, when: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(hours=1)


@pytest.mark.parametrize("zone", [_Zone(), datetime.timezone(datetime.timedelta(hours=1), "CET")])
def test_a_zone_with_a_name_or_rules_is_refused(zone: datetime.tzinfo) -> None:
    with pytest.raises(UnknownTypeError):
        encode_value(datetime.datetime(2024, 1, 1, tzinfo=zone))


@pytest.mark.parametrize("value", [_Own(), [1, (_Own(),)], {_Own(): 1}, slice(_Own()), int, len, range(3)])
def test_unknown_type_is_refused_with_the_value(value: Any) -> None:
    with pytest.raises(UnknownTypeError):
        encode_value(value)


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {0: v}, slice], ids=["list", "tuple", "dict", "slice"]
)
def test_value_nested_too_deeply_is_refused_and_a_deep_one_comes_back(wrap: Any) -> None:
    value: Any = 1
    for _ in range(objects.MAX_NESTING):
        value = wrap(value)
    assert same(through_json(value), value)
    for _ in range(2000):
        value = wrap(value)
    with pytest.raises(UnknownTypeError):
        encode_value(value)


def test_value_inside_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnknownTypeError):
        encode_value(value)


def test_types_of_a_library_need_the_library() -> None:
    raw = {"$": "torch.dtype", "v": "float32"}
    assert decode_value([raw]) == [Opaque("torch.dtype", "float32")]
    assert decode_value(raw, lambda tag, payload: f"{tag} of {payload}") == "torch.dtype of float32"
    assert encode_value({1}, lambda _: ("torch.Size", [1])) == {"$": "set", "v": [1]}
    assert encode_value(_Own(), lambda _: ("torch.Size", [1])) == {"$": "torch.Size", "v": [1]}


def _tagged(tag: str, payload: Any) -> dict[str, Any]:
    return {"$": tag, "v": payload}


BAD = [
    {},
    {"$": "int"},
    {"v": 1},
    {"$": "int", "v": "1", "x": 0},
    {"$": 1, "v": 1},
    _tagged("os.system", "true"),
    _tagged("int", 7),
    _tagged("int", "0xg"),
    _tagged("float", "00"),
    _tagged("float", 1.5),
    _tagged("complex", "00"),
    _tagged("bytes", "?"),
    _tagged("bytes", None),
    _tagged("bytearray", "?"),
    _tagged("date", "tomorrow"),
    _tagged("time", 12),
    _tagged("deque", [1, 2]),
    _tagged("deque", [-1, []]),
    _tagged("deque", "ab"),
    _tagged("frozenset", [[1]]),
    _tagged("str", "ff"),
    _tagged("slice", [1, 2]),
    _tagged("slice", [1, 2, 3, 4]),
    _tagged("slice", {"a": 1}),
    _tagged("datetime", "yesterday"),
    _tagged("datetime", 0),
    _tagged("timedelta", [1 << 70, 0, 0]),
    _tagged("timedelta", "1"),
    _tagged("tuple", "ab"),
    _tagged("tuple", {"a": 1}),
    _tagged("set", [[1]]),
    _tagged("set", 5),
    _tagged("dict", [[1]]),
    _tagged("dict", ["ab"]),
    _tagged("dict", [[[1], 2]]),
]


def test_every_tag_has_a_value_and_a_bad_payload() -> None:
    tags = {raw["$"] for raw in map(encode_value, EXACT) if isinstance(raw, dict) and "$" in raw}
    assert {*objects.TAGS} - tags == set(), "add values to EXACT"
    assert {*objects.TAGS} - {raw.get("$") for raw in BAD if isinstance(raw, dict)} == set(), "add payloads to BAD"


@pytest.mark.parametrize("raw", BAD, ids=str)
def test_malformed_payload_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_value([raw])


@pytest.mark.parametrize("error", [KeyError, TypeError, OverflowError])
def test_error_of_the_library_is_a_refusal(error: type[Exception]) -> None:
    def make(tag: str, payload: Any) -> Any:
        raise error(tag)

    with pytest.raises(ValueError, match=r"torch\.dtype"):
        decode_value(_tagged("torch.dtype", "float33"), make)


def test_every_tag_survives_every_payload() -> None:
    for tag in objects.TAGS:
        for payload in (*NASTY, [1, 2, 3], ["a"], [[1, 2]], "00" * 8):
            try:
                decode_value(_tagged(tag, payload))
            except ValueError:
                continue


def test_json_nested_beyond_reason_is_refused() -> None:
    raw: Any = 1
    for _ in range(500):
        raw = [raw]
    with pytest.raises(ValueError, match="deep"):
        decode_value(raw)


def test_objects_file_comes_back() -> None:
    raw = decode_objects(OBJECTS, SAVE_ID, len(VALUES))
    assert same([decode_value(r) for r in raw], list(VALUES))


BAD_FILES = {
    "empty": b"",
    "no object": b"[]",
    "no text": b"\xff\xfe",
    "another save": encode_objects(SaveId(9, 9, "f" * 12), [None] * len(VALUES)),
    "a value too few": encode_objects(SAVE_ID, [None] * (len(VALUES) - 1)),
    "a value too many": encode_objects(SAVE_ID, [None] * (len(VALUES) + 1)),
    "values as object": OBJECTS.replace(b'"values":[', b'"values":{"a":[').replace(b"]}", b"]}}"),
    "nested beyond reason": b'{"values":' + b"[" * 100_000,
    "version as text": OBJECTS.replace(b'objects":1', b'objects":"1"'),
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_objects_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_objects(data, SAVE_ID, len(VALUES))


def test_objects_file_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MAX_OBJECTS_NBYTES", len(OBJECTS) - 1)
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        decode_objects(OBJECTS, SAVE_ID, len(VALUES))


def test_newer_objects_file_is_refused_by_number() -> None:
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        decode_objects(OBJECTS.replace(b'objects":1', b'objects":2'), SAVE_ID, len(VALUES))


def test_damaged_objects_file_is_refused_or_plain(rng: random.Random) -> None:
    document = json.loads(OBJECTS)
    for number in range(3000):
        data = damaged(OBJECTS, rng) if number % 2 else json.dumps(altered(document, rng), default=str).encode()
        try:
            for raw in decode_objects(data, SAVE_ID, len(VALUES)):
                decode_value(raw)
        except (CorruptCheckpointError, UnsupportedFormatError):
            continue
        except ValueError:
            continue


def test_a_tag_of_a_newer_version_is_no_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match="type tag 'tuple2', which this package does not know; upgrade"):
        decode_value([1, {"$": "tuple2", "v": "1.5"}])


# ---- Contexts of sharded tensors


def _described(context: Any, **more: Any) -> Any:
    """Return the object of a tensor whose component `codes` is sharded; `Opaque` as a device."""
    values = {"context": context, "size": [12, 8], "stride": [8, 1], "sharded": {"codes": {0: 0}}, **more}
    return encode_value(values, lambda v: (v.tag, v.payload) if isinstance(v, Opaque) else None)


def _device(name: str) -> Opaque:
    return Opaque("torch.device", name)


def _digest(raw: Any, names: tuple[str, ...] = ("codes", "scale")) -> bytes:
    return context_digest(raw, names)


def test_a_digest_is_that_of_the_context_and_stays_what_it_is() -> None:
    found = _digest(_described({"scale": 1.0, "blocks": (4, 4)}))
    assert found == _digest(_described({"blocks": (4, 4), "scale": 1.0}, size=[6, 8], sharded={"codes": {1: 0}}))
    assert found.hex() == "9844cbe70c1897f6"


def test_the_names_of_the_components_count_and_not_their_order() -> None:
    raw, others = _described(1), [_described(1, sharded={"scale": {0: 0}}), _described(1, sharded={})]
    others += [_described(1, offsets=[n, 0]) for n in range(2)]
    found = [_digest(raw), _digest(raw, ("codes",)), *map(_digest, others)]
    assert len(set(found)) == len(found)
    assert _digest(raw) == _digest(raw, ("scale", "codes"))


@pytest.mark.parametrize("nested", [lambda v: v, lambda v: [1, (v,)], lambda v: {"a": {"b": v}}, lambda v: {1: [v]}])
def test_devices_do_not_count_and_everything_else_does(nested: Any) -> None:
    one, other = (_digest(_described(nested(_device(f"cuda:{n}")))) for n in range(2))
    assert one == other
    values = [_device("cuda:0"), "cuda:0", 1, 1.5, True, None, [], (), {}, b"1", float("nan"), {"x"}, frozenset("x")]
    assert len({_digest(_described(nested(value))) for value in values}) == len(values)


def test_the_order_of_a_set_does_not_count() -> None:
    raw = _described({"names": {"a", "b", "c"}, "kinds": frozenset({1, 2})})
    again = json.loads(json.dumps(raw).replace('"a"', '"?"').replace('"c"', '"a"').replace('"?"', '"c"'))
    assert _digest(raw) == _digest(again)


def test_the_sharded_components_of_any_json_are_names_or_none() -> None:
    assert sharded_names(_described(1)) == {"codes"}
    assert sharded_names(_described(1, sharded={})) == frozenset()
    assert sharded_names(encode_value({"context": 1})) is None
    for raw in (None, 5, [], {}, {"$": "dict"}, {"$": "dict", "v": 5}, {"$": "dict", "v": [5, [1], [[], 2]]}):
        assert sharded_names(raw) is None
        assert sharded_names({"$": "dict", "v": [["sharded", raw]]}) in (None, {"[]"}, frozenset())
