"""A state that is larger than its memory: what passes through the ring is what lies in a slot that holds all of it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import states
import torch
from simulated_saves import DEADLINE_S, RingReader, Saver, bits, use_small_pieces

from asyncckpt.errors import (
    InsufficientMemoryError,
    SaveFailedError,
    SlotTimeoutError,
    SnapshotTornError,
    StagingError,
)
from asyncckpt.protocol import request
from asyncckpt.staging import overlap, ring_copy, slot_copy
from asyncckpt.staging.cpu_copy import runs
from tests.simulated_device import SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
UNIT = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64)
SHAPES: list[tuple[int, ...]] = [(), (3,), (5000,), (70, 90), (7, 11, 13), (0, 4), (1, 20_000), (300, 3, 17)]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of pages, so that small states have many."""
    monkeypatch.setattr(request, "RING_UNIT_NBYTES", UNIT)
    monkeypatch.setattr(ring_copy, "RING_UNIT_NBYTES", UNIT)
    monkeypatch.setattr(slot_copy, "REQUEST_SLACK_NBYTES", UNIT)
    use_small_pieces(monkeypatch)


Make = Callable[..., Saver]


@pytest.fixture
def make(device: SimulatedDevice) -> Iterator[Make]:
    """Makes savers, through rings of 16 units unless the settings say otherwise."""
    with contextlib.ExitStack() as stack:

        def made(**fields: Any) -> Saver:
            saver = Saver(device, **{"arena_limit_bytes": 16 * UNIT, "slot_timeout_s": 20.0, **fields})
            stack.callback(saver.close)
            return saver

        yield made


def hold(saver: Saver, act: Callable[[RingReader], Any] = lambda reader: reader.held.set()) -> None:
    """Let the readers of the saver's rings read only when `held` is cleared; or do something else to each."""
    stream = saver.process.stream

    def held(*arguments: Any) -> Any:
        check = stream(*arguments)
        act(saver.process.rings[str(arguments[0])])
        return check

    saver.process.stream = held  # type: ignore[method-assign]


def state_of(rng: random.Random, device: SimulatedDevice | None = None) -> dict[str, Any]:
    """Return a random state: every dtype, strides, views, some of it on devices."""
    found: dict[str, Any] = {"step": rng.randrange(100)}
    for n in range(rng.randrange(3, 12)):
        dtypes = states.ALL_DTYPES if device is None else DTYPES
        tensor = states.tensor_of(rng.choice(dtypes), rng.choice(SHAPES), rng.getrandbits(32))
        if tensor.dim() > 1 and rng.random() < 0.5:
            tensor = tensor.transpose(0, -1)
        elif tensor.dim() and rng.random() < 0.2:
            tensor = tensor[::2]
        if device is not None and rng.random() < 0.4:
            tensor = device.put(tensor, rng.randrange(2))
        found[f"t{n}"] = tensor
    found["large"] = states.tensor_of(torch.float32, (rng.randrange(20_000, 60_000),), rng.getrandbits(32))
    return found


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
@pytest.mark.parametrize("staging", ["blocking", "overlap"])
def test_what_passes_through_a_ring_is_what_a_slot_would_hold(
    make: Make, rng: random.Random, layout: str, staging: str
) -> None:
    for _ in range(4):
        state = state_of(rng)
        fields = {"layout": layout, "staging": staging, "files_per_rank": rng.randrange(1, 4)}
        whole = make(**fields, arena_limit_bytes=None)
        handle = whole.save(state)
        assert whole.ended(handle) is None
        wanted = whole.process.written[str(handle.save_id)]
        body = whole.process.asked[str(handle.save_id)].parts
        small = make(arena_limit_bytes=rng.randrange(8, 24) * UNIT, **fields)
        for _ in range(2):
            ringed = small.save(state)
            assert small.ended(ringed) is None
            reader = small.process.rings[str(ringed.save_id)]
            found = small.process.written[str(ringed.save_id)]
            assert reader.request.parts == body
            for part in body:
                one, other = (raw[part.offset : part.offset + part.nbytes] for raw in (found, wanted))
                assert one.replace(str(ringed.save_id).encode(), b"") == other.replace(
                    str(handle.save_id).encode(), b""
                )
            assert reader.most <= reader.ring.n_cells
        assert len(small.process.made) == 1, "the slot is used again"
        assert small.process.made[0].memory.nbytes <= small.config.arena_limit_bytes  # type: ignore[operator]


