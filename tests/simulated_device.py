"""Devices without one: a `Device` (asyncckpt/staging/device.py) for CPU tensors that are said to lie on device n.

Streams are queues that run late, in a random order that respects nothing but the streams' own and the events that they
wait for. Nothing runs by itself: some of it whenever somebody asks for an event, or a test lets it. So a wait that is
missing shows as wrong bytes; and what no real device would forgive is noted in `violations`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncckpt.staging.device import SUCCESS, DeviceMemory

DEADLINE_S = 60.0
STEP_S = 0.02
"""What one thing takes that runs on a device, while nobody asks."""

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
"""cudaErrorHostMemoryAlreadyRegistered, cudaErrorHostMemoryNotRegistered."""


class Event:
    """A mark: `passed` when everything before it has run."""

    def __init__(self, number: int) -> None:
        self.number, self.passed = number, False


class Stream:
    """What is still to run, in order: ("run", work), ("record", event), ("wait", event)."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.queue: deque[tuple[str, Any]] = deque()


class Call(NamedTuple):
    """One call of the seam: its name, the stream or None, and what else matters."""

    name: str
    stream: str | None
    what: Any


class _View(NamedTuple):
    """A tensor, without keeping its memory alive."""

    storage: StorageWeakRef
    address: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        whole = tensor.untyped_storage()
        return cls(
            StorageWeakRef(whole), whole.data_ptr(), whole.nbytes(), tensor.dtype, tensor.storage_offset(),
            tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def tensor(self) -> torch.Tensor:
        memory = torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.uint8)
        made = torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
        made = made.conj() if self.conj else made
        return torch._neg_view(made) if self.neg else made


