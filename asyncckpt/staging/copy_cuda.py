"""How the tensors of a device get into a slot: few and large transfers, worked out once per slot and plan.

A transfer to the host costs some microseconds to enqueue, however little it moves: 20,000 of them 100 ms. So small
tensors that lie side by side in the slot are first gathered on the device, which a few kernels do for hundreds at once,
into a buffer laid out as that stretch of the slot, and go over together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from asyncckpt.staging import pinning
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.cutting import copyable
from asyncckpt.staging.device import Device
from asyncckpt.staging.snapshots import copy_into

SMALL_NBYTES = 64 * 1024
"""Below it a tensor is gathered. Chosen: at 25 GB/s it moves in 2.6 us, less than its own transfer takes to enqueue."""

BUFFER_NBYTES = 16 << 20
"""Of the device's memory, for gathering: large enough that transfers dwarf their enqueueing. Chosen, not measured."""

ALIGNMENT = 16
"""A stretch lies in the buffer as it lies in the slot, modulo this: views of any dtype need theirs."""


class Stretch(NamedTuple):
    """Boxes side by side in the slot: from `start` to `end`, of `lap`, from `at` on in the buffer."""

    boxes: list[int]
    start: int
    end: int
    lap: int
    at: int


class _Lap(NamedTuple):
    """What the buffer holds at a time: by dtype (views of it, positions of their sources); then its transfers."""

    fills: list[tuple[list[torch.Tensor], list[int]]]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]


def stretches_of(places: Iterable[tuple[int, int, int]], buffer_nbytes: int) -> list[Stretch]:
    """Return what is gathered of the boxes (number, start, nbytes), and where; others go over by themselves.

    Args:
        places: Of the boxes of one device in the slot, in any order.
        buffer_nbytes: Of the buffer. It is filled anew, in laps, when the next stretch does not fit behind the others.
    """
    found: list[Stretch] = []
    boxes: list[int] = []
    lap = at = first = last = 0

    def flush() -> None:
        nonlocal lap, at
        if len(boxes) > 1:
            start = at + (first - at) % ALIGNMENT
            if start + last - first > buffer_nbytes:
                lap, start = lap + 1, first % ALIGNMENT
            found.append(Stretch(list(boxes), first, last, lap, start))
            at = start + last - first
        boxes.clear()

    for number, start, nbytes in sorted(places, key=lambda place: place[1]):
        if not 0 < nbytes < SMALL_NBYTES:
            continue
        if boxes and (start != last or start + nbytes - first + ALIGNMENT > buffer_nbytes):
            flush()
        if not boxes:
            first = start
        boxes.append(number)
        last = start + nbytes
    flush()
    return found


