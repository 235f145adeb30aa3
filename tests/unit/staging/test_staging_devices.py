"""Tensors of devices: what is in a checkpoint is what they were at save(), whenever the devices get to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_saves import PIECE_NBYTES, Saver, bits, note_seals, two_devices, use_small_pieces  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from asyncckpt.errors import SnapshotTornError  # noqa: E402
from asyncckpt.staging import copy_engine, device_copy, pinned_memory  # noqa: E402
from asyncckpt.staging.device_copy import Transfer  # noqa: E402
from tests.simulated_device import SimulatedDevice  # noqa: E402

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2fnuz),
)


@pytest.fixture(autouse=True)
def all_behind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        copy_all_behind(patch.setattr)
        yield


@pytest.fixture
def device(rng: random.Random) -> Iterator[SimulatedDevice]:
    with two_devices(rng) as made:
        yield made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


class Training:
    """A random state on two devices and the host, an optimizer that owns some of it, and kernels that write to it."""

    def __init__(self, device: SimulatedDevice, rng: random.Random) -> None:
        self.device, self.rng = device, rng
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, int | None] = {}
        owned = []
        for n in range(rng.randrange(2, 14)):
            place = rng.choice([None, 0, 0, 1])
            tensor = self._tensor(place)
            if tensor.is_floating_point() and rng.random() < 0.6:
                owned.append(torch.nn.Parameter(tensor))
            name = f"t{n}"
            self.tensors[name], self.places[name] = tensor, place
        if not owned:
            owned.append(torch.nn.Parameter(device.put(torch.zeros(3), 0)))
        self.optimizer = torch.optim.SGD(owned, lr=1.0)
        self.owned = {t.data_ptr() for t in owned}

    def _tensor(self, place: int | None) -> torch.Tensor:
        rng = self.rng
        dtype = rng.choice(DTYPES)
        elements = rng.choice([1, 3, 17, 100, 200, 1500, 9000])
        raw = torch.randint(0, 2 if dtype is torch.bool else 100, (elements * dtype.itemsize,), dtype=torch.uint8)
        tensor = raw.view(dtype)
        if rng.random() < 0.2:
            tensor = tensor[: elements // 2 * 2].view(-1, 2).t()
        return tensor if place is None else self.device.put(tensor, place)

    def state(self) -> dict[str, Any]:
        return dict(self.tensors)

    def write(self, names: list[str], *, in_kernels: bool = True) -> None:
        """Write new values: on devices by kernels in the current streams, on the host at once."""
        for name in names:
            tensor, place, value = self.tensors[name].detach(), self.places[name], self.rng.randrange(1, 100)

            def work(tensor: torch.Tensor = tensor, value: int = value) -> None:
                tensor.data.fill_(value)

            if place is None:
                work()
            else:
                self.device.launch(place, work)

    def values(self) -> dict[str, bytes]:
        """Return what everything is once all kernels have run."""
        self.device.drain()
        return {name: bits(tensor) for name, tensor in self.tensors.items()}

    def free(self) -> list[str]:
        """Return the names of what may be changed as soon as save() has returned."""
        return [n for n, t in self.tensors.items() if t.data_ptr() not in self.owned]

    def step(self) -> None:
        """Change everything, behind the hooks."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = None
        self.optimizer.step()
        self.write(list(self.tensors))


def values_at_save(training: Training, rng: random.Random) -> dict[str, bytes]:
    """Enqueue kernels that make the state, and return what they will make of it: without running them."""
    training.device.drain()
    before = rng.getstate()
    training.write(list(training.tensors))
    training.device.drain()
    expected = {name: bits(tensor) for name, tensor in training.tensors.items()}
    for name, tensor in training.tensors.items():  # old values again, and the kernels once more
        if training.places[name] is not None:
            tensor.detach().data.fill_(0)
    rng.setstate(before)
    training.write(list(training.tensors))
    return expected


def save_and_go_on(saver: Saver, training: Training, rng: random.Random) -> tuple[Any, dict[str, bytes]]:
    """Save behind kernels that are still to run, and go on as a training does; returns handle and expected values."""
    expected = values_at_save(training, rng)
    training.device.some()
    handle = saver.save(training.state())
    training.write(training.free())
    training.device.some()
    training.step()
    training.device.some()
    return handle, expected


@pytest.mark.parametrize("mode", ["auto", "blocking", "overlap", "device"])
@pytest.mark.parametrize("case", range(34))
def test_random_states_are_saved_as_they_were(
    device: SimulatedDevice, rng: random.Random, small_pieces: None, mode: str, case: int
) -> None:
    rng.seed(rng.random() + case)
    torch.manual_seed(case)
    training = Training(device, rng)
    pinned, non_blocking = rng.random() < 0.8, rng.random() < 0.8
    saver = Saver(device, staging=mode, use_pinned_memory=pinned, use_non_blocking_copy=non_blocking)
    saver.stager.overlap.attach(training.optimizer)
    for _ in range(3):
        handle, expected = save_and_go_on(saver, training, rng)
        assert saver.ended(handle) is None
        saver.know(training.state())
        assert saver.content(handle) == expected
        assert device.current == 0 and not device.violations
    device.drain()
    saver.close()


