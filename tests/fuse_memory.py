"""A file system in memory that misbehaves on request, and records what is written to it. A program, as root.

`python -m tests.fuse_memory MOUNTPOINT [LOG]` mounts itself, says "ready", and takes one JSON object per line of stdin:
a rule, {"op": "FLUSH", "errno": 5, "skip": 0, "count": 1, "delay_s": 0.0, "hang": false}, after which it answers "ok".
`op` may name several, with commas. {"clear": true} takes all rules back and answers what hangs; {"mark": "text"} writes
a mark into the log. {"lacks": ["links", ...]} makes it a mount that lacks these for good, see `LACKS`.

LOG gets every write and flush of the file `disk`, in the order in which they came: for crash states of a block device
that lies in that file.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import stat
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests import fuse_protocol as fuse

ROOT = 1
CAPACITY = 1 << 30
RECORD = struct.Struct("=cQI")
"""Kind (W write, F flush, M mark), offset, bytes that follow."""


LACKS = {
    "links": "LINK is EOPNOTSUPP, and RENAME2 EINVAL, as of s3fs, gcsfuse and exFAT",
    "renames": "RENAME and RENAME2 are ENOSYS",
    "random writes": "a write not at the end is EINVAL, and so is a cut: mountpoint-s3",
    "cuts": "the length of an open file is set to no effect: s3fs",
    "sizes": "an open file shows the size with which it was opened; a closed one its own 0.2 s later",
    "modes": "chmod and utimens are EPERM",
    "removal": "UNLINK is EPERM",
}
LATE_S = 0.2


@dataclass
class Inode:
    """A file or a directory. `shown`: its size as it is told, from `shown_at` on its own."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)
    nlink: int = 1
    shown: int = 0
    shown_at: float = 0.0


class Refused(Exception):
    """What is answered with an errno."""