@pytest.mark.parametrize("staging", ["blocking", "overlap", "device"])
def test_tensors_of_devices_are_what_the_kernels_before_the_save_have_made(
    make: Make, device: SimulatedDevice, rng: random.Random, staging: str
) -> None:
    for _ in range(3):
        state = state_of(rng, device)
        placed = [t for t in state.values() if isinstance(t, torch.Tensor) and device.device_of(t) is not None]
        for tensor in placed:
            place, value = device.device_of(tensor), rng.randrange(2)
            assert place is not None
            device.launch(place, lambda tensor=tensor, value=value: tensor.data.fill_(value))
        saver = make(staging=staging)
        saver.know(state)
        handle = saver.save(state)
        assert saver.ended(handle) is None
        for tensor in placed:  # a blocking copy: they may be changed now, by whomever
            tensor.data.zero_()
        device.drain()
        found = saver.content(handle)
        assert str(handle.save_id) in saver.process.rings
        # What lies on the host was not changed, and what lies on devices is what the kernels made.
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and device.device_of(tensor) is None:
                assert found[name] == bits(tensor), name


def test_random_pieces_of_random_strides_are_the_elements_in_their_order(rng: random.Random) -> None:
    for _ in range(300):
        shape = [rng.randrange(1, 6) for _ in range(rng.randrange(0, 5))]
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        if tensor.dim() > 1:
            tensor = tensor.permute(*rng.sample(range(tensor.dim()), tensor.dim()))
        flat = tensor.reshape(-1)
        start = rng.randrange(0, flat.numel() + 1)
        end = rng.randrange(start, flat.numel() + 1)
        found = [run.reshape(-1) for run in runs(tensor, start, end)]
        assert torch.equal(torch.cat([*found, flat[:0]]), flat[start:end])


def test_a_state_that_fits_is_staged_whole(make: Make, rng: random.Random) -> None:
    state = state_of(rng)
    measured = make()
    measured.know(state)
    saver = make(arena_limit_bytes=measured.plan.body_nbytes + 69 * UNIT)
    assert saver.ended(saver.save(state)) is None
    assert not saver.process.rings


def test_a_limit_below_two_segments_is_refused(make: Make, rng: random.Random) -> None:
    saver = make(arena_limit_bytes=4 * UNIT)
    error = saver.ended(saver.save(state_of(rng)))
    assert isinstance(error, InsufficientMemoryError)
    assert error.limit == 4 * UNIT


