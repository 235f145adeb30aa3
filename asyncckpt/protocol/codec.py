"""Messages <-> frames: two frames, a fixed header and a msgpack map.

Header: b"ACKP" and the protocol version as u16, little endian. It keeps this shape in every version, so that peers of
different versions can at least tell each other so.
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
"""Messages carry handles, not data; the largest is a table of MAX_TABLE saves."""

MAX_NESTING = 8
_HEADER = struct.Struct("<4sH")


def encode(message: Message, limit: int = MAX_FRAME_NBYTES) -> list[bytes]:
    """Return the two frames of `message`, the body at most `limit` bytes.

    Raises:
        ProtocolError: It holds what msgpack cannot, or is larger than any peer would read.
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
    """Read a message back.

    Args:
        frames: Header and body; a ROUTER's identity frame already taken off.
        known: `REQUESTS`, `REPLIES` or `NODE_MESSAGES`: what this side may receive.
        limit: The largest body in bytes.

    Returns:
        The message. Fields that this version does not know are dropped, unless the sender lists them in `must`.

    Raises:
        ProtocolVersionError: Well-formed, of another version; `theirs` says which.
        ProtocolError: Anything else that is not a message of ours.
    """
    if len(frames) != 2 or len(frames[0]) != _HEADER.size or len(frames[1]) > limit:
        raise ProtocolError(f"{len(frames)} frames instead of header and body", detail="frames")
    magic, version = _HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise ProtocolError("the header's magic is wrong", detail="magic")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the peer speaks protocol version {version}, this package speaks {PROTOCOL_VERSION}; "
            "install the same asyncckpt on both sides, or stop the old worker",
            ours=PROTOCOL_VERSION,
            theirs=version,
        )
    return unpack(frames[1], known)


def unpack(data: bytes, known: Mapping[str, type[Message]]) -> Message:
    """Read what `pack` returned.

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
        raise ProtocolError(f"{cls.name}: `must` is no list", detail="must")
    unknown = [str(n)[:80] for n in must if type(n) is not str or n not in names]
    if unknown:
        raise ProtocolError(f"{cls.name}: this version does not know the required fields {unknown}", detail="must")
    missing = names - set(body)
    if missing:
        raise ProtocolError(f"{cls.name}: fields missing: {sorted(missing)}", detail="missing")
    return cls(**{n: body[n] for n in names})


def request_id(frames: Sequence[bytes]) -> int:
    """Return the id of a request that could not be decoded, so that it can be refused; 0 when there is none."""
    try:
        found = _unpack(frames[1]).get("id")
    except (ProtocolError, IndexError):
        return 0
    return found if type(found) is int and 0 <= found < 1 << 63 else 0


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        raw = unpack_strict(body)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the body is no msgpack map: {error}", detail="body") from error
    if not isinstance(raw, dict) or not all(type(k) is str for k in raw):
        raise ProtocolError("the body is no msgpack map with text keys", detail="body")
    if _depth(raw) > MAX_NESTING:
        raise ProtocolError("the body is nested too deeply", detail="body")
    return raw


def _depth(value: Any) -> int:
    """Nesting depth, iteratively: the input is hostile until proved otherwise."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_NESTING:
        deepest += 1
        level = [m for v in level if isinstance(v, (dict, tuple)) for m in (v.values() if isinstance(v, dict) else v)]
    return deepest
