"""`overlap_check`: which writes that no version counter sees are found, to what is copied behind the training."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import states
import torch
from overlapping import COPIER
from simulated_saves import Saver, bits

from asyncckpt.errors import SnapshotTornError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping
from asyncckpt.staging import mutation_check
from asyncckpt.staging.cpu_copy import CopyWork, SlotImage
from asyncckpt.staging.mutation_check import (
    FRACTION,
    MAX_SAMPLED_TENSORS,
    PIECES,
    SMALL_SAVES,
    WINDOW_NBYTES,
    MutationCheck,
    SamplingRounds,
    Windows,
    sampled_positions,
)
from asyncckpt.state_dict.flatten import flatten
from tests.simulated_device import SimulatedDevice

pytestmark = [
    pytest.mark.usefixtures("all_behind"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

SAVE_ID = SaveId(1, 2, "0123456789ab")


class Writer:
    """Writes while the copier copies: after so many boxes of each kind; `None`: nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write: Callable[[], Any] | None = None
        self.large = self.small = 0
        copy = SlotImage.copy

        def copied(image: SlotImage, tensors: Any, work: CopyWork, *options: Any) -> None:
            if self.write is None or threading.current_thread().name != COPIER:
                return copy(image, tensors, work, *options)
            copy(image, tensors, CopyWork(work.large[: self.large], work.small[: self.small]), *options)
            self.write()
            return copy(image, tensors, CopyWork(work.large[self.large :], work.small[self.small :]), *options)

        monkeypatch.setattr(SlotImage, "copy", copied)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(monkeypatch)


def some_tensor(rng: random.Random) -> Any:
    """A tensor of any dtype and layout; tiny ones, and empty ones, too."""
    dtype = rng.choice(states.ALL_DTYPES)
    rows, columns = rng.choice([(0, 4), (1, 1), (1, 7), (3, 5), (40, 40), (130, 300), (300, 131)])
    made = states.tensor_of(dtype, (rows, columns), rng.randrange(1 << 30))
    kind = rng.randrange(6)
    if kind == 0:
        return made.t()
    if kind == 1:
        return made[::2]
    if kind == 2 and columns > 1:
        return made[:, 1:]
    if kind == 3:
        return made.view(-1)
    return torch.nn.Parameter(made) if dtype.is_floating_point and kind == 4 else made


def overwrite(tensor: Any) -> None:
    """Write other bits to every element, as no version counter sees it."""
    hidden = tensor.data
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: None}[tensor.element_size()]
    if tensor.dtype is torch.bool or integer is None:
        hidden.copy_(~hidden if tensor.dtype is torch.bool else hidden + 1)
        if integer is None:
            hidden.copy_(torch.ones_like(hidden))
    else:
        bits = hidden.view(integer)
        bits.copy_(bits ^ torch.tensor(1, dtype=integer))


# ---- which windows


def windows_for(tensor: Any, fraction: int = FRACTION, n_pieces: int = PIECES) -> Windows:
    return Windows(tuple(tensor.shape), tensor.stride(), tensor.element_size(), fraction, n_pieces)


