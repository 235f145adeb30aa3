"""Divides a save between the two copy engines: what lies on devices, and all else."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.memory.mapping import Mapping
from asyncckpt.staging.copy_cpu import Share, SlotImage
from asyncckpt.staging.copy_cuda import DeviceBoxes
from asyncckpt.staging.cuda import CudaDevice
from asyncckpt.staging.device import Device
from asyncckpt.staging.pinning import Pin
from asyncckpt.staging.transfer import OnDevice, Transfer

_log = logging.getLogger("asyncckpt")


class Division(NamedTuple):
    """One save's boxes: the host's to be copied before `save()` returns, the host's others, and the devices'."""

    now: Share
    rest: Share
    transfer: Transfer | None


class _Known(NamedTuple):
    """A division but for its tensors, and what it was made for."""

    places: list[int | None]
    now: Share
    rest: Share
    host: tuple[Share, Share]
    boxes: dict[int, OnDevice]


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

    def devices_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the devices that any of `tensors` lies on."""
        return sorted({n for n in self._places(tensors) if n is not None})

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        if not self._device.active():
            return []
        return [self._device.device_of(tensor) for tensor in tensors]

    def pin(self, held: Pin | None, mapping: Mapping, devices: Sequence[int]) -> Pin | None:
        """Return the pin of a slot's memory: `held`, which it has, or a new one where it is needed.

        Blocks: for a new one, about 0.1 to 0.5 s per GB.
        """
        if held is not None or not devices or not self._config.use_pinned_memory:
            return held
        made = Pin(self._device, devices[0], mapping.address, mapping.nbytes)
        if made.failure is not None and not self._warned:
            self._warned = True
            _log.warning(
                "cudaHostRegister failed with %s: tensors of devices are copied to memory that is not pinned, which "
                "is slower; see the limit of locked memory (ulimit -l) and what else pins memory",
                made.failure,
            )
        return made

    def divide(
        self,
        image: SlotImage,
        address: int,
        tensors: Sequence[torch.Tensor],
        now: Share,
        rest: Share,
        take_pin: Callable[[list[int]], Pin | None],
    ) -> Division:
        """Return what is whose. Nothing is copied yet.

        Args:
            image: The slot's.
            address: Where the slot starts.
            tensors: The state's, by number.
            now, rest: All boxes, as `SlotImage.split` gives them.
            take_pin: Called where tensors lie on devices: pins the slot, by `pin`, unless that was done.
        """
        places = self._places(tensors)
        if all(place is None for place in places):
            return Division(now, rest, None)
        known = self._known.get(image)
        if known is None or known.now is not now or known.rest is not rest or known.places != places:
            known = self._known[image] = self._know(image, address, places, now, rest)
        if not known.boxes:
            return Division(now, rest, None)
        pin = take_pin(sorted(known.boxes))
        pinned = pin is not None and pin.held and self._config.use_non_blocking_copy
        with torch.no_grad():
            # IMPORTANT: until the copies have ended, or the allocator gives their memory to others.
            kept = [tensor.detach() for tensor in tensors]
        return Division(*known.host, Transfer(self._device, known.boxes, kept, pinned=pinned))

    def _know(
        self, image: SlotImage, address: int, places: list[int | None], now: Share, rest: Share
    ) -> _Known:
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
        boxes = {
            index: OnDevice(*(DeviceBoxes(self._device, index, image, address, part) for part in parts))
            for index, parts in sorted(by_device.items())
        }
        return _Known(places, now, rest, (host[0], host[1]), boxes)
