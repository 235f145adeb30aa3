"""The seam to accelerators: every call that staging makes to a device's runtime goes through a `Device`.

`cuda.py` is the real one. Tests put a simulated one in its place, whose streams run late and out of step, so that a
wait that is missing shows as wrong bytes (tests/simulated_device.py).
"""

from __future__ import annotations

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
