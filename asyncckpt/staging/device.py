"""The interface to accelerators: every call to a device's runtime goes through a `Device`.

`CudaDevice` is the real one. Tests put a simulated one in its place, whose streams run late and out of step, so that a
wait that is missing shows as wrong bytes (tests/simulated_device.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Stream = Any
"""A queue of a device: opaque, of the `Device` that made it."""

Event = Any
"""A mark in a stream: opaque, of the `Device` that made it."""

SUCCESS = 0
UNLOADING = 4
"""cudaErrorCudartUnloading: the process ends, and the runtime has taken everything back by itself."""


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one (CUDA runtime API, memory management)."""


class DeviceMemory(NamedTuple):
    """Bytes of a device: free by its driver; torch's allocator holds `reserved`, of which `allocated` are in use and
    `peak` have been since the process began, or since its statistics were last reset.
    """

    free: int
    reserved: int
    allocated: int
    peak: int


class Device(Protocol):
    """The devices of one kind in this process, by index. Whatever the driver refuses is a `RuntimeError` here.

    The current device and the current streams are the calling thread's, as in torch. A new thread starts on device 0,
    and a call there may make a context on it: so every call with no index, and every one about a stream or an event, is
    made inside `on(index)`.
    """

    def active(self) -> bool:
        """Whether tensors can lie on a device at all: its runtime is in use already. Never starts it; costs nothing."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the device that `tensor` lies on; None when it lies elsewhere."""

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Make device `index` current inside; the one that was current is so again afterwards."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """As `on`, and make `stream` current on its device."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin whole pages of host memory for all devices; returns the runtime's code, `SUCCESS` or another.

        IMPORTANT: a code other than `SUCCESS` stays behind as this thread's last error, and the next kernel that is
        launched from the thread would raise it: call this in a thread that launches none.
        """

    def unregister(self, address: int) -> int:
        """Undo `register`; returns the runtime's code. In a thread as for `register`."""

    def error_name(self, code: int) -> str:
        """Return what a code means."""

    def side_stream(self, index: int) -> Stream:
        """Return the stream that copies run on, the same one for a device whenever it is asked for."""

    def current_stream(self, index: int) -> Stream:
        """Return the stream that the calling thread's kernels on device `index` go to."""

    def capturing(self) -> bool:
        """Whether the current stream of the current device is being captured into a graph."""

    def record(self, stream: Stream) -> Event:
        """Return a mark behind everything that is in `stream` now."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what comes next in `stream` wait for `event`. The CPU does not wait."""

    def done(self, event: Event) -> bool:
        """Whether everything before `event` has run."""

    def idle(self, stream: Stream) -> bool:
        """Whether everything in `stream` has run."""

    def memory(self, index: int) -> DeviceMemory:
        """Return what is free and in use on device `index`."""

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Return bytes on device `index`, for use in its current stream. Raises where there is no room."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Put copies into the current stream of the sources' device, bit for bit.

        Args:
            targets: Each of the shape and dtype of its source, on the host or on the same device.
            sources: All on one device.
            non_blocking: Do not wait for copies to the host; only for pinned targets, which must be left alone until
                an event behind the copies is done. False: returns when they have ended.
        """


class CudaDevice:
    """A `Device`; see there. Everything but `active` and `device_of` is for processes in which CUDA is in use."""

    _side_streams: dict[int, torch.cuda.Stream] = {}  # noqa: RUF012 (of the process: torch has a few streams per device)
    _lock = threading.Lock()

    def active(self) -> bool:
        """Whether this process has begun to use CUDA; in a forked child of one that has, False."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the tensor's device, or None."""
        return tensor.get_device() if tensor.is_cuda else None

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current inside. Leaving makes no context on a device that had none."""
        return torch.cuda.device(index)

    def on_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make a stream, and its device, current inside."""
        return torch.cuda.stream(stream)

    def register(self, address: int, nbytes: int) -> int:
        """cudaHostRegister."""
        return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Undo it: cudaHostUnregister."""
        return int(_runtime().cudaHostUnregister(address))

    def error_name(self, code: int) -> str:
        """Return the runtime's text for a code."""
        runtime = _runtime()
        return str(runtime.cudaGetErrorString(runtime.cudaError(code)))

    def side_stream(self, index: int) -> Stream:
        """Return this process's one for copies of checkpoints."""
        with self._lock:
            if index not in self._side_streams:
                self._side_streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            return self._side_streams[index]

    def current_stream(self, index: int) -> Stream:
        """Return torch's."""
        return torch.cuda.current_stream(index)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Stream) -> Event:
        """Return a new event, without timing."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let the stream wait."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Ask without waiting: cudaEventQuery."""
        return bool(event.query())

    def idle(self, stream: Stream) -> bool:
        """Ask without waiting: cudaStreamQuery."""
        return bool(stream.query())

    def memory(self, index: int) -> DeviceMemory:
        """Ask driver and allocator. torch's peak is `reset_peak_memory_stats`'s to reset."""
        free, _ = torch.cuda.mem_get_info(index)
        return DeviceMemory(
            free,
            torch.cuda.memory_reserved(index),
            torch.cuda.memory_allocated(index),
            torch.cuda.max_memory_allocated(index),
        )

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Return bytes of torch's allocator, in the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Copy all in one call: between a device and itself that is a few kernels, to the host one transfer each."""
        # IMPORTANT: no_grad is per thread; see cpu_copy.py.
        with torch.no_grad():
            if targets[0].device == sources[0].device:
                targets, sources = _as_bits(targets), _as_bits(sources)
            torch._foreach_copy_(list(targets), list(sources), non_blocking)


_KEPT_BY_KERNELS = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a kernel of the device copies bit for bit.

    It takes shorter floats through float32, where a NaN is another one afterwards, and has no wider unsigned integers.
    """
    return [t if t.dtype in _KEPT_BY_KERNELS else t.view(_INTEGERS[t.dtype.itemsize]) for t in tensors]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
