"""Snapshots on the device: tensors are copied there first, and then from that copy to the host (`staging="device"`).

The training may change the tensors as soon as its stream has made the copy, which takes some milliseconds at the
bandwidth of the device's memory; the CPU does not wait. The cost is memory of the device, from `save()` until the
copies to the host have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from asyncckpt.staging.device import Device

RESERVE_NBYTES = 512 << 20
"""Bytes to leave free on a device, for fragmentation and other libraries. Chosen, not measured."""

Need = dict[torch.dtype, int]
"""Number of elements of each dtype that a snapshot needs."""

_log = logging.getLogger("asyncckpt")


class DeviceSnapshot(NamedTuple):
    """Memory on devices for the copies of one save.

    Attributes:
        numbers: Numbers of the state's tensors that lie on devices.
        buffers: By device, one for each dtype.
    """

    numbers: frozenset[int]
    buffers: dict[int, dict[torch.dtype, torch.Tensor]]


class DeviceSnapshotAllocator:
    """Allocates memory for snapshots on devices, out of what the training does not need.

    Args:
        device: The interface to the devices.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first_peaks: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self._warned = False

    def allocate(self, needs: Mapping[int, Need]) -> dict[int, dict[torch.dtype, torch.Tensor]] | None:
        """Return memory on each device, for use in its current stream; None if a device has too little.

        Memory that a step of the training needs at its peak counts as taken, although it is free during `save()`.
        """
        found: dict[int, dict[torch.dtype, torch.Tensor]] = {}
        for index, need in needs.items():
            nbytes = sum(elements * dtype.itemsize for dtype, elements in need.items())
            with self._device.on(index):
                free = self._free_nbytes(index)
                if nbytes > free:
                    self._refused(f"{nbytes} bytes are needed on device {index}, and {free} are free")
                    return None
                try:
                    found[index] = {
                        dtype: self._device.allocate(elements * dtype.itemsize, index).view(dtype)
                        for dtype, elements in need.items()
                    }
                except RuntimeError as error:  # enough is free, but fragmented
                    self._refused(f"device {index} refuses {nbytes} bytes: {error}")
                    return None
                self._largest[index] = max(nbytes, self._largest.get(index, 0))
        return found

    def _free_nbytes(self, index: int) -> int:
        memory = self._device.memory(index)
        first = self._first_peaks.setdefault(index, memory.peak)
        # A later peak may include one of our snapshots: subtract the largest.
        peak = max(first, memory.peak - self._largest.get(index, 0), memory.allocated)
        return memory.free + memory.reserved - peak - RESERVE_NBYTES

    def _refused(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "staging='device': there is no room for a copy of the state on the device (%s), besides what a step of "
                "the training needs and a reserve of %d bytes; saves are staged as with staging='auto' until there is",
                why,
                RESERVE_NBYTES,
            )


def copy_into(
    device: Device, sources: Sequence[torch.Tensor], buffers: Mapping[torch.dtype, torch.Tensor]
) -> list[torch.Tensor]:
    """Enqueue copies of `sources` in the current stream of their device.

    Args:
        device: The interface to the devices.
        sources: All on one device.
        buffers: For each dtype, as many elements as its sources have together.

    Returns:
        The copies, row-major, in the order of `sources`: views of `buffers`.

    Raises:
        RuntimeError: From the device.
    """
    positions: dict[torch.dtype, list[int]] = {}
    for n, source in enumerate(sources):
        positions.setdefault(source.dtype, []).append(n)
    made: dict[int, torch.Tensor] = {}
    for dtype, some in positions.items():
        views = torch._C._nn.unflatten_dense_tensors(buffers[dtype], [sources[n] for n in some])
        made.update(zip(some, views, strict=True))
    strided = [n for n, source in enumerate(sources) if not source.is_contiguous()]
    contiguous = sorted(made.keys() - set(strided)) if strided else range(len(sources))
    for which in (contiguous, strided):  # separately: with a strided one, torch would launch a kernel for each tensor
        some = [n for n in which if sources[n].numel()]
        if some:
            device.copy([made[n] for n in some], [sources[n] for n in some], non_blocking=True)
    return [made[n] for n in range(len(sources))]
