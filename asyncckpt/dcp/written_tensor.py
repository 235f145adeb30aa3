"""One tensor while it is written: resolved once, fetched from its device ahead or piece by piece, let go at the end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch

from asyncckpt.errors import StagingError
from asyncckpt.memory.mapping import copy_bytes
from asyncckpt.staging.device import Device, Event

ARRIVAL_TIMEOUT_S = 600.0
"""For what a device has to do before a copy, and the copy. Chosen: no queue of kernels is so long."""

_POLL_S = 50e-6

Resolve = Callable[[], torch.Tensor]
"""Makes the elements of a tensor, as `items.bytes_of` returns them."""


def pinned(like: torch.Tensor) -> torch.Tensor:
    """Return host memory for a copy that nobody waits for yet."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


def settle(made: torch.Tensor, device: Device) -> None:
    """Wait until a device has made a tensor, in the stream of this thread: other threads read it by streams of theirs.

    Raises:
        StagingError: A device does not come to an end.
    """
    index = device.device_of(made)
    if index is None:
        return
    with device.on(index):
        _await(device, index, device.record(device.current_stream(index)), "made")


def _await(device: Device, index: int, event: Event, done: str) -> None:
    """Wait for an event, inside `on`."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise StagingError(f"device {index} has not {done} a tensor within {ARRIVAL_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


class WrittenTensor:
    """See the module. Safe to use from several threads.

    Args:
        resolve: Makes the elements.
        nbytes: How many there are.
        device: The seam to devices.
    """

    def __init__(self, resolve: Resolve, nbytes: int, device: Device) -> None:
        self._resolve, self._missing, self._device = resolve, nbytes, device
        self._elements: torch.Tensor | None = None
        self._arrival: tuple[int, Event, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def on_device(self) -> bool:
        """Resolve it, if that was not done yet; whether it is on a device, or was before it was fetched."""
        with self._lock:
            return self._arrival is not None or self._device.device_of(self._resolved()) is not None

    def _resolved(self) -> torch.Tensor:
        if self._elements is None:
            self._elements = self._resolve()
        return self._elements

    def fetch(self) -> None:
        """Begin its copy to the host, where it is on a device and not being read yet."""
        with self._lock:
            if self._elements is not None:
                return
            found = self._resolve()
            index = self._device.device_of(found)
            if index is None:
                return  # resolved again in its turn: what a planner makes of it is not kept until then
            host = pinned(found)
            with self._device.on(index):
                current, side = self._device.current_stream(index), self._device.side_stream(index)
                # IMPORTANT: a planner's kernels may still be making the values, in the stream of this thread. What
                # another thread has made has settled.
                self._device.wait(side, self._device.record(current))
            with self._device.on_stream(side):
                self._device.copy([host], [found], non_blocking=True)
                self._arrival = index, self._device.record(side), found  # which lives until it is copied
            self._elements = host

    def read(self, low: int, high: int, address: int) -> bool:
        """Copy some of its bytes to `address`; True when it was the last of them.

        Raises:
            StagingError: A device does not come to an end.
        """
        with self._lock:
            found = self._resolved()
            if self._arrival is not None:
                index, event, _ = self._arrival
                with self._device.on(index):
                    _await(self._device, index, event, "copied")
        place = self._device.device_of(found)
        if place is None:
            copy_bytes(address, found.data_ptr() + low, high - low)
        else:
            memory = torch.frombuffer((ctypes.c_char * (high - low)).from_address(address), dtype=torch.uint8)
            with self._device.on(place):
                self._device.copy([memory], [found[low:high]], non_blocking=False)
        with self._lock:
            self._missing -= high - low
            if not self._missing:
                self._elements = self._arrival = None
            return not self._missing
