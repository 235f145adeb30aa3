"""The kernel's FUSE protocol, as much as one small file system needs: packing and unpacking, no decisions.

From include/uapi/linux/fuse.h, protocol 7.31. Requests are read from /dev/fuse one by one, replies written to it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_WRITE = 1 << 20
BUFFER_NBYTES = MAX_WRITE + 65536

OPCODES = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 9: "MKDIR", 10: "UNLINK", 11: "RMDIR", 12: "RENAME",
    13: "LINK", 14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS", 18: "RELEASE", 20: "FSYNC", 25: "FLUSH",
    26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 30: "FSYNCDIR", 34: "ACCESS", 35: "CREATE",
    36: "INTERRUPT", 38: "DESTROY", 42: "BATCH_FORGET", 43: "FALLOCATE", 45: "RENAME2",
}  # fmt: skip
SILENT = frozenset({"FORGET", "BATCH_FORGET", "INTERRUPT"})
"""They are never answered."""

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
SET_SIZE, SET_MODE, SET_TIMES = 8, 1, 16 | 32
DIRECT_IO = 1
_ASYNC_READ, _BIG_WRITES, _PARALLEL_DIROPS, _MAX_PAGES = 1, 1 << 5, 1 << 18, 1 << 22


class Request(NamedTuple):
    """One request of the kernel's: what it wants of which inode, and the rest of the message."""

    name: str
    unique: int
    node: int
    body: bytes


def request_of(data: bytes) -> Request:
    """Unpack a request."""
    _, opcode, unique, node, *_ = IN_HEADER.unpack_from(data)
    return Request(OPCODES.get(opcode, f"OPCODE {opcode}"), unique, node, data[IN_HEADER.size :])


def reply(unique: int, body: bytes = b"", error: int = 0) -> bytes:
    """Pack a reply; `error` is an errno."""
    body = b"" if error else body
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body


def init_out() -> bytes:
    """Pack the answer to INIT: no write-back cache, so every write comes here when it is made."""
    flags = _ASYNC_READ | _BIG_WRITES | _PARALLEL_DIROPS | _MAX_PAGES
    return struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 17, flags, 64, 48, MAX_WRITE, 1, MAX_WRITE // 4096, 0, 0)


def attr(node: int, size: int, mode: int, nlink: int, *, when: int) -> bytes:
    """Pack the attributes of an inode."""
    blocks = -(-size // 512)
    return ATTR.pack(node, size, blocks, when, when, when, 0, 0, 0, mode, nlink, 0, 0, 0, 4096, 0)


def entry_out(node: int, packed: bytes) -> bytes:
    """Pack a name's inode; nothing of it may be cached."""
    return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + packed


def attr_out(packed: bytes) -> bytes:
    """Pack attributes alone."""
    return struct.pack("=QII", 0, 0, 0) + packed


def open_out(handle: int, *, direct: bool) -> bytes:
    """Pack an open file."""
    return struct.pack("=QII", handle, DIRECT_IO if direct else 0, 0)


def statfs_out(total: int, free: int) -> bytes:
    """Pack sizes in blocks of 4096 bytes."""
    return struct.pack("=QQQQQIIII24x", total, free, free, 1 << 20, 1 << 20, 4096, 255, 4096, 0)


def dirents(names: list[tuple[str, int, int]], offset: int, room: int) -> bytes:
    """Pack (name, inode, mode) from number `offset` on, as many as fit."""
    found = b""
    for number, (name, node, mode) in enumerate(names[offset:], offset + 1):
        raw = name.encode()
        entry = struct.pack("=QQII", node, number, len(raw), mode >> 12) + raw
        entry += bytes(-len(entry) % 8)
        if len(found) + len(entry) > room:
            break
        found += entry
    return found