def cuts_of(start: int, nbytes: int, piece_nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges, from 0 to `nbytes`, of something at `start` that lie in one piece of a pinned slot each."""
    ends = [*range(piece_nbytes - start % piece_nbytes, nbytes, piece_nbytes), nbytes]
    return list(zip([0, *ends], ends, strict=False))


class DeviceBoxes:
    """Some of an image's boxes, of tensors on one device, and how they get there.

    Views of the slot's memory: the image's owner drops it before that is unmapped.

    Args:
        device: The seam.
        index: Of the device.
        image: Whose boxes they are. It is not kept: it may be what keeps these.
        address: Of the slot.
        numbers: Of the boxes.
    """

    def __init__(self, device: Device, index: int, image: SlotImage, address: int, numbers: Sequence[int]) -> None:
        self._device, self._index, self._plan, self._address = device, index, image.plan, address
        plan = image.plan
        chunks, ranges = plan.layout.chunks, plan.part_ranges()
        places = [(n, ranges[chunks[n].part].offset + chunks[n].offset_bytes, chunks[n].nbytes) for n in numbers]
        self._places = {n: (start, nbytes) for n, start, nbytes in places if nbytes}
        self._laps: list[_Lap] = []
        stretches = stretches_of(places, BUFFER_NBYTES)
        try:
            self._lay(stretches)
        except RuntimeError:  # no memory on the device: each goes over by itself
            stretches = []
        gathered = [n for stretch in stretches for n in stretch.boxes]
        self._order = [*gathered, *sorted(self._places.keys() - set(gathered))]
        self._n_gathered = len(gathered)
        self._targets = image.targets(self._order[self._n_gathered :])
        self._cuts = {
            position: cuts
            for position, n in enumerate(self._order)
            if position >= self._n_gathered and len(cuts := cuts_of(*self._places[n], pinning.PIECE_NBYTES)) > 1
        }

    def __bool__(self) -> bool:
        return bool(self._places)

    def _lay(self, stretches: list[Stretch]) -> None:
        if not stretches:
            return
        # In the side stream's memory: laps follow one another in that stream only.
        with self._device.on_stream(self._device.side_stream(self._index)):
            buffer = self._device.allocate(max(s.at + s.end - s.start for s in stretches), self._index)
        plan, position = self._plan, 0
        laps: dict[int, _Lap] = {}
        fills: dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], list[int]]] = {}
        for stretch in stretches:
            lap = laps.setdefault(stretch.lap, _Lap([], [], []))
            for n in stretch.boxes:
                at = stretch.at + self._places[n][0] - stretch.start
                dtype = plan.signature[1][plan.boxes[n].number][0]
                whole = buffer[at : at + self._places[n][1]].view(dtype).view(plan.layout.chunks[n].sizes)
                key = (stretch.lap, dtype)
                if key not in fills:
                    lap.fills.append(fills.setdefault(key, ([], [])))
                fills[key][0].append(copyable(whole))
                fills[key][1].append(position)
                position += 1
            for a, b in cuts_of(stretch.start, stretch.end - stretch.start, pinning.PIECE_NBYTES):
                lap.targets.append(self._bytes(stretch.start + a, b - a))
                lap.sources.append(buffer[stretch.at + a : stretch.at + b])
        self._laps = [laps[number] for number in sorted(laps)]

    def _bytes(self, start: int, nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_char * nbytes).from_address(self._address + start)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keep(
        self, image: SlotImage, tensors: Sequence[torch.Tensor], buffers: Mapping[torch.dtype, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Put copies of the sources into the current stream, for `copy`.

        Args:
            image: The one that they were made for.
            tensors: The state's, by number.
            buffers: For each dtype, as many elements as the boxes have together.

        Raises:
            RuntimeError: From the device.
        """
        return copy_into(self._device, image.sources(tensors, self._order), buffers)

    def copy(
        self,
        image: SlotImage,
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor] | None = None,
        *,
        non_blocking: bool,
    ) -> None:
        """Put the copies into the side stream, which is current.

        Args:
            image: The one that they were made for.
            tensors: The state's, by number. With `non_blocking` they must live until the copies have ended.
            kept: What `keep` has returned, to be copied in the place of `tensors`.
            non_blocking: As for `Device.copy`.

        Raises:
            RuntimeError: From the device. Copies before it may run.
        """
        sources = image.sources(tensors, self._order) if kept is None else kept
        for lap in self._laps:
            for views, positions in lap.fills:
                self._gather(views, [sources[position] for position in positions])
            self._device.copy(lap.targets, lap.sources, non_blocking=non_blocking)
        targets, rows, made_nbytes = list[torch.Tensor](), list[torch.Tensor](), 0
        for position in range(self._n_gathered, len(sources)):
            source, target = sources[position], self._targets[position - self._n_gathered]
            if not source.is_contiguous():
                if made_nbytes >= BUFFER_NBYTES:  # they may be the whole state: torch's channels_last, for one
                    self._device.copy(targets, rows, non_blocking=non_blocking)
                    targets, rows, made_nbytes = [], [], 0
                source = self._row_major(source)
                made_nbytes += source.numel() * source.element_size()
            if position in self._cuts:
                here, there = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
                targets += [there[a:b] for a, b in self._cuts[position]]
                rows += [here[a:b] for a, b in self._cuts[position]]
            else:
                targets.append(target)
                rows.append(source)
        if targets:
            self._device.copy(targets, rows, non_blocking=non_blocking)

    def _gather(self, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        odd = {n for n, source in enumerate(sources) if not source.is_contiguous()}
        if odd:  # by themselves: one among others would make every one a kernel of its own
            self._device.copy([views[n] for n in odd], [sources[n] for n in odd], non_blocking=True)
            views = [view for n, view in enumerate(views) if n not in odd]
            sources = [source for n, source in enumerate(sources) if n not in odd]
        if sources:
            self._device.copy(views, sources, non_blocking=True)

    def _row_major(self, source: torch.Tensor) -> torch.Tensor:
        """Return a row-major copy on the device, for use in the side stream, where its memory is free again after."""
        nbytes = source.numel() * source.element_size()
        made = self._device.allocate(nbytes, self._index).view(source.dtype).view(source.shape)
        self._device.copy([made], [source], non_blocking=True)
        return made
