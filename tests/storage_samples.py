"""Snapshots without torch, and file systems that misbehave: for the tests of storage and loading."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, BoxSpec, build_layout, save_id_bytes
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Structure, TensorEntry, encode_structure
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.protocol.request import PartRange, SaveRequest
from asyncckpt.storage.checkpoint_dir import prepare_directory
from asyncckpt.storage.commit import publish
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.rank_writer import RankResult, RankWriter
from asyncckpt.storage.reuse.shard_history import ShardHistory

SAVE_ID = SaveId(1, 0, "0123456789ab")
OTHER_ID = SaveId(1, 1, "0123456789ab")
SEAM = tuple(n for n, f in vars(Files).items() if callable(f) and not n.startswith("_"))


SHARE = int(os.environ.get("ASYNCCKPT_TEST_SHARE", "3"))
"""Of the calls that tests fail one by one, one in so many is; `make test-fault` takes every one."""


def some_of(n_calls: int, rng: random.Random) -> range:
    """Return the numbers, from 1, of the calls that a test lets fail: others with each seed, all over the time."""
    return range(rng.randint(1, SHARE), n_calls + 1, SHARE)


class Snapshot:
    """The memory of one rank's save: uint8 tensors of given lengths with random bytes. A context manager."""

    def __init__(
        self, lengths: Mapping[str, int], *, save_id: SaveId = SAVE_ID, seed: int = 0, n_parts: int = 1
    ) -> None:
        self.save_id = save_id
        rng = random.Random(seed)
        self.values = {fqn: rng.randbytes(n) for fqn, n in lengths.items()}
        specs = [BoxSpec(fqn=f, dtype="uint8", global_shape=(n,), offsets=(0,), sizes=(n,)) for f, n in lengths.items()]
        layout = build_layout(specs, n_parts=n_parts)
        self.memory = Memory(-1, sum(p.padded_nbytes for p in layout.parts) + 8192)
        self.image = self.memory.view()
        self.parts: list[PartRange] = []
        offset = 4096
        for part in layout.parts:
            self.image[offset : offset + len(part.header)] = part.header
            marker = offset + SAVE_ID_OFFSET
            self.image[marker : marker + SAVE_ID_NBYTES] = save_id_bytes(save_id)
            self.parts.append(PartRange(offset, part.nbytes))
            offset += part.padded_nbytes
        self.chunks = dict(zip(lengths, layout.chunks, strict=True))
        for fqn, chunk in self.chunks.items():
            start = self.parts[chunk.part][0] + chunk.offset_bytes
            self.image[start : start + chunk.nbytes] = self.values[fqn]
        keys: list[Any] = []
        for number, fqn in enumerate(lengths):
            keys += [fqn, ("T", number)]
        self.structure = encode_structure(
            Structure(
                tree=("d", tuple(keys)),
                tensors=tuple(
                    TensorEntry(fqn=f, dtype="uint8", global_shape=(n,), chunks=(self.chunks[f],))
                    for f, n in lengths.items()
                ),
                n_objects=0,
                part_nbytes=tuple(p.nbytes for p in layout.parts),
            )
        )

    def request(self, path: str, **changes: Any) -> SaveRequest:
        """Return the request that asks for this snapshot at `path`."""
        fields: dict[str, Any] = {
            "path": path,
            "save_id": self.save_id,
            "parts": tuple(self.parts),
            "structure": self.structure,
            "objects": encode_objects(self.save_id, []),
            "n_tensors": len(self.values),
        }
        return request_of(**{**fields, **changes})

    def writer(
        self,
        path: str,
        files: Files | None = None,
        check: Callable[[], None] = lambda: None,
        threads: int = 2,
        history: ShardHistory | None = None,
        **changes: Any,
    ) -> RankWriter:
        """Return what writes this snapshot's files to `path`, which exists."""
        request = self.request(path, reuse=history is not None, **changes)
        return RankWriter(request, self.image, files or Files(), check=check, threads=threads, history=history)

    def write(self, path: str, *args: Any, **kw: Any) -> RankResult:
        """Write this snapshot's files; arguments as `writer`."""
        with ThreadPoolExecutor(4) as pool:
            return self.writer(path, *args, **kw).write(pool)

    def save(self, path: str, files: Files | None = None, *, step: int = 0, **changes: Any) -> Manifest:
        """Write and commit this snapshot at `path`."""
        files = files or Files()
        fsync = changes.get("fsync", True)
        overwrite = changes.get("overwrite", False)
        prepare_directory(path, save_id=self.save_id, store=LocalStore(files), fsync=fsync, overwrite=overwrite)
        manifest = manifest_of(self.write(path, files, **changes), step=step, save_id=self.save_id, fsync=fsync)
        publish(path, manifest, store=LocalStore(files), overwrite=overwrite)
        return manifest

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.memory.close()