def numbered(layout: str, rng: random.Random) -> Any:
    """A tensor of this layout and some shape, with another number in each place of its memory."""
    n_dimensions = 4 if layout == "channels_last" else rng.randrange(2, 5)
    sizes = [1, 2, 3, 5, 8, 17, 64, 100]
    shape = [60_000]
    while math.prod(shape) >= 60_000:
        shape = [rng.choice(sizes) for _ in range(n_dimensions)]

    def arange(*sizes: int) -> Any:
        return torch.arange(math.prod(sizes)).view(sizes)

    if layout == "channels_last":
        return arange(*(shape[n] for n in (0, 2, 3, 1))).permute(0, 3, 1, 2)
    if layout == "transposed":
        return arange(*shape).permute(*rng.sample(range(len(shape)), len(shape)))
    if layout == "rows with gaps":
        return arange(*shape[:-1], shape[-1] + 3)[..., 2 : 2 + shape[-1]]
    if layout == "elements with gaps":
        return arange(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return arange(*shape)[:, None].expand(shape[0], rng.choice([2, 9]), *shape[1:])
    return arange(*shape)


LAYOUTS = ["row-major", "transposed", "channels_last", "rows with gaps", "elements with gaps", "expanded"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_of_every_layout_is_in_a_window_within_the_bound(layout: str, rng: random.Random) -> None:
    for _ in range(15):
        tensor = numbered(layout, rng)
        fraction, n_pieces = rng.choice([FRACTION, FRACTION, 10, 1]), rng.choice([PIECES, 1])
        windows = windows_for(tensor, fraction, n_pieces)
        memory = torch.arange(tensor.untyped_storage().nbytes() // 8)
        copied, seen = tensor.reshape(-1), torch.zeros(tensor.numel(), dtype=torch.bool)
        first, largest = rng.randrange(1000), 1
        for turn in range(first, first + windows.count):
            pieces, start, copied_at = windows.at(turn)
            assert 1 <= pieces <= n_pieces
            largest = max(largest, pieces * windows.run)
            assert pieces * windows.run * 8 <= max(8, min(WINDOW_NBYTES, tensor.numel() * 8 // fraction))
            for n in range(pieces):
                at = tensor.storage_offset() + start + n * windows.step
                places = copied_at + n * windows.copied_step + windows.copied_stride * torch.arange(windows.run)
                assert torch.equal(memory[at : at + windows.run], copied[places]), "the slot's elements are others"
                seen[places] = True
        assert seen.all(), f"not within {windows.count} saves"
        assert windows.count <= max(SMALL_SAVES, 2 * PIECES * tensor.numel() // largest + 2)
        if layout == "row-major" and fraction == FRACTION and n_pieces == PIECES:
            assert windows.count <= max(SMALL_SAVES, tensor.nbytes / WINDOW_NBYTES + 2)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_of_row_major_tensors_the_saves_that_reach_every_byte_are_bounded(itemsize: int, rng: random.Random) -> None:
    for n in [*range(1, 600), *(rng.randrange(1 << rng.randrange(9, 34)) + 1 for _ in range(500))]:
        count = Windows((n,), (1,), itemsize, FRACTION, PIECES).count
        assert count <= max(SMALL_SAVES, n * itemsize / WINDOW_NBYTES + 2)
        assert count >= n / max(1, min(n // FRACTION, WINDOW_NBYTES // itemsize)) * 0.99


@pytest.mark.parametrize("n_tensors", [0, 1, 7, *(n * MAX_SAMPLED_TENSORS + more for n in (1, 130) for more in (0, 1))])
def test_every_tensor_has_its_turn_and_never_more_than_the_limit_at_once(n_tensors: int) -> None:
    period = max(1, -(-n_tensors // MAX_SAMPLED_TENSORS))
    looks: dict[int, list[int]] = {}
    for turn in range(5, 5 + 3 * period):
        positions, number, fraction = sampled_positions(n_tensors, turn, MAX_SAMPLED_TENSORS)
        assert len(positions) <= MAX_SAMPLED_TENSORS
        assert len(positions) / fraction <= max(n_tensors, 1) / 100, "the share of equal tensors that is looked at"
        for n in positions:
            looks.setdefault(n, []).append(number)
    assert sorted(looks) == list(range(n_tensors))
    for numbers in looks.values():
        assert numbers == list(range(numbers[0], numbers[0] + 3)), "each save takes the next window"


@pytest.mark.parametrize("n_tensors", [1, 100, MAX_SAMPLED_TENSORS, 7 * MAX_SAMPLED_TENSORS])
def test_less_than_one_percent_is_looked_at(n_tensors: int, rng: random.Random) -> None:
    tensor = torch.empty(rng.randrange(16_384, 1_000_000), device="meta")
    turns, plan = SamplingRounds(), object()
    for _ in range(5):
        chosen = mutation_check.choose_samples(
            range(n_tensors),
            turns.next(plan),
            MAX_SAMPLED_TENSORS,
            lambda some: [mutation_check.Source(n, tensor, None) for n in some],
        )
        assert 0 < sum(place[0] * windows.run for _, windows, place in chosen) < 0.01 * tensor.numel() * n_tensors


def test_a_tensor_whose_layout_changes_in_the_same_structure_gets_the_windows_of_its_new_layout() -> None:
    turns, plan = SamplingRounds(), object()
    for tensor in (
        torch.zeros(300, 200),
        torch.zeros(200, 300).t(),
        torch.zeros(300, 201)[:, 1:],
        torch.zeros(30, 10),
        torch.zeros(300, 200, dtype=torch.float16),
    ):
        ((_, windows, _),) = mutation_check.choose_samples(
            [4], turns.next(plan), MAX_SAMPLED_TENSORS, lambda _, t=tensor: [mutation_check.Source(0, t, None)]
        )
        expected = windows_for(tensor)
        assert (windows.count, windows.step, windows.run) == (expected.count, expected.step, expected.run)


# ---- what is found


@pytest.mark.parametrize("case", range(8))
def test_a_mixture_whose_every_tensor_was_written_to_is_always_found(
    saver: Saver, writer: Writer, rng: random.Random, case: int
) -> None:
    rng.seed(rng.random() + case)
    state = {f"t{n}": some_tensor(rng) for n in range(rng.randrange(2, 12))}
    state["some"] = torch.ones(rng.choice([1, 1000, 100_000]))
    for _ in range(4):
        writer.write = None
        assert saver.ended(saver.save(state)) is None
        writer.large, writer.small = rng.randrange(4), rng.randrange(8)
        writer.write = lambda: [overwrite(tensor) for tensor in state.values()]
        error = saver.ended(saver.save(state))
        assert isinstance(error, SnapshotTornError)
        assert error.fqn in state
        assert "no version counter" in str(error)


@pytest.mark.parametrize("layout", ["row-major", "transposed", "strided"])
def test_a_write_to_the_whole_of_one_tensor_of_any_dtype_is_found_at_once(
    saver: Saver, writer: Writer, layout: str
) -> None:
    for dtype in states.ALL_DTYPES:
        tensor = states.tensor_of(dtype, (60, 70), 3)
        tensor = {"row-major": tensor, "transposed": tensor.t(), "strided": tensor[::2, 1::3]}[layout]
        writer.write = partial(overwrite, tensor)
        error = saver.ended(saver.save({"a": torch.zeros(500), "b": tensor, "c": torch.zeros(500)}))
        assert isinstance(error, SnapshotTornError) and error.fqn == "b", dtype


@pytest.mark.parametrize("when", ["before its copy", "after its copy"])
@pytest.mark.parametrize("layout", ["row-major", "transposed", "channels_last", "rows with gaps", "elements with gaps"])
def test_a_write_to_one_element_is_found_within_the_bound_of_saves(
    saver: Saver, writer: Writer, rng: random.Random, layout: str, when: str
) -> None:
    for _ in range(4):
        tensor = numbered(layout, rng)
        while not 1 < tensor.numel() < 4000:
            tensor = numbered(layout, rng)
        state = {"a": torch.zeros(300), "b": tensor, "c": torch.zeros(5)}
        place = tuple(rng.randrange(size) for size in tensor.shape)
        writer.large = writer.small = 0 if when == "before its copy" else 9

        def write(tensor: Any = tensor, place: tuple[int, ...] = place) -> None:
            tensor.data[place] += 1

        writer.write = write
        for _ in range(windows_for(tensor).count):
            if (error := saver.ended(saver.save(state))) is not None:
                break
        assert isinstance(error, SnapshotTornError) and error.fqn == "b"


def test_a_value_that_is_there_only_during_the_copy_is_found_in_the_slot(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where other weights are swapped in for an evaluation, and back."""
    swapped = {
        "row-major": torch.rand(300, 200),
        "transposed": torch.rand(200, 300).t(),
        "gaps": torch.rand(300, 400)[:, ::2],
        "odd rows": torch.rand(300, 201)[:, 1:],
    }
    copy = SlotImage.copy
    for name, tensor in swapped.items():

        def swapped_in(image: SlotImage, *arguments: Any, tensor: Any = tensor) -> None:
            if threading.current_thread().name == COPIER:
                tensor.data.neg_()
            copy(image, *arguments)
            if threading.current_thread().name == COPIER:
                tensor.data.neg_()

        monkeypatch.setattr(SlotImage, "copy", swapped_in)
        error = saver.ended(saver.save({"w": tensor}))
        assert isinstance(error, SnapshotTornError) and error.fqn == "w", name


@pytest.mark.parametrize("layout", ["row-major", "transposed", "rows with gaps"])
def test_memory_that_goes_away_before_the_last_look_is_an_error_and_no_crash(layout: str) -> None:
    with contextlib.closing(Mapping(-1, 1 << 20)) as mapping:
        memory = torch.frombuffer((ctypes.c_char * (1 << 20)).from_address(mapping.address), dtype=torch.float32)
        rows = memory.view(512, 512)
        tensor = {"row-major": rows, "transposed": rows.t(), "rows with gaps": rows[:, 1:]}[layout]
        watch = MutationCheck(flatten({"w": tensor}), frozenset([0]), [], save_id=SAVE_ID, step=4, path="/x")
        sampling_round = SamplingRounds().next(object())
        source = mutation_check.Source(0, tensor, None)
        watch.sample(mutation_check.choose_samples([0], sampling_round, MAX_SAMPLED_TENSORS, lambda _: [source]))
        watch.check()
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(mapping.address), ctypes.c_size_t(1 << 20), 0) == 0
        with pytest.raises(SnapshotTornError, match="share_memory_"):
            watch.check()


FOUND = {"off": 0, "sample": 1, "hash": FRACTION}


@pytest.mark.parametrize("saver", [{"overlap_check": c} for c in FOUND], indirect=True)
def test_a_write_to_one_window_of_many_is_found_never_sometimes_and_always(saver: Saver, writer: Writer) -> None:
    tensor = torch.zeros(FRACTION * 100)
    windows = windows_for(tensor)
    writer.write = lambda: tensor.data[: windows.run].add_(1)
    errors = [saver.ended(saver.save({"w": tensor})) for _ in range(windows.count)]
    n_found = sum(isinstance(error, SnapshotTornError) for error in errors)
    assert windows.count == FRACTION and n_found == FOUND[saver.config.overlap_check]


@pytest.mark.parametrize("saver", [{"overlap_check": c} for c in FOUND], indirect=True)
def test_what_nobody_writes_to_is_never_torn(saver: Saver, rng: random.Random) -> None:
    state = {**states.every_tensor(), **{f"r{n}": some_tensor(rng) for n in range(20)}}
    for _ in range(10):
        assert saver.ended(saver.save(state)) is None


def test_one_box_of_a_tensor_that_is_cut_over_files_is_looked_at_like_any_other(
    device: SimulatedDevice, writer: Writer
) -> None:
    saver = Saver(device, staging="overlap", max_shard_bytes=64 * 1024)
    tensor = torch.zeros(500, 300)
    writer.write = lambda: overwrite(tensor[450:])
    errors = [saver.ended(saver.save({"w": tensor})) for _ in range(3)]
    assert all(isinstance(error, SnapshotTornError) and error.fqn == "w" for error in errors)
    saver.close()


# ---- on devices


ON_DEVICES: list[dict[str, Any]] = [{}, {"use_pinned_memory": False}, {"use_non_blocking_copy": False}]


@pytest.mark.parametrize("saver", ON_DEVICES, indirect=True)
def test_a_kernel_that_no_fence_holds_back_is_found_where_it_writes_before_the_copies_have_ended(
    saver: Saver, device: SimulatedDevice, small_pieces: None, state: dict[str, Any]
) -> None:
    for n in range(8):
        assert saver.ended(saver.save(state)) is None
        device.drain()
        device.frozen = True
        handle = saver.save(state)
        assert not handle.staged.done(), "nobody has waited for a device"
        stream = device.new_stream(0)  # which waits for nothing: it runs beside the copies, or after them
        for name in ("large", "small2"):
            stream.queue.append(("run", partial(state[name].data.fill_, float(n + 7))))
        before = {name: tensor.clone() for name, tensor in state.items()}
        saver.know(state)
        device.frozen = False
        error = saver.ended(handle)
        if error is None:  # it ran after everything, or before everything: then nothing is mixed
            assert saver.content(handle)["large"] in (
                bits(before["large"]),
                bits(torch.full_like(before["large"], float(n + 7))),
            )
        else:
            assert isinstance(error, SnapshotTornError)
            assert error.fqn in ("large", "small2")
        device.drain()
    assert not device.violations


@pytest.mark.parametrize("saver", ON_DEVICES, indirect=True)
def test_steps_behind_the_fence_never_tear_what_lies_on_devices(
    saver: Saver, device: SimulatedDevice, small_pieces: None, state: dict[str, Any]
) -> None:
    for n in range(6):
        expected = saver.expect(state)
        handle = saver.save(state)
        device.some()
        saver.stager.overlap.fence.wait()
        for tensor in state.values():
            index = device.device_of(tensor)
            if index is None:
                tensor.data.fill_(float(n))
            elif tensor.numel():
                device.launch(index, partial(tensor.data.fill_, float(n)))
        device.some()
        assert saver.ended(handle) is None, "the fence puts what comes next behind the windows, too"
        assert saver.content(handle) == expected
        device.drain()
    assert not device.violations


# ---- DTensors


def test_shards_of_dtensors_are_sampled(saver: Saver, writer: Writer) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        local = torch.zeros(100, 30)
        mesh = init_device_mesh("cpu", (1,))
        whole_of = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        assert saver.ended(saver.save({"w": whole_of})) is None
        writer.write = partial(overwrite, local)
        error = saver.ended(saver.save({"w": whole_of}))
    finally:
        dist.destroy_process_group()
    assert isinstance(error, SnapshotTornError) and error.fqn == "w"
