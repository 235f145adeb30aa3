"""Divides the copy of a state between the host and devices, by where its tensors lie."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncckpt.client.slot import StagingBuffer
from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.names import SaveId
from asyncckpt.staging.cpu_copy import CopyWork, SlotImage
from asyncckpt.staging.device import CudaDevice, Device
from asyncckpt.staging.device_copy import DeviceBoxes, DeviceWork, Transfer
from asyncckpt.staging.device_snapshot import DeviceSnapshot, DeviceSnapshotAllocator, Need
from asyncckpt.staging.pinned_memory import Pin

MAX_INLINE_NBYTES = 1 << 20
"""If the state lies on devices, up to so many deferred bytes in host memory (step counters, say) are copied before
`save()` returns, in 0.1 ms, so that no step has to wait for the copier's thread. Chosen, not measured."""

_log = logging.getLogger("asyncckpt")


class DeviceMap(NamedTuple):
    """Where the tensors of a state lie. The same object as in the last save of an image, if they lie where they did.

    Attributes:
        devices: Index of the device of each tensor, by number; None: host memory. Empty: no device is in use.
        on_devices: Numbers of the tensors on devices.
        worth_deferring: Numbers of the tensors that are worth deferring: large ones, and those on devices.
        boxes: By device, the numbers of its boxes that have elements.
    """

    devices: list[int | None]
    on_devices: frozenset[int]
    worth_deferring: Sequence[int]
    boxes: dict[int, list[int]]


class _DeviceSplit(NamedTuple):
    """How the work of a copy is divided between the host and devices.

    Attributes:
        device_map: Where the tensors lie.
        work: The immediate and the deferred work that is divided.
        host: The host's part of both.
        boxes: The part of each device.
        undetached: Numbers of the tensors on devices in the immediate work.
    """

    device_map: DeviceMap
    work: tuple[CopyWork, CopyWork]
    host: tuple[CopyWork, CopyWork]
    boxes: dict[int, DeviceWork]
    undetached: list[int]


