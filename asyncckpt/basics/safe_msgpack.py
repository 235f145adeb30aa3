"""Unpacks untrusted msgpack: a document whose arrays announce members that are missing is refused first.

IMPORTANT: msgpack before 1.2.4 allocates as many members as an array announces, up to the document's length, at each of
up to 1,000 levels: a document of 1 MB without any member took 8 GB. Skipping through the document first allocates
nothing, takes a twentieth of the time to unpack it, and fails if members are missing. See ADR 0023.
"""

from __future__ import annotations

from typing import Any

import msgpack


def unpack_strict(data: bytes, *, strict_map_key: bool = True) -> Any:
    """Unpack the one value in `data`; arrays become tuples.

    Args:
        data: The whole document.
        strict_map_key: Whether map keys must be str or bytes.

    Raises:
        ValueError: `data` is not msgpack, is truncated, has more than one value, or is nested too deeply.
        TypeError: A map has a key that is not hashable.
    """
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), strict_map_key=False)
    try:
        walker.feed(data)
        walker.skip()
        return msgpack.unpackb(data, use_list=False, strict_map_key=strict_map_key)
    except msgpack.UnpackException as error:
        raise ValueError(f"not msgpack: {error}") from error
