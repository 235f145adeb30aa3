"""The copies of one save's tensors from devices into a slot: enqueued, waited for, or ordered before what comes next.

training thread   |  [snapshot]; record on the producing stream; side stream waits for it; [copies; record: done]
a hook before     |  the stream that the step goes to waits for `done`; the CPU does not
copier's thread   |  until `done` has come to pass; then the sources are checked and the slot is sealed

With a snapshot, which the producing stream makes on the device, nothing that comes next need wait for anything.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from asyncckpt.errors import StagingError
from asyncckpt.failpoints import reach
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.copy_cuda import DeviceBoxes
from asyncckpt.staging.device import Device, Event
from asyncckpt.staging.snapshots import Snapshot

TRANSFER_TIMEOUT_S = 600.0
"""For what devices had to do before the copies, and the copies. Chosen: no queue of kernels is so long, unless one of
them waits for a rank that is gone."""

DRAIN_TIMEOUT_S = 30.0
"""For copies of a save that has failed, until nothing writes to its slot any more. Chosen: far above a full slot's."""

FIRST_POLL_S, LAST_POLL_S = 50e-6, 2e-3
"""Between two looks at an event: torch's own wait for it has no deadline."""


class OnDevice(NamedTuple):
    """The boxes of one device: those copied before `save()` returns, and the others."""

    now: DeviceBoxes
    rest: DeviceBoxes


