"""The interface to accelerators: every call to a device's runtime goes through a `Device`.

`CudaDevice` is the real one. Tests use a simulated device whose streams run late and out of step, so that a missing
wait shows as wrong bytes (tests/simulated_device.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

Stream = Any
"""A queue of work of a device; an opaque object of the `Device` that made it."""

Event = Any
"""A mark in a stream; an opaque object of the `Device` that made it."""

SUCCESS = 0
UNLOADING = 4
"""cudaErrorCudartUnloading: the process ends, and the runtime has released everything itself."""


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one (CUDA runtime API, memory management)."""


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes.

    Attributes:
        free: Free according to the driver.
        reserved: Held by torch's allocator.
        allocated: The part of `reserved` that is in use.
        peak: The largest `allocated` since the process began, or since the statistics were last reset.
    """

    free: int
    reserved: int
    allocated: int
    peak: int


class Device(Protocol):
    """The devices of one kind in this process, by index. Errors of the driver are raised as `RuntimeError`.

    The current device and the current streams are the calling thread's, as in torch. A new thread starts on device 0,
    and a call there may make a context on it. So make every call without an index, and every one about a stream or an
    event, inside `on(index)`.
    """

    def active(self) -> bool:
        """Whether the runtime is in use, so that tensors may lie on a device. Never starts the runtime. Cheap."""

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the device that `tensor` lies on; None: it lies on no device of this kind."""

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """As `device_of`, for each of `tensors`. Cheap: it is called with a whole state in every save."""

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Make device `index` current inside the context; restore the current device after it."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """As `on`, and make `stream` current on its device."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin whole pages of host memory for all devices; return the runtime's code, `SUCCESS` or another.

        IMPORTANT: call this in a thread that launches no kernels. A code other than `SUCCESS` stays this thread's last
        error, and the next kernel launch of the thread would raise it.
        """

    def unregister(self, address: int) -> int:
        """Undo `register`; return the runtime's code. Call it in a thread as `register`."""

    def error_name(self, code: int) -> str:
        """Return the runtime's text for a code."""

    def side_stream(self, index: int) -> Stream:
        """Return the stream for copies of checkpoints, always the same one for a device."""

    def current_stream(self, index: int) -> Stream:
        """Return the stream that the calling thread's kernels on device `index` go to."""

    def capturing(self) -> bool:
        """Whether the current stream of the current device is being captured into a graph."""

    def record(self, stream: Stream) -> Event:
        """Return an event behind everything that is in `stream` now."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work in `stream` wait for `event`. The CPU does not wait."""

    def done(self, event: Event) -> bool:
        """Whether everything before `event` has run."""

    def idle(self, stream: Stream) -> bool:
        """Whether everything in `stream` has run."""

    def memory(self, index: int) -> DeviceMemory:
        """Return how much memory of device `index` is free and in use."""

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Return `nbytes` on device `index`, for use in its current stream. Raises RuntimeError if there is no room."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Enqueue bit-exact copies in the current stream of the sources' device.

        Args:
            targets: Each of the shape and dtype of its source, on the host or on the same device.
            sources: All on one device.
            non_blocking: Do not wait for copies to the host. Only for pinned targets, which must not be used before an
                event behind the copies is done. False: return when they have ended.
        """


class CudaDevice:
    """The `Device` of CUDA. Call nothing but `active`, `device_of` and `devices_of` if CUDA is not in use here."""

    _side_streams: dict[int, torch.cuda.Stream] = {}  # noqa: RUF012 (per process: torch has few streams per device)
    _lock = threading.Lock()

    def active(self) -> bool:
        """Whether this process uses CUDA; False in a forked child of a process that does."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the tensor's device, or None."""
        return tensor.get_device() if tensor.is_cuda else None

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Return the index of each tensor's device, or None."""
        return [tensor.get_device() if tensor.is_cuda else None for tensor in tensors]

    def on(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current. Leaving the context makes no CUDA context on a device that had none."""
        return torch.cuda.device(index)

    def on_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make a stream and its device current."""
        return torch.cuda.stream(stream)

    def register(self, address: int, nbytes: int) -> int:
        """Pin: cudaHostRegister."""
        return int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """Unpin: cudaHostUnregister."""
        return int(_runtime().cudaHostUnregister(address))

    def error_name(self, code: int) -> str:
        """Return the runtime's text for a code."""
        runtime = _runtime()
        return str(runtime.cudaGetErrorString(runtime.cudaError(code)))

    def side_stream(self, index: int) -> Stream:
        """Return the process's stream for copies of checkpoints."""
        with self._lock:
            if index not in self._side_streams:
                self._side_streams[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            return self._side_streams[index]

    def current_stream(self, index: int) -> Stream:
        """Return torch's current stream."""
        return torch.cuda.current_stream(index)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Stream) -> Event:
        """Record and return a new event, without timing."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the stream wait: cudaStreamWaitEvent."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Query the event: cudaEventQuery. Does not wait."""
        return bool(event.query())

    def idle(self, stream: Stream) -> bool:
        """Query the stream: cudaStreamQuery. Does not wait."""
        return bool(stream.query())

    def memory(self, index: int) -> DeviceMemory:
        """Query the driver and torch's allocator. `reset_peak_memory_stats` resets the peak."""
        free, _ = torch.cuda.mem_get_info(index)
        # Nested: `memory_reserved`, `memory_allocated` and `max_memory_allocated` each flatten all statistics first.
        found = torch.cuda.memory_stats_as_nested_dict(index)
        allocated = found["allocated_bytes"]["all"]
        return DeviceMemory(free, found["reserved_bytes"]["all"]["current"], allocated["current"], allocated["peak"])

    def allocate(self, nbytes: int, index: int) -> torch.Tensor:
        """Return bytes of torch's allocator, in the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Copy all in one call: within a device by a few kernels, to the host by one transfer for each tensor."""
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
    """Return views that a kernel of the device copies bit for bit.

    The kernel converts shorter floats through float32, which changes the bits of a NaN, and does not support wider
    unsigned integers.
    """
    return [t if t.dtype in _KEPT_BY_KERNELS else t.view(_INTEGERS[t.dtype.itemsize]) for t in tensors]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