def request_of(**fields: Any) -> SaveRequest:
    """Return a request of a save of one rank, without tensors; `fields` of it."""
    known: dict[str, Any] = {
        "save_id": SAVE_ID,
        "step": 0,
        "rank": 0,
        "world_size": 1,
        "parts": (),
        "structure": b"",
        "objects": b"",
        "n_tensors": 0,
        "metadata": "{}",
        "fsync": True,
        "overwrite": False,
        "umask": 0o022,
        "write_threads": 0,
        "package": "0",
        "commit_timeout_s": 60.0,
        "hook_timeout_s": 0.0,
        "plan": "",
        "samples": b"",
        "changed": False,
    }
    return SaveRequest(**{**known, **fields})


def manifest_of(result: RankResult, *, step: int = 0, save_id: SaveId = SAVE_ID, fsync: bool = True) -> Manifest:
    """Return the manifest of a checkpoint of one rank."""
    return Manifest(
        save_id=save_id,
        step=step,
        world_size=1,
        created="2025-01-01T00:00:00.000+00:00",
        fsync=fsync,
        writer="tests",
        ranks=(result.record,),
    )


class RecordingFiles(Files):
    """Remembers every call as (method, first argument). Its fsync does nothing, so that tests are quick."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.read_ranges: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.paths: dict[int, str] = {}

    def before(self, name: str, args: Sequence[Any]) -> None:
        """Called ahead of each call; may raise in its place."""

    def after(self, name: str, args: Sequence[Any]) -> None:
        """Called behind each call that went well; may raise although it went well."""

    def names(self) -> list[str]:
        """Return the methods that were called, in order."""
        return [name for name, _ in self.calls]

    def fsync(self, fd: int) -> None:
        """Do nothing."""


def _recorded(name: str) -> Callable[..., Any]:
    def call(self: RecordingFiles, *args: Any, **kw: Any) -> Any:
        with self.lock:
            where = self.paths.get(args[0], args[0]) if args and isinstance(args[0], int) else args[0]
            self.calls.append((name, where))
        failure: BaseException | None = None
        try:
            self.before(name, args)
        except OSError as error:
            if name != "close":
                raise
            failure = error  # the descriptor is gone even when close fails
        if name == "close":  # ahead of it: another thread may be given the number as soon as it is free
            with self.lock:
                self.paths.pop(args[0], None)
        target = None if name == "fsync" else getattr(Files, name)
        result = target(self, *args, **kw) if target else None
        with self.lock:
            if name == "open":
                self.paths[result] = args[0]
            elif name == "preadv" and result:
                self.read_ranges.append((args[2], result))
        if failure:
            raise failure
        self.after(name, args)
        return result

    return call


for _name in SEAM:
    setattr(RecordingFiles, _name, _recorded(_name))


class FailingFiles(RecordingFiles):
    """Fails the `nth` call (from 1) that `wanted` picks, with `code`; before doing it, or after."""

    def __init__(
        self, code: int, *, nth: int = 1, wanted: Callable[[str, Sequence[Any]], bool], late: bool = False
    ) -> None:
        super().__init__()
        self._code, self._nth, self._wanted, self._late = code, nth, wanted, late
        self._seen = 0
        self.failed: str | None = None

    def before(self, name: str, args: Sequence[Any]) -> None:
        if not self._late:
            self._fail(name, args)

    def after(self, name: str, args: Sequence[Any]) -> None:
        if self._late:
            self._fail(name, args)

    def _fail(self, name: str, args: Sequence[Any]) -> None:
        with self.lock:
            if not self._wanted(name, args):
                return
            self._seen += 1
            if self._seen != self._nth:
                return
            self.failed = name
        if self._late and name == "open":
            return  # a descriptor that nobody gets would leak here, not in the code under test
        path = [args[0]] if args and isinstance(args[0], str) else []  # the kernel's errors have it, too
        raise OSError(self._code, os.strerror(self._code), *path)


def failing(method: str, code: int, *, nth: int = 1, late: bool = False, at: str = "") -> FailingFiles:
    """Return files whose `nth` call of `method` (on a path that contains `at`, or its descriptor) fails with `code`."""

    def wanted(name: str, args: Sequence[Any]) -> bool:
        return name == method and (not at or at in str(found.paths.get(args[0], args[0])))

    found = FailingFiles(code, nth=nth, late=late, wanted=wanted)
    return found


def shard_paths(path: str) -> list[str]:
    """Return the shard files of the checkpoint at `path`."""
    return sorted(os.path.join(path, n) for n in os.listdir(path) if n.endswith(".safetensors"))


def flip_byte(file: str, offset: int) -> None:
    """Change one byte of a file."""
    with open(file, "r+b") as f:
        f.seek(offset)
        old = f.read(1)
        f.seek(offset)
        f.write(bytes([old[0] ^ 0x40]))