class SimulatedDevice:
    """See the module. Thread-safe.

    Args:
        rng: Decides what runs when.

    Attributes:
        calls: What was called, in order.
        violations: What was done that a real device would answer with wrong bytes or a crash.
        frozen: Nothing runs while it is True.
        registered: Pinned memory: address to length.
        memory_of: What `memory` answers, for every device.
        ignored: Calls of `wait` for which this says True do nothing: mutation tests.
        failing: (name, n): how the nth call of that name fails from now on; see `fail`.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._lock = rng, threading.RLock()
        self._asked_at = time.monotonic()
        self._local = threading.local()
        self._storages: dict[int, tuple[int, StorageWeakRef, Stream | None]] = {}
        self._side: dict[int, Stream] = {}
        self._default: dict[int, Stream] = {}
        self._streams: list[Stream] = []
        self._numbers = itertools.count()
        self._counts: dict[str, int] = {}
        self.failing: dict[tuple[str, int], Any] = {}
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self.frozen = False
        self.registered: dict[int, int] = {}
        self.ignored: Callable[[Stream, Event], bool] = lambda stream, event: False
        self.captured = False
        self.memory_of = DeviceMemory(free=80 << 30, reserved=0, allocated=0, peak=0)

    # -- for tests

    def put(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return a tensor like `tensor` on device `index`."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        made.copy_(tensor)
        return self.mark(made, index)

    def mark(self, tensor: torch.Tensor, index: int, stream: Stream | None = None) -> torch.Tensor:
        """Say that `tensor`, and whatever shares its storage, lies on device `index`."""
        whole = tensor.untyped_storage()
        if whole.nbytes():
            self._storages[whole.data_ptr()] = (index, StorageWeakRef(whole), stream)
        return tensor

    def launch(self, index: int, work: Callable[[], Any]) -> None:
        """Put a kernel into the calling thread's current stream of a device."""
        with self._lock:
            self.current_stream(index).queue.append(("run", work))

    def new_stream(self, index: int) -> Stream:
        """Return another stream."""
        with self._lock:
            self._streams.append(Stream(f"stream {next(self._numbers)} of {index}", index))
            return self._streams[-1]

    def fail(self, name: str, nth: int, how: Any = "CUDA error: simulated") -> None:
        """Let the nth call of `name` from now on (0: the next) fail: with a code, or with a RuntimeError's text."""
        self.failing[name, self._counts.get(name, 0) + nth] = how

    def some(self) -> None:
        """Run some of what can run: the more, the longer nobody has asked, since a device does not wait to be asked."""
        with self._lock:
            now = time.monotonic()
            passed_s, self._asked_at = now - self._asked_at, now
            for _ in range(self._rng.randrange(6) + int(passed_s / STEP_S)):
                if not self._step():
                    return

    def drain(self) -> None:
        """Run everything."""
        with self._lock:
            while self._step():
                pass
            assert not any(stream.queue for stream in self._streams), "streams wait for one another"

    @property
    def busy(self) -> bool:
        """Whether anything has not run."""
        return any(stream.queue for stream in self._streams)

    def _step(self) -> bool:
        ready = [s for s in self._streams if s.queue and (s.queue[0][0] != "wait" or s.queue[0][1].passed)]
        if self.frozen or not ready:
            return False
        kind, what = self._rng.choice(ready).queue.popleft()
        if kind == "run":
            with torch.no_grad():
                what()
        elif kind == "record":
            what.passed = True
        return True

    def _count(self, name: str, stream: Stream | None = None, what: Any = None) -> Any:
        """Note a call; returns the code that it fails with, or raises, or returns None."""
        self.calls.append(Call(name, stream and stream.name, what))
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        how = self.failing.get((name, number))
        if isinstance(how, str):
            raise RuntimeError(how)
        return how

    # -- the seam

    def active(self) -> bool:
        return bool(self._storages)

    def device_of(self, tensor: torch.Tensor) -> int | None:
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return None if found is None or found[1].expired() else found[0]

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        return [self.device_of(tensor) for tensor in tensors]

    @property
    def _current(self) -> list[int]:
        if not hasattr(self._local, "devices"):
            self._local.devices, self._local.streams = [0], {}
        return self._local.devices  # type: ignore[no-any-return]

    @property
    def current(self) -> int:
        """The calling thread's current device."""
        return self._current[-1]

    def _inside(self, call: str, index: int) -> None:
        if len(self._current) < 2:
            self.violations.append(f"{call} with whatever device is current in {threading.current_thread().name}")
        elif self.current != index:
            self.violations.append(f"{call} for device {index} while {self.current} is current")

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        self._current.append(index)
        try:
            yield
        finally:
            self._current.pop()

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        with self.on(stream.index):
            before = self.current_stream(stream.index)
            self._local.streams[stream.index] = stream
            try:
                yield
            finally:
                self._local.streams[stream.index] = before

    def register(self, address: int, nbytes: int) -> int:
        with self._lock:
            self._inside("register", self.current)
            code = self._count("register", None, (address, nbytes))
            if code is not None:
                return int(code)
            if any(a < address + nbytes and address < a + n for a, n in self.registered.items()):
                return ALREADY_REGISTERED
            self.registered[address] = nbytes
            return SUCCESS

    def unregister(self, address: int) -> int:
        with self._lock:
            code = self._count("unregister", None, address)
            if code is not None:
                return int(code)
            return SUCCESS if self.registered.pop(address, None) is not None else NOT_REGISTERED

    def error_name(self, code: int) -> str:
        return f"simulated error {code}"

    def side_stream(self, index: int) -> Stream:
        with self._lock:
            if index not in self._side:
                self._side[index] = Stream(f"side {index}", index)
                self._streams.append(self._side[index])
            return self._side[index]

    def current_stream(self, index: int) -> Stream:
        with self._lock:
            assert self._current
            if index not in self._default:
                self._default[index] = Stream(f"default {index}", index)
                self._streams.append(self._default[index])
            return self._local.streams.get(index, self._default[index])  # type: ignore[no-any-return]

    def capturing(self) -> bool:
        return self.captured

    def record(self, stream: Stream) -> Event:
        with self._lock:
            event = Event(next(self._numbers))
            self._inside("record", stream.index)
            self._count("record", stream, event.number)
            stream.queue.append(("record", event))
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._inside("wait", stream.index)
            self._count("wait", stream, event.number)
            if not self.ignored(stream, event):
                stream.queue.append(("wait", event))

    def done(self, event: Event) -> bool:
        with self._lock:
            self._inside("done", self.current)
            self.some()
            self._count("done", None, (event.number, event.passed))
            return event.passed

    def idle(self, stream: Stream) -> bool:
        with self._lock:
            self._inside("idle", stream.index)
            self._count("idle", stream)
            self.some()
            return not stream.queue

    def memory(self, index: int) -> DeviceMemory:
        with self._lock:
            self._inside("memory", index)
            return self.memory_of

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        with self._lock:
            self._inside("allocate", index)
            self._count("allocate", None, nbytes)
            made = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
            return self.mark(made, index, self.current_stream(index))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        assert len(targets) == len(sources) and targets
        with self._lock:
            places = {self.device_of(source) for source in sources}
            assert len(places) == 1 and None not in places, f"sources on {places}"
            (index,) = places
            assert index is not None
            stream = self.current_stream(index)
            self._inside("copy", index)
            to_host = [self.device_of(target) is None for target in targets]
            what = ("to the host" if to_host[0] else "on the device", len(targets), non_blocking)
            n = self._counts.get("copy", 0)
            how = self.failing.get(("copy", n))
            for position, (target, source) in enumerate(zip(targets, sources, strict=True)):
                if how is not None and position == len(targets) // 2:
                    break  # half of it runs all the same
                assert target.shape == source.shape and target.dtype == source.dtype
                pinned = to_host[position] and self._is_pinned(target)
                self._enqueue(stream, target, source, pinned=pinned)
                if to_host[position] and not (pinned and non_blocking):
                    self._run(stream)
            self._count("copy", stream, what)

    def _is_pinned(self, target: torch.Tensor) -> bool:
        first, last = target.data_ptr(), target.data_ptr() + target.numel() * target.element_size()
        touched = [(a, n) for a, n in self.registered.items() if a < last and first < a + n]
        if touched and not (touched[0][0] <= first and last <= touched[0][0] + touched[0][1]):
            raise RuntimeError("CUDA error: invalid argument (a range that is not registered as a whole)")
        return bool(touched)

    def _enqueue(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        found = self._storages[source.untyped_storage().data_ptr()]
        # What a stream has allocated is its own until it has come past the point where it was freed.
        held = source if found[2] is stream else None
        there, here = _View.of(target), _View.of(source)
        on_device = self._storages.get(target.untyped_storage().data_ptr())
        held_target = target if on_device is not None and on_device[2] is stream else None

        def work() -> None:
            if held is None and here.storage.expired():
                self.violations.append("a source was freed before its copy")
                return
            if on_device is not None and held_target is None and there.storage.expired():
                self.violations.append("a target on the device was freed before its copy")
                return
            if pinned:
                first = there.address + there.offset * there.dtype.itemsize
                if not any(a <= first < a + n for a, n in self.registered.items()):
                    self.violations.append("a copy into memory that is not pinned any more")
                    return
            there.tensor().copy_(here.tensor())

        stream.queue.append(("run", work))

    def _run(self, stream: Stream) -> None:
        """As a call that waits for a stream; others may use the device meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        while stream.queue:
            if not self._step():
                assert time.monotonic() < deadline, "a stream does not end"
                if not self.frozen:
                    assert not all(s.queue and s.queue[0][0] == "wait" for s in self._streams if s.queue)
                self._lock.release()
                try:
                    time.sleep(0.001)
                finally:
                    self._lock.acquire()
