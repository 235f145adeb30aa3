"""Divides a save between the two copy engines: what lies on devices, and all else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from asyncckpt.client.slot import Room
from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.names import SaveId
from asyncckpt.staging.cpu_copy import Share, SlotImage
from asyncckpt.staging.device import CudaDevice, Device
from asyncckpt.staging.device_copy import DeviceBoxes, OnDevice, Transfer
from asyncckpt.staging.device_snapshot import Need, Snapshot, SnapshotRoom
from asyncckpt.staging.pinned_memory import Pin

FEW_NBYTES = 1 << 20
"""Of the host, beside tensors of devices: step counters, say. They are copied at once, in 0.1 ms, so that no step has
to wait for a thread. Chosen, not measured."""

_log = logging.getLogger("asyncckpt")


class _Known(NamedTuple):
    """Which boxes are whose: the host's, to be copied at once and later, and the devices'; and for what that holds."""

    places: list[int | None]
    now: Share
    rest: Share
    host: tuple[Share, Share]
    boxes: dict[int, OnDevice]
    held: list[int]


class Engine:
    """See the module. One per checkpointer.

    Args:
        config: For `use_pinned_memory` and `use_non_blocking_copy`.
        device: The seam; default CUDA.
    """

    def __init__(self, config: CheckpointerConfig, device: Device | None = None) -> None:
        self._config, self._device = config, device or CudaDevice()
        # IMPORTANT: gone with the image. They are views of memory that is unmapped after it.
        self._known: weakref.WeakKeyDictionary[SlotImage, _Known] = weakref.WeakKeyDictionary()
        self._warned = False
        self._room = SnapshotRoom(self._device)

    def is_apart(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on a device."""
        return self._device.active() and self._device.device_of(tensor) is not None

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the devices that any of `tensors` lies on."""
        return sorted({n for n in self._places(tensors) if n is not None})

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        if not self._device.active():
            return []
        return [self._device.device_of(tensor) for tensor in tensors]

    def deferrable(self, image: SlotImage, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return the numbers of the tensors that it may pay to copy later: large ones, and those on devices."""
        places = self._places(tensors)
        if all(place is None for place in places):
            return image.deferrable
        return sorted({*image.deferrable, *(n for n, place in enumerate(places) if place is not None)})

    def places(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Return which device each of `tensors` lies on; None: in the host's memory."""
        return self._places(tensors) or [None] * len(tensors)

    def copy_here(self, index: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy from a device to the host, behind what its current stream holds. Blocks until that is done.

        Raises:
            RuntimeError: From the device.
        """
        with self._device.on(index):
            self._device.copy(targets, sources, non_blocking=False)

    def pin(self, room: Room, devices: Sequence[int]) -> bool:
        """Pin the room's memory, once, if `devices` copy into it and `use_pinned_memory` says so; says whether it is.

        Blocks: the first time, about 0.1 to 0.5 s per GB.
        """
        if room.pin is None and devices and self._config.use_pinned_memory:
            room.pin = made = Pin(self._device, devices[0], room.mapping.address, room.mapping.nbytes)
            made.open()
            if made.failure is not None and not self._warned:
                self._warned = True
                _log.warning(
                    "cudaHostRegister failed with %s: tensors of devices are copied to memory that is not pinned, "
                    "which is slower; see what else pins memory here, and the memory limit of the container",
                    made.failure,
                )
        return room.pin is not None and room.pin.held

    def snapshot(self, image: SlotImage, tensors: Sequence[torch.Tensor]) -> Snapshot | None:
        """Return room on the devices for copies of all tensors that lie there.

        None where none does, or one has no room, which is logged once.
        """
        places = self._places(tensors)
        apart = frozenset(n for n, place in enumerate(places) if place is not None)
        if not apart:
            return None
        needs: dict[int, Need] = {}
        numbers = [box.number for box in image.plan.boxes]
        boxes = [n for n, number in enumerate(numbers) if number in apart]
        for n, source in zip(boxes, image.sources(tensors, boxes), strict=True):
            place = places[numbers[n]]
            assert place is not None
            if source.numel():
                need = needs.setdefault(place, {})
                need[source.dtype] = need.get(source.dtype, 0) + source.numel()
        buffers = self._room.take(needs)
        return None if buffers is None else Snapshot(apart, buffers)

    def copy(
        self,
        room: Room,
        image: SlotImage,
        tensors: Sequence[torch.Tensor],
        save_id: SaveId,
        shares: tuple[Share, Share],
        windows: Sequence[torch.Tensor] = (),
        snapshot: Snapshot | None = None,
        *,
        watched: Sequence[torch.Tensor] = (),
        overlapped: bool,
    ) -> tuple[Share, Transfer | None]:
        """Copy what must be before `save()` returns, and begin with the rest as far as no thread is needed for it.

        Args:
            room: Where to.
            image: In it.
            tensors: The state's, by number; detached where they are in the rest.
            save_id: Of the save.
            shares: What must be copied, and the rest, as `SlotImage.split` gives them.
            windows: Bytes of tensors on devices, for which `is_apart` holds: the result's `fetch` returns them.
            snapshot: Of `snapshot`; then all tensors on devices are in the rest.
            watched: Bytes of tensors on devices: the result's `fetch_watched` returns them, before and after the
                copies.
            overlapped: False waits for all copies.

        Returns:
            What is left of the host's boxes, and the copies of devices, if there are any.

        Raises:
            StagingError: Devices take too long.
            RuntimeError: From torch, or from a device. Copies may still run into `room`.
        """
        now, rest = shares
        places = self._places(tensors)
        if all(place is None for place in places):
            image.fill(tensors, save_id, now)
            return rest, None
        known = self._known.get(image)
        if known is None or known.now is not now or known.rest is not rest or known.places != places:
            known = self._known[image] = self._know(image, room.mapping.address, places, now, rest)
        pinned = self.pin(room, sorted(known.boxes)) and self._config.use_non_blocking_copy
        kept = list(tensors)
        if overlapped:
            # IMPORTANT: until the copies have ended, or the allocator gives their memory to others; `rest` is detached.
            with torch.no_grad():
                for n in known.held:
                    kept[n] = kept[n].detach()
        transfer = Transfer(
            self._device,
            image,
            known.boxes,
            kept,
            self._placed(windows),
            snapshot,
            watched=self._placed(watched),
            pinned=pinned,
        )
        room.in_flight = transfer  # IMPORTANT: first, so that nobody gets the room before its copies have ended
        transfer.start()
        image.fill(tensors, save_id, known.host[0])
        if not overlapped:
            transfer.finish(lambda: False)
        return known.host[1], transfer

    def _placed(self, windows: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        return [(place, w) for w in windows if (place := self._device.device_of(w)) is not None]

    def _know(self, image: SlotImage, address: int, places: list[int | None], now: Share, rest: Share) -> _Known:
        self._known.pop(image, None)  # its buffers, before others are made
        numbers = [box.number for box in image.plan.boxes]
        host: list[Share] = []
        by_device: dict[int, tuple[list[int], list[int]]] = {}
        for which, share in enumerate((now, rest)):
            host.append(Share([b for b in share.large if places[numbers[b[0]]] is None], []))
            host[-1].small.extend(n for n in share.small if places[numbers[n]] is None)
            for n in (*(b[0] for b in share.large), *share.small):
                place = places[numbers[n]]
                if place is not None:
                    by_device.setdefault(place, ([], []))[which].append(n)
        few = sum(image.plan.layout.chunks[n].nbytes for n in (*(b[0] for b in host[1].large), *host[1].small))
        if by_device and few <= FEW_NBYTES:
            host = [Share(host[0].large + host[1].large, host[0].small + host[1].small), Share([], [])]
        boxes = {
            index: OnDevice(*(DeviceBoxes(self._device, index, image, address, part) for part in parts))
            for index, parts in sorted(by_device.items())
        }
        held = sorted({numbers[n] for parts in by_device.values() for n in parts[0]})
        return _Known(places, now, rest, (host[0], host[1]), boxes, held)