class CopyEngine:
    """Copies from the host and from devices. One per checkpointer.

    Args:
        config: For `use_pinned_memory` and `use_non_blocking_copy`.
        device: The interface to the devices; default: CUDA.
    """

    def __init__(self, config: CheckpointerConfig, device: Device | None = None) -> None:
        self._config, self._device = config, device or CudaDevice()
        # IMPORTANT: weak, so that an entry ends with its image: it has views of memory that is unmapped after that.
        self._splits: weakref.WeakKeyDictionary[SlotImage, _DeviceSplit] = weakref.WeakKeyDictionary()
        self._device_maps: weakref.WeakKeyDictionary[SlotImage, DeviceMap] = weakref.WeakKeyDictionary()
        self._warned = False
        self._allocator = DeviceSnapshotAllocator(self._device)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on a device."""
        return self._device.active() and self._device.device_of(tensor) is not None

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the devices that any of `tensors` lies on."""
        return sorted({n for n in self.device_indices(tensors) if n is not None})

    def device_indices(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Return the index of the device that each of `tensors` lies on; None: host memory."""
        return self._device.devices_of(tensors) if self._device.active() else [None] * len(tensors)

    def device_map(self, image: SlotImage, tensors: Sequence[torch.Tensor]) -> DeviceMap:
        """Return where the tensors of a state lie."""
        devices = self._device.devices_of(tensors) if self._device.active() else []
        known = self._device_maps.get(image)
        if known is not None and known.devices == devices:
            return known
        on_devices = frozenset(n for n, device in enumerate(devices) if device is not None)
        boxes: dict[int, list[int]] = {}
        if on_devices:
            for n, (box, chunk) in enumerate(zip(image.plan.boxes, image.plan.layout.chunks, strict=True)):
                device = devices[box.number]
                if device is not None and chunk.nbytes:
                    boxes.setdefault(device, []).append(n)
        worth = sorted({*image.deferrable, *on_devices}) if on_devices else image.deferrable
        made = self._device_maps[image] = DeviceMap(devices, on_devices, worth, boxes)
        return made

    def copy_to_host(self, index: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy from device `index` to the host, after what is in its current stream. Blocks until that is done.

        Raises:
            RuntimeError: From the device.
        """
        with self._device.on(index):
            self._device.copy(targets, sources, non_blocking=False)

    def pin(self, buffer: StagingBuffer, devices: Sequence[int]) -> bool:
        """Pin the buffer, once, if `devices` copy into it and `use_pinned_memory` is set; return whether it is pinned.

        Blocks: the first time, about 0.1 to 0.5 s per GB.
        """
        if buffer.pin is None and devices and self._config.use_pinned_memory:
            buffer.pin = made = Pin(self._device, devices[0], buffer.mapping.address, buffer.mapping.nbytes)
            made.open()
            if made.failure is not None and not self._warned:
                self._warned = True
                _log.warning(
                    "cudaHostRegister failed with %s: tensors of devices are copied to memory that is not pinned, "
                    "which is slower; see what else pins memory here, and the memory limit of the container",
                    made.failure,
                )
        return buffer.pin is not None and buffer.pin.held

    def snapshot(self, image: SlotImage, device_map: DeviceMap) -> DeviceSnapshot | None:
        """Return memory on the devices for copies of all tensors that lie there.

        Returns:
            None if no tensor lies on a device, or if a device has too little memory, which is logged once.
        """
        if not device_map.on_devices:
            return None
        needs: dict[int, Need] = {}
        for device, boxes in device_map.boxes.items():
            need = needs[device] = {}
            for target in image.targets(boxes):  # of the dtype and shape of its source
                need[target.dtype] = need.get(target.dtype, 0) + target.numel()
        buffers = self._allocator.allocate(needs)
        return None if buffers is None else DeviceSnapshot(device_map.on_devices, buffers)

    def copy(
        self,
        buffer: StagingBuffer,
        image: SlotImage,
        tensors: Sequence[torch.Tensor],
        device_map: DeviceMap,
        save_id: SaveId,
        work: tuple[CopyWork, CopyWork],
        replica_windows: Sequence[torch.Tensor] = (),
        snapshot: DeviceSnapshot | None = None,
        *,
        torn_check_windows: Sequence[torch.Tensor] = (),
        overlapped: bool,
    ) -> tuple[CopyWork, Transfer | None]:
        """Copy the immediate work, and prepare the copies by devices of the deferred work.

        Args:
            buffer: The memory that is copied into.
            image: The image in it.
            tensors: All tensors of the state, by number; those of the deferred work are detached.
            device_map: Where they lie.
            save_id: ID of the save.
            work: The immediate and the deferred work, as `SlotImage.split` returns them.
            replica_windows: Flat views of tensors on devices: `Transfer.fetch_replica_windows` returns their bytes.
            snapshot: Result of `snapshot`; then all tensors on devices are in the deferred work.
            torn_check_windows: Flat views of tensors on devices: `Transfer.fetch_torn_check_windows` returns their
                bytes before and after the copies.
            overlapped: Whether copies by devices may still run when this returns.

        Returns:
            What is left of the host's work, and the copies by devices, if there are any: `Transfer.enqueue` enqueues
            those that are left.

        Raises:
            StagingError: Devices take too long.
            RuntimeError: From torch, or from a device. Copies may still run into `buffer`.
        """
        if not device_map.on_devices:
            image.fill(tensors, save_id, work[0])
            return work[1], None
        split = self._splits.get(image)
        if (
            split is None
            or split.work[0] is not work[0]
            or split.work[1] is not work[1]
            or split.device_map is not device_map
        ):
            split = self._splits[image] = self._split_by_device(image, buffer.mapping.address, device_map, work)
        pinned = self.pin(buffer, sorted(split.boxes)) and self._config.use_non_blocking_copy
        sources = list(tensors)
        if overlapped:
            # IMPORTANT: keep these tensors alive until the copies have ended; else the allocator could reuse their
            # memory. Tensors of the deferred work are detached already.
            with torch.no_grad():
                for n in split.undetached:
                    sources[n] = sources[n].detach()
        transfer = Transfer(
            self._device,
            image,
            split.boxes,
            sources,
            self._with_devices(replica_windows),
            snapshot,
            torn_check_windows=self._with_devices(torn_check_windows),
            pinned=pinned,
        )
        buffer.in_flight = transfer  # IMPORTANT: before `start`, so that the buffer is not reused while copies run
        transfer.start()
        image.fill(tensors, save_id, split.host[0])
        if not overlapped:
            transfer.finish(lambda: False)
        return split.host[1], transfer

    def _with_devices(self, windows: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        devices = self._device.devices_of(windows)
        return [(device, w) for device, w in zip(devices, windows, strict=True) if device is not None]

    def _split_by_device(
        self, image: SlotImage, address: int, device_map: DeviceMap, work: tuple[CopyWork, CopyWork]
    ) -> _DeviceSplit:
        self._splits.pop(image, None)  # frees the old split's buffers on devices before new ones are allocated
        numbers, device_indices = [box.number for box in image.plan.boxes], device_map.devices
        host: list[CopyWork] = []
        by_device: dict[int, tuple[list[int], list[int]]] = {}
        for which, some in enumerate(work):
            large = [one for one in some.large if device_indices[numbers[one.box]] is None]
            host.append(CopyWork(large, [n for n in some.small if device_indices[numbers[n]] is None]))
            for n in some.boxes:
                device = device_indices[numbers[n]]
                if device is not None:
                    by_device.setdefault(device, ([], []))[which].append(n)
        few_nbytes = sum(image.plan.layout.chunks[n].nbytes for n in host[1].boxes)
        if by_device and few_nbytes <= MAX_INLINE_NBYTES:
            host = [CopyWork(host[0].large + host[1].large, host[0].small + host[1].small), CopyWork([], [])]
        boxes = {
            index: DeviceWork(*(DeviceBoxes(self._device, index, image, address, part) for part in parts))
            for index, parts in sorted(by_device.items())
        }
        undetached = sorted({numbers[n] for parts in by_device.values() for n in parts[0]})
        return _DeviceSplit(device_map, work, (host[0], host[1]), boxes, undetached)
