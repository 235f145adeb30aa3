"""A `Store` of objects in memory: no directories, links, locks or renames, as object stores are."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncckpt.storage.shard_writer import Image, ShardWriter
from asyncckpt.storage.store import OBJECT, PREFIX, Entry, Store, UnknownOutcomeError, UnsupportedByStoreError


@dataclass(frozen=True)
class _Object:
    data: bytes
    version: str
    mtime_ns: int


class MemoryStore(Store):
    """See the module.

    Attributes:
        before: Called with method and name ahead of each change; what it raises is what the store answers.
        lost_answers: So many of the next conditional puts take effect, and their answer is lost.
    """

    def __init__(self) -> None:
        self.before: Callable[[str, str], None] = lambda method, name: None
        self.lost_answers = 0
        self.now_ns = 1_700_000_000_000_000_000
        self._objects: dict[str, _Object] = {}
        self._count = 0
        self._lock = threading.Lock()

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        self.before("put", name)
        with self._lock:
            if replace:
                self._set(name, bytes(data))
            else:
                self._put_new(name, bytes(data))

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, block_nbytes: int, aligned: bool, fsync: bool
    ) -> ShardWriter:
        raise UnsupportedByStoreError("shards", path)

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        self.before("put_if_absent", name)
        with self._lock:
            found = self._objects.get(name)
            if found is None or found.data != data:
                self._put_new(name, data)
            self._answer(name)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        self.before("replace_if", name)
        with self._lock:
            found = self._objects.get(name)
            if found is None or (found.version != version and found.data != data):
                raise FileExistsError(errno.EEXIST, "it was replaced meanwhile", name)
            self._set(name, data)
            self._answer(name)

    def _put_new(self, name: str, data: bytes) -> None:
        if name in self._objects:
            raise FileExistsError(errno.EEXIST, "the name is taken", name)
        self._set(name, data)

    def _set(self, name: str, data: bytes) -> None:
        self._count += 1
        self._objects[name] = _Object(data, str(self._count), self.now_ns)

    def _answer(self, name: str) -> None:
        if self.lost_answers:
            self.lost_answers -= 1
            raise UnknownOutcomeError(errno.EIO, "the connection broke", name)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._at(name).data[offset : offset + nbytes]

    def stat(self, name: str) -> Entry:
        found = self._at(name)
        return Entry(name, OBJECT, len(found.data), found.mtime_ns, found.version)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            inside = {n[len(prefix) + 1 :]: o for n, o in self._objects.items() if n.startswith(prefix + "/")}
            is_object = prefix in self._objects
        if not inside:
            if is_object:
                raise NotADirectoryError(errno.ENOTDIR, "it is an object", prefix)
            raise FileNotFoundError(errno.ENOENT, "nothing is there", prefix)
        found: dict[str, Entry] = {}
        for name, one in inside.items():
            first, _, rest = name.partition("/")
            if rest:
                found[first] = Entry(first, PREFIX, 0, 0, "")
            else:
                found[first] = Entry(first, OBJECT, len(one.data), one.mtime_ns, one.version)
        return iter(found.values())

    def remove(self, name: str) -> None:
        self.before("remove", name)
        with self._lock:
            if self._objects.pop(name, None) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", name)

    def sync(self, prefix: str) -> None:
        self.before("sync", prefix)

    def _at(self, name: str) -> _Object:
        with self._lock:
            found = self._objects.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return found
