"""msgpack that somebody else has made: read only when everything that it announces is there.

IMPORTANT: msgpack before 1.2.4 makes room for as many members as an array announces, up to the document's length, at
each of its thousand levels: a megabyte that announces and holds nothing took eight gigabytes. Skipping through a
document first makes nothing, costs a twentieth of reading it, and fails where members are missing. See ADR 0023.
"""

from __future__ import annotations

from typing import Any

import msgpack


def unpack_strict(data: bytes, *, strict_map_key: bool = True) -> Any:
    """Return the one value that `data` holds; lists come as tuples.

    Args:
        data: All of it.
        strict_map_key: Whether maps may have keys of text and bytes only.

    Raises:
        ValueError: No msgpack, cut short, more than one value, or nested too deeply.
        TypeError: A key that cannot be one.
    """
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), strict_map_key=False)
    try:
        walker.feed(data)
        walker.skip()
        return msgpack.unpackb(data, use_list=False, strict_map_key=strict_map_key)
    except msgpack.UnpackException as error:
        raise ValueError(f"no msgpack: {error}") from error