class Transfer:
    """See the module. For one save; keeps its tensors alive until their copies have ended.

    Args:
        device: The seam.
        image: The slot's.
        boxes: By device.
        tensors: The state's, by number; detached, so that nothing frees what they hold.
        windows: Bytes that `fetch` returns, as they are at `start`: (device, uint8).
        watched: Bytes that `fetch_watched` returns, as they are before the copies, and after them.
        snapshot: Room on the devices for copies of the sources: then `boxes` has everything in `rest`.
        pinned: The slot is pinned, and copies need not be waited for one by one.
    """

    def __init__(
        self,
        device: Device,
        image: SlotImage,
        boxes: Mapping[int, OnDevice],
        tensors: Sequence[torch.Tensor],
        windows: Sequence[tuple[int, torch.Tensor]] = (),
        snapshot: Snapshot | None = None,
        *,
        watched: Sequence[tuple[int, torch.Tensor]] = (),
        pinned: bool,
    ) -> None:
        self._device, self._image, self._boxes, self._tensors, self._pinned = device, image, boxes, tensors, pinned
        self._windows, self._watched = windows, watched
        self._gathered, self._before, self._after = (dict[int, torch.Tensor]() for _ in range(3))
        self._snapshot, self._kept = snapshot, dict[int, list[torch.Tensor]]()
        self._sizes, self._watched_sizes = (
            [(index, window.numel()) for index, window in some] for some in (windows, watched)
        )
        self._touched: dict[int, Event | None] = {}
        self._owner_pid = os.getpid()

    @property
    def orders(self) -> bool:
        """Whether `order` is enough for changing the sources: everything is in a stream when `start` returns."""
        return self._pinned or self._snapshot is not None

    def start(self) -> None:
        """Enqueue what can be, behind what the calling thread's current streams hold now.

        What must be copied before `save()` returns comes first. Without a pinned slot it is waited for; with one the
        current stream waits for it, so that whatever it does next comes after.

        Raises:
            RuntimeError: From a device. Copies may run: `settle`.
        """
        for index in sorted({*self._boxes, *(index for index, _ in self._windows)}):
            with self._device.on(index):
                current, side = self._device.current_stream(index), self._device.side_stream(index)
                boxes = self._boxes.get(index)
                if self._snapshot is not None and boxes is not None and boxes.rest:
                    buffers = self._snapshot.buffers[index]
                    self._kept[index] = boxes.rest.keep(self._image, self._tensors, buffers)
                    reach("device: snapshot made")
                # IMPORTANT: the values at `save()` may still be in the making, in a stream of their own.
                self._device.wait(side, self._device.record(current))
            with self._device.on_stream(side):
                self._touched[index] = None
                reach("device: copying")
                if boxes is not None and boxes.now:
                    boxes.now.copy(self._image, self._tensors, non_blocking=self._pinned)
                gathered = self._gather(index, self._windows, self._gathered)
                gathered = self._gather(index, self._watched, self._before) or gathered
                # IMPORTANT: behind the windows too. They may be of tensors that no hook guards, and the replicas of a
                # step later differ from what the other ranks compare.
                if gathered or (self._pinned and boxes is not None and boxes.now):
                    self._device.wait(current, self._device.record(side))
                if self._pinned and boxes is not None and boxes.rest:
                    boxes.rest.copy(self._image, self._tensors, self._kept.get(index), non_blocking=True)
                    self._gather(index, self._watched, self._after)
                self._touched[index] = self._device.record(side)
                reach("device: copies begun")

    def _gather(self, index: int, some: Sequence[tuple[int, torch.Tensor]], into: dict[int, torch.Tensor]) -> bool:
        """Put the windows of a device side by side, there: they may be changed as soon as that has run.

        Args:
            index: Of the device.
            some: Windows, of any device.
            into: Gets them.

        Returns:
            Whether there are any.
        """
        windows = [window for place, window in some if place == index]
        if windows:
            sizes = [window.numel() for window in windows]
            into[index] = buffer = self._device.allocate(sum(sizes), index)
            self._device.copy(list(torch.split(buffer, sizes)), windows, non_blocking=True)
        return bool(windows)

    def fetch(self) -> list[bytes]:
        """Return the windows. Blocks for a transfer of a few MB, and for what came into its stream before.

        Raises:
            RuntimeError: From a device.
        """
        found = self._fetched(self._gathered, self._sizes)
        reach("device: samples fetched")
        return found

    def fetch_watched(self) -> list[tuple[bytes, bytes]]:
        """Return the watched windows before and after the copies, which have ended. Blocks as `fetch`.

        Raises:
            RuntimeError: From a device.
        """
        before, after = (self._fetched(some, self._watched_sizes) for some in (self._before, self._after))
        return list(zip(before, after, strict=True))

    def _fetched(self, gathered: Mapping[int, torch.Tensor], sizes: Sequence[tuple[int, int]]) -> list[bytes]:
        here, at = {}, dict.fromkeys(gathered, 0)
        for index, buffer in gathered.items():
            here[index] = torch.empty(buffer.numel(), dtype=torch.uint8, device="cpu")
            with self._device.on_stream(self._device.side_stream(index)):
                self._device.copy([here[index]], [buffer], non_blocking=False)
        found = []
        for index, nbytes in sizes:
            found.append(ctypes.string_at(here[index].data_ptr() + at[index], nbytes))
            at[index] += nbytes
        return found

    def order(self) -> None:
        """Let the calling thread's current streams wait for the copies. The CPU does not wait.

        Raises:
            RuntimeError: From a device; what is in no stream cannot be ordered.
        """
        if self._snapshot is not None:  # it is in the streams that made the sources
            return
        for index, event in self._touched.items():
            with self._device.on(index):
                # What is captured now runs when the graph is launched: no hook sees that, nor can one event order it.
                if not self._device.capturing():
                    self._device.wait(self._device.current_stream(index), event)

    def finish(self, given_up: Callable[[], bool]) -> None:
        """Copy what `start` has left, and wait until all copies have ended, or `given_up()`.

        Raises:
            StagingError: They have not within `TRANSFER_TIMEOUT_S`.
            RuntimeError: From a device.
        """
        if not self._pinned:
            for index, boxes in self._boxes.items():
                if boxes.rest and not given_up():
                    side = self._device.side_stream(index)
                    with self._device.on_stream(side):
                        self._touched[index] = None
                        boxes.rest.copy(self._image, self._tensors, self._kept.get(index), non_blocking=False)
                        self._gather(index, self._watched, self._after)
                        self._touched[index] = self._device.record(side)
        deadline, pause_s = time.monotonic() + TRANSFER_TIMEOUT_S, FIRST_POLL_S
        while not self.ended() and not given_up():
            if time.monotonic() >= deadline:
                raise StagingError(
                    f"the devices {sorted(self._boxes)} had not copied the state {TRANSFER_TIMEOUT_S:g} s after save()"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        if not given_up():
            reach("device: copied")
            self._let_go()

    def settle(self) -> bool:
        """Wait until no copy runs any more, whatever has gone wrong before.

        Blocks: at most `DRAIN_TIMEOUT_S`. An interrupt is raised when that is known.

        Returns:
            False when it cannot be told: then the slot is lost, and must stay mapped and pinned for good.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        interrupt: BaseException | None = None
        while True:
            try:
                if self.ended():
                    self._let_go()
                    known = True
                    break
                if time.monotonic() >= deadline:
                    known = False
                    break
                time.sleep(LAST_POLL_S)
            except RuntimeError:  # the driver's
                known = False
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None and known:
            raise interrupt
        return known

    def _let_go(self) -> None:
        """Drop the sources. IMPORTANT: only when the copies have ended."""
        self._tensors = self._windows = self._watched = ()
        self._snapshot = None if self._snapshot is None else self._snapshot._replace(buffers={})
        self._kept.clear()

    def ended(self) -> bool:
        """Whether no copy that was enqueued runs any more. Does not wait.

        Raises:
            RuntimeError: A device does not tell.
        """
        if os.getpid() != self._owner_pid:  # a forked child has neither the copies nor the memory
            return True
        for index, event in list(self._touched.items()):
            side = self._device.side_stream(index)
            with self._device.on(index):
                if not (self._device.idle(side) if event is None else self._device.done(event)):
                    return False
        return True
