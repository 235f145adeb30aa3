"""Starts the copy of a state into a slot: one that has room for the whole state, or a ring that is smaller.

`required_slot` decides between them. `FullSlotCopier` and `RingCopier` copy what must be copied before `save()`
returns; the job that they return copies the rest behind the training.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_stream import SlotStream, StreamingClient, Watermark, should_stream
from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.layout import round_up
from asyncckpt.format.names import SaveId
from asyncckpt.memory.heap import trim_heap
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import SaveRequest, encode_request
from asyncckpt.staging.copy_engine import CopyEngine, DeviceMap
from asyncckpt.staging.cpu_copy import CopyWork, SlotImage, integer_view
from asyncckpt.staging.deferred_copy import CopyJob
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.staging.device_snapshot import DeviceSnapshot
from asyncckpt.staging.mutation_check import (
    MAX_SAMPLED_DEVICE_TENSORS,
    MAX_SAMPLED_TENSORS,
    MutationCheck,
    SamplingRounds,
    Source,
    choose_samples,
)
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.ring_copy import RingCopy, RingImage, ring_within
from asyncckpt.staging.save_request import StructureReport, seal_with
from asyncckpt.state_dict.flatten import Flattened

REQUEST_SLACK_NBYTES = 64 * 1024
"""Spare room for objects that grow between saves, so that no new slot is needed for that. Chosen, not measured."""

MAX_CLONED_NBYTES = 64 << 20
"""How much that no optimizer owns may be cloned for a copy through a ring behind the training. If there is more,
`save()` waits for the whole copy. Chosen: enough for statistics and counters."""

MANY_BOXES = 2000
"""With so many boxes, making a plan takes some megabytes temporarily. Chosen, not measured."""

Image = TypeVar("Image", SlotImage, RingImage)

_log = logging.getLogger("asyncckpt")


class SlotRequirement(NamedTuple):
    """The memory that a save needs, and its request to the worker.

    Attributes:
        asked: The request.
        request: The request, encoded.
        nbytes: Size of the slot.
        spare_nbytes: Make a new slot larger by so many bytes.
        ring: Layout of the ring; None: the slot has room for the whole state.
    """

    asked: SaveRequest
    request: bytes
    nbytes: int
    spare_nbytes: int
    ring: StreamLayout | None


def required_slot(config: CheckpointerConfig, plan: SavePlan, asked: SaveRequest) -> SlotRequirement:
    """Return the memory that a save needs: a slot for the whole state, or a ring if `arena_limit_bytes` is less.

    If the limit is too small even for a ring, this returns a slot for the whole state, and the pool refuses it.
    """
    request = encode_request(asked)
    whole = SlotRequirement(asked, request, slot_nbytes(plan.body_nbytes, len(request)), REQUEST_SLACK_NBYTES, None)
    limit, n_slots = config.arena_limit_bytes, 2 if config.keep_in_memory == "latest" else 1
    if limit is None or n_slots * whole.nbytes <= limit:
        return whole
    request_room_nbytes = round_up(len(request) + REQUEST_SLACK_NBYTES, REQUEST_SLACK_NBYTES)
    ring = ring_within(limit // n_slots, asked.parts, request_room_nbytes)
    if ring is None:
        return whole
    asked = replace(asked, ring_segments=ring.n_cells, ring_segment_nbytes=ring.segment_nbytes)
    return SlotRequirement(asked, encode_request(asked), ring.end + request_room_nbytes + PAGE_NBYTES, 0, ring)


class StartedCopy(NamedTuple):
    """A copy that has been started, and may have ended.

    Attributes:
        job: What the host has still to copy.
        is_deferred: Whether anything is left: then seal the slot once `job` and `transfer` have ended.
        check: Checks that the deferred tensors have not changed.
        seal: Seals the slot.
        transfer: The copies by devices; None: there are none.
    """

    job: CopyJob
    is_deferred: bool
    check: MutationCheck
    seal: Callable[[], None]
    transfer: Transfer | None = None


class SlotCopier(Protocol):
    """A way to copy states into slots."""

    def prepare(self, slot: Slot, required: SlotRequirement, plan: SavePlan, flat: Flattened) -> None:
        """Do the one-time work of the first copy: make views for `plan`, and pin the slot if devices copy into it."""

    def start(
        self,
        slot: Slot,
        required: SlotRequirement,
        plan: SavePlan,
        flat: Flattened,
        report: StructureReport,
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> StartedCopy:
        """Copy into an open slot what must be copied before `save()` returns.

        Args:
            slot: The slot.
            required: Result of `required_slot`.
            plan: Plan of the save.
            flat: The state. Its tensors that are read behind the training are detached in place.
            report: The structure report that the request contains.
            save_id, step, path: ID, step and directory of the save.

        Raises:
            AsyncCkptError, RuntimeError, OSError: As documented by the copier.
        """


class FullSlotCopier:
    """Copies into a slot that has room for the whole state. One per checkpointer.

    Args:
        client: The client of the worker, which may begin to write before everything is copied.
        config: For `staging` and `overlap_check`.
        engine: Copies from the host and from devices.
        overlap: Decides what is copied behind the training.
        rounds: Rounds of sampling, shared by all copiers of a checkpointer.
    """

    def __init__(
        self,
        client: StreamingClient,
        config: CheckpointerConfig,
        engine: CopyEngine,
        overlap: Overlap,
        rounds: SamplingRounds,
    ) -> None:
        self._client, self._config, self._engine, self._overlap = client, config, engine, overlap
        self._rounds = rounds

    def prepare(self, slot: Slot, required: SlotRequirement, plan: SavePlan, flat: Flattened) -> None:
        """See `SlotCopier`. Blocks for the driver, about 0.1 to 0.5 s per GB, if devices copy into the slot."""
        self._engine.pin(slot, self._engine.devices_of(flat.tensors))
        image_of(slot, plan)

    def start(
        self,
        slot: Slot,
        required: SlotRequirement,
        plan: SavePlan,
        flat: Flattened,
        report: StructureReport,
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> StartedCopy:
        """See `SlotCopier`.

        Raises:
            StagingError, RuntimeError: As `CopyEngine.copy`.

        Blocks: for the copy of what is not deferred.
        """
        image = image_of(slot, plan)
        device_map = self._engine.device_map(image, flat.tensors)
        deferred, owners, snapshot = self._choose_deferred(image, flat.tensors, device_map)
        checked = deferred if snapshot is None else deferred - snapshot.numbers
        with torch.no_grad():  # IMPORTANT: detached, so that `parameter.data = other` does not free copied memory
            for n in checked:  # of the others, which are copied on their device first, `Transfer` holds the memory
                flat.tensors[n] = flat.tensors[n].detach()
        work = image.split(deferred)
        check = MutationCheck(flat, checked, owners, save_id=save_id, step=step, path=path)
        torn_check_windows: list[torch.Tensor] = []
        if checked and self._config.overlap_check != "off":
            boxes = work[1].boxes
            if checked is not deferred:
                boxes = [n for n, number in zip(boxes, image.numbers(boxes), strict=True) if number in checked]
            if self._config.overlap_check == "hash":
                check.digest([Source(*pair) for pair in image.pairs(flat.tensors, boxes)])
            else:
                torn_check_windows = self._sample(check, image, flat.tensors, device_map, boxes)
        replica_windows = [window for _, window in report.samples.device_windows]
        host_work, transfer = self._engine.copy(
            slot,
            image,
            flat.tensors,
            device_map,
            save_id,
            work,
            replica_windows,
            snapshot,
            torn_check_windows=torn_check_windows,
            overlapped=bool(deferred),
        )
        seal: Callable[[], None] = partial(slot.memory.control.seal, required.request, image.body_end)
        if replica_windows and transfer is not None:
            seal = partial(seal_with, slot, image.body_end, required.asked, report.samples, transfer)
        watermark: Watermark | None = None
        # Not with copies by devices: the watermark does not count them, and the request may lack their samples.
        if deferred and transfer is None and should_stream(sum(box.nbytes for box in host_work.large)):
            stream = SlotStream(
                self._client, slot, required.request, image.body_end, save_id=save_id, step=step, path=path
            )
            watermark, seal = _watermark(image, slot, stream), stream.finish
        job = HostCopy(image, flat.tensors, host_work, watermark)
        return StartedCopy(job, bool(deferred), check, seal, transfer)

    def _sample(
        self,
        check: MutationCheck,
        image: SlotImage,
        tensors: Sequence[torch.Tensor],
        device_map: DeviceMap,
        boxes: Sequence[int],
    ) -> list[torch.Tensor]:
        """Read windows of the boxes that are copied from host memory; return those of boxes copied from devices.

        Tensors on devices that are not row-major are left out: each of their windows would take kernels of its own.
        """
        sampling_round = self._rounds.next(image.plan)
        on_host, on_devices = boxes, list[int]()
        if device_map.on_devices:
            located = list(zip(boxes, image.numbers(boxes), strict=True))
            on_host = [n for n, number in located if number not in device_map.on_devices]
            on_devices = [n for n, number in located if number in device_map.on_devices]

        def sources_of(some: Sequence[int]) -> list[Source]:
            return list(map(Source._make, image.pairs(tensors, some)))

        check.sample(choose_samples(on_host, sampling_round, MAX_SAMPLED_TENSORS, sources_of))
        chosen = choose_samples(on_devices, sampling_round, MAX_SAMPLED_DEVICE_TENSORS, sources_of, n_pieces=1)
        return check.sample_devices([one for one in chosen if one[0].tensor.is_contiguous()])

    def _choose_deferred(
        self, image: SlotImage, tensors: Sequence[torch.Tensor], device_map: DeviceMap
    ) -> tuple[frozenset[int], list[torch.Tensor], DeviceSnapshot | None]:
        """Return what is deferred and its owners, as `Overlap.choose_deferred`; and the snapshot on devices."""
        among = device_map.worth_deferring
        snapshot = self._engine.snapshot(image, device_map) if self._config.staging == "device" else None
        if snapshot is not None:  # what it holds may be changed by anybody
            among = [n for n in among if n not in snapshot.numbers]
        deferred, owners = self._overlap.choose_deferred(tensors, among)
        return (deferred, owners, None) if snapshot is None else (deferred | snapshot.numbers, owners, snapshot)


class RingCopier:
    """Copies through a ring: a slot that is smaller than the state. One per checkpointer.

    Args:
        client: The client of the worker, which writes the ring while it is being filled.
        config: For `arena_limit_bytes`, `keep_in_memory` and `overlap_check`.
        engine: Copies from devices.
        overlap: Decides what is copied behind the training.
        rounds: Rounds of sampling, shared by all copiers of a checkpointer.
    """

    def __init__(
        self,
        client: StreamingClient,
        config: CheckpointerConfig,
        engine: CopyEngine,
        overlap: Overlap,
        rounds: SamplingRounds,
    ) -> None:
        self._client, self._config, self._engine, self._overlap = client, config, engine, overlap
        self._rounds = rounds
        self._has_warned = False

    def prepare(self, slot: Slot, required: SlotRequirement, plan: SavePlan, flat: Flattened) -> None:
        """See `SlotCopier`."""
        assert required.ring is not None
        ring_image_of(slot, plan, required.ring)

    def start(
        self,
        slot: Slot,
        required: SlotRequirement,
        plan: SavePlan,
        flat: Flattened,
        report: StructureReport,
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> StartedCopy:
        """See `SlotCopier`. The whole state is copied now, or the whole state behind the training.

        Raises:
            AsyncCkptError, RuntimeError, OSError: As `SlotStream` and `RingCopy.run`.

        Blocks: unless the result is deferred, until all but the last segments are written.
        """
        assert required.ring is not None
        self._log_ring(step, path, plan, required.ring)
        devices = self._engine.device_indices(flat.tensors)
        deferred, owners, tensors = self._choose_deferred(flat.tensors, devices, plan)
        check = MutationCheck(flat, deferred, owners, save_id=save_id, step=step, path=path)
        if deferred and self._config.overlap_check != "off":
            # Only the sources are compared: the ring no longer holds the copies when the check runs.
            def sources_of(some: Sequence[int]) -> list[Source]:
                return [Source(n, flat.tensors[n], None) for n in some]

            if self._config.overlap_check == "hash":
                check.digest(sources_of(sorted(deferred)))
            else:
                sampling_round = self._rounds.next(plan)
                check.sample(choose_samples(sorted(deferred), sampling_round, MAX_SAMPLED_TENSORS, sources_of))
        image = ring_image_of(slot, plan, required.ring)
        request = self._completed_request(required, report)
        stream = SlotStream(
            self._client, slot, request, image.ring.end, image.ring, save_id=save_id, step=step, path=path
        )
        job = RingCopy(image, stream, tensors, devices, self._engine, save_id)
        if not deferred:
            job.run()
        return StartedCopy(job, bool(deferred), check, stream.finish)

    def _choose_deferred(
        self, tensors: list[torch.Tensor], devices: Sequence[int | None], plan: SavePlan
    ) -> tuple[frozenset[int], list[torch.Tensor], list[torch.Tensor]]:
        """Return what is deferred, as `Overlap.choose_deferred`, and the tensors to copy: sources, or clones."""
        deferred, owners = self._overlap.choose_deferred(tensors, range(len(tensors)), needs_core=False)
        others = sorted({box.number for box in plan.boxes} - deferred)
        cloned_nbytes = sum(tensors[n].numel() * tensors[n].element_size() for n in others)
        if not deferred or cloned_nbytes > MAX_CLONED_NBYTES or any(device is not None for device in devices):
            return frozenset(), [], tensors
        with torch.no_grad():  # IMPORTANT: detached, so that `parameter.data = other` does not free copied memory
            for n in deferred:
                tensors[n] = tensors[n].detach()
            copied = list(tensors)
            for n in others:
                source = tensors[n].detach()
                clone = integer_view(source).clone(memory_format=torch.contiguous_format)
                copied[n] = clone.view(source.dtype)
        return deferred, owners, copied

    def _completed_request(self, required: SlotRequirement, report: StructureReport) -> bytes:
        """Return the request with the samples of tensors on devices, in the place of zeros: its length is the same."""
        if not report.samples.device_windows:
            return required.request
        fetched = []
        for _, window in report.samples.device_windows:
            (device,) = self._engine.device_indices([window])
            assert device is not None
            host = torch.empty(window.numel(), dtype=torch.uint8, device="cpu")
            self._engine.copy_to_host(device, [host], [window])
            fetched.append(ctypes.string_at(host.data_ptr(), host.numel()))
        return encode_request(replace(required.asked, samples=report.samples.completed(fetched).encode()))

    def _log_ring(self, step: int, path: str, plan: SavePlan, ring: StreamLayout) -> None:
        level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
        not_kept = ", and is not kept in memory" if self._config.keep_in_memory == "latest" else ""
        _log.log(
            level,
            "save of step %d to %s: %d bytes do not fit into arena_limit_bytes=%d, so they are copied in segments "
            "through a ring of %d bytes. The save takes as long as writing%s",
            step,
            path,
            plan.file_nbytes,
            self._config.arena_limit_bytes,
            ring.cells_nbytes,
            not_kept,
        )


class HostCopy:
    """A `CopyJob` for a slot that has room for the whole state. For one save.

    Args:
        image: The image in the slot.
        tensors: All tensors of the state, by number.
        work: The boxes that are left to copy.
        watermark: Tells the worker how far the slot is filled; None: the worker writes once the slot is sealed.
    """

    def __init__(
        self, image: SlotImage, tensors: Sequence[torch.Tensor], work: CopyWork, watermark: Watermark | None
    ) -> None:
        self._image, self._tensors = image, tensors
        self._work, self._watermark = work, watermark

    @property
    def has_work(self) -> bool:
        """See `CopyJob`."""
        return bool(self._work)

    def run(self, fault_safe: bool = False) -> None:
        """See `CopyJob`."""
        self._image.copy(self._tensors, self._work, fault_safe, self._watermark)

    def cancel(self) -> None:
        """See `CopyJob`."""
        self._image.cancel()

    def extended_deadline(self) -> float:
        """Return 0.0: a copy into memory extends no deadline."""
        return 0.0


def _watermark(image: SlotImage, slot: Slot, stream: SlotStream) -> Watermark:
    """Return the watermark of a slot that is written while it is being filled."""

    def tell(nbytes: int) -> None:
        stream.has_filled(nbytes)
        image.progress.come_to(nbytes)

    address = slot.memory.mapping.address
    return Watermark(address + PAGE_NBYTES, address + image.body_end, tell)


def image_of(slot: Slot, plan: SavePlan) -> SlotImage:
    """Return the slot's image of `plan`: the current one, a cached one, or a new one.

    Plans of one structure under several agreements share their layout, and so the image.
    """

    def make() -> SlotImage:
        with gc_paused():
            made = SlotImage(slot.memory.mapping.address, plan)
        if len(plan.boxes) >= MANY_BOXES:
            trim_heap()  # temporary memory of making the plan and its views, which the C library would keep
        return made

    return _use_image(slot, SlotImage, lambda image: image.plan.layout is plan.layout, make)


def ring_image_of(slot: Slot, plan: SavePlan, ring: StreamLayout) -> RingImage:
    """As `image_of`, for a ring."""

    def fits(image: RingImage) -> bool:
        return image.plan.layout is plan.layout and image.ring.is_like(ring)

    return _use_image(slot, RingImage, fits, lambda: RingImage(slot.memory.mapping.address, plan, ring))


def _use_image(slot: Slot, kind: type[Image], fits: Callable[[Image], bool], make: Callable[[], Image]) -> Image:
    """Return the image for the next save: the current one, a cached one, or a new one."""
    current = slot.views
    if isinstance(current, kind) and fits(current):
        return current
    image = next((views for views in slot.cached_views if isinstance(views, kind) and fits(views)), None)
    if image is None:
        image = make()
    else:
        slot.cached_views.remove(image)
        image.lay_out()
    if current is not None:
        slot.cached_views.append(current)
        del slot.cached_views[: -PlanCache.MAX_PLANS]
    slot.views = image
    return image
