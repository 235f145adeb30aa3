"""Saves of tensors on simulated devices, by the real stager, into slots of a worker that is not there."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_ranks import Ranks

from asyncckpt.async_checkpointer import hand_over
from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.client.save_outcomes import SaveOutcomes
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.components import CheckpointProcess
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import REQUEST_OFFSET_OFFSET, SlotControl
from asyncckpt.memory.streaming import Counters, StreamLayout
from asyncckpt.protocol.request import SaveRequest, decode_request
from asyncckpt.save_handle import SaveHandle
from asyncckpt.staging import copy_engine, device_copy, pinned_memory
from asyncckpt.staging.stager import SlotStager
from tests.simulated_device import Call, SimulatedDevice

DEADLINE_S = 60.0
PIECE_NBYTES = 4 * 4096


class Process(CheckpointProcess):
    """Stands for the worker's process: lends slots, and keeps the bytes of each that was sealed."""

    def __init__(self, config: CheckpointerConfig) -> None:
        self.numbers = itertools.count(1)
        self.made: list[Slot] = []
        self.config = config
        self.pool = SlotPool(config, self._allocate, lambda slot: None)
        self.epochs = SimpleNamespace(epoch_for=lambda path, run, mirror="": 1)
        self.hooks = SimpleNamespace(asks=False)
        self.handled: list[int] = []
        self.withdrawn: dict[str, str] = {}
        self.written: dict[str, bytes] = {}
        self.asked: dict[str, SaveRequest] = {}
        self.keep: set[str] = set()
        self.rings: dict[str, RingReader] = {}
        self.rng = random.Random(0)

    def stream(self, save_id: SaveId, slot: Slot) -> Callable[[], bool]:
        """Read a ring while it is filled; of a slot with room for everything nobody writes before the seal."""
        if not slot.is_ring:
            return lambda: False
        self.rings[str(save_id)] = reader = RingReader(slot, self.rng)
        return reader.check

    def _allocate(self, nbytes: int, _within_s: float | None) -> Slot:
        slot = Slot(number=next(self.numbers), memory=SlotMemory.create(nbytes))
        slot.memory.mapping.view()[4096 : nbytes - 4096] = b"\xa5" * (nbytes - 8192)
        self.made.append(slot)
        return slot

    def connect(self) -> None:
        """There is always one."""

    def begin(self, save_id: SaveId, slot: Slot, **_: Any) -> None:
        """Nobody to tell."""

    def withdraw(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """Take a save back."""
        self.handled.append(save_id.sequence)
        self.withdrawn[str(save_id)] = reason
        self.pool.give_up(save_id)
        if str(save_id) in self.rings:
            self.rings[str(save_id)].thread.join(DEADLINE_S)

    def write(self, staging_result: Any, path: str, **kw: Any) -> Future[Any]:
        """Keep the slot's bytes, and free it."""
        snapshot: StagedSnapshot = staging_result
        control = snapshot.slot.memory.control
        assert control.is_sealed(snapshot.slot.generation)
        request = control.read_request().request
        raw = snapshot.slot.memory.mapping.view()[REQUEST_OFFSET_OFFSET : REQUEST_OFFSET_OFFSET + 8]
        self.asked[str(snapshot.save_id)] = decode_request(request, int.from_bytes(raw, "little"))
        if snapshot.slot.is_ring:
            reader = self.rings[str(snapshot.save_id)]
            reader.thread.join(DEADLINE_S)
            self.written[str(snapshot.save_id)] = bytes(reader.image)
        else:
            self.written[str(snapshot.save_id)] = bytes(snapshot.slot.memory.mapping.view())
        self.pool.staged(snapshot.slot)
        if path not in self.keep:
            self.pool.free(snapshot.save_id)
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Unmap everything."""
        self.pool.close()


class RingReader:
    """What the worker would write of a ring, in a thread: `image` is what passes through it.

    Attributes:
        error: Raised to the trainer at its next segment.
        held: While it is set, nothing is freed.
        between: While it is set, another worker is being found.
    """

    def __init__(self, slot: Slot, rng: random.Random) -> None:
        (generation, raw), streamed = slot.memory.control.read_streamed()
        assert streamed
        self.request = decode_request(raw, slot.memory.nbytes - 4096)
        parts = self.request.parts
        cut = self.request.ring_segment_nbytes, self.request.ring_segments
        self.ring = StreamLayout(parts, *cut)
        self.image = bytearray(parts[-1].offset + -(-parts[-1].nbytes // 4096) * 4096)
        self.error: Exception | None = None
        self.held, self.between = threading.Event(), threading.Event()
        self.most = 0
        self._slot, self._generation, self._rng = slot, generation, rng
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def check(self) -> bool:
        """As what `WorkerClient.stream` returns."""
        if self.error is not None:
            raise self.error
        return self.between.is_set()

    def _read(self) -> None:
        memory, counters = self._slot.memory, Counters(self._slot.memory, self._generation)
        number, deadline = 0, time.monotonic() + DEADLINE_S
        while number < len(self.ring.segments) and time.monotonic() < deadline:
            if not memory.control.is_written(self._generation):
                return
            filled = self.ring.count_in(counters.filled)
            self.most = max(self.most, filled - number)
            if filled == number or self.held.is_set():
                time.sleep(0.0002)
                continue
            for one in range(number, self._rng.randrange(number, filled) + 1):
                segment, at = self.ring.segments[one], self.ring.offset_of(one)
                nbytes = -(-(segment.end - segment.start) // 4096) * 4096
                start = self.request.parts[segment.part].offset + segment.start
                self.image[start : start + nbytes] = memory.mapping.view()[at : at + nbytes]
                number = one + 1
            counters.freed = self.ring.end_of(number)


class Saver:
    """A checkpointer over a simulated device.

    Args:
        device: The device.
        **fields: Of the config.
    """

    def __init__(self, device: SimulatedDevice, **fields: Any) -> None:
        self.device, self.config = device, CheckpointerConfig(**fields)
        self.process = Process(self.config)
        ranks: Any = SimpleNamespace(rank=RankInfo(0, 1), alone=True, run_id="0123456789ab")
        worker: Any = self.process
        copies = copy_engine.CopyEngine(self.config, device)
        self.stager = SlotStager(worker, ranks, self.config, engine=copies)
        self.sequence = itertools.count(1)

    def save(self, state: Mapping[str, Any]) -> SaveHandle:
        """Save; what the stager raises is on the futures, as `AsyncCheckpointer` does it."""
        save_id = SaveId(0, next(self.sequence), "0123456789ab")
        arguments = {"path": f"/{save_id.sequence}", "step": save_id.sequence, "save_id": save_id, "metadata": None}
        handle = SaveHandle(step=save_id.sequence, path=str(arguments["path"]), save_id=save_id)
        try:
            result = self.stager.stage(state, **arguments)
        except Exception as error:
            handle.fail(error)
            return handle
        hand_over(self.process, handle, result, arguments, {})
        return handle

    def ended(self, handle: SaveHandle) -> BaseException | None:
        """Wait for the copies; returns what went wrong."""
        error = handle.staged.exception(DEADLINE_S)
        self.stager.overlap.copier.join(DEADLINE_S)
        return error

    def content(self, handle: SaveHandle) -> dict[str, bytes]:
        """Return the bytes of every tensor in the slot of a save, as it was sealed, by FQN."""
        image = self.process.written[str(handle.save_id)]
        plan = self.plan
        starts = [part.offset for part in plan.part_ranges()]
        return {
            self.fqns[box.number]: image[starts[c.part] + c.offset_bytes : starts[c.part] + c.offset_bytes + c.nbytes]
            for c, box in zip(plan.layout.chunks, plan.boxes, strict=True)
        }

    def know(self, state: Mapping[str, Any]) -> None:
        """Remember the plan of `state`, for `content`."""
        self.plan, flat = self.stager.plans.plan_for(state)
        self.fqns = flat.fqns

    def expect(self, state: Mapping[str, Any]) -> dict[str, bytes]:
        """Return what a save of tensors must hold, as they are now."""
        self.know(state)
        return {name: bits(tensor) for name, tensor in state.items()}

    def assert_holds(self, handle: SaveHandle, expected: Mapping[str, bytes]) -> None:
        """The save ends well, and its slot holds that."""
        assert self.ended(handle) is None
        assert self.content(handle) == expected

    def close(self) -> None:
        """End as a checkpointer does."""
        self.stager.close()
        self.process.close()


def ranks_saver(device: SimulatedDevice, ranks: Ranks, **fields: Any) -> Saver:
    """Return a saver that is rank 0 of two, which have exchanged their structures."""
    saver = Saver(device, **fields)
    stager: Any = saver.stager
    stager._ranks = SimpleNamespace(
        rank=RankInfo(0, 2), alone=False, must_meet=False, run_id="0123456789ab", agreement=ranks.agreement,
        aligned=lambda own: own,
        awaited_save=lambda sequence: None,
        skip_meeting=lambda *_: None,
        refuse=lambda *_: None,
        outcomes=SaveOutcomes(),
    )  # fmt: skip
    return saver


@contextlib.contextmanager
def two_devices(rng: random.Random) -> Iterator[SimulatedDevice]:
    """Two devices; at the end nothing may be pinned, and nothing done that a real one would not forgive."""
    made = SimulatedDevice(rng)
    yield made
    made.frozen = False
    made.drain()
    assert not made.violations
    assert not made.registered


def use_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and buffers so small that tests cross them."""
    monkeypatch.setattr(pinned_memory, "PIECE_NBYTES", PIECE_NBYTES)
    monkeypatch.setattr(device_copy, "BUFFER_NBYTES", 6 * 1024)
    monkeypatch.setattr(device_copy, "SMALL_NBYTES", 2 * 1024)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in row-major order."""
    with torch.no_grad():
        found = tensor.detach()
        plain = (found.view(torch.uint8) if found.element_size() == 1 else found).contiguous()  # torch copies no float4
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""


def note_seals(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let seals, unmappings and reuses of slots be among the device's calls."""
    seal, unmap = SlotControl.seal, Slot._unmap

    def sealed(control: SlotControl, request: bytes, offset: int) -> None:
        device.calls.append(Call("seal", None, None))
        seal(control, request, offset)

    def unmapped(slot: Slot) -> None:
        first, last = slot.mapping.address, slot.mapping.address + slot.mapping.nbytes
        if any(a < last and first < a + n for a, n in device.registered.items()):
            device.violations.append("memory was unmapped while it was pinned")
        device.calls.append(Call("unmap", None, slot.number))
        unmap(slot)

    monkeypatch.setattr(SlotControl, "seal", sealed)
    monkeypatch.setattr(Slot, "_unmap", unmapped)