# ---- the simulation itself


def without_the_wait_for_producers(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.ignored = lambda stream, event: stream.name.startswith("side")


def without_the_wait_of_later_kernels(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Transfer.start

    def started(transfer: Transfer) -> None:
        device.ignored = lambda stream, event: stream.name.startswith("default")
        start(transfer)
        device.ignored = lambda stream, event: False

    monkeypatch.setattr(Transfer, "start", started)


def without_the_wait_of_the_step(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "make_current_stream_wait", lambda transfer: None)


def without_the_wait_for_the_end(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "ended", lambda transfer: True)


@pytest.mark.parametrize(
    "mutation",
    [
        without_the_wait_for_producers,
        without_the_wait_of_later_kernels,
        without_the_wait_of_the_step,
        without_the_wait_for_the_end,
    ],
)
def test_the_simulation_sees_every_wait_that_is_missing(
    rng: random.Random, small_pieces: None, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    for case in range(60):
        device = SimulatedDevice(rng)
        mutation(device, monkeypatch)
        torch.manual_seed(case)
        training = Training(device, rng)
        saver = Saver(device)
        saver.stager.overlap.attach(training.optimizer)
        handle, expected = save_and_go_on(saver, training, rng)
        error = saver.ended(handle)
        saver.know(training.state())
        wrong = error is not None or saver.content(handle) != expected
        device.drain()
        saver.close()
        monkeypatch.undo()
        monkeypatch.setattr(pinned_memory, "PIECE_NBYTES", PIECE_NBYTES)
        if wrong:
            return
    pytest.fail("60 random saves have not shown it")


# ---- order


@pytest.fixture
def saver(device: SimulatedDevice, small_pieces: None, request: pytest.FixtureRequest) -> Iterator[Saver]:
    made = Saver(device, **getattr(request, "param", {"staging": "overlap"}))
    yield made
    device.frozen = False
    device.drain()
    made.close()


@pytest.fixture
def state(device: SimulatedDevice) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "large": device.put(torch.randn(12_000), 0),
        **{f"small{n}": device.put(torch.randn(n + 1), 0) for n in range(30)},
        "other": device.put(torch.randn(5_000), 1),
        "host": torch.randn(30_000),
    }


OFF = {"staging": "overlap", "overlap_check": "off"}  # what a sample has read comes over after the copies
MODES = [{"staging": "blocking"}, OFF, {**OFF, "use_non_blocking_copy": False}]


@pytest.mark.parametrize("saver", MODES, indirect=True)
def test_producer_copies_event_and_seal_come_in_this_order(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    note_seals(device, monkeypatch)
    assert saver.ended(saver.save(state)) is None
    seal = next(n for n, call in enumerate(device.calls) if call.name == "seal")
    for index in (0, 1):
        mine = [(n, c) for n, c in enumerate(device.calls) if c.stream in (f"side {index}", f"default {index}")]
        produced = next(c.what for _, c in mine if c == ("record", f"default {index}", c.what))
        waits = [n for n, c in mine if c == ("wait", f"side {index}", produced)]
        copies = [n for n, c in mine if c.name == "copy"]
        end, event = [(n, c.what) for n, c in mine if c == ("record", f"side {index}", c.what)][-1]
        known = [n for n, c in enumerate(device.calls) if c == ("done", None, (event, True))]
        assert waits[0] < copies[0] <= copies[-1] < end < seal
        assert known and known[0] < seal


def test_save_and_fence_return_while_no_kernel_has_run(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    expected = {name: bits(tensor) for name, tensor in state.items()}
    saver.know(state)
    device.frozen = True
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    state.pop("host").fill_(7.0)  # little enough to have been copied at once
    for name, tensor in state.items():
        device.launch(1 if name == "other" else 0, partial(tensor.data.fill_, 7.0))
    assert not handle.staged.done() and device.busy
    device.frozen = False
    assert saver.ended(handle) is None
    assert saver.content(handle) == expected


def test_the_fence_waits_for_the_host_s_part_only(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "FEW_NBYTES", 0)
    expected = {name: bits(tensor) for name, tensor in state.items()}
    saver.know(state)
    device.frozen = True
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    state["host"].fill_(7.0)
    assert not handle.staged.done()
    device.frozen = False
    assert saver.ended(handle) is None
    assert saver.content(handle) == expected


def test_before_a_load_even_the_devices_copies_are_waited_for(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    saver.stager.overlap.fence.wait(ordered=False)
    assert handle.staged.done()


def test_a_graph_that_is_captured_is_left_alone(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    device.frozen, device.captured = True, True
    handle = saver.save(state)
    before = len([call for call in device.calls if call.name == "wait"])
    saver.stager.overlap.fence.wait()
    assert len([call for call in device.calls if call.name == "wait"]) == before
    device.frozen = False
    assert saver.ended(handle) is None


def test_small_neighbours_go_over_together(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    assert saver.ended(saver.save(state)) is None
    over = sum(c.what[1] for c in device.calls if c.name == "copy" and c.what[0] == "to the host")
    assert over < 12, "30 small tensors, and pieces of three large ones"


def test_a_state_that_is_not_contiguous_needs_no_room_for_another_one(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "BUFFER_NBYTES", 300_000)
    made: list[tuple[StorageWeakRef, int]] = []
    held, allocate = [0], device.allocate

    def noted(nbytes: int, index: int) -> torch.Tensor:
        tensor = allocate(nbytes, index)
        made.append((StorageWeakRef(tensor.untyped_storage()), nbytes))
        held.append(sum(n for storage, n in made if not storage.expired()))
        return tensor

    monkeypatch.setattr(device, "allocate", noted)
    state = {f"w{n}": device.put(torch.randn(200, 150), 0).t() for n in range(20)}
    saver = Saver(device, staging="blocking", use_pinned_memory=False)  # what is enqueued has run, so that it shows
    saver.know(state)
    handle = saver.save(state)
    assert saver.ended(handle) is None
    assert saver.content(handle) == {name: bits(tensor) for name, tensor in state.items()}
    assert len(made) == 20 and max(held) <= 300_000 + 2 * 120_000
    saver.close()


def test_sources_live_until_their_copies_have_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    saver.know(state)
    expected = {name: bits(tensor) for name, tensor in state.items()}
    watched = [StorageWeakRef(state[name].untyped_storage()) for name in ("large", "small3", "other")]
    device.frozen = True
    handle = saver.save(state)
    state.clear()
    assert not any(storage.expired() for storage in watched)
    device.frozen = False
    assert saver.ended(handle) is None
    assert saver.content(handle) == expected
    assert all(storage.expired() for storage in watched), "and no longer"


@pytest.mark.parametrize("owned", [True, False])
def test_data_that_is_replaced_lives_until_its_copy_has_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], owned: bool
) -> None:
    parameter = torch.nn.Parameter(state["other"])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    saver.stager.overlap.attach(optimizer)
    state["replaced"] = parameter.detach() if owned else state["large"]
    expected = bits(state["replaced"])
    saver.know(state)
    device.frozen = True
    handle = saver.save(state)
    for tensor in (*state.values(), parameter):
        tensor.data = torch.empty(0)
    device.frozen = False
    assert saver.ended(handle) is None
    assert saver.content(handle)["other" if owned else "large"] == expected


# ---- torn snapshots


def test_a_write_past_the_fence_tears_and_one_behind_it_does_not(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    device.frozen = True
    torn = saver.save(state)
    state["large"].add_(0)
    saver.stager.overlap.fence.wait()
    device.frozen = False
    error = saver.ended(torn)
    assert isinstance(error, SnapshotTornError) and error.fqn == "large"
    device.frozen = True
    kept = saver.save(state)
    saver.stager.overlap.fence.wait()
    state["large"].add_(0)  # as a step does, whose kernels come after
    saver.stager.overlap.fence.wait()
    device.frozen = False
    assert saver.ended(kept) is None


@pytest.mark.parametrize("saver", [{"staging": "overlap", "overlap_check": "hash"}], indirect=True)
def test_digests_of_sources_make_the_fence_wait(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    assert handle.staged.done() and saver.ended(handle) is None


# ---- settings


@pytest.mark.parametrize("saver", [{"staging": "overlap", "use_pinned_memory": False}], indirect=True)
def test_without_pinned_memory_nothing_is_registered_and_the_fence_waits(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    assert handle.staged.done() and saver.ended(handle) is None
    assert not any(call.name == "register" for call in device.calls)


@pytest.mark.parametrize("saver", MODES, indirect=True)
def test_non_blocking_copies_are_those_that_were_asked_for(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    assert saver.ended(saver.save(state)) is None
    over = {c.what[2] for c in device.calls if c.name == "copy" and c.what[0] == "to the host"}
    assert over == {saver.config.use_non_blocking_copy}


def test_a_slot_is_pinned_once_and_unpinned_before_it_is_unmapped(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    note_seals(device, monkeypatch)
    for _ in range(4):
        assert saver.ended(saver.save(state)) is None
    pinned = [call.what[0] for call in device.calls if call.name == "register"]
    assert len(pinned) == len(set(pinned)) == -(-saver.process.made[0].memory.nbytes // PIECE_NBYTES) > 2
    saver.close()
    order = [call.name for call in device.calls if call.name in ("unregister", "unmap")]
    assert order == ["unregister"] * len(pinned) + ["unmap"]


def test_a_state_without_tensors_of_devices_touches_no_device(saver: Saver, device: SimulatedDevice) -> None:
    assert saver.ended(saver.save({"a": torch.ones(5)})) is None
    assert not device.calls


def test_prepare_pins(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    saver.stager.prepare(state)
    assert device.registered
    before = len(device.calls)
    assert saver.ended(saver.save(state)) is None
    assert not any(call.name == "register" for call in device.calls[before:])
