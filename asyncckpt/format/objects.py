"""Typed JSON for leaves that are not tensors. Decoding runs no code, and values come back with their types.

null, true, false, strings, lists, integers up to 2**53 and finite floats are stored as such in JSON. Each other value
is an object `{"$": tag, "v": payload}`; format/SPEC.md section 5 lists the tags. Without numpy, a numpy scalar is
decoded as the nearest Python value.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.checksums import block_digest
from asyncckpt.format.manifest import check_version, list_of
from asyncckpt.format.names import SaveId
from asyncckpt.format.state_tree import OFFSETS, SHARDED, checked_hashes, is_maxlen, is_text

_NUMBERS = {
    **{"|b1": "?", "|i1": "b", "|u1": "B", "<i2": "h", "<u2": "H", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"},
    **{"<f2": "e", "<f4": "f", "<f8": "d", "<c8": "ff", "<c16": "dd"},
}
"""Dtype strings of numpy's array protocol and their `struct` formats, little endian."""

_SIZED = re.compile(r"(?:<U|\|S)(0|[1-9][0-9]{0,7})")
_TIMES = re.compile(r"<[mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def is_numpy_scalar(dtype: str) -> bool:
    """Whether numpy scalars of a dtype can be stored; `dtype`: as of the array protocol, little endian."""
    return dtype in _NUMBERS or bool(_SIZED.fullmatch(dtype) or _TIMES.fullmatch(dtype))


def checked_numpy_scalar(payload: Any) -> tuple[str, bytes]:
    """Return (dtype, bytes) of a stored numpy scalar.

    Raises:
        ValueError: `payload` is malformed.
    """
    if not isinstance(payload, list) or len(payload) != 2 or not all(isinstance(part, str) for part in payload):
        raise ValueError("a numpy scalar is malformed, expected [dtype, hex]")
    dtype, data = payload[0], bytes.fromhex(payload[1])
    if not is_numpy_scalar(dtype):
        raise ValueError(f"a numpy scalar has the unknown dtype {dtype[:40]!r}")
    if len(data) != _itemsize(dtype):
        raise ValueError(f"a numpy scalar of dtype {dtype} has {len(data)} bytes, expected {_itemsize(dtype)}")
    if dtype == "|b1" and data[0] > 1:
        raise ValueError(f"a numpy bool has the value {data[0]}, expected 0 or 1")
    return dtype, data


def _itemsize(dtype: str) -> int:
    if dtype in _NUMBERS:
        return struct.calcsize("<" + _NUMBERS[dtype])
    if dtype[1] in "mM":
        return 8
    return int(dtype[2:]) * (4 if dtype[1] == "U" else 1)


def numpy_scalar_value(dtype: str, data: bytes) -> Any:
    """Return the Python value nearest to a numpy scalar: bool, int, float, complex, str or bytes.

    A `datetime64` or `timedelta64` becomes its number of units.

    Args:
        dtype, data: As `checked_numpy_scalar` returns them.

    Raises:
        ValueError: A string has an invalid code point.
    """
    if dtype in _NUMBERS:
        found = struct.unpack("<" + _NUMBERS[dtype], data)
        return complex(*found) if len(found) == 2 else found[0]
    if dtype[1] in "mM":
        return struct.unpack("<q", data)[0]
    return data.decode("utf-32-le", "surrogatepass") if dtype[1] == "U" else data


OBJECTS_VERSION = 1
MAX_OBJECTS_NBYTES = 1 << 30
MAX_EXACT_INT = 1 << 53
"""Larger integers are stored as strings: JSON readers that use doubles would lose digits."""

MAX_NESTING = 64
"""Maximum number of containers around a value inside a leaf. Chosen."""

Extend = Callable[[Any], "tuple[str, Any] | None"]
"""Encodes a type that needs a library: returns (tag, JSON payload) of a value, or None for an unknown type."""

Make = Callable[[str, Any], Any]
"""Decodes a tag that needs a library: returns the value of (tag, payload); raises KeyError for an unknown tag."""


class Opaque:
    """Stands for a value whose type needs a library that the reader did not provide: its tag and payload."""

    __slots__ = ("payload", "tag")

    def __init__(self, tag: str, payload: Any) -> None:
        self.tag, self.payload = tag, payload

    def __repr__(self) -> str:
        return f"{self.tag}({self.payload!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and (self.tag, self.payload) == (other.tag, other.payload)

    def __hash__(self) -> int:
        return hash(self.tag)


class Record:
    """Stands for a pickled object of a known class: the class's full name, and the state that was pickled."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any = None) -> None:
        self.kind, self.state = kind, state

    def get(self, field: str, default: Any = None) -> Any:
        """Return one attribute of an object whose state is its `__dict__`."""
        return self.state.get(field, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"{self.kind}({self.state!r})"


class UnknownTypeError(TypeError):
    """Raised for a value of a type that cannot be stored; `value` is that value. Internal."""

    def __init__(self, value: Any) -> None:
        super().__init__(type(value).__name__)
        self.value = value


def encode_value(value: Any, extend: Extend | None = None) -> Any:
    """Return the JSON form of one leaf. See `encode_values`."""
    return next(encode_values((value,), extend))


def encode_values(values: Iterable[Any], extend: Extend | None = None, depth: int = 0) -> Iterator[Any]:
    """Yield the JSON form of each of several leaves.

    Args:
        values: The leaves.
        extend: Encodes further types.
        depth: Number of containers around them.

    Raises:
        UnknownTypeError: Raised while iterating. A leaf, or a value inside it, is of a type that cannot be stored, or
            lies in more than `MAX_NESTING` containers.
    """
    for value in values:
        kind = type(value)
        if value is None or kind is bool:
            yield value
        elif kind is str:
            yield (
                value
                if value.isascii() or is_text(value)
                else {"$": "str", "v": value.encode("utf-8", "surrogatepass").hex()}
            )
        elif kind is int:
            yield value if -MAX_EXACT_INT <= value <= MAX_EXACT_INT else {"$": "int", "v": hex(value)}
        elif kind is float:
            yield value if math.isfinite(value) else {"$": "float", "v": struct.pack(">d", value).hex()}
        elif depth > MAX_NESTING:
            raise UnknownTypeError(value)
        elif kind is list:
            yield [*encode_values(value, extend, depth + 1)]
        elif kind in _SEQUENCES:
            yield {"$": _SEQUENCES[kind], "v": [*encode_values(value, extend, depth + 1)]}
        elif kind is dict:
            keys, members = encode_values(value, extend, depth + 1), encode_values(value.values(), extend, depth + 1)
            yield {"$": "dict", "v": [[key, member] for key, member in zip(keys, members, strict=True)]}
        elif isinstance(value, deque):
            yield {"$": "deque", "v": [value.maxlen, [*encode_values(value, extend, depth + 1)]]}
        elif kind is slice:
            parts = (value.start, value.stop, value.step)
            yield {"$": "slice", "v": [*encode_values(parts, extend, depth + 1)]}
        elif encoded := _scalar(value, kind) or (extend(value) if extend else None):
            yield {"$": encoded[0], "v": encoded[1]}
        elif isinstance(value, tuple):  # a namedtuple is decoded as a plain tuple
            yield {"$": "tuple", "v": [*encode_values(value, extend, depth + 1)]}
        else:
            raise UnknownTypeError(value)


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def _scalar(value: Any, kind: type) -> tuple[str, Any] | None:
    if kind is bytes or kind is bytearray:
        return kind.__name__, base64.b64encode(value).decode()
    if kind is complex:
        return "complex", struct.pack(">dd", value.real, value.imag).hex()
    if kind in (datetime.datetime, datetime.date, datetime.time) and _is_plain_zone(getattr(value, "tzinfo", None)):
        return kind.__name__, value.isoformat()
    if kind is datetime.timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    return None


def _is_plain_zone(zone: datetime.tzinfo | None) -> bool:
    """Whether a time zone is only an offset from UTC, without name or rules."""
    if zone is None:
        return True
    return type(zone) is datetime.timezone and repr(zone) == repr(datetime.timezone(zone.utcoffset(None)))


def _slice(members: list[Any]) -> slice:
    start, stop, step = members
    return slice(start, stop, step)


def _deque(payload: tuple[Any, list[Any]]) -> deque[Any]:
    maxlen, members = payload
    return deque(members, maxlen)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "str": lambda v: bytes.fromhex(v).decode("utf-8", "surrogatepass"),
    "float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "complex": lambda v: complex(*struct.unpack(">dd", bytes.fromhex(v))),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "slice": _slice,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda v: datetime.timedelta(*v),
    "tuple": tuple,
    "deque": _deque,
    "set": lambda v: set(checked_hashes(v)),
    "frozenset": lambda v: frozenset(checked_hashes(v)),
    "dict": lambda v: dict(zip(checked_hashes(k for k, _ in v), (value for _, value in v), strict=True)),
}

TAGS = tuple(sorted(_MAKERS))
LIBRARY_TAGS = ("dcp", "instance", "numpy.scalar", "pickle", "torch.Size", "torch.device", "torch.dtype")
PICKLED_TAGS = ("dcp", "pickle")
_SEQUENCE_TAGS = ("tuple", "set", "frozenset", "slice")


def decode_value(raw: Any, make: Make | None = None) -> Any:
    """Return the Python value of one leaf's JSON form.

    Args:
        raw: The JSON form.
        make: Decodes the tags of `LIBRARY_TAGS`; None: they become `Opaque`, and numpy scalars the nearest value.

    Raises:
        UnsupportedFormatError: It has a tag that this version does not know.
        ValueError: It is malformed.
    """
    try:
        return next(_decode_each((raw,), make, 0))
    except (TypeError, LookupError, OverflowError, struct.error) as error:
        raise ValueError(f"malformed payload: {error!r}") from error


def _decode_each(values: Iterable[Any], make: Make | None, depth: int) -> Iterator[Any]:
    for raw in values:
        if depth > 2 * MAX_NESTING + 2:
            raise ValueError(f"the values of a leaf are nested too deeply, the limit is {MAX_NESTING}")
        if isinstance(raw, list):
            yield [*_decode_each(raw, make, depth + 1)]
        elif isinstance(raw, dict):
            yield _decode_tagged(raw, make, depth)
        else:
            yield raw


def _decode_tagged(raw: dict[str, Any], make: Make | None, depth: int) -> Any:
    if set(raw) != {"$", "v"} or not isinstance(raw["$"], str):
        raise ValueError("an object does not have exactly the members `$` and `v`")
    tag, payload = raw["$"], raw["v"]
    if tag in LIBRARY_TAGS:
        return make(tag, payload) if make else _without_library(tag, payload)
    if tag not in _MAKERS:
        # IMPORTANT: not as damage. The file has a checksum, so a newer version has written it, and `restore_latest`
        # must not quarantine it.
        raise UnsupportedFormatError(
            f"a leaf has the type tag {tag[:40]!r}, which this package does not know; upgrade asyncckpt, or load other "
            "leaves by `keys`"
        )
    if tag in _SEQUENCE_TAGS:
        payload = [*_decode_each(list_of(payload), make, depth + 1)]
    elif tag == "deque":
        maxlen, members = list_of(payload)
        if not is_maxlen(maxlen, len(list_of(members))):
            raise ValueError(f"a deque has {len(members)} members and maxlen {maxlen!r}")
        payload = maxlen, [*_decode_each(members, make, depth + 1)]
    elif tag == "dict":
        pairs = [(key, member) for key, member in map(list_of, list_of(payload))]
        keys = _decode_each((key for key, _ in pairs), make, depth + 1)
        members = _decode_each((member for _, member in pairs), make, depth + 1)
        payload = [*zip(keys, members, strict=True)]
    return _MAKERS[tag](payload)


def _without_library(tag: str, payload: Any) -> Any:
    if tag == "numpy.scalar":
        return numpy_scalar_value(*checked_numpy_scalar(payload))
    if tag in PICKLED_TAGS:
        return Opaque(tag, pickled(payload)[0])
    return Opaque(tag, payload)


def pickled(payload: Any) -> tuple[str, bytes]:
    """Return (name of the type, bytes) of a pickled leaf. The bytes are not decoded.

    Raises:
        ValueError: `payload` is malformed.
    """
    kind, data = list_of(payload)
    if not isinstance(kind, str) or not isinstance(data, str):
        raise ValueError("a pickled leaf is malformed, expected [type, base64]")
    return kind, base64.b64decode(data, validate=True)


def sharded_names(raw: Any) -> frozenset[str] | None:
    """Return the names of the components that are sharded with their tensor.

    Args:
        raw: JSON form of the object of an "s" node.

    Returns:
        The names, maybe none; None: the tensor was no DTensor.
    """
    sharded = _member(raw, SHARDED)
    return None if sharded is None else frozenset(str(pair[0]) for pair in _pairs(sharded))


def part_offsets(raw: Any) -> Any:
    """Return where the part of a rank begins that belongs to that rank only; None: it fits together with others.

    Args:
        raw: JSON form of the object of an "s" node.
    """
    return _member(raw, OFFSETS)


def context_digest(raw: Any, components: Iterable[str]) -> bytes:
    """Return the digest of the context and the components of a sharded tensor (format/SPEC.md section 4).

    Devices and the order of the members of dicts and sets do not count: they differ between ranks that are equal.

    Args:
        raw: JSON form of the object of the tensor's "s" node.
        components: The names of its components.
    """
    names = sorted(components), sorted(sharded_names(raw) or ())
    return block_digest(_compact((_comparable(_member(raw, "context")), *names, part_offsets(raw))).encode())


_compact = partial(json.dumps, separators=(",", ":"))


def _pairs(raw: Any) -> list[Any]:
    found = raw.get("v") if isinstance(raw, dict) and raw.get("$") == "dict" else None
    return [pair for pair in found if isinstance(pair, list) and len(pair) == 2] if isinstance(found, list) else []


def _member(raw: Any, name: str) -> Any:
    return next((value for key, value in _pairs(raw) if key == name), None)


def _comparable(raw: Any) -> Any:
    if isinstance(raw, list):
        return list(map(_comparable, raw))
    if not isinstance(raw, dict):
        return raw
    tag, payload = raw["$"], _comparable(raw["v"])
    if tag in ("dict", "set", "frozenset"):
        payload.sort(key=_compact)
    return {"$": tag, "v": None if tag == "torch.device" else payload}


def encode_objects(save_id: SaveId, values: Sequence[Any]) -> bytes:
    """Return the bytes of an objects file.

    Args:
        save_id: ID of the save.
        values: JSON forms of the objects, by number.

    Raises:
        UnsupportedLeafError: The file would be larger than `MAX_OBJECTS_NBYTES`, and readers would refuse it.
    """
    document = {"asyncckpt_objects": OBJECTS_VERSION, "save_id": str(save_id), "values": values}
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_OBJECTS_NBYTES:
        raise UnsupportedLeafError(
            f"the leaves that are not tensors take {len(data)} bytes of JSON, the limit is {MAX_OBJECTS_NBYTES}; "
            "keep large data in tensors or bytes"
        )
    return data


def decode_objects(data: bytes, save_id: SaveId, n_objects: int) -> list[Any]:
    """Return the JSON forms of the objects in an objects file, by number.

    Args:
        data: The file's bytes.
        save_id: ID of the save that the file must belong to.
        n_objects: Number of objects that it must have.

    Raises:
        UnsupportedFormatError: A newer version wrote it.
        CorruptCheckpointError: It is damaged, of another save, or has another number of objects.
    """
    try:
        if len(data) > MAX_OBJECTS_NBYTES:
            raise ValueError(f"it has {len(data)} bytes, the limit is {MAX_OBJECTS_NBYTES}")
        raw = json.loads(data)
        check_version(raw, "asyncckpt_objects", OBJECTS_VERSION, what="objects file")
        values = raw["values"]
        if raw["save_id"] != str(save_id) or not isinstance(values, list):
            raise ValueError("its save ID differs from that of the index, or `values` is not a list")
        if len(values) != n_objects:
            raise ValueError(f"it has {len(values)} objects, the structure has {n_objects}")
        return values
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, UnsupportedFormatError):
            raise
        raise CorruptCheckpointError(f"an objects file does not decode: {error}", detail=str(error)) from error