def test_the_report_says_that_it_was_a_ring_and_the_log_says_why(
    make: Make, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make()
    state = state_of(rng)
    handle = saver.save(state)
    assert saver.ended(handle) is None
    nbytes = handle.staged.result(0).details["ring_nbytes"]
    assert 0 < nbytes < 16 * UNIT
    said = [r for r in caplog.records if "takes as long as writing" in r.getMessage()]
    assert [r.levelname for r in said] == ["WARNING"]
    saver.save(state)
    assert len([r for r in caplog.records if "takes as long as writing" in r.getMessage()]) <= 2


def test_a_worker_that_frees_nothing_ends_the_save_and_the_slot_is_used_again(make: Make, rng: random.Random) -> None:
    saver = make(slot_timeout_s=0.05)
    stream = saver.process.stream
    hold(saver)
    state = state_of(rng)
    error = saver.ended(saver.save(state))
    assert isinstance(error, SlotTimeoutError)
    assert error.timeout_s == 0.05
    saver.process.stream = stream  # type: ignore[method-assign]
    object.__setattr__(saver.config, "slot_timeout_s", DEADLINE_S)  # the reader of a busy machine may take longer
    assert saver.ended(saver.save(state)) is None
    assert len(saver.process.made) == 1


class Between:
    """Lets a ring's worker be dead at some segment, and another one be found after so many looks, or never."""

    def __init__(self, saver: Saver, n_looks: int) -> None:
        self.looks, self._left, self._saver = 0, n_looks, saver
        self._stream = saver.process.stream
        saver.process.stream = self.stream  # type: ignore[method-assign]

    def stream(self, *arguments: Any) -> Any:
        check = self._stream(*arguments)
        reader = self._saver.process.rings[str(arguments[0])]
        reader.held.set()
        reader.between.set()

        def look() -> bool:
            self.looks += 1
            if self.looks == self._left:
                reader.between.clear()
                reader.held.clear()
            return check()

        return look


@pytest.mark.parametrize("staging", ["blocking", "overlap"])
def test_a_worker_that_dies_is_waited_for_until_another_one_goes_on(
    make: Make, rng: random.Random, staging: str
) -> None:
    state = state_of(rng)
    saver = make(staging=staging)
    between = Between(saver, n_looks=40)
    saver.know(state)
    handle = saver.save(state)
    assert saver.ended(handle) is None
    assert between.looks > 40
    wanted = {name: bits(tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    assert saver.content(handle) == wanted


def test_another_worker_that_never_comes_ends_the_save_with_a_typed_error(make: Make, rng: random.Random) -> None:
    saver = make(slot_timeout_s=0.02, worker_start_timeout_s=0.05)
    Between(saver, n_looks=-1)
    began = time.monotonic()
    error = saver.ended(saver.save(state_of(rng)))
    assert isinstance(error, SlotTimeoutError)
    assert "no other worker was found" in str(error)
    assert time.monotonic() - began >= 0.07


@pytest.mark.parametrize("staging", ["blocking", "overlap"])
def test_what_the_worker_says_meanwhile_ends_the_copy(make: Make, rng: random.Random, staging: str) -> None:
    saver = make(staging=staging)
    hold(saver, lambda reader: setattr(reader, "error", SaveFailedError("no room", code="ENOSPC")))
    error = saver.ended(saver.save(state_of(rng)))
    assert isinstance(error, SaveFailedError)
    assert error.code == "ENOSPC"
    assert len(saver.process.withdrawn) == 1


# ---- behind the training


class Owned:
    """Parameters that an attached optimizer owns, and a statistic that it does not."""

    def __init__(self, saver: Saver, statistic: int = 10) -> None:
        self.parameters = [torch.nn.Parameter(torch.randn(30_000)) for _ in range(3)]
        self.statistic = torch.zeros(statistic)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        saver.stager.overlap.attach(self.optimizer)

    def state(self) -> dict[str, Any]:
        return {**{f"p{n}": p for n, p in enumerate(self.parameters)}, "statistic": self.statistic}


def held_saver(make: Make, **fields: Any) -> Saver:
    """Return a saver whose rings are read only when `held` of their readers is cleared."""
    saver = make(**fields)
    hold(saver)
    return saver


def test_what_an_optimizer_owns_goes_through_the_ring_behind_the_training_and_all_else_is_cloned(make: Make) -> None:
    saver = held_saver(make)
    owned = Owned(saver)
    state = owned.state()
    saver.know(state)
    wanted = {name: bits(tensor) for name, tensor in state.items()}
    handle = saver.save(state)
    assert not handle.staged.done(), "it waits for the worker, and nobody waits for it"
    owned.statistic.add_(1)
    saver.process.rings[str(handle.save_id)].held.clear()
    saver.stager.overlap.fence.wait()
    assert handle.staged.done()
    assert saver.ended(handle) is None
    assert saver.content(handle) == wanted


@pytest.mark.parametrize("limit", [16 * UNIT, None])
def test_while_every_core_is_busy_a_ring_is_filled_behind_the_training_and_a_whole_slot_is_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(overlap, "has_idle_core", lambda: False)
    saver = held_saver(make, arena_limit_bytes=limit)
    assert saver.config.staging == "auto"
    owned = Owned(saver)
    handle = saver.save(owned.state())
    assert handle.staged.done() is (limit is None)
    if limit:  # it waits for storage most of its time
        saver.process.rings[str(handle.save_id)].held.clear()
    assert saver.ended(handle) is None


def test_much_that_no_optimizer_owns_makes_the_save_blocking(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_copy, "MAX_CLONED_NBYTES", 1000)
    saver = make()
    owned = Owned(saver, statistic=1000)
    handle = saver.save(owned.state())
    assert handle.staged.done()
    assert saver.ended(handle) is None


def test_the_fence_waits_beyond_its_time_as_long_as_something_is_written(make: Make) -> None:
    saver = held_saver(make)
    owned = Owned(saver)
    handle = saver.save(owned.state())
    reader = saver.process.rings[str(handle.save_id)]
    (copy,) = saver.stager.overlap.copier._copies
    patience, asked = copy.extended_deadline, []

    def asked_for_patience() -> float:
        asked.append(True)
        reader.held.clear()
        return patience()

    copy.extended_deadline = asked_for_patience  # type: ignore[method-assign]
    saver.stager.overlap.fence.wait(0.0)
    assert asked
    assert saver.ended(handle) is None


def test_a_ring_that_was_torn_is_never_sealed(make: Make) -> None:
    saver = held_saver(make)
    owned = Owned(saver)
    handle = saver.save(owned.state())
    with torch.no_grad():
        owned.parameters[1].add_(1)
    saver.process.rings[str(handle.save_id)].held.clear()
    error = saver.ended(handle)
    assert isinstance(error, SnapshotTornError)
    assert error.fqn == "p1"
    assert not saver.process.written


@pytest.mark.parametrize("overlap_check", ["hash", "sample"])
def test_what_no_version_counter_sees_of_the_sources_of_a_ring_is_found(make: Make, overlap_check: str) -> None:
    saver = held_saver(make, overlap_check=overlap_check)
    owned = Owned(saver)
    handle = saver.save(owned.state())
    owned.parameters[2].data[:] = 1e9
    saver.process.rings[str(handle.save_id)].held.clear()
    assert isinstance(saver.ended(handle), SnapshotTornError)


def test_closing_gives_a_ring_up_at_once(device: SimulatedDevice) -> None:
    saver = Saver(device, arena_limit_bytes=16 * UNIT, slot_timeout_s=20.0)
    hold(saver)
    owned = Owned(saver)  # its optimizer owns only as long as it lives
    handle = saver.save(owned.state())
    saver.close()
    error = saver.ended(handle)
    assert isinstance(error, Exception)
    assert not isinstance(error, StagingError)
    assert not saver.process.written