class Memory:
    """The files, and the calls upon them; each takes a request and returns the reply's body."""

    def __init__(self, log: str = "") -> None:
        self.inodes = {ROOT: Inode(ROOT, stat.S_IFDIR | 0o777, nlink=2)}
        self.log = open(log, "wb", buffering=0) if log else None  # noqa: SIM115
        self.disk = 0
        self.lacks: frozenset[str] = frozenset()
        self._next = 2

    def handle(self, request: fuse.Request) -> bytes:
        """Perform a request.

        Raises:
            Refused: With the errno.
        """
        call: Callable[[fuse.Request], bytes] | None = getattr(self, f"_{request.name.lower()}", None)
        if call is None:
            raise Refused(errno.ENOSYS)
        return call(request)

    def record(self, kind: bytes, offset: int, data: bytes) -> None:
        """Add to the log."""
        if self.log is not None:
            self.log.write(RECORD.pack(kind, offset, len(data)) + data)

    def _at(self, number: int) -> Inode:
        if number not in self.inodes:
            raise Refused(errno.ESTALE)
        return self.inodes[number]

    def _attr(self, inode: Inode) -> bytes:
        is_late = "sizes" in self.lacks and time.monotonic() < inode.shown_at
        size = inode.shown if is_late else len(inode.data)
        return fuse.attr(inode.number, size, inode.mode, inode.nlink, when=1)

    def _entry(self, inode: Inode) -> bytes:
        return fuse.entry_out(inode.number, self._attr(inode))

    def _new(self, parent: int, name: str, mode: int) -> Inode:
        if name in self._at(parent).names:
            raise Refused(errno.EEXIST)
        made = Inode(self._next, mode)
        self._next += 1
        self.inodes[made.number] = made
        self._at(parent).names[name] = made.number
        if name == "disk":
            self.disk = made.number
        return made

    def _found(self, parent: int, name: str) -> Inode:
        if name not in self._at(parent).names:
            raise Refused(errno.ENOENT)
        return self._at(self._at(parent).names[name])

    def _drop(self, parent: int, name: str) -> None:
        inode = self._found(parent, name)
        del self._at(parent).names[name]
        inode.nlink -= 1  # kept: somebody may have it open, and the process does not live long

    # ---- calls, in the order of their numbers

    def _lookup(self, r: fuse.Request) -> bytes:
        return self._entry(self._found(r.node, _text(r.body)))

    def _getattr(self, r: fuse.Request) -> bytes:
        return fuse.attr_out(self._attr(self._at(r.node)))

    def _setattr(self, r: fuse.Request) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", r.body)
        (mode,) = struct.unpack_from("=I", r.body, 68)
        inode = self._at(r.node)
        if valid & (fuse.SET_MODE | fuse.SET_TIMES) and "modes" in self.lacks:
            raise Refused(errno.EPERM)
        if valid & fuse.SET_SIZE and "random writes" in self.lacks:
            raise Refused(errno.EINVAL)
        if valid & fuse.SET_SIZE and "cuts" not in self.lacks:
            del inode.data[size:]
            inode.data.extend(bytes(size - len(inode.data)))
        if valid & fuse.SET_MODE:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        return fuse.attr_out(self._attr(inode))

    def _mkdir(self, r: fuse.Request) -> bytes:
        mode, _ = struct.unpack_from("=II", r.body)
        return self._entry(self._new(r.node, _text(r.body[8:]), stat.S_IFDIR | stat.S_IMODE(mode)))

    def _unlink(self, r: fuse.Request) -> bytes:
        if "removal" in self.lacks:
            raise Refused(errno.EPERM)
        self._drop(r.node, _text(r.body))
        return b""

    def _rmdir(self, r: fuse.Request) -> bytes:
        if self._found(r.node, _text(r.body)).names:
            raise Refused(errno.ENOTEMPTY)
        self._drop(r.node, _text(r.body))
        return b""

    def _rename(self, r: fuse.Request, start: int = 8, flags: int = 0) -> bytes:
        if "renames" in self.lacks:
            raise Refused(errno.ENOSYS)
        (directory,) = struct.unpack_from("=Q", r.body)
        old, new = (name.decode() for name in r.body[start:].split(b"\0")[:2])
        inode = self._found(r.node, old)
        if new in self._at(directory).names:
            if flags & 1:
                raise Refused(errno.EEXIST)
            self._drop(directory, new)
        del self._at(r.node).names[old]
        self._at(directory).names[new] = inode.number
        return b""

    def _rename2(self, r: fuse.Request) -> bytes:
        if "links" in self.lacks:
            raise Refused(errno.EINVAL)
        return self._rename(r, 16, struct.unpack_from("=I", r.body, 8)[0])

    def _link(self, r: fuse.Request) -> bytes:
        if "links" in self.lacks:
            raise Refused(errno.EOPNOTSUPP)
        inode, name = self._at(struct.unpack_from("=Q", r.body)[0]), _text(r.body[8:])
        if name in self._at(r.node).names:
            raise Refused(errno.EEXIST)
        self._at(r.node).names[name] = inode.number
        inode.nlink += 1
        return self._entry(inode)

    def _open(self, r: fuse.Request) -> bytes:
        return fuse.open_out(self._at(r.node).number, direct=r.node == self.disk)

    _opendir = _open

    def _read(self, r: fuse.Request) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", r.body)
        return bytes(self._at(r.node).data[offset : offset + size])

    def _write(self, r: fuse.Request) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", r.body)
        inode, data = self._at(r.node), r.body[40 : 40 + size]
        if "random writes" in self.lacks and offset != len(inode.data):
            raise Refused(errno.EINVAL)
        inode.shown_at = float("inf")
        if sum(len(i.data) for i in self.inodes.values()) + size > CAPACITY:
            raise Refused(errno.ENOSPC)
        inode.data.extend(bytes(max(0, offset - len(inode.data))))
        inode.data[offset : offset + size] = data
        if r.node == self.disk:
            self.record(b"W", offset, data)
        return struct.pack("=II", size, 0)

    def _statfs(self, r: fuse.Request) -> bytes:
        return fuse.statfs_out(CAPACITY // 4096, (CAPACITY - sum(len(i.data) for i in self.inodes.values())) // 4096)

    def _fsync(self, r: fuse.Request) -> bytes:
        if r.node == self.disk:
            self.record(b"F", 0, b"")
        return b""

    def _flush(self, r: fuse.Request) -> bytes:
        if self._at(r.node).shown_at == float("inf"):
            self._at(r.node).shown_at = time.monotonic() + LATE_S
        return b""

    def _nothing(self, r: fuse.Request) -> bytes:
        return b""

    _release = _releasedir = _fsyncdir = _access = _forget = _batch_forget = _destroy = _interrupt = _nothing

    def _init(self, r: fuse.Request) -> bytes:
        return fuse.init_out()

    def _readdir(self, r: fuse.Request) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", r.body)
        names = self._at(r.node).names
        listed = [(".", r.node, stat.S_IFDIR), ("..", ROOT, stat.S_IFDIR)]
        listed += [(name, number, self._at(number).mode) for name, number in names.items()]
        return fuse.dirents(listed, offset, size)

    def _create(self, r: fuse.Request) -> bytes:
        _, mode = struct.unpack_from("=II", r.body)
        made = self._new(r.node, _text(r.body[16:]), stat.S_IFREG | stat.S_IMODE(mode))
        return self._entry(made) + fuse.open_out(made.number, direct=made.number == self.disk)


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode()


class Server:
    """Answers the kernel, by the rules that are in force. One thread: what is late or hangs is kept aside."""

    def __init__(self, mountpoint: str, log: str = "") -> None:
        self.memory = Memory(log)
        self.rules: list[dict[str, Any]] = []
        self.late: list[tuple[float, fuse.Request, int]] = []
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"asyncckpt-test", mountpoint.encode(), b"fuse", 0, options.encode()):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), mountpoint)

    def run(self) -> None:
        """Serve until stdin ends."""
        print("ready", flush=True)
        while True:
            wait = min((max(0.0, when - time.monotonic()) for when, _, _ in self.late), default=1.0)
            ready, _, _ = select.select([self.fd, 0], [], [], min(wait, 1.0))
            if 0 in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self.obey(json.loads(line))
                print("ok", flush=True)
            if self.fd in ready:
                try:
                    data = os.read(self.fd, fuse.BUFFER_NBYTES)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    return  # unmounted
                self.take(fuse.request_of(data))
            now = time.monotonic()
            due = [held for held in self.late if held[0] <= now]
            self.late = [held for held in self.late if held[0] > now]
            for _, request, code in due:
                self.answer(request, code)

    def obey(self, rule: dict[str, Any]) -> None:
        """Take a rule, or take all back."""
        if "mark" in rule:
            self.memory.record(b"M", 0, rule["mark"].encode())
        elif "lacks" in rule:
            assert LACKS.keys() >= set(rule["lacks"]), rule
            self.memory.lacks = frozenset(rule["lacks"])
        elif rule.get("clear"):
            self.rules.clear()
            self.late = [(0.0, request, code) for _, request, code in self.late]
        else:
            self.rules.append({"skip": 0, "count": 1, "delay_s": 0.0, "errno": 0, "hang": False, **rule})

    def take(self, request: fuse.Request) -> None:
        """Answer a request now, later, or never."""
        for rule in self.rules:
            if request.name not in rule["op"].split(",") or rule["count"] == 0:
                continue
            if rule["skip"] > 0:
                rule["skip"] -= 1
                continue
            rule["count"] -= 1
            if rule["hang"] or rule["delay_s"]:
                when = float("inf") if rule["hang"] else time.monotonic() + rule["delay_s"]
                self.late.append((when, request, rule["errno"]))
            else:
                self.answer(request, rule["errno"])
            return
        self.answer(request, 0)

    def answer(self, request: fuse.Request, code: int) -> None:
        """Perform the request, unless it is to fail, and tell the kernel."""
        try:
            message = fuse.reply(request.unique, b"" if code else self.memory.handle(request), code)
        except Refused as refused:
            message = fuse.reply(request.unique, error=refused.args[0])
        if request.name in fuse.SILENT:
            return
        try:
            os.write(self.fd, message)
        except OSError as error:
            if error.errno != errno.ENOENT:  # ENOENT: whoever asked was interrupted
                raise


if __name__ == "__main__":
    Server(*sys.argv[1:]).run()
