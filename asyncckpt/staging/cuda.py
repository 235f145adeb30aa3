"""CUDA devices by way of torch, ROCm's too as far as `torch.cuda` stands for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from asyncckpt.staging.device import DeviceMemory, Event, Stream

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one (CUDA runtime API, memory management)."""


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
        # IMPORTANT: no_grad is per thread; see copy_cpu.py.
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
