"""Encodes messages as frames, and decodes them: a fixed header, and a msgpack map.

The header is b"ACKP" and the protocol version as u16, little endian, in every version, so that peers of different
versions recognize each other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgpack

from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.errors import ProtocolError, ProtocolVersionError
from asyncckpt.protocol.messages import PROTOCOL_VERSION, Message

MAGIC = b"ACKP"
MAX_FRAME_NBYTES = 1 << 20
"""Maximum size of a body. Messages carry handles, not data; the largest is a table of MAX_TABLE saves."""

MAX_NESTING = 8
_HEADER = struct.Struct("<4sH")


def encode(message: Message, limit: int = MAX_FRAME_NBYTES) -> list[bytes]:
    """Return the two frames of `message`, the body at most `limit` bytes.

    Raises:
        ProtocolError: It has a value that msgpack cannot encode, or exceeds `limit`.
    """
    return [_HEADER.pack(MAGIC, PROTOCOL_VERSION), pack(message, limit)]


def pack(message: Message, limit: int) -> bytes:
    """Return the msgpack map of `message`, at most `limit` bytes.

    Raises:
        ProtocolError: As `encode`.
    """
    body: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]
    body["m"] = message.name
    try:
        packed = bytes(msgpack.packb(body))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{message.name}: cannot be packed: {error}", detail="body") from error
    if len(packed) > limit:
        raise ProtocolError(f"{message.name}: {len(packed)} bytes, the limit is {limit}", detail="size")
    return packed


def decode(frames: Sequence[bytes], known: Mapping[str, type[Message]], limit: int = MAX_FRAME_NBYTES) -> Message:
    """Decode a message.

    Args:
        frames: Header and body, without the identity frame of a ROUTER.
        known: The messages that this side may receive: `REQUESTS`, `REPLIES` or `NODE_MESSAGES`.
        limit: Maximum size of the body in bytes.

    Returns:
        The message. Unknown fields are ignored, unless the sender lists them in `must`.

    Raises:
        ProtocolVersionError: The header has another version, `theirs`.
        ProtocolError: The frames are not a valid message.
    """
    if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) > limit:
        raise ProtocolError(f"{len(frames)} frames instead of header and body", detail="frames")
    magic, version = _HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise ProtocolError("the header's magic is wrong", detail="magic")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer has protocol version {version}, this package has {PROTOCOL_VERSION}; "
            "install the same asyncckpt on both sides, or stop the old worker",
            ours=PROTOCOL_VERSION,
            theirs=version,
        )
    return unpack(frames[1], known)


def unpack(data: bytes, known: Mapping[str, type[Message]]) -> Message:
    """Decode the result of `pack`.

    Raises:
        ProtocolError: As `decode`.
    """
    body = _unpack(data)
    cls = known.get(str(body.pop("m", None)))
    if cls is None:
        raise ProtocolError("no message of that name is expected here", detail="name")
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    must = body.pop("must", ())
    if not isinstance(must, tuple):
        raise ProtocolError(f"{cls.name}: `must` is not a list", detail="must")
    unknown = [str(n)[:80] for n in must if type(n) is not str or n not in names]
    if unknown:
        raise ProtocolError(f"{cls.name}: this version does not know the required fields {unknown}", detail="must")
    missing = names - set(body)
    if missing:
        raise ProtocolError(f"{cls.name}: fields missing: {sorted(missing)}", detail="missing")
    return cls(**{n: body[n] for n in names})


def request_id(frames: Sequence[bytes]) -> int:
    """Return the ID of a request that could not be decoded, to refuse it; 0 if there is none."""
    try:
        found = _unpack(frames[1]).get("id")
    except (ProtocolError, IndexError):
        return 0
    return found if type(found) is int and 0 <= found < 1 << 63 else 0


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        raw = unpack_strict(body)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the body is not a msgpack map: {error}", detail="body") from error
    if not isinstance(raw, dict) or not all(type(k) is str for k in raw):
        raise ProtocolError("the body is not a msgpack map with text keys", detail="body")
    if _depth(raw) > MAX_NESTING:
        raise ProtocolError("the body is nested too deeply", detail="body")
    return raw


def _depth(value: Any) -> int:
    """Return the nesting depth. Not recursive, as the input is not trusted."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_NESTING:
        deepest += 1
        level = [m for v in level if isinstance(v, (dict, tuple)) for m in (v.values() if isinstance(v, dict) else v)]
    return deepest
